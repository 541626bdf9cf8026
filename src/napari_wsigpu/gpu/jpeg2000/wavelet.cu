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

// Lines of a plane in the shared memory of one block of threads. Consecutive threads of a warp
// access consecutive samples: along the line in rows, across the lines in columns.
struct Lines {
    int count, length, stride, between;
    bool down;

    // Call `each(line, i)` in parallel for each line and for positions from `first` on, `step`
    // apart; all threads have to take part. Positions are computed without divisions.
    template <typename Each> __device__ void every(int first, int step, Each each) const {
        const int lanes = min(32, (int)blockDim.x), lane = threadIdx.x % lanes;
        const int warp = threadIdx.x / lanes, warps = blockDim.x / lanes;
        if (down) {
            for (int i = first + step * warp; i < length; i += step * warps)
                for (int line = lane; line < count; line += lanes) each(line, i);
        } else {
            for (int line = warp; line < count; line += warps)
                for (int i = first + step * lane; i < length; i += step * lanes) each(line, i);
        }
        __syncthreads();
    }
    // Return a sample; lines are extended symmetrically beyond their ends (F.3.7).
    template <typename T> __device__ T &at(T *samples, int line, int i) const {
        i = i < 0 ? -i : i >= length ? 2 * (length - 1) - i : i;
        return samples[line * between + i * stride];
    }
};

// Lifting factors of 9/7 (table F.4); K and 2 / K, which include the subband gains (table E.1).
#define ALPHA -1.586134342f
#define BETA -0.052980118f
#define GAMMA 0.882911075f
#define DELTA 0.443506852f
#define LOW 1.230174105f
#define HIGH 1.625732422f

// Undo the lifting steps (F.3.8), each of which changes every second sample according to its
// neighbors. first: position of the first low-pass sample, 0 or 1. Integers are 5/3, floats 9/7.
__device__ void invert(const Lines &lines, int *samples, int first) {
    if (lines.length == 1) {
        // F.3.6. Floats (9/7) need no division, because their coefficients lack the gain of 2 here.
        lines.every(0, 1, [&](int line, int i) {
            if (first) lines.at(samples, line, i) /= 2;
        });
        return;
    }
    lines.every(first, 2, [&](int line, int i) {
        const int sum = wrapped(lines.at(samples, line, i - 1), lines.at(samples, line, i + 1));
        int &sample = lines.at(samples, line, i);
        sample = wrapped(sample, -(long long)(wrapped(sum, 2) >> 2));
    });
    lines.every(1 - first, 2, [&](int line, int i) {
        const int sum = wrapped(lines.at(samples, line, i - 1), lines.at(samples, line, i + 1));
        int &sample = lines.at(samples, line, i);
        sample = wrapped(sample, sum >> 1);
    });
}

__device__ void invert(const Lines &lines, float *samples, int first) {
    if (lines.length == 1) return;
    for (int step = 0; step < 4; ++step) {
        const float factor = step == 0 ? DELTA : step == 1 ? GAMMA : step == 2 ? BETA : ALPHA;
        lines.every(step % 2 ? 1 - first : first, 2, [&](int line, int i) {
            lines.at(samples, line, i) -=
                factor * (lines.at(samples, line, i - 1) + lines.at(samples, line, i + 1));
        });
    }
}

__device__ int weighted(int value, bool low) { return value; }
__device__ float weighted(float value, bool low) { return value * (low ? LOW : HIGH); }

// Transform all lines of one resolution in place (F.3.6): interleave the low-pass and high-pass
// halves and undo the lifting. Each block of threads keeps up to `at_once` lines in shared memory.
template <typename T>
__device__ void invert_lines(T *planes, int tiles, int planes_a_tile, long long tile_size,
                             long long plane_size, int pitch, int all_lines, int length, int low,
                             int first, bool down, int at_once, T *samples) {
    const int groups = (all_lines + at_once - 1) / at_once, jobs = tiles * planes_a_tile * groups;
    for (int job = blockIdx.x; job < jobs; job += gridDim.x) {
        const int first_line = job % groups * at_once, plane = job / groups;
        const int count = min(at_once, all_lines - first_line);
        const Lines lines = {count, length, down ? count : 1, down ? 1 : length, down};
        T *corner = planes + plane / planes_a_tile * tile_size + plane % planes_a_tile * plane_size +
                    (long long)first_line * (down ? 1 : pitch);
        const int across = down ? 1 : pitch, along = down ? pitch : 1;
        lines.every(0, 1, [&](int line, int i) {
            const bool is_low = i < low;
            const int position = is_low ? 2 * i + first : 2 * (i - low) + 1 - first;
            const T value = corner[(long long)line * across + (long long)i * along];
            lines.at(samples, line, position) = length > 1 ? weighted(value, is_low) : value;
        });
        invert(lines, samples, first);
        lines.every(0, 1, [&](int line, int i) {
            corner[(long long)line * across + (long long)i * along] = lines.at(samples, line, i);
        });
    }
}

extern "C" __global__ void invert_wavelet(void *planes, int tiles, int planes_a_tile,
                                          long long tile_size, long long plane_size, int pitch,
                                          int lines, int length, int low, int first, int down,
                                          int at_once, int reversible) {
    __shared__ int samples[LINE_SAMPLES];
    if (reversible)
        invert_lines((int *)planes, tiles, planes_a_tile, tile_size, plane_size, pitch, lines,
                     length, low, first, down, at_once, samples);
    else
        invert_lines((float *)planes, tiles, planes_a_tile, tile_size, plane_size, pitch,
                            lines, length, low, first, down, at_once, (float *)samples);
}
