"""A whole level as a grid of regions, each stored tile of which is decoded once."""

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

    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.reading.scaling import Target

    Integers = NDArray[np.int64]


# Fewer rows of regions are not worth a band of their own.
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
        Where the rows and the columns of regions begin, in pixels of the level.
    """

    image: LevelLayout
    size: tuple[int, int]
    tops: Integers
    lefts: Integers

    @classmethod
    def over(cls, image: LevelLayout, target: Target, size: tuple[int, int], overlap: int) -> Grid:
        """Lay regions over a level.

        Parameters
        ----------
        image : LevelLayout
            The level.
        target : Target
            How many of its pixels one of a region spans.
        size : tuple of (int, int)
            Height and width of a region, in its own pixels.
        overlap : int
            How many of its pixels a region shares with the next one.

        Raises
        ------
        RegionError
            If regions would not get on.
        """
        if not isinstance(overlap, int | np.integer) or not 0 <= overlap < min(size):
            raise RegionError(
                f"overlap is {overlap!r}; it has to be a whole number >= 0 and below the size, "
                f"{min(size)}."
            )
        (height, width), (down, across) = size, target.scale
        tops = _starts(image.height, height, overlap, down)
        lefts = _starts(image.width, width, overlap, across)
        spans = math.ceil(height * down - EDGE), math.ceil(width * across - EDGE)
        return cls(image, spans, tops, lefts)

    def __len__(self) -> int:
        return len(self.tops) * len(self.lefts)

    def corners(self, first: int, last: int) -> tuple[Integers, Integers]:
        """Return tops and lefts of some of the regions."""
        rows, columns = np.divmod(np.arange(first, min(last, len(self))), len(self.lefts))
        return self.tops[rows], self.lefts[columns]

    def bands(self, most: int) -> list[range]:
        """Cut the regions into at most so many bands of whole rows, to be read side by side."""
        rows = len(self.tops)
        count = max(1, min(most, rows // FEWEST_ROWS))
        edges = [number * rows // count * len(self.lefts) for number in range(count + 1)]
        return [range(first, last) for first, last in pairwise(edges)]

    def wanted_after(
        self, band: range, first: int, past: int, tiles: Integers
    ) -> NDArray[np.bool_]:
        """Return which tiles will be wanted when more regions of a band are read.

        Parameters
        ----------
        band : range
            The regions that are read one after the other. Its first and last rows may share tiles
            with the bands beside it, of which nobody knows how far they are.
        first : int
            Number of the first region of the band that was not read before.
        past : int
            How many are read now.
        tiles : ndarray of int64, shape (tiles, 2)
            Row and column of each.
        """
        grid = self.image.grid
        top, bottom = tiles[:, 0] * grid.tile_height, (tiles[:, 0] + 1) * grid.tile_height
        rows = range(band.start // len(self.lefts), band.stop // len(self.lefts))
        # The last region of the band that shows a tile.
        row = np.minimum(np.searchsorted(self.tops, bottom) - 1, rows.stop - 1)
        column = np.searchsorted(self.lefts, (tiles[:, 1] + 1) * grid.tile_width) - 1
        wanted: NDArray[np.bool_] = row * len(self.lefts) + column >= first + past
        if rows.start:
            wanted |= top < self.tops[rows.start - 1] + self.size[0]
        if rows.stop < len(self.tops):
            wanted |= bottom > self.tops[rows.stop]
        return wanted


def _starts(length: int, side: int, overlap: int, scale: float) -> Integers:
    """Return where regions begin that cover an axis, in pixels of the level."""
    count = max(1, math.ceil((length / scale - overlap) / (side - overlap) - EDGE))
    starts: NDArray[np.float64] = np.floor(np.arange(count) * ((side - overlap) * scale) + 0.5)
    return starts.astype(np.int64)
