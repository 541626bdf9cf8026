// Kernels for tiles whose bytes are compressed. `compressed_engine.py` puts the definition of Part,
// and of CLEAR, END and the other constants, before this text.

// Read one LZW code of `width` bits, most significant bit first. A stream is loaded as aligned
// words, none of which lies completely beyond its last byte.
struct Bits {
    const unsigned int *next, *past;  // words
    unsigned long long bits;          // the next ones, from the highest bit
    int count;                        // of valid bits
};

static __device__ void refill(Bits &in) {
    if (in.count > 32) return;
    unsigned int word = 0;
    if (in.next < in.past) word = *in.next++;
    word = word << 24 | (word & 0xff00) << 8 | (word >> 8 & 0xff00) | word >> 24;
    in.bits |= (unsigned long long)word << (32 - in.count);
    in.count += 32;
}

static __device__ int take(Bits &in, int width) {
    refill(in);
    const int code = in.bits >> (64 - width);
    in.bits <<= width;
    in.count -= width;
    return code;
}

// Decode LZW (TIFF 6.0, section 13), one stream per block and thread: strings are short in tiles
// that take long. The string of table entry k is the output from where the code before the one that
// completed it begins, up to the first byte of that one. Entries follow each other in the output, so
// an entry ends one byte after the next one begins. size: bytes of a decoded tile; flags: set to 0
// if the stream decodes to as many bytes.
extern "C" __global__ void decode_lzw(const Part *parts, int size, int *flags) {
    __shared__ unsigned int starts[CODES + 1];
    const Part part = parts[blockIdx.x];
    unsigned char *out = (unsigned char *)part.target;
    const int skipped = part.source & 3;
    Bits in = {(const unsigned int *)(part.source - skipped),
               (const unsigned int *)((part.source + part.length + 3) & ~(size_t)3), 0, 0};
    refill(in);
    in.bits <<= 8 * skipped;
    in.count -= 8 * skipped;
    long long left = 8 * part.length;
    int done = 0, width = FIRST_WIDTH, last = END, fresh = 1;
    while (done < size) {
        const int code = take(in, width);
        left -= width;
        if (left < 0 || code == END) break;
        if (code == CLEAR) {
            width = FIRST_WIDTH;
            last = END;
            fresh = 1;
            continue;
        }
        if (fresh) {
            starts[END + 1] = done;
            fresh = 0;
        } else {
            if (last == CODES - 1) break;  // decoders differ in what follows
            starts[++last + 1] = done;
        }
        if (code < CLEAR) {
            out[done++] = code;
        } else {
            if (code > last) break;
            int from = starts[code], end = done + starts[code + 1] - from + 1;
            if (end > size) end = size;
            for (; done < end; ++done, ++from) out[done] = out[from];
        }
        // Codes become longer one code earlier than necessary.
        if (last >= (1 << width) - 2 && width < LAST_WIDTH) ++width;
    }
    flags[blockIdx.x] = done < size;
}

// Decode PackBits (TIFF 6.0, section 9), a block of threads per stream, all of which read the same
// headers. size, flags: as for LZW.
extern "C" __global__ void decode_packbits(const Part *parts, int size, int *flags) {
    const Part part = parts[blockIdx.x];
    const unsigned char *at = (const unsigned char *)part.source, *const end = at + part.length;
    unsigned char *const out = (unsigned char *)part.target;
    int done = 0;
    bool good = true;
    while (good && at < end) {
        const int header = *at++;
        if (header == 128) continue;
        const bool same = header > 128;
        const int count = same ? 257 - header : header + 1, taken = same ? 1 : count;
        good = taken <= end - at && count <= size - done;
        for (int i = threadIdx.x; good && i < count; i += blockDim.x)
            out[done + i] = at[same ? 0 : i];
        at += taken;
        done += count;
    }
    if (!threadIdx.x) flags[blockIdx.x] = !good || done < size;
}

// The bits of a deflate stream (RFC 1951), lowest bit first; otherwise as in Bits.
struct LowBits {
    const unsigned int *next, *past;
    unsigned long long bits;
    int count;
    long long left;  // bits of the stream that have not been taken; negative beyond its end
};

static __device__ void fill(LowBits &in) {
    if (in.count > 32) return;
    const unsigned long long word = in.next < in.past ? *in.next++ : 0;
    in.bits |= word << in.count;
    in.count += 32;
}

static __device__ void drop(LowBits &in, int count) {
    in.bits >>= count;
    in.count -= count;
    in.left -= count;
}

static __device__ int take_low(LowBits &in, int count) {
    fill(in);
    const int value = in.bits & ((1u << count) - 1);
    drop(in, count);
    return value;
}

// A Huffman code. quick: for the next bits, a symbol and above it the length of its code; 0 for
// longer codes, which `counts` of each length and the symbols in their order describe.
struct Code {
    unsigned short quick[1 << QUICK];
    unsigned short counts[LONGEST + 1], symbols[MOST_SYMBOLS];
};

// Return whether the lengths form a code: a complete one, or a single code of one bit.
static __device__ bool make_code(Code &code, const unsigned char *lengths, int count) {
    unsigned short offsets[LONGEST + 1], firsts[LONGEST + 1];
    for (int i = 0; i <= LONGEST; ++i) code.counts[i] = 0;
    for (int i = 0; i < count; ++i) ++code.counts[lengths[i]];
    int left = 1, first = 0;
    offsets[0] = firsts[0] = 0;
    for (int i = 1, offset = 0; i <= LONGEST; ++i) {
        left = 2 * left - code.counts[i];
        if (left < 0) return false;
        first = 2 * first;
        firsts[i] = first;
        first += code.counts[i];
        offsets[i] = offset;
        offset += code.counts[i];
    }
    if (left > 0 && count - code.counts[0] != code.counts[1]) return false;
    for (int i = 0; i < 1 << QUICK; ++i) code.quick[i] = 0;
    for (int i = 0; i < count; ++i) {
        const int length = lengths[i];
        if (!length) continue;
        code.symbols[offsets[length]++] = i;
        int forward = firsts[length]++, reversed = 0;
        if (length > QUICK) continue;
        for (int k = 0; k < length; ++k, forward >>= 1) reversed = 2 * reversed + (forward & 1);
        for (; reversed < 1 << QUICK; reversed += 1 << length)
            code.quick[reversed] = length << SYMBOL_BITS | i;
    }
    return true;
}

// Return the next symbol, or -1 if the bits are no code.
static __device__ int take_symbol(LowBits &in, const Code &code) {
    fill(in);
    const int found = code.quick[in.bits & ((1 << QUICK) - 1)];
    if (found) {
        drop(in, found >> SYMBOL_BITS);
        return found & ((1 << SYMBOL_BITS) - 1);
    }
    int value = 0, first = 0, index = 0;
    for (int length = 1; length <= LONGEST; ++length) {
        value |= in.bits >> (length - 1) & 1;
        const int count = code.counts[length];
        if (value - first < count) {
            drop(in, length);
            return code.symbols[index + value - first];
        }
        index += count;
        first = 2 * (first + count);
        value *= 2;
    }
    return -1;
}

// Read the codes of a block; return false if they are damaged.
static __device__ bool read_codes(LowBits &in, int type, unsigned char *lengths, Code &literals,
                                  Code &distances) {
    int count = 288, others = 30;
    if (type == 1) {
        for (int i = 0; i < count; ++i)
            lengths[i] = i < 144 || i > 279 ? 8 : i < 256 ? 9 : 7;
        for (int i = 0; i < others; ++i) lengths[count + i] = 5;
    } else {
        const unsigned char order[19] = {16, 17, 18, 0, 8, 7, 9, 6, 10, 5,
                                         11, 4, 12, 3, 13, 2, 14, 1, 15};
        count = take_low(in, 5) + 257;
        others = take_low(in, 5) + 1;
        const int codes = take_low(in, 4) + 4;
        if (count > 286 || others > 30) return false;
        for (int i = 0; i < 19; ++i) lengths[i] = 0;
        for (int i = 0; i < codes; ++i) lengths[order[i]] = take_low(in, 3);
        if (!make_code(literals, lengths, 19)) return false;
        for (int i = 0; i < count + others;) {
            const int symbol = take_symbol(in, literals);
            if (symbol < 0) return false;
            if (symbol < 16) {
                lengths[i++] = symbol;
                continue;
            }
            if (symbol == 16 && !i) return false;
            const unsigned char length = symbol == 16 ? lengths[i - 1] : 0;
            int repeats = symbol == 16   ? take_low(in, 2) + 3
                          : symbol == 17 ? take_low(in, 3) + 3
                                         : take_low(in, 7) + 11;
            if (i + repeats > count + others) return false;
            while (repeats--) lengths[i++] = length;
        }
        if (!lengths[256]) return false;
    }
    if (!make_code(literals, lengths, count)) return false;
    if (type == 1) {  // two distances of the fixed code are never used, so it is not complete
        lengths[count + others++] = 5;
        lengths[count + others++] = 5;
    }
    return make_code(distances, lengths + count, others);
}

// Decode deflate (RFC 1951), one stream per block and thread. size, flags: as for LZW.
extern "C" __global__ void decode_deflate(const Part *parts, int size, int *flags) {
    __shared__ Code literals, distances;
    __shared__ unsigned char lengths[320];
    const unsigned short bases[29] = {3,  4,  5,  6,  7,  8,  9,  10, 11,  13,  15,  17,  19,  23, 27,
                                      31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227, 258};
    const unsigned short starts[30] = {1,   2,   3,   4,   5,   7,    9,    13,   17,   25,
                                       33,  49,  65,  97,  129, 193,  257,  385,  513,  769,
                                       1025, 1537, 2049, 3073, 4097, 6145, 8193, 12289, 16385, 24577};
    const Part part = parts[blockIdx.x];
    unsigned char *out = (unsigned char *)part.target;
    const int skipped = part.source & 3;
    LowBits in = {(const unsigned int *)(part.source - skipped),
                  (const unsigned int *)((part.source + part.length + 3) & ~(size_t)3), 0, 0,
                  8 * (part.length + skipped)};
    fill(in);
    drop(in, 8 * skipped);
    int done = 0, last = 0;
    bool good = true;
    while (good && !last && in.left > 0) {
        last = take_low(in, 1);
        const int type = take_low(in, 2);
        if (type == 0) {
            drop(in, in.left & 7);  // to the next byte
            const int length = take_low(in, 16), check = take_low(in, 16);
            good = length == (check ^ 0xffff) && length <= size - done;
            for (int i = 0; good && i < length; ++i) out[done++] = take_low(in, 8);
            continue;
        }
        good = type < 3 && read_codes(in, type, lengths, literals, distances);
        while (good) {
            const int symbol = take_symbol(in, literals);
            if (symbol == 256) break;
            if (symbol < 256) {
                good = symbol >= 0 && done < size;
                if (good) out[done++] = symbol;
                continue;
            }
            const int number = symbol - 257;
            if (number > 28) {
                good = false;
                break;
            }
            const int more = number < 8 || number == 28 ? 0 : number / 4 - 1;
            const int length = bases[number] + take_low(in, more);
            const int distance = take_symbol(in, distances);
            if (distance < 0 || distance > 29) {
                good = false;
                break;
            }
            const int back = starts[distance] + take_low(in, distance < 4 ? 0 : distance / 2 - 1);
            good = back <= done && length <= size - done && in.left >= 0;
            for (int i = 0; good && i < length; ++i, ++done) out[done] = out[done - back];
        }
    }
    flags[blockIdx.x] = !(good && last && done == size && in.left >= 0);
}

// Compare the Adler-32 checksums (RFC 1950) of decoded tiles. blockIdx.x is the tile; targets: the
// tiles' addresses; sums: expected checksums; flags: set for tiles with another one.
extern "C" __global__ void check_sums(const unsigned long long *targets,
                                      const unsigned long long *sums, long long size, int *flags) {
    __shared__ unsigned long long plain[CHECKING], weighted[CHECKING];
    const unsigned char *bytes = (const unsigned char *)targets[blockIdx.x];
    unsigned long long sum = 0, total = 0;
    for (long long i = threadIdx.x; i < size; i += blockDim.x) {
        sum += bytes[i];
        total += (unsigned long long)(size - i) * bytes[i];
    }
    plain[threadIdx.x] = sum;
    weighted[threadIdx.x] = total % ADLER;
    __syncthreads();
    if (threadIdx.x) return;
    unsigned long long low = 1, high = size;
    for (int i = 0; i < (int)blockDim.x; ++i) {
        low += plain[i];
        high += weighted[i];
    }
    if (sums[blockIdx.x] != (high % ADLER << 16 | low % ADLER)) flags[blockIdx.x] = 1;
}

static __device__ unsigned char swapped(unsigned char value) { return value; }

static __device__ unsigned short swapped(unsigned short value) {
    return (unsigned short)(value << 8 | value >> 8);
}

static __device__ unsigned int swapped(unsigned int value) {
    return value << 24 | (value & 0xff00) << 8 | (value >> 8 & 0xff00) | value >> 24;
}

static __device__ unsigned long long swapped(unsigned long long value) {
    return (unsigned long long)swapped((unsigned int)value) << 32 |
           swapped((unsigned int)(value >> 32));
}

template <typename Sample>
static __device__ void restore(Sample *row, int width, int samples, int swap, int sum) {
    Sample value = 0;
    for (int x = 0; x < width; ++x, row += samples) {
        const Sample stored = swap ? swapped(*row) : *row;
        value = sum ? (Sample)(value + stored) : stored;
        *row = value;
    }
}

// Undo byte order and horizontal differencing (TIFF 6.0, section 14) in place; a thread restores one
// channel of a row. blocks: number of them that share a tile; bytes: of a sample; swap, sum: what to
// undo.
extern "C" __global__ void restore_samples(const unsigned long long *tiles, int blocks, int rows,
                                           int width, int samples, int bytes, int swap, int sum) {
    const int step = blocks * blockDim.x;
    for (int i = blockIdx.x % blocks * blockDim.x + threadIdx.x; i < rows * samples; i += step) {
        const long long first = (long long)(i / samples) * width * samples + i % samples;
        unsigned char *at = (unsigned char *)tiles[blockIdx.x / blocks] + first * bytes;
        if (bytes == 1) restore((unsigned char *)at, width, samples, swap, sum);
        if (bytes == 2) restore((unsigned short *)at, width, samples, swap, sum);
        if (bytes == 4) restore((unsigned int *)at, width, samples, swap, sum);
        if (bytes == 8) restore((unsigned long long *)at, width, samples, swap, sum);
    }
}

// Undo the predictor of floating-point samples (TIFF technical note 3) in place, a block of threads
// per row. A row holds the highest bytes of all samples, then the next ones, and so on; each byte is
// the difference to the one `samples` before it. bytes: of a sample.
extern "C" __global__ void restore_floats(const unsigned long long *tiles, int rows, int width,
                                          int samples, int bytes) {
    __shared__ unsigned char row[MOST_ROW];
    const int count = width * samples, length = count * bytes;
    unsigned char *const at = (unsigned char *)tiles[blockIdx.x / rows] +
                              (long long)(blockIdx.x % rows) * length;
    for (int i = threadIdx.x; i < length; i += blockDim.x) row[i] = at[i];
    __syncthreads();
    for (int channel = threadIdx.x; channel < samples; channel += blockDim.x)
        for (int i = channel + samples; i < length; i += samples) row[i] += row[i - samples];
    __syncthreads();
    for (int i = threadIdx.x; i < length; i += blockDim.x)
        at[i] = row[(bytes - 1 - i % bytes) * count + i / bytes];
}
