// Packet headers (tier 2: T.800, B.9 and B.10): find the coded bytes of each code block. One thread
// of a warp reads all packets of a tile, because each starts where the one before it ends.

// More zero bit planes than any coefficient can have: a limit for damaged streams.
#define MOST_ZERO_PLANES 80
// Value of a tag tree's node before it has been coded.
#define UNKNOWN 0x7fff

__device__ unsigned big_endian(const unsigned char *at, int bytes) {
    unsigned value = 0;
    for (int i = 0; i < bytes; ++i) value = value << 8 | at[i];
    return value;
}

// Bits of packet headers, of which the next ones are the highest of `window`. After a byte of 255,
// the most significant bit of the next one is stuffed and left out (B.10.1). Bits beyond the end are
// 0. left: bits in the window, negative if some beyond the end were taken; last: 255 if the byte
// before `at` is; ahead: the three bytes at `at`, loaded early because loads take long.
struct Bits {
    const unsigned char *first, *at, *end;
    Word window;
    int left;
    unsigned last, ahead;

    __device__ void load() {
        ahead = 0;
        for (int i = 0; i < 3; ++i) ahead = ahead << 8 | (at + i < end ? at[i] : 0u);
    }
    __device__ void start(const unsigned char *from, const unsigned char *to) {
        first = at = from, end = to;
        window = left = last = 0;
        load();
    }
    // Make 32 bits available, as far as there are any.
    __device__ void fill() {
        while (left < 32 && at < end) {
            // A byte of 255 becomes 0 here, so subtracting 1 borrows.
            const bool full = (~ahead - 0x010101) & ahead & 0x808080;
            const bool one = full || last == 255 || end - at < 3;
            const int count = last == 255 ? 7 : one ? 8 : 24;
            const unsigned bits = one ? ahead >> 16 & ((1u << count) - 1) : ahead;
            last = one ? ahead >> 16 : 0;
            window |= (Word)bits << (64 - count - left);
            left += count;
            at += one ? 1 : 3;
            load();
        }
    }
    // Return the next 32 bits, once they are available.
    __device__ unsigned peek() const { return (unsigned)(window >> 32); }
    __device__ void skip(int count) {
        window <<= count;
        left -= count;
    }
    // Take 1 to 32 bits.
    __device__ unsigned number(int count) {
        fill();
        const unsigned value = peek() >> (32 - count);
        skip(count);
        return value;
    }
    // Take bits of 0 and the 1 after them, or `most` bits of 0; return the number of these.
    __device__ unsigned zeros(unsigned most) {
        for (unsigned found = 0;;) {
            fill();
            const unsigned run = min((unsigned)__clz(peek()), most - found);
            found += run;
            skip(run);
            if (found == most) return found;
            if (run == 32) continue;
            skip(1);
            return found;
        }
    }
    // Go to the next byte boundary. If the last byte is 255, a stuffed byte follows.
    __device__ void align() {
        for (;;) {
            const int count = at - first > 1 && at[-2] == 255 ? 7 : 8;
            if (left < count) break;
            left -= count;
            --at;
        }
        if (at > first && at[-1] == 255) {
            if (at >= end) left = -1;
            ++at;
        }
    }
};

// Walks down a tag tree (B.10.2) from the root to one leaf after the other. Levels are stored from
// the leaves to the root. The lower half of a node is its value, UNKNOWN until it is reached, and
// the upper half is the least value that is still possible. height, level: where the last walk ended
// (initially the root), and the first node there; x, y: the leaf that it was for.
struct Walk {
    unsigned *nodes;
    int wide, high, height, level, x, y;

    __device__ int columns() const { return ((wide - 1) >> height) + 1; }
    __device__ int size() const { return columns() * (((high - 1) >> height) + 1); }

    // Decode down to another leaf; return its value, or at least `threshold` if it is not below
    // that. `threshold` has to be that of the last walk, so the nodes of that are not decoded again.
    // The walk ends early at a node that is not below `threshold`, because no leaf under it is.
    __device__ unsigned descend(int to_x, int to_y, unsigned threshold, Bits &bits) {
        const int differ = (x ^ to_x) | (y ^ to_y);
        x = to_x, y = to_y;
        for (; differ >> height; ++height) level += size();
        for (unsigned least = 0;;) {
            unsigned &node = nodes[level + (y >> height) * columns() + (x >> height)];
            const unsigned old = node;
            unsigned value = old & 0xffff;
            least = max(least, old >> 16);
            if (least < min(threshold, value)) {
                const unsigned most = threshold - least, zeros = bits.zeros(most);
                least += zeros;
                if (zeros < most) value = least;
            }
            if (old != (least << 16 | value)) node = least << 16 | value;
            if (!height || least >= threshold) return value;
            --height;
            level -= size();
        }
    }
};

// Decode the number of coding passes (table B.4).
__device__ int count_passes(Bits &bits) {
    bits.fill();
    const unsigned next = bits.peek();
    const unsigned two = next >> 28 & 3, five = next >> 23 & 31;
    int passes = 37 + (next >> 16 & 127), count = 16;
    if (five < 31) passes = 6 + five, count = 9;
    if (two < 3) passes = 3 + two, count = 4;
    if (!(next >> 30 & 1)) passes = 2, count = 2;
    if (!(next >> 31)) passes = 1, count = 1;
    bits.skip(count);
    return passes;
}

// Return how many coding passes the next codeword segment can contain (D.4.2 and D.6, table D.9;
// T.814, B.1: a cleanup segment, then a refinement segment); `passes` have been coded before. 109 is
// more than code blocks with MOST_PLANES can have.
__device__ int segment_passes(int style, int passes) {
    if (style & FAST) return passes ? 2 : 1;
    if (style & TERMINATE_ALL) return 1;
    if (!(style & BYPASS)) return 109;
    return passes < 10 ? 10 - passes : passes % 3 == 1 ? 2 : 1;
}

// Compares a tile's headers with those of the form, of which `matched` bytes were found so far. All
// segments have to be equal except those that are SKIPPED in jpeg2000_header.py.
struct Form {
    const unsigned char *text;
    int length, matched;

    // Skip one segment, which has to end before `end`; return the status.
    __device__ int pass(const unsigned char *&at, const unsigned char *end) {
        if (end - at < 4) return CUT;
        const unsigned marker = big_endian(at, 2), size = 2 + big_endian(at + 2, 2);
        if (size < 4 || size > end - at) return CUT;
        const bool skipped = marker == 0xff64 || marker == 0xff55 || marker == 0xff57 ||
                             marker == 0xff58 || marker == 0xff63;
        if (!skipped) {
            if (size > length - matched) return OTHER_FORM;
            for (unsigned i = 0; i < size; ++i)
                if (at[i] != text[matched + i]) return OTHER_FORM;
            matched += size;
        }
        at += size;
        return FINE;
    }
};

// Reads the tile-parts of a tile one by one. The packets of each are between `at` and `end`.
struct Parts {
    const unsigned char *at, *end, *stop;
    Form form;

    // Skip the main header, up to the first SOT; return the status.
    __device__ int open_stream() {
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
    // Skip the header of a tile-part (A.4.2), from SOT to SOD; return the status.
    __device__ int open() {
        if (stop - at < 12 || big_endian(at, 4) != 0xff90000a || big_endian(at + 4, 2)) return CUT;
        const unsigned length = big_endian(at + 6, 4);
        // If Psot is 0, the tile-part extends to EOC.
        end = stop - 2;
        if (length) {
            if (length < 14 || length > stop - at) return CUT;
            end = at + length;
        }
        for (at += 12; end - at >= 2;) {
            if (big_endian(at, 2) == 0xff93) {
                at += 2;
                return form.matched == form.length ? FINE : OTHER_FORM;
            }
            if (const int wrong = form.pass(at, end)) return wrong;
        }
        return CUT;
    }
    // Check that EOC or another SOT follows the tile-part; return the status.
    __device__ int close() const {
        const unsigned marker = stop - end < 2 ? 0 : big_endian(end, 2);
        return marker == 0xffd9 || marker == 0xff90 ? FINE : CUT;
    }
};

// State of a tile while its packet headers are read. nodes: the tag trees for inclusion, then those
// for zero bit planes, `tree` nodes later; used, most: records in use, and how many there are; bytes:
// coded bytes of the packet so far.
struct Headers {
    BlockState *states;
    Record *records;
    unsigned *nodes;
    int tree, used, most;
    Bits bits;
    Word bytes;

    // Read what a packet's header says about the code blocks of a subband (B.10.4 to B.10.7); return
    // the status.
    __device__ int read_band(const Band &band, unsigned layer) {
        const int depth = 32 - __clz(max(band.wide, band.high) - 1);
        const int root = band.nodes - 1;
        Walk inclusion = {nodes + band.tree, band.wide, band.high, depth, root, 0, 0};
        Walk zeros = inclusion;
        zeros.nodes += tree;
        // Loaded early because loads take long; no code block is included before the first layer.
        int ahead = layer ? states[band.first].length_bits : 0;
        for (int leaf = 0, x = 0, y = 0; leaf < band.wide * band.high; ++leaf) {
            const bool known = ahead;
            BlockState &state = states[band.first + leaf];
            if (layer && leaf + 1 < band.wide * band.high) ahead = (&state)[1].length_bits;
            // The inclusion tree has the first layer that includes a code block.
            if (known ? bits.number(1) : inclusion.descend(x, y, layer + 1, bits) <= layer) {
                BlockState changed = known ? state : BlockState{};
                if (!known) {
                    const int zero = zeros.descend(x, y, MOST_ZERO_PLANES, bits);
                    if (zero >= band.planes) return DAMAGED;
                    changed.planes = band.planes - zero;
                    changed.length_bits = 3;
                }
                if (const int wrong = read_block(changed, band.style)) return wrong;
                state = changed;
            } else if (!known && inclusion.height == depth) {
                return FINE;  // the root says that no code block has been included
            }
            if (++x == band.wide) x = 0, ++y;
        }
        return FINE;
    }
    // Read the coding passes and lengths of a code block that a packet includes.
    __device__ int read_block(BlockState &state, int style) {
        int passes = count_passes(bits);
        // Lblock grows by one for each 1 bit (B.10.7.1).
        bits.fill();
        const int more = __clz(~bits.peek());
        state.length_bits += more;
        if (state.length_bits > 32) return DAMAGED;
        bits.skip(more + 1);
        const int limit = 3 * state.planes - 2;
        if (state.passes + passes > (style & FAST ? min(limit, 3) : limit)) return DAMAGED;
        // One length for each codeword segment that the passes belong to (B.10.7.2).
        while (passes > 0) {
            if (used == most) return DAMAGED;
            const bool starts = !state.room;
            if (starts) state.room = segment_passes(style, state.passes);
            const int taken = passes < state.room ? passes : state.room;
            const int size = state.length_bits + 31 - __clz(taken);
            if (size > 32) return DAMAGED;
            const unsigned length = bits.number(size);
            records[used] = Record{bytes, length, -1, taken, starts};
            bytes += length;
            if (state.passes) records[state.last].next = used;
            else state.first = used;
            state.last = used++;
            state.passes += taken;
            state.room -= taken;
            passes -= taken;
            state.bytes += length;
        }
        return FINE;
    }
};

__device__ bool is_marker(const unsigned char *at, const unsigned char *end, unsigned marker) {
    return end - at >= 2 && big_endian(at, 2) == marker;
}

// What the first thread of a warp found out about a packet: status of the tile; records of the packet;
// where its code blocks' bytes start.
struct Found {
    int wrong, first, last;
    Word body;
};

// Read one packet: its header, and the positions of the bytes that follow (B.9).
__device__ Found read_packet(const Packet &packet, const Band *bands, int style, Headers &headers,
                             Parts &parts, const unsigned char *encoded) {
    Found found = {FINE, headers.used, headers.used, 0};
    while (parts.at == parts.end)
        if ((found.wrong = parts.open())) return found;
    // SOP (A.8.1) is optional even if the packet style allows it.
    found.wrong = CUT;
    if (style & PACKET_STARTS && is_marker(parts.at, parts.end, 0xff91)) {
        if (parts.end - parts.at < 6) return found;
        parts.at += 6;
    }
    headers.bytes = 0;
    Bits &bits = headers.bits;
    bits.start(parts.at, parts.end);
    // The first bit is 0 for an empty packet.
    if (bits.number(1))
        for (int i = 0; i < packet.count; ++i) {
            const Band band = bands[packet.first + i];
            if (const int wrong = headers.read_band(band, packet.layer)) {
                found.wrong = wrong;
                return found;
            }
        }
    bits.align();
    if (bits.left < 0) return found;
    parts.at = bits.at;
    // EPH (A.8.2).
    if (style & HEADER_ENDS && is_marker(parts.at, parts.end, 0xff92)) parts.at += 2;
    if (headers.bytes > (Word)(parts.end - parts.at)) return found;
    found = {FINE, found.first, headers.used, (Word)(parts.at - encoded)};
    parts.at += headers.bytes;
    return found;
}

// Load memory into the L1 cache with a warp: one thread alone would wait for each load.
// Return all bits that occur in it.
template <typename Row> __device__ int touch(const Row *rows, int count) {
    int bits = 0;
    const long long words = (long long)count * sizeof(Row) / 4;
    // The cache loads sectors of 32 bytes.
    for (long long i = threadIdx.x % 32 * 8; i < words; i += warp_size() * 8)
        bits |= ((const int *)rows)[i];
    return bits;
}

// Code blocks that `decode_blocks` has to decode: `work` lists those found so far, from the front, and
// those without coding passes from the back; other entries are -1. ends: the number of both; null if
// the code blocks are sorted instead.
struct Queue {
    int *work, *ends, count;

    __device__ void add(int number, bool empty) const {
        const int place = empty ? count - 1 - atomicAdd(ends + 1, 1) : atomicAdd(ends, 1);
        ((volatile int *)work)[place] = number;
    }
    // Return an entry, once there is one. Each is written, also if a tile is damaged.
    __device__ int wait(int place) const {
        int number;
        while ((number = ((volatile int *)work)[place]) < 0) __nanosleep(500);
        __threadfence();
        return number;
    }
};

// Read the packet headers of a tile with a warp, which shares `found`.
__device__ __noinline__ void read_tile(const Streams &streams, int tile, Queue queue,
                                       Found &found) {
    const Packet *const packets = (const Packet *)streams.packets;
    const Band *const bands = (const Band *)streams.bands;
    const unsigned char *const encoded = (const unsigned char *)streams.encoded;
    BlockState *const states = (BlockState *)streams.states;
    const int block_count = streams.block_count, first_block = tile * block_count;
    Record *const records = (Record *)streams.records + (size_t)tile * streams.record_count;
    unsigned *const trees = (unsigned *)streams.nodes + (size_t)tile * 2 * streams.tree;
    int *const status = (int *)streams.status + tile;
    const int lane = threadIdx.x % 32, lanes = warp_size(), packet_count = streams.packet_count;
    const int seen = touch(packets, packet_count) | touch(bands, streams.band_count) |
                     touch(trees, 2 * streams.tree);
    if (seen < 0) *status = DAMAGED;  // never: the compiler would remove unused loads
    const unsigned char *const at = encoded + ((const Word *)streams.starts)[tile];
    Parts parts = {at, at, at + ((const Word *)streams.lengths)[tile],
                   {(const unsigned char *)streams.header, streams.header_length, 0}};
    Headers headers = {states + first_block, records, trees, streams.tree, 0, streams.record_count};
    if (!lane) found.wrong = parts.open_stream();
    for (int i = 0; i < packet_count; ++i) {
        const Packet packet = packets[i];
        if (!lane && !found.wrong)
            found = read_packet(packet, bands, streams.style, headers, parts, encoded);
        __syncwarp();
        const Found here = found;
        if (!here.wrong)
            for (int k = here.first + lane; k < here.last; k += lanes) records[k].offset += here.body;
        // No thread decodes a code block of a packet that is missing or damaged.
        for (int number = 0; number < packet.count && here.wrong; ++number) {
            const Band band = bands[packet.first + number];
            for (int k = lane; k < band.wide * band.high; k += lanes)
                states[first_block + band.first + k] = BlockState{};
        }
        __syncwarp();
        if (!queue.ends || packet.layer < streams.layers - 1) continue;
        // The states and records have to be visible before the entries.
        __threadfence();
        for (int number = 0; number < packet.count; ++number) {
            const Band band = bands[packet.first + number];
            for (int k = lane; k < band.wide * band.high; k += lanes) {
                const int block = first_block + band.first + k;
                queue.add(block, !states[block].passes);
            }
        }
        __syncwarp();
    }
    if (!lane) *status = found.wrong ? found.wrong : parts.close();
}

// Clear what the packet headers of a batch are read to. nodes: of all tag trees.
extern "C" __global__ void clear_batch(BlockState *states, int *work, int count, unsigned *nodes,
                                       int node_count, int *buckets) {
    const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    for (int i = first; i < count; i += step) states[i] = BlockState{}, work[i] = -1;
    for (int i = first; i < node_count; i += step) nodes[i] = UNKNOWN;
    for (int i = first; i < BUCKETS; i += step) buckets[i] = 0;
}

// Read the packet headers of all tiles; a warp for each.
extern "C" __global__ void read_packets(const __grid_constant__ Streams streams) {
    __shared__ Found found;
    for (int tile = blockIdx.x; tile < streams.tiles; tile += gridDim.x)
        read_tile(streams, tile, Queue{}, found);
}

// Return a code block's bucket, by coding passes first and then by bytes; the most work comes
// first. Code blocks of a warp are decoded in step, so they should take equally long.
__device__ int work_bucket(const BlockState &state) {
    const int passes = min((int)state.passes, 62);
    if (!passes) return BUCKETS - 1;
    const int size = 31 - __clz(state.bytes | 1);
    const int half = size ? state.bytes >> (size - 1) & 1 : 0;
    return BUCKETS - 1 - (passes * 32 + min(2 * size + half, 31));
}

// Count the code blocks in each bucket. count: number of code blocks of all tiles.
extern "C" __global__ void count_work(const BlockState *states, int count, int *buckets) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        atomicAdd(buckets + work_bucket(states[i]), 1);
}

// Replace the count of each bucket with its start; launched with one block of threads.
extern "C" __global__ void start_buckets(int *buckets) {
    __shared__ int sums[THREADS];
    const int each = BUCKETS / blockDim.x;
    int *mine = buckets + threadIdx.x * each, sum = 0;
    for (int i = 0; i < each; ++i) sum += mine[i];
    sums[threadIdx.x] = sum;
    __syncthreads();
    int start = 0;
    for (int i = 0; i < threadIdx.x; ++i) start += sums[i];
    for (int i = 0; i < each; ++i) {
        const int count = mine[i];
        mine[i] = start;
        start += count;
    }
}

// List the code blocks by bucket in `work`; their order within a bucket does not matter.
extern "C" __global__ void sort_work(const BlockState *states, int count, int *buckets, int *work) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        work[atomicAdd(buckets + work_bucket(states[i]), 1)] = i;
}
