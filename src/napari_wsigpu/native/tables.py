"""NumPy dtypes of the records in `core.h`; the loader checks that the sizes match."""

from __future__ import annotations

import numpy as np

FORMAT = np.dtype(
    [
        ("tables", np.uint64),
        ("tables_size", np.int64),
        ("codec", np.int32),
        ("color", np.int32),
        ("height", np.int32),
        ("width", np.int32),
        ("samples", np.int32),
        ("sample_bytes", np.int32),
        ("pixel_bytes", np.int32),
        ("reserved", np.int32),
    ]
)
TILE = np.dtype(
    [
        ("offset", np.int64),
        ("length", np.int64),
        ("keep", np.uint64),
        ("first", np.int32),
        ("count", np.int32),
        ("height", np.int32),
        ("width", np.int32),
        ("status", np.int32),
        ("warnings", np.int32),
    ]
)
PART = np.dtype(
    [
        ("target", np.uint64),
        ("pitch", np.int64),
        ("left", np.int32),
        ("top", np.int32),
        ("width", np.int32),
        ("height", np.int32),
    ]
)
RANGE = np.dtype([("offset", np.int64), ("place", np.int64), ("size", np.int64)])
LEVEL = np.dtype(
    [
        ("offsets", np.uint64),
        ("lengths", np.uint64),
        ("rows", np.int64),
        ("columns", np.int64),
        ("height", np.int64),
        ("width", np.int64),
    ]
)
VERSION = np.dtype(
    [("size", np.int64), ("modified_ns", np.int64), ("changed_ns", np.int64), ("inode", np.int64)]
)
SCAN = np.dtype(
    [
        ("offset", np.int64),
        ("length", np.int64),
        ("place", np.int64),
        ("marker", np.int32),
        ("status", np.int32),
    ]
)
PLANE = np.dtype(
    [
        ("pixels", np.uint64),
        ("row_pitch", np.int64),
        ("pixel_pitch", np.int64),
        ("table", np.uint64),
        ("low", np.int32),
        ("last", np.int32),
        ("sample_bytes", np.int32),
        ("reserved", np.int32),
    ]
)
PICTURE = np.dtype(
    [
        ("pixels", np.uint64),
        ("target", np.uint64),
        ("pitch", np.int64),
        ("target_pitch", np.int64),
        ("rows", np.int32),
        ("columns", np.int32),
        ("samples", np.int32),
        ("sample_bytes", np.int32),
    ]
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
