"""Tables that kernels read: their columns, for NumPy and for CUDA."""

from __future__ import annotations

import re

import numpy as np


def row_type(columns: str) -> np.dtype[np.void]:
    """Return the type of a table's row, declared as in C: ``"u8 target, i8 codes[4]"``."""
    members = (re.findall(r"\w+", member) for member in columns.split(","))
    return np.dtype([(name, f"<{kind}", *map(int, count)) for kind, name, *count in members])


# A part of a tile and its place in the pixels of regions. source: address of its first pixel;
# target: index of the pixel that it goes to; pitch: pixels from one row of the region to the next.
PASTE = row_type("u8 source, i8 target, i8 pitch, i4 height, i4 width")

# A segment of a raw tile. source: address of its samples, 0 if the file has none; target: address
# of the tile; rows and pixels (a row): what it has; channel: the first one that it holds.
SEGMENT = row_type("u8 source, u8 target, i4 rows, i4 pixels, i8 channel")

# A JPEG tile. target: address of its pixels; planes: of its components; strip: of the row below it
# if that is to be looked at, else 0; scan: of its encoded bytes in host memory, and their length, 0
# if it is alone in its code stream; shades: of the strip's blocks, in turn; quantum and codes (how
# many have 1 bit, 2 bits, ...; what they stand for): what tells its first block's brightness.
JPEG_TILE = row_type(
    "u8 target, u8 planes[3], u8 strip, u8 scan, i8 length, i8 shades[2], i8 quantum, i8 codes[4]"
)

# A part of a tile, and the pixels that show it at another scale. source: address of the tile; rows
# and columns: what of it holds pixels; target, pitch, height, width: as in PASTE; top, left: where
# in the tile they begin; down, across: how many of its pixels one of them spans.
SCALED = row_type(
    "u8 source, i8 target, i8 pitch, i4 height, i4 width, i4 rows, i4 columns, f8 top, "
    "f8 left, f8 down, f8 across"
)

TABLES = {"Paste": PASTE, "Scaled": SCALED, "Segment": SEGMENT, "JpegTile": JPEG_TILE}
C_TYPES = {
    "<u8": "unsigned long long",
    "<i8": "long long",
    "<u4": "unsigned int",
    "<i4": "int",
    "<f4": "float",
    "<f8": "double",
    "|u1": "unsigned char",
}


def declarations() -> str:
    """Return the tables as structures of C, to be put before the kernels."""
    return "".join(structure(name, dtype) for name, dtype in TABLES.items())


def structure(name: str, dtype: np.dtype[np.void]) -> str:
    """Return a table's row as a structure of C."""
    members = []
    for field in dtype.names or ():
        base, shape = dtype[field].subdtype or (dtype[field], ())
        count = "".join(f"[{length}]" for length in shape)
        members.append(f"    {C_TYPES[base.str]} {field}{count};\n")
    size = f'static_assert(sizeof({name}) == {dtype.itemsize}, "{name}");\n'
    return f"struct {name} {{\n{''.join(members)}}};\n{size}"
