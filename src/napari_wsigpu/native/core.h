// What Python and the core tell each other. `tables.py` describes the same records to NumPy, and
// compares their sizes when it loads the library.
#pragma once

#include <stdint.h>

#if defined(_WIN32)
#define WSIGPU_API __declspec(dllexport)
#else
#define WSIGPU_API __attribute__((visibility("default")))
#endif

extern "C" {

enum Codec : int32_t { RAW = 0, JPEG = 1 };

// The color space of a JPEG, as `Encoding.jpeg_color` names it.
enum Color : int32_t { GRAY = 0, STORED = 1, YCBCR = 2, AUTO = 3 };

// What became of a tile. The caller decodes a refused or damaged one in Python, which either
// accepts it or reports why it cannot.
// A tile that is HELD when the call starts was decoded before: `keep` has its pixels.
enum Status : int32_t { DONE = 0, DAMAGED = 1, REFUSED = 2, UNREAD = 3, CANCELLED = 4, HELD = 5 };

enum { MESSAGE_SIZE = 200 };

// How the tiles of one level are encoded, and the pixels that the caller wants.
struct Format {
    const uint8_t* tables;  // JPEG tables that all tiles share, or null
    int64_t tables_size;
    int32_t codec, color;
    int32_t height, width;          // of a full tile
    int32_t samples, sample_bytes;  // of a decoded pixel
    int32_t pixel_bytes;            // of a pasted pixel: as decoded, or 4 for RGBA
    int32_t reserved;
};

// One encoded tile. `height` and `width` are the part of it inside the level, to which some
// writers cut tiles at the edges; the core replaces them by the size that it found. A tile
// that is HELD has this size.
struct Tile {
    int64_t offset, length;  // in the file, or in memory
    uint8_t* keep;           // memory for the whole tile, or null
    int32_t first, count;    // its parts
    int32_t height, width;
    int32_t status, warnings;
};

// A rectangle of a tile, and the address of its first pixel. `pitch` is in bytes.
struct Part {
    uint8_t* target;
    int64_t pitch;
    int32_t left, top, width, height;
};

// `size` bytes of a file from `offset`, and their position in a buffer.
struct Range {
    int64_t offset, place, size;
};

// Read tiles from a file (or from `memory`, if it is not null), decode what their parts need and
// paste it. Returns the number of tiles whose status is not DONE; `messages` has MESSAGE_SIZE
// bytes for each tile. A nonzero `cancel` stops the call before its next tile.
WSIGPU_API int64_t wsigpu_read_tiles(int32_t file, const uint8_t* memory, const Format* format,
                                     Tile* tiles, int64_t count, const Part* parts, char* messages,
                                     const int32_t* cancel, int32_t threads);

// Where the tiles of a level lie in the file, row by row, and the size of its image.
struct Level {
    const int64_t *offsets, *lengths;
    int64_t rows, columns, height, width;
};

// What the system said about a file when its slide was described; -1 for what it did not say.
struct Version {
    int64_t size, modified_ns, changed_ns, inode;
};

// Why wsigpu_read_region read nothing: the caller has to plan the read, because a tile failed or
// is missing or the rectangle leaves the image; or the file is not of `version` any more.
enum : int64_t { UNPLANNED = -1, CHANGED = -2 };

// Read a small rectangle of a level in the calling thread. Returns the bytes read. The file is
// checked before and after, unless `version` is null: asking the system from Python would take
// the interpreter twice more. `tiles` is null, or has a record for each tile, row by row, of which
// the caller sets `keep` and, if the tile is HELD, `status` and size.
WSIGPU_API int64_t wsigpu_read_region(int32_t file, const Version* version, const Format* format,
                                      const Level* level, int64_t left, int64_t top,
                                      int64_t width, int64_t height, uint8_t* target,
                                      int64_t pitch, Tile* tiles);

// Read ranges of a file into one buffer. Returns how many could not be read completely.
WSIGPU_API int64_t wsigpu_read_ranges(int32_t file, const Range* ranges, int64_t count,
                                      uint8_t* target, int32_t threads);

// A JPEG tile whose scan goes to `place`, behind another one. `marker` replaces its EOI.
struct Scan {
    int64_t offset, length, place;
    int32_t marker, status;
};

enum { LONGEST_HEADER = 4096 };

// Read the scans of JPEG tiles that begin with the same header, of at most LONGEST_HEADER bytes.
// Returns how many tiles are not DONE, because they begin or end otherwise or can't be read.
WSIGPU_API int64_t wsigpu_read_scans(int32_t file, const uint8_t* memory, Scan* scans,
                                     int64_t count, const uint8_t* header, int64_t header_size,
                                     uint8_t* target, int32_t threads);

// The sizes of the records above in declaration order, and the version of libjpeg-turbo.
WSIGPU_API void wsigpu_layout(int32_t sizes[7], int32_t* jpeg_version);

}  // extern "C"
