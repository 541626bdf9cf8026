"""Records that describe a level to the native core, if the core can decode its tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.codecs.compressions import BY_CODE, ImageCompression
from napari_wsigpu.codecs.jpeg_tiles import decode_jpeg
from napari_wsigpu.codecs.raw import is_raw, is_swapped
from napari_wsigpu.native.tables import COLORS, FORMAT, JPEG, LEVEL, RAW, TILE

if TYPE_CHECKING:
    from napari_wsigpu.model.arrays import Array, ByteArray, Integers
    from napari_wsigpu.model.layout import LevelLayout

RGBA = 4  # bytes of a pixel


class NativeFormat:
    """The `LEVEL` record of a level, and two `FORMAT` records: for stored channels and for RGBA.

    Parameters
    ----------
    image : LevelLayout
        The level.
    codec : int
        `RAW` or `JPEG`.

    Attributes
    ----------
    is_raw : bool
        Whether the level's tiles are uncompressed.
    pixel_bytes : int
        Size of a decoded pixel in bytes.
    tile_bytes, columns : int
        Size of a decoded tile in bytes, and number of tiles per row.
    addresses : dict of int to int
        Memory address of each `FORMAT` record, by the size of a target pixel in bytes.
    level : int
        Memory address of the `LEVEL` record.
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
        pixel_sizes = self.pixel_bytes, RGBA
        self._records = np.array(
            [(tables, len(self._tables), codec, color, *sizes, size, 0) for size in pixel_sizes],
            FORMAT,
        )
        first = int(self._records.ctypes.data)
        self.addresses = {self.pixel_bytes: first}
        if image.channels == 3 and image.dtype == np.uint8:
            self.addresses[RGBA] = first + FORMAT.itemsize
        # The records contain the addresses of these arrays, which must live as long as the records.
        self._ranges = [np.ascontiguousarray(each[0]) for each in (grid.offsets, grid.byte_counts)]
        addresses = [each.ctypes.data for each in self._ranges]
        level = (*addresses, grid.rows, grid.columns, image.height, image.width)
        self._level = np.array([level], LEVEL)
        self.level = int(self._level.ctypes.data)

    def records(self, rows: Integers, columns: Integers) -> Array:
        """Return `TILE` records, without parts, for tiles at these rows and columns."""
        (height, width), (high, wide) = self._size, self._tile
        records = np.zeros(len(rows), TILE)
        index = rows * self.columns + columns
        records["offset"], records["length"] = (each.ravel()[index] for each in self._ranges)
        records["height"] = np.minimum(high, height - rows * high)
        records["width"] = np.minimum(wide, width - columns * wide)
        return records

    def tile(self, memory: ByteArray, image: LevelLayout, record: np.void) -> Array:
        """Return a view of a decoded tile's memory, in the size that its `TILE` record states."""
        height, width = int(record["height"]), int(record["width"])
        pixels = memory[: height * width * self.pixel_bytes].view(image.dtype)
        return pixels.reshape(height, width, image.channels)


def native_format(image: LevelLayout) -> NativeFormat | None:
    """Return the records for a level; None if the core can't decode its tiles."""
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
    # The core does not support 12-bit or lossless JPEG, restart intervals or scaled decoding.
    plain = encoding.jpeg_header is None and encoding.jpeg_scale == 1
    if plain and encoding.dtype == "uint8" and encoding.jpeg_color in COLORS:
        return NativeFormat(image, JPEG)
    return None
