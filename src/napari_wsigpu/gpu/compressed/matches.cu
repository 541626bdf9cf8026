// How a block of threads copies matches, as deflate, LZW and zstd describe tiles: the first thread
// decodes the next ones, and all of them copy as many at once as do not depend on each other.
// `compressed_engine.py` puts the constants before this text, and it before the kernels.

// Bytes of a tile that are the same as those `back` bytes before them. to: where they are in it.
struct Match {
    int to, length, back;
};

// Copy bytes; `threads` threads, of which this is number `me`, share the work. Every `period` bytes,
// the source starts again.
static __device__ void copy(unsigned char *to, const unsigned char *from, int count, int period,
                            int me, int threads) {
    for (int i = me; i < count; i += threads) to[i] = from[i < period ? i : i % period];
}

// Copy a match in one thread. Loads that do not wait for each other take as long as one.
static __device__ void copy_short(unsigned char *to, int count, int back) {
    const unsigned char *from = to - back;
    if (back < 4) return copy(to, from, count, back, 0, 1);
#pragma unroll 1
    for (int i = 0; i < count; i += 4) {
        const int left = count - i;
        const unsigned char first = from[i], second = left > 1 ? from[i + 1] : 0;
        const unsigned char third = left > 2 ? from[i + 2] : 0, last = left > 3 ? from[i + 3] : 0;
        to[i] = first;
        if (left > 1) to[i + 1] = second;
        if (left > 2) to[i + 2] = third;
        if (left > 3) to[i + 3] = last;
    }
}

// Copy up to CHUNK matches whose bytes follow each other, all threads together; everything between
// them is in the tile. If the last one is long, the threads share its bytes. done: bits of matches
// that are in the tile already; copied: shared memory with the same bits. Threads must have met
// before the call, and must meet before they read the tile.
template <typename Found>
static __device__ void copy_matches(unsigned char *out, const Found *matches, int count,
                                    bool long_one, unsigned int *copied,
                                    unsigned int done = 0) {
    const int me = threadIdx.x, threads = blockDim.x, few = count - long_one;
    const unsigned int all = few == CHUNK ? ~0u : (1u << few) - 1;
    for (done &= all; done != all;) {
        const int frontier = matches[__ffs(~done) - 1].to;  // all bytes before this are in the tile
        for (int i = me; i < few; i += threads) {
            const Match found = matches[i];
            const int end = found.to - found.back + found.length;
            if (done >> i & 1 || min(found.to, end) > frontier) continue;
            copy_short(out + found.to, found.length, found.back);
            atomicOr(copied, 1u << i);
        }
        __syncthreads();
        done = *copied & all;
        __syncthreads();
    }
    if (long_one) {
        const Match found = matches[few];
        unsigned char *const to = out + found.to;
        copy(to, to - found.back, found.length, found.back, me, threads);
    }
}
