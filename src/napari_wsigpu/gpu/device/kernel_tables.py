"""Tables that kernels read: each row type is declared once, for NumPy and for CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING

from napari_wsigpu.native.tables import SHADES, row_type

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np


# A part of a tile and its position in the pixels of regions. source: address of its first pixel;
# target: index of the pixel to which it is copied; pitch: pixels from one row of the region to the
# next; height, width: size of the part in pixels.
PASTE = row_type("u8 source, i8 target, i8 pitch, i4 height, i4 width")

# A JPEG tile. target: address of its pixels; planes: addresses of its decoded components; strip:
# address of the first row below the last tile of a stack, 0 for other tiles; scan, length: its
# entropy-coded bytes in page-locked memory, and their number, 0 if it is alone in its code stream;
# shades: the values that the blocks of the strip alternate between; quantum: DC quantization step;
# codes: the DC Huffman table as DHT stores it (T.81, B.2.4.2): 16 counts and 16 symbols.
JPEG_TILE = row_type(
    "u8 target, u8 planes[3], u8 strip, u8 scan, i8 length, i8 shades[2], i8 quantum, i8 codes[4]"
)

# A part of a tile that is drawn at another scale. source: address of the tile; rows, columns: size
# of the area of the tile that contains pixels; target, pitch, height, width: as in PASTE, of the
# drawn pixels; top, left: upper left corner of the part, in pixels of the tile; down, across:
# height and width of a drawn pixel, in pixels of the tile.
SCALED = row_type(
    "u8 source, i8 target, i8 pitch, i4 height, i4 width, i4 rows, i4 columns, f8 top, "
    "f8 left, f8 down, f8 across"
)

# A channel of a tile. source: address of its first sample; colors: address of four floats for each
# value from `low` to `low + last`; values beyond have the colors of these.
PLANE = row_type("u8 source, u8 colors, i4 low, i4 last")

TABLES = {"Paste": PASTE, "Scaled": SCALED, "Plane": PLANE, "JpegTile": JPEG_TILE}
C_TYPES = {
    "<u8": "unsigned long long",
    "<i8": "long long",
    "<u4": "unsigned int",
    "<i4": "int",
    "<u2": "unsigned short",
    "<f4": "float",
    "<f8": "double",
    "|u1": "unsigned char",
}


def declarations() -> str:
    """Return all tables as C structures, for the top of kernels.cu."""
    return preamble({"SHADES": SHADES}, TABLES)


def preamble(constants: Mapping[str, int], tables: Mapping[str, np.dtype[np.void]]) -> str:
    """Return constants as macros and tables as C structures, for the top of a source."""
    macros = (f"#define {name} {value}\n" for name, value in constants.items())
    return "".join([*macros, *(structure(name, dtype) for name, dtype in tables.items())])


def structure(name: str, dtype: np.dtype[np.void]) -> str:
    """Return a row type as a C structure, with an assertion that both have the same size."""
    members = []
    for field in dtype.names or ():
        base, shape = dtype[field].subdtype or (dtype[field], ())
        count = "".join(f"[{length}]" for length in shape)
        members.append(f"    {C_TYPES[base.str]} {field}{count};\n")
    size = f'static_assert(sizeof({name}) == {dtype.itemsize}, "{name}");\n'
    return f"struct {name} {{\n{''.join(members)}}};\n{size}"
