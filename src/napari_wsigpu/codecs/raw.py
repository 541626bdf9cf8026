"""Raw tiles, which are not compressed: the levels that have them, and their segments."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.model.tags import COMPRESSION, FILLORDER, PREDICTOR

if TYPE_CHECKING:
    from napari_wsigpu.model.arrays import Integers, Mask
    from napari_wsigpu.model.layout import LevelLayout

NUMERIC_KINDS = "iuf"  # of NumPy
NOWHERE = -1
SMALLEST_READ = 64 << 10


class Segments(NamedTuple):
    """Segments of tiles in one buffer.

    Attributes
    ----------
    tile, start : ndarray of int64, shape (segments,)
        Index of each segment's tile, and its position in the buffer; `NOWHERE` if it is missing.
    rows, pixels, channel : ndarray of int64, shape (segments,)
        Number of rows, pixels per row, and first channel of each segment.
    plain : bool
        Whether each segment is laid out like its tile in memory, perhaps without the last rows.
    failures : dict of int to str
        Reasons why tiles have no segments in the result, by index of the tile.
    """

    tile: Integers
    start: Integers
    rows: Integers
    pixels: Integers
    channel: Integers
    plain: bool
    failures: dict[int, str]


def is_raw(level: LevelLayout) -> bool:
    """Whether a level's tiles contain plain samples, in either byte order."""
    encoding = level.encoding
    return (
        encoding.compression == COMPRESSION.NONE
        and encoding.predictor == PREDICTOR.NONE
        and encoding.fill_order == FILLORDER.MSB2LSB
        and not encoding.blue_first
        and encoding.table is None
        and encoding.kept_sample is None
        and level.grid.sizes is None
        and level.dtype.kind in NUMERIC_KINDS
    )


def is_swapped(level: LevelLayout) -> bool:
    """Whether the samples of a raw level are not in the byte order of this machine."""
    stored = level.dtype.newbyteorder(level.encoding.byte_order)
    return stored.itemsize > 1 and not stored.isnative


def is_stored_decoded(level: LevelLayout) -> bool:
    """Whether tiles are stored as they are laid out in memory, and large enough to read singly."""
    return (
        is_raw(level)
        and not is_swapped(level)
        and level.grid.planes == 1
        and level.tile_bytes >= SMALLEST_READ
    )


def segments_of(
    level: LevelLayout, tiles: Integers, starts: Integers, lengths: Integers, present: Mask
) -> Segments:
    """Determine the shape of raw tiles' segments from their lengths.

    Parameters
    ----------
    level : LevelLayout
        The level.
    tiles : ndarray of int64, shape (tiles, 2)
        Row and column of each tile.
    starts, lengths : ndarray of int64, shape (planes, tiles)
        Position and length of each segment in the buffer.
    present : ndarray of bool, shape (planes, tiles)
        Whether the file contains the segment.
    """
    grid, samples = level.grid, level.encoding.samples
    pixel_bytes = samples * level.dtype.itemsize
    height = np.minimum(grid.tile_height, level.height - tiles[:, 0] * grid.tile_height)
    width = np.minimum(grid.tile_width, level.width - tiles[:, 1] * grid.tile_width)
    full = grid.tile_height * grid.tile_width * pixel_bytes
    found = np.minimum(lengths, full)
    rows, across = np.zeros_like(found), np.zeros_like(found)
    # Some writers crop tiles at the edges. Later shapes win, so a full length means a full tile.
    shapes = (height, width), (height, grid.tile_width), (grid.tile_height, grid.tile_width)
    for high, wide in shapes:
        size = high * wide * pixel_bytes
        # More rows than the level has may follow, and the last one may be incomplete.
        fits = (found == size) | ((found > size) & (wide == grid.tile_width))
        rows, across = np.where(fits, high, rows), np.where(fits, wide, across)
    wrong = present & (rows == 0)
    failures = {
        index: f"it has {found[np.argmax(wrong[:, index]), index]} bytes instead of {full}"
        for index in np.flatnonzero(wrong.any(axis=0)).tolist()
    }
    chosen = planes, indices = np.nonzero(np.broadcast_to(~wrong.any(axis=0), present.shape))
    start = np.where(present, starts, NOWHERE)[chosen]
    rows = np.where(present, rows, grid.tile_height)[chosen]
    pixels = np.where(present, across, grid.tile_width)[chosen]
    plain = samples == level.channels and bool((pixels == grid.tile_width).all())
    return Segments(
        indices, start, rows, pixels, planes * samples, plain and not is_swapped(level), failures
    )
