// Bit planes of code blocks (tier 1). A thread decodes a code block; what it knows lies in groups of
// 8 columns of a stripe of 4 rows. A group is a word of 10 columns of 6 bits, from above: bit
// 6 * column + row. The first and last columns and rows are those of the groups around it, so that
// what surrounds a sample is one shift away, and the order of bits is the order of coding. Groups of
// the code blocks of a warp lie beside each other, since its threads go through them in step.

#define EVERY_COLUMN 0x041041041041041ull
#define INNER_COLUMNS 0x001041041041040ull
#define INNER (INNER_COLUMNS * 30)
#define EDGE 63ull
#define CONTEXTS 19
#define SIGN 9
#define REFINED 14
#define RUN 17
#define UNIFORM 18

// Where a thread takes its tables from, and its contexts, which are those of the thread.
struct Shared {
    unsigned contexts[CONTEXTS * THREADS_OF_BLOCKS];
    unsigned transitions[94];
    unsigned char significance[3 * 512];
    unsigned char signs[256];
};

// The MQ decoder, and the bits that are not coded at all, of one code block.
struct Coder {
    const unsigned char *encoded, *at, *end;
    const Record *records;
    const unsigned *transitions;
    unsigned *contexts;
    int record;
    unsigned a, c, last;
    int left;
    bool raw;

    // The next byte of a codeword segment, whose parts may lie in several packets. A segment goes
    // on with ones.
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
    __device__ void begin(int next, bool not_coded) {
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
    __device__ void reset() {
        for (int i = 0; i < CONTEXTS; ++i)
            contexts[i * THREADS_OF_BLOCKS] = transitions[i == 0 ? 8 : i == RUN    ? 6
                                                                   : i == UNIFORM ? 92
                                                                                  : 0];
    }
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
    // A decision in a context: its entry is what it expects, the interval of what it does not
    // (upper half), and which entry comes next after the one and the other.
    __device__ unsigned decide(int context) {
        unsigned &entry = contexts[context * THREADS_OF_BLOCKS];
        const unsigned state = entry, interval = state >> 16;
        unsigned bit = state & 1;
        a -= interval;
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

// A group of samples with what surrounds it: which are significant, and which of them negative.
struct Group {
    Word significant, negative, valid;
};

__device__ Word beside(Word word) {
    word |= word << 1 | word >> 1;
    return word << 6 | word >> 6 | word;
}

// What surrounds a sample, whose own bit is 7 of these three columns.
__device__ unsigned around(Word word, int bit) { return (unsigned)(word >> (bit - 7)); }

__device__ unsigned nine(unsigned columns) {
    return columns & 7 | columns >> 3 & 0x38 | columns >> 6 & 0x1c0;
}

__device__ unsigned four(unsigned columns) {
    return columns >> 1 & 1 | columns >> 5 & 2 | columns >> 6 & 4 | columns >> 10 & 8;
}

// The bits of a group's samples beside each other: bit 4 * column + row.
__device__ unsigned dense(Word word) {
    word >>= 7;
    word = word & 0xf00f00f00full | word >> 2 & 0xf00f00f00f0ull;
    word = word & 0xff0000ffull | word >> 4 & 0xff0000ff00ull;
    return (unsigned)(word & 0xffff | word >> 8 & 0xffff0000);
}

// One code block, as its thread decodes it.
struct Decoding {
    Coder coder;
    const unsigned char *significance, *signs;

    __device__ unsigned decide(int context) {
        return coder.raw ? coder.raw_bit() : coder.decide(context);
    }
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

    // Samples beside significant ones; return which were coded.
    __device__ Word propagate(Group &group) {
        Word todo = beside(group.significant) & ~group.significant & group.valid, coded = 0;
        while (todo) {
            const Word sample = todo & (0 - todo);
            const int bit = __ffsll(sample) - 1;
            coded |= sample;
            todo ^= sample;
            if (becomes_significant(group, bit)) {
                sign(group, bit);
                const Word later = 0 - (sample << 1);
                todo |= beside(sample) & ~group.significant & group.valid & later;
            }
        }
        return coded;
    }
    // A further bit of samples that were significant before this plane; return the bits.
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
    // All that are left; whole columns with nothing around them by one decision.
    __device__ void clean_up(Group &group, Word todo) {
        while (todo) {
            Word sample = todo & (0 - todo);
            int bit = __ffsll(sample) - 1;
            const Word column = 15 * sample;
            bool now;
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

// state, refining: for each group of each code block, in step: significant and negative; coded in
// this plane and refined. planes: the bits, see dense, of each plane from the highest. step: code
// blocks whose groups lie beside each other.
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
            const int kind = (pass + 2) % 3, plane = (pass + 2) / 3;
            if (!remaining) {
                coder.begin(record, style & BYPASS && pass >= 10 && kind != 2);
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
                const size_t begin = (size_t)stripe * across;
                Group before = {0, 0, 0}, group = {0, 0, 0}, after;
                for (int k = -1; k < across; ++k) {
                    // Of the group after this one.
                    after.significant = after.negative = 0;
                    if (k + 1 < across) {
                        const Pair *next = my_state + (begin + k + 1) * step;
                        if (pass) after.significant = next->first, after.negative = next->second;
                        if (stripe) {
                            const Pair above = next[-(long long)across * step];
                            after.significant |= above.first >> 4 & EVERY_COLUMN;
                            after.negative |= above.second >> 4 & EVERY_COLUMN;
                        }
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
                    const size_t place = (begin + k) * step;
                    group.significant |= before.significant >> 48 & EDGE |
                                         (after.significant & EDGE << 6) << 48;
                    group.negative |= before.negative >> 48 & EDGE |
                                      (after.negative & EDGE << 6) << 48;
                    const int wide = min(8, block.width - 8 * k);
                    group.valid = (INNER_COLUMNS & ((1ull << (6 * wide + 6)) - 1)) * rows;
                    const Word old = group.significant;
                    if (kind == 0) {
                        my_refining[place].first = decoding.propagate(group);
                        ones[place] = dense(group.significant & ~old);
                    } else if (kind == 1) {
                        const Pair refining = my_refining[place];
                        const Word refined = plane > 1 ? refining.second : 0;
                        const Word todo = group.significant & group.valid & ~refining.first;
                        if (todo) ones[place] |= dense(decoding.refine(group, todo, refined));
                        if (todo || plane == 1) my_refining[place].second = refined | todo;
                    } else {
                        const Word coded = pass ? my_refining[place].first : 0;
                        const Word todo = group.valid & ~(group.significant | coded);
                        decoding.clean_up(group, todo);
                        const unsigned found = dense(group.significant & ~old);
                        if (!pass) ones[place] = found;
                        else if (found) ones[place] |= found;
                    }
                    if (group.significant != old || !pass) {
                        my_state[place].first = group.significant & INNER;
                        my_state[place].second = group.negative & INNER;
                    }
                    before = group;
                    group = after;
                }
            }
            if (kind == 2 && style & SEGMENT_SYMBOLS)
                for (int i = 0; i < 4; ++i) coder.decide(UNIFORM);
        }
    }
}
