"""Raw tiles, which are not compressed: the levels that have them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from napari_wsigpu.model.tags import COMPRESSION, FILLORDER, PREDICTOR

if TYPE_CHECKING:
    from napari_wsigpu.model.layout import LevelLayout

NUMERIC_KINDS = "iuf"  # of NumPy
SMALLEST_READ = 64 << 10


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
