// Bit planes of code blocks (tier 1: T.800, annex D), decoded by the MQ decoder (annex C). A thread
// decodes a code block, whose stripes of 4 rows are divided into groups of 8 columns. A group is a
// word of 10 columns of 6 bits, from top to bottom: bit 6 * column + row. The outer columns and
// rows are copies of the neighboring groups' samples, so one shift isolates the neighborhood of a
// sample, and the order of the bits is the order of coding (D.1). The groups of a warp's code
// blocks are interleaved: its threads process them in step, so their loads are contiguous.

// Masks of the top row of all columns, the top row of the 8 inner columns, and all inner samples.
#define EVERY_COLUMN 0x041041041041041ull
#define INNER_COLUMNS 0x001041041041040ull
#define INNER (INNER_COLUMNS * 30)
// One column.
#define EDGE 63ull
// Contexts (table D.7 and D.1 to D.4): 0 to 8 for significance, then these.
#define CONTEXTS 19
#define SIGN 9
#define REFINED 14
#define RUN 17
#define UNIFORM 18

// Shared memory of a block of threads: tables, and contexts of each thread. Contexts of one kind
// are adjacent, so that the threads of a warp access different banks.
struct Shared {
    unsigned contexts[CONTEXTS * THREADS_OF_BLOCKS];
    unsigned transitions[94];
    unsigned char significance[3 * 512];
    unsigned char signs[256];
};

// Decodes the codeword segments of one code block: decisions of the MQ decoder, or raw bits (D.6).
// a, c and left are the interval, the code register and CT of annex C.
struct Coder {
    const unsigned char *encoded, *at, *end;
    const Record *records;
    const unsigned *transitions;
    unsigned *contexts;
    int record;
    unsigned a, c, last;
    int left;
    bool raw;

    // Make `at` point to the next byte of the segment, whose parts may be in several packets.
    // Return false at the end of the segment, where the decoder reads bytes of 255 (D.4.1).
    __device__ bool ready() {
        while (at == end) {
            const int next = records[record].next;
            if (next < 0 || records[next].starts) return false;
            take(next);
        }
        return true;
    }
    __device__ void take(int next) {
        record = next;
        at = encoded + records[next].offset;
        end = at + records[next].length;
    }
    // BYTEIN (C.3.4): after 255, a byte above 0x8f is a marker, and any other has a stuffed bit.
    __device__ void more() {
        const unsigned byte = ready() ? *at : 255;
        if (last == 255 && byte > 0x8f) {
            c += 0xff00;
            left = 8;
            return;
        }
        c += byte << (last == 255 ? 9 : 8);
        left = last == 255 ? 7 : 8;
        last = byte;
        at += at != end;
    }
    // Start a codeword segment: INITDEC (C.3.5) unless it is raw.
    __device__ void start(int next, bool not_coded) {
        take(next);
        raw = not_coded;
        left = 0;
        last = 0;
        c = 0;
        if (raw) return;
        last = ready() ? *at++ : 255;
        c = last << 16;
        more();
        c <<= 7;
        left -= 7;
        a = 0x8000;
    }
    // Initial states of contexts (table D.7).
    __device__ void reset() {
        for (int i = 0; i < CONTEXTS; ++i)
            contexts[i * THREADS_OF_BLOCKS] = transitions[i == 0 ? 8 : i == RUN    ? 6
                                                                   : i == UNIFORM ? 92
                                                                                  : 0];
    }
    // A bit of a raw segment, in which a 0 is stuffed after 255 (D.6).
    __device__ unsigned raw_bit() {
        if (!left) {
            const bool stuffed = last == 255;
            last = 255;
            left = stuffed ? 7 : 8;
            if (ready()) {
                last = *at;
                if (stuffed && last > 0x8f) {
                    last = 255;
                    left = 8;
                } else {
                    ++at;
                }
            }
        }
        return last >> --left & 1;
    }
    // DECODE (C.3.2) in a context, whose entry has Qe, the next entries and the more probable
    // symbol: see _transitions in jpeg2000_tables.py.
    __device__ unsigned decide(int context) {
        unsigned &entry = contexts[context * THREADS_OF_BLOCKS];
        const unsigned state = entry, interval = state >> 16;
        unsigned bit = state & 1;
        a -= interval;
        // Conditional exchange: if less than Qe is left, the symbols swap their intervals.
        bool expected = a >= interval;
        if (c >> 16 < interval) {
            expected = !expected;
            a = interval;
        } else {
            c -= interval << 16;
            if (a & 0x8000) return bit;
        }
        bit ^= !expected;
        entry = transitions[(expected ? state >> 8 : state >> 1) & 127];
        int shift = __clz(a) - 16;
        while (shift > left) {
            a <<= left;
            c <<= left;
            shift -= left;
            more();
        }
        a <<= shift;
        c <<= shift;
        left -= shift;
        return bit;
    }
};

// Masks of a group of samples and its surroundings: the significant samples, and those of them that
// are negative. valid: the group's own samples within the code block.
struct Group {
    Word significant, negative, valid;
};

// Return a mask of samples and all of their eight neighbors.
__device__ Word dilate(Word word) {
    word |= word << 1 | word >> 1;
    return word << 6 | word >> 6 | word;
}

// Shift a word so that a sample becomes bit 7, and its neighborhood bits 0-2, 6-8 and 12-14.
__device__ unsigned around(Word word, int bit) { return (unsigned)(word >> (bit - 7)); }

// Return the index into _significance in jpeg2000_tables.py for the result of `around`.
__device__ unsigned nine(unsigned columns) {
    return columns & 7 | columns >> 3 & 0x38 | columns >> 6 & 0x1c0;
}

// Return half of the index into _signs in jpeg2000_tables.py: left, upper, lower, right neighbor.
__device__ unsigned four(unsigned columns) {
    return columns >> 1 & 1 | columns >> 5 & 2 | columns >> 6 & 4 | columns >> 10 & 8;
}

// Return the group's own samples as 32 bits: bit 4 * column + row.
__device__ unsigned dense(Word word) {
    word >>= 7;
    word = word & 0xf00f00f00full | word >> 2 & 0xf00f00f00f0ull;
    word = word & 0xff0000ffull | word >> 4 & 0xff0000ff00ull;
    return (unsigned)(word & 0xffff | word >> 8 & 0xffff0000);
}

// Coding passes over one group of a code block.
struct Decoding {
    Coder coder;
    const unsigned char *significance, *signs;

    __device__ unsigned decide(int context) {
        return coder.raw ? coder.raw_bit() : coder.decide(context);
    }
    // Decode a sign (D.3.2); raw signs are not predicted.
    __device__ void sign(Group &group, int bit) {
        const unsigned entry = signs[four(around(group.significant, bit)) |
                                     four(around(group.negative, bit)) << 4];
        const unsigned negative =
            coder.raw ? coder.raw_bit() : coder.decide(SIGN + (entry & 7)) ^ entry >> 3;
        group.significant |= 1ull << bit;
        group.negative |= (Word)negative << bit;
    }
    __device__ unsigned becomes_significant(const Group &group, int bit) {
        return decide(significance[nine(around(group.significant, bit))]);
    }

    // Significance propagation (D.3.1) to samples with a significant neighbor, and from each that
    // becomes significant to its later neighbors. Return a mask of the samples that were coded.
    __device__ Word propagate(Group &group) {
        Word todo = dilate(group.significant) & ~group.significant & group.valid, coded = 0;
        while (todo) {
            const Word sample = todo & (0 - todo);
            const int bit = __ffsll(sample) - 1;
            coded |= sample;
            todo ^= sample;
            if (becomes_significant(group, bit)) {
                sign(group, bit);
                const Word later = 0 - (sample << 1);
                todo |= dilate(sample) & ~group.significant & group.valid & later;
            }
        }
        return coded;
    }
    // Magnitude refinement (D.3.3) of samples that were significant before this plane; return a
    // mask of those whose bit is 1. refined: samples that were refined in an earlier plane.
    __device__ Word refine(const Group &group, Word todo, Word refined) {
        Word ones = 0;
        while (todo) {
            const Word sample = todo & (0 - todo);
            const int bit = __ffsll(sample) - 1;
            const bool alone = !(nine(around(group.significant, bit)) & ~16);
            const int context = sample & refined ? REFINED + 2 : alone ? REFINED : REFINED + 1;
            if (decide(context)) ones |= sample;
            todo ^= sample;
        }
        return ones;
    }
    // Cleanup (D.3.4): the remaining samples. A whole column without significant neighbors is coded
    // by one decision, and the position of its first significant sample by two more.
    __device__ void clean_up(Group &group, Word todo) {
        while (todo) {
            Word sample = todo & (0 - todo);
            int bit = __ffsll(sample) - 1;
            const Word column = 15 * sample;
            bool now;
            // Bit 1 of a column is its first row; 18 bits are the column and both neighbors.
            if (sample & INNER_COLUMNS << 1 && (todo & column) == column &&
                !(around(group.significant, bit) & 0x3ffff)) {
                if (!coder.decide(RUN)) {
                    todo &= ~column;
                    continue;
                }
                int run = coder.decide(UNIFORM) << 1;
                run |= coder.decide(UNIFORM);
                todo &= ~(sample * ((1 << run) - 1));
                bit += run;
                sample <<= run;
                now = true;
            } else {
                now = becomes_significant(group, bit);
            }
            if (now) sign(group, bit);
            todo &= ~sample;
        }
    }
};

// Decode all code blocks. work: code blocks in the order of `sort_work`; step: number of threads in
// a warp that decode a code block each; state: masks of significant and of negative samples, for
// each group of each code block; refining: likewise, masks of the samples that were coded in this
// plane and of those refined so far; planes: bits of each plane from the highest, see `dense`.
extern "C" __global__ void __launch_bounds__(THREADS_OF_BLOCKS)
    decode_blocks(const unsigned char *encoded, const Block *blocks, int block_count,
                  const BlockState *states, const Record *records, int record_count,
                  const int *work, int work_count, int step, int groups, int most_planes,
                  const Tables *tables, Pair *state, Pair *refining, unsigned *planes) {
    __shared__ Shared shared;
    for (int i = threadIdx.x; i < 94; i += blockDim.x)
        shared.transitions[i] = tables->transitions[i];
    for (int i = threadIdx.x; i < 3 * 512; i += blockDim.x)
        shared.significance[i] = tables->significance[i];
    for (int i = threadIdx.x; i < 256; i += blockDim.x) shared.signs[i] = tables->signs[i];
    __syncthreads();
    const int lane = threadIdx.x % 32, warps = gridDim.x * ((blockDim.x + 31) / 32);
    if (lane >= step) return;
    const int lanes = min(step, (int)blockDim.x);
    for (long long item = (long long)(blockIdx.x * ((blockDim.x + 31) / 32) + threadIdx.x / 32) *
                              lanes + lane;
         item < work_count; item += (long long)warps * lanes) {
        const BlockState &found = states[work[item]];
        if (!found.passes) continue;
        const Block &block = blocks[work[item] % block_count];
        const size_t row = item / step, column = item % step;
        Pair *const my_state = state + row * groups * step + column;
        Pair *const my_refining = refining + row * groups * step + column;
        unsigned *const my_planes = planes + row * most_planes * groups * step + column;
        const int style = block.style, across = (block.width + 7) / 8;
        const int stripes = (block.height + 3) / 4;
        Decoding decoding;
        Coder &coder = decoding.coder;
        decoding.significance = shared.significance + 512 * block.orientation;
        decoding.signs = shared.signs;
        coder.encoded = encoded;
        coder.records = records + (size_t)(work[item] / block_count) * record_count;
        coder.transitions = shared.transitions;
        coder.contexts = shared.contexts + threadIdx.x;
        coder.reset();
        int record = found.first, remaining = 0;
        for (int pass = 0; pass < found.passes; ++pass) {
            // The first pass is a cleanup; each further plane has propagation, refinement, cleanup.
            const int kind = (pass + 2) % 3, plane = (pass + 2) / 3;
            if (!remaining) {
                coder.start(record, style & BYPASS && pass >= 10 && kind != 2);
                do {
                    remaining += coder.records[record].passes;
                    record = coder.records[record].next;
                } while (record >= 0 && !coder.records[record].starts);
            }
            --remaining;
            if (style & RESET_CONTEXTS && pass) coder.reset();
            unsigned *ones = my_planes + (size_t)plane * groups * step;
            for (int stripe = 0; stripe < stripes; ++stripe) {
                const int high = min(4, block.height - 4 * stripe);
                const Word rows = ((1 << high) - 1) << 1;
                const size_t first_group = (size_t)stripe * across;
                Group before = {0, 0, 0}, group = {0, 0, 0}, after;
                for (int k = -1; k < across; ++k) {
                    // Load the next group: its own samples, and the rows above and below them.
                    after.significant = after.negative = 0;
                    if (k + 1 < across) {
                        const Pair *next = my_state + (first_group + k + 1) * step;
                        if (pass) after.significant = next->first, after.negative = next->second;
                        if (stripe) {
                            const Pair above = next[-(long long)across * step];
                            after.significant |= above.first >> 4 & EVERY_COLUMN;
                            after.negative |= above.second >> 4 & EVERY_COLUMN;
                        }
                        // With vertically causal contexts (D.7), the stripe below is ignored.
                        if (pass && stripe + 1 < stripes && !(style & CAUSAL)) {
                            const Pair below = next[(long long)across * step];
                            after.significant |= below.first << 4 & EVERY_COLUMN << 5;
                            after.negative |= below.second << 4 & EVERY_COLUMN << 5;
                        }
                    }
                    if (k < 0) {
                        group = after;
                        continue;
                    }
                    // Copy the columns of the groups to the left and right.
                    const size_t index = (first_group + k) * step;
                    group.significant |= before.significant >> 48 & EDGE |
                                         (after.significant & EDGE << 6) << 48;
                    group.negative |= before.negative >> 48 & EDGE |
                                      (after.negative & EDGE << 6) << 48;
                    const int wide = min(8, block.width - 8 * k);
                    group.valid = (INNER_COLUMNS & ((1ull << (6 * wide + 6)) - 1)) * rows;
                    const Word old = group.significant;
                    if (kind == 0) {
                        my_refining[index].first = decoding.propagate(group);
                        ones[index] = dense(group.significant & ~old);
                    } else if (kind == 1) {
                        const Pair refining = my_refining[index];
                        const Word refined = plane > 1 ? refining.second : 0;
                        const Word todo = group.significant & group.valid & ~refining.first;
                        if (todo) ones[index] |= dense(decoding.refine(group, todo, refined));
                        if (todo || plane == 1) my_refining[index].second = refined | todo;
                    } else {
                        const Word coded = pass ? my_refining[index].first : 0;
                        const Word todo = group.valid & ~(group.significant | coded);
                        decoding.clean_up(group, todo);
                        const unsigned found = dense(group.significant & ~old);
                        if (!pass) ones[index] = found;
                        else if (found) ones[index] |= found;
                    }
                    if (group.significant != old || !pass) {
                        my_state[index].first = group.significant & INNER;
                        my_state[index].second = group.negative & INNER;
                    }
                    before = group;
                    group = after;
                }
            }
            // Skip the segmentation symbol 1010 (D.5) without checking it.
            if (kind == 2 && style & SEGMENT_SYMBOLS)
                for (int i = 0; i < 4; ++i) coder.decide(UNIFORM);
        }
    }
}
