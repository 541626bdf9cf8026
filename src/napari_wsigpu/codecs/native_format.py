"""The levels that the native core decodes, described by its records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.codecs.jpeg_tiles import decode_jpeg
from napari_wsigpu.codecs.raw import is_raw, is_swapped
from napari_wsigpu.codecs.table import BY_CODE, ImageCompression
from napari_wsigpu.native.tables import COLORS, FORMAT, JPEG, LEVEL, RAW, TILE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from napari_wsigpu.model.layout import LevelLayout

RGBA = 4


class NativeFormat:
    """The `LEVEL` record of a level and its `FORMAT` records, as decoded and as RGBA.

    Parameters
    ----------
    image : LevelLayout
        The level.
    codec : int
        `RAW` or `JPEG`.

    Attributes
    ----------
    is_raw : bool
        Whether its tiles are uncompressed.
    pixel_bytes : int
        Size of a decoded pixel.
    tile_bytes, columns : int
        Size of a decoded tile, and how many tiles lie in a row.
    addresses : dict of int to int
        Addresses of the `FORMAT` records by the size of a pasted pixel.
    level : int
        Address of the `LEVEL` record.
    """

    def __init__(self, image: LevelLayout, codec: int) -> None:
        grid, encoding = image.grid, image.encoding
        self.is_raw = codec == RAW
        self.pixel_bytes = image.channels * image.dtype.itemsize
        self.tile_bytes, self.columns = image.tile_bytes, grid.columns
        self._size, self._tile = (image.height, image.width), (grid.tile_height, grid.tile_width)
        self._tables = np.frombuffer(encoding.jpeg_tables[0] or b"", np.uint8)
        tables = self._tables.ctypes.data if len(self._tables) else 0
        color = COLORS.get(encoding.jpeg_color, 0)
        sizes = grid.tile_height, grid.tile_width, image.channels, image.dtype.itemsize
        pixels = self.pixel_bytes, RGBA
        self._records = np.array(
            [(tables, len(self._tables), codec, color, *sizes, pixel, 0) for pixel in pixels],
            FORMAT,
        )
        first = int(self._records.ctypes.data)
        self.addresses = {self.pixel_bytes: first}
        if image.channels == 3 and image.dtype == np.uint8:
            self.addresses[RGBA] = first + FORMAT.itemsize
        # The records hold addresses of these arrays, which must live as long.
        self._places = [np.ascontiguousarray(each[0]) for each in (grid.offsets, grid.byte_counts)]
        places = [each.ctypes.data for each in self._places]
        level = (*places, grid.rows, grid.columns, image.height, image.width)
        self._level = np.array([level], LEVEL)
        self.level = int(self._level.ctypes.data)

    def records(self, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> NDArray[Any]:
        """Return `TILE` records of tiles by row and column, without parts."""
        (height, width), (high, wide) = self._size, self._tile
        records = np.zeros(len(rows), TILE)
        index = rows * self.columns + columns
        records["offset"], records["length"] = (each.ravel()[index] for each in self._places)
        records["height"] = np.minimum(high, height - rows * high)
        records["width"] = np.minimum(wide, width - columns * wide)
        return records

    def tile(self, room: NDArray[np.uint8], image: LevelLayout, record: Any) -> NDArray[Any]:
        """Return the pixels of a tile in its memory, in the size that its `TILE` record says."""
        height, width = int(record["height"]), int(record["width"])
        pixels = room[: height * width * self.pixel_bytes].view(image.dtype)
        return pixels.reshape(height, width, image.channels)


def native_format(image: LevelLayout) -> NativeFormat | None:
    """Describe a level to the core; None if only Python decodes its tiles."""
    encoding, grid = image.encoding, image.grid
    if image.parts or image.computed or image.library is not None:
        return None
    if grid.planes != 1 or grid.sizes is not None:
        return None
    if encoding.samples != image.channels or encoding.table is not None:
        return None
    if is_raw(image):
        return None if is_swapped(image) else NativeFormat(image, RAW)
    compression = BY_CODE.get(encoding.compression)
    if not isinstance(compression, ImageCompression) or compression.decode is not decode_jpeg:
        return None
    # 12 bits and lossless JPEG, restart intervals and scaled decoding are left to Python.
    plain = encoding.jpeg_header is None and encoding.jpeg_scale == 1
    if plain and encoding.dtype == "uint8" and encoding.jpeg_color in COLORS:
        return NativeFormat(image, JPEG)
    return None
