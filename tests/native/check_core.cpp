// Runs the core under sanitizers (`make native-check`). libjpeg itself encodes the tiles, and
// decodes them whole to compare with. Everything is deterministic but the order of threads.

#include "core.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <dirent.h>
#include <jpeglib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

namespace {

using Bytes = std::vector<uint8_t>;
std::mt19937 dice(20240607);

int roll(int low, int high) { return low + int(dice() % unsigned(high - low + 1)); }

#define EXPECT(condition)                                                             \
    do {                                                                              \
        if (!(condition)) {                                                           \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);      \
            std::_Exit(1);                                                            \
        }                                                                             \
    } while (0)

struct Kind {
    const char* name;
    int across, down;  // chroma subsampling
    Color color;
    bool progressive, apart;  // apart: tables are not in the tiles
    int restart;
};

const Kind KINDS[] = {
    {"444", 1, 1, YCBCR, false, false, 0},
    {"422", 2, 1, YCBCR, false, false, 0},
    {"420", 2, 2, YCBCR, false, false, 0},
    {"440", 1, 2, YCBCR, false, false, 0},
    {"411", 4, 1, YCBCR, false, false, 0},
    {"gray", 1, 1, GRAY, false, false, 0},
    {"stored", 1, 1, STORED, false, false, 0},
    {"stored 422", 2, 1, STORED, false, false, 0},
    {"auto", 2, 2, AUTO, false, false, 0},
    {"restarts", 2, 2, YCBCR, false, false, 1},
    {"tables", 2, 2, YCBCR, false, true, 0},
    {"progressive", 2, 2, YCBCR, true, false, 0},
    {"progressive 422", 2, 1, STORED, true, false, 3},
};

int samples_of(const Kind& kind) { return kind.color == GRAY ? 1 : 3; }

Bytes picture(int height, int width, int samples) {
    Bytes pixels(size_t(height) * size_t(width) * size_t(samples));
    size_t at = 0;
    for (int y = 0; y < height; ++y)
        for (int x = 0; x < width; ++x)
            for (int c = 0; c < samples; ++c)
                pixels[at++] = uint8_t(128 + 60 * ((x / 5 + y / 7 + c) % 3 - 1) + roll(-30, 30));
    return pixels;
}

// libjpeg's memory destination calls malloc, so a tile is copied to a vector of its exact size.
Bytes take(unsigned char* data, unsigned long size) {
    Bytes bytes(data, data + size);
    std::free(data);
    return bytes;
}

Bytes encode(const Kind& kind, int height, int width, Bytes* tables) {
    const int samples = samples_of(kind);
    Bytes pixels = picture(height, width, samples);
    jpeg_compress_struct info;
    jpeg_error_mgr error;
    info.err = jpeg_std_error(&error);
    jpeg_create_compress(&info);
    info.image_height = JDIMENSION(height);
    info.image_width = JDIMENSION(width);
    info.input_components = samples;
    // "Stored" tiles hold RGB, but nothing in them says so.
    info.in_color_space =
        samples == 1 ? JCS_GRAYSCALE : kind.color == STORED ? JCS_YCbCr : JCS_RGB;
    jpeg_set_defaults(&info);
    jpeg_set_quality(&info, roll(30, 95), TRUE);
    if (kind.color == STORED) info.write_JFIF_header = FALSE;
    info.comp_info[0].h_samp_factor = kind.across;
    info.comp_info[0].v_samp_factor = kind.down;
    info.restart_in_rows = kind.restart;
    if (kind.progressive) jpeg_simple_progression(&info);
    unsigned char* data = nullptr;
    unsigned long size = 0;
    if (kind.apart) {
        jpeg_mem_dest(&info, &data, &size);
        jpeg_write_tables(&info);
        *tables = take(data, size);
        data = nullptr;
        size = 0;
    }
    jpeg_mem_dest(&info, &data, &size);
    jpeg_start_compress(&info, kind.apart ? FALSE : TRUE);
    while (info.next_scanline < info.image_height) {
        JSAMPROW row = &pixels[size_t(info.next_scanline) * size_t(width) * size_t(samples)];
        jpeg_write_scanlines(&info, &row, 1);
    }
    jpeg_finish_compress(&info);
    jpeg_destroy_compress(&info);
    return take(data, size);
}

Bytes decode_whole(const Kind& kind, const Bytes& data, const Bytes& tables) {
    jpeg_decompress_struct info;
    jpeg_error_mgr error;
    info.err = jpeg_std_error(&error);
    jpeg_create_decompress(&info);
    if (!tables.empty()) {
        jpeg_mem_src(&info, tables.data(), tables.size());
        jpeg_read_header(&info, FALSE);
    }
    jpeg_mem_src(&info, data.data(), data.size());
    jpeg_read_header(&info, TRUE);
    if (kind.color == STORED) info.jpeg_color_space = JCS_RGB;
    info.out_color_space = samples_of(kind) == 1 ? JCS_GRAYSCALE : JCS_RGB;
    jpeg_start_decompress(&info);
    const size_t pitch = size_t(info.output_width) * size_t(info.output_components);
    Bytes pixels(pitch * info.output_height);
    while (info.output_scanline < info.output_height) {
        JSAMPROW row = &pixels[info.output_scanline * pitch];
        jpeg_read_scanlines(&info, &row, 1);
    }
    jpeg_destroy_decompress(&info);
    return pixels;
}

// Tiles with their parts, each of which has memory of exactly its size, or with a wider pitch.
struct Work {
    Format format = {};
    Bytes memory, tables;
    std::vector<Tile> tiles;
    std::vector<Part> parts;
    std::vector<std::unique_ptr<uint8_t[]>> buffers;
    std::vector<Bytes> wholes;  // in `samples` a pixel
    std::vector<char> messages;
    int file = -1;

    Work(Codec codec, Color color, int height, int width, int samples, bool rgba) {
        format.codec = codec;
        format.color = color;
        format.height = height;
        format.width = width;
        format.samples = samples;
        format.sample_bytes = 1;
        format.pixel_bytes = rgba ? 4 : samples;
    }

    uint8_t* buffer(size_t size) {
        buffers.emplace_back(new uint8_t[size]);
        std::memset(buffers.back().get(), 0x5A, size);
        return buffers.back().get();
    }

    void add(const Bytes& data, int height, int width, const Bytes& whole, bool keep) {
        Tile tile = {};
        tile.offset = int64_t(memory.size());
        tile.length = int64_t(data.size());
        tile.height = height;
        tile.width = width;
        tile.first = int32_t(parts.size());
        tile.status = -1;
        if (keep) tile.keep = buffer(size_t(format.height * format.width * format.samples));
        memory.insert(memory.end(), data.begin(), data.end());
        tiles.push_back(tile);
        wholes.push_back(whole);
    }

    void add_part(int left, int top, int width, int height) {
        Part part;
        part.left = left;
        part.top = top;
        part.width = width;
        part.height = height;
        const int row = width * format.pixel_bytes;
        part.pitch = row + roll(0, 1) * roll(0, 9);
        part.target = buffer(size_t(part.pitch * (height - 1) + row));
        parts.push_back(part);
        ++tiles.back().count;
    }

    void add_random_parts(int height, int width) {
        for (int left = roll(0, 3); left >= 0; --left) {
            const int x = roll(0, width - 1), y = roll(0, height - 1);
            add_part(x, y, roll(1, width - x), roll(1, height - y));
        }
    }

    void to_file() {
        file = fileno(std::tmpfile());
        EXPECT(write(file, memory.data(), memory.size()) == ssize_t(memory.size()));
    }

    int64_t run(int threads, const int32_t* cancel = nullptr) {
        messages.assign(tiles.size() * MESSAGE_SIZE, 0);
        format.tables = tables.empty() ? nullptr : tables.data();
        format.tables_size = int64_t(tables.size());
        const uint8_t* data = file < 0 ? memory.data() : nullptr;
        const int64_t failed =
            wsigpu_read_tiles(file, data, &format, tiles.data(), int64_t(tiles.size()),
                              parts.data(), messages.data(), cancel, threads);
        int64_t counted = 0;
        for (const Tile& tile : tiles) counted += tile.status != DONE;
        EXPECT(failed == counted);
        return failed;
    }

    std::string message(size_t index) const { return &messages[index * MESSAGE_SIZE]; }

    void compare(size_t index) const {
        const Tile& tile = tiles[index];
        const Bytes& whole = wholes[index];
        const int samples = format.samples * format.sample_bytes, bytes = format.pixel_bytes;
        EXPECT(size_t(tile.height * tile.width * samples) == whole.size());
        if (tile.keep) EXPECT(!std::memcmp(tile.keep, whole.data(), whole.size()));
        for (int32_t n = tile.first; n < tile.first + tile.count; ++n) {
            const Part& part = parts[size_t(n)];
            for (int y = 0; y < part.height; ++y) {
                const uint8_t* row = part.target + y * part.pitch;
                for (int x = 0; x < part.width; ++x) {
                    const size_t at = size_t((part.top + y) * tile.width + part.left + x);
                    for (int c = 0; c < bytes; ++c)
                        EXPECT(row[x * bytes + c] ==
                               (c < samples ? whole[at * size_t(samples) + size_t(c)] : 255));
                }
                // Nothing is written between the rows.
                if (y < part.height - 1)
                    for (int64_t x = part.width * bytes; x < part.pitch; ++x)
                        EXPECT(row[x] == 0x5A);
            }
        }
    }

    void compare_all() const {
        for (size_t index = 0; index < tiles.size(); ++index) {
            EXPECT(tiles[index].status == DONE);
            compare(index);
        }
    }
};

bool may_be_rgba(const Kind& kind) { return kind.color != GRAY; }

// A call with tiles of one kind and random parts.
Work jpegs(const Kind& kind, int height, int width, int count, bool rgba = false) {
    Work work(JPEG, kind.color, height, width, samples_of(kind), rgba);
    for (int n = 0; n < count; ++n) {
        Bytes data = encode(kind, height, width, &work.tables);
        work.add(data, height, width, decode_whole(kind, data, work.tables), roll(0, 3) == 0);
        if (kind.apart) EXPECT(n == 0);  // each has tables of its own
        work.add_random_parts(height, width);
    }
    return work;
}

void parts_equal_the_whole() {
    for (const Kind& kind : KINDS) {
        for (int width = 1; width <= 70; ++width)
            for (int more = 0; more < 6; ++more) {
                const bool rgba = may_be_rgba(kind) && roll(0, 1);
                Work work = jpegs(kind, roll(1, 40), width, 1, rgba);
                work.run(1);
                work.compare_all();
            }
        // Every left edge, and every right edge, of a tile with many MCUs.
        for (int x = 0; x < 100; ++x) {
            Work work = jpegs(kind, 48, 100, 1);
            for (int one = 0; one < 2; ++one) {
                work.tiles[0].count = 0;
                work.tiles[0].keep = nullptr;
                work.parts.clear();
                work.tiles[0].first = 0;
                if (one) work.add_part(x, roll(0, 40), roll(1, 100 - x), roll(1, 8));
                else work.add_part(roll(0, x), roll(0, 40), 1, roll(1, 8));
                work.run(1);
                work.compare_all();
            }
        }
    }
}

void edge_tiles_may_be_cut() {
    for (int cut = 0; cut < 4; ++cut) {
        const Kind& kind = KINDS[2];
        const int height = cut & 1 ? 20 : 64, width = cut & 2 ? 33 : 64;
        Work work(JPEG, YCBCR, 64, 64, 3, false);
        Bytes data = encode(kind, height, width, nullptr);
        work.add(data, height, width, decode_whole(kind, data, {}), true);
        work.add_random_parts(height, width);
        work.run(1);
        work.compare_all();
    }
    // Neither a full tile nor the part of it inside the level.
    Work work(JPEG, YCBCR, 64, 64, 3, false);
    work.add(encode(KINDS[2], 64, 63, nullptr), 64, 64, {}, true);
    work.add_part(0, 0, 5, 5);
    EXPECT(work.run(1) == 1 && work.tiles[0].status == LEFT_TO_PYTHON);
}

void raw_tiles() {
    for (int n = 0; n < 300; ++n) {
        const bool rgba = roll(0, 1);
        const int samples = rgba ? 3 : roll(1, 4), height = roll(1, 40), width = roll(1, 40);
        Work work(RAW, AUTO, height, width, samples, rgba);
        work.memory.assign(size_t(roll(0, 9)), 0);
        const bool cut = roll(0, 2) == 0;
        const int inside_height = cut ? roll(1, height) : height;
        const int inside_width = cut ? roll(1, width) : width;
        Bytes pixels = picture(inside_height, inside_width, samples);
        work.add(pixels, inside_height, inside_width, pixels, roll(0, 1));
        work.add_random_parts(inside_height, inside_width);
        if (roll(0, 1)) work.to_file();
        work.run(1);
        work.compare_all();
        if (work.file >= 0) close(work.file);
    }
    // 16 bits
    Work work(RAW, AUTO, 10, 10, 1, false);
    work.format.sample_bytes = work.format.pixel_bytes = 2;
    Bytes pixels = picture(10, 20, 1);
    work.add(pixels, 10, 10, pixels, false);
    work.add_part(3, 2, 5, 4);
    work.run(1);
    work.compare_all();
}

// A tile that is held is pasted from the pixels that were kept of it before.
void kept_tiles() {
    for (int n = 0; n < 100; ++n) {
        const int height = roll(1, 40), width = roll(1, 40);
        Work work(JPEG, YCBCR, 40, 40, 3, roll(0, 1));
        Bytes pixels = picture(height, width, 3);
        work.add({}, height, width, pixels, true);
        std::memcpy(work.tiles[0].keep, pixels.data(), pixels.size());
        work.add_random_parts(height, width);
        work.tiles[0].status = HELD;
        work.run(1);
        work.compare_all();
        work.add_part(width, 0, 1, 1);  // outside
        work.tiles[0].status = HELD;
        EXPECT(work.run(1) == 1 && work.tiles[0].status == LEFT_TO_PYTHON);
    }
}

// Requests and files that make no sense are refused, whatever they say.
void nonsense_is_refused() {
    for (Codec codec : {RAW, JPEG}) {
        const Kind& kind = KINDS[0];
        Bytes data = codec == RAW ? picture(32, 32, 3) : encode(kind, 32, 32, nullptr);
        for (int what = 0; what < 8; ++what) {
            Work work(codec, YCBCR, 32, 32, 3, false);
            work.add(data, 32, 32, {}, false);
            work.add_part(4, 4, 8, 8);
            work.to_file();
            Tile& tile = work.tiles[0];
            int expected = LEFT_TO_PYTHON;
            if (what == 0) tile.length = -5;
            if (what == 1) tile.offset = -1;
            if (what == 2) tile.length = INT64_MAX;
            if (what == 3) work.parts[0].left = 25;
            if (what == 4) work.parts[0].top = -1;
            if (what == 5) work.format.pixel_bytes = 2;
            if (what == 6) tile.offset = int64_t(1) << 40, expected = UNREAD;
            if (what == 7) tile.length = 0, expected = codec == RAW ? LEFT_TO_PYTHON : DAMAGED;
            EXPECT(work.run(1) == 1 && tile.status == expected);
            close(work.file);
        }
    }
    Work work(JPEG, GRAY, 32, 32, 1, true);  // gray as RGBA
    work.add(encode(KINDS[5], 32, 32, nullptr), 32, 32, {}, false);
    work.add_part(4, 4, 8, 8);
    EXPECT(work.run(1) == 1 && work.tiles[0].status == LEFT_TO_PYTHON);
}

void damaged_tiles_are_reported() {
    const Bytes end = {0xFF, 0xD9};
    for (const Kind& kind : KINDS) {
        Bytes tables;
        const Bytes good = encode(kind, 40, 56, &tables);
        for (int n = 0; n < 400; ++n) {
            Bytes data = good;
            if (n % 3 == 0) data.resize(size_t(roll(0, int(data.size()))));
            else if (n % 3 == 1)
                data.insert(data.begin() + roll(0, int(data.size())), size_t(roll(1, 40)), 0xFF);
            for (int flips = roll(0, n % 20); flips > 0 && !data.empty(); --flips)
                data[size_t(roll(0, int(data.size()) - 1))] ^= uint8_t(1 << roll(0, 7));
            // With an end, libjpeg gets to see the rest.
            if (roll(0, 3)) data.insert(data.end(), end.begin(), end.end());
            Work work(JPEG, kind.color, 40, 56, samples_of(kind), may_be_rgba(kind) && n % 2);
            work.tables = tables;
            if (!work.tables.empty() && n % 5 == 0)
                work.tables[size_t(roll(0, int(tables.size()) - 1))] ^= uint8_t(roll(1, 255));
            work.add(data, 40, 56, {}, roll(0, 2) == 0);
            work.add_random_parts(40, 56);
            work.run(1);
            const int status = work.tiles[0].status;
            EXPECT(status == DONE || status == DAMAGED || status == LEFT_TO_PYTHON);
            if (status == DAMAGED) EXPECT(!work.message(0).empty());
        }
    }
    // A short file spoils one tile only.
    Work work = jpegs(KINDS[2], 32, 32, 4);
    work.to_file();
    EXPECT(ftruncate(work.file, work.tiles[3].offset + 9) == 0);
    EXPECT(work.run(2) == 1 && work.tiles[3].status == UNREAD);
    for (size_t index = 0; index < 3; ++index) work.compare(index);
    close(work.file);
}

void a_call_is_cancelled() {
    int32_t cancel = 1;
    Work work = jpegs(KINDS[2], 64, 64, 40);
    EXPECT(work.run(3, &cancel) == 40 && work.tiles[39].status == CANCELLED);
    for (int n = 0; n < 40; ++n) {
        Work other = jpegs(KINDS[2], 64, 64, 40);
        std::atomic<int32_t> flag{0};
        std::thread canceller([&flag, n] {
            usleep(useconds_t(50 * n));
            flag = 1;
        });
        other.run(n % 4 + 1, reinterpret_cast<const int32_t*>(&flag));
        canceller.join();
        for (size_t index = 0; index < other.tiles.size(); ++index)
            if (other.tiles[index].status == DONE) other.compare(index);
            else EXPECT(other.tiles[index].status == CANCELLED);
    }
}

void ranges() {
    Bytes data = picture(100, 100, 1), target(data.size());
    Work file(RAW, AUTO, 1, 1, 1, false);
    file.memory = data;
    file.to_file();
    std::vector<Range> all;
    for (int at = 0, size; at < 10000; at += size) {
        size = std::min(10000 - at, roll(0, 300));
        all.push_back({at, at, size});
    }
    EXPECT(!wsigpu_read_ranges(file.file, all.data(), int64_t(all.size()), target.data(), 4));
    EXPECT(target == data);
    all.back() = {9999, 0, 2};
    EXPECT(wsigpu_read_ranges(file.file, all.data(), int64_t(all.size()), target.data(), 1) == 1);
    close(file.file);
    EXPECT(wsigpu_read_ranges(file.file, all.data(), 3, target.data(), 2) == 3);
}

// Scans of JPEGs that share a header follow each other in memory, from files and from memory.
void scans() {
    const int64_t header = 300;
    const Bytes begin = picture(1, int(header), 1);
    Work work(JPEG, YCBCR, 8, 8, 3, false);
    for (int n = 0; n < 40; ++n) {
        Bytes data = begin, scan = picture(1, roll(1, 3000), 1);
        data.insert(data.end(), scan.begin(), scan.end());
        data.insert(data.end(), {0xFF, 0xD9});
        work.add(data, 8, 8, {}, false);
    }
    for (const bool from_file : {false, true}) {
        if (from_file) work.to_file();
        const uint8_t* memory = from_file ? nullptr : work.memory.data();
        std::vector<Scan> all;
        int64_t place = 0;
        for (const Tile& tile : work.tiles) {
            all.push_back({tile.offset, tile.length, place, 0xD0 + int(all.size()) % 8, -1});
            place += tile.length - header;
        }
        auto read = [&](int threads, int64_t size) {
            Bytes target(size_t(place), uint8_t(7));
            const int64_t failed = wsigpu_read_scans(work.file, memory, all.data(),
                                                     int64_t(all.size()), begin.data(), size,
                                                     target.data(), threads);
            for (const Scan& scan : all) {
                if (scan.status != DONE) continue;
                const uint8_t* scanned = work.memory.data() + scan.offset + size;
                const int64_t left = scan.length - size;
                EXPECT(!std::memcmp(&target[size_t(scan.place)], scanned, size_t(left - 1)));
                EXPECT(target[size_t(scan.place + left - 1)] == scan.marker);
            }
            return failed;
        };
        for (const int threads : {1, 4}) EXPECT(read(threads, header) == 0);
        all[3].length -= 1;
        all[5].offset += 1;
        all[7].length = header;
        all[8].offset = -5;
        EXPECT(read(4, header) == 4);
        for (const size_t index : {3, 5, 7, 8}) EXPECT(all[index].status == LEFT_TO_PYTHON);
        EXPECT(read(1, LONGEST_HEADER + 1) == int64_t(all.size()));
        if (!from_file) continue;
        all[9].offset = int64_t(1) << 40;
        EXPECT(read(2, header) == 5 && all[9].status == UNREAD);
        close(work.file);
    }
}

// Regions of a level of 3 x 4 tiles, of which the last row and column are not full.
void regions() {
    for (const Kind& kind : {KINDS[2], KINDS[5], KINDS[6]}) {
        const int high = 32, wide = 48, rows = 3, columns = 4, height = 80, width = 170;
        Work work(JPEG, kind.color, high, wide, samples_of(kind), false);
        std::vector<int64_t> offsets, lengths;
        for (int n = 0; n < rows * columns; ++n) {
            Bytes data = encode(kind, high, wide, nullptr);
            work.add(data, high, wide, decode_whole(kind, data, {}), false);
            offsets.push_back(work.tiles.back().offset);
            lengths.push_back(work.tiles.back().length);
        }
        work.to_file();
        const Level level = {offsets.data(), lengths.data(), rows, columns, height, width};
        const int samples = work.format.samples;
        const Version* version = nullptr;
        int threads = 1;
        auto read = [&](int64_t x, int64_t y, int64_t w, int64_t h, Bytes& target, int64_t pitch) {
            return wsigpu_read_region(work.file, version, &work.format, &level, x, y, w, h,
                                      target.data(), pitch, nullptr, threads);
        };
        for (int n = 0; n < 300; ++n) {
            threads = n % 4;
            const int x = roll(0, width - 1), y = roll(0, height - 1);
            const int w = roll(1, width - x), h = roll(1, height - y);
            const int pitch = w * samples + roll(0, 5);
            Bytes target(size_t(pitch * (h - 1) + w * samples));
            EXPECT(read(x, y, w, h, target, pitch) > 0);
            for (int j = 0; j < h; ++j)
                for (int i = 0; i < w; ++i) {
                    const int tile = (y + j) / high * columns + (x + i) / wide;
                    const int pixel = (y + j) % high * wide + (x + i) % wide;
                    EXPECT(!std::memcmp(&target[size_t(j * pitch + i * samples)],
                                        &work.wholes[size_t(tile)][size_t(pixel * samples)],
                                        size_t(samples)));
                }
        }
        Bytes target(size_t(height * width * samples));
        const int64_t pitch = width * samples, far = INT64_MAX;
        const int64_t wrong[][4] = {{-1, 0, 5, 5},         {0, 0, 0, 5},  {width - 4, 0, 5, 5},
                                    {0, height - 4, 5, 5}, {far, 0, 5, 5}, {9, 9, far, 5}};
        for (const auto& box : wrong)
            EXPECT(read(box[0], box[1], box[2], box[3], target, pitch) == NEEDS_PLAN);
        threads = 3;
        const Level wider = {offsets.data(), lengths.data(), 1, MOST_TILES + 1, 1,
                             (MOST_TILES + 1) * wide};
        EXPECT(wsigpu_read_region(work.file, nullptr, &work.format, &wider, 0, 0, wider.width, 1,
                                  target.data(), pitch, nullptr, threads) == NEEDS_PLAN);
        lengths[5] = 0;  // a missing tile
        EXPECT(read(0, 0, width, height, target, pitch) == NEEDS_PLAN);
        lengths[5] = 7;  // a damaged one
        EXPECT(read(0, 0, width, height, target, pitch) == NEEDS_PLAN);
        EXPECT(read(0, 0, wide, high, target, pitch) > 0);
        struct stat status;
        EXPECT(fstat(work.file, &status) == 0);
        Version known = {status.st_size, 0, -1, -1};
        version = &known;
        EXPECT(read(0, 0, wide, high, target, pitch) == CHANGED);
#if defined(__linux__)
        known.modified_ns = status.st_mtim.tv_sec * int64_t(1000000000) + status.st_mtim.tv_nsec;
        EXPECT(read(0, 0, wide, high, target, pitch) > 0);
        known.inode = int64_t(status.st_ino) + 1;
        EXPECT(read(0, 0, wide, high, target, pitch) == CHANGED);
#endif
        close(work.file);
    }
}

// Many threads call at the same time; some of the calls are on files, some have helpers.
void many_threads() {
    std::vector<Work> all;
    for (int n = 0; n < 8; ++n) {
        all.push_back(jpegs(KINDS[n % 3 + 1], 48, 64, 12));
        if (n % 2) all.back().to_file();
    }
    std::vector<std::thread> threads;
    for (size_t n = 0; n < all.size(); ++n)
        threads.emplace_back([&work = all[n], n] {
            for (int again = 0; again < 30; ++again) {
                work.run(int(n + size_t(again)) % 5 + 1);
                work.compare_all();
            }
        });
    for (std::thread& thread : threads) thread.join();
    for (const Work& work : all)
        if (work.file >= 0) close(work.file);
}

// Threads of this process, or -1 if the system doesn't say.
int count_threads() {
    DIR* folder = opendir("/proc/self/task");
    if (!folder) return -1;
    int count = -2;  // "." and ".."
    while (readdir(folder)) ++count;
    closedir(folder);
    return count;
}

// A child of a process with calls under way reads with helpers of its own.
void fork_while_others_read() {
    std::vector<Work> all;
    for (int n = 0; n < 4; ++n) all.push_back(jpegs(KINDS[2], 48, 64, 12));
    std::atomic<bool> stop{false};
    std::vector<std::thread> threads;
    for (size_t n = 1; n < all.size(); ++n)
        threads.emplace_back([&work = all[n], &stop] {
            while (!stop) work.run(4);
        });
    for (int n = 0; n < 20; ++n) {
        all[0].run(3);
        const pid_t child = fork();
        if (child == 0) {
            alarm(60);
            for (int again = 0; again < 5; ++again) {
                all[0].run(4);
                all[0].compare_all();
            }
            EXPECT(count_threads() == 4 || count_threads() < 0);
            std::_Exit(0);
        }
        int status = -1;
        EXPECT(child > 0 && waitpid(child, &status, 0) == child);
        EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    stop = true;
    for (std::thread& thread : threads) thread.join();
    for (Work& work : all) work.compare_all();
}

// Compose channels of both sample sizes, in rows longer than a span, with values outside of their
// tables; buffers have exactly the sizes that the core may touch.
void compose_channels() {
    const int64_t height = 5, width = 1100;
    std::vector<uint16_t> wide(height * width);
    std::vector<uint8_t> narrow(height * width);
    for (uint16_t& sample : wide) sample = uint16_t(roll(0, 65535));
    for (uint8_t& sample : narrow) sample = uint8_t(roll(0, 255));
    const int32_t low[] = {1000, 20}, last[] = {2000, 99};
    std::vector<float> tables[2];
    for (int index = 0; index < 2; ++index)
        for (int32_t entry = 0; entry <= last[index]; ++entry)
            for (int channel = 0; channel < 4; ++channel)
                tables[index].push_back(channel == index ? float(entry) / float(last[index]) : 0);
    std::vector<uint8_t> shades(SHADES + 1), picture(3 * height * width);
    for (int step = 0; step <= SHADES; ++step) shades[step] = uint8_t(step * 255 / SHADES);
    const Plane planes[] = {
        {reinterpret_cast<const uint8_t*>(wide.data()), 2 * width, 2, tables[0].data(), low[0],
         last[0], 2, 0},
        {narrow.data(), width, 1, tables[1].data(), low[1], last[1], 1, 0},
    };
    wsigpu_compose(planes, 2, height, width, shades.data(), nullptr, picture.data(), 3);
    // The same from kept sums: one channel after the other.
    std::vector<float> sums(4 * height * width);
    std::vector<uint8_t> again(picture.size());
    for (const Plane* plane = planes; plane < planes + 2; ++plane)
        wsigpu_compose(plane, 1, height, width, shades.data(), sums.data(), again.data(), 3);
    EXPECT(again == picture);
    for (int64_t at = 0; at < height * width; ++at) {
        const int samples[] = {wide[at], narrow[at]};
        for (int index = 0; index < 2; ++index) {
            const int entry = std::min(std::max(samples[index] - low[index], 0), last[index]);
            const float sum = float(entry) / float(last[index]);
            EXPECT(picture[3 * at + index] == shades[int(sum * SHADES + 0.5f)]);
        }
        EXPECT(picture[3 * at + 2] == 0);
    }
}

// Halve pictures of both sample sizes, whose rows are longer than their pixels.
template <typename Sample> void halve_pictures() {
    const int64_t rows = 3, columns = 5, samples = 3, pitch = 2 * columns * samples + 1;
    std::vector<Sample> from(2 * rows * pitch - 1), to(rows * columns * samples);
    for (Sample& sample : from) sample = Sample(roll(0, Sample(-1)));
    const Picture picture{reinterpret_cast<const uint8_t*>(from.data()),
                          reinterpret_cast<uint8_t*>(to.data()), pitch * int64_t(sizeof(Sample)),
                          columns * samples * int64_t(sizeof(Sample)), int32_t(rows),
                          int32_t(columns), int32_t(samples), sizeof(Sample)};
    wsigpu_halve(&picture, 1, 1);
    for (int64_t at = 0; at < rows * columns * samples; ++at) {
        const int64_t y = at / (columns * samples), x = at / samples % columns, i = at % samples;
        const Sample* upper = from.data() + 2 * y * pitch + 2 * x * samples + i;
        const int sum = upper[0] + upper[samples] + upper[pitch] + upper[pitch + samples];
        EXPECT(to[size_t(at)] == Sample((sum + 2) / 4));
    }
}

void layout() {
    int32_t sizes[9], version = 0;
    wsigpu_layout(sizes, &version);
    EXPECT(sizes[0] == 48 && sizes[1] == 48 && sizes[2] == 32 && sizes[3] == 24 && sizes[4] == 48);
    EXPECT(sizes[5] == sizeof(Version) && sizes[6] == 32 && sizes[7] == 48);
    EXPECT(sizes[8] == 48);
    EXPECT(version > 2000000);
}

}  // namespace

int main() {
    // What each sanitizer can't run, or finds nothing in.
    const bool address = std::strstr(WSIGPU_SANITIZE, "address");
    const bool thread = std::strstr(WSIGPU_SANITIZE, "thread");
    struct Check {
        const char* name;
        void (*run)();
        bool skipped;
    };
    const Check checks[] = {
        {"layout", layout, false},
        {"parts", parts_equal_the_whole, thread},
        {"cut edge tiles", edge_tiles_may_be_cut, thread},
        {"raw tiles", raw_tiles, thread},
        {"kept tiles", kept_tiles, thread},
        {"nonsense", nonsense_is_refused, thread},
        {"damaged tiles", damaged_tiles_are_reported, thread},
        {"regions", regions, thread},
        {"scans", scans, false},
        {"ranges", ranges, false},
        {"compose", compose_channels, false},
        {"halve, 8 bits", halve_pictures<uint8_t>, false},
        {"halve, 16 bits", halve_pictures<uint16_t>, false},
        {"cancel", a_call_is_cancelled, false},
        {"many threads", many_threads, false},
        // A forked child inherits the locks of a sanitizer's own malloc, but not those of glibc's.
        {"fork", fork_while_others_read, address || thread},
    };
    for (const Check& check : checks) {
        if (check.skipped) continue;
        std::printf("%s: ", check.name);
        std::fflush(stdout);
        check.run();
        std::printf("OK\n");
    }
    return 0;
}
