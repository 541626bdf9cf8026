"""`TileSchedule`: which tiles a known sequence of regions will need, and when."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from napari_wsigpu.model.arrays import Integers, Mask
    from napari_wsigpu.model.layout import LevelLayout, TileGrid
    from napari_wsigpu.reading.plan import Regions


# Longer schedules are not built. An access takes 8 bytes.
MAX_ACCESSES = 1 << 22
NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class TileSchedule:
    """The accesses of a sequence of regions to the tiles of a level.

    Attributes
    ----------
    grid : TileGrid
        Grid of the level's tiles.
    count : int
        Number of regions.
    accesses : ndarray of int64
        One entry per access, sorted: the tile's number in the grid times `count`, plus the index
        of the region. The last entry, `NEVER`, ends every search.
    horizon : int
        A tile is worth keeping if it is needed again within this many regions. The number is the
        largest for which the kept tiles, on average, fit into the room for them.
    lock : lock
        Held while regions are read, so that the next reader finds the tiles that this one kept.
    """

    grid: TileGrid
    count: int
    accesses: Integers
    horizon: int
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, image: LevelLayout, regions: Regions, room: int) -> TileSchedule | None:
        """Build the schedule of regions that are read in order; None if it would be too long.

        Parameters
        ----------
        image : LevelLayout
            The level.
        regions : Regions
            The regions.
        room : int
            Bytes that kept tiles may occupy.
        """
        grid, count = image.grid, len(regions)
        accesses = _accesses(grid, regions)
        if accesses is None:
            return None
        gaps = np.diff(accesses)[np.diff(accesses // max(1, count)) == 0]
        gaps.sort()
        # A tile kept from one access to the next occupies its room for that many regions, so
        # the shortest gaps come first until the room is used up.
        fitting = np.searchsorted(np.cumsum(gaps), count * (room // image.tile_bytes), "right")
        return cls(grid, count, accesses, int(gaps[fitting]) - 1 if fitting < len(gaps) else count)

    def after(self, first: int) -> UpcomingTiles:
        """Return the test for tiles worth keeping, for a read that starts at region `first`."""
        return UpcomingTiles(self, first)


@dataclass(frozen=True, eq=False)
class UpcomingTiles:
    """Tests which tiles are needed again within the horizon of a schedule.

    Attributes
    ----------
    schedule : TileSchedule
        The schedule.
    first : int
        Index of the first region of the read.
    """

    schedule: TileSchedule
    first: int

    def __call__(self, past: int, tiles: Integers) -> Mask:
        """Return the mask of tiles, of shape (tiles, 2), to keep once `past` regions are read."""
        grid, count, accesses = self.schedule.grid, self.schedule.count, self.schedule.accesses
        start = min(self.first + past, count)
        own = (tiles[:, 0] * grid.columns + tiles[:, 1]) * count
        next_access = accesses[np.searchsorted(accesses, own + start)]
        return next_access < own + min(start + self.schedule.horizon, count)


def _accesses(grid: TileGrid, regions: Regions) -> Integers | None:
    """Return `TileSchedule.accesses`; None if there may be more than `MAX_ACCESSES`."""
    count = len(regions)
    number = np.arange(count)
    rows, columns = (
        (np.maximum(start // side, 0), np.minimum((start + length - 1) // side, most - 1))
        for start, length, side, most in (
            (regions.tops, regions.heights, grid.tile_height, grid.rows),
            (regions.lefts, regions.widths, grid.tile_width, grid.columns),
        )
    )
    spans = [int((last - first).max(initial=-1)) + 1 for first, last in (rows, columns)]
    if spans[0] * spans[1] * count > MAX_ACCESSES:
        return None
    found = []
    for down in range(spans[0]):
        for across in range(spans[1]):
            row, column = rows[0] + down, columns[0] + across
            inside = (row <= rows[1]) & (column <= columns[1])
            found.append(((row * grid.columns + column) * count + number)[inside])
    accesses: Integers = np.concatenate([np.array([NEVER]), *found])
    accesses.sort()
    return accesses
