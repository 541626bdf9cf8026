// Kernels that copy, scale and assemble tiles. `device/kernel_tables.py` declares the structures
// Paste, Scaled, Plane and JpegTile, and puts their definitions before this text. Sizes are in
// pixels or samples unless they are called bytes.

// Load 16 bytes from any address with aligned loads only. Each word that is read contains at least
// one of these bytes, so the loads never touch memory beyond the allocation.
__device__ uint4 load_16(const unsigned char *from) {
    const unsigned int *words = (const unsigned int *)((size_t)from & ~(size_t)3);
    const int shift = 8 * (int)((size_t)from & 3);
    uint4 found;
    found.x = words[0];
    found.y = words[1];
    found.z = words[2];
    found.w = words[3];
    if (shift) {
        const unsigned int next = words[4];
        found.x = found.x >> shift | found.y << (32 - shift);
        found.y = found.y >> shift | found.z << (32 - shift);
        found.z = found.z >> shift | found.w << (32 - shift);
        found.w = found.w >> shift | next << (32 - shift);
    }
    return found;
}

// Copy parts of tiles to regions. blockIdx.x is the part; a thread copies 16 bytes at a time, which
// are aligned in the region. tile_pixel: bytes of a pixel in the tile; skip, pixel: offset and
// number of the bytes to copy of each pixel; down, across: copy every n-th row and m-th column.
extern "C" __global__ void paste(const Paste *pastes, int tile_width, int tile_pixel, int skip,
                                 int pixel, int down, int across, unsigned char *out) {
    const Paste part = pastes[blockIdx.x];
    const int bytes = part.width * pixel, chunks = bytes / 16 + 2;
    const bool whole = pixel == tile_pixel && across == 1;
    const long long threads = (long long)gridDim.y * blockDim.x;
    for (long long i = (long long)blockIdx.y * blockDim.x + threadIdx.x;
         i < (long long)part.height * chunks; i += threads) {
        const int y = i / chunks;
        const unsigned char *row = (const unsigned char *)part.source +
                                   (size_t)y * down * tile_width * tile_pixel + skip;
        unsigned char *target = out + (part.target + y * part.pitch) * pixel;
        // Chunks start at multiples of 16 in the region, so the first one may start before the row.
        const int start = 16 * (int)(i % chunks) - (int)((size_t)target & 15);
        if (whole && start >= 0 && start + 16 <= bytes) {
            *(uint4 *)(target + start) = load_16(row + start);
            continue;
        }
        for (int k = start < 0 ? 0 : start; k < start + 16 && k < bytes; ++k)
            target[k] = row[whole ? k : (size_t)(k / pixel) * across * tile_pixel + k % pixel];
    }
}

// Copy parts of 8-bit RGB or RGBA tiles, and look each color up. blockIdx.x is the part; a thread
// copies pixels of one column. colors: converted color for each stored color; in both, red is the
// lowest byte.
extern "C" __global__ void paste_colors(const Paste *pastes, int tile_width, int channels,
                                        int down, int across, const unsigned int *colors,
                                        unsigned char *out) {
    const Paste part = pastes[blockIdx.x];
    const int x = blockIdx.z * blockDim.x + threadIdx.x;
    if (x >= part.width) return;
    for (int y = blockIdx.y; y < part.height; y += gridDim.y) {
        const unsigned char *from =
            (const unsigned char *)part.source +
            channels * ((size_t)y * down * tile_width + (size_t)x * across);
        unsigned char *to = out + channels * (part.target + y * part.pitch + x);
        const unsigned int color = colors[from[0] | from[1] << 8 | from[2] << 16];
        to[0] = color;
        to[1] = color >> 8;
        to[2] = color >> 16;
        if (channels == 4) to[3] = from[3];
    }
}

// Pixels that are enlarged more than this are interpolated.
#define LARGER 4

// Interpolate an 8-bit sample bilinearly. y, x: position in the tile, relative to the center of its
// first pixel.
__device__ int interpolated(const unsigned char *tile, int pitch, int pixel, int rows, int columns,
                       double y, double x) {
    const int top = (int)floor(y), left = (int)floor(x);
    const float down = y - top, across = x - left;
    const int above = min(max(top, 0), rows - 1), below = min(max(top + 1, 0), rows - 1);
    const int near = min(max(left, 0), columns - 1), far = min(max(left + 1, 0), columns - 1);
    const unsigned char *first = tile + (size_t)above * pitch, *second = tile + (size_t)below * pitch;
    const float upper = first[near * pixel] + across * (first[far * pixel] - first[near * pixel]);
    const float lower = second[near * pixel] + across * (second[far * pixel] - second[near * pixel]);
    return (int)(upper + down * (lower - upper) + 0.5f);
}

// Draw parts of tiles at another scale. channel: the one to draw, or -1 for all channels of RGB or
// RGBA pixels, which become RGBA, with colors looked up in `colors` unless it is null. size: bytes
// of a sample. blockIdx.x is the part; a thread draws pixels of one column.
extern "C" __global__ void paste_scaled(const Scaled *parts, int tile_width, int channels, int size,
                                        int channel, const unsigned int *colors,
                                        unsigned char *out) {
    const Scaled part = parts[blockIdx.x];
    const int x = blockIdx.z * blockDim.x + threadIdx.x;
    if (x >= part.width) return;
    const bool smooth = size == 1 && max(part.down, part.across) < 1.0 / LARGER;
    const unsigned char *tile = (const unsigned char *)part.source;
    const int pixel = channels * size, pitch = tile_width * pixel;
    const double across = part.left + (x + 0.5) * part.across;
    const int column = min(max((int)floor(across), 0), part.columns - 1);
    for (int y = blockIdx.y; y < part.height; y += gridDim.y) {
        const double down = part.top + (y + 0.5) * part.down;
        const int row = min(max((int)floor(down), 0), part.rows - 1);
        const unsigned char *from = tile + (size_t)row * pitch + column * pixel;
        const long long index = part.target + y * part.pitch + x;
        const int first = channel < 0 ? 0 : channel, count = channel < 0 ? channels : 1;
        unsigned char found[8] = {0, 0, 0, 255};
        for (int k = 0; k < count * size; ++k)
            found[k] = smooth ? interpolated(tile + first + k, pitch, pixel, part.rows, part.columns,
                                        down - 0.5, across - 0.5)
                              : from[first * size + k];
        if (channel < 0 && colors) {
            const unsigned int color = colors[found[0] | found[1] << 8 | found[2] << 16];
            found[0] = color;
            found[1] = color >> 8;
            found[2] = color >> 16;
        }
        unsigned char *to = out + index * (channel < 0 ? 4 : size);
        for (int k = 0; k < (channel < 0 ? 4 : size); ++k) to[k] = found[k];
    }
}

// Compose tiles as `wsigpu_compose` in core.cpp does: add up the colors of the channels, four floats
// for each value of their samples, and write 8-bit RGB. blockIdx.y is the tile, whose channels have
// `channels` rows in `planes`. size: bytes of a sample; pitch: bytes from one sample to the next;
// shades: the sample to write for each sum from 0 to 1, in steps of 1 / SHADES.
extern "C" __global__ void compose(const Plane *planes, int channels, int size, int pitch,
                                   int pixels, const unsigned char *shades,
                                   unsigned char *const *tiles) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= pixels) return;
    float sums[3] = {0, 0, 0};
    for (int k = 0; k < channels; ++k) {
        const Plane plane = planes[(size_t)blockIdx.y * channels + k];
        const unsigned char *from = (const unsigned char *)plane.source + (size_t)i * pitch;
        const int value = size == 1 ? *from : *(const unsigned short *)from;
        const float *color =
            (const float *)plane.colors + 4 * min(max(value - plane.low, 0), plane.last);
        for (int c = 0; c < 3; ++c) sums[c] += color[c];
    }
    unsigned char *pixel = tiles[blockIdx.y] + 3 * (size_t)i;
    for (int c = 0; c < 3; ++c)
        pixel[c] = shades[(int)(fminf(fmaxf(sums[c], 0.0f), 1.0f) * SHADES + 0.5f)];
}

// Average the source pixels under each pixel of regions, weighted by the area that they share with
// it; integers are rounded half up. A thread computes a sample. finer: source, of shape (images,
// finer_height, finer_width, channels), which starts with the source pixel under the first pixel;
// scale: source pixels per pixel; pitch: samples from one row of `out` to the next; first_y,
// first_x: position of the first pixel. The order of operations is that of `reading.average`.
template <typename T>
__device__ void average_area(const T *finer, int finer_height, int finer_width, T *out, int pitch,
                             int height, int width, int channels, double scale_y, double scale_x,
                             long long first_y, long long first_x, long long samples, bool whole) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= samples) return;
    const int channel = i % channels;
    const int x = i / channels % width, y = i / channels / width % height;
    const long long number = i / channels / width / height;
    const T *picture = finer + number * (size_t)finer_height * finer_width * channels;
    const long long origin_y = first_y * scale_y + 1e-6, origin_x = first_x * scale_x + 1e-6;
    const double top = (first_y + y) * scale_y, bottom = top + scale_y;
    const double left = (first_x + x) * scale_x, right = left + scale_x;
    const int last_row = min((long long)ceil(bottom - 1e-6) - origin_y, (long long)finer_height);
    const int last_column = min((long long)ceil(right - 1e-6) - origin_x, (long long)finer_width);
    float sum = 0, weight = 0;
    for (int row = (long long)(top + 1e-6) - origin_y; row < last_row; ++row) {
        const double at = origin_y + row;
        const float down = min(bottom, at + 1) - max(top, at);
        const T *source = picture + (size_t)row * finer_width * channels + channel;
        float line_sum = 0, line_weight = 0;
        for (int column = (long long)(left + 1e-6) - origin_x; column < last_column; ++column) {
            const double from = origin_x + column;
            const float across = min(right, from + 1) - max(left, from);
            line_sum += across * source[(size_t)column * channels];
            line_weight += across;
        }
        sum += down * line_sum;
        weight += down * line_weight;
    }
    const float mean = sum / weight;
    T *sample = out + (number * height + y) * (size_t)pitch + x * channels + channel;
    *sample = whole ? (T)floorf(mean + 0.5f) : (T)mean;
}

#define AVERAGE_AREA(name, type, whole)                                                          \
    extern "C" __global__ void name(const type *finer, int finer_height, int finer_width,        \
                                    type *out, int pitch, int height, int width, int channels,   \
                                    double scale_y, double scale_x, long long first_y,           \
                                    long long first_x, long long samples) {                      \
        average_area<type>(finer, finer_height, finer_width, out, pitch, height, width,          \
                           channels, scale_y, scale_x, first_y, first_x, samples, whole);        \
    }

AVERAGE_AREA(average_area_uint8, unsigned char, true)
AVERAGE_AREA(average_area_uint16, unsigned short, true)
AVERAGE_AREA(average_area_int16, short, true)
AVERAGE_AREA(average_area_float32, float, false)

__device__ unsigned char clipped(int value) { return value < 0 ? 0 : value > 255 ? 255 : value; }

// Full-range BT.601 with the fixed-point factors and rounding of libjpeg (jdcolor.c).
__device__ void write_rgb(unsigned char *p, int y, int cb, int cr) {
    const int half = 1 << 15;
    cb -= 128;
    cr -= 128;
    p[0] = clipped(y + ((91881 * cr + half) >> 16));
    p[1] = clipped(y + ((-22554 * cb - 46802 * cr + half) >> 16));
    p[2] = clipped(y + ((116130 * cb + half) >> 16));
}

// Convert whole tiles in place; blockIdx.y is the tile.
extern "C" __global__ void ycbcr_to_rgb(unsigned char *const *tiles, int pixels) {
    unsigned char *tile = tiles[blockIdx.y];
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < pixels; i += gridDim.x * blockDim.x) {
        unsigned char *p = tile + 3 * (size_t)i;
        write_rgb(p, p[0], p[1], p[2]);
    }
}

// Upsample chroma like libjpeg's "fancy upsampling" (jdsample.c): the nearest sample has weight 3/4
// and the one on the other side 1/4, horizontally and, if down == 2, also vertically. Pixels are
// alternately rounded up and down.
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

// Largest difference between the decoded strip and its shades.
#define TOLERANCE 3

// Search this thread's part of a scan, which is in page-locked host memory, for a marker: 255 that
// is followed by anything but 0 (T.81, B.1.1.5). Return whether one was found: a marker would end
// the tile early, and the tiles after it would have wrong DC predictions.
__device__ bool finds_marker(const unsigned char *scan, long long length, int thread, int threads) {
    const uint4 *chunks = (const uint4 *)((size_t)scan & ~(size_t)15);
    for (const uint4 *at = chunks + thread; (const unsigned char *)at < scan + length;
         at += threads) {
        const uint4 chunk = *at;
        const unsigned int words[5] = {chunk.x, chunk.y, chunk.z, chunk.w, 0};
        const long long offset = (const unsigned char *)at - scan;
        // The loads are aligned, so the first chunk may start before the scan.
        for (int k = 0; k < 16; ++k) {
            if ((words[k / 4] >> 8 * (k % 4) & 255) != 255) continue;
            if (offset + k < 0 || offset + k >= length) continue;
            const int j = k + 1;
            if (j < 16 ? words[j / 4] >> 8 * (j % 4) & 255 : ((const unsigned char *)at)[16])
                return true;
        }
    }
    return false;
}

// Largest difference between the mean of a block and its DC coefficient, in gray levels.
#define FAR 2

// Decode the DC coefficient of a tile's first block (T.81, F.2.2.1) and compare it with the mean of
// the decoded block; return whether they differ. Blocks that reach black or white are not compared,
// as they may be clipped. codes: DHT table (T.81, B.2.4.2): 16 counts of codes by length, symbols.
__device__ bool first_block_differs(const unsigned char *scan, long long length, int quantum,
                               const unsigned char *codes, const unsigned char *luma, int width) {
    unsigned int bits = 0;
    // The first 32 bits, without the zero bytes that are stuffed after 255 (T.81, F.1.2.3).
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
    // Receive and extend (T.81, F.2.2.1).
    int value = size ? (bits << used) >> (32 - size) : 0;
    if (size && value < 1 << (size - 1)) value -= (1 << size) - 1;
    int sum = 0;
    for (int i = 0; i < 64; ++i) {
        const int shade = luma[i / 8 * width + i % 8];
        if (shade == 0 || shade == 255) return false;
        sum += shade;
    }
    // A DC coefficient is 8 times the mean, relative to the level shift of 128.
    return llabs(sum - 8 * (8 * 128 + (long long)value * quantum)) > 64 * FAR;
}

// Assemble pixels from the planes of JPEG tiles, and set the flag of each tile that may be wrong.
// blockIdx.y is the tile; a thread computes a pixel, if the height is not 0, and searches a part of
// the scan. across, down: luma samples per chroma sample. Blocks of a strip, 8 pixels wide,
// alternate between two shades.
extern "C" __global__ void merge_planes(const JpegTile *tiles, int height, int width,
                                        int channels, int across, int down, int to_rgb,
                                        int *doubts) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const JpegTile &tile = tiles[blockIdx.y];
    const unsigned char *strip = (const unsigned char *)tile.strip;
    const unsigned char *scan = (const unsigned char *)tile.scan;
    const long long length = tile.length;
    if (strip && i < width && abs(strip[i] - (int)tile.shades[i / 8 % 2]) > TOLERANCE)
        doubts[blockIdx.y] = 1;
    if (finds_marker(scan, length, i, gridDim.x * blockDim.x)) doubts[blockIdx.y] = 1;
    if (length && i == 0 &&
        first_block_differs(scan, length, tile.quantum, (const unsigned char *)tile.codes,
                       (const unsigned char *)tile.planes[0], width))
        doubts[blockIdx.y] = 1;
    if (i >= height * width) return;
    unsigned char *p = (unsigned char *)tile.target + (size_t)channels * i;
    const int first = ((const unsigned char *)tile.planes[0])[i];
    if (channels == 1) {
        p[0] = first;
        return;
    }
    const unsigned char *second = (const unsigned char *)tile.planes[1];
    const unsigned char *third = (const unsigned char *)tile.planes[2];
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
