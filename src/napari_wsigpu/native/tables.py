"""NumPy dtypes of the records in `core.h`; the loader checks that the sizes match."""

from __future__ import annotations

import re

import numpy as np


def row_type(columns: str) -> np.dtype[np.void]:
    """Return a NumPy row type that is declared as in C: ``"u8 target, i8 codes[4]"``."""
    members = (re.findall(r"\w+", member) for member in columns.split(","))
    return np.dtype([(name, f"<{kind}", *map(int, count)) for kind, name, *count in members])


FORMAT = row_type(
    "u8 tables, i8 tables_size, i4 codec, i4 color, i4 height, i4 width, i4 samples, "
    "i4 sample_bytes, i4 pixel_bytes, i4 reserved"
)
TILE = row_type(
    "i8 offset, i8 length, u8 keep, i4 first, i4 count, i4 height, i4 width, i4 status, i4 warnings"
)
PART = row_type("u8 target, i8 pitch, i4 left, i4 top, i4 width, i4 height")
RANGE = row_type("i8 offset, i8 place, i8 size")
LEVEL = row_type("u8 offsets, u8 lengths, i8 rows, i8 columns, i8 height, i8 width")
VERSION = row_type("i8 size, i8 modified_ns, i8 changed_ns, i8 inode")
SCAN = row_type("i8 offset, i8 length, i8 place, i4 marker, i4 status")
PLANE = row_type(
    "u8 pixels, i8 row_pitch, i8 pixel_pitch, u8 table, i4 low, i4 last, "
    "i4 sample_bytes, i4 reserved"
)
PICTURE = row_type(
    "u8 pixels, u8 target, i8 pitch, i8 target_pitch, i4 rows, i4 columns, i4 samples, "
    "i4 sample_bytes"
)
RECORDS = FORMAT, TILE, PART, RANGE, LEVEL, VERSION, SCAN, PLANE, PICTURE
# Return values of `read_region` other than a number of bytes.
NEEDS_PLAN, CHANGED = -1, -2
MOST_TILES = 64

# Values of the enumerations in `core.h`.
RAW, JPEG = 0, 1
COLORS = {"gray": 0, "stored": 1, "ycbcr": 2, "auto": 3}
DONE, DAMAGED, LEFT_TO_PYTHON, UNREAD, CANCELLED, HELD = range(6)
# Bits of a tile's `warnings`, and the codes that users see.
WARNINGS = {1: "bad-huffman-code", 2: "extraneous-bytes", 4: "restart-lost", 8: "other"}
MESSAGE_SIZE = 200
# Steps into which `compose` divides a sum from 0 to 1.
SHADES = 1 << 14
