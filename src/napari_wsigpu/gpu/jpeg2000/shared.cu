// The start of each program, after the constants and structures from `jpeg2000/jpeg2000_tables.py`.

typedef unsigned long long Word;

struct __align__(16) Pair {
    Word first, second;
};

// Add modulo 2^32: damaged streams can exceed the range, which is undefined for int.
__device__ int wrapped(long long one, long long other) { return (int)(one + other); }

// Threads of a warp, which are fewer only if the block is smaller.
__device__ int warp_size() { return min(32, (int)blockDim.x); }
