// Checks the markers of a JPEG before it is decoded. `codecs/jpeg.py:end_of_image` implements the
// same rules in Python; tests/native/test_core.py compares the two.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

// Parses the segments of a JPEG (ITU-T T.81, annex B) and the restart markers in its scans.
class JpegMarkers {
  public:
    // Return the position after the JPEG's EOI. If it is damaged, set `damage` and return -1.
    int64_t end(const uint8_t* tables, int64_t tables_size, const uint8_t* data, int64_t size) {
        // Ignore errors in the shared tables here: `check_scan` reports missing tables.
        if (tables_size) read(tables, tables_size, true);
        damage = nullptr;
        interval_ = 0;
        return read(data, size, false);
    }

    const char* damage = nullptr;

  private:
    struct Component {
        int id, across, down, quantization;
    };

    int64_t fail(const char* reason) {
        damage = reason;
        return -1;
    }

    int64_t early() { return fail("its JPEG data is truncated"); }

    static int64_t read_uint16(const uint8_t* data) { return data[0] << 8 | data[1]; }

    // Return the position of the first code byte after 0xFF and fill bytes (B.1.1.2), searching
    // from `at`; `size` if there is none.
    static int64_t marker(const uint8_t* data, int64_t size, int64_t at) {
        if (at >= size) return size;
        const void* found = std::memchr(data + at, 0xFF, size_t(size - at));
        if (!found) return size;
        at = static_cast<const uint8_t*>(found) - data;
        while (at < size && data[at] == 0xFF) ++at;
        return at;
    }

    int64_t read(const uint8_t* data, int64_t size, bool only_tables) {
        if (size < 2 || data[0] != 0xFF || data[1] != 0xD8) return fail("it is not a JPEG");
        bool scanned = false;
        for (int64_t at = 2;;) {
            at = marker(data, size, at);
            if (at >= size) return early();
            const int code = data[at++];
            if (code == 0xD9) {
                if (!scanned && !only_tables) return fail("its JPEG has no scan");
                return at;
            }
            if (code <= 1 || (code >= 0xD0 && code <= 0xD7)) continue;
            if (code == 0xD8) return fail("its JPEG has two start markers");
            if (at + 2 > size) return early();
            const int64_t next = at + read_uint16(data + at);
            if (next < at + 2) return fail("its JPEG has a damaged segment");
            if (next > size) return early();
            const uint8_t* content = data + at + 2;
            const int64_t length = next - at - 2;
            at = next;
            if (code == 0xDB) read_quantization(content, length);
            if (code == 0xC4) read_huffman(content, length);
            if (code == 0xDD && length >= 2) interval_ = read_uint16(content);
            if (code >= 0xC0 && code <= 0xCF && code != 0xC4 && code != 0xC8 && code != 0xCC &&
                !read_frame(code, content, length))
                return -1;
            if (code != 0xDA) continue;
            const int64_t intervals = check_scan(content, length);
            if (intervals < 0) return -1;
            at = end_of_scan(data, size, at, intervals);
            if (at < 0) return -1;
            scanned = true;
        }
    }

    // Record which quantization tables are defined (DQT, B.2.4.1); libjpeg checks their contents.
    void read_quantization(const uint8_t* content, int64_t length) {
        while (length > 64) {
            const int64_t size = std::min<int64_t>(length, 1 + 64 * (1 + (content[0] > 15)));
            quantization_ |= 1 << (content[0] & 15);
            content += size;
            length -= size;
        }
    }

    // Record which DC and AC Huffman tables are defined (DHT, B.2.4.2).
    void read_huffman(const uint8_t* content, int64_t length) {
        while (length > 16) {
            int64_t size = 17;
            for (int i = 1; i < 17; ++i) size += content[i];
            size = std::min(length, size);
            const int bit = 1 << (content[0] & 15), kind = content[0] >> 4;
            dc_ |= kind == 0 ? bit : 0;
            ac_ |= kind == 1 ? bit : 0;
            content += size;
            length -= size;
        }
    }

    // Read a frame header (SOF, B.2.2).
    bool read_frame(int code, const uint8_t* content, int64_t length) {
        if (frame_) return fail("its JPEG has several frames"), false;
        if (length < 6 || !content[5] || length != 6 + 3 * content[5])
            return fail("its JPEG has a damaged segment"), false;
        frame_ = code;
        height_ = read_uint16(content + 1);
        width_ = read_uint16(content + 3);
        for (int i = 0; i < content[5]; ++i) {
            const uint8_t* each = content + 6 + 3 * i;
            components_[i] = Component{each[0], each[1] >> 4, each[1] & 15, each[2] & 15};
            across_ = std::max(across_, components_[i].across);
            down_ = std::max(down_, components_[i].down);
        }
        count_ = content[5];
        return true;
    }

    // Check a scan header (SOS, B.2.3). Return the number of restart intervals in the scan, 0 if
    // it has none or the height is unknown; -1 if it is damaged.
    int64_t check_scan(const uint8_t* content, int64_t length) {
        if (!frame_) return fail("its JPEG has no frame");
        if (length < 6 || length != 4 + 2 * content[0])
            return fail("its JPEG has a damaged segment");
        const bool lossless = (frame_ & 3) == 3, huffman = frame_ == 0xC0 || frame_ == 0xC1;
        const Component* last = nullptr;
        for (int i = 0; i < content[0]; ++i) {
            const uint8_t* named = content + 1 + 2 * i;
            const Component* found = nullptr;
            for (int k = 0; k < count_ && !found; ++k)
                if (components_[k].id == named[0]) found = &components_[k];
            if (!found || !found->across || !found->down)
                return fail("its JPEG has a damaged segment");
            // If a JPEG has no Huffman tables at all, libjpeg uses those of K.3 (Motion JPEG).
            const bool coded = ((dc_ >> (named[1] >> 4) & ac_ >> (named[1] & 15)) & 1) ||
                               !(dc_ | ac_);
            if ((huffman && !coded) || (!lossless && !(quantization_ >> found->quantization & 1)))
                return fail("its JPEG lacks a table");
            last = found;
        }
        if (!interval_ || !height_) return 0;
        const int64_t side = lossless ? 1 : 8;
        const auto parts = [](int64_t whole, int64_t part) { return (whole + part - 1) / part; };
        int64_t wide = parts(width_, side * across_), high = parts(height_, side * down_);
        if (content[0] == 1) {  // not interleaved: an MCU is one block (A.2.2)
            wide = parts(parts(width_ * last->across, across_), side);
            high = parts(parts(height_ * last->down, down_), side);
        }
        return parts(wide * high, interval_);
    }

    // Return the position of the marker that ends a scan, the first that is not a restart marker;
    // -1 if there is none, or if restart markers are missing or out of order.
    int64_t end_of_scan(const uint8_t* data, int64_t size, int64_t at, int64_t intervals) {
        for (int64_t restarts = 0;;) {
            at = marker(data, size, at);
            if (at >= size) return early();
            const int code = data[at];
            if (code >= 0xD0 && code <= 0xD7) {
                if (!interval_ || code != 0xD0 + restarts % 8)
                    return fail("the restart markers of its JPEG are out of order");
                ++restarts;
            } else if (code) {
                if (restarts + 1 < intervals) return fail("its JPEG lacks restart intervals");
                return at - 1;
            }
            ++at;
        }
    }

    Component components_[255];
    int frame_ = 0, count_ = 0, across_ = 1, down_ = 1;
    int dc_ = 0, ac_ = 0, quantization_ = 0;
    int64_t height_ = 0, width_ = 0, interval_ = 0;
};
