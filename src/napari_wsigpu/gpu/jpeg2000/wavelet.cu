// From bit planes to coefficients (T.800, annex E), and from coefficients to samples by the inverse
// wavelet transform (annex F).

struct __align__(16) Four {
    unsigned x, y, z, w;
};

// Assemble coefficients from bit planes. A thread assembles a group of 32 samples at a time, see
// blocks.cu. out: tile_size coefficients of each tile: int for 5/3, the bits of a float for 9/7.
extern "C" __global__ void assemble_coefficients(const Block *blocks, int block_count,
                                                 const BlockState *states, const int *work,
                                                 int work_count, int step, int groups,
                                                 int most_planes, const Pair *state,
                                                 const unsigned *planes, long long tile_size,
                                                 int *out) {
    // step is a power of 2.
    const int bits = __ffs(step) - 1, rows_of_work = (work_count + step - 1) >> bits;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < rows_of_work * groups << bits;
         i += gridDim.x * blockDim.x) {
        const int item = (i >> bits) / groups << bits | i & step - 1;
        const int group = (i >> bits) % groups;
        if (item >= work_count) continue;
        const int number = work[item];
        const Block &block = blocks[number % block_count];
        const int across = (block.width + 7) / 8;
        const int x = group % across * 8, y = group / across * 4;
        if (y >= block.height) continue;
        const BlockState found = states[number];
        unsigned values[32];
        for (int k = 0; k < 32; ++k) values[k] = 0;
        Word negative = 0;
        if (found.passes) {
            const size_t index = ((size_t)(item / step) * groups + group) * step + item % step;
            const unsigned *ones =
                planes + ((size_t)(item / step) * most_planes * groups + group) * step + item % step;
            const int coded = (found.passes + 4) / 3;
            unsigned last = 0;
            for (int plane = 0; plane < coded; ++plane) {
                last = ones[(size_t)plane * groups * step];
                for (int k = 0; k < 32; ++k) values[k] = values[k] << 1 | last >> k & 1;
            }
            // Values are doubled so that half a step can be added: the middle of the range that was
            // not decoded (r = 1/2 in E-6). If only the first pass of the last plane was coded, it
            // contains no bits of samples that were significant before.
            const bool only_new = found.passes > 1 && (found.passes + 1) % 3 == 0;
            const int rest = found.planes - coded;
            for (int k = 0; k < 32; ++k)
                if (values[k])
                    values[k] = only_new && !(last >> k & 1) ? (values[k] | 1) << (rest + 1)
                                                             : (values[k] << 1 | 1) << rest;
            negative = state[index].second;
        }
        int *rows = out + number / block_count * tile_size + block.target;
        const int shift = block.shift;
        const bool reversible = block.reversible;
        const float scale = block.scale;
        for (int k = 0; k < 32; ++k) {
            unsigned value = values[k];
            if (shift && value >> shift) value >>= shift;
            const bool below = negative >> (k / 4 * 6 + k % 4 + 7) & 1;
            if (reversible) {
                const int whole = value >> 1;
                values[k] = below ? -whole : whole;
            } else {
                const float real = (float)(int)value * scale;
                values[k] = __float_as_int(below ? -real : real);
            }
        }
        rows += (long long)y * block.pitch + x;
        const bool even = !((size_t)rows & 15) && block.pitch % 4 == 0 && x + 8 <= block.width;
        for (int row = 0; row < 4; ++row, rows += block.pitch) {
            if (y + row >= block.height) break;
            if (even) {
                Four *to = (Four *)rows;
                to[0] = Four{values[row], values[4 + row], values[8 + row], values[12 + row]};
                to[1] = Four{values[16 + row], values[20 + row], values[24 + row], values[28 + row]};
                continue;
            }
            for (int column = 0; column < 8; ++column)
                if (x + column < block.width) rows[column] = values[4 * column + row];
        }
    }
}

// Lifting factors of 9/7 (table F.4); K and 2 / K, which include the subband gains (table E.1).
#define ALPHA -1.586134342f
#define BETA -0.052980118f
#define GAMMA 0.882911075f
#define DELTA 0.443506852f
#define LOW 1.230174105f
#define HIGH 1.625732422f

// Coefficients that a thread loads at once.
#define AT_ONCE 10

// Positions beyond an end are mirrored (F.3.7), as often as necessary.
__device__ int mirrored(int i, int length) {
    if ((unsigned)i < length) return i;
    if (length == 1) return 0;
    while (i < 0 || i >= length) i = i < 0 ? -i : 2 * (length - 1) - i;
    return i;
}

// Undo the lifting steps (F.3.8) of samples REACH to REACH + SEGMENT - 1; those with even numbers are
// low-pass. Integers are 5/3, floats 9/7.
__device__ void invert(int *samples) {
#pragma unroll
    for (int step = 0; step < 2; ++step)
#pragma unroll
        for (int i = REACH + step; i <= REACH + SEGMENT - step; i += 2) {
            const int sum = wrapped(samples[i - 1], samples[i + 1]);
            const int change = step ? sum >> 1 : -(wrapped(sum, 2) >> 2);
            samples[i] = wrapped(samples[i], change);
        }
}

__device__ void invert(float *samples) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        const float factor = step == 0 ? DELTA : step == 1 ? GAMMA : step == 2 ? BETA : ALPHA;
#pragma unroll
        for (int i = REACH - 2 + step; i <= REACH + SEGMENT + 2 - step; i += 2)
            samples[i] -= factor * (samples[i - 1] + samples[i + 1]);
    }
}

// A line of one sample (F.3.6). Floats need no division, because their coefficients lack the gain
// of 2 here.
__device__ int only(int value, bool low) { return low ? value : value / 2; }
__device__ float only(float value, bool low) { return value; }

__device__ int weighted(int value, bool low) { return value; }
__device__ float weighted(float value, bool low) { return value * (low ? LOW : HIGH); }

// Shared memory of a block of threads: a patch of subbands, and after the transform of its rows.
template <typename T> struct Patch {
    T bands[(PATCH_HEIGHT + 2 * REACH) * (PATCH_WIDTH + 2 * REACH + 1)];
    T rows[(PATCH_HEIGHT + 2 * REACH) * PATCH_WIDTH];
};

// Transform a patch of one resolution, rows first (F.3.2). left, upper: position of its first sample,
// counted so that even ones are low-pass. bands: plane with the high-pass subbands; lows: with LL.
template <typename T>
__device__ void invert_patch(const Lift &lift, const T *bands, const T *lows, int lows_pitch, T *out,
                             int out_pitch, int left, int upper, Patch<T> &patch) {
    const int stride = PATCH_WIDTH + 2 * REACH + 1;
    const int columns = min(PATCH_WIDTH, lift.left + lift.width - left);
    const int rows = min(PATCH_HEIGHT, lift.upper + lift.height - upper) + 2 * REACH;
    const int lanes = warp_size(), warps = blockDim.x / lanes;
    // Even, so the rows of a thread are all low-pass or all high-pass: mirroring keeps that, too.
    const int step = max(2, warps);
    for (int i = threadIdx.x % lanes; i < columns + 2 * REACH; i += lanes) {
        const int x = lift.left + mirrored(left - REACH + i - lift.left, lift.width);
        const int column = x & 1 ? lift.low_width + (x >> 1) : (x >> 1) - lift.left;
        for (int start = threadIdx.x / lanes; start < step; start += warps) {
            const int odd = upper - REACH + start & 1;
            const int shift = odd ? lift.low_height : -lift.upper;
            const bool high = (x | odd) & 1;
            const int pitch = high ? lift.pitch : lows_pitch;
            const T *const from = (high ? bands : lows) + column;
            const int last = rows - 1 - (rows - 1 - start) % step;
            for (int first = start; first < rows; first += AT_ONCE * step) {
                // A thread waits for several loads at once because each takes long.
                T values[AT_ONCE];
#pragma unroll
                for (int k = 0; k < AT_ONCE; ++k) {
                    const int next = upper - REACH + min(first + k * step, last);
                    const int y = lift.upper + mirrored(next - lift.upper, lift.height);
                    values[k] = from[((y >> 1) + shift) * pitch];
                }
#pragma unroll
                for (int k = 0; k < AT_ONCE; ++k)
                    if (first + k * step < rows)
                        patch.bands[(first + k * step) * stride + i] =
                            lift.width > 1 ? weighted(values[k], !(x & 1))
                                           : only(values[k], !(x & 1));
            }
        }
    }
    __syncthreads();
    T samples[SEGMENT + 2 * REACH];
    for (int i = threadIdx.x; i < rows * (PATCH_WIDTH / SEGMENT); i += blockDim.x) {
        const int row = i % rows, first = i / rows * SEGMENT;
        if (first >= columns) continue;
        for (int k = 0; k < SEGMENT + 2 * REACH; ++k)
            samples[k] = patch.bands[row * stride + first + k];
        if (lift.width > 1) invert(samples);
        for (int k = 0; k < SEGMENT; ++k)
            patch.rows[row * PATCH_WIDTH + first + k] = samples[REACH + k];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < PATCH_WIDTH * (PATCH_HEIGHT / SEGMENT); i += blockDim.x) {
        const int column = i % PATCH_WIDTH, first = i / PATCH_WIDTH * SEGMENT;
        const int x = left + column - lift.left;
        if (column >= columns || x < 0) continue;
        for (int k = 0; k < SEGMENT + 2 * REACH; ++k) {
            const T value = patch.rows[min(first + k, rows - 1) * PATCH_WIDTH + column];
            samples[k] = lift.height > 1 ? weighted(value, k % 2 == 0) : only(value, k % 2 == 0);
        }
        if (lift.height > 1) invert(samples);
        for (int k = 0; k < SEGMENT; ++k) {
            const int y = upper + first + k - lift.upper;
            if (y >= 0 && y < lift.height) out[(long long)y * out_pitch + x] = samples[REACH + k];
        }
    }
    __syncthreads();
}

template <typename T>
__device__ void invert_planes(const Lift &lift, const T *bands, T *lifted, T *halves, int tiles,
                              long long tile_size, long long half_size, Patch<T> &patch) {
    const int across = (lift.left + lift.width + PATCH_WIDTH - 1) / PATCH_WIDTH;
    const int down = (lift.upper + lift.height + PATCH_HEIGHT - 1) / PATCH_HEIGHT;
    for (int job = blockIdx.x; job < tiles * lift.planes * across * down; job += gridDim.x) {
        const int number = job / (across * down), plane = number % lift.planes;
        const int place = job % (across * down), tile = number / lift.planes;
        const long long whole = tile * tile_size + lift.plane + plane * lift.plane_size;
        const long long half = tile * half_size + lift.half + plane * lift.half_plane;
        const bool to_half = lift.finer % 2;
        const T *const lows = lift.coarsest ? bands + whole : to_half ? lifted + whole : halves + half;
        invert_patch(lift, bands + whole, lows,
                     lift.coarsest || to_half ? lift.pitch : lift.half_pitch,
                     to_half ? halves + half : lifted + whole,
                     to_half ? lift.half_pitch : lift.pitch, place % across * PATCH_WIDTH,
                     place / across * PATCH_HEIGHT, patch);
    }
}

// Transform one resolution of some planes of all tiles. lifts: the row of the resolution; bands:
// coefficients; lifted, halves: memory for resolutions, in turn, so that no plane is read and written
// at once; the finest one is in `lifted`, which is as large as `bands`. half_size: elements of a tile
// in `halves`.
extern "C" __global__ void invert_wavelet(const Lift *lifts, const void *bands, void *lifted,
                                          void *halves, int tiles, long long tile_size,
                                          long long half_size) {
    __shared__ Patch<int> patch;
    const Lift lift = *lifts;  // otherwise loaded again after each write to memory
    if (lift.reversible)
        invert_planes(lift, (const int *)bands, (int *)lifted, (int *)halves, tiles, tile_size,
                      half_size, patch);
    else
        invert_planes(lift, (const float *)bands, (float *)lifted, (float *)halves, tiles, tile_size,
                      half_size, (Patch<float> &)patch);
}
