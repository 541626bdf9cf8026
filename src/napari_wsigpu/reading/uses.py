"""`TileUses`: which tiles regions want that are read one after another, and how soon again."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from napari_wsigpu.model.layout import LevelLayout, TileGrid
    from napari_wsigpu.reading.plan import Regions

    Integers = NDArray[np.int64]

# More, of 8 bytes each, are not looked at.
MOST_USES = 1 << 22
NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class TileUses:
    """Which tiles of a level a run of regions uses, and when.

    Attributes
    ----------
    grid : TileGrid
        The level's tiles.
    count : int
        How many regions there are.
    uses : ndarray of int64
        Tile by tile, when each is used: its number in the grid times `count`, and the number of
        the region. The last one is `NEVER`.
    soon : int
        A tile that is wanted again within so many regions is worth keeping: those that are take
        no more room, on average, than there is.
    turn : lock
        Who reads regions holds it, so that the next ones find what these keep.
    """

    grid: TileGrid
    count: int
    uses: Integers
    soon: int
    turn: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, image: LevelLayout, regions: Regions, room: int) -> TileUses | None:
        """Look through regions that are read in their order; None if they use too many tiles.

        Parameters
        ----------
        image : LevelLayout
            The level.
        regions : Regions
            What will be read of it.
        room : int
            Bytes that tiles may take that are kept.
        """
        grid, count = image.grid, len(regions)
        uses = _uses(grid, regions)
        if uses is None:
            return None
        gaps = np.diff(uses)[np.diff(uses // max(1, count)) == 0]
        gaps.sort()
        # A tile that is kept from one use to the next takes its room so long.
        taken = np.searchsorted(np.cumsum(gaps), count * (room // image.tile_bytes), "right")
        return cls(grid, count, uses, int(gaps[taken]) - 1 if taken < len(gaps) else count)

    def after(self, first: int) -> Wanted:
        """Return what tells which tiles are wanted again soon, for who reads on from a region."""
        return Wanted(self, first)


@dataclass(frozen=True, eq=False)
class Wanted:
    """Tells which tiles are wanted again soon.

    Attributes
    ----------
    uses : TileUses
        When all are.
    first : int
        The region that is read next.
    """

    uses: TileUses
    first: int

    def __call__(self, past: int, tiles: Integers) -> NDArray[np.bool_]:
        """Return which tiles, of shape (tiles, 2), are once so many regions are read."""
        grid, count, uses = self.uses.grid, self.uses.count, self.uses.uses
        begin = min(self.first + past, count)
        own = (tiles[:, 0] * grid.columns + tiles[:, 1]) * count
        next_use = uses[np.searchsorted(uses, own + begin)]
        found: NDArray[np.bool_] = next_use < own + min(begin + self.uses.soon, count)
        return found


def _uses(grid: TileGrid, regions: Regions) -> Integers | None:
    """Return all uses in their order, see `TileUses`; None if they may be too many."""
    count = len(regions)
    number = np.arange(count)
    rows, columns = (
        (
            np.maximum(begin // side, 0),
            np.minimum((begin + length - 1) // side, most - 1),
        )
        for begin, length, side, most in (
            (regions.tops, regions.heights, grid.tile_height, grid.rows),
            (regions.lefts, regions.widths, grid.tile_width, grid.columns),
        )
    )
    spans = [int((last - first).max(initial=-1)) + 1 for first, last in (rows, columns)]
    if spans[0] * spans[1] * count > MOST_USES:
        return None
    found = []
    for down in range(spans[0]):
        for across in range(spans[1]):
            row, column = rows[0] + down, columns[0] + across
            inside = (row <= rows[1]) & (column <= columns[1])
            found.append(((row * grid.columns + column) * count + number)[inside])
    uses: Integers = np.concatenate([np.array([NEVER]), *found])
    uses.sort()
    return uses
