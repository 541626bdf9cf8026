"""`ReadPlan`: which tiles many regions of one image need, and which part of each goes where.

Made by NumPy alone, without I/O, and in the same way for one region as for a thousand. Who carries
it out, on the host or a device, knows nothing of regions; who asks knows nothing of tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from napari_wsigpu.geometry import Rect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.color import ColorTable
    from napari_wsigpu.geometry import Span
    from napari_wsigpu.layout import LevelLayout, Pieces

    Integers = NDArray[np.int64]

Keep = Literal["all", "partly", "recurring", "later", "none"]

NOTHING = np.zeros(0, np.int64)


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
    def alike(cls, tops: Integers, lefts: Integers, height: int, width: int) -> Regions:
        """Take rectangles of one size."""
        sizes = np.empty((2, len(tops)), np.int64)
        sizes[0], sizes[1] = height, width
        return cls(tops, lefts, *sizes)

    @classmethod
    def slice(cls, rows: Span, columns: Span) -> Regions:
        """Take the one rectangle of rows and columns that may leave some out."""
        return replace(
            cls.of([Rect(rows.start, columns.start, rows.length, columns.length)]),
            step=(rows.step, columns.step),
        )

    def __len__(self) -> int:
        return len(self.tops)

    @cached_property
    def corners(self) -> list[tuple[int, int]]:
        """Top and left of each."""
        return list(zip(self.tops.tolist(), self.lefts.tolist(), strict=True))

    @cached_property
    def shapes(self) -> list[tuple[int, int]]:
        """Height and width of each."""
        return list(zip(self.heights.tolist(), self.widths.tolist(), strict=True))

    @cached_property
    def offsets(self) -> Integers:
        """Where each begins, and the last one ends, if the pixels of all lie one after another."""
        return np.concatenate([[0], np.cumsum(self.heights * self.widths)])


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
    """

    image: int
    regions: Regions
    tiles: Integers
    computed: NDArray[np.bool_]
    pastes: Pastes
    starts: Integers
    blanks: Pastes
    covered: NDArray[np.bool_]

    def __repr__(self) -> str:
        shapes = {f"{height} x {width}" for height, width in self.regions.shapes}
        size = shapes.pop() if len(shapes) == 1 else "several sizes"
        return (
            f"<ReadPlan image {self.image}: {len(self.regions)} regions of {size}, "
            f"{len(self.tiles)} tiles ({np.count_nonzero(self.computed)} computed), "
            f"{len(self.pastes)} pastes, {len(self.blanks)} blank>"
        )

    def regions_of(self, tile: int) -> list[int]:
        """Return the indices of the regions that show a tile."""
        used = self.pastes.region[self.starts[tile] : self.starts[tile + 1]]
        return sorted(set(used.tolist()))


@dataclass(frozen=True)
class Wish:
    """How a plan is to be carried out.

    Attributes
    ----------
    channel : int or None
        One channel instead of all.
    tolerant : bool
        Show the background for tiles that can't be decoded, instead of raising.
    patient : bool
        Rather raise than show the background because the file can't be read now.
    keep : {"all", "partly", "recurring", "later", "none"}
        Which tiles stay in the cache: all, those that no region takes whole, all if such tiles
        have been wanted again lately, those of `later`, or none.
    table : ColorTable or None
        The colours that pixels get.
    check : callable
        Called between batches; may raise to end the work.
    later : callable or None
        Tells which tiles, of shape (tiles, 2), other regions will want.
    """

    channel: int | None = None
    tolerant: bool = False
    patient: bool = False
    keep: Keep = "all"
    table: ColorTable | None = None
    check: Callable[[], None] = lambda: None
    later: Callable[[NDArray[np.int64]], NDArray[np.bool_]] | None = None


def plan_regions(
    number: int, images: Mapping[int, LevelLayout], regions: Regions
) -> list[ReadPlan]:
    """Plan regions of an image; of a mosaic, one plan a picture, those on top last.

    Parameters
    ----------
    number : int
        Number of the image.
    images : Mapping of int to LevelLayout
        All images of the slide, those that lie on mosaics too.
    regions : Regions
        What is wanted of it.

    Returns
    -------
    list of ReadPlan
        To be carried out in this order, into the same pixels. A region that no plan covers shows
        the background where nothing is pasted.
    """
    image = images[number]
    if not image.parts and len(regions) == 1 and regions.step == (1, 1):
        return [_plan_one(number, image, regions)]
    if not image.parts:
        rows = _whole(regions.tops, regions.step[0], regions.heights, image.height)
        columns = _whole(regions.lefts, regions.step[1], regions.widths, image.width)
        return [_plan(number, image, regions, rows, columns)]
    numbers = {picture: index for index, picture in images.items()}
    plans = []
    for part in reversed(image.parts):
        rows = _laid(regions.tops, regions.step[0], regions.heights, image.height, part.rows)
        columns = _laid(regions.lefts, regions.step[1], regions.widths, image.width, part.columns)
        plan = _plan(numbers[part.image], part.image, regions, rows, columns)
        if len(plan.pastes) or len(plan.blanks):
            plans.append(plan)
    return plans


def regions_with(plans: Iterable[ReadPlan], tiles: Iterable[tuple[int, int, int]]) -> list[int]:
    """Return the indices of the regions that show any of some tiles: (image, row, column) each."""
    found: set[int] = set()
    for image, row, column in tiles:
        for plan in plans:
            if plan.image == image:
                these = np.flatnonzero((plan.tiles == (row, column)).all(axis=1))
                found.update(*(plan.regions_of(tile) for tile in these.tolist()))
    return sorted(found)


def plan_tiles(
    number: int, images: Mapping[int, LevelLayout], tiles: Sequence[tuple[int, int]]
) -> list[ReadPlan]:
    """Plan whole tiles of an image, cut to it, each as a region."""
    image = images[number]
    return plan_regions(number, images, Regions.of(tile_rect(image, *tile) for tile in tiles))


def tile_rect(image: LevelLayout, row: int, column: int) -> Rect:
    """Return the pixels of an image that lie in a tile."""
    grid = image.grid
    top, left = row * grid.tile_height, column * grid.tile_width
    height, width = image.height - top, image.width - left
    return Rect(top, left, min(grid.tile_height, height), min(grid.tile_width, width))


def partly_taken(plan: ReadPlan, image: LevelLayout) -> NDArray[np.bool_]:
    """Return which tiles of a plan hold pixels that none of its regions shows as a whole."""
    grid = image.grid
    height = np.minimum(grid.tile_height, image.height - plan.tiles[:, 0] * grid.tile_height)
    width = np.minimum(grid.tile_width, image.width - plan.tiles[:, 1] * grid.tile_width)
    pastes = plan.pastes
    whole = (pastes.height == height[pastes.tile]) & (pastes.width == width[pastes.tile])
    taken = np.zeros(len(plan.tiles), np.bool_)
    taken[pastes.tile[whole]] = True
    return ~taken


class _Stretch(NamedTuple):
    """Runs of wanted positions along one axis, whose distance in the image is the same.

    Attributes
    ----------
    region, start : ndarray of int64
        Whose they are, and the position of that region's first one in the stored picture, if it
        went on there as it does in the run.
    first, end : ndarray of int64
        Which positions of the region these are.
    """

    region: Integers
    start: Integers
    first: Integers
    end: Integers
    step: int


class _Cuts(NamedTuple):
    """A stretch, cut where tiles begin: of each piece its tile, and where it lies in both."""

    region: Integers
    tile: Integers
    source: Integers
    target: Integers
    length: Integers


def _whole(starts: Integers, step: int, counts: Integers, extent: int) -> _Stretch:
    """Return the positions that lie in an image."""
    first = np.maximum(0, -(starts // step))
    end = np.minimum(counts, -((starts - extent) // step))
    return _Stretch(np.arange(len(starts)), starts, first, end, step)


def _laid(starts: Integers, step: int, counts: Integers, extent: int, pieces: Pieces) -> _Stretch:
    """Return the positions at which a picture lies on a mosaic, in that picture's pixels."""
    begins = np.maximum(pieces.starts, 0)
    ends = np.minimum(np.append(pieces.starts[1:], pieces.end), extent)
    last = starts + (counts - 1) * step
    lowest = np.maximum(np.searchsorted(pieces.starts, starts, "right") - 1, 0)
    highest = np.searchsorted(pieces.starts, last, "right")
    region, piece = _expand(lowest, np.where(counts > 0, highest - lowest, 0))
    start = starts[region]
    first = np.maximum(0, -((start - begins[piece]) // step))
    end = np.minimum(counts[region], -((start - ends[piece]) // step))
    shift = pieces.sources[piece] - pieces.starts[piece]
    return _Stretch(region, start + shift, first, end, step)


def _expand(first: Integers, count: Integers) -> tuple[Integers, Integers]:
    """Count up from each first number; return whose each number is, and the number."""
    count = np.maximum(count, 0)
    past = np.cumsum(count)
    owner = np.repeat(np.arange(len(count)), count)
    numbers = np.arange(int(past[-1]) if len(past) else 0)
    return owner, numbers + (first - past + count)[owner]


def _cut(stretch: _Stretch, size: int) -> _Cuts:
    region, start, first, end, step = stretch
    lowest = (start + first * step) // size
    highest = (start + (end - 1) * step) // size
    owner, tile = _expand(lowest, np.where(end > first, highest - lowest + 1, 0))
    start = start[owner]
    begin = tile * size
    begins = np.maximum(first[owner], -((start - begin) // step))
    ends = np.minimum(end[owner], -((start - begin - size) // step))
    cuts = region[owner], tile, start + begins * step - begin, begins, ends - begins
    if step > size:  # tiles may lie between two positions
        some = ends > begins
        return _Cuts(*(column[some] for column in cuts))
    return _Cuts(*cuts)


def _plan(
    number: int, image: LevelLayout, regions: Regions, rows: _Stretch, columns: _Stretch
) -> ReadPlan:
    grid = image.grid
    down, across = _cut(rows, grid.tile_height), _cut(columns, grid.tile_width)
    row, column = _pairs(down.region, across.region, len(regions))
    place = down.tile[row] * grid.columns + across.tile[column]
    region = down.region[row]
    height, width = down.length[row], across.length[column]
    places, tile = np.unique(place, return_inverse=True)
    pastes = Pastes(
        tile,
        region,
        down.target[row],
        across.target[column],
        down.source[row],
        across.source[column],
        height,
        width,
    )
    tiles = np.empty((len(places), 2), np.int64)
    np.divmod(places, grid.columns, tiles[:, 0], tiles[:, 1])
    area = np.bincount(region, height * width, len(regions))
    covered = area == regions.heights * regions.widths
    stored: NDArray[np.bool_] = np.any(grid.byte_counts[:, tiles[:, 0], tiles[:, 1]] > 0, axis=0)
    pastes = pastes[np.argsort(tile, kind="stable")]
    return _without_blanks(number, image, regions, tiles, stored, pastes, covered)


def _plan_one(number: int, image: LevelLayout, regions: Regions) -> ReadPlan:
    """Plan one region, in a fraction of the time: no tile is needed twice."""
    grid = image.grid
    (top, left), (height, width) = regions.corners[0], regions.shapes[0]
    down = _cut_one(top, height, image.height, grid.tile_height)
    across = _cut_one(left, width, image.width, grid.tile_width)
    rows, columns = np.repeat(down, len(across), axis=0), np.tile(across, (len(down), 1))
    pastes = Pastes(
        np.arange(len(rows)),
        np.zeros(len(rows), np.int64),
        rows[:, 2],
        columns[:, 2],
        rows[:, 1],
        columns[:, 1],
        rows[:, 3],
        columns[:, 3],
    )
    tiles = np.column_stack([rows[:, 0], columns[:, 0]])
    counts = grid.byte_counts
    if len(tiles):
        (first, begin), (last, end) = tiles[0].tolist(), tiles[-1].tolist()
        counts = counts[:, first : last + 1, begin : end + 1]
    else:
        counts = counts[:, :0, :0]
    stored: NDArray[np.bool_] = np.any(counts > 0, axis=0).ravel()
    covered = np.array([down[:, 3].sum() * across[:, 3].sum() == height * width])
    return _without_blanks(number, image, regions, tiles, stored, pastes, covered)


def _cut_one(start: int, count: int, extent: int, size: int) -> Integers:
    """Return (tile, position in it, position in the region, length) of each piece of one axis."""
    first, end = max(0, -start), min(count, extent - start)
    table = np.empty((0, 4), np.int64)
    if first < end:
        tiles = np.arange((start + first) // size, (start + end - 1) // size + 1)
        begins = tiles * size - start
        table = np.empty((len(tiles), 4), np.int64)
        table[:, 0], table[:, 2] = tiles, np.maximum(begins, first)
        table[:, 1] = table[:, 2] - begins
        table[:, 3] = np.minimum(begins + size, end) - table[:, 2]
    return table


def _without_blanks(
    number: int,
    image: LevelLayout,
    regions: Regions,
    tiles: Integers,
    stored: NDArray[np.bool_],
    pastes: Pastes,
    covered: NDArray[np.bool_],
) -> ReadPlan:
    """Return the plan, with tiles apart that show the background; pastes go tile by tile."""
    blanks = NO_PASTES
    if image.missing == "background" and not stored.all():
        tile = pastes.tile
        shown = stored[tile]
        renumbered = np.cumsum(stored) - 1
        blanks, pastes = pastes[~shown], pastes[shown]
        pastes = Pastes(renumbered[pastes.tile], *_columns(pastes)[1:])
        tiles, stored = tiles[stored], stored[stored]
    starts = np.searchsorted(pastes.tile, np.arange(len(tiles) + 1))
    return ReadPlan(number, regions, tiles, ~stored, pastes, starts, blanks, covered)


def _pairs(first: Integers, second: Integers, regions: int) -> tuple[Integers, Integers]:
    """Return the indices of all pairs of entries that belong to the same region."""
    ones, others = np.bincount(first, minlength=regions), np.bincount(second, minlength=regions)
    counts = ones * others
    region, number = _expand(np.zeros(regions, np.int64), counts)
    down, across = np.divmod(number, others[region])
    before, behind = np.cumsum(ones) - ones, np.cumsum(others) - others
    return before[region] + down, behind[region] + across


def _columns(pastes: Pastes) -> list[Integers]:
    return [getattr(pastes, field.name) for field in fields(pastes)]
