"""`ReadPlan`: which tiles many regions of one image need, and which part of each goes where.

Made by NumPy alone, without I/O, and in the same way for one region as for a thousand. Who carries
it out, on the host or a device, knows nothing of regions; who asks knows nothing of tiles.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from napari_wsigpu.model.geometry import Rect, computed_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.color import ColorTable
    from napari_wsigpu.model.geometry import Span
    from napari_wsigpu.model.layout import LevelLayout

    Integers = NDArray[np.int64]

Keep = Literal["all", "partly", "recurring", "later", "none"]

NOTHING = np.zeros(0, np.int64)
NO_TURN = nullcontext()


@dataclass(frozen=True, eq=False)
class Regions:
    """Rectangles of one image, which may reach beyond it.

    Attributes
    ----------
    tops, lefts : ndarray of int64, shape (regions,)
        Where each begins, in pixels of the image.
    heights, widths : ndarray of int64, shape (regions,)
        How many rows and columns of pixels are wanted of it.
    step : tuple of (int, int)
        Every how many rows and columns of the image one is wanted.
    """

    tops: Integers
    lefts: Integers
    heights: Integers
    widths: Integers
    step: tuple[int, int] = (1, 1)

    @classmethod
    def of(cls, rects: Iterable[Rect]) -> Regions:
        """Take rectangles of any sizes."""
        tops, lefts, heights, widths = np.array(list(rects), np.int64).reshape(-1, 4).T
        return cls(tops, lefts, heights, widths)

    @classmethod
    def one(cls, rect: Rect) -> Regions:
        """Take one rectangle."""
        regions = cls(*np.array(rect, np.int64).reshape(4, 1))
        # Known already: where tiles are cached, to find them again takes a twentieth of the time.
        vars(regions).update(
            corners=[(rect.top, rect.left)],
            shapes=[(rect.height, rect.width)],
        )
        return regions

    @classmethod
    def alike(cls, tops: Integers, lefts: Integers, height: int, width: int) -> Regions:
        """Take rectangles of one size."""
        sizes = np.empty((2, len(tops)), np.int64)
        sizes[0], sizes[1] = height, width
        return cls(tops, lefts, *sizes)

    @classmethod
    def slice(cls, rows: Span, columns: Span) -> Regions:
        """Take the one rectangle of rows and columns that may leave some out."""
        return replace(
            cls.one(Rect(rows.start, columns.start, rows.length, columns.length)),
            step=(rows.step, columns.step),
        )

    def __len__(self) -> int:
        return len(self.tops)

    @computed_once
    def corners(self) -> list[tuple[int, int]]:
        """Top and left of each."""
        return list(zip(self.tops.tolist(), self.lefts.tolist(), strict=True))

    @computed_once
    def shapes(self) -> list[tuple[int, int]]:
        """Height and width of each."""
        return list(zip(self.heights.tolist(), self.widths.tolist(), strict=True))

    @computed_once
    def offsets(self) -> Integers:
        """Where each begins, and the last one ends, if the pixels of all lie one after another."""
        offsets = np.zeros(len(self) + 1, np.int64)
        np.cumsum(self.heights * self.widths, out=offsets[1:])
        return offsets


@dataclass(frozen=True, eq=False, slots=True)
class Pastes:
    """Parts of tiles, and their places in regions; each an ndarray of int64, one entry a part.

    Attributes
    ----------
    tile, region
        Index of the tile in its plan, and of the region.
    y, x
        The part's first row and column in the region.
    top, left
        Its first row and column in the tile.
    height, width
        Its size in pixels of the region.
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

    def __getitem__(self, chosen: NDArray[np.int64] | NDArray[np.bool_]) -> Pastes:
        """Return some of them."""
        return Pastes(*(getattr(self, field.name)[chosen] for field in fields(self)))


NO_PASTES = Pastes(*[NOTHING] * 8)


@dataclass(frozen=True, eq=False, slots=True)
class ReadPlan:
    """What many regions need of one image: tiles, each once, and the way of their pixels.

    Attributes
    ----------
    image : int
        Number of the image among those of its slide.
    regions : Regions
        What was asked for.
    tiles : ndarray of int64, shape (tiles, 2)
        Row and column of each tile that is needed, row by row; none that shows the background.
    computed : ndarray of bool, shape (tiles,)
        Which of them the file lacks, so that they are averaged from the finer level.
    pastes : Pastes
        Where their parts go, tile by tile.
    starts : ndarray of int64, shape (tiles + 1,)
        Index of each tile's first paste, and their number.
    blanks : Pastes
        Where regions show the background instead of a tile.
    covered : ndarray of bool, shape (regions,)
        Which regions lie in the image as a whole.
    channels : slice or None
        The channels of the regions that it pastes; None for all.
    """

    image: int
    regions: Regions
    tiles: Integers
    computed: NDArray[np.bool_]
    pastes: Pastes
    starts: Integers
    blanks: Pastes
    covered: NDArray[np.bool_]
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
        """Return which channels of so many the plan pastes."""
        return range(channels)[self.channels or slice(None)]

    def pastes_of(self, tiles: Integers) -> Pastes:
        """Return the parts of some tiles, by their indices."""
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
    """Nobody waits for the pixels any more."""


class Cancellation:
    """A flag that ends reads which nobody waits for any more; the native core looks at it too."""

    def __init__(self) -> None:
        self._flag = np.zeros(1, np.int32)
        self.address = int(self._flag.ctypes.data)

    def cancel(self) -> None:
        """End the reads that this flag was given to."""
        self._flag[0] = 1

    def check(self) -> None:
        """Raise a `CancelledError` if the flag is set."""
        if self._flag[0]:
            raise CancelledError


NEVER = Cancellation()


@dataclass(frozen=True)
class ReadOptions:
    """How regions are read.

    Attributes
    ----------
    channel : int or None
        One channel instead of all.
    tolerant : bool
        Show the background for tiles that can't be decoded, instead of raising.
    keep : {"all", "partly", "recurring", "later", "none"}
        Which tiles stay in the cache: all; those that no region takes whole; all if tiles like
        these were read repeatedly; those that `later` selects; or none.
    table : ColorTable or None
        The colours that pixels get.
    cancellation : Cancellation
        Stops the read between two tiles or batches.
    later : callable or None
        ``later(n, tiles)``: mask of the tiles, of shape (tiles, 2), that are still needed after
        the first n regions.
    past : int
        Number of regions read once this plan is done.
    turn : context manager
        Held while tiles are read on the host, so that the next reader finds what this one kept.
    """

    channel: int | None = None
    tolerant: bool = False
    keep: Keep = "all"
    table: ColorTable | None = None
    cancellation: Cancellation = NEVER
    later: Callable[[int, Integers], NDArray[np.bool_]] | None = None
    past: int = 0
    turn: AbstractContextManager[Any] = NO_TURN

    def kept(self, plan: ReadPlan, image: LevelLayout, tiles: Integers) -> NDArray[np.bool_]:
        """Return which of some tiles of a plan, by their indices, stay for others."""
        if self.keep == "later" and self.later is not None:
            return self.later(self.past, plan.tiles[tiles])
        if self.keep == "partly" and self.channel is None:
            return _partly_taken(plan, image)[tiles]
        return np.full(len(tiles), self.keep != "none", np.bool_)


def regions_with(plans: Iterable[ReadPlan], tiles: Iterable[tuple[int, int, int]]) -> list[int]:
    """Return the indices of the regions that show any of some tiles: (image, row, column) each."""
    found: set[int] = set()
    for image, row, column in tiles:
        for plan in plans:
            if plan.image == image:
                these = np.flatnonzero((plan.tiles == (row, column)).all(axis=1))
                found.update(*(plan.regions_of(tile) for tile in these.tolist()))
    return sorted(found)


def tile_rect(image: LevelLayout, row: int, column: int) -> Rect:
    """Return the pixels of an image that lie in a tile."""
    grid = image.grid
    top, left = row * grid.tile_height, column * grid.tile_width
    height, width = image.height - top, image.width - left
    return Rect(top, left, min(grid.tile_height, height), min(grid.tile_width, width))


def _partly_taken(plan: ReadPlan, image: LevelLayout) -> NDArray[np.bool_]:
    """Return which tiles of a plan hold pixels that none of its regions shows as a whole."""
    grid = image.grid
    height = np.minimum(grid.tile_height, image.height - plan.tiles[:, 0] * grid.tile_height)
    width = np.minimum(grid.tile_width, image.width - plan.tiles[:, 1] * grid.tile_width)
    pastes = plan.pastes
    whole = (pastes.height == height[pastes.tile]) & (pastes.width == width[pastes.tile])
    taken = np.zeros(len(plan.tiles), np.bool_)
    taken[pastes.tile[whole]] = True
    return ~taken
