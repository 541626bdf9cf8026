// Kernels for tiles whose bytes are compressed. `compressed_engine.py` puts the definition of Part,
// `matches.cu`, and CLEAR, END and the other constants before this text.

static __device__ unsigned char swapped(unsigned char value) { return value; }

static __device__ unsigned short swapped(unsigned short value) {
    return (unsigned short)(value << 8 | value >> 8);
}

static __device__ unsigned int swapped(unsigned int value) {
    return value << 24 | (value & 0xff00) << 8 | (value >> 8 & 0xff00) | value >> 24;
}

static __device__ unsigned long long swapped(unsigned long long value) {
    return (unsigned long long)swapped((unsigned int)value) << 32 |
           swapped((unsigned int)(value >> 32));
}

// A stream of bits, as words. Bits beyond its last byte are 0 or anything.
struct Words {
    const unsigned int *words;
    int begin, end;  // of the stream, in bits from the first word

    __device__ explicit Words(const Part &part) {
        const int skipped = part.source & 3;
        words = (const unsigned int *)(part.source - skipped);
        begin = 8 * skipped;
        end = begin + 8 * (int)part.length;
    }
    __device__ unsigned int word(int number) const { return 32 * number < end ? words[number] : 0; }
};

// What the threads that decode a tile of LZW share. starts: where the entries' strings are in the
// tile; the last one is where the next code's begins. For each thread: its code, and the length of
// its string. matches: the codes that are not single bytes.
struct Strings {
    int starts[CODES + 2];
    int codes[THREADS_OF_TILE], sizes[THREADS_OF_TILE];
    Match matches[THREADS_OF_TILE];
    unsigned int refused, bytes, long_ones, copied;
};

// Decodes an LZW stream (TIFF 6.0, section 13). Entry 258 + k is the string of code k after the last
// clear code, and the first byte of the one after it: a part of the tile. All threads call all
// functions and have equal variables; each decodes one of the next codes, whose bits are known.
struct Lzw {
    Strings &shared;
    const Words stream;
    unsigned char *const out;
    const int size;
    int done, at;  // bytes of the tile that are decoded, and the next bit of the stream

    __device__ void read() {
        int number = 0, width = FIRST_WIDTH;  // of the next code
        while (done < size) {
            if (!number && !threadIdx.x) shared.starts[END + 1] = done;
            // Codes become longer one code earlier than necessary.
            const int longer = (1 << width) - END - 1;
            if (number == longer && width < LAST_WIDTH) {
                ++width;
                continue;
            }
            int wanted = blockDim.x;
            if (width < LAST_WIDTH) wanted = min(wanted, longer - number);
            const int found = read_codes(number, width, wanted);
            at += found * width;
            number += found;
            if (found == wanted) continue;
            // Decoders differ in what follows if no clear code follows the last entry.
            if (shared.codes[found] != CLEAR) return;
            at += width;
            number = 0;
            width = FIRST_WIDTH;
        }
    }

    // Decode codes up to the first that is not for a string; return their number.
    __device__ int read_codes(int number, int width, int wanted) {
        const int me = threadIdx.x, last = END + number;
        if (!me) shared.refused = shared.bytes = shared.long_ones = 0;
        __syncthreads();
        const int code = next_code(at + me * width, width);
        shared.codes[me] = code;
        const bool refused = code < 0 || code == CLEAR || code == END || code > last + me;
        if (me >= wanted || refused || last + me >= CODES) atomicOr(&shared.refused, 1u << me);
        __syncthreads();
        const int found = shared.refused ? __ffs(shared.refused) - 1 : blockDim.x;
        if (me < found) shared.sizes[me] = length_of(code, last);
        __syncthreads();
        int to = done, total = 0;
        for (int i = 0; i < found; ++i) {
            if (i == me) to += total;
            total += shared.sizes[i];
        }
        if (me < found) {
            const int length = max(min(shared.sizes[me], size - to), 0);
            shared.starts[last + me + 2] = to + shared.sizes[me];
            if (code < CLEAR && length) out[to] = code;
            if (code < CLEAR || !length) atomicOr(&shared.bytes, 1u << me);
            if (length > LONG) atomicOr(&shared.long_ones, 1u << me);
            shared.matches[me].to = to;
            shared.matches[me].length = length;
        }
        __syncthreads();
        if (me < found && code > END) shared.matches[me].back = to - shared.starts[code];
        for (int first = 0, count; first < found; first += count) {
            const int longest = __ffs(shared.long_ones >> first);
            count = longest ? longest : found - first;
            const unsigned int bytes = shared.bytes >> first;
            if (!me) shared.copied = bytes;
            __syncthreads();
            copy_matches(out, shared.matches + first, count, longest > 0, &shared.copied, bytes);
            __syncthreads();
        }
        done = min(done + total, size);
        return found;
    }

    // Return the code at a bit, or -1 if it is not completely in the stream.
    __device__ int next_code(int bit, int width) const {
        if (bit + width > stream.end) return -1;
        const unsigned long long high = swapped(stream.word(bit / 32));
        return (high << 32 | swapped(stream.word(bit / 32 + 1))) << bit % 32 >> (64 - width);
    }

    // Return the length of a code's string. Entries after `last` are those of codes that other
    // threads decode now.
    __device__ int length_of(int code, int last) const {
        int longer = 0;
        for (; code > last; ++longer) code = shared.codes[code - last - 1];
        return longer + (code < CLEAR ? 1 : shared.starts[code + 1] - shared.starts[code] + 1);
    }
};

// Decode LZW, one stream per block of threads. size: bytes of a decoded tile; flags: set to 0 if
// the stream decodes to as many bytes.
extern "C" __global__ void decode_lzw(const Part *parts, int size, int *flags) {
    __shared__ Strings shared;
    const Part part = parts[blockIdx.x];
    const Words stream(part);
    Lzw decoder = {shared, stream, (unsigned char *)part.target, size, 0, stream.begin};
    decoder.read();
    if (!threadIdx.x) flags[blockIdx.x] = decoder.done < size;
}

// Decode PackBits (TIFF 6.0, section 9), a block of threads per stream, all of which read the same
// headers. size, flags: as for LZW.
extern "C" __global__ void decode_packbits(const Part *parts, int size, int *flags) {
    const Part part = parts[blockIdx.x];
    const unsigned char *at = (const unsigned char *)part.source, *const end = at + part.length;
    unsigned char *const out = (unsigned char *)part.target;
    int done = 0;
    bool good = true;
    while (good && at < end) {
        const int header = *at++;
        if (header == 128) continue;
        const bool same = header > 128;
        const int count = same ? 257 - header : header + 1, taken = same ? 1 : count;
        good = taken <= end - at && count <= size - done;
        for (int i = threadIdx.x; good && i < count; i += blockDim.x)
            out[done + i] = at[same ? 0 : i];
        at += taken;
        done += count;
    }
    if (!threadIdx.x) flags[blockIdx.x] = !good || done < size;
}

// What codes stand for: symbols, or (RFC 1951, 3.2.5) literals and lengths of matches, or distances.
enum { SYMBOLS, LITERALS, DISTANCES };
// Types of entries: a symbol, literal or distance; the length of a match; the end of a block; and
// what is no code.
enum { PLAIN, MATCH, LAST, WRONG };

// Return an entry: in its lowest 5 bits the length of the code with the bits that follow it, above
// it the number of these, the type (2 bits), and from bit 16 on the value to which they are added.
static __device__ unsigned int entry_of(int symbol, int length, int kind) {
    int value = symbol, type = PLAIN, more = 0;
    if (kind == DISTANCES) {
        if (symbol > 29) type = WRONG;
        if (symbol > 3) more = symbol / 2 - 1;
        value = 1 + (symbol > 3 ? (2 + symbol % 2) << more : symbol);
    } else if (kind == LITERALS && symbol > 255) {
        const int number = symbol - 257;
        type = symbol == 256 ? LAST : number < 29 ? MATCH : WRONG;
        if (number > 7 && number < 28) more = number / 4 - 1;
        value = number == 28 ? 258 : 3 + (number > 7 ? (4 + number % 4) << more : number);
    }
    return value << 16 | type << 9 | more << 5 | length + more;
}

static __device__ __forceinline__ int size_of(unsigned int entry) { return entry & 31; }
static __device__ __forceinline__ int type_of(unsigned int entry) { return entry >> 9 & 3; }

// Return the value of an entry, which was found for `bits`.
static __device__ __forceinline__ unsigned int value_of(unsigned int entry, unsigned int bits) {
    const int more = entry >> 5 & 15;
    return (entry >> 16) + (bits >> (size_of(entry) - more) & ((1u << more) - 1));
}

// A Huffman code. quick: the entry for the next BITS bits; 0 for longer codes. Of each length:
// the number of codes, the first one, and where its entry is in `entries`.
template <int BITS, int MOST_SYMBOLS>
struct Code {
    unsigned int quick[1 << BITS], entries[MOST_SYMBOLS];
    int counts[LONGEST + 1], firsts[LONGEST + 1], offsets[LONGEST + 1];
    bool good;
};
typedef Code<11, 288> Literals;
typedef Code<9, 32> Distances;

// Make a code in all threads. Its lengths form a complete code, or a single code of one bit;
// otherwise it is not `good`.
template <int BITS, int MOST_SYMBOLS>
static __device__ void make_code(Code<BITS, MOST_SYMBOLS> &code, const unsigned char *lengths,
                                 int count, int kind) {
    const int me = threadIdx.x, threads = blockDim.x;
    __syncthreads();
    for (int length = 1 + me; length <= LONGEST; length += threads) {
        int found = 0;
        for (int i = 0; i < count; ++i) found += lengths[i] == length;
        code.counts[length] = found;
    }
    for (int i = me; i < 1 << BITS; i += threads) code.quick[i] = 0;
    __syncthreads();
    if (!me) {
        int left = 1, first = 0, offset = 0;
        for (int i = 1; i <= LONGEST && left >= 0; ++i) {
            left = 2 * left - code.counts[i];
            first = 2 * first;
            code.firsts[i] = first;
            code.offsets[i] = offset;
            first += code.counts[i];
            offset += code.counts[i];
        }
        code.good = !left || (left > 0 && offset == code.counts[1]);
    }
    __syncthreads();
    if (!code.good) return;
    for (int length = 1 + me; length <= LONGEST; length += threads) {
        int place = code.offsets[length], value = code.firsts[length];
        for (int i = 0; i < count; ++i) {
            if (lengths[i] != length) continue;
            const unsigned int entry = entry_of(i, length, kind);
            code.entries[place++] = entry;
            unsigned int next = __brev(value++) >> (32 - length);
            for (; next < 1 << BITS && length <= BITS; next += 1 << length)
                code.quick[next] = entry;
        }
    }
    __syncthreads();
}

// Return the entry of a code that is too long for `quick`.
template <int BITS, int MOST_SYMBOLS>
static __device__ __noinline__ unsigned int find_long(const Code<BITS, MOST_SYMBOLS> &code,
                                                      unsigned int bits) {
    for (int length = BITS + 1; length <= LONGEST; ++length) {
        const int place = (int)(__brev(bits) >> (32 - length)) - code.firsts[length];
        if (place >= 0 && place < code.counts[length])
            return code.entries[code.offsets[length] + place];
    }
    return WRONG << 9;
}

// Return the entry of the code in the next bits.
template <int BITS, int MOST_SYMBOLS>
static __device__ __forceinline__ unsigned int find(const Code<BITS, MOST_SYMBOLS> &code,
                                                    unsigned int bits) {
    const unsigned int entry = code.quick[bits & ((1 << BITS) - 1)];
    return entry ? entry : find_long(code, bits);
}

// What the threads that decode a tile share. words: the next ones of the stream. Each thread keeps
// the tokens of a span of bits: literals, and matches, whose lengths are in the upper 16 bits, and
// distances in the lower ones. After literals have been written, it keeps matches only, and their
// `places` in the bytes of its span. For each thread: where its last token ends in the stream, and
// the type of what stopped it before the end of its span (FULL for too many tokens); numbers of
// tokens, bytes and matches; and where its bytes are in the tile.
struct Inflating {
    Literals literals;
    Distances distances;
    unsigned char lengths[320];
    unsigned int words[LONGEST_SPAN * THREADS_OF_TILE / 32 + MORE_WORDS];
    unsigned int tokens[TOKENS * THREADS_OF_TILE];
    unsigned short places[TOKENS * THREADS_OF_TILE];
    int ends[THREADS_OF_TILE], stops[THREADS_OF_TILE], counts[THREADS_OF_TILE];
    int sizes[THREADS_OF_TILE], matches[THREADS_OF_TILE], starts[THREADS_OF_TILE];
    Match window[THREADS_OF_TILE];
    unsigned int moved, stopped, copied, long_ones;
};
enum { FULL = WRONG + 1 };

// Decodes a deflate stream. All threads call all functions and have equal variables, except for
// what `decode_span` and `write_literals` are given.
struct Deflate {
    Inflating &shared;
    const Words stream;
    unsigned char *const out;
    const int size;
    int done, at, loaded;  // decoded bytes, the next bit, and the number of the first of the words

    // Copy the next words to shared memory.
    __device__ void load(int bits) {
        loaded = at / 32;
        __syncthreads();
        for (int i = threadIdx.x; i < bits / 32 + MORE_WORDS; i += blockDim.x)
            shared.words[i] = stream.word(loaded + i);
        __syncthreads();
    }
    // Return the 32 bits from a bit on, lowest first.
    __device__ __forceinline__ unsigned int peek(int bit) const {
        const unsigned int *const words = shared.words + ((bit >> 5) - loaded);
        return __funnelshift_r(words[0], words[1], bit);
    }
    __device__ __forceinline__ int take(int bits) {
        const int value = peek(at) & ((1 << bits) - 1);
        at += bits;
        return value;
    }

    // Decode all blocks; return whether they are sound and fill the tile.
    __device__ bool read() {
        for (bool last = false; !last;) {
            if (at >= stream.end) return false;
            load(LONGEST_TABLES);
            last = take(1);
            const int type = take(2);
            if (type == 3) return false;
            if (type ? !(read_tables(type) && read_codes()) : !read_stored()) return false;
        }
        return done == size;
    }

    // Copy a block of bytes that are not compressed.
    __device__ bool read_stored() {
        at += (stream.end - at) & 7;  // to the next byte
        const int length = take(16), check = take(16);
        if (length != (check ^ 0xffff) || length > size - done || 8 * length > stream.end - at)
            return false;
        const unsigned char *const from = (const unsigned char *)stream.words + at / 8;
        copy(out + done, from, length, length, threadIdx.x, blockDim.x);
        done += length;
        at += 8 * length;
        return true;
    }

    // Read the codes of a block.
    __device__ bool read_tables(int type) {
        unsigned char *const lengths = shared.lengths;
        const int me = threadIdx.x;
        int count = 288, others = 32;
        if (type == 1) {
            for (int i = me; i < 320; i += blockDim.x)
                lengths[i] = i < 144 ? 8 : i < 256 ? 9 : i < 280 ? 7 : i < 288 ? 8 : 5;
        } else {
            const unsigned char order[19] = {16, 17, 18, 0, 8, 7, 9, 6, 10, 5,
                                             11, 4, 12, 3, 13, 2, 14, 1, 15};
            count = take(5) + 257;
            others = take(5) + 1;
            const int codes = take(4) + 4;
            if (count > 286 || others > 30) return false;
#pragma unroll 1
            for (int i = 0; i < 19; ++i) {
                const int length = i < codes ? take(3) : 0;
                if (!me) lengths[order[i]] = length;
            }
            make_code(shared.literals, lengths, 19, SYMBOLS);
            if (!shared.literals.good) return false;
            int length = 0, of_end = 0;
            for (int i = 0; i < count + others;) {
                const unsigned int entry = find(shared.literals, peek(at));
                if (type_of(entry) == WRONG) return false;
                at += size_of(entry);
                const int symbol = entry >> 16;
                if (symbol == 16 && !i) return false;
                if (symbol != 16) length = symbol < 16 ? symbol : 0;
                const int repeats = symbol < 16    ? 1
                                    : symbol == 16 ? take(2) + 3
                                    : symbol == 17 ? take(3) + 3
                                                   : take(7) + 11;
                const int end = i + repeats;
                if (end > count + others) return false;
                if (i <= 256 && end > 256) of_end = length;
                for (int k = i + me; k < end; k += blockDim.x) lengths[k] = length;
                i = end;
            }
            if (!of_end) return false;
        }
        make_code(shared.literals, lengths, count, LITERALS);
        make_code(shared.distances, lengths + count, others, DISTANCES);
        return shared.literals.good && shared.distances.good;
    }

    // Decode the codes of a block. Each thread decodes `span` bits, and begins anywhere, probably
    // within a code. After some wrong codes, it finds right ones (Huffman codes synchronize
    // themselves), so its last one ends where the next thread has to begin. Threads that did not
    // begin there decode again.
    __device__ bool read_codes() {
        const int me = threadIdx.x;
        for (int span = FIRST_SPAN;;) {
            load(span * blockDim.x);
            int begin = at + me * span;
            const int limit = begin + span;
            unsigned int moved = 1u << me, stopped;
            do {
                if (!me) shared.moved = shared.stopped = 0;
                if (moved >> me & 1) decode_span(begin, limit);
                __syncthreads();
                if (shared.stops[me]) atomicOr(&shared.stopped, 1u << me);
                if (me && !shared.stops[me - 1] && shared.ends[me - 1] != begin) {
                    begin = shared.ends[me - 1];
                    atomicOr(&shared.moved, 1u << me);
                }
                __syncthreads();
                moved = shared.moved;
                stopped = shared.stopped;
                __syncthreads();
                // The first thread began right, and so did all before the first that moved. What
                // follows one of them that stopped does not matter.
            } while (moved && (!stopped || __ffs(moved) <= __ffs(stopped)));
            const int last = stopped ? __ffs(stopped) - 1 : blockDim.x - 1;
            const int stop = shared.stops[last], passed = shared.ends[last] - at;
            at += passed;
            if (stop == WRONG || at > stream.end) return false;
            const int tokens = write(last);
            if (tokens < 0 || stop == LAST) return tokens >= 0;
            // Spans that are too long for the tokens that can be kept would be decoded in vain.
            span = min(max(passed * FEWER_TOKENS / tokens, SHORTEST_SPAN), LONGEST_SPAN);
        }
    }

    // Decode what begins in the bits from `begin` to `limit`.
    __device__ void decode_span(int begin, int limit) {
        const int me = threadIdx.x;
        int bit = begin, count = 0, bytes = 0, stop = PLAIN;
        while (bit < limit) {
            if (count == TOKENS) stop = FULL;
            if (stop) break;
            const unsigned int bits = peek(bit), entry = find(shared.literals, bits);
            unsigned int token = value_of(entry, bits);
            bit += size_of(entry);
            const int type = type_of(entry);
            if (type > MATCH) {
                stop = type;
                break;
            }
            bytes += type == MATCH ? token : 1;
            if (type == MATCH) {
                const unsigned int next = peek(bit), distance = find(shared.distances, next);
                if (type_of(distance) == WRONG) stop = WRONG;
                token = token << 16 | value_of(distance, next);
                bit += size_of(distance);
            }
            shared.tokens[count++ * THREADS_OF_TILE + me] = token;
        }
        shared.ends[me] = bit;
        shared.stops[me] = stop;
        shared.counts[me] = count;
        shared.sizes[me] = bytes;
    }

    // Write the bytes of the spans up to the last one that is valid; return the number of their
    // tokens, or -1 if they are damaged.
    __device__ int write(int last) {
        const int me = threadIdx.x;
        int first = done, tokens = 0, matches = 0, total = 0;
        for (int i = 0; i <= last; ++i) {
            tokens += shared.counts[i];
            if (i == me) first += total;
            total += shared.sizes[i];
        }
        if (total > size - done) return -1;
        if (me <= last) shared.matches[me] = write_literals(first);
        shared.starts[me] = first;
        __syncthreads();
        for (int i = 0; i <= last; ++i) {
            if (shared.matches[i] < 0) return -1;
            matches += shared.matches[i];
        }
        // Copy as many matches at a time as there are threads. This thread has one of span `lane`.
        for (int lane = 0, index = me, count; matches; matches -= count) {
            for (; lane <= last && index >= shared.matches[lane]; ++lane)
                index -= shared.matches[lane];
            if (!me) shared.copied = shared.long_ones = 0;
            __syncthreads();
            if (lane <= last) {
                const int place = index * THREADS_OF_TILE + lane;
                const int length = shared.tokens[place] >> 16, back = shared.tokens[place] & 0xffff;
                shared.window[me] = {shared.starts[lane] + shared.places[place], length, back};
                if (length > LONG) atomicOr(&shared.long_ones, 1u << me);
            }
            __syncthreads();
            const int longest = __ffs(shared.long_ones);
            count = longest ? longest : min(matches, (int)blockDim.x);
            copy_matches(out, shared.window, count, longest > 0, &shared.copied);
            __syncthreads();
            index += count;
        }
        done += total;
        return tokens;
    }

    // Write the literals of this thread's span, and keep its matches; return their number, or -1 if
    // one begins before the tile.
    __device__ int write_literals(int first) {
        const int me = threadIdx.x, count = shared.counts[me];
        int found = 0, to = first;
        for (int i = 0; i < count; ++i) {
            const unsigned int token = shared.tokens[i * THREADS_OF_TILE + me];
            if (token < 1 << 16) {
                out[to++] = token;
                continue;
            }
            if ((token & 0xffff) > to) return -1;
            const int place = found++ * THREADS_OF_TILE + me;
            shared.tokens[place] = token;
            shared.places[place] = to - first;
            to += token >> 16;
        }
        return found;
    }
};

// Decode deflate, one stream per block of threads. size, flags: as for LZW.
extern "C" __global__ void decode_deflate(const Part *parts, int size, int *flags) {
    __shared__ Inflating shared;
    const Part part = parts[blockIdx.x];
    const Words stream(part);
    Deflate decoder = {shared, stream, (unsigned char *)part.target, size, 0, stream.begin, 0};
    const bool good = decoder.read();
    if (!threadIdx.x) flags[blockIdx.x] = !good;
}

// Compare the Adler-32 checksums (RFC 1950) of decoded tiles. blockIdx.x is the tile; targets: the
// tiles' addresses; sums: expected checksums; flags: set for tiles with another one.
extern "C" __global__ void check_sums(const unsigned long long *targets,
                                      const unsigned long long *sums, long long size, int *flags) {
    __shared__ unsigned long long plain[CHECKING], weighted[CHECKING];
    const unsigned char *bytes = (const unsigned char *)targets[blockIdx.x];
    unsigned long long sum = 0, total = 0;
    for (long long i = threadIdx.x; i < size; i += blockDim.x) {
        sum += bytes[i];
        total += (unsigned long long)(size - i) * bytes[i];
    }
    plain[threadIdx.x] = sum;
    weighted[threadIdx.x] = total % ADLER;
    __syncthreads();
    if (threadIdx.x) return;
    unsigned long long low = 1, high = size;
    for (int i = 0; i < (int)blockDim.x; ++i) {
        low += plain[i];
        high += weighted[i];
    }
    if (sums[blockIdx.x] != (high % ADLER << 16 | low % ADLER)) flags[blockIdx.x] = 1;
}

template <typename Sample>
static __device__ void restore(Sample *row, int width, int samples, int swap, int sum) {
    Sample value = 0;
    for (int x = 0; x < width; ++x, row += samples) {
        const Sample stored = swap ? swapped(*row) : *row;
        value = sum ? (Sample)(value + stored) : stored;
        *row = value;
    }
}

// Undo byte order and horizontal differencing (TIFF 6.0, section 14) in place; a thread restores one
// channel of a row. blocks: number of them that share a tile; bytes: of a sample; swap, sum: what to
// undo.
extern "C" __global__ void restore_samples(const unsigned long long *tiles, int blocks, int rows,
                                           int width, int samples, int bytes, int swap, int sum) {
    const int step = blocks * blockDim.x;
    for (int i = blockIdx.x % blocks * blockDim.x + threadIdx.x; i < rows * samples; i += step) {
        const long long first = (long long)(i / samples) * width * samples + i % samples;
        unsigned char *at = (unsigned char *)tiles[blockIdx.x / blocks] + first * bytes;
        if (bytes == 1) restore((unsigned char *)at, width, samples, swap, sum);
        if (bytes == 2) restore((unsigned short *)at, width, samples, swap, sum);
        if (bytes == 4) restore((unsigned int *)at, width, samples, swap, sum);
        if (bytes == 8) restore((unsigned long long *)at, width, samples, swap, sum);
    }
}

// Undo the predictor of floating-point samples (TIFF technical note 3) in place, a block of threads
// per row. A row holds the highest bytes of all samples, then the next ones, and so on; each byte is
// the difference to the one `samples` before it. bytes: of a sample.
extern "C" __global__ void restore_floats(const unsigned long long *tiles, int rows, int width,
                                          int samples, int bytes) {
    __shared__ unsigned char row[MOST_ROW];
    const int count = width * samples, length = count * bytes;
    unsigned char *const at = (unsigned char *)tiles[blockIdx.x / rows] +
                              (long long)(blockIdx.x % rows) * length;
    for (int i = threadIdx.x; i < length; i += blockDim.x) row[i] = at[i];
    __syncthreads();
    for (int channel = threadIdx.x; channel < samples; channel += blockDim.x)
        for (int i = channel + samples; i < length; i += samples) row[i] += row[i - samples];
    __syncthreads();
    for (int i = threadIdx.x; i < length; i += blockDim.x)
        at[i] = row[(bytes - 1 - i % bytes) * count + i / bytes];
}
