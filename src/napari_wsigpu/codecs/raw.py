"""Uncompressed tiles: which a device can lay out as they are stored, and where their bytes go."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.model.tags import COMPRESSION, FILLORDER, PREDICTOR

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from napari_wsigpu.model.layout import LevelLayout

NUMBERS = "iuf"
NOWHERE = -1
SMALLEST_READ = 64 << 10


class Segments(NamedTuple):
    """Segments of tiles in one buffer.

    Attributes
    ----------
    tile, start : ndarray of int64, shape (segments,)
        Index of the tile of each, and where it lies in the buffer, or `NOWHERE`.
    rows, pixels, channel : ndarray of int64, shape (segments,)
        The rows and the pixels a row that it has, and the first channel that it holds.
    plain : bool
        Whether each is a tile as it lies in memory, perhaps without its last rows.
    failures : dict of int to str
        Why tiles, by their index, have no segments here.
    """

    tile: NDArray[np.int64]
    start: NDArray[np.int64]
    rows: NDArray[np.int64]
    pixels: NDArray[np.int64]
    channel: NDArray[np.int64]
    plain: bool
    failures: dict[int, str]


def is_raw(level: LevelLayout) -> bool:
    """Whether a level's tiles hold samples as they are, in either byte order."""
    encoding = level.encoding
    return (
        encoding.compression == COMPRESSION.NONE
        and encoding.predictor == PREDICTOR.NONE
        and encoding.fill_order == FILLORDER.MSB2LSB
        and not encoding.blue_first
        and encoding.table is None
        and level.grid.sizes is None
        and level.dtype.kind in NUMBERS
    )


def is_swapped(level: LevelLayout) -> bool:
    """Whether the bytes of a raw level's samples are in the other order than this machine's."""
    stored = level.dtype.newbyteorder(level.encoding.byte_order)
    return stored.itemsize > 1 and not stored.isnative


def lies_decoded(level: LevelLayout) -> bool:
    """Whether tiles are stored as they come to lie in memory, and are worth a read each."""
    return (
        is_raw(level)
        and not is_swapped(level)
        and level.grid.planes == 1
        and level.tile_bytes >= SMALLEST_READ
    )


def segments_of(
    level: LevelLayout,
    tiles: NDArray[np.int64],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    present: NDArray[np.bool_],
) -> Segments:
    """Tell what the segments of raw tiles hold from how long they are.

    Parameters
    ----------
    level : LevelLayout
        The level.
    tiles : ndarray of int64, shape (tiles, 2)
        Row and column of each.
    starts, lengths : ndarray of int64, shape (planes, tiles)
        Where each segment lies in the buffer.
    present : ndarray of bool, shape (planes, tiles)
        Whether the file has it.
    """
    grid, samples = level.grid, level.encoding.samples
    pixel = samples * level.dtype.itemsize
    height = np.minimum(grid.tile_height, level.height - tiles[:, 0] * grid.tile_height)
    width = np.minimum(grid.tile_width, level.width - tiles[:, 1] * grid.tile_width)
    full = grid.tile_height * grid.tile_width * pixel
    found = np.minimum(lengths, full)
    rows, across = np.zeros_like(found), np.zeros_like(found)
    # Some writers cut tiles at the edges; what is as long as a full one is a full one.
    shapes = (height, width), (height, grid.tile_width), (grid.tile_height, grid.tile_width)
    for high, wide in shapes:
        size = high * wide * pixel
        # Behind a level's rows there may be others, and a part of one.
        fits = (found == size) | ((found > size) & (wide == grid.tile_width))
        rows, across = np.where(fits, high, rows), np.where(fits, wide, across)
    wrong = present & (rows == 0)
    failures = {
        index: f"it holds {found[np.argmax(wrong[:, index]), index]} bytes of {full}"
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
