// Bytes of tiles to their place in a region, without what pads them beyond their level. One
// block is a part of rows of one tile, a thread of it four bytes that are aligned in the
// region. tiles: (address, tile row, tile column, ...) each. pixel: bytes to copy of each pixel
// of `tile_pixel` bytes, after `skip`.
extern "C" __global__ void paste(const long long *tiles, int columns, int tile_height,
                                 int tile_width, int tile_pixel, int skip, int pixel,
                                 long long top, long long left, long long height,
                                 long long width, long long level_height,
                                 long long level_width, unsigned char *out) {
    const long long *tile = tiles + columns * (size_t)blockIdx.x;
    const long long first = tile[2] * tile_width - left;
    const long long end = min(min(first + tile_width, width), level_width - left);
    const long long begin = max(first, 0LL) * pixel, past = end * pixel;
    for (int tile_row = blockIdx.y; tile_row < tile_height; tile_row += gridDim.y) {
        const long long y = tile[1] * tile_height + tile_row - top;
        if (y < 0 || y >= height || y + top >= level_height) continue;
        const unsigned char *row =
            (const unsigned char *)tile[0] + (size_t)tile_row * tile_width * tile_pixel + skip;
        unsigned char *target = out + (size_t)y * width * pixel;
        const long long word = begin - ((size_t)(target + begin) & 3) +
                               4 * ((long long)blockIdx.z * blockDim.x + threadIdx.x);
        unsigned char bytes[4];
        for (int k = 0; k < 4; ++k) {
            const long long place = word + k;
            if (place < begin || place >= past) continue;
            const int i = place - first * pixel;
            bytes[k] = row[pixel == tile_pixel ? i : i / pixel * tile_pixel + i % pixel];
        }
        if (word >= begin && word + 4 <= past) {
            *(uchar4 *)(target + word) = make_uchar4(bytes[0], bytes[1], bytes[2], bytes[3]);
        } else {
            for (int k = 0; k < 4; ++k)
                if (word + k >= begin && word + k < past) target[word + k] = bytes[k];
        }
    }
}

// The same of RGB pixels, with alpha or without, in other colours; a thread is a pixel. colors:
// what each colour becomes, red in the lowest byte of its place and of the value.
extern "C" __global__ void paste_colors(const long long *tiles, int columns, int tile_height,
                                        int tile_width, int channels, long long top,
                                        long long left, long long height, long long width,
                                        long long level_height, long long level_width,
                                        const unsigned int *colors, unsigned char *out) {
    const long long *tile = tiles + columns * (size_t)blockIdx.x;
    const int tile_column = blockIdx.z * blockDim.x + threadIdx.x;
    const long long x = tile[2] * tile_width + tile_column - left;
    if (tile_column >= tile_width || x < 0 || x >= min(width, level_width - left)) return;
    for (int tile_row = blockIdx.y; tile_row < tile_height; tile_row += gridDim.y) {
        const long long y = tile[1] * tile_height + tile_row - top;
        if (y < 0 || y >= min(height, level_height - top)) continue;
        const unsigned char *from = (const unsigned char *)tile[0] +
                                    channels * ((size_t)tile_row * tile_width + tile_column);
        unsigned char *to = out + channels * ((size_t)y * width + x);
        const unsigned int color = colors[from[0] | from[1] << 8 | from[2] << 16];
        to[0] = color;
        to[1] = color >> 8;
        to[2] = color >> 16;
        if (channels == 4) to[3] = from[3];
    }
}

// Samples of raw segments to their place in a region, in this machine's byte order. One block is a
// part of rows of one segment, a thread of it a sample of each. segments: (address, tile row, tile
// column, rows, pixels a row, first channel) each. size: bytes of a sample.
extern "C" __global__ void lay_out(const long long *segments, int tile_height, int tile_width,
                                   int samples, int channels, int size, int swapped,
                                   long long top, long long left, long long height,
                                   long long width, long long level_height,
                                   long long level_width, unsigned char *out) {
    const long long *segment = segments + 6 * (size_t)blockIdx.x;
    const long long i = (long long)blockIdx.z * blockDim.x + threadIdx.x;
    const long long pixel = i / samples, x = segment[2] * tile_width + pixel - left;
    if (pixel >= segment[4] || x < 0 || x >= min(width, level_width - left)) return;
    const long long row_samples = segment[4] * samples;
    const long long place = channels * x + segment[5] + i % samples;
    for (int row = blockIdx.y; row < segment[3]; row += gridDim.y) {
        const long long y = segment[1] * tile_height + row - top;
        if (y < 0 || y >= min(height, level_height - top)) continue;
        const unsigned char *from =
            (const unsigned char *)segment[0] + size * (row * row_samples + i);
        unsigned char *to = out + size * (channels * width * y + place);
        for (int k = 0; k < size; ++k) to[k] = from[swapped ? size - 1 - k : k];
    }
}

__device__ unsigned char clipped(int value) { return value < 0 ? 0 : value > 255 ? 255 : value; }

// Full-range BT.601 with the fixed-point factors and rounding of libjpeg.
__device__ void write_rgb(unsigned char *p, int y, int cb, int cr) {
    const int half = 1 << 15;
    cb -= 128;
    cr -= 128;
    p[0] = clipped(y + ((91881 * cr + half) >> 16));
    p[1] = clipped(y + ((-22554 * cb - 46802 * cr + half) >> 16));
    p[2] = clipped(y + ((116130 * cb + half) >> 16));
}

extern "C" __global__ void ycbcr_to_rgb(const long long *tiles, int columns, int pixels) {
    unsigned char *tile = (unsigned char *)tiles[(size_t)columns * blockIdx.y];
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < pixels; i += gridDim.x * blockDim.x) {
        unsigned char *p = tile + 3 * (size_t)i;
        write_rgb(p, p[0], p[1], p[2]);
    }
}

// One sample of a plane of half the width, and perhaps half the height: between the nearest
// one and that beyond it, 3 to 1 each way, rounded up and down in turn, as libjpeg does.
__device__ int smooth(const unsigned char *plane, int x, int y, int width, int height, int down) {
    const int near = x >> 1, far = min(max(near + (x & 1 ? 1 : -1), 0), width - 1);
    if (down == 1) {
        const unsigned char *row = plane + (size_t)y * width;
        return (3 * row[near] + row[far] + (x & 1 ? 2 : 1)) >> 2;
    }
    const int other = min(max((y >> 1) + (y & 1 ? 1 : -1), 0), height - 1);
    const unsigned char *row = plane + (size_t)(y >> 1) * width;
    const unsigned char *beyond = plane + (size_t)other * width;
    return (3 * (3 * row[near] + beyond[near]) + 3 * row[far] + beyond[far] + (x & 1 ? 7 : 8)) >> 4;
}

// How far an engine may be from the shades of a strip.
#define TOLERANCE 3

// Whether this thread finds a marker in its part of a scan, which lies in host memory.
__device__ bool finds_marker(const unsigned char *scan, long long length, int thread, int threads) {
    const uint4 *chunks = (const uint4 *)((size_t)scan & ~(size_t)15);
    for (const uint4 *at = chunks + thread; (const unsigned char *)at < scan + length;
         at += threads) {
        const uint4 chunk = *at;
        const unsigned int words[5] = {chunk.x, chunk.y, chunk.z, chunk.w, 0};
        const long long place = (const unsigned char *)at - scan;
        for (int k = 0; k < 16; ++k) {
            if ((words[k / 4] >> 8 * (k % 4) & 255) != 255) continue;
            if (place + k < 0 || place + k >= length) continue;
            const int j = k + 1;
            if (j < 16 ? words[j / 4] >> 8 * (j % 4) & 255 : ((const unsigned char *)at)[16])
                return true;
        }
    }
    return false;
}

// How far the mean of a block may be from what its code says.
#define FAR 2

// Whether the first block of a tile is of another brightness than the first code of its scan
// says. Blocks that reach black or white tell nothing. codes: how many have 1 bit, 2 bits, ...;
// what they stand for, the bits of the value that follows.
__device__ bool is_other_block(const unsigned char *scan, long long length, int quantum,
                               const unsigned char *codes, const unsigned char *luma, int width) {
    unsigned int bits = 0;
    for (int taken = 0, i = 0; taken < 4; ++taken, ++i) {
        bits = bits << 8 | (i < length ? scan[i] : 255);
        if (i < length && scan[i] == 255) ++i;
    }
    const unsigned char *symbols = codes + 16;
    int code = 0, first = 0, size = -1, used = 0;
    while (size < 0 && used < 16) {
        code = code << 1 | (bits >> (31 - used) & 1);
        const int count = codes[used++];
        if (code - first < count) size = symbols[code - first];
        symbols += count;
        first = first + count << 1;
    }
    if (size < 0 || size > 15) return true;
    int value = size ? (bits << used) >> (32 - size) : 0;
    if (size && value < 1 << (size - 1)) value -= (1 << size) - 1;
    int sum = 0;
    for (int i = 0; i < 64; ++i) {
        const int shade = luma[i / 8 * width + i % 8];
        if (shade == 0 || shade == 255) return false;
        sum += shade;
    }
    return llabs(sum - 8 * (8 * 128 + (long long)value * quantum)) > 64 * FAR;
}

// tiles: (address, tile row, tile column, 3 planes, strip, scan, its length, 2 shades, quantum,
// codes) each, in words of 8 bytes. across, down: luma samples for one of chroma. The blocks
// of a strip, 8 pixels wide, have the shades in turn.
extern "C" __global__ void merge_planes(const long long *tiles, int height, int width,
                                        int channels, int across, int down, int to_rgb,
                                        int *doubts) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const long long *tile = tiles + 16 * (size_t)blockIdx.y;
    const unsigned char *strip = (const unsigned char *)tile[6];
    const unsigned char *scan = (const unsigned char *)tile[7];
    const long long length = tile[8];
    if (strip && i < width && abs(strip[i] - (int)tile[9 + i / 8 % 2]) > TOLERANCE)
        doubts[blockIdx.y] = 1;
    if (finds_marker(scan, length, i, gridDim.x * blockDim.x)) doubts[blockIdx.y] = 1;
    if (length && i == 0 &&
        is_other_block(scan, length, tile[11], (const unsigned char *)(tile + 12),
                       (const unsigned char *)tile[3], width))
        doubts[blockIdx.y] = 1;
    if (i >= height * width) return;
    unsigned char *p = (unsigned char *)tile[0] + (size_t)channels * i;
    const int first = ((const unsigned char *)tile[3])[i];
    if (channels == 1) {
        p[0] = first;
        return;
    }
    const unsigned char *second = (const unsigned char *)tile[4];
    const unsigned char *third = (const unsigned char *)tile[5];
    const int x = i % width, y = i / width, wide = (width + 1) / 2, high = (height + 1) / 2;
    const int cb = across == 1 ? second[i] : smooth(second, x, y, wide, high, down);
    const int cr = across == 1 ? third[i] : smooth(third, x, y, wide, high, down);
    if (to_rgb) {
        write_rgb(p, first, cb, cr);
    } else {
        p[0] = first;
        p[1] = cb;
        p[2] = cr;
    }
}
