// A kernel that decodes the entropy-coded scans of JPEG tiles (ITU-T T.81) to planes of samples.
// `jpeg_kernels.py` puts the definitions of Scan, Form and Code, and of THREADS and the other
// constants, before this text.
//
// A Huffman code can be read from any of its bits on: after some wrong symbols, the decoder finds the
// right ones (Weissenbach and Schmidt, "Accelerating JPEG decompression on GPUs", 2021). So each
// thread reads a part of the scan, and reads it again as long as the thread before it ends elsewhere
// than it did before. Then all know where their MCUs are, and decode them. If all components have the
// same codes, nothing tells the blocks of an MCU apart until those before them are counted.

// The next bits of a scan, from the highest one. A scan is loaded as aligned words, none of which
// lies completely beyond its last byte.
struct Bits {
    const unsigned int *words;
    int next, past;      // indices of the next word and of the first one beyond the scan
    unsigned int ahead;  // the next word, loaded early because loads take long
    unsigned long long bits;
    int count;  // of valid bits
};

static __device__ void load(Bits &in) {
    in.ahead = in.next < in.past ? in.words[in.next] : 0;
    ++in.next;
}

// Make sure that there are at least 32 bits.
static __device__ void fill(Bits &in) {
    if (in.count >= 32) return;
    const unsigned int word = in.ahead;
    load(in);
    const unsigned int swapped =
        word << 24 | (word & 0xff00) << 8 | (word >> 8 & 0xff00) | word >> 24;
    in.bits |= (unsigned long long)swapped << (32 - in.count);
    in.count += 32;
}

static __device__ void skip(Bits &in, int count) {
    in.bits <<= count;
    in.count -= count;
}

// Position of the next bit, relative to the first word.
static __device__ int position(const Bits &in) { return 32 * (in.next - 1) - in.count; }

static __device__ void seek(Bits &in, int position) {
    in.next = position / 32;
    in.bits = in.count = 0;
    load(in);
    fill(in);
    skip(in, position % 32);
}

// Return the table entry of the next Huffman code, 0 if the bits are no code, and skip its bits.
static __device__ unsigned int take_code(Bits &in, const Code &code) {
    fill(in);
    unsigned int entry = code.quick[in.bits >> (64 - QUICK)];
    if (!entry) {
        const int value = in.bits >> 48;
        int length = QUICK + 1;
        while (length <= LONGEST && value >= code.ends[length]) ++length;
        if (length > LONGEST) return 0;
        entry = code.entries[(value >> (LONGEST - length)) + code.shifts[length] & 255];
    }
    skip(in, entry & LENGTH);
    return entry;
}

// Return the value of an entry; if its bits (T.81, F.2.2.1) follow the code, take them. After a
// code of at most 16 bits, there are 16 bits left.
static __device__ int take_value(Bits &in, unsigned int entry) {
    const int size = entry >> SIZE & 15;
    if (!size) return (int)entry >> VALUE;
    const int value = (unsigned int)(in.bits >> 32) >> (32 - size);
    skip(in, size);
    return value < 1 << (size - 1) ? value - (1 << size) + 1 : value;
}

// Decode a block (T.81, F.2.2): add the difference of its DC coefficient to `sum`, and write the
// others to `block`, which is zero, unless it is null. Return whether the block is valid.
static __device__ bool take_block(Bits &in, const Form &form, const Code *codes, int component,
                                  int &sum, short *block) {
    unsigned int entry = take_code(in, codes[form.dc[component]]);
    if (!entry) return false;
    sum += take_value(in, entry);
    const Code &code = codes[form.ac[component]];
    for (int k = 1; k < 64; ++k) {
        entry = take_code(in, code);
        if (entry & END) return true;
        k += entry >> RUN & 15;
        if (!entry || k > 63) return false;
        const int value = take_value(in, entry);
        if (block) block[form.order[k]] = value;
    }
    return true;
}

// What a thread has found in its part of a scan. start: the first bit of its first MCU; units:
// number of MCUs that begin in the part; before, after: sums of DC differences of each component
// before the first MCU and from there on; blocks: number of blocks; end: position of the first block
// after the part, and which one of its MCU it is.
struct Part {
    int start, units, before[3], after[3], blocks, end, block;
};

// Read blocks from `position` on, which is the first bit of the given block of an MCU, up to `limit`.
static __device__ Part read_part(Bits in, const Form &form, const Code *codes, int lumas,
                                 int blocks, int block, int first, int limit) {
    Part part = {0, 0, {0, 0, 0}, {0, 0, 0}, 0, 0, 0};
    seek(in, first);
    while (position(in) < limit) {
        if (!block && !part.units++) part.start = position(in);
        const int component = block < lumas ? 0 : block - lumas + 1;
        int difference = 0;
        const bool good = take_block(in, form, codes, component, difference, 0);
        for (int i = 0; i < 3; ++i)
            if (i == component) (part.units ? part.after : part.before)[i] += difference;
        if (!good) skip(in, 1);
        ++part.blocks;
        block = good && block + 1 < blocks ? block + 1 : 0;
    }
    part.end = position(in);
    part.block = block;
    return part;
}

// Remove the zero bytes that are stuffed after 255 (T.81, F.1.2.3) from a scan, in place; return the
// number of bytes that remain, -1 if there is a marker or a byte is missing at the end.
static __device__ int unstuff(unsigned char *scan, int length) {
    __shared__ int counts[THREADS], damaged;
    const int lane = threadIdx.x, lanes = blockDim.x;
    if (!lane) damaged = length && scan[length - 1] == 255;
    int done = 0;
    for (int start = 0; start < length; start += lanes * CHUNK) {
        const int from = start + lane * CHUNK, size = min(max(length - from, 0), CHUNK);
        unsigned char bytes[CHUNK];
        // Bytes are only moved forward, so the one before this chunk is still there.
        bool stuffed = size && from && scan[from - 1] == 255, marked = false;
        int kept = 0;
        for (int i = 0; i < size; ++i) {
            const unsigned char byte = scan[from + i];
            if (stuffed) {
                marked |= byte != 0;
            } else {
                bytes[kept++] = byte;
            }
            stuffed = !stuffed && byte == 255;
        }
        counts[lane] = kept;
        __syncthreads();
        if (marked) atomicAdd(&damaged, 1);
        int to = done;
        for (int i = 0; i < lanes; ++i) {
            if (i < lane) to += counts[i];
            done += counts[i];
        }
        for (int i = 0; i < kept; ++i) scan[to + i] = bytes[i];
        __syncthreads();
    }
    __syncthreads();
    return damaged ? -1 : done;
}

// Transform a column or row of eight values as libjpeg's accurate integer method does (jidctint.c),
// which defines the factors and their order; `shift` bits are rounded off.
static __device__ void transform(int *values, int shift) {
    const int middle = (values[2] + values[6]) * 4433;
    const int even = middle + values[2] * 6270, odd = middle - values[6] * 15137;
    const int sum = (values[0] + values[4]) << 13, difference = (values[0] - values[4]) << 13;
    const int round = 1 << (shift - 1);
    const int front[4] = {sum + even + round, difference + odd + round, difference - odd + round,
                          sum - even + round};
    const int outer = (values[7] + values[1]) * -7373, inner = (values[5] + values[3]) * -20995;
    const int fifth = (values[7] + values[3] + values[5] + values[1]) * 9633;
    const int third = (values[7] + values[3]) * -16069 + fifth;
    const int fourth = (values[5] + values[1]) * -3196 + fifth;
    const int back[4] = {values[1] * 12299 + outer + fourth, values[3] * 25172 + inner + third,
                         values[5] * 16819 + inner + fourth, values[7] * 2446 + outer + third};
    for (int i = 0; i < 4; ++i) {
        values[i] = (front[i] + back[i]) >> shift;
        values[7 - i] = (front[i] - back[i]) >> shift;
    }
}

// Decode one scan per block of threads. components: 1 or 3; across, down: luma samples per chroma
// sample; height, width: size of the first plane. flags: set to 1 for each scan that isn't encoded
// properly, or whose values are so large that libjpeg's implementations differ.
extern "C" __global__ void decode_jpeg(const Scan *scans, const Form *forms, const Code *codes,
                                       int components, int across, int down, int height, int width,
                                       int *flags) {
    // Coefficients of each thread's block. One word more than necessary avoids bank conflicts.
    __shared__ short coefficients[THREADS][64 + 2];
    // Where the part before each thread's ends, and in which block; later, first MCUs and counts.
    __shared__ int positions[THREADS + 1], numbers[THREADS + 1];
    __shared__ Part parts[THREADS];
    __shared__ int changed;
    const Form &form = *forms;
    const Scan scan = scans[blockIdx.x];
    const int lane = threadIdx.x, lanes = blockDim.x;
    const int lumas = across * down, blocks = components == 1 ? 1 : lumas + 2;
    const int wide = (width + 8 * across - 1) / (8 * across);
    const int units = wide * ((height + 8 * down - 1) / (8 * down));
    const int skipped = scan.source & 3, size = unstuff((unsigned char *)scan.source, scan.length);
    const int begin = 8 * skipped, limit = begin + 8 * max(size, 0);
    Bits in = {(const unsigned int *)(scan.source - skipped), 0, (limit + 31) / 32, 0, 0, 0};
    // Parts of at least SHORTEST bits, as a thread needs some to find the right symbols.
    const int length = max((limit - begin + lanes - 1) / lanes, SHORTEST);
    const int from = begin + lane * length, to = min(from + length, limit);
    int first = from, block = 0;
    bool again = size > 0;
    for (int round = 0; round < lanes; ++round) {
        if (again) {
            parts[lane] = read_part(in, form, codes, lumas, blocks, block, first, to);
            positions[lane + 1] = parts[lane].end;
            numbers[lane + 1] = parts[lane].block;
        }
        if (!lane) changed = 0;
        __syncthreads();
        again = lane && size > 0 &&
               (positions[lane] != first || (!form.alike && numbers[lane] != block));
        if (again) {
            first = positions[lane];
            block = numbers[lane];
            atomicAdd(&changed, 1);
        }
        __syncthreads();
        if (!changed) break;
        __syncthreads();
    }
    if (form.alike && size > 0) {
        block = 0;
        for (int i = 0; i < lane; ++i) block += parts[i].blocks;
        __syncthreads();
        parts[lane] = read_part(in, form, codes, lumas, blocks, block % blocks, first, to);
    }
    __syncthreads();
    // The number of this thread's first MCU, of all MCUs, and the DC coefficients before it.
    int unit = 0, found = 0, last_dc[3] = {0, 0, 0};
    for (int i = 0; i < lanes && size > 0; ++i) {
        for (int k = 0; k < 3 && i <= lane; ++k)
            last_dc[k] += parts[i].before[k] + (i < lane ? parts[i].after[k] : 0);
        if (i < lane) unit += parts[i].units;
        found += parts[i].units;
    }
    bool good = size > 0 && found >= units;
    // Padding may look like more MCUs.
    const int mine = good ? max(min(parts[lane].units, units - unit), 0) : 0;
    __syncthreads();
    positions[lane] = unit;
    numbers[lane] = mine;
    for (int i = 0; i < 64; ++i) coefficients[lane][i] = 0;
    __syncthreads();
    int steps = 0;
    for (int i = 0; i < lanes; ++i) steps = max(steps, numbers[i]);
    if (mine) seek(in, parts[lane].start);
    for (int step = 0; step < steps * blocks; ++step) {
        const int k = step % blocks, component = k < lumas ? 0 : k - lumas + 1;
        const bool luma = !component;
        const int pitch = luma ? width : (width + across - 1) / across;
        const int rows = luma ? height : (height + down - 1) / down;
        if (step / blocks < mine && good) {
            short *block = coefficients[lane];
            good = take_block(in, form, codes, component, last_dc[component], block);
            *block = last_dc[component];
            good &= *block == last_dc[component];
        }
        __syncthreads();
        for (int i = lane; i < lanes * 8; i += lanes) {
            if (step / blocks >= numbers[i / 8]) continue;
            short *column = coefficients[i / 8] + i % 8;
            const int *factors = form.steps + 64 * component + i % 8;
            int values[8], total = 0;
            for (int y = 0; y < 8; ++y) {
                values[y] = column[8 * y] * factors[8 * y];
                if (abs(values[y]) > LARGEST_COLUMN) values[y] = LARGEST_COLUMN + 1;
                total += abs(values[y]);
            }
            good &= total <= LARGEST_COLUMN;
            transform(values, 11);
            for (int y = 0; y < 8; ++y) column[8 * y] = values[y];
        }
        __syncthreads();
        for (int i = lane; i < lanes * 8; i += lanes) {
            if (step / blocks >= numbers[i / 8]) continue;
            short *row = coefficients[i / 8] + 8 * (i % 8);
            int values[8], total = 0;
            for (int x = 0; x < 8; ++x) {
                values[x] = row[x];
                row[x] = 0;
                total += abs(values[x]);
            }
            good &= total <= LARGEST_ROW;
            transform(values, 18);
            unsigned int samples[2] = {0, 0};
            for (int x = 0; x < 8; ++x) {
                good &= values[x] >= -512 && values[x] < 512;
                const unsigned int sample = min(max(values[x] + 128, 0), 255);
                samples[x / 4] |= sample << 8 * (x % 4);
            }
            const int number = positions[i / 8] + step / blocks;
            const int x = 8 * (luma ? number % wide * across + k % across : number % wide);
            const int y = 8 * (luma ? number / wide * down + k / across : number / wide) + i % 8;
            if (y >= rows) continue;
            unsigned char *target =
                (unsigned char *)scan.planes[component] + (size_t)y * pitch + x;
            if (x + 8 <= pitch && !((size_t)target & 3)) {
                ((unsigned int *)target)[0] = samples[0];
                ((unsigned int *)target)[1] = samples[1];
            } else {
                for (int j = 0; j < 8 && x + j < pitch; ++j)
                    target[j] = samples[j / 4] >> 8 * (j % 4);
            }
        }
        __syncthreads();
    }
    // Only padding of less than a byte follows the last MCU.
    if (mine && unit + mine == units)
        good &= position(in) <= limit && limit - position(in) < 8;
    if (!good) flags[blockIdx.x] = 1;
}
