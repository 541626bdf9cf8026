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
        } else if (last < CODES - 1) {
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

// Copy streams to the alignment that nvCOMP requires. blockIdx.x is the stream.
extern "C" __global__ void align_streams(const Part *parts) {
    const Part part = parts[blockIdx.x];
    const unsigned char *from = (const unsigned char *)part.source;
    unsigned char *to = (unsigned char *)part.target;
    for (long long i = threadIdx.x; i < part.length; i += blockDim.x) to[i] = from[i];
}

// Check what nvCOMP has decoded. blockIdx.x is the tile; targets: the tiles' addresses; sizes,
// statuses: nvCOMP's results; sums: expected Adler-32 checksums (RFC 1950), or null; flags: set to 0
// for tiles without an error.
extern "C" __global__ void check_decoded(const unsigned long long *targets,
                                         const unsigned long long *sizes, const int *statuses,
                                         const unsigned long long *sums, long long size,
                                         int *flags) {
    __shared__ unsigned long long plain[CHECKING], weighted[CHECKING];
    const int tile = blockIdx.x;
    const bool decoded = statuses[tile] == 0 && sizes[tile] == (unsigned long long)size;
    if (decoded && sums) {
        const unsigned char *bytes = (const unsigned char *)targets[tile];
        unsigned long long sum = 0, total = 0;
        for (long long i = threadIdx.x; i < size; i += blockDim.x) {
            sum += bytes[i];
            total += (unsigned long long)(size - i) * bytes[i];
        }
        plain[threadIdx.x] = sum;
        weighted[threadIdx.x] = total % ADLER;
    }
    __syncthreads();
    if (threadIdx.x) return;
    bool right = decoded;
    if (decoded && sums) {
        unsigned long long low = 1, high = size;
        for (int i = 0; i < (int)blockDim.x; ++i) {
            low += plain[i];
            high += weighted[i];
        }
        right = sums[tile] == (high % ADLER << 16 | low % ADLER);
    }
    flags[tile] = !right;
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
