// Bytes of tiles to their place in a region, without what pads them beyond their level. One
// block is a part of one row of one tile. tiles: (address, tile row, tile column) each.
extern "C" __global__ void paste(const long long *tiles, int tile_height, int tile_width,
                                 int tile_pixel, int skip, int pixel, long long top,
                                 long long left, long long height, long long width,
                                 long long level_height, long long level_width,
                                 unsigned char *out) {
    const long long *tile = tiles + 3 * (size_t)blockIdx.x;
    const long long y = tile[1] * tile_height + blockIdx.y - top;
    if (y < 0 || y >= height || y + top >= level_height) return;
    const long long first = tile[2] * tile_width - left;
    const unsigned char *row =
        (const unsigned char *)tile[0] + (size_t)blockIdx.y * tile_width * tile_pixel;
    for (int i = blockIdx.z * blockDim.x + threadIdx.x; i < tile_width * pixel;
         i += gridDim.z * blockDim.x) {
        const long long x = first + i / pixel;
        if (x < 0 || x >= width || x + left >= level_width) continue;
        out[(size_t)(y * width + x) * pixel + i % pixel] =
            row[(size_t)(i / pixel) * tile_pixel + skip + i % pixel];
    }
}

__device__ unsigned char clipped(int value) { return value < 0 ? 0 : value > 255 ? 255 : value; }

// Full-range BT.601 with the fixed-point factors and rounding of libjpeg.
extern "C" __global__ void ycbcr_to_rgb(const long long *tiles, int pixels) {
    unsigned char *tile = (unsigned char *)tiles[3 * blockIdx.y];
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < pixels; i += gridDim.x * blockDim.x) {
        unsigned char *p = tile + 3 * (size_t)i;
        const int y = p[0], cb = p[1] - 128, cr = p[2] - 128, half = 1 << 15;
        p[0] = clipped(y + ((91881 * cr + half) >> 16));
        p[1] = clipped(y + ((-22554 * cb - 46802 * cr + half) >> 16));
        p[2] = clipped(y + ((116130 * cb + half) >> 16));
    }
}

// How far beyond black or white a colour may lie before it was clipped.
#define BEYOND 8

__device__ bool clips_to(int value, int shown) {
    return clipped(value) == shown && value >= -BEYOND && value <= 255 + BEYOND;
}

// differing: (red - y, blue - y, exact green - y, libjpeg's green - y) of every chroma pair
// whose green the two round differently. correction: what to add to green, by (red - green,
// blue - green) of exact RGB; no two chroma pairs share one.
extern "C" __global__ void round_as_libjpeg(const long long *tiles, int pixels,
                                            const int *differing, int count,
                                            const signed char *correction, int *unclear) {
    unsigned char *tile = (unsigned char *)tiles[3 * blockIdx.y];
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < pixels; i += gridDim.x * blockDim.x) {
        unsigned char *p = tile + 3 * (size_t)i;
        const int r = p[0], g = p[1], b = p[2];
        if (r % 255 && g % 255 && b % 255) {
            const int add = correction[(r - g + 256) * 512 + b - g + 256];
            if (add) p[1] = g + add;
        } else {
            for (int k = 0; k < count; ++k) {
                const int *d = differing + 4 * k;
                const int y = r % 255 ? r - d[0] : b % 255 ? b - d[1] : g - d[2];
                if (y >= 0 && y <= 255 && clips_to(y + d[0], r) && clips_to(y + d[1], b) &&
                    clips_to(y + d[2], g) && clipped(y + d[3]) != g)
                    unclear[blockIdx.y] = 1;
            }
        }
    }
}
