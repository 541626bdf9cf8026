// The interface between Python and the core. `tables.py` declares the same records for NumPy; the
// loader compares their sizes.
#pragma once

#include <stdint.h>

#if defined(_WIN32)
#define WSIGPU_API __declspec(dllexport)
#else
#define WSIGPU_API __attribute__((visibility("default")))
#endif

extern "C" {

enum Codec : int32_t { RAW = 0, JPEG = 1 };

// Color space of a JPEG; see `Encoding.jpeg_color`.
enum Color : int32_t { GRAY = 0, STORED = 1, YCBCR = 2, AUTO = 3 };

// Status of a tile. LEFT_TO_PYTHON: the core does not support the tile, or memory is short. Unless
// the read was cancelled, the caller retries every failed tile in Python, which either decodes it
// or reports the reason. A tile that is HELD when the call starts is already decoded in `keep`.
enum Status : int32_t {
    DONE = 0,
    DAMAGED = 1,
    LEFT_TO_PYTHON = 2,
    UNREAD = 3,
    CANCELLED = 4,
    HELD = 5
};

// Bits of `Tile.warnings`: kinds of warnings that libjpeg raised while it decoded the tile. Bytes
// after the last block are detected only if the whole tile is decoded, into `keep`.
enum Warning : int32_t { BAD_CODE = 1, EXTRANEOUS = 2, RESYNC = 4, OTHER = 8 };

enum { MESSAGE_SIZE = 200 };

// Encoding of one level's tiles, and format of the pasted pixels.
struct Format {
    const uint8_t* tables;  // JPEG tables that all tiles share, or null
    int64_t tables_size;
    int32_t codec, color;
    int32_t height, width;          // of a full tile
    int32_t samples, sample_bytes;  // of a decoded pixel
    int32_t pixel_bytes;            // of a pasted pixel: as decoded, or 4 for RGBA
    int32_t reserved;
};

// One encoded tile. On entry, `height` and `width` are the size of the tile's part inside the
// level, since some writers crop tiles at the edges; on return, they are the decoded size. For a
// HELD tile they are the size of the pixels in `keep`.
struct Tile {
    int64_t offset, length;  // in the file or in memory, in bytes
    uint8_t* keep;           // memory for the whole tile, owned by the caller; or null
    int32_t first, count;    // range of the tile's parts
    int32_t height, width;
    int32_t status, warnings;
};

// A rectangle of a tile, and the address at which to paste its first pixel. `pitch` is the distance
// between rows of the target in bytes.
struct Part {
    uint8_t* target;
    int64_t pitch;
    int32_t left, top, width, height;
};

// A byte range of a file, and its position (`place`) in a buffer.
struct Range {
    int64_t offset, place, size;
};

// Read tiles from a file (or from `memory` if it is not null), decode the area that their parts
// need, and paste the parts. Returns the number of tiles whose status is not DONE; `messages` has
// MESSAGE_SIZE bytes per tile. A nonzero `*cancel` stops the call before its next tile.
WSIGPU_API int64_t wsigpu_read_tiles(int32_t file, const uint8_t* memory, const Format* format,
                                     Tile* tiles, int64_t count, const Part* parts, char* messages,
                                     const int32_t* cancel, int32_t threads);

// Byte ranges of the tiles of a level, row by row, and the size of the level in pixels.
struct Level {
    const int64_t *offsets, *lengths;
    int64_t rows, columns, height, width;
};

// File status when the slide was opened; `changed_ns` and `inode` are -1 if unknown.
struct Version {
    int64_t size, modified_ns, changed_ns, inode;
};

// Results of wsigpu_read_region on failure. NEEDS_PLAN: a tile failed or is missing, or the
// rectangle extends beyond the image or over more than MOST_TILES tiles, so the caller must plan
// the read. CHANGED: the file differs from `version`.
enum : int64_t { NEEDS_PLAN = -1, CHANGED = -2 };

enum { MOST_TILES = 64 };

// Read a small rectangle of a level. Returns the total encoded size of the tiles that were read.
// Unless `version` is null, as it must be on Windows, the file is compared with it before and after
// the read: calling fstat from Python would acquire the GIL two more times. `tiles` is null or has
// a record per tile, row by row, in which the caller sets `keep` and, for a HELD tile, also `status`
// and the size.
WSIGPU_API int64_t wsigpu_read_region(int32_t file, const Version* version, const Format* format,
                                      const Level* level, int64_t left, int64_t top,
                                      int64_t width, int64_t height, uint8_t* target,
                                      int64_t pitch, Tile* tiles, int32_t threads);

// Read ranges of a file into one buffer. Returns the number of incomplete ranges.
WSIGPU_API int64_t wsigpu_read_ranges(int32_t file, const Range* ranges, int64_t count,
                                      uint8_t* target, int32_t threads);

// A JPEG tile whose scan is copied to `place` in the target. The caller joins several scans into
// one tall JPEG, so the code `marker` (RSTm, or EOI for a single tile) replaces that of each EOI.
struct Scan {
    int64_t offset, length, place;
    int32_t marker, status;
};

enum { LONGEST_HEADER = 4096 };

// Read the scans of JPEG tiles that start with the same header, of at most LONGEST_HEADER bytes.
// Returns the number of tiles that are not DONE: they don't start with the header, don't end with
// EOI, or can't be read.
WSIGPU_API int64_t wsigpu_read_scans(int32_t file, const uint8_t* memory, Scan* scans,
                                     int64_t count, const uint8_t* header, int64_t header_size,
                                     uint8_t* target, int32_t threads);

// A channel to compose: samples of 1 or 2 bytes. `table` has four floats for each value from `low`
// to `low + last`: red, green and blue in linear light, and padding. Values below and above
// that range have the color of the first and the last entry, respectively.
struct Plane {
    const uint8_t* pixels;
    int64_t row_pitch, pixel_pitch;  // in bytes
    const float* table;
    int32_t low, last;
    int32_t sample_bytes, reserved;
};

enum { SHADES = 1 << 14 };

// Add up the colors of channels, and write RGB pixels. `shades` has SHADES + 1 bytes: the sample to
// write for each sum from 0 to 1, in steps of 1 / SHADES. Unless `sums` is null, the colors are added
// to its four floats per pixel, else to 0.
WSIGPU_API void wsigpu_compose(const Plane* planes, int64_t count, int64_t height, int64_t width,
                               const uint8_t* shades, float* sums, uint8_t* target,
                               int32_t threads);

// A picture to halve. Pitches are the distances between rows in bytes; `rows` and `columns` are those
// of the target; samples have 1 or 2 bytes.
struct Picture {
    const uint8_t* pixels;
    uint8_t* target;
    int64_t pitch, target_pitch;
    int32_t rows, columns, samples, sample_bytes;
};

// Average blocks of 2 x 2 pixels of several pictures, rounded half up.
WSIGPU_API void wsigpu_halve(const Picture* pictures, int64_t count, int32_t threads);

// The sizes of the records above in declaration order, and the version of libjpeg-turbo.
WSIGPU_API void wsigpu_layout(int32_t sizes[9], int32_t* jpeg_version);

}  // extern "C"
