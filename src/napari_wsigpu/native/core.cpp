// Read tiles and decode only the parts that regions need, without holding the GIL.

#include "core.h"

#if defined(_WIN32)
// Must precede jpeglib.h, which then omits the types that both define.
#define NOMINMAX
#define WIN32_LEAN_AND_MEAN
#include <windows.h>

#include <io.h>
#else
#include <cerrno>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include <jpeglib.h>
// Requires jpeglib.h.
#include <jerror.h>

#include "jpeg_markers.h"
#include "pool.h"

namespace {

// libjpeg-turbo treats the edges of a crop as edges of the image. Only pixels at least MARGIN
// inside the crop have the same upsampled chroma as in the whole tile, and crops narrower than
// NARROWEST are not smoothed at all.
constexpr int MARGIN = 2, NARROWEST = 32;
// Encoded bytes times decoded samples. JPEGs of this size or more are left to Python, which checks
// the number of their scans; see `UNCHECKED_SIZE` in `codecs/jpeg_tiles.py`.
constexpr int64_t UNCHECKED_SIZE = int64_t(1) << 36;

// Read up to `size` bytes into `target`; return the number of bytes read.
int64_t read_at(int file, uint8_t* target, int64_t size, int64_t offset) {
    int64_t done = 0;
    while (done < size) {
#if defined(_WIN32)
        OVERLAPPED at = {};
        at.Offset = DWORD(offset + done);
        at.OffsetHigh = DWORD((offset + done) >> 32);
        DWORD got = 0, wanted = DWORD(std::min<int64_t>(size - done, 1 << 30));
        HANDLE handle = reinterpret_cast<HANDLE>(_get_osfhandle(file));
        if (!ReadFile(handle, target + done, wanted, &got, &at) || !got) break;
#else
        ssize_t got = pread(file, target + done, size_t(size - done), offset + done);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) break;
#endif
        done += got;
    }
    return done;
}

// Buffer that grows to the largest requested size and loses its contents when it grows.
// It is deliberately not aligned to 32 bytes: libjpeg-turbo writes to aligned memory with
// non-temporal stores, which bypass the CPU caches, but the pixels are read back immediately.
// Aligned memory makes decoding take 1.5 times as long.
class Memory {
  public:
    ~Memory() { std::free(data_); }

    uint8_t* reserve(int64_t size) {
        if (size_ < size) {
            release();
            data_ = static_cast<uint8_t*>(std::malloc(size_t(size) + LINE));
            if (!data_) throw std::bad_alloc();
            size_ = size;
        }
        return data_ + (uintptr_t(8) - reinterpret_cast<uintptr_t>(data_)) % LINE;
    }

    void trim() { if (size_ > KEPT) release(); }

  private:
    enum { KEPT = 1 << 20, LINE = 64 };

    void release() {
        std::free(data_);
        data_ = nullptr;
        size_ = 0;
    }

    uint8_t* data_ = nullptr;
    int64_t size_ = 0;
};

// Buffers that a thread reuses for its next tile.
struct Scratch { Memory encoded, pixels, row; };

thread_local Scratch scratch_of_thread;

struct Box { int left, top, right, bottom; };

struct Call {
    int file;
    const uint8_t* memory;
    const Format& format;
    Tile* tiles;
    const Part* parts;
    char* messages;
    const int32_t* cancel;
};

int fail(char* message, int status, const char* text) {
    std::snprintf(message, MESSAGE_SIZE, "%s", text);
    return status;
}

// Offsets and lengths come from the file and may have any value. libjpeg counts bytes in `unsigned
// long`, which has 32 bits on Windows.
bool is_readable(const Tile& tile) {
    return tile.offset >= 0 && tile.length >= 0 && tile.length <= INT32_MAX;
}

// Return whether pixels of `from` bytes can be pasted as pixels of `to` bytes.
bool can_paste(int from, int to) { return from == to || (from == 3 && to == 4); }

// Return the smallest rectangle that contains all parts of a tile.
Box bounds(const Tile& tile, const Part* parts) {
    if (!tile.count) return Box{0, 0, 0, 0};
    Box box{INT32_MAX, INT32_MAX, 0, 0};
    for (const Part* part = parts; part < parts + tile.count; ++part) {
        box.left = std::min(box.left, part->left);
        box.top = std::min(box.top, part->top);
        box.right = std::max(box.right, part->left + part->width);
        box.bottom = std::max(box.bottom, part->top + part->height);
    }
    return box;
}

bool is_inside(const Box& box, int height, int width) {
    return box.left >= 0 && box.top >= 0 && box.right <= width && box.bottom <= height;
}

void copy_pixels(uint8_t* target, const uint8_t* source, int count, int from, int to) {
    if (from == to) {
        std::memcpy(target, source, size_t(count) * size_t(from));
        return;
    }
    for (int i = 0; i < count; ++i, source += 3, target += 4) {
        std::memcpy(target, source, 3);
        target[3] = 255;
    }
}

// Copy parts from decoded rows whose first pixel is (left, top) of the tile.
void paste(const Tile& tile, const Part* parts, const uint8_t* pixels, int64_t pitch, int left,
           int top, int from, int to) {
    for (const Part* part = parts; part < parts + tile.count; ++part) {
        const uint8_t* source =
            pixels + (part->top - top) * pitch + int64_t(part->left - left) * from;
        for (int y = 0; y < part->height; ++y)
            copy_pixels(part->target + y * part->pitch, source + y * pitch, part->width, from, to);
    }
}

struct JpegError {
    jpeg_error_mgr base;
    std::jmp_buf jump;
    int32_t warnings;  // bits of `Warning`
    bool finishing;    // all pixels are decoded; the rest of the data is only checked
};

[[noreturn]] void on_error(j_common_ptr info) {
    std::longjmp(reinterpret_cast<JpegError*>(info->err)->jump, 1);
}

int32_t warning_of(int code) {
    if (code == JWRN_HUFF_BAD_CODE) return BAD_CODE;
    if (code == JWRN_EXTRANEOUS_DATA) return EXTRANEOUS;
    return code == JWRN_MUST_RESYNC ? RESYNC : OTHER;
}

void on_message(j_common_ptr) {}  // libjpeg counts warnings; don't print them

// When the data ends early, libjpeg fills the rest with gray and only warns; make this an error.
void on_trace(j_common_ptr info, int level) {
    if (level >= 0) return;
    ++info->err->num_warnings;
    reinterpret_cast<JpegError*>(info->err)->warnings |= warning_of(info->err->msg_code);
    if (info->err->msg_code == JWRN_HIT_MARKER) info->err->error_exit(info);
}

// Decode the rectangle `box` of the image into rows of `pitch` bytes. libjpeg crops at iMCU
// boundaries; if its crop is wider than the box, each row goes through scratch memory.
void decode_box(jpeg_decompress_struct& info, Scratch& scratch, const Box& box, uint8_t* target,
                int64_t pitch) {
    const int width = int(info.output_width);
    int left = std::max(0, box.left - MARGIN), right = std::min(width, box.right + MARGIN);
    right = std::min(width, std::max(right, left + NARROWEST));
    left = std::max(0, std::min(left, right - NARROWEST));
    JDIMENSION x = JDIMENSION(left), wide = JDIMENSION(right - left);
    // jpeg_crop_scanline moves the left edge to an iMCU boundary and returns it in `x`.
    if (left > 0 || right < width) jpeg_crop_scanline(&info, &x, &wide);
    if (box.top > 0) jpeg_skip_scanlines(&info, JDIMENSION(box.top));
    const int pixel = info.output_components;
    const bool direct = int(x) == box.left && int(info.output_width) == box.right - box.left;
    const int64_t row_bytes = int64_t(info.output_width) * pixel;
    const int at_once = direct ? std::max(1, std::min(4, info.rec_outbuf_height)) : 1;
    uint8_t* row = direct ? nullptr : scratch.row.reserve(row_bytes);
    JSAMPROW rows[4];
    for (int y = box.top; y < box.bottom;) {
        const int some = std::min(at_once, box.bottom - y);
        for (int i = 0; i < some; ++i)
            rows[i] = direct ? target + int64_t(y - box.top + i) * pitch : row;
        const int got = int(jpeg_read_scanlines(&info, rows, JDIMENSION(some)));
        if (!direct)
            std::memcpy(target + (y - box.top) * pitch, row + int64_t(box.left - int(x)) * pixel,
                        size_t(box.right - box.left) * size_t(pixel));
        y += got;
    }
}

// Choose the output color space; return false if Python has to decode the tile.
bool choose_color(jpeg_decompress_struct& info, const Format& format) {
    if (info.num_components != format.samples) return false;
    if (!can_paste(format.samples, format.pixel_bytes)) return false;
    if (format.color == STORED) info.jpeg_color_space = JCS_RGB;
    if (format.samples == 1) {
        info.out_color_space = JCS_GRAYSCALE;
        return info.jpeg_color_space == JCS_GRAYSCALE;
    }
    const bool known = info.jpeg_color_space == JCS_RGB || info.jpeg_color_space == JCS_YCbCr;
    info.out_color_space = format.pixel_bytes == 4 ? JCS_EXT_RGBA : JCS_RGB;
    return known && format.samples == 3;
}

bool is_expected_size(const Format& format, const Tile& tile, int height, int width) {
    return (width == format.width && (height == format.height || height == tile.height)) ||
           (width == tile.width && height == tile.height);
}

int decode_jpeg(Scratch& scratch, const Format& format, Tile& tile, const uint8_t* data,
                const Part* parts, char* message) {
    JpegMarkers markers;
    const int64_t size = markers.end(format.tables, format.tables_size, data, tile.length);
    if (size < 0) return fail(message, DAMAGED, markers.damage);
    jpeg_decompress_struct info = {};
    JpegError error = {};
    info.err = jpeg_std_error(&error.base);
    error.base.error_exit = on_error;
    error.base.output_message = on_message;
    error.base.emit_message = on_trace;
    // No object with a destructor may be created below: longjmp would skip its destructor.
    if (setjmp(error.jump)) {
        char text[JMSG_LENGTH_MAX];
        error.base.format_message(reinterpret_cast<j_common_ptr>(&info), text);
        const bool ran_out = error.base.msg_code == JWRN_HIT_MARKER;
        jpeg_destroy_decompress(&info);
        if (error.finishing) {
            tile.warnings = error.warnings | OTHER;
            return DONE;
        }
        return fail(message, DAMAGED, ran_out ? "its JPEG data ends within a row" : text);
    }
    jpeg_create_decompress(&info);
    if (format.tables_size) {
        jpeg_mem_src(&info, format.tables, static_cast<unsigned long>(format.tables_size));
        jpeg_read_header(&info, FALSE);
    }
    jpeg_mem_src(&info, data, static_cast<unsigned long>(size));
    jpeg_read_header(&info, TRUE);
    const int height = int(info.image_height), width = int(info.image_width);
    const int64_t samples = int64_t(height) * width * format.samples;
    const bool good = is_expected_size(format, tile, height, width) && choose_color(info, format) &&
                (!tile.length || samples < UNCHECKED_SIZE / tile.length);
    Box box = bounds(tile, parts);
    if (!good || !is_inside(box, height, width)) {
        jpeg_destroy_decompress(&info);
        return fail(message, LEFT_TO_PYTHON, "");
    }
    if (tile.keep) info.out_color_space = format.samples == 1 ? JCS_GRAYSCALE : JCS_RGB;
    // libjpeg decodes all coefficients of a multi-scan JPEG anyway, so decode the whole image.
    const bool whole = tile.keep || jpeg_has_multiple_scans(&info);
    if (whole) box = Box{0, 0, width, height};
    try {
        jpeg_start_decompress(&info);
        const int pixel = info.output_components;
        if (!whole && tile.count == 1) {
            decode_box(info, scratch, box, parts->target, parts->pitch);
        } else {
            const int64_t pitch = int64_t(box.right - box.left) * pixel;
            uint8_t* pixels =
                tile.keep ? tile.keep : scratch.pixels.reserve(pitch * (box.bottom - box.top));
            decode_box(info, scratch, box, pixels, pitch);
            paste(tile, parts, pixels, pitch, box.left, box.top, pixel, format.pixel_bytes);
        }
    } catch (const std::bad_alloc&) {
        jpeg_destroy_decompress(&info);
        return fail(message, LEFT_TO_PYTHON, "");
    }
    tile.height = height;
    tile.width = width;
    // Read a whole tile up to its EOI, so that libjpeg warns about bytes after the last block.
    error.finishing = true;
    if (tile.keep) jpeg_finish_decompress(&info);
    tile.warnings = error.warnings;
    jpeg_destroy_decompress(&info);
    return DONE;
}

// Copy bytes from a file, or from `memory` if it is not null; return false if bytes are missing.
bool fetch(int file, const uint8_t* memory, uint8_t* target, int64_t size, int64_t offset) {
    if (!memory) return read_at(file, target, size, offset) == size;
    std::memcpy(target, memory + offset, size_t(size));
    return true;
}

// Copy parts of an uncompressed tile. Only the rows that they touch are read, unless the whole tile
// is kept.
int copy_raw(const Call& call, Scratch& scratch, Tile& tile, const Part* parts, char* message) {
    const Format& format = call.format;
    const int pixel = format.samples * format.sample_bytes;
    int height = format.height, width = format.width;
    if (tile.length < int64_t(height) * width * pixel) {
        if (tile.length != int64_t(tile.height) * tile.width * pixel)
            return fail(message, LEFT_TO_PYTHON, "");
        height = tile.height;
        width = tile.width;
    }
    const Box box = bounds(tile, parts);
    if (!is_inside(box, height, width) || !can_paste(pixel, format.pixel_bytes))
        return fail(message, LEFT_TO_PYTHON, "");
    const int64_t pitch = int64_t(width) * pixel;
    const int top = tile.keep ? 0 : box.top, bottom = tile.keep ? height : box.bottom;
    const int64_t start = tile.offset + top * pitch, size = (bottom - top) * pitch;
    // Whole rows of a single part are laid out in the region as in the file.
    const bool placed = tile.count == 1 && !tile.keep && !call.memory && parts->width == width &&
                        parts->pitch == pitch && pixel == format.pixel_bytes;
    const uint8_t* rows = call.memory ? call.memory + start : nullptr;
    if (!call.memory || tile.keep) {
        uint8_t* target = placed      ? parts->target
                          : tile.keep ? tile.keep
                                      : scratch.pixels.reserve(size);
        if (!fetch(call.file, call.memory, target, size, start)) return fail(message, UNREAD, "");
        rows = target;
    }
    if (!placed) paste(tile, parts, rows, pitch, 0, top, pixel, format.pixel_bytes);
    tile.height = height;
    tile.width = width;
    return DONE;
}

int read_tile(const Call& call, Scratch& scratch, Tile& tile, char* message) {
    const Part* parts = call.parts + tile.first;
    const Format& format = call.format;
    if (!is_readable(tile)) return fail(message, LEFT_TO_PYTHON, "");
    if (tile.status == HELD) {
        const int pixel = format.samples * format.sample_bytes, to = format.pixel_bytes;
        if (!is_inside(bounds(tile, parts), tile.height, tile.width) || !can_paste(pixel, to))
            return fail(message, LEFT_TO_PYTHON, "");
        paste(tile, parts, tile.keep, int64_t(tile.width) * pixel, 0, 0, pixel, to);
        return DONE;
    }
    if (format.codec == RAW) return copy_raw(call, scratch, tile, parts, message);
    const uint8_t* data = call.memory ? call.memory + tile.offset : nullptr;
    if (!call.memory) {
        uint8_t* encoded = scratch.encoded.reserve(tile.length);
        if (read_at(call.file, encoded, tile.length, tile.offset) < tile.length)
            return fail(message, UNREAD, "");
        data = encoded;
    }
    return decode_jpeg(scratch, format, tile, data, parts, message);
}

// Neighboring tiles that are adjacent in the file are read with one system call.
constexpr int LONGEST_RUN = 8;

bool is_readable(const Scan& scan, int64_t header_size) {
    return scan.offset >= 0 && scan.length > header_size + 2 && header_size <= LONGEST_HEADER;
}

// Return the end of the run of scans that starts at index `first`.
int64_t end_of_run(const Scan* scans, int64_t first, int64_t count) {
    const int64_t most = std::min(count, first + LONGEST_RUN);
    int64_t end = first + 1;
    while (end < most && scans[end].offset == scans[end - 1].offset + scans[end - 1].length) ++end;
    return end;
}

// Read a run: the header of each scan into `begins`, and the rest to its place in `target`.
bool read_run(int file, const Scan* run, int64_t count, uint8_t (*begins)[LONGEST_HEADER],
              int64_t header_size, uint8_t* target) {
#if defined(__linux__)
    iovec parts[2 * LONGEST_RUN];
    int64_t total = 0;
    for (int64_t i = 0; i < count; ++i) {
        if (!is_readable(run[i], header_size)) return false;
        parts[2 * i] = {begins[i], size_t(header_size)};
        parts[2 * i + 1] = {target + run[i].place, size_t(run[i].length - header_size)};
        total += run[i].length;
    }
    return preadv(file, parts, int(2 * count), run->offset) == total;
#else
    return false;
#endif
}

// Read a JPEG, unless `read_run` has, and check its header. Its target has no header, and another
// marker than EOI (ITU-T T.81, B.1.1.3). Without a header, it is a restart interval, which may end
// with a restart marker.
int read_scan(int file, const uint8_t* memory, const Scan& scan, bool read, uint8_t* begin,
              const uint8_t* header, int64_t header_size, uint8_t* target) {
    if (!is_readable(scan, header_size)) return LEFT_TO_PYTHON;
    const int64_t size = scan.length - header_size;
    if (!read && (!fetch(file, memory, begin, header_size, scan.offset) ||
                  !fetch(file, memory, target, size, scan.offset + header_size)))
        return UNREAD;
    if (std::memcmp(begin, header, size_t(header_size))) return LEFT_TO_PYTHON;
    const int code = target[size - 1];
    const bool ends = code == 0xD9 || (!header_size && code >= 0xD0 && code <= 0xD7);
    if (target[size - 2] != 0xFF || !ends) return LEFT_TO_PYTHON;
    target[size - 1] = uint8_t(scan.marker);
    return DONE;
}

// Return whether a file still has the status of `version`.
bool is_unchanged(int file, const Version* version) {
#if defined(_WIN32)
    (void)file;
    return !version;
#else
    if (!version) return true;
    struct stat status;
    if (fstat(file, &status)) return false;
#if defined(__APPLE__)
    const timespec &modified = status.st_mtimespec, &changed = status.st_ctimespec;
#else
    const timespec &modified = status.st_mtim, &changed = status.st_ctim;
#endif
    const auto ns = [](const timespec& time) {
        return int64_t(time.tv_sec) * 1000000000 + time.tv_nsec;
    };
    return status.st_size == version->size && ns(modified) == version->modified_ns &&
           (version->changed_ns < 0 || ns(changed) == version->changed_ns) &&
           (version->inode < 0 || int64_t(status.st_ino) == version->inode);
#endif
}

// Python sets the flag while a call runs; an atomic integer has the layout of a plain one.
bool is_cancelled(const int32_t* cancel) {
    static_assert(sizeof(std::atomic<int32_t>) == sizeof(int32_t), "");
    return cancel &&
           reinterpret_cast<const std::atomic<int32_t>*>(cancel)->load(std::memory_order_relaxed);
}

// Read one tile, and set its status; return whether it is done.
bool process(const Call& call, int64_t index) {
    Tile& tile = call.tiles[index];
    char* message = call.messages + index * MESSAGE_SIZE;
    int status = CANCELLED;
    if (!is_cancelled(call.cancel)) {
        try {
            status = read_tile(call, scratch_of_thread, tile, message);
        } catch (const std::bad_alloc&) {
            status = fail(message, LEFT_TO_PYTHON, "");
        }
    }
    tile.status = status;
    return status == DONE;
}

// Call `work` for each item in up to `threads` threads; return for how many items it is false. The
// threads share only the counters; each item belongs to the thread that took its index.
template <typename Work> int64_t failures(int64_t count, int64_t threads, const Work& work) {
    std::atomic<int64_t> next{0}, failed{0};
    auto run = [&] {
        for (int64_t item; (item = next.fetch_add(1)) < count;)
            if (!work(item)) failed.fetch_add(1);
        scratch_of_thread.encoded.trim();
        scratch_of_thread.pixels.trim();
    };
    Pool::shared().run(run, std::min(threads, count));
    return failed;
}

// Estimate how long it takes to decode a part of a tile. All rows above its end are Huffman-decoded,
// which takes about as long as transforming the part itself.
int64_t effort(const Tile& tile, const Part& part, int64_t tile_width) {
    if (tile.status == HELD) return 0;
    if (tile.keep) return INT64_MAX;
    return (part.top + part.height) * tile_width + int64_t(part.height) * part.width;
}

// Clamp a sum to 0 and 1 as the integer of its bits, which has the same order from 0 on: compilers
// turn a comparison of floats into a branch, whose outcome is random.
float within_1(float sum) {
    int32_t bits;
    std::memcpy(&bits, &sum, sizeof(bits));
    bits = std::min(std::max(bits, 0), 0x3f800000);
    std::memcpy(&sum, &bits, sizeof(sum));
    return sum;
}

// Pixels composed at a time, few enough for their sums to stay in the L1 cache.
constexpr int SPAN = 512;
// Adjacent rows that a thread composes, enough for the processor to prefetch the channels.
constexpr int64_t ROWS = 16;

// Add the colors of one channel's samples to the sums of pixels, four floats each.
template <typename Sample>
void add_colors(const Plane& plane, const uint8_t* from, int64_t size, float* sums) {
    for (int64_t x = 0; x < size; ++x, from += plane.pixel_pitch, sums += 4) {
        Sample sample;
        std::memcpy(&sample, from, sizeof(sample));
        const int entry = std::min(std::max(int(sample) - plane.low, 0), plane.last);
        // Load all four before storing any, so that the compiler adds them with one instruction.
        float color[4];
        std::memcpy(color, plane.table + 4 * entry, sizeof(color));
        for (int channel = 0; channel < 4; ++channel) color[channel] += sums[channel];
        std::memcpy(sums, color, sizeof(color));
    }
}

// Halve a picture. A caller that passes the number of samples as a constant doubles the speed.
template <typename Sample> void halve(const Picture& picture, int64_t samples) {
    const int64_t pitch = picture.pitch / int64_t(sizeof(Sample));
    for (int64_t y = 0; y < picture.rows; ++y) {
        const auto* from = reinterpret_cast<const Sample*>(picture.pixels) + 2 * y * pitch;
        auto* to = reinterpret_cast<Sample*>(picture.target + y * picture.target_pitch);
        for (int64_t x = 0; x < picture.columns; ++x, from += 2 * samples, to += samples)
            for (int64_t i = 0; i < samples; ++i) {
                const Sample *upper = from + i, *lower = upper + pitch;
                to[i] = Sample((upper[0] + upper[samples] + lower[0] + lower[samples] + 2) / 4);
            }
    }
}

}  // namespace

int64_t wsigpu_read_tiles(int32_t file, const uint8_t* memory, const Format* format, Tile* tiles,
                          int64_t count, const Part* parts, char* messages, const int32_t* cancel,
                          int32_t threads) {
    const Call call{file, memory, *format, tiles, parts, messages, cancel};
    return failures(count, threads, [&](int64_t index) { return process(call, index); });
}

int64_t wsigpu_read_region(int32_t file, const Version* version, const Format* format,
                           const Level* level, int64_t left, int64_t top, int64_t width,
                           int64_t height, uint8_t* target, int64_t pitch, Tile* tiles,
                           int32_t threads) {
    if (!is_unchanged(file, version)) return CHANGED;
    const int64_t high = format->height, wide = format->width;
    if (left < 0 || top < 0 || width < 1 || height < 1 || left > level->width - width ||
        top > level->height - height)
        return NEEDS_PLAN;
    const int64_t right = left + width, bottom = top + height;
    const int64_t last_row = (bottom - 1) / high, last_column = (right - 1) / wide;
    const int64_t across = last_column - left / wide + 1;
    if (last_row >= level->rows || last_column >= level->columns ||
        (last_row - top / high + 1) > MOST_TILES / across)
        return NEEDS_PLAN;
    Tile own[MOST_TILES];
    Part parts[MOST_TILES];
    char messages[MOST_TILES * MESSAGE_SIZE];
    int32_t count = 0;
    for (int64_t row = top / high; row <= last_row; ++row) {
        const int64_t first_y = std::max(top, row * high);
        const int64_t past_y = std::min(bottom, (row + 1) * high);
        for (int64_t column = left / wide; column <= last_column; ++column, ++count) {
            const int64_t first_x = std::max(left, column * wide);
            const int64_t past_x = std::min(right, (column + 1) * wide);
            const int64_t index = row * level->columns + column;
            parts[count] = {target + (first_y - top) * pitch +
                                (first_x - left) * format->pixel_bytes,
                            pitch,
                            int32_t(first_x - column * wide), int32_t(first_y - row * high),
                            int32_t(past_x - first_x), int32_t(past_y - first_y)};
            Tile& tile = own[count] = tiles ? tiles[count] : Tile{};
            tile.first = count;
            tile.count = 1;
            if (tile.status == HELD) continue;
            tile.offset = level->offsets[index];
            tile.length = level->lengths[index];
            if (!tile.length) return NEEDS_PLAN;
            tile.height = int32_t(std::min(high, level->height - row * high));
            tile.width = int32_t(std::min(wide, level->width - column * wide));
        }
    }
    if (threads > 1) {
        // Start with the longest work, so that all threads finish at about the same time.
        std::sort(own, own + count, [&](const Tile& one, const Tile& other) {
            return effort(one, parts[one.first], wide) > effort(other, parts[other.first], wide);
        });
    }
    if (wsigpu_read_tiles(file, nullptr, format, own, count, parts, messages, nullptr, threads))
        return NEEDS_PLAN;
    int64_t bytes = 0;
    for (const Tile* tile = own; tile < own + count; ++tile) {
        bytes += tile->length;
        if (tiles) tiles[tile->first] = *tile;
    }
    return is_unchanged(file, version) ? bytes : int64_t(CHANGED);
}

int64_t wsigpu_read_ranges(int32_t file, const Range* ranges, int64_t count, uint8_t* target,
                           int32_t threads) {
    return failures(count, threads, [&](int64_t index) {
        const Range& range = ranges[index];
        return read_at(file, target + range.place, range.size, range.offset) == range.size;
    });
}

int64_t wsigpu_read_scans(int32_t file, const uint8_t* memory, Scan* scans, int64_t count,
                          const uint8_t* header, int64_t header_size, uint8_t* target,
                          int32_t threads) {
    std::atomic<int64_t> next{0}, failed{0};
    auto work = [&] {
        uint8_t begins[LONGEST_RUN][LONGEST_HEADER];
        for (int64_t first = next; first < count;) {
            const int64_t end = end_of_run(scans, first, count);
            if (!next.compare_exchange_weak(first, end)) continue;
            const bool read = !memory && read_run(file, scans + first, end - first, begins,
                                                  header_size, target);
            for (int64_t index = first; index < end; ++index) {
                Scan& scan = scans[index];
                scan.status = read_scan(file, memory, scan, read, begins[index - first], header,
                                        header_size, target + scan.place);
                if (scan.status != DONE) failed.fetch_add(1);
            }
            first = next;
        }
    };
    Pool::shared().run(work, std::min<int64_t>(threads, count));
    return failed;
}

void wsigpu_compose(const Plane* planes, int64_t count, int64_t height, int64_t width,
                    const uint8_t* shades, float* sums, uint8_t* target, int32_t threads) {
    auto compose_row = [&](int64_t row) {
        float own[4 * SPAN];
        for (int64_t left = 0; left < width; left += SPAN) {
            const int64_t size = std::min<int64_t>(SPAN, width - left);
            float* line = sums ? sums + 4 * (row * width + left) : own;
            if (!sums) std::fill(line, line + 4 * size, 0.0f);
            for (const Plane* at = planes; at != planes + count; ++at) {
                const uint8_t* from = at->pixels + row * at->row_pitch + left * at->pixel_pitch;
                if (at->sample_bytes == 1) add_colors<uint8_t>(*at, from, size, line);
                else add_colors<uint16_t>(*at, from, size, line);
            }
            uint8_t* to = target + 3 * (row * width + left);
            for (int64_t x = 0; x < size; ++x)
                for (int channel = 0; channel < 3; ++channel)
                    *to++ = shades[int(within_1(line[4 * x + channel]) * SHADES + 0.5f)];
        }
    };
    failures((height + ROWS - 1) / ROWS, threads, [&](int64_t group) {
        const int64_t end = std::min((group + 1) * ROWS, height);
        for (int64_t row = group * ROWS; row < end; ++row) compose_row(row);
        return true;
    });
}

void wsigpu_halve(const Picture* pictures, int64_t count, int32_t threads) {
    failures(count, threads, [&](int64_t index) {
        const Picture& picture = pictures[index];
        if (picture.sample_bytes == 1 && picture.samples == 3) halve<uint8_t>(picture, 3);
        else if (picture.sample_bytes == 1) halve<uint8_t>(picture, picture.samples);
        else if (picture.samples == 1) halve<uint16_t>(picture, 1);
        else halve<uint16_t>(picture, picture.samples);
        return true;
    });
}

void wsigpu_layout(int32_t sizes[9], int32_t* jpeg_version) {
    // Create the pool when the library is loaded, not in the first read: a fork by another thread
    // while the static is being initialized would leave its guard locked in the child.
    Pool::shared();
    const size_t all[] = {sizeof(Format),  sizeof(Tile), sizeof(Part),  sizeof(Range), sizeof(Level),
                          sizeof(Version), sizeof(Scan), sizeof(Plane), sizeof(Picture)};
    std::copy(all, all + 9, sizes);
    *jpeg_version = LIBJPEG_TURBO_VERSION_NUMBER;
}
