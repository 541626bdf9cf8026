"""`ReadPlan`: which tiles the regions of one image need, and where each part of a tile goes.

A plan is data, computed with NumPy and without I/O. Planning knows regions and tiles; the backends
that carry a plan out, on the host or on a device, only decode tiles and copy their parts.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from napari_wsigpu.model.geometry import Rect, computed_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from napari_wsigpu.codecs.color import Color, ColorTable
    from napari_wsigpu.model.arrays import Integers, Mask
    from napari_wsigpu.model.geometry import Span
    from napari_wsigpu.model.layout import LevelLayout


Keep = Literal["all", "partly", "recurring", "later", "none"]

NOTHING = np.zeros(0, np.int64)
NO_LOCK = nullcontext()


@dataclass(frozen=True, eq=False)
class Regions:
    """Rectangles of one image; they may extend beyond it.

    Attributes
    ----------
    tops, lefts : ndarray of int64, shape (regions,)
        First row and first column of each rectangle, in pixels of the image.
    heights, widths : ndarray of int64, shape (regions,)
        Number of rows and columns of pixels to read from each rectangle.
    step : tuple of (int, int)
        Distance between the rows, and between the columns, that are read.
    """

    tops: Integers
    lefts: Integers
    heights: Integers
    widths: Integers
    step: tuple[int, int] = (1, 1)

    @classmethod
    def of(cls, rects: Iterable[Rect]) -> Regions:
        """Make regions of rectangles that may differ in size."""
        tops, lefts, heights, widths = np.array(list(rects), np.int64).reshape(-1, 4).T
        return cls(tops, lefts, heights, widths)

    @classmethod
    def one(cls, rect: Rect) -> Regions:
        """Make a single region."""
        regions = cls(*np.array(rect, np.int64).reshape(4, 1))
        # Fill the computed properties: deriving them from arrays takes 5 % of a cached read.
        vars(regions).update(corners=[(rect.top, rect.left)], shapes=[(rect.height, rect.width)])
        return regions

    @classmethod
    def alike(cls, tops: Integers, lefts: Integers, height: int, width: int) -> Regions:
        """Make regions of one size."""
        sizes = np.empty((2, len(tops)), np.int64)
        sizes[0], sizes[1] = height, width
        return cls(tops, lefts, *sizes)

    @classmethod
    def slice(cls, rows: Span, columns: Span) -> Regions:
        """Make a single region of rows and columns, which may have steps."""
        return replace(
            cls.one(Rect(rows.start, columns.start, rows.length, columns.length)),
            step=(rows.step, columns.step),
        )

    def __len__(self) -> int:
        return len(self.tops)

    @computed_once
    def corners(self) -> list[tuple[int, int]]:
        """Top and left of each region."""
        return list(zip(self.tops.tolist(), self.lefts.tolist(), strict=True))

    @computed_once
    def shapes(self) -> list[tuple[int, int]]:
        """Height and width of each region."""
        return list(zip(self.heights.tolist(), self.widths.tolist(), strict=True))

    @computed_once
    def offsets(self) -> Integers:
        """First pixel of each region, and the end of the last, in one buffer of all regions."""
        offsets = np.zeros(len(self) + 1, np.int64)
        np.cumsum(self.heights * self.widths, out=offsets[1:])
        return offsets


@dataclass(frozen=True, eq=False, slots=True)
class Pastes:
    """Rectangular parts of tiles and their positions in regions.

    Each attribute is an ndarray of int64 with one entry per part.

    Attributes
    ----------
    tile, region
        Index of the tile in its plan, and of the region.
    y, x
        First row and column of the part in the region.
    top, left
        First row and column of the part in the tile.
    height, width
        Size of the part in pixels of the region.
    """

    tile: Integers
    region: Integers
    y: Integers
    x: Integers
    top: Integers
    left: Integers
    height: Integers
    width: Integers

    def __len__(self) -> int:
        return len(self.tile)

    def __getitem__(self, chosen: Integers | Mask) -> Pastes:
        """Return the chosen parts."""
        return Pastes(*(getattr(self, field.name)[chosen] for field in fields(self)))


NO_PASTES = Pastes(*[NOTHING] * 8)


@dataclass(frozen=True, eq=False, slots=True)
class ReadPlan:
    """The tiles of one image that regions need, each once, and the parts to paste.

    Attributes
    ----------
    image : int
        Number of the image in its slide.
    regions : Regions
        The regions.
    tiles : ndarray of int64, shape (tiles, 2)
        Row and column of each tile to read, row by row. Tiles that show the background are
        left out.
    computed : ndarray of bool, shape (tiles,)
        Mask of the tiles that the file lacks; they are averaged from the finer level.
    pastes : Pastes
        The parts of these tiles, tile by tile.
    starts : ndarray of int64, shape (tiles + 1,)
        Index of each tile's first part in `pastes`; the last entry is the number of parts.
    blanks : Pastes
        Parts of regions that show the background instead of a tile.
    covered : ndarray of bool, shape (regions,)
        Mask of the regions that the image covers completely.
    channels : slice or None
        The channels of the regions that the plan pastes; None for all.
    """

    image: int
    regions: Regions
    tiles: Integers
    computed: Mask
    pastes: Pastes
    starts: Integers
    blanks: Pastes
    covered: Mask
    channels: slice | None = None

    def __repr__(self) -> str:
        shapes = {f"{height} x {width}" for height, width in self.regions.shapes}
        size = shapes.pop() if len(shapes) == 1 else "several sizes"
        return (
            f"<ReadPlan image {self.image}: {len(self.regions)} regions of {size}, "
            f"{len(self.tiles)} tiles ({np.count_nonzero(self.computed)} computed), "
            f"{len(self.pastes)} pastes, {len(self.blanks)} blank>"
        )

    def shown(self, channels: int) -> range:
        """Return the indices of the channels that the plan pastes, out of `channels`."""
        return range(channels)[self.channels or slice(None)]

    def pastes_of(self, tiles: Integers) -> Pastes:
        """Return the parts of the tiles at some indices."""
        if len(tiles) == len(self.tiles):
            return self.pastes
        chosen = np.zeros(len(self.tiles), np.bool_)
        chosen[tiles] = True
        return self.pastes[chosen[self.pastes.tile]]

    def regions_of(self, tile: int) -> list[int]:
        """Return the indices of the regions that show a tile."""
        used = self.pastes.region[self.starts[tile] : self.starts[tile + 1]]
        return sorted(set(used.tolist()))


class CancelledError(Exception):
    """Raised in a read that its caller has cancelled."""


class Cancellation:
    """A flag that stops reads; the native core checks it between tiles."""

    def __init__(self) -> None:
        # The core reads the flag by its address, so the array must live as long as any read.
        self._flag = np.zeros(1, np.int32)
        self.address = int(self._flag.ctypes.data)

    def cancel(self) -> None:
        """Stop all reads that use this flag."""
        self._flag[0] = 1

    def check(self) -> None:
        """Raise a `CancelledError` if the flag is set."""
        if self._flag[0]:
            raise CancelledError


NEVER = Cancellation()


@dataclass(frozen=True)
class ReadOptions:
    """How to read regions.

    Attributes
    ----------
    channel : int or None
        The only channel to read; None for all.
    tolerant : bool
        Show the background in place of tiles that fail to decode, instead of raising.
    keep : {"all", "partly", "recurring", "later", "none"}
        The tiles to cache: all; tiles that no region covers completely; all if tiles of the image
        recur while the cache holds them (`cache.Recurrence`); tiles that `later` selects; or none.
    table : ColorTable or None
        Converts pixels to sRGB; None to return them as stored.
    cancellation : Cancellation
        Stops the read between tiles or batches.
    later : callable or None
        ``later(n, tiles)``: mask of the tiles, of shape (tiles, 2), that are still needed after
        the first n regions.
    regions_done : int
        Number of regions read once this plan is done.
    lock : context manager
        Held while the host reads tiles, so that the next reader finds the tiles that this one kept.
    """

    channel: int | None = None
    tolerant: bool = False
    keep: Keep = "all"
    table: ColorTable | None = None
    cancellation: Cancellation = NEVER
    later: Callable[[int, Integers], Mask] | None = None
    regions_done: int = 0
    lock: AbstractContextManager[object] = NO_LOCK

    @property
    def color(self) -> Color:
        """Color of the tiles that are cached."""
        return "stored" if self.table is None else "srgb"

    def kept(self, plan: ReadPlan, image: LevelLayout, tiles: Integers) -> Mask:
        """Return the mask of the tiles to cache, given their indices in a plan."""
        if self.keep == "later" and self.later is not None:
            return self.later(self.regions_done, plan.tiles[tiles])
        if self.keep == "partly" and self.channel is None:
            return _partly_covered(plan, image)[tiles]
        return np.full(len(tiles), self.keep != "none", np.bool_)


def regions_with(plans: Iterable[ReadPlan], tiles: Iterable[tuple[int, int, int]]) -> list[int]:
    """Return the indices of the regions that show any of the tiles (image, row, column)."""
    found: set[int] = set()
    for image, row, column in tiles:
        for plan in plans:
            if plan.image == image:
                indices = np.flatnonzero((plan.tiles == (row, column)).all(axis=1))
                found.update(*(plan.regions_of(tile) for tile in indices.tolist()))
    return sorted(found)


def _partly_covered(plan: ReadPlan, image: LevelLayout) -> Mask:
    """Return the mask of the tiles that no region of a plan covers completely."""
    grid = image.grid
    height = np.minimum(grid.tile_height, image.height - plan.tiles[:, 0] * grid.tile_height)
    width = np.minimum(grid.tile_width, image.width - plan.tiles[:, 1] * grid.tile_width)
    pastes = plan.pastes
    whole = (pastes.height == height[pastes.tile]) & (pastes.width == width[pastes.tile])
    covered = np.zeros(len(plan.tiles), np.bool_)
    covered[pastes.tile[whole]] = True
    return ~covered
