// High-throughput code blocks (T.814, section 7 and annex B). One kernel reads the variable-length
// codes of all quads of 2 by 2 samples, a thread per code block. They tell how many bits each sample
// has in the segment of magnitudes, so another kernel reads the samples of a row of quads in
// parallel, a block of threads per code block.

// Bits of a segment that is read forward, from the lowest bit of each byte. The highest bit of a
// byte that follows 255 is stuffed (7.1). Zeros follow.
struct Forward {
    const unsigned char *at, *end;
    Word bits;
    int count;
    bool stuffed;

    __device__ void need(int wanted) {
        while (count < wanted) {
            const unsigned byte = at < end ? *at++ : 0;
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

// Read the residuals of two quads (7.3.6). first, second: whether each is coded; top: whether they are
// in the first row; long_ones: whether both exceed 2.
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
    // Replace all coefficients; all threads of a block have to take part.
    template <typename Change> __device__ void replace(Change change) const {
        for (int y = 0; y < height; ++y)
            for (int x = threadIdx.x; x < width; x += blockDim.x) at(x, y) = change(at(x, y));
    }
    __device__ bool significant(int x, int y, int rows) const {
        return x >= 0 && x < width && y >= 0 && y < rows && at(x, y);
    }
};

// Decode the refinement passes (7.4 and 7.5), whose segment is read from both ends. Samples that the
// cleanup pass found are refined by one bit; others with a significant neighbor may become
// significant. least: as for read_magnitudes.
__device__ void refine_block(const unsigned char *bytes, int length, bool magnitudes, int least,
                             bool causal, const Target &target) {
    Forward ahead = {bytes, bytes + length, 0, 0, false};
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

// Read the codes of a code block's quads (7.3.4 to 7.3.6); return whether the segment is sound. For
// each quad, `quads` gets its entry in jpeg2000_tables.py, shifted right by 4, and from bit 16 on its
// residual; rows are padded to an even number of quads. tables: see _quads there.
__device__ bool read_codes(const unsigned char *bytes, int length, int width, int height,
                           const unsigned short *tables, uint2 *quads) {
    if (length < 2) return false;
    const int suffix = bytes[length - 1] << 4 | bytes[length - 2] & 15;
    if (suffix < 2 || suffix > min(length, 4079)) return false;
    const unsigned char *const middle = bytes + length - suffix;
    Runs runs = {middle, bytes + length - 2, 0, 0, 0, 0, false, false, false};
    const unsigned half = bytes[length - 2] >> 4;
    Backward codes = {bytes + length - 2, middle, half, (half & 7) == 7 ? 3 : 4, half > 8};
    const int count = (width + 1) / 2;
    // For each quad, whether its first sample of the lower row or the last one of the quad before it
    // is significant.
    unsigned lines[MOST_QUADS / 32 + 2];
    for (int y = 0; y < height; y += 2) {
        const bool top = !y;
        const unsigned short *const table = tables + (top ? 0 : 1024);
        Word above = 0;
        unsigned below = 0, carry = 0;
        int context = 0;
        for (int quad = 0; quad < count; quad += 2, ++quads) {
            const int place = quad % 32;
            if (!place) above = top ? 0 : lines[quad / 32] | (Word)lines[quad / 32 + 1] << 32;
            const unsigned near = above >> place;
            unsigned found[2] = {0, 0};
            codes.need(16);
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                if (quad + k >= count) break;
                if (!top) context |= near >> k & 1 | (near >> k & 2) << 1;
                if (context || runs.next()) {
                    found[k] = table[context << 7 | codes.bits & 127];
                    codes.drop(found[k] & 7);
                }
                const unsigned samples = found[k] >> 4 & 15;
                context = top ? samples & 1 | samples >> 1 : (samples >> 1 | samples >> 2) & 2;
                below |= (carry | samples >> 1 & 1) << (place + k);
                carry = samples >> 3;
            }
            const bool first = found[0] & 8, second = found[1] & 8;
            int residuals[2];
            read_residuals(codes, first, second, top, top && first && second && runs.next(),
                           residuals);
            *quads = uint2{found[0] >> 4 | residuals[0] << 16, found[1] >> 4 | residuals[1] << 16};
            if (place == 30 || quad + 2 >= count) {
                lines[quad / 32] = below;
                below = 0;
            }
        }
        // Bit `count`.
        if (count % 32) lines[count / 32] |= carry << count % 32;
        else lines[count / 32] = carry;
        lines[count / 32 + 1] = 0;
    }
    return !runs.wrong;
}

// Read the codes of all code blocks. work: code blocks in the order of `sort_work`; most_quads: room
// for each in `quads`, which is a multiple of 2; status: set for tiles with a damaged code block.
extern "C" __global__ void __launch_bounds__(THREADS_OF_BLOCKS)
    read_quads(const unsigned char *encoded, const Block *blocks, int block_count,
               const BlockState *states, const Record *records, int record_count, const int *work,
               int work_count, const Tables *tables, int most_quads, uint2 *quads, int *status) {
    __shared__ unsigned short codes[2048];
    for (int i = threadIdx.x; i < 2048; i += blockDim.x) codes[i] = tables->quads[i];
    __syncthreads();
    for (int item = blockIdx.x * blockDim.x + threadIdx.x; item < work_count;
         item += gridDim.x * blockDim.x) {
        const int number = work[item], tile = number / block_count;
        const BlockState &found = states[number];
        if (!found.passes) continue;
        const Record &record = records[(size_t)tile * record_count + found.first];
        const Block &block = blocks[number % block_count];
        if (!read_codes(encoded + record.offset, record.length, block.width, block.height, codes,
                        quads + (size_t)item * (most_quads / 2)))
            status[tile] = DAMAGED;
    }
}

// Return the sum of the values of all threads before this one, and in `total` of all. sums: shared
// memory for a number per thread.
__device__ int sum_before(int value, int *sums, int &total) {
    const int me = threadIdx.x;
    sums[me] = value;
    __syncthreads();
    for (int step = 1; step < (int)blockDim.x; step *= 2) {
        const int other = me >= step ? sums[me - step] : 0;
        __syncthreads();
        sums[me] += other;
        __syncthreads();
    }
    const int found = sums[me] - value;
    total = sums[blockDim.x - 1];
    __syncthreads();
    return found;
}

// A part of the segment of magnitudes without stuffed bits, in a ring in shared memory. `bytes` are
// loaded up to `end`, after which bytes of 255 follow; first, last: bits that are there.
struct Ring {
    const unsigned char *bytes, *end;
    unsigned *words;
    int *sums;
    int next, first, last;

    // Append 4 bytes per thread; a byte that follows 255 has 7 bits (7.1).
    __device__ void append() {
        const unsigned char *at = bytes + next + 4 * threadIdx.x;
        unsigned before = at == bytes ? 0 : at <= end ? at[-1] : 255;
        Word value = 0;
        int count = 0, total;
        for (int i = 0; i < 4; ++i) {
            const unsigned byte = at + i < end ? at[i] : 255;
            value |= (Word)byte << count;
            count += before == 255 ? 7 : 8;
            before = byte;
        }
        const int start = last + sum_before(count, sums, total), shift = start % 32;
        atomicOr(words + start / 32 % RING, (unsigned)(value << shift));
        atomicOr(words + (start / 32 + 1) % RING, (unsigned)(value << shift >> 32));
        next += 4 * blockDim.x;
        last += total;
        __syncthreads();
    }
    // Return 32 bits from the one at `place` on.
    __device__ unsigned at(int place) const {
        const Word low = words[place / 32 % RING], high = words[(place / 32 + 1) % RING];
        return (unsigned)((high << 32 | low) >> place % 32);
    }
    // Forget `count` bits.
    __device__ void drop(int count) {
        __syncthreads();
        for (int i = first / 32 + threadIdx.x; i < (first + count) / 32; i += blockDim.x)
            words[i % RING] = 0;
        first += count;
    }
};

// Shared memory of a block of threads that decodes a code block. left, right: for even and odd rows
// of quads, exponents of the lower samples of each quad.
struct Magnitudes {
    unsigned words[RING];
    int sums[THREADS_OF_MAGNITUDES];
    unsigned char left[2][MOST_QUADS + 2], right[2][MOST_QUADS + 2];
};

// Decode the samples of a code block (7.3.7); return whether this thread's samples are sound. least:
// number of the last bit plane, plus 1; most: greatest number of bits of a magnitude.
__device__ bool read_magnitudes(const unsigned char *bytes, int length, int least, int most,
                                bool final, const unsigned *quads, const Target &target,
                                Magnitudes &shared) {
    const int suffix = bytes[length - 1] << 4 | bytes[length - 2] & 15;
    Ring ring = {bytes, bytes + length - suffix, shared.words, shared.sums, 0, 0, 0};
    const int across = (target.width + 1) / 2, step = blockDim.x;
    bool good = true;
    for (int i = threadIdx.x; i < RING; i += step) ring.words[i] = 0;
    for (int y = 0; y < target.height; y += 2, quads += (across + 1) / 2 * 2) {
        const int odd = y / 2 % 2;
        const unsigned char *const left = shared.left[odd], *const right = shared.right[odd];
        unsigned char *const new_left = shared.left[!odd], *const new_right = shared.right[!odd];
        for (int start = 0; start < across; start += step) {
            const int quad = start + threadIdx.x;
            const unsigned entry = quad < across ? quads[quad] : 0;
            const unsigned samples = entry & 15;
            int size = 1;
            if (y && samples & samples - 1) {
                int exponent = max(left[quad], right[quad]);
                if (quad) exponent = max(exponent, (int)right[quad - 1]);
                if (quad + 1 < across) exponent = max(exponent, (int)left[quad + 1]);
                size = max(1, exponent - 1);
            }
            size += entry >> 16;
            if (size > most) {
                good = false;
                size = 1;
            }
            int counts[4], sum = 0, total;
            for (int i = 0; i < 4; ++i) {
                counts[i] = samples >> i & 1 ? size - (int)(entry >> (8 + i) & 1) : 0;
                sum += counts[i];
            }
            int place = ring.first + sum_before(sum, shared.sums, total);
            while (ring.last - ring.first < total) ring.append();
            unsigned exponents[4];
            for (int i = 0; i < 4; ++i) {
                const int x = 2 * quad + i / 2;
                const bool inside = x < target.width && y + i % 2 < target.height;
                unsigned value = 0, magnitude = 0;
                if (samples >> i & 1) {
                    const unsigned bits = ring.at(place);
                    magnitude = bits & ((1u << counts[i]) - 1) |
                                (entry >> (4 + i) & 1) << counts[i] | 1;
                    value = bits << 31 | (magnitude + 2) << (least - 1);
                    place += counts[i];
                    good &= inside;
                }
                exponents[i] = 32 - __clz(magnitude);
                if (inside) target.at(x, y + i % 2) = final ? target.finished(value) : value;
            }
            if (quad < across) {
                new_left[quad] = exponents[1];
                new_right[quad] = exponents[3];
            }
            ring.drop(total);
        }
    }
    return good;
}

// Decode the samples of all code blocks from what `read_quads` found; parameters as there. out: see
// assemble_coefficients.
extern "C" __global__ void __launch_bounds__(THREADS_OF_MAGNITUDES)
    read_samples(const unsigned char *encoded, const Block *blocks, int block_count,
                 const BlockState *states, const Record *records, int record_count,
                 const int *work, int work_count, int most_quads, const unsigned *quads,
                 long long tile_size, int *out, int *status) {
    __shared__ Magnitudes shared;
    for (int item = blockIdx.x; item < work_count; item += gridDim.x) {
        const int number = work[item], tile = number / block_count;
        const BlockState &found = states[number];
        const Block &block = blocks[number % block_count];
        const Target target = {out + tile * tile_size + block.target, block.pitch, block.width,
                               block.height, (bool)block.reversible, block.scale};
        if (!found.passes) {
            target.replace([](unsigned) { return 0u; });
            continue;
        }
        const Record *const mine = records + (size_t)tile * record_count;
        const Record &record = mine[found.first];
        // A refinement segment without bytes is ignored, as OpenJPEG does.
        const Record *more = record.next < 0 ? nullptr : mine + record.next;
        if (more && !more->length) more = nullptr;
        if (!read_magnitudes(encoded + record.offset, record.length, found.planes,
                             block.planes - found.planes + 2, !more,
                             quads + (size_t)item * most_quads, target, shared))
            status[tile] = DAMAGED;
        __syncthreads();
        if (more) {
            if (!threadIdx.x)
                refine_block(encoded + more->offset, more->length, more->passes > 1, found.planes,
                             block.style & CAUSAL, target);
            __syncthreads();
            target.replace([&](unsigned value) { return target.finished(value); });
        }
    }
}
