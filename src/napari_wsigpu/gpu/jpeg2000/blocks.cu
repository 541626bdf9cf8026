// Bit planes of code blocks (tier 1: T.800, annex D), decoded by the MQ decoder (annex C). A thread
// decodes a code block, whose stripes of 4 rows are divided into groups of 8 columns. Samples of a
// group are numbered in the order of coding (D.1), 4 * column + row; bits of masks have these
// numbers. A word also has the samples around the group: it has 10 columns of 6 bits, from top to
// bottom, bit 6 * column + row. The outer columns and rows are copies of the neighboring groups'
// samples, so one shift isolates the neighborhood of a sample. The groups of a warp's code blocks
// are interleaved: its threads process them in step, so their loads are contiguous.
//
// Each decision depends on the one before it, so the slowest code block determines how long a small
// batch takes. Therefore, the loops over samples have one branch, which is not taken for most
// samples: a GPU waits for the condition of each.

// Words of the top row of all columns, and of all inner samples.
#define EVERY_COLUMN 0x041041041041041ull
#define INNER (0x001041041041040ull * 30)
// One column.
#define EDGE 63ull
// Mask of the top row.
#define FIRST_ROW 0x11111111u
// Contexts (table D.7 and D.1 to D.4): 0 to 8 for significance, then these, and RUN.
#define CONTEXTS 19
#define SIGN 9
#define REFINED 14
#define UNIFORM 18

// Shared memory of a block of threads: tables, and contexts of each thread. Contexts of one kind
// are adjacent, so that the threads of a warp access different banks.
struct Shared {
    uint2 transitions[94];
    unsigned contexts[CONTEXTS * THREADS_OF_BLOCKS];
    unsigned char significance[3 * 512];
    unsigned char signs[256];
    Found found;
    int place;
};

// Decodes the codeword segments of one code block: decisions of the MQ decoder, or raw bits (D.6).
// a, c and left are the interval, the code register and CT of annex C; a is shifted by 16. last,
// ahead: the last byte of the segment that was used, and the next one, loaded early because loads
// take long; at, rest: the bytes after these in the current part of the segment, and their number.
struct Coder {
    const unsigned char *encoded, *at;
    const Record *records;
    const uint2 *transitions;
    unsigned *contexts;
    int record;
    unsigned rest, a, c, last, ahead;
    int left;

    __device__ void take(int next) {
        record = next;
        at = encoded + records[next].offset;
        rest = records[next].length;
    }
    // Go to the next byte of the segment, whose parts may be in several packets. At the end of the
    // segment, the decoder reads bytes of 255 (D.4.1).
    __device__ void advance() {
        last = ahead;
        ahead = 255;
        while (!rest) {
            const int next = records[record].next;
            if (next < 0 || records[next].starts) return;
            take(next);
        }
        --rest;
        ahead = *at++;
    }
    // BYTEIN (C.3.4), `-left` bits late: after 255, a byte above 0x8f is a marker, and any other
    // has a stuffed bit.
    __device__ void more() {
        const bool stuffed = last == 255, marker = stuffed && ahead > 0x8f;
        const int bits = stuffed && !marker ? 7 : 8;
        c += (marker ? 255 : ahead) << (16 - bits - left);
        left += bits;
        if (!marker) advance();
    }
    // Start a codeword segment: INITDEC (C.3.5) unless it is raw.
    __device__ void start(int next, bool raw) {
        take(next);
        advance();
        last = left = 0;
        if (raw) return;
        advance();
        c = last << 16;
        more();
        c <<= 7;
        left -= 7;
        a = 0x80000000;
    }
    // Initial states of contexts (table D.7): 4, 3, 46 and 0 of table C.2.
    __device__ void reset() {
        for (int i = 0; i < CONTEXTS; ++i)
            contexts[i * THREADS_OF_BLOCKS] = i == 0         ? 0x05210040
                                              : i == RUN     ? 0x0ac10030
                                              : i == UNIFORM ? 0x560102e0
                                                             : 0x56010000;
    }
    // A bit of a raw segment, in which a 0 is stuffed after 255 (D.6).
    __device__ unsigned raw_bit() {
        if (!left) {
            const bool stuffed = last == 255, marker = stuffed && ahead > 0x8f;
            left = stuffed && !marker ? 7 : 8;
            if (!marker) advance();
        }
        return last >> --left & 1;
    }
    // DECODE (C.3.2) with the state of a context: see _transitions in jpeg2000_tables.py. Call `fill`
    // before the next decision. Free of branches, because most decisions are not predictable: both
    // intervals are computed, both next states are loaded, and renormalization may shift by 0.
    __device__ unsigned decode(unsigned &state) {
        const uint2 after = transitions[state >> 3 & 127];
        const unsigned interval = state & 0xffff0000;
        const bool lower = c < interval;
        a -= interval;
        // Conditional exchange: if less than Qe is left, the symbols swap their intervals.
        const bool expected = lower == a < interval;
        const unsigned bit = (state ^ !expected) & 1;
        if (lower) a = interval;
        else c -= interval;
        const int shift = __clz(a);
        if (shift) state = expected ? after.x : after.y;
        a <<= shift;
        c <<= shift;
        left -= shift;
        return bit;
    }
    __device__ void fill() {
        while (left < 0) more();
    }
    __device__ unsigned &state(int context) { return contexts[context * THREADS_OF_BLOCKS]; }
    __device__ unsigned decode(int context) {
        unsigned entry = state(context);
        const unsigned bit = decode(entry);
        state(context) = entry;
        return bit;
    }
    __device__ unsigned decide(int context) {
        const unsigned bit = decode(context);
        fill();
        return bit;
    }
    // Make 8 decisions in a context at once if each is a more probable 0 without renormalization;
    // return whether they were made.
    __device__ bool eight_zeros(int context) {
        const unsigned entry = state(context), interval = entry & 0xffff0000;
        if (entry & 1 || min(c, a - 0x80000000) / 8 < interval) return false;
        a -= 8 * interval;
        c -= 8 * interval;
        return true;
    }
};

// Words of a group of samples and its surroundings: the significant samples, and those of them that
// are negative. found: mask of the group's own samples that became significant in this pass.
struct Group {
    Word significant, negative;
    unsigned found;
};

// Words of a group's own samples, and of the groups above and below it.
struct Stack {
    Pair own, above, below;

    // Copy the adjacent rows of the groups above and below; top, bottom: masks of these rows.
    __device__ Group join(Word top, Word bottom) const {
        return Group{own.first | above.first >> 4 & top | below.first << 4 & bottom,
                     own.second | above.second >> 4 & top | below.second << 4 & bottom, 0};
    }
};

// Return the samples of a word and all of their eight neighbors.
__device__ Word dilate(Word word) {
    word |= word << 1 | word >> 1;
    return word << 6 | word >> 6 | word;
}

// Return the samples of a word that are neighbors of others.
__device__ Word neighbors(Word word) {
    const Word beside = word << 1 | word >> 1, columns = beside | word;
    return columns << 6 | columns >> 6 | beside;
}

// Return where the neighborhood of a sample starts in a word: bits 0-2, 6-8 and 12-14 from there.
__device__ int corner(int sample) { return sample + (sample & 28) / 2; }
__device__ unsigned around(Word word, int sample) { return (unsigned)(word >> corner(sample)); }

// Return the index into _significance in jpeg2000_tables.py for the result of `around`.
__device__ unsigned nine(unsigned columns) {
    return columns & 7 | columns >> 3 & 0x38 | columns >> 6 & 0x1c0;
}

// Return the index into _signs in jpeg2000_tables.py for the results of `around`: two bits each for
// the left, upper, lower and right neighbor.
__device__ unsigned four(unsigned significant, unsigned negative) {
    const unsigned pairs = significant >> 1 & 0x10a1 | negative & 0x2142;
    return pairs & 3 | pairs >> 3 & 0x3c | pairs >> 6 & 0xc0;
}

// Return the mask of a word's inner samples.
__device__ unsigned dense(Word word) {
    word >>= 7;
    word = word & 0xf00f00f00full | word >> 2 & 0xf00f00f00f0ull;
    word = word & 0xff0000ffull | word >> 4 & 0xff0000ff00ull;
    return (unsigned)(word & 0xffff | word >> 8 & 0xffff0000);
}

// Return the first sample of a mask, which must not be empty.
__device__ int first(unsigned mask) { return 31 - __clz(mask & (0 - mask)); }

// Return the mask of the neighbors that are coded after a sample: below it and in the next column.
__device__ unsigned later(int sample) { return (0x183a3a32u >> (sample & 3) * 8 & 63) << sample; }

// Coding passes over one group of a code block.
struct Decoding {
    Coder coder;
    const unsigned char *significance, *signs;

    // Return the context of a sample's significance, or RUN if it is in `runs`.
    __device__ int context_of(const Group &group, int sample, unsigned runs = 0) const {
        return significance[nine(around(group.significant, sample)) | runs >> sample << 4 & 16];
    }
    // Decode a sign (D.3.2); raw signs are not predicted.
    template <bool RAW> __device__ void sign(Group &group, int sample) {
        unsigned negative;
        if (RAW) {
            negative = coder.raw_bit();
        } else {
            const unsigned entry =
                signs[four(around(group.significant, sample), around(group.negative, sample))];
            negative = coder.decide(SIGN + (entry & 7)) ^ entry >> 3;
        }
        group.significant |= 128ull << corner(sample);
        group.negative |= (Word)negative << (corner(sample) + 7);
        group.found |= 1u << sample;
    }

    // Significance propagation (D.3.1) to `todo`, samples with a significant neighbor, and from
    // each that becomes significant to its later neighbors. zeros: all insignificant samples. Return
    // the samples that were coded.
    template <bool RAW>
    __device__ unsigned propagate(Group &group, unsigned todo, unsigned zeros) {
        unsigned coded = todo;
        for (;;) {
            const int sample = first(todo);
            todo &= todo - 1;
            const bool one = RAW ? coder.raw_bit() : coder.decode(context_of(group, sample));
            // `|` because each `||` would be a branch.
            if (one | coder.left < 0 | !todo) {
                coder.fill();
                if (one) {
                    sign<RAW>(group, sample);
                    todo |= later(sample) & zeros;
                    coded |= todo;
                }
                if (!todo) return coded;
            }
        }
    }
    // Magnitude refinement (D.3.3) of samples that were significant before this plane; return those
    // whose bit is 1. fresh: samples that are refined for the first time.
    template <bool RAW>
    __device__ unsigned refine(const Group &group, unsigned todo, unsigned fresh) {
        unsigned ones = 0;
        if (RAW) {
            for (; todo; todo &= todo - 1)
                if (coder.raw_bit()) ones |= todo & (0 - todo);
            return ones;
        }
        const unsigned beside = fresh ? dense(neighbors(group.significant)) : 0;
        // States are in registers during the loop, which is faster than shared memory.
        unsigned alone = coder.state(REFINED), near = coder.state(REFINED + 1);
        unsigned again = coder.state(REFINED + 2), sample = todo & (0 - todo);
        for (;;) {
            todo ^= sample;
            const unsigned next = todo & (0 - todo);
            const bool is_fresh = sample & fresh, is_near = sample & beside;
            unsigned state = is_fresh ? is_near ? near : alone : again;
            if (coder.decode(state)) ones |= sample;
            again = is_fresh ? again : state;
            near = is_fresh && is_near ? state : near;
            alone = is_fresh && !is_near ? state : alone;
            sample = next;
            if (coder.left < 0 | !next) {
                coder.fill();
                if (!next) break;
            }
        }
        coder.state(REFINED) = alone;
        coder.state(REFINED + 1) = near;
        coder.state(REFINED + 2) = again;
        return ones;
    }
    // Cleanup (D.3.4): the remaining samples. A whole column without significant neighbors is coded
    // by one decision, and the position of its first significant sample by two more.
    __device__ void clean_up(Group &group, unsigned todo) {
        unsigned runs = todo & ~dense(dilate(group.significant));
        runs &= runs >> 1;
        runs &= runs >> 2;
        runs &= FIRST_ROW;
        if (runs == FIRST_ROW && coder.eight_zeros(RUN)) return;
        for (;;) {
            int sample = first(todo);
            const bool run = runs >> sample & 1;
            todo &= ~((run ? 15u : 1u) << sample);
            const bool one = coder.decode(context_of(group, sample, runs));
            if (one | coder.left < 0 | !todo) {
                coder.fill();
                if (one) {
                    if (run) {
                        const unsigned column = 15u << sample;
                        sample += coder.decide(UNIFORM) << 1;
                        sample += coder.decide(UNIFORM);
                        todo |= column & 0xfffffffeu << sample;
                    }
                    sign<false>(group, sample);
                    runs &= ~(16u << (sample & 28));
                }
                if (!todo) return;
            }
        }
    }
};

// Decode all code blocks. work: code blocks in the order of `sort_work`; ends: null, or counters that
// are 0, if `work` is a queue: then the first blocks of threads read packet headers, and others decode
// what these find, so that the slowest code blocks, mostly in the first packets, start early. Readers
// wait for nobody and write all entries, so the others end. step: number of threads in a warp that
// decode a code block each, 1 for a queue; state: words of significant and of negative samples, for
// each group of each code block; refining: likewise, masks of the samples that were coded in this
// plane's first pass and of those refined so far; planes: masks of the 1 bits of each plane from the
// highest.
// Without the second bound, the compiler keeps values in slow local memory.
extern "C" __global__ void __launch_bounds__(THREADS_OF_BLOCKS, 8)
    decode_blocks(const __grid_constant__ Streams streams, const Block *blocks, int *work,
                  int work_count, int *ends, int step, int groups, int most_planes,
                  const Tables *tables, Pair *state, uint2 *refining, unsigned *planes) {
    __shared__ Shared shared;
    for (int i = threadIdx.x; i < 94; i += blockDim.x)
        shared.transitions[i] =
            uint2{tables->transitions[2 * i], tables->transitions[2 * i + 1]};
    for (int i = threadIdx.x; i < 3 * 512; i += blockDim.x)
        shared.significance[i] = tables->significance[i];
    for (int i = threadIdx.x; i < 256; i += blockDim.x) shared.signs[i] = tables->signs[i];
    if (!threadIdx.x) shared.place = ends ? atomicAdd(ends + 2, 1) : blockIdx.x;
    __syncthreads();
    const Queue queue = {work, ends, work_count};
    const int readers = ends ? streams.tiles : 0, place = shared.place - readers;
    if (place < 0) {
        if (threadIdx.x < 32) read_tile(streams, shared.place, queue, shared.found);
        return;
    }
    const int lane = threadIdx.x % 32, warps = (blockDim.x + 31) / 32;
    if (lane >= step) return;
    const BlockState *const states = (const BlockState *)streams.states;
    const int block_count = streams.block_count, lanes = min(step, (int)blockDim.x);
    for (long long item = (long long)(place * warps + threadIdx.x / 32) * lanes + lane;
         item < work_count; item += (long long)(gridDim.x - readers) * warps * lanes) {
        const int number = ends ? queue.wait(item) : work[item];
        const BlockState &found = states[number];
        const int passes = found.passes;
        if (!passes) continue;
        const Block &block = blocks[number % block_count];
        const size_t row = item / step, column = item % step;
        Pair *const my_state = state + row * groups * step + column;
        uint2 *const my_refining = refining + row * groups * step + column;
        unsigned *const my_planes = planes + row * most_planes * groups * step + column;
        const int style = block.style, height = block.height, across = (block.width + 7) / 8;
        const int stripes = (height + 3) / 4, line = across * step;
        // Samples of the last group in each row of groups.
        const unsigned last_columns = ~0u >> (-block.width & 7) * 4;
        Decoding decoding;
        Coder &coder = decoding.coder;
        decoding.significance = shared.significance + 512 * block.orientation;
        decoding.signs = shared.signs;
        coder.encoded = (const unsigned char *)streams.encoded;
        coder.records = (const Record *)streams.records +
                        (size_t)(number / block_count) * streams.record_count;
        coder.transitions = shared.transitions;
        coder.contexts = shared.contexts + threadIdx.x;
        coder.reset();
        for (int i = 0; i < stripes * line; i += step) {
            my_state[i] = Pair{0, 0};
            my_refining[i] = uint2{0, 0};
        }
        int record = found.first, remaining = 0;
        for (int pass = 0; pass < passes; ++pass) {
            // The first pass is a cleanup; each further plane has propagation, refinement, cleanup.
            const int kind = (pass + 2) % 3, plane = (pass + 2) / 3;
            const bool raw = style & BYPASS && pass >= 10 && kind != 2;
            if (!remaining) {
                coder.start(record, raw);
                do {
                    remaining += coder.records[record].passes;
                    record = coder.records[record].next;
                } while (record >= 0 && !coder.records[record].starts);
            }
            --remaining;
            if (style & RESET_CONTEXTS && pass) coder.reset();
            Pair *here = my_state;
            uint2 *masks = my_refining;
            unsigned *ones = my_planes + (size_t)plane * groups * step;
            for (int stripe = 0; stripe < stripes; ++stripe) {
                const unsigned rows = FIRST_ROW * ((1 << min(4, height - 4 * stripe)) - 1);
                // With vertically causal contexts (D.7), the stripe below is ignored.
                const bool upper = stripe > 0, lower = stripe + 1 < stripes && !(style & CAUSAL);
                const Word top = upper ? EVERY_COLUMN : 0, bottom = lower ? EVERY_COLUMN << 5 : 0;
                const auto load = [=](const Pair *at) {
                    return Stack{*at, at[upper ? -line : 0], at[lower ? line : 0]};
                };
                Word left = 0, negative_left = 0;
                Group after = load(here).join(top, bottom);
                for (int k = 0; k < across; ++k, here += step, masks += step, ones += step) {
                    Group group = after;
                    after = load(here + (k + 1 < across ? step : 0)).join(top, bottom);
                    // Copy the adjacent columns of the groups to the left and right.
                    const Word right = k + 1 < across ? EDGE << 6 : 0;
                    group.significant |= left | (after.significant & right) << 48;
                    group.negative |= negative_left | (after.negative & right) << 48;
                    const unsigned set = dense(group.significant);
                    const unsigned zeros = rows & (k + 1 < across ? ~0u : last_columns) & ~set;
                    const uint2 old = *masks;
                    if (kind == 1) {
                        const unsigned todo = set & ~old.x;
                        if (todo) {
                            const unsigned fresh = todo & ~old.y;
                            const unsigned found = raw ? decoding.refine<true>(group, todo, fresh)
                                                       : decoding.refine<false>(group, todo, fresh);
                            // Atomic because that does not wait for the old value.
                            if (found) atomicOr(ones, found);
                            if (fresh) masks->y = todo;
                        }
                    } else {
                        if (kind == 0) {
                            unsigned todo = zeros & dense(dilate(group.significant));
                            if (todo)
                                todo = raw ? decoding.propagate<true>(group, todo, zeros)
                                           : decoding.propagate<false>(group, todo, zeros);
                            masks->x = todo;
                        } else if (zeros & ~old.x) {
                            decoding.clean_up(group, zeros & ~old.x);
                        }
                        if (kind == 0 || !pass) *ones = group.found;
                        else if (group.found) atomicOr(ones, group.found);
                        if (group.found)
                            *here = Pair{group.significant & INNER, group.negative & INNER};
                    }
                    left = group.significant >> 48 & EDGE;
                    negative_left = group.negative >> 48 & EDGE;
                }
            }
            // Skip the segmentation symbol 1010 (D.5) without checking it.
            if (kind == 2 && style & SEGMENT_SYMBOLS)
                for (int i = 0; i < 4; ++i) coder.decide(UNIFORM);
        }
    }
}
