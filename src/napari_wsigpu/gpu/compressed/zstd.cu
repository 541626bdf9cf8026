// A kernel for Zstandard frames (RFC 8878), a block of threads per tile: the first thread reads
// headers, tables and sequences, four threads read the streams of Huffman codes, and all of them
// execute sequences: as many at once as do not depend on each other.
// `compressed_engine.py` puts the definition of Part, the constants and `matches.cu` before this.

typedef unsigned long long Word;

static __device__ int highest_bit(unsigned int value) { return 31 - __clz(value); }

// Bits that are read from the end of a stream to its start (section 4.1). A stream is loaded as
// aligned words, none of which lies completely outside of it.
struct Backward {
    const unsigned int *next, *first;  // words: one beyond the next, and the first one
    Word bits;                         // the next ones, from the highest bit
    int count;                         // of valid bits
    int left;                          // bits of the stream that have not been taken

    // Start before the highest bit that is set, which marks the end; return false if there is none.
    __device__ bool start(const unsigned char *begin, int length) {
        if (length < 1 || !begin[length - 1]) return false;
        const int marker = highest_bit(begin[length - 1]);
        const size_t last = (size_t)(begin + length - 1);
        first = (const unsigned int *)((size_t)begin & ~(size_t)3);
        next = (const unsigned int *)(last & ~(size_t)3);
        count = 8 * (int)(last & 3) + marker;
        bits = count ? (Word)*next << (64 - count) : 0;
        left = 8 * (length - 1) + marker;
        return true;
    }
    __device__ void fill() {
        if (count > 32) return;
        const unsigned int word = next > first ? *--next : 0;
        bits |= (Word)word << (32 - count);
        count += 32;
    }
    __device__ void drop(int wanted) {
        bits <<= wanted;
        count -= wanted;
        left -= wanted;
    }
    // Take up to 32 bits.
    __device__ unsigned int take(int wanted) {
        fill();
        const unsigned int value = wanted ? bits >> (64 - wanted) : 0;
        drop(wanted);
        return value;
    }
};

// A table of finite state entropy (4.1). An entry has the symbol in its upper byte, the number of
// bits to read in the one below it, and in the lower half what is added to them for the next state.
struct Fse {
    unsigned int entries[512];
    int log;
    bool known;
};

struct State {
    const unsigned int *table;
    unsigned int entry;

    __device__ void start(const Fse &fse, Backward &in) {
        table = fse.entries;
        entry = table[in.take(fse.log)];
    }
    __device__ int symbol() const { return entry >> 24; }
    __device__ void advance(Backward &in) {
        entry = table[(entry & 0xffff) + in.take(entry >> 16 & 255)];
    }
};

// Read up to 16 bits of a stream from its start; bits beyond the end are 0.
static __device__ int bits_at(const unsigned char *begin, int length, int place, int wanted) {
    unsigned int value = 0;
    for (int i = 0; i < 3; ++i)
        if (place / 8 + i < length) value |= begin[place / 8 + i] << 8 * i;
    return value >> place % 8 & ((1 << wanted) - 1);
}

// Build a table from the probabilities of symbols, of which -1 is less than 1.
static __device__ void build(Fse &fse, const short *norm, int symbols, int log) {
    const int size = 1 << log;
    unsigned short nexts[53];
    int high = size - 1, place = 0;
    for (int i = 0; i < symbols; ++i) {
        if (norm[i] == -1) fse.entries[high--] = i;
        nexts[i] = norm[i] == -1 ? 1 : norm[i];
    }
    for (int i = 0; i < symbols; ++i)
        for (int k = 0; k < norm[i]; ++k) {
            fse.entries[place] = i;
            do place = (place + (size >> 1) + (size >> 3) + 3) & (size - 1);
            while (place > high);
        }
    for (int i = 0; i < size; ++i) {
        const int symbol = fse.entries[i], next = nexts[symbol]++;
        const int bits = log - highest_bit(next);
        fse.entries[i] = symbol << 24 | bits << 16 | ((next << bits) - size);
    }
    fse.log = log;
    fse.known = true;
}

// Read a table (4.1.1); return the bytes that it takes, or 0 if it is damaged.
static __device__ int read_table(Fse &fse, const unsigned char *begin, int length, int most_log,
                                 int most_symbols) {
    short norm[53];
    const int log = bits_at(begin, length, 0, 4) + 5;
    if (log > most_log) return 0;
    int place = 4, left = (1 << log) + 1, symbols = 0;
    while (left > 1 && symbols < most_symbols) {
        const int width = highest_bit(left) + 1, limit = (1 << width) - 1 - left;
        int value = bits_at(begin, length, place, width);
        const int low = value & ((1 << (width - 1)) - 1);
        if (low < limit) {
            value = low;
            place += width - 1;
        } else {
            if (value >= 1 << (width - 1)) value -= limit;
            place += width;
        }
        norm[symbols++] = --value;
        left -= value < 0 ? 1 : value;
        if (value) continue;
        for (int more = 3; more == 3;) {
            more = bits_at(begin, length, place, 2);
            place += 2;
            if (symbols + more > most_symbols) return 0;
            for (int i = 0; i < more; ++i) norm[symbols++] = 0;
        }
    }
    const int bytes = (place + 7) / 8;
    if (left != 1 || bytes > length) return 0;
    build(fse, norm, symbols, log);
    return bytes;
}

// Codes of lengths (3.1.1.3.2.1.1): least values and numbers of further bits.
static __device__ const unsigned int LITERAL_BASES[36] = {
    0,  1,  2,  3,  4,  5,  6,  7,  8,   9,   10,  11,   12,   13,   14,   15,    16,    18,
    20, 22, 24, 28, 32, 40, 48, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536};
static __device__ const unsigned char LITERAL_BITS[36] = {
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,  0,  0,  0,  1,  1,
    1, 1, 2, 2, 3, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
static __device__ const unsigned int MATCH_BASES[53] = {
    3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14,  15,  16,  17,   18,   19,   20,
    21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32,  33,  34,  35,   37,   39,   41,
    43, 47, 51, 59, 67, 83, 99, 131, 259, 515, 1027, 2051, 4099, 8195, 16387, 32771, 65539};
static __device__ const unsigned char MATCH_BITS[53] = {
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0, 0,
    0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16};
// Predefined tables (3.1.1.3.2.2).
static __device__ const short LITERAL_NORM[36] = {4, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2,
                                                  2, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2,
                                                  2, 3, 2, 1, 1, 1, 1, 1, -1, -1, -1, -1};
static __device__ const short OFFSET_NORM[29] = {1, 1, 1, 1, 1, 1, 2, 2, 2, 1, 1, 1, 1, 1, 1,
                                                 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1};
static __device__ const short MATCH_NORM[53] = {
    1, 4, 3, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1,  1,  1,  1,  1,  1,  1,  1,  1,  1, 1,
    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,  1,  1,  -1, -1, -1, -1, -1, -1, -1};

enum { RAW, SAME, COMPRESSED, REPEATED };  // kinds of blocks, literals and tables

// A match, and the literals before it: their number, and where they are among all literals.
struct Sequence : Match {
    int literals, from;
};

// A frame that a block of threads decodes. The first thread changes it, while the others wait.
struct Frame {
    const unsigned char *at, *end;  // what has not been read
    const unsigned char *stop;      // end of a compressed block
    unsigned char *out;
    int size, done, most;  // bytes of the tile, of those decoded so far, and of a block
    unsigned int wrong;
    bool last;
    int kind, length, limit;  // of a block; `limit` is where it ends in the tile at the latest
    // The literals of a block, and memory for those that are coded.
    const unsigned char *literals, *streams[4];
    unsigned char *room;
    int literal_kind, literal_count, used, stream_count, stream_lengths[4];
    unsigned short codes[1 << LONGEST_CODE];  // symbol, and above it the length of its code
    int code_length;                          // of the longest one; 0 without a table
    Fse weights, literal_table, offset_table, match_table;
    Backward in;
    State literal_state, offset_state, match_state;
    unsigned int offsets[3];
    // Sequences left in the block, and number of those in `chunk`. If the last one is long, all
    // threads execute it together.
    int sequences, ready;
    bool long_one;
    unsigned int copied;
    Sequence chunk[CHUNK];

    __device__ int left() const { return end - at; }
    __device__ unsigned int number(int bytes) {
        unsigned int value = 0;
        for (int i = 0; i < bytes; ++i) value |= (unsigned int)*at++ << 8 * i;
        return value;
    }

    // Read the frame's header (3.1.1.1), after the magic number and for frames without a dictionary or
    // a checksum; the caller has checked this.
    __device__ bool read_header() {
        if (left() < 6) return false;
        const unsigned int descriptor = at[4];
        const bool single = descriptor >> 5 & 1;
        const int bytes = descriptor >> 6 ? 1 << (descriptor >> 6) : single;
        at += 5;
        if (left() < bytes + !single) return false;
        Word window = 0;
        if (!single) {
            const unsigned int byte = number(1);
            if (byte >> 3 > 21) return false;
            window = (Word)(8 + (byte & 7)) << (7 + (byte >> 3));
        }
        if (bytes) {
            const unsigned int low = number(min(bytes, 4)) + (bytes == 2 ? 256 : 0);
            if (low != (unsigned int)size || (bytes == 8 && number(4))) return false;
        }
        most = single ? size : window < MOST_BLOCK ? (int)window : MOST_BLOCK;
        most = min(most, MOST_BLOCK);
        return true;
    }

    // Read a block's header (3.1.1.2).
    __device__ bool read_block() {
        if (left() < 3) return false;
        const unsigned int header = number(3);
        last = header & 1;
        kind = header >> 1 & 3;
        length = header >> 3;
        if (kind == REPEATED || length > most) return false;
        if (kind != COMPRESSED) return length <= size - done && left() >= (kind ? 1 : length);
        stop = at + length;
        return left() >= length && length >= 2 && read_literals();
    }

    // Read the header of a block's literals (3.1.1.3.1).
    __device__ bool read_literals() {
        literal_kind = *at & 3;
        const int format = *at >> 2 & 3, room = stop - at;
        used = 0;
        if (literal_kind < COMPRESSED) {
            const int bytes = format == 1 ? 2 : format == 3 ? 3 : 1;
            if (room < bytes) return false;
            literal_count = number(bytes) >> (bytes == 1 ? 3 : 4);
            if (literal_count > min(most, size - done)) return false;
            const int taken = literal_kind == RAW ? literal_count : 1;
            if (stop - at < taken) return false;
            literals = at;
            at += taken;
            return true;
        }
        const int bytes = format < 2 ? 3 : format + 2, width = format < 2 ? 10 : 4 * format + 6;
        if (room < bytes) return false;
        Word header = 0;
        for (int i = 0; i < bytes; ++i) header |= (Word)*at++ << 8 * i;
        literal_count = header >> 4 & ((1 << width) - 1);
        int taken = header >> (4 + width) & ((1 << width) - 1);
        stream_count = format ? 4 : 1;
        if (stop - at < taken || !literal_count || literal_count > min(most, size - done) ||
            (format && literal_count < 6))
            return false;
        const unsigned char *const after = at + taken;
        if (literal_kind == COMPRESSED && !read_codes(after)) return false;
        if (!code_length) return false;
        taken = after - at;
        if (format) {
            if (taken < 10) return false;
            for (int i = 0; i < 3; ++i) taken -= stream_lengths[i] = number(2);
            taken -= 6;
        }
        stream_lengths[stream_count - 1] = taken;
        for (int i = 0; i < stream_count; ++i) {
            if (stream_lengths[i] < 1) return false;
            streams[i] = at;
            at += stream_lengths[i];
        }
        return true;
    }

    // Read the Huffman code of literals (4.2.1), which ends before `limit`.
    __device__ bool read_codes(const unsigned char *limit) {
        unsigned char list[256];
        int count = 0, starts[LONGEST_CODE + 2];
        if (limit - at < 1) return false;
        const int header = *at++;
        const int bytes = header < 128 ? header : (header - 126) / 2;
        if (limit - at < bytes) return false;
        if (header >= 128) {
            for (; count < header - 127; ++count)
                list[count] = at[count / 2] >> 4 * (1 - count % 2) & 15;
        } else {
            const int taken = read_table(weights, at, bytes, 6, 13);
            Backward bits;
            if (!taken || !bits.start(at + taken, bytes - taken)) return false;
            State states[2];
            states[0].start(weights, bits);
            states[1].start(weights, bits);
            if (bits.left < 0) return false;
            for (int which = 0; bits.left >= 0; which ^= 1) {
                if (count > 253) return false;
                list[count++] = states[which].symbol();
                states[which].advance(bits);
                if (bits.left < 0) list[count++] = states[which ^ 1].symbol();
            }
        }
        at += bytes;
        int sum = 0;
        for (int i = 0; i <= LONGEST_CODE + 1; ++i) starts[i] = 0;
        for (int i = 0; i < count; ++i) {
            if (list[i] > LONGEST_CODE) return false;
            sum += 1 << list[i] >> 1;
        }
        // The last weight completes the code.
        if (!sum) return false;
        code_length = 0;
        const int longest = highest_bit(sum) + 1, rest = (1 << longest) - sum;
        if (longest > LONGEST_CODE || rest & (rest - 1)) return false;
        list[count++] = highest_bit(rest) + 1;
        for (int i = 0; i < count; ++i) starts[list[i] + 1] += list[i] ? 1 << (list[i] - 1) : 0;
        if (starts[2] < 2 || starts[2] & 1) return false;
        for (int i = 2; i <= LONGEST_CODE + 1; ++i) starts[i] += starts[i - 1];
        for (int i = 0; i < count; ++i) {
            const int weight = list[i];
            if (!weight) continue;
            for (int k = 0; k < 1 << (weight - 1); ++k)
                codes[starts[weight]++] = (longest + 1 - weight) << 8 | i;
        }
        code_length = longest;
        return true;
    }

    // Decode one stream of Huffman codes to its part of the literals; return whether it is sound.
    __device__ bool read_stream(int number) const {
        const int each = stream_count == 4 ? (literal_count + 3) / 4 : literal_count;
        unsigned char *const to = room + number * each;
        const int count = number == stream_count - 1 ? literal_count - number * each : each;
        Backward bits;
        if (count < 0 || !bits.start(streams[number], stream_lengths[number])) return false;
        const int shift = 64 - code_length;
        for (int i = 0; i < count; ++i) {
            bits.fill();
            const int code = codes[bits.bits >> shift];
            to[i] = code;
            bits.drop(code >> 8);
        }
        return !bits.left;
    }

    // Choose the table of one kind of codes (3.1.1.3.2.1).
    __device__ bool choose(Fse &fse, int mode, const short *norm, int symbols, int log, int most_log,
                           int most_symbols) {
        if (mode == RAW) {
            build(fse, norm, symbols, log);
        } else if (mode == SAME) {
            if (stop - at < 1 || *at >= most_symbols) return false;
            fse.entries[0] = (unsigned int)*at++ << 24;
            fse.log = 0;
            fse.known = true;
        } else if (mode == COMPRESSED) {
            const int bytes = read_table(fse, at, stop - at, most_log, most_symbols);
            at += bytes;
            return bytes;
        }
        return fse.known;
    }

    // Read the header of a block's sequences (3.1.1.3.2).
    __device__ bool read_sequences() {
        if (stop - at < 1) return false;
        sequences = number(1);
        if (sequences >= 128) {
            const int bytes = sequences == 255 ? 2 : 1;
            if (stop - at < bytes) return false;
            sequences = bytes == 2 ? number(2) + 0x7f00 : (sequences - 128) << 8 | number(1);
        }
        if (!sequences) return at == stop;
        if (stop - at < 1) return false;
        const int modes = number(1);
        if (modes & 3 ||
            !choose(literal_table, modes >> 6, LITERAL_NORM, 36, 6, 9, 36) ||
            !choose(offset_table, modes >> 4 & 3, OFFSET_NORM, 29, 5, 8, 32) ||
            !choose(match_table, modes >> 2 & 3, MATCH_NORM, 53, 6, 9, 53) ||
            !in.start(at, stop - at))
            return false;
        at = stop;
        literal_state.start(literal_table, in);
        offset_state.start(offset_table, in);
        match_state.start(match_table, in);
        return in.left >= 0;
    }

    // Decode the next sequences (3.1.1.3.2.1 and 3.1.1.5) to `chunk`.
    __device__ bool read_chunk() {
        Backward bits = in;
        State literal = literal_state, offset = offset_state, match = match_state;
        unsigned int recent = offsets[0], second = offsets[1], third = offsets[2];
        int place = done, from = used;
        long_one = false;
        copied = 0;
        for (ready = 0; ready < CHUNK && sequences && !long_one; ++ready, --sequences) {
            Sequence found;
            const int code = offset.symbol(), lengths = match.symbol(), run = literal.symbol();
            unsigned int value = (1u << code) + bits.take(code);
            found.length = MATCH_BASES[lengths] + bits.take(MATCH_BITS[lengths]);
            found.literals = LITERAL_BASES[run] + bits.take(LITERAL_BITS[run]);
            if (value > 3) {
                value -= 3;
                third = second;
                second = recent;
            } else {
                // Without literals, the most recent offset is of no use.
                value += !found.literals;
                const unsigned int chosen = value == 1   ? recent
                                            : value == 2 ? second
                                            : value == 3 ? third
                                                         : recent - 1;
                if (value > 2) third = second;
                if (value > 1) second = recent;
                value = chosen;
            }
            found.back = recent = value;
            if (sequences > 1) {
                literal.advance(bits);
                match.advance(bits);
                offset.advance(bits);
            }
            found.from = from;
            found.to = place + found.literals;
            if (bits.left < 0 || !value || found.literals > literal_count - from ||
                found.length > limit - found.to || value > (unsigned int)found.to)
                return false;
            from += found.literals;
            place = found.to + found.length;
            long_one = max(found.literals, found.length) > LONG;
            chunk[ready] = found;
        }
        done = place;
        used = from;
        in = bits;
        literal_state = literal, offset_state = offset, match_state = match;
        offsets[0] = recent, offsets[1] = second, offsets[2] = third;
        return sequences || !bits.left;
    }
};

static __device__ void copy_literals(const Frame &frame, unsigned char *to, int from, int count,
                                     int me, int threads) {
    const bool same = frame.literal_kind == SAME;
    copy(to, frame.literals + (same ? 0 : from), count, same ? 1 : count, me, threads);
}

// Execute the sequences in `chunk` (3.1.1.4); all threads take part.
static __device__ void execute(Frame &frame) {
    const int me = threadIdx.x, threads = blockDim.x, few = frame.ready - frame.long_one;
    for (int i = me; i < few; i += threads) {
        const Sequence &found = frame.chunk[i];
        unsigned char *const to = frame.out + found.to - found.literals;
        copy_literals(frame, to, found.from, found.literals, 0, 1);
    }
    if (frame.long_one) {
        const Sequence &found = frame.chunk[few];
        unsigned char *const to = frame.out + found.to - found.literals;
        copy_literals(frame, to, found.from, found.literals, me, threads);
    }
    __syncthreads();
    copy_matches(frame.out, frame.chunk, frame.ready, frame.long_one, &frame.copied);
}

// Decode what follows the header of a block's literals.
static __device__ void decode_compressed(Frame &frame) {
    const int me = threadIdx.x, threads = blockDim.x;
    __syncthreads();  // all threads have read `wrong`
    if (frame.literal_kind >= COMPRESSED)
        for (int i = me; i < frame.stream_count; i += threads)
            if (!frame.read_stream(i)) atomicOr(&frame.wrong, 1u);
    __syncthreads();
    if (!me) {
        if (frame.literal_kind >= COMPRESSED) frame.literals = frame.room;
        frame.limit = min(frame.size, frame.done + frame.most);
        frame.wrong |= !frame.read_sequences();
    }
    __syncthreads();
    while (!frame.wrong && frame.sequences) {
        __syncthreads();
        if (!me) frame.wrong = !frame.read_chunk();
        __syncthreads();
        if (!frame.wrong) execute(frame);
    }
    // The rest of the literals.
    const int rest = frame.literal_count - frame.used, wrong = frame.wrong;
    const bool fits = !wrong && rest <= frame.limit - frame.done;
    if (fits) copy_literals(frame, frame.out + frame.done, frame.used, rest, me, threads);
    __syncthreads();
    if (!me) {
        frame.wrong = !fits;
        frame.done += fits ? rest : 0;
    }
    __syncthreads();
}

// Decode Zstandard, one frame per block of threads. room: MOST_BLOCK bytes for each; size, flags: as
// for LZW.
extern "C" __global__ void __launch_bounds__(THREADS_OF_FRAME)
    decode_zstd(const Part *parts, int size, int *flags, unsigned char *room) {
    __shared__ Frame frame;
    const Part part = parts[blockIdx.x];
    const int me = threadIdx.x, threads = blockDim.x;
    if (!me) {
        frame.at = (const unsigned char *)part.source;
        frame.end = frame.at + part.length;
        frame.out = (unsigned char *)part.target;
        frame.room = room + (size_t)blockIdx.x * MOST_BLOCK;
        frame.size = size;
        frame.done = frame.code_length = 0;
        frame.literal_table.known = frame.offset_table.known = frame.match_table.known = false;
        frame.offsets[0] = 1, frame.offsets[1] = 4, frame.offsets[2] = 8;
        frame.last = false;
        frame.wrong = !frame.read_header();
    }
    __syncthreads();
    while (!frame.wrong && !frame.last) {
        __syncthreads();
        if (!me) frame.wrong = !frame.read_block();
        __syncthreads();
        if (frame.wrong) break;
        if (frame.kind == COMPRESSED) {
            decode_compressed(frame);
            continue;
        }
        const int length = frame.length, period = frame.kind == RAW ? length : 1;
        copy(frame.out + frame.done, frame.at, length, period, me, threads);
        __syncthreads();
        if (!me) {
            frame.at += period;
            frame.done += length;
        }
        __syncthreads();
    }
    if (!me) flags[blockIdx.x] = frame.wrong || frame.done != size || frame.at != frame.end;
}
