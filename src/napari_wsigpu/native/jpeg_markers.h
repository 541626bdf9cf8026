// What the markers of a JPEG reveal before it is decoded. `codecs/jpeg.py:end_of_image` is the same
// rule in Python; tests/native/test_core.py compares them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

// Reads the segments of a JPEG (ISO/IEC 10918-1, annex B), and the markers within its scans.
class JpegMarkers {
  public:
    // Where the JPEG ends, behind its EOI, whatever follows; -1 if `damage` says what is wrong.
    int64_t end(const uint8_t* tables, int64_t tables_size, const uint8_t* data, int64_t size) {
        // What the shared tables lack or get wrong shows at the scan that needs it.
        if (tables_size) read(tables, tables_size, true);
        damage = nullptr;
        interval_ = 0;
        return read(data, size, false);
    }

    const char* damage = nullptr;

  private:
    struct Component {
        int id, across, down, quanta;
    };

    int64_t fail(const char* reason) {
        damage = reason;
        return -1;
    }

    int64_t early() { return fail("its JPEG data end early"); }

    static int64_t number(const uint8_t* data) { return data[0] << 8 | data[1]; }

    // The position of the byte that follows 0xFF, and fill bytes, at or behind `at`; `size` if none.
    static int64_t marker(const uint8_t* data, int64_t size, int64_t at) {
        if (at >= size) return size;
        const void* found = std::memchr(data + at, 0xFF, size_t(size - at));
        if (!found) return size;
        at = static_cast<const uint8_t*>(found) - data;
        while (at < size && data[at] == 0xFF) ++at;
        return at;
    }

    int64_t read(const uint8_t* data, int64_t size, bool only_tables) {
        if (size < 2 || data[0] != 0xFF || data[1] != 0xD8) return fail("it is no JPEG");
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
            if (code == 0xD8) return fail("its JPEG begins twice");
            if (at + 2 > size) return early();
            const int64_t next = at + number(data + at);
            if (next < at + 2) return fail("a segment of its JPEG is damaged");
            if (next > size) return early();
            const uint8_t* content = data + at + 2;
            const int64_t length = next - at - 2;
            at = next;
            if (code == 0xDB) read_quanta(content, length);
            if (code == 0xC4) read_huffman(content, length);
            if (code == 0xDD && length >= 2) interval_ = number(content);
            if (code >= 0xC0 && code <= 0xCF && code != 0xC4 && code != 0xC8 && code != 0xCC &&
                !read_frame(code, content, length))
                return -1;
            if (code != 0xDA) continue;
            const int64_t intervals = check_scan(content, length);
            if (intervals < 0) return -1;
            at = behind_scan(data, size, at, intervals);
            if (at < 0) return -1;
            scanned = true;
        }
    }

    // Whether a table is whole is for libjpeg to say.
    void read_quanta(const uint8_t* content, int64_t length) {
        while (length > 64) {
            const int64_t size = std::min<int64_t>(length, 1 + 64 * (1 + (content[0] > 15)));
            quanta_ |= 1 << (content[0] & 15);
            content += size;
            length -= size;
        }
    }

    void read_huffman(const uint8_t* content, int64_t length) {
        while (length > 16) {
            int64_t size = 17;
            for (int i = 1; i < 17; ++i) size += content[i];
            size = std::min(length, size);
            const int bit = 1 << (content[0] & 15), kind = content[0] >> 4;
            first_ |= kind == 0 ? bit : 0;
            other_ |= kind == 1 ? bit : 0;
            content += size;
            length -= size;
        }
    }

    bool read_frame(int code, const uint8_t* content, int64_t length) {
        if (frame_) return fail("its JPEG has several frames"), false;
        if (length < 6 || !content[5] || length != 6 + 3 * content[5])
            return fail("a segment of its JPEG is damaged"), false;
        frame_ = code;
        height_ = number(content + 1);
        width_ = number(content + 3);
        for (int i = 0; i < content[5]; ++i) {
            const uint8_t* each = content + 6 + 3 * i;
            components_[i] = Component{each[0], each[1] >> 4, each[1] & 15, each[2] & 15};
            across_ = std::max(across_, components_[i].across);
            down_ = std::max(down_, components_[i].down);
        }
        count_ = content[5];
        return true;
    }

    // How many restart intervals a scan has, 0 if they are not counted; -1 if it is damaged.
    int64_t check_scan(const uint8_t* content, int64_t length) {
        if (!frame_) return fail("its JPEG has no frame");
        if (length < 6 || length != 4 + 2 * content[0])
            return fail("a segment of its JPEG is damaged");
        const bool lossless = (frame_ & 3) == 3, huffman = frame_ == 0xC0 || frame_ == 0xC1;
        const Component* last = nullptr;
        for (int i = 0; i < content[0]; ++i) {
            const uint8_t* named = content + 1 + 2 * i;
            const Component* found = nullptr;
            for (int k = 0; k < count_ && !found; ++k)
                if (components_[k].id == named[0]) found = &components_[k];
            if (!found || !found->across || !found->down)
                return fail("a segment of its JPEG is damaged");
            // Without any, libjpeg takes those of K.3, as for frames of Motion JPEG.
            const bool coded = ((first_ >> (named[1] >> 4) & other_ >> (named[1] & 15)) & 1) ||
                               !(first_ | other_);
            if ((huffman && !coded) || (!lossless && !(quanta_ >> found->quanta & 1)))
                return fail("tables of its JPEG are missing");
            last = found;
        }
        if (!interval_ || !height_) return 0;
        const int64_t side = lossless ? 1 : 8;
        const auto parts = [](int64_t whole, int64_t part) { return (whole + part - 1) / part; };
        int64_t wide = parts(width_, side * across_), high = parts(height_, side * down_);
        if (content[0] == 1) {  // a unit is one block of this component, A.2.2
            wide = parts(parts(width_ * last->across, across_), side);
            high = parts(parts(height_ * last->down, down_), side);
        }
        return parts(wide * high, interval_);
    }

    // Where the first marker behind a scan is that is no restart; -1 if restarts are not in order.
    int64_t behind_scan(const uint8_t* data, int64_t size, int64_t at, int64_t intervals) {
        for (int64_t restarts = 0;;) {
            at = marker(data, size, at);
            if (at >= size) return early();
            const int code = data[at];
            if (code >= 0xD0 && code <= 0xD7) {
                if (!interval_ || code != 0xD0 + restarts % 8)
                    return fail("restart markers of its JPEG are out of order");
                ++restarts;
            } else if (code) {
                if (restarts + 1 < intervals) return fail("restart intervals of its JPEG are missing");
                return at - 1;
            }
            ++at;
        }
    }

    Component components_[255];
    int frame_ = 0, count_ = 0, across_ = 1, down_ = 1;
    int first_ = 0, other_ = 0, quanta_ = 0;
    int64_t height_ = 0, width_ = 0, interval_ = 0;
};
