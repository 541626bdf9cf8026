"""From regions to plans: which tiles they need, by NumPy alone."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.model.geometry import Rects, expand
from napari_wsigpu.model.layout import Scattered
from napari_wsigpu.reading.plan import NO_PASTES, Pastes, ReadPlan, Regions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.model.geometry import Integers
    from napari_wsigpu.model.layout import LevelLayout, Pieces


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
        if isinstance(part, Scattered):
            plans.append(_plan_scattered(numbers[part.image], image, part, regions))
            continue
        rows = _laid(regions.tops, regions.step[0], regions.heights, image.height, part.rows)
        columns = _laid(regions.lefts, regions.step[1], regions.widths, image.width, part.columns)
        plan = _plan(numbers[part.image], part.image, regions, rows, columns)
        if len(plan.pastes) or len(plan.blanks):
            plans.append(plan)
    return plans


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
    region, piece = expand(lowest, np.where(counts > 0, highest - lowest, 0))
    start = starts[region]
    first = np.maximum(0, -((start - begins[piece]) // step))
    end = np.minimum(counts[region], -((start - ends[piece]) // step))
    shift = pieces.sources[piece] - pieces.starts[piece]
    return _Stretch(region, start + shift, first, end, step)


def _cut(stretch: _Stretch, size: int) -> _Cuts:
    region, start, first, end, step = stretch
    lowest = (start + first * step) // size
    highest = (start + (end - 1) * step) // size
    owner, tile = expand(lowest, np.where(end > first, highest - lowest + 1, 0))
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
    parts = (
        region,
        down.target[row],
        across.target[column],
        down.source[row],
        across.source[column],
        down.length[row],
        across.length[column],
    )
    return _of_parts(number, image, regions, place, parts)


def _plan_scattered(
    number: int, mosaic: LevelLayout, part: Scattered, regions: Regions
) -> ReadPlan:
    """Plan regions of a mosaic on which tiles lie anywhere."""
    step_y, step_x = regions.step
    bottoms = regions.tops + (regions.heights - 1) * step_y + 1
    rights = regions.lefts + (regions.widths - 1) * step_x + 1
    region, item = part.on.touching(Rects(regions.tops, regions.lefts, bottoms, rights))
    on, top, left = part.on[item], regions.tops[region], regions.lefts[region]
    # Which of the region's positions lie on the part, and on the mosaic.
    y = np.maximum(0, -((top - np.maximum(on.tops, 0)) // step_y))
    x = np.maximum(0, -((left - np.maximum(on.lefts, 0)) // step_x))
    end_y = -((top - np.minimum(on.bottoms, mosaic.height)) // step_y)
    end_x = -((left - np.minimum(on.rights, mosaic.width)) // step_x)
    height = np.minimum(regions.heights[region], end_y) - y
    width = np.minimum(regions.widths[region], end_x) - x
    source_y = part.tops[item] + top + y * step_y - on.tops
    source_x = part.lefts[item] + left + x * step_x - on.lefts
    place = part.rows[item] * part.image.grid.columns + part.columns[item]
    some = (height > 0) & (width > 0)
    columns = (region, y, x, source_y, source_x, height, width)
    parts = [column[some] for column in columns]
    plan = _of_parts(number, part.image, regions, place[some], parts)
    if part.image.channels == mosaic.channels:
        return plan
    channels = slice(part.first, part.first + part.image.channels)
    return replace(plan, covered=np.zeros_like(plan.covered), channels=channels)


def _of_parts(
    number: int, image: LevelLayout, regions: Regions, place: Integers, parts: Sequence[Integers]
) -> ReadPlan:
    """Put a plan together: the position of tiles in their grid, and the rest of each paste."""
    grid = image.grid
    places, tile = np.unique(place, return_inverse=True)
    pastes = Pastes(tile, *parts)
    tiles = np.empty((len(places), 2), np.int64)
    np.divmod(places, grid.columns, tiles[:, 0], tiles[:, 1])
    area = np.bincount(pastes.region, pastes.height * pastes.width, len(regions))
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
    rows, columns = len(down.tiles), len(across.tiles)
    count = rows * columns
    table = np.empty((8, rows, columns), np.int64)
    table[1] = 0
    table[2::2] = down.places[..., None]
    table[3::2] = across.places[:, None]
    tile, *places = table.reshape(8, count)
    tile[:] = np.arange(count)
    tiles = np.empty((rows, columns, 2), np.int64)
    tiles[..., 0], tiles[..., 1] = (
        np.arange(down.tiles.start, down.tiles.stop)[:, None],
        np.arange(across.tiles.start, across.tiles.stop),
    )
    counts = grid.byte_counts[
        :, down.tiles.start : down.tiles.stop, across.tiles.start : across.tiles.stop
    ]
    stored = (counts[0] if len(counts) == 1 else counts.max(axis=0)).ravel() > 0
    covered = np.array([down.covered * across.covered == height * width])
    return _without_blanks(
        number, image, regions, tiles.reshape(count, 2), stored, Pastes(tile, *places), covered
    )


class _Row(NamedTuple):
    """The tiles along one axis of one region.

    Attributes
    ----------
    tiles : range
        Their rows or columns.
    places : ndarray of int64, shape (3, tiles)
        Of each piece: position in the region, position in the tile, and length.
    covered : int
        How many of the region's positions lie in the image.
    """

    tiles: range
    places: Integers
    covered: int


def _cut_one(start: int, count: int, extent: int, size: int) -> _Row:
    first, end = max(0, -start), min(count, extent - start)
    if first >= end:
        return _Row(range(0), np.empty((3, 0), np.int64), 0)
    tiles = range((start + first) // size, (start + end - 1) // size + 1)
    places = np.empty((3, len(tiles)), np.int64)
    in_region, in_tile, length = places
    begin = tiles.start * size - start
    in_region[:] = np.arange(begin, end, size)
    in_region[0] = first
    in_tile[:] = 0
    in_tile[0] = first - begin
    length[:] = size
    length[0] -= first - begin
    length[-1] -= tiles.stop * size - start - end
    return _Row(tiles, places, end - first)


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
    starts = np.arange(len(tiles) + 1)
    if len(pastes) != len(tiles):
        starts = np.searchsorted(pastes.tile, starts)
    return ReadPlan(number, regions, tiles, ~stored, pastes, starts, blanks, covered)


def _pairs(first: Integers, second: Integers, regions: int) -> tuple[Integers, Integers]:
    """Return the indices of all pairs of entries that belong to the same region."""
    ones, others = np.bincount(first, minlength=regions), np.bincount(second, minlength=regions)
    counts = ones * others
    region, number = expand(np.zeros(regions, np.int64), counts)
    down, across = np.divmod(number, others[region])
    before, behind = np.cumsum(ones) - ones, np.cumsum(others) - others
    return before[region] + down, behind[region] + across


def _columns(pastes: Pastes) -> list[Integers]:
    return [getattr(pastes, field.name) for field in fields(pastes)]
