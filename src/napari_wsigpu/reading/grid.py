"""`Grid`: regions that cover a level, read so that each stored tile is decoded once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.model.errors import RegionError
from napari_wsigpu.reading.average import EDGE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from napari_wsigpu.model.arrays import Integers, Mask
    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.reading.scaling import Target


# Bands with fewer rows of regions are not worth reading separately.
FEWEST_ROWS = 8


@dataclass(frozen=True)
class Grid:
    """Regions of one size, row by row, that cover a level.

    Attributes
    ----------
    image : LevelLayout
        The level.
    size : tuple of (int, int)
        Height and width of a region in pixels of the level.
    tops, lefts : ndarray of int64
        First pixel of each row and each column of regions, in pixels of the level.
    """

    image: LevelLayout
    size: tuple[int, int]
    tops: Integers
    lefts: Integers

    @classmethod
    def over(cls, image: LevelLayout, target: Target, size: tuple[int, int], overlap: int) -> Grid:
        """Cover a level with regions.

        Parameters
        ----------
        image : LevelLayout
            The level.
        target : Target
            The level and its scale.
        size : tuple of (int, int)
            Height and width of a region in output pixels.
        overlap : int
            Number of output pixels that neighboring regions share.

        Raises
        ------
        RegionError
            If the overlap is not smaller than the regions.
        """
        if not isinstance(overlap, int | np.integer) or not 0 <= overlap < min(size):
            raise RegionError(
                f"overlap is {overlap!r}; it must be a whole number >= 0 and less than the size, "
                f"{min(size)}."
            )
        overlap = int(overlap)
        (height, width), (down, across) = size, target.scale
        tops = _starts(image.height, height, overlap, down)
        lefts = _starts(image.width, width, overlap, across)
        spans = math.ceil(height * down - EDGE), math.ceil(width * across - EDGE)
        return cls(image, spans, tops, lefts)

    def __len__(self) -> int:
        return len(self.tops) * len(self.lefts)

    def corners(self, first: int, last: int) -> tuple[Integers, Integers]:
        """Return the tops and lefts of the regions `first` to `last` - 1."""
        rows, columns = np.divmod(np.arange(first, min(last, len(self))), len(self.lefts))
        return self.tops[rows], self.lefts[columns]

    def bands(self, most: int) -> list[range]:
        """Split the regions into at most `most` bands of whole rows, to read concurrently."""
        rows = len(self.tops)
        count = max(1, min(most, rows // FEWEST_ROWS))
        edges = [number * rows // count * len(self.lefts) for number in range(count + 1)]
        return [range(first, last) for first, last in pairwise(edges)]

    def needed_after(self, band: range, first: int, count: int, tiles: Integers) -> Mask:
        """Return the mask of tiles that are still needed after a read of regions in a band.

        Parameters
        ----------
        band : range
            Regions that are read in order. Tiles that neighboring bands share always count as
            needed, since the progress of other bands is unknown.
        first : int
            Index of the first region of this read.
        count : int
            Number of regions in this read.
        tiles : ndarray of int64, shape (tiles, 2)
            Row and column of each tile.
        """
        grid = self.image.grid
        top, bottom = tiles[:, 0] * grid.tile_height, (tiles[:, 0] + 1) * grid.tile_height
        rows = range(band.start // len(self.lefts), band.stop // len(self.lefts))
        # Row and column of the last region of the band that shows each tile.
        row = np.minimum(np.searchsorted(self.tops, bottom) - 1, rows.stop - 1)
        column = np.searchsorted(self.lefts, (tiles[:, 1] + 1) * grid.tile_width) - 1
        needed: Mask = row * len(self.lefts) + column >= first + count
        if rows.start:
            needed |= top < self.tops[rows.start - 1] + self.size[0]
        if rows.stop < len(self.tops):
            needed |= bottom > self.tops[rows.stop]
        return needed


def _starts(length: int, side: int, overlap: int, scale: float) -> Integers:
    """Return the first pixel of each region along an axis, in pixels of the level."""
    count = max(1, math.ceil((length / scale - overlap) / (side - overlap) - EDGE))
    starts: NDArray[np.float64] = np.floor(np.arange(count) * ((side - overlap) * scale) + 0.5)
    return starts.astype(np.int64)
