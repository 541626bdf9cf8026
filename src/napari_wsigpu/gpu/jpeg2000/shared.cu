// What begins each program.

typedef unsigned long long Word;

struct __align__(16) Pair {
    Word first, second;
};

// A sum in 32 bits, of which damaged streams may have more.
__device__ int wrapped(long long one, long long other) { return (int)(one + other); }

