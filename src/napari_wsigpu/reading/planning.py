"""Plan regions: find the tiles that they need, with NumPy and without I/O."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.model.geometry import Rects, expand
from napari_wsigpu.model.layout import Scattered
from napari_wsigpu.reading.plan import NO_PASTES, Pastes, ReadPlan, Regions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from napari_wsigpu.model.arrays import Integers, Mask
    from napari_wsigpu.model.layout import AxisMapping, LevelLayout


def plan_regions(
    number: int, images: Mapping[int, LevelLayout], regions: Regions
) -> list[ReadPlan]:
    """Plan regions of an image; a mosaic yields one plan per image in it, bottom to top.

    Parameters
    ----------
    number : int
        Number of the image.
    images : Mapping of int to LevelLayout
        All images of the slide, including those in mosaics.
    regions : Regions
        The regions.

    Returns
    -------
    list of ReadPlan
        To be carried out in this order, into the same pixels. Pixels that no plan pastes show the
        background.
    """
    image = images[number]
    if not image.parts and len(regions) == 1 and regions.step == (1, 1):
        return [_plan_one(number, image, regions)]
    if not image.parts:
        rows = _inside(regions.tops, regions.step[0], regions.heights, image.height)
        columns = _inside(regions.lefts, regions.step[1], regions.widths, image.width)
        return [_plan(number, image, regions, rows, columns)]
    numbers = {picture: index for index, picture in images.items()}
    plans = []
    for part in reversed(image.parts):
        if isinstance(part, Scattered):
            plans.append(_plan_scattered(numbers[part.image], image, part, regions))
            continue
        rows = _on_picture(regions.tops, regions.step[0], regions.heights, image.height, part.rows)
        columns = _on_picture(
            regions.lefts, regions.step[1], regions.widths, image.width, part.columns
        )
        plan = _plan(numbers[part.image], part.image, regions, rows, columns)
        if len(plan.pastes) or len(plan.blanks):
            plans.append(plan)
    return plans


class _Stretch(NamedTuple):
    """Runs of equidistant positions that regions read along one axis.

    Attributes
    ----------
    region, start : ndarray of int64
        Index of the region, and where its position 0 falls in the stored image (extrapolated if the
        run starts later).
    first, end : ndarray of int64
        First position of the region in the run, and the one after the last.
    step : int
        Distance between two positions in the image.
    """

    region: Integers
    start: Integers
    first: Integers
    end: Integers
    step: int


class _Cuts(NamedTuple):
    """A stretch cut at tile boundaries: region, tile, position in both, and length of each part."""

    region: Integers
    tile: Integers
    source: Integers
    target: Integers
    length: Integers


def _inside(starts: Integers, step: int, counts: Integers, extent: int) -> _Stretch:
    """Return the positions of each region that lie inside an image."""
    first = np.maximum(0, -(starts // step))
    end = np.minimum(counts, -((starts - extent) // step))
    return _Stretch(np.arange(len(starts)), starts, first, end, step)


def _on_picture(
    starts: Integers, step: int, counts: Integers, extent: int, segments: AxisMapping
) -> _Stretch:
    """Return the positions of each region that an image in a mosaic covers."""
    begins = np.maximum(segments.starts, 0)
    ends = np.minimum(np.append(segments.starts[1:], segments.end), extent)
    last = starts + (counts - 1) * step
    lowest = np.maximum(np.searchsorted(segments.starts, starts, "right") - 1, 0)
    highest = np.searchsorted(segments.starts, last, "right")
    region, segment = expand(lowest, np.where(counts > 0, highest - lowest, 0))
    start = starts[region]
    first = np.maximum(0, -((start - begins[segment]) // step))
    end = np.minimum(counts[region], -((start - ends[segment]) // step))
    shift = segments.sources[segment] - segments.starts[segment]
    return _Stretch(region, start + shift, first, end, step)


def _cut(stretch: _Stretch, size: int) -> _Cuts:
    """Cut runs into parts that are each in one tile; tiles have `size` pixels along the axis."""
    region, start, first, end, step = stretch
    lowest = (start + first * step) // size
    highest = (start + (end - 1) * step) // size
    owner, tile = expand(lowest, np.where(end > first, highest - lowest + 1, 0))
    start = start[owner]
    begin = tile * size
    begins = np.maximum(first[owner], -((start - begin) // step))
    ends = np.minimum(end[owner], -((start - begin - size) // step))
    cuts = region[owner], tile, start + begins * step - begin, begins, ends - begins
    if step > size:  # some tiles lie between two positions
        some = ends > begins
        return _Cuts(*(column[some] for column in cuts))
    return _Cuts(*cuts)


def _plan(
    number: int, image: LevelLayout, regions: Regions, rows: _Stretch, columns: _Stretch
) -> ReadPlan:
    """Plan regions from the runs of their rows and columns."""
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
    """Plan regions of a mosaic whose tiles lie at arbitrary positions."""
    step_y, step_x = regions.step
    bottoms = regions.tops + (regions.heights - 1) * step_y + 1
    rights = regions.lefts + (regions.widths - 1) * step_x + 1
    region, item = part.on.touching(Rects(regions.tops, regions.lefts, bottoms, rights))
    on, top, left = part.on[item], regions.tops[region], regions.lefts[region]
    # Positions of the region inside both the tile and the mosaic.
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
    """Build a plan from the grid index of each part's tile and the other columns of `Pastes`."""
    grid = image.grid
    places, tile = np.unique(place, return_inverse=True)
    pastes = Pastes(tile, *parts)
    tiles = np.empty((len(places), 2), np.int64)
    np.divmod(places, grid.columns, tiles[:, 0], tiles[:, 1])
    area = np.bincount(pastes.region, pastes.height * pastes.width, len(regions))
    covered = area == regions.heights * regions.widths
    # A tile is stored if any of its planes has bytes.
    stored: Mask = np.any(grid.byte_counts[:, tiles[:, 0], tiles[:, 1]] > 0, axis=0)
    # Sorted by tile, so that `starts` can index the parts of each tile.
    pastes = pastes[np.argsort(tile, kind="stable")]
    return _without_blanks(number, image, regions, tiles, stored, pastes, covered)


def _plan_one(number: int, image: LevelLayout, regions: Regions) -> ReadPlan:
    """Plan a single region, which is much faster: no tile occurs twice, so nothing is sorted."""
    grid = image.grid
    (top, left), (height, width) = regions.corners[0], regions.shapes[0]
    down = _cut_one(top, height, image.height, grid.tile_height)
    across = _cut_one(left, width, image.width, grid.tile_width)
    rows, columns = len(down.tiles), len(across.tiles)
    count = rows * columns
    table = np.empty((8, rows, columns), np.int64)
    table[1] = 0
    # y, top and height depend on the row of the tile; x, left and width on its column.
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


class _AxisParts(NamedTuple):
    """The tiles along one axis of one region.

    Attributes
    ----------
    tiles : range
        Rows or columns of the tiles.
    places : ndarray of int64, shape (3, tiles)
        Position in the region, position in the tile, and length of each part.
    covered : int
        Number of the region's positions inside the image.
    """

    tiles: range
    places: Integers
    covered: int


def _cut_one(start: int, count: int, extent: int, size: int) -> _AxisParts:
    """Cut the positions of one region into parts that are each in one tile of `size` pixels."""
    first, end = max(0, -start), min(count, extent - start)
    if first >= end:
        return _AxisParts(range(0), np.empty((3, 0), np.int64), 0)
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
    return _AxisParts(tiles, places, end - first)


def _without_blanks(
    number: int,
    image: LevelLayout,
    regions: Regions,
    tiles: Integers,
    stored: Mask,
    pastes: Pastes,
    covered: Mask,
) -> ReadPlan:
    """Return the plan, moving the parts of tiles that show the background to `blanks`."""
    blanks = NO_PASTES
    if image.missing == "background" and not stored.all():
        tile = pastes.tile
        shown = stored[tile]
        renumbered = np.cumsum(stored) - 1
        blanks, pastes = pastes[~shown], pastes[shown]
        pastes = replace(pastes, tile=renumbered[pastes.tile])
        tiles, stored = tiles[stored], stored[stored]
    starts = np.arange(len(tiles) + 1)
    if len(pastes) != len(tiles):
        starts = np.searchsorted(pastes.tile, starts)
    return ReadPlan(number, regions, tiles, ~stored, pastes, starts, blanks, covered)


def _pairs(first: Integers, second: Integers, regions: int) -> tuple[Integers, Integers]:
    """Return the indices of all pairs of a row part and a column part of the same region."""
    rows, columns = np.bincount(first, minlength=regions), np.bincount(second, minlength=regions)
    region, number = expand(np.zeros(regions, np.int64), rows * columns)
    down, across = np.divmod(number, columns[region])
    first_row, first_column = np.cumsum(rows) - rows, np.cumsum(columns) - columns
    return first_row[region] + down, first_column[region] + across
