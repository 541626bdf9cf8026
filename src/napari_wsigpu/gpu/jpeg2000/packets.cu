// Packet headers (tier 2): where the coded bytes of each code block lie. A block of threads is a
// tile; its first thread reads, since a packet begins where the one before it ends.

#define MOST_ZERO_PLANES 80
#define UNKNOWN 0x7fff

// Bits of packet headers: after a byte of ones, the next one has seven.
struct Bits {
    const unsigned char *at, *end;
    unsigned byte;
    int left;
    bool beyond;

    __device__ unsigned next() {
        if (!left) {
            left = byte == 255 ? 7 : 8;
            beyond |= at >= end;
            byte = at < end ? *at++ : 0;
        }
        return byte >> --left & 1;
    }
    __device__ unsigned number(int count) {
        unsigned value = 0;
        while (count-- > 0) value = value << 1 | next();
        return value;
    }
    // Go to the next whole byte.
    __device__ void align() {
        if (byte == 255) {
            beyond |= at >= end;
            ++at;
        }
        byte = left = 0;
    }
};

__device__ unsigned big_endian(const unsigned char *at, int bytes) {
    unsigned value = 0;
    for (int i = 0; i < bytes; ++i) value = value << 8 | at[i];
    return value;
}

// Whether the value of a leaf is below a threshold. A node is a value, and in its upper half what
// is known to be the least.
__device__ bool below(unsigned *nodes, const Band &band, int leaf, int threshold, Bits &bits) {
    const int x = leaf % band.wide, y = leaf / band.wide;
    int depth = 0, level = band.nodes;
    while ((band.wide - 1) >> depth || (band.high - 1) >> depth) ++depth;
    unsigned least = 0, value = 0;
    for (; depth >= 0; --depth) {
        const int wide = ((band.wide - 1) >> depth) + 1, high = ((band.high - 1) >> depth) + 1;
        level -= wide * high;
        unsigned &node = nodes[level + (y >> depth) * wide + (x >> depth)];
        value = node & 0xffff;
        if (node >> 16 > least) least = node >> 16;
        while (least < threshold && least < value && !bits.beyond) {
            if (bits.next()) value = least;
            else ++least;
        }
        node = least << 16 | value;
    }
    return value < threshold;
}

__device__ int count_passes(Bits &bits) {
    if (!bits.next()) return 1;
    if (!bits.next()) return 2;
    unsigned more = bits.number(2);
    if (more < 3) return 3 + more;
    more = bits.number(5);
    if (more < 31) return 6 + more;
    return 37 + bits.number(7);
}

// How many passes the codeword segment that comes next has at most.
__device__ int segment_passes(int style, int passes) {
    if (style & TERMINATE_ALL) return 1;
    if (!(style & BYPASS)) return 109;
    return passes < 10 ? 10 - passes : passes % 3 == 1 ? 2 : 1;
}

// Compares headers with the batch's: what their segments say has to be the same, comments and tables
// of lengths need not.
struct Form {
    const unsigned char *text;
    int length, known;

    // Go behind a segment, which is before `end`; return what is wrong.
    __device__ int pass(const unsigned char *&at, const unsigned char *end) {
        if (end - at < 4) return CUT;
        const unsigned marker = big_endian(at, 2), size = 2 + big_endian(at + 2, 2);
        if (size < 4 || size > end - at) return CUT;
        const bool skipped = marker == 0xff64 || marker == 0xff55 || marker == 0xff57 ||
                             marker == 0xff58 || marker == 0xff63;
        if (!skipped) {
            if (size > length - known) return OTHER_FORM;
            for (unsigned i = 0; i < size; ++i)
                if (at[i] != text[known + i]) return OTHER_FORM;
            known += size;
        }
        at += size;
        return FINE;
    }
};

// Goes from one part of a tile to the next.
struct Parts {
    const unsigned char *at, *end, *stop;
    Form form;

    // Skip the main header; return what is wrong.
    __device__ int begin() {
        if (stop - at < 2 || big_endian(at, 2) != 0xff4f) return OTHER_FORM;
        for (at += 2; stop - at >= 2;) {
            if (big_endian(at, 2) == 0xff90) {
                end = at;
                return FINE;
            }
            if (const int wrong = form.pass(at, stop)) return wrong;
        }
        return CUT;
    }
    // Skip the header of a part; return what is wrong.
    __device__ int open() {
        if (stop - at < 12 || big_endian(at, 4) != 0xff90000a || big_endian(at + 4, 2)) return CUT;
        const unsigned length = big_endian(at + 6, 4);
        // A part of no length goes on to the end's marker.
        end = stop - 2;
        if (length) {
            if (length < 14 || length > stop - at) return CUT;
            end = at + length;
        }
        for (at += 12; end - at >= 2;) {
            if (big_endian(at, 2) == 0xff93) {
                at += 2;
                return form.known == form.length ? FINE : OTHER_FORM;
            }
            if (const int wrong = form.pass(at, end)) return wrong;
        }
        return CUT;
    }
    // Behind the part that was read last is the end, or one more part; return what is wrong.
    __device__ int close() const {
        const unsigned marker = stop - end < 2 ? 0 : big_endian(end, 2);
        return marker == 0xffd9 || marker == 0xff90 ? FINE : CUT;
    }
};

// What a tile's headers have told so far.
struct Headers {
    const Block *blocks;
    BlockState *states;
    Record *records;
    unsigned *nodes;
    int tree, used, most;
    Bits bits;

    // What a packet's header says of one code block; return what is wrong.
    __device__ int read_block(const Band &band, int leaf, int layer) {
        const Block &block = blocks[band.first + leaf];
        BlockState &state = states[band.first + leaf];
        if (!state.length_bits) {
            if (!below(nodes + band.tree, band, leaf, layer + 1, bits)) return FINE;
            int zero = 0;
            while (!below(nodes + tree + band.tree, band, leaf, zero + 1, bits))
                if (++zero > MOST_ZERO_PLANES || bits.beyond) return DAMAGED;
            if (zero >= block.planes) return DAMAGED;
            state.planes = block.planes - zero;
            state.length_bits = 3;
        } else if (!bits.next()) {
            return FINE;
        }
        int passes = count_passes(bits);
        while (bits.next())
            if (++state.length_bits > 32 || bits.beyond) return DAMAGED;
        if (state.passes + passes > 3 * state.planes - 2) return DAMAGED;
        while (passes > 0) {
            if (used == most) return DAMAGED;
            const bool starts = !state.room;
            if (starts) state.room = segment_passes(block.style, state.passes);
            const int taken = passes < state.room ? passes : state.room;
            const int size = state.length_bits + 31 - __clz(taken);
            if (size > 32) return DAMAGED;
            Record &record = records[used];
            record.length = bits.number(size);
            record.passes = taken;
            record.starts = starts;
            record.next = -1;
            if (state.passes) records[state.last].next = used;
            else state.first = used;
            state.last = used++;
            state.passes += taken;
            state.room -= taken;
            passes -= taken;
            state.bytes += record.length;
        }
        return FINE;
    }
};

// Whether a marker is at a place, or was not asked for.
__device__ bool is_marker(const unsigned char *at, const unsigned char *end, unsigned marker) {
    return end - at >= 2 && big_endian(at, 2) == marker;
}

__device__ int read_packet(const Packet &packet, const Precinct &precinct, const Band *bands,
                           int style, Headers &headers, Parts &parts,
                           const unsigned char *encoded) {
    while (parts.at == parts.end)
        if (const int wrong = parts.open()) return wrong;
    if (style & PACKET_STARTS && is_marker(parts.at, parts.end, 0xff91)) {
        if (parts.end - parts.at < 6) return CUT;
        parts.at += 6;
    }
    const int begin = headers.used;
    Bits &bits = headers.bits;
    bits = Bits{parts.at, parts.end, 0, 0, false};
    if (bits.next())
        for (int i = 0; i < precinct.count; ++i) {
            const Band &band = bands[precinct.first + i];
            for (int leaf = 0; leaf < band.wide * band.high; ++leaf)
                if (const int wrong = headers.read_block(band, leaf, packet.layer)) return wrong;
        }
    bits.align();
    if (bits.beyond) return CUT;
    parts.at = bits.at;
    if (style & HEADER_ENDS && is_marker(parts.at, parts.end, 0xff92)) parts.at += 2;
    for (int i = begin; i < headers.used; ++i) {
        Record &record = headers.records[i];
        if (record.length > parts.end - parts.at) return CUT;
        record.offset = parts.at - encoded;
        parts.at += record.length;
    }
    return FINE;
}

// starts, lengths: of each tile's code stream in `encoded`. header: what each has to say, see Form.
// tree: nodes of one of a tile's two sets of tag trees. records: so many a tile.
extern "C" __global__ void read_packets(const unsigned char *encoded,
                                        const unsigned long long *starts,
                                        const unsigned long long *lengths, int tiles,
                                        const unsigned char *header, int header_length,
                                        const Packet *packets, int packet_count,
                                        const Precinct *precincts, const Band *bands,
                                        const Block *blocks, int block_count, int style, int tree,
                                        int record_count, BlockState *states, Record *records,
                                        unsigned *nodes, int *status, int *buckets) {
    for (int i = threadIdx.x; i < BUCKETS && !blockIdx.x; i += blockDim.x) buckets[i] = 0;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        BlockState *mine = states + (size_t)tile * block_count;
        unsigned *trees = nodes + (size_t)tile * 2 * tree;
        for (int i = threadIdx.x; i < block_count; i += blockDim.x) mine[i] = BlockState{};
        for (int i = threadIdx.x; i < 2 * tree; i += blockDim.x) trees[i] = UNKNOWN;
        __syncthreads();
        if (threadIdx.x) continue;
        const unsigned char *at = encoded + starts[tile];
        Parts parts = {at, at, at + lengths[tile], {header, header_length, 0}};
        int wrong = parts.begin();
        Headers headers = {blocks, mine,         records + (size_t)tile * record_count,
                           trees,  tree, 0, record_count};
        for (int i = 0; i < packet_count && !wrong; ++i)
            wrong = read_packet(packets[i], precincts[packets[i].precinct], bands, style, headers,
                                parts, encoded);
        if (!wrong) wrong = parts.close();
        status[tile] = wrong;
        if (wrong)
            for (int i = 0; i < block_count; ++i) mine[i] = BlockState{};
    }
}

// How much work a code block is, for those of a warp to be alike: the most first.
__device__ int work_bucket(const BlockState &state) {
    const int passes = min((int)state.passes, 62);
    if (!passes) return BUCKETS - 1;
    const int size = 31 - __clz(state.bytes | 1);
    const int half = size ? state.bytes >> (size - 1) & 1 : 0;
    return BUCKETS - 1 - (passes * 32 + min(2 * size + half, 31));
}

extern "C" __global__ void count_work(const BlockState *states, int tiles, int block_count,
                                      const int *used, int used_count, int *buckets) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < tiles * used_count;
         i += gridDim.x * blockDim.x) {
        const size_t block = (size_t)(i / used_count) * block_count + used[i % used_count];
        atomicAdd(buckets + work_bucket(states[block]), 1);
    }
}

// One block of threads: where each bucket begins.
extern "C" __global__ void begin_buckets(int *buckets) {
    __shared__ int sums[THREADS];
    const int each = BUCKETS / blockDim.x;
    int *mine = buckets + threadIdx.x * each, sum = 0;
    for (int i = 0; i < each; ++i) sum += mine[i];
    sums[threadIdx.x] = sum;
    __syncthreads();
    int begin = 0;
    for (int i = 0; i < threadIdx.x; ++i) begin += sums[i];
    for (int i = 0; i < each; ++i) {
        const int count = mine[i];
        mine[i] = begin;
        begin += count;
    }
}

extern "C" __global__ void sort_work(const BlockState *states, int tiles, int block_count,
                                     const int *used, int used_count, int *buckets, int *work) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < tiles * used_count;
         i += gridDim.x * blockDim.x) {
        const int block = i / used_count * block_count + used[i % used_count];
        work[atomicAdd(buckets + work_bucket(states[block]), 1)] = block;
    }
}
