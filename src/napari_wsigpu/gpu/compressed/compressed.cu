// Kernels for tiles whose bytes are compressed. `compressed_engine.py` puts the definition of Part,
// `matches.cu`, and CLEAR, END and the other constants before this text.

// Matches of a tile that its block of threads decodes.
struct Chunk {
    Match matches[CHUNK];
    int count;
    bool long_one, more;  // whether the last match is long, and whether others follow
    unsigned int copied;

    // Add a match, of which `found` were added before; return whether there is room for others.
    __device__ __forceinline__ bool add(int found, Match match) {
        matches[found] = match;
        count = found + 1;
        const bool is_long = match.length > LONG;
        if (is_long) long_one = true;
        return !is_long && found < CHUNK - 1;
    }
};

// Decode a stream: its first thread writes literals and lists matches, and all threads copy these.
template <typename Stream>
static __device__ void decode(Stream &stream, Chunk &chunk) {
    bool more = true;
    while (more) {
        if (!threadIdx.x) {
            chunk.count = chunk.copied = 0;
            chunk.long_one = false;
            chunk.more = stream.read(chunk);
        }
        __syncthreads();
        copy_matches(stream.out, chunk.matches, chunk.count, chunk.long_one, &chunk.copied);
        more = chunk.more;
        __syncthreads();
    }
}

// The words of a stream, none of which lies completely beyond its last byte. One is loaded before
// it is needed, as loading takes longer than decoding it.
struct Words {
    const unsigned int *words;
    int next, count;  // number of the word after `ahead`, and of all words
    unsigned int ahead;
    int bits;  // of the stream, from the first bit of its first word

    __device__ void start(const Part &part) {
        const int skipped = part.source & 3;
        words = (const unsigned int *)(part.source - skipped);
        bits = 8 * (skipped + (int)part.length);
        count = (bits + 31) / 32;
        next = 0;
        ahead = 0;
        take();
    }
    __device__ __forceinline__ unsigned int take() {
        const unsigned int word = ahead;
        ahead = 0;
        if (next < count) ahead = words[next];
        ++next;
        return word;
    }
    // Bits of the stream that have not been taken; negative beyond its end.
    __device__ int left() const { return bits - 32 * (next - 1); }
};

// An LZW stream (TIFF 6.0, section 13). The string of table entry k is the output from where the
// code before the one that completed it begins, up to the first byte of that one. Entries follow
// each other in the output, so an entry ends one byte after the next one begins.
struct Lzw {
    Words words;
    unsigned long long bits;  // the next ones, from the highest bit
    int count;                // of valid bits
    unsigned char *out;
    int size, done, width, last;
    bool fresh;
    unsigned int *starts;  // of the entries' strings in the tile

    __device__ void start(const Part &part) {
        words.start(part);
        bits = 0;
        count = 0;
        fill();
        bits <<= 8 * (part.source & 3);
        count -= 8 * (part.source & 3);
        done = 0;
        clear();
    }
    __device__ void clear() {
        width = FIRST_WIDTH;
        last = END;
        fresh = true;
    }
    __device__ __forceinline__ void fill() {
        if (count > 32) return;
        unsigned int word = words.take();
        word = word << 24 | (word & 0xff00) << 8 | (word >> 8 & 0xff00) | word >> 24;
        bits |= (unsigned long long)word << (32 - count);
        count += 32;
    }

    // Decode codes until `chunk` is full; return false at the end of the stream or of the tile.
    __device__ bool read(Chunk &chunk) {
        bool room = true;
        for (int found = 0; done < size;) {
            if (!room) return true;
            fill();
            const int code = bits >> (64 - width);
            bits <<= width;
            count -= width;
            if (words.left() + count < 0 || code == END) return false;
            if (code == CLEAR) {
                clear();
                continue;
            }
            if (!fresh && ++last == CODES) return false;  // decoders differ in what follows
            fresh = false;
            starts[last + 1] = done;
            if (code < CLEAR) {
                out[done++] = code;
            } else {
                if (code > last) return false;
                const int from = starts[code];
                const int length = min((int)starts[code + 1] - from + 1, size - done);
                room = chunk.add(found++, {done, length, done - from});
                done += length;
            }
            // Codes become longer one code earlier than necessary.
            if (last >= (1 << width) - 2 && width < LAST_WIDTH) ++width;
        }
        return false;
    }
};

// Decode LZW, one stream per block of threads. size: bytes of a decoded tile; flags: set to 0 if
// the stream decodes to as many bytes.
extern "C" __global__ void decode_lzw(const Part *parts, int size, int *flags) {
    __shared__ unsigned int starts[CODES + 1];
    __shared__ Chunk chunk;
    const Part part = parts[blockIdx.x];
    Lzw stream;
    stream.out = (unsigned char *)part.target;
    stream.size = size;
    stream.starts = starts;
    stream.start(part);
    decode(stream, chunk);
    if (!threadIdx.x) flags[blockIdx.x] = stream.done < size;
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

// The bits of a deflate stream (RFC 1951), lowest bit first; otherwise as in Lzw.
struct LowBits {
    Words words;
    unsigned long long bits;
    int count;

    __device__ void start(const Part &part) {
        words.start(part);
        bits = 0;
        count = 0;
        fill();
        drop(8 * (part.source & 3));
    }
    // Make more than 32 bits available.
    __device__ __forceinline__ void fill() {
        if (count > 32) return;
        bits |= (unsigned long long)words.take() << count;
        count += 32;
    }
    __device__ __forceinline__ void drop(int wanted) {
        bits >>= wanted;
        count -= wanted;
    }
    __device__ int take(int wanted) {
        fill();
        const int value = bits & ((1u << wanted) - 1);
        drop(wanted);
        return value;
    }
    __device__ int left() const { return words.left() + count; }
};

// What codes stand for: symbols, or (RFC 1951, 3.2.5) literals and lengths of matches, or distances.
enum { SYMBOLS, LITERALS, DISTANCES };
// Types of entries: a symbol, literal or distance; the length of a match; the end of a block; and
// what is no code.
enum { PLAIN, MATCH, LAST, WRONG };

// Return an entry: in its lowest 5 bits the length of the code, above it the number of bits that
// follow the code, the type (2 bits), and from bit 16 on the value to which those bits are added.
static __device__ unsigned int entry_of(int symbol, int length, int kind) {
    int value = symbol, type = PLAIN, more = 0;
    if (kind == DISTANCES) {
        if (symbol > 29) type = WRONG;
        if (symbol > 3) more = symbol / 2 - 1;
        value = 1 + (symbol > 3 ? (2 + symbol % 2) << more : symbol);
    } else if (kind == LITERALS && symbol > 255) {
        const int number = symbol - 257;
        type = symbol == 256 ? LAST : number < 29 ? MATCH : WRONG;
        if (number > 7 && number < 28) more = number / 4 - 1;
        value = number == 28 ? 258 : 3 + (number > 7 ? (4 + number % 4) << more : number);
    }
    return value << 16 | type << 9 | more << 5 | length;
}

// A Huffman code. quick: the entry for the next BITS bits; 0 for longer codes, which `counts` of
// each length and the symbols in their order describe.
template <int BITS, int MOST_SYMBOLS>
struct Code {
    unsigned int quick[1 << BITS];
    unsigned short counts[LONGEST + 1], symbols[MOST_SYMBOLS];
};
typedef Code<10, 288> Literals;
typedef Code<8, 32> Distances;

// Return whether the lengths form a code: a complete one, or a single code of one bit.
template <int BITS, int MOST_SYMBOLS>
static __device__ bool make_code(Code<BITS, MOST_SYMBOLS> &code, const unsigned char *lengths,
                                 int count, int kind) {
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
    for (int i = 0; i < 1 << BITS; ++i) code.quick[i] = 0;
    for (int i = 0; i < count; ++i) {
        const int length = lengths[i];
        if (!length) continue;
        code.symbols[offsets[length]++] = i;
        int forward = firsts[length]++, reversed = 0;
        if (length > BITS) continue;
        for (int k = 0; k < length; ++k, forward >>= 1) reversed = 2 * reversed + (forward & 1);
        const unsigned int entry = entry_of(i, length, kind);
        for (; reversed < 1 << BITS; reversed += 1 << length) code.quick[reversed] = entry;
    }
    return true;
}

// Return the entry of a code that may be too long for `quick`.
template <int BITS, int MOST_SYMBOLS>
static __device__ __noinline__ unsigned int find_long(const Code<BITS, MOST_SYMBOLS> &code,
                                                      unsigned int bits, int kind) {
    int value = 0, first = 0, index = 0;
    for (int length = 1; length <= LONGEST; ++length, bits >>= 1) {
        value |= bits & 1;
        const int count = code.counts[length];
        if (value - first < count)
            return entry_of(code.symbols[index + value - first], length, kind);
        index += count;
        first = 2 * (first + count);
        value *= 2;
    }
    return WRONG << 9;
}

// Return the entry of the code in the next bits, which stay.
template <int BITS, int MOST_SYMBOLS>
static __device__ __forceinline__ unsigned int find(const Code<BITS, MOST_SYMBOLS> &code,
                                                    const LowBits &in, int kind) {
    const unsigned int next = in.bits, entry = code.quick[next & ((1 << BITS) - 1)];
    return entry ? entry : find_long(code, next, kind);
}

static __device__ __forceinline__ int type_of(unsigned int entry) { return entry >> 9 & 3; }

// Take a code and the bits that follow it; return its value.
static __device__ __forceinline__ int take_value(LowBits &in, unsigned int entry) {
    const int length = entry & 31, more = entry >> 5 & 15;
    const unsigned int added = (unsigned int)(in.bits >> length) & ((1u << more) - 1);
    in.drop(length + more);
    return (entry >> 16) + added;
}

struct Deflate {
    LowBits in;
    Literals *literals;
    Distances *distances;
    unsigned char *lengths, *out;
    int size, done;
    // Whether a block of codes is being decoded and is the last one, and the stream is sound so far.
    bool inside, last, good;

    // Decode until `chunk` is full; return false at the end of the stream.
    __device__ bool read(Chunk &chunk) {
        while (inside || (!last && in.left() > 0)) {
            if (!inside) good = read_block();
            if (inside && good && read_codes(chunk)) return true;
            if (!good) return false;
        }
        return false;
    }

    // Read the header of a block, and all of it if its bytes are stored.
    __device__ bool read_block() {
        last = in.take(1);
        const int type = in.take(2);
        if (type) {
            inside = true;
            return type < 3 && read_tables(type);
        }
        in.drop(in.left() & 7);  // to the next byte
        const int length = in.take(16), check = in.take(16);
        if (length != (check ^ 0xffff) || length > size - done) return false;
        for (int i = 0; i < length; ++i) out[done++] = in.take(8);
        return true;
    }

    // Read the codes of a block; return false if they are damaged.
    __device__ bool read_tables(int type) {
        int count = 288, others = 32;
        if (type == 1) {
            for (int i = 0; i < count; ++i)
                lengths[i] = i < 144 || i > 279 ? 8 : i < 256 ? 9 : 7;
            for (int i = 0; i < others; ++i) lengths[count + i] = 5;
        } else {
            const unsigned char order[19] = {16, 17, 18, 0, 8, 7, 9, 6, 10, 5,
                                             11, 4, 12, 3, 13, 2, 14, 1, 15};
            count = in.take(5) + 257;
            others = in.take(5) + 1;
            const int codes = in.take(4) + 4;
            if (count > 286 || others > 30) return false;
            for (int i = 0; i < 19; ++i) lengths[i] = 0;
            for (int i = 0; i < codes; ++i) lengths[order[i]] = in.take(3);
            if (!make_code(*literals, lengths, 19, SYMBOLS)) return false;
            for (int i = 0; i < count + others;) {
                in.fill();
                const unsigned int entry = find(*literals, in, SYMBOLS);
                if (type_of(entry) == WRONG) return false;
                const int symbol = take_value(in, entry);
                if (symbol < 16) {
                    lengths[i++] = symbol;
                    continue;
                }
                if (symbol == 16 && !i) return false;
                const unsigned char length = symbol == 16 ? lengths[i - 1] : 0;
                int repeats = symbol == 16   ? in.take(2) + 3
                              : symbol == 17 ? in.take(3) + 3
                                             : in.take(7) + 11;
                if (i + repeats > count + others) return false;
                while (repeats--) lengths[i++] = length;
            }
            if (!lengths[256]) return false;
        }
        return make_code(*literals, lengths, count, LITERALS) &&
               make_code(*distances, lengths + count, others, DISTANCES);
    }

    // Decode a block until `chunk` is full; return false at its end, or if it is damaged.
    __device__ bool read_codes(Chunk &chunk) {
        good = false;
        bool room = true;
        for (int found = chunk.count; room;) {
            in.fill();
            const unsigned int entry = find(*literals, in, LITERALS);
            if (type_of(entry) == PLAIN) {
                if (done >= size) return false;
                in.drop(entry & 31);
                out[done++] = entry >> 16;
                continue;
            }
            if (type_of(entry) != MATCH) {
                inside = false;
                take_value(in, entry);
                good = type_of(entry) == LAST && in.left() >= 0;
                return false;
            }
            const int length = take_value(in, entry);
            in.fill();
            const unsigned int distance = find(*distances, in, DISTANCES);
            if (type_of(distance) == WRONG) return false;
            const int back = take_value(in, distance);
            if (back > done || length > size - done) return false;
            room = chunk.add(found++, {done, length, back});
            done += length;
        }
        good = in.left() >= 0;
        return good;
    }
};

// Decode deflate, one stream per block of threads. size, flags: as for LZW.
extern "C" __global__ void decode_deflate(const Part *parts, int size, int *flags) {
    __shared__ Literals literals;
    __shared__ Distances distances;
    __shared__ unsigned char lengths[320];
    __shared__ Chunk chunk;
    const Part part = parts[blockIdx.x];
    Deflate stream = {{}, &literals, &distances, lengths, (unsigned char *)part.target,
                      size, 0, false, false, true};
    stream.in.start(part);
    decode(stream, chunk);
    if (!threadIdx.x)
        flags[blockIdx.x] =
            !(stream.good && stream.last && stream.done == size && stream.in.left() >= 0);
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
