// High-throughput code blocks (T.814, section 7 and annex B), decoded by a thread each: a cleanup
// pass over quads of 2 by 2 samples, which two refinement passes may follow.

// Bits of a segment that is read forward, from the lowest bit of each byte. The highest bit of a
// byte that follows 255 is stuffed (T.814, 7.1). filling: the byte that is read beyond the end.
struct Forward {
    const unsigned char *at, *end;
    unsigned filling;
    Word bits;
    int count;
    bool stuffed;

    __device__ void need(int wanted) {
        while (count < wanted) {
            const unsigned byte = at < end ? *at++ : filling;
            bits |= (Word)byte << count;
            count += stuffed ? 7 : 8;
            stuffed = byte == 255;
        }
    }
    __device__ void drop(int used) {
        bits >>= used;
        count -= used;
    }
    __device__ unsigned take() {
        need(1);
        const unsigned bit = bits & 1;
        drop(1);
        return bit;
    }
};

// Bits of a segment that is read backward, down to `start`; zeros follow. After a byte above 0x8f,
// the highest bit of 0x7f is stuffed.
struct Backward {
    const unsigned char *at, *start;
    Word bits;
    int count;
    bool large;

    __device__ void need(int wanted) {
        while (count < wanted) {
            const unsigned byte = at > start ? *--at : 0;
            const bool stuffed = large && (byte & 127) == 127;
            bits |= (Word)byte << count;
            count += stuffed ? 7 : 8;
            large = byte > 0x8f;
        }
    }
    __device__ void drop(int used) {
        bits >>= used;
        count -= used;
    }
};

// The adaptive run-length decoder (T.814, 7.3.3): runs of zeros, most of which end with a one. The
// last byte shares its lower half with the segment that is read backward; ones follow.
struct Runs {
    const unsigned char *at, *last;
    unsigned bits;
    int count, state, left;
    bool stuffed, ends, wrong;

    __device__ unsigned take(int wanted) {
        while (count < wanted) {
            const bool inside = at <= last;
            const unsigned byte = inside ? *at | (at == last ? 15 : 0) : 255;
            wrong |= inside && stuffed && byte > 127;
            at += inside;
            bits = bits << (stuffed ? 7 : 8) | (stuffed ? byte & 127 : byte);
            count += stuffed ? 7 : 8;
            stuffed = byte == 255;
        }
        count -= wanted;
        return bits >> count & ((1u << wanted) - 1);
    }
    __device__ bool next() {
        if (!left && !ends) {
            // Exponents of the 13 states (table 2).
            const int exponent = state < 10 ? state / 3 : state - 7;
            if (take(1)) {
                left = 1 << exponent;
                state = min(state + 1, 12);
            } else {
                left = take(exponent);
                ends = true;
                state = max(state - 1, 0);
            }
        }
        if (left) {
            --left;
            return false;
        }
        ends = false;
        return true;
    }
};

// Lengths of the prefix and suffix of an unsigned residual, and its least value (table 3).
struct Residual {
    int prefix, suffix, least;

    __device__ explicit Residual(Backward &codes) {
        const int zeros = __ffs((int)codes.bits & 7);
        prefix = zeros ? zeros : 3;
        suffix = zeros ? zeros == 3 : 5;
        least = zeros ? zeros : 5;
        codes.drop(prefix);
    }
    __device__ int value(Backward &codes) const {
        const int found = least + (int)(codes.bits & ((1u << suffix) - 1));
        codes.drop(suffix);
        return found;
    }
};

// Read the residuals of two quads (7.3.6). Both are coded if `both`; `long_ones`: both exceed 2.
__device__ void read_residuals(Backward &codes, bool first, bool second, bool top, bool long_ones,
                               int *residuals) {
    residuals[0] = residuals[1] = 0;
    codes.need(32);
    if (first && second) {
        const Residual one(codes);
        if (top && !long_ones && one.prefix == 3) {
            residuals[1] = 1 + (int)(codes.bits & 1);
            codes.drop(1);
            residuals[0] = one.value(codes);
            return;
        }
        const Residual other(codes);
        residuals[0] = one.value(codes) + 2 * long_ones;
        residuals[1] = other.value(codes) + 2 * long_ones;
    } else if (first || second) {
        const Residual one(codes);
        residuals[second] = one.value(codes);
    }
}

// Where a code block's coefficients are written: magnitudes with half a step, and signs in bit 31,
// until `finished` converts them.
struct Target {
    int *corner;
    int pitch, width, height;
    bool reversible;
    float scale;

    __device__ unsigned &at(int x, int y) const {
        return *(unsigned *)(corner + (long long)y * pitch + x);
    }
    __device__ unsigned finished(unsigned value) const {
        const int size = value & 0x7fffffff, whole = size >> 1;
        const bool below = value >> 31;
        if (reversible) return below ? -whole : whole;
        const float real = (float)size * scale;
        return __float_as_int(below ? -real : real);
    }
    template <typename Change> __device__ void replace(Change change) const {
        for (int y = 0; y < height; ++y)
            for (int x = 0; x < width; ++x) at(x, y) = change(at(x, y));
    }
    __device__ bool significant(int x, int y, int rows) const {
        return x >= 0 && x < width && y >= 0 && y < rows && at(x, y);
    }
};

// Decode the cleanup pass (7.3). least: number of the bit plane it ends with, plus 1; most: greatest
// number of magnitude bits; old: per quad of the row above, its samples next to the row below: see
// `carry`; step: distance of its elements. Return whether the segment is sound.
__device__ bool clean_up(const unsigned char *bytes, int length, int least, int most, bool final,
                         const unsigned short *tables, unsigned char *old, int step,
                         const Target &target) {
    if (length < 2) return false;
    const int suffix = bytes[length - 1] << 4 | bytes[length - 2] & 15;
    if (suffix < 2 || suffix > min(length, 4079)) return false;
    const unsigned char *const middle = bytes + length - suffix;
    Forward magnitudes = {bytes, middle, 255, 0, 0, false};
    Runs runs = {middle, bytes + length - 2, 0, 0, 0, 0, false, false, false};
    const unsigned half = bytes[length - 2] >> 4;
    Backward codes = {bytes + length - 2, middle, half, (half & 7) == 7 ? 3 : 4, half > 8};
    const int quads = (target.width + 1) / 2;
    for (int y = 0; y < target.height; y += 2) {
        const bool top = !y;
        const unsigned short *const table = tables + (top ? 0 : 1024);
        // Bits 0 to 6 are the largest exponent of the last sample of the quad to the left and the
        // first one of this quad, in the lower row; bit 7 tells whether one of them is significant.
        unsigned carry = 0, above = top ? 0 : old[0];
        int context = 0;
        for (int quad = 0; quad < quads; quad += 2) {
            const unsigned next = top ? 0 : old[(quad + 1) * step];
            const unsigned after = top ? 0 : old[(quad + 2) * step];
            unsigned found[2] = {0, 0};
            codes.need(16);
            for (int k = 0; k < 2 && quad + k < quads; ++k) {
                if (!top)
                    context |= (k ? next : above) >> 7 | ((k ? after : next) >> 5 & 4);
                if (context || runs.next()) {
                    found[k] = table[context << 7 | codes.bits & 127];
                    codes.drop(found[k] & 7);
                }
                const unsigned samples = found[k] >> 4 & 15;
                context = top ? samples & 1 | samples >> 1 : (samples >> 1 | samples >> 2) & 2;
            }
            const bool first = found[0] & 8, second = found[1] & 8;
            int sizes[2];
            read_residuals(codes, first, second, top, top && first && second && runs.next(), sizes);
            for (int k = 0; k < 2; ++k) {
                const unsigned samples = found[k] >> 4 & 15;
                int predicted = 1;
                if (!top && samples & samples - 1)
                    predicted = max(1, (int)max((k ? next : above) & 127, (k ? after : next) & 127) - 1);
                sizes[k] += predicted;
                if (sizes[k] > most) return false;
            }
            above = after;
            unsigned values[8];
            for (int i = 0; i < 8; ++i) {
                const int k = i / 4, x = 2 * (quad + k) + i % 4 / 2;
                values[i] = 0;
                unsigned exponent = 0;
                if (found[k] >> (4 + i % 4) & 1) {
                    if (x >= target.width || y + i % 2 >= target.height) return false;
                    const int bits = sizes[k] - (int)(found[k] >> (12 + i % 4) & 1);
                    magnitudes.need(max(bits, 1));
                    const unsigned sign = (unsigned)magnitudes.bits << 31;
                    unsigned value = (unsigned)magnitudes.bits & ((1u << bits) - 1);
                    magnitudes.drop(bits);
                    value |= (found[k] >> (8 + i % 4) & 1) << bits | 1;
                    values[i] = sign | (value + 2) << (least - 1);
                    exponent = 0x80 | 32 - __clz(value);
                }
                if (i % 4 == 1 && quad + k < quads)
                    old[(quad + k) * step] = max(carry & 127, exponent & 127) | (carry | exponent) & 128;
                if (i % 4 == 3 && quad + k < quads) carry = exponent;
            }
            for (int i = 0; i < 8; ++i) {
                const int x = 2 * quad + i / 2;
                if (x < target.width && y + i % 2 < target.height)
                    target.at(x, y + i % 2) = final ? target.finished(values[i]) : values[i];
            }
        }
        old[quads * step] = carry;
        if (quads & 1) old[(quads + 1) * step] = 0;
    }
    return !runs.wrong;
}

// Decode the refinement passes (7.4 and 7.5), whose segment is read from both ends. Samples that the
// cleanup pass found are refined by one bit; others with a significant neighbor may become
// significant. least: as for the cleanup pass.
__device__ void refine_block(const unsigned char *bytes, int length, bool magnitudes, int least,
                             bool causal, const Target &target) {
    Forward ahead = {bytes, bytes + length, 0, 0, 0, false};
    Backward back = {bytes + length, bytes, 0, 0, true};
    if (magnitudes)
        for (int y = 0; y < target.height; y += 4)
            for (int x = 0; x < target.width; ++x)
                for (int row = y; row < min(y + 4, target.height); ++row) {
                    unsigned &value = target.at(x, row);
                    if (!value) continue;
                    back.need(1);
                    value ^= (unsigned)(~back.bits & 1) << (least - 1);
                    value |= 1u << (least - 2);
                    back.drop(1);
                }
    for (int y = 0; y < target.height; y += 4) {
        const int bottom = min(y + 4, target.height), rows = causal ? bottom : target.height;
        for (int first = 0; first < target.width; first += 4) {
            // The signs of 4 columns follow their significance.
            unsigned fresh = 0;
            for (int i = 0; i < 16; ++i) {
                const int x = first + i / 4, row = y + i % 4;
                if (x >= target.width || row >= bottom || target.at(x, row)) continue;
                bool near = false;
                for (int k = 0; k < 9; ++k)
                    near |= target.significant(x + k % 3 - 1, row + k / 3 - 1, rows);
                if (near && ahead.take()) {
                    target.at(x, row) = 3u << (least - 2);
                    fresh |= 1u << i;
                }
            }
            for (; fresh; fresh &= fresh - 1) {
                const int i = __ffs((int)fresh) - 1;
                target.at(first + i / 4, y + i % 4) |= ahead.take() << 31;
            }
        }
    }
}

// Decode one code block; return whether it is sound. found, block: its state and properties; records:
// of its tile; others as for decode_fast_blocks.
__device__ bool decode_fast_block(const unsigned char *encoded, const Block &block,
                                  const BlockState &found, const Record *records,
                                  const unsigned short *codes, unsigned char *line, int step,
                                  int *out) {
    const Target target = {out + block.target, block.pitch,      block.width,
                           block.height, (bool)block.reversible, block.scale};
    if (!found.passes) {
        target.replace([](unsigned) { return 0u; });
        return true;
    }
    const Record &record = records[found.first];
    // A refinement segment without bytes is ignored, as OpenJPEG does.
    const Record *more = record.next < 0 ? nullptr : records + record.next;
    if (more && !more->length) more = nullptr;
    if (!clean_up(encoded + record.offset, record.length, found.planes,
                  block.planes - found.planes + 2, !more, codes, line, step, target))
        return false;
    if (more) {
        refine_block(encoded + more->offset, more->length, more->passes > 1, found.planes,
                     block.style & CAUSAL, target);
        target.replace([&](unsigned value) { return target.finished(value); });
    }
    return true;
}

// Decode all code blocks. work: code blocks in the order of `sort_work`; lines: memory for a row of
// quads of each; tables: of T.814, annex C, see jpeg2000_tables.py; out: see assemble_coefficients;
// status: set for tiles with a damaged code block.
extern "C" __global__ void __launch_bounds__(THREADS_OF_BLOCKS)
    decode_fast_blocks(const unsigned char *encoded, const Block *blocks, int block_count,
                       const BlockState *states, const Record *records, int record_count,
                       const int *work, int work_count, const Tables *tables, unsigned char *lines,
                       long long tile_size, int *out, int *status) {
    __shared__ unsigned short codes[2048];
    for (int i = threadIdx.x; i < 2048; i += blockDim.x) codes[i] = tables->quads[i];
    __syncthreads();
    for (int item = blockIdx.x * blockDim.x + threadIdx.x; item < work_count;
         item += gridDim.x * blockDim.x) {
        const int number = work[item], tile = number / block_count;
        if (!decode_fast_block(encoded, blocks[number % block_count], states[number],
                               records + (size_t)tile * record_count, codes, lines + item,
                               work_count, out + tile * tile_size))
            status[tile] = DAMAGED;
    }
}
