// From coefficients of the last resolution to pixels: component transform (T.800, annex G), DC
// level shift (G.1), and limits of the samples' type.

__device__ int limited(int value, int low, int high) {
    return value < low ? low : value > high ? high : value;
}

// Where the coefficients of a tile are, and how they become pixels: see finish_pixels.
struct Source {
    const int *bands, *lifted;
    const Component *components;
    int channels, left, upper, transform;

    // Compute the samples of one pixel.
    __device__ void read(int x, int y, int *whole) const {
        float real[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if (k >= channels) break;
            const Component &one = components[k];
            int column = x, row = y;
            if (one.across > 1 || one.down > 1) {
                column = limited((left + x) / one.across - one.left, 0, one.width - 1);
                row = limited((upper + y) / one.down - one.upper, 0, one.height - 1);
            }
            const int *const from = (one.lifted ? lifted : bands) + one.plane;
            whole[k] = from[(long long)row * one.pitch + column];
            real[k] = *(const float *)&whole[k];
        }
        // G.2, in integers; G.3, in floats.
        if (transform == 1 && components[0].reversible) {
            const int green = wrapped(whole[0], -(long long)(wrapped(whole[1], whole[2]) >> 2));
            const int red = wrapped(whole[2], green), blue = wrapped(whole[1], green);
            whole[0] = red, whole[1] = green, whole[2] = blue;
        } else if (transform == 1) {
            const float y = real[0], u = real[1], v = real[2];
            real[0] = y + v * 1.402f;
            real[1] = y - u * 0.34413f - v * 0.71414f;
            real[2] = y + u * 1.772f;
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if (k >= channels) break;
            const Component &one = components[k];
            if (!one.reversible)
                whole[k] = real[k] > 1e9f ? 1000000000 : real[k] < -1e9f ? -1000000000
                                                                         : (int)rintf(real[k]);
            whole[k] = limited(wrapped(whole[k], one.middle), one.lowest, one.highest);
        }
        // The factors and rounding of OpenJPEG, so that both decode to the same pixels.
        if (transform == 2) {
            const int middle = components[0].middle, highest = components[0].highest;
            const int y = whole[0], cb = whole[1] - middle, cr = whole[2] - middle;
            whole[0] = limited(y + (int)(1.402 * cr), 0, highest);
            whole[1] = limited(y - (int)(0.344 * cb + 0.714 * cr), 0, highest);
            whole[2] = limited(y + (int)(1.772 * cb), 0, highest);
        }
    }
};

// Write the pixels of all tiles. bands, lifted: coefficients; transform: 0 for none; 1 for RCT or ICT
// of components 0 to 2; 2 for YCbCr with subsampled chroma to RGB. bytes: size of a sample;
// pixel_bytes: bytes from one pixel to the next; status: of each tile, copied to `flags` in
// page-locked memory; rows_at_once: rows of a tile for each block of threads. A thread computes one
// pixel at a time, or four if it can write them as three words.
extern "C" __global__ void finish_pixels(const int *bands, const int *lifted, long long tile_size,
                                         const Component *components, int channels, int height,
                                         int width, int left, int upper, int transform,
                                         int bytes, int pixel_bytes,
                                         const unsigned long long *targets,
                                         const int *status, int *flags, int rows_at_once) {
    const int strips = (height + rows_at_once - 1) / rows_at_once;
    const int tile = blockIdx.x / strips, top = blockIdx.x % strips * rows_at_once;
    const int wrong = status[tile];
    if (!top && !threadIdx.x) flags[tile] = wrong;
    if (wrong) return;
    const Source source = {bands + tile * tile_size, lifted + tile * tile_size, components,
                           channels, left, upper, transform};
    const int pixels = min(rows_at_once, height - top) * width;
    unsigned char *const target =
        (unsigned char *)targets[tile] + (long long)top * width * pixel_bytes;
    const bool packs = channels == 3 && bytes == 1 && pixel_bytes == 3 && width % 4 == 0;
    if (packs && !((size_t)target & 3)) {
        for (int i = 4 * threadIdx.x; i < pixels; i += 4 * blockDim.x) {
            const int x = i % width, y = top + i / width;
            unsigned words[3] = {0, 0, 0};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                int whole[4];
                source.read(x + k, y, whole);
#pragma unroll
                for (int channel = 0; channel < 3; ++channel) {
                    const int place = 3 * k + channel;
                    words[place / 4] |= (unsigned)whole[channel] << 8 * (place % 4);
                }
            }
            for (int k = 0; k < 3; ++k) ((unsigned *)(target + 3 * i))[k] = words[k];
        }
        return;
    }
    for (int i = threadIdx.x; i < pixels; i += blockDim.x) {
        int whole[4];
        source.read(i % width, top + i / width, whole);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if (k >= channels) break;
            if (bytes == 1) target[(long long)i * pixel_bytes + k] = whole[k];
            else ((unsigned short *)(target + (long long)i * pixel_bytes))[k] = whole[k];
        }
    }
}
