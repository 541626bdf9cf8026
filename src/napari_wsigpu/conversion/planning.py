"""Decides what a conversion writes: which planes, levels and tiles, and which are copied."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from napari_wsigpu.conversion.coding import Coding, check_ome, copied_coding, new_coding
from napari_wsigpu.conversion.elsewhere import Elsewhere
from napari_wsigpu.conversion.options import LARGEST_TILE, TILE_UNIT
from napari_wsigpu.conversion.plan import Plan, PlaneNumber, PlannedLevel, window_of
from napari_wsigpu.formats.tiff.tiff import is_rgb
from napari_wsigpu.model.errors import ConversionError, LevelError, PlaneError
from napari_wsigpu.model.geometry import Rect
from napari_wsigpu.model.layout import COMPUTED_TILE
from napari_wsigpu.slide.slide import LARGEST_OVERVIEW

if TYPE_CHECKING:
    from napari_wsigpu.conversion.options import Options
    from napari_wsigpu.model.layout import PyramidLevel
    from napari_wsigpu.slide.slide import Slide

SMALLEST_TILE = 64
RAW_UNIT = 4096


def make_plan(slide: Slide, options: Options) -> Plan:
    """Decide what to write: of OME-TIFF and OME-Zarr all planes, unless one is chosen.

    Raises
    ------
    ConversionError
        If the region is not within the slide, the samples can't be encoded so, or planes differ.
    LevelError, PlaneError
        If there is no such level or plane.
    """
    planes = [PlaneNumber(*place) for place in product(*_chosen(slide, options))]
    own = PlaneNumber(slide.planes.t, slide.planes.z)
    found: dict[PlaneNumber, Slide] = {}
    lacking: list[PlaneError] = []
    for plane in sorted(planes, key=own.__ne__):  # the one that is shown decides for all
        try:
            found[plane] = slide.plane(plane.z, plane.t)
        except PlaneError as error:
            lacking.append(error)
    if not found:
        raise lacking[0]
    averaged, copied = False, True
    elsewhere = Elsewhere()
    while True:
        plans = {
            plane: _of_plane(shown, options, elsewhere, averaged=averaged, copied=copied)
            for plane, shown in found.items()
        }
        first = next(iter(plans.values()))
        other_sizes = any(_sizes(plan) != _sizes(first) for plan in plans.values())
        other_codings = any(_codings(plan) != _codings(first) for plan in plans.values())
        if other_sizes and not averaged:
            averaged = True
        elif other_codings and copied:
            copied = False
        else:
            break
    if other_sizes or other_codings:
        raise ConversionError(
            f"The planes of '{slide.path}' differ in size, tiles or samples; choose one of them by "
            "z and t."
        )
    levels = [
        level if plane in plans else replace(level, plane=plane, missing=True)
        for plane in planes
        for level in plans.get(plane, first).levels
    ]
    return replace(first, levels=tuple(levels), planes=tuple(planes), shown=own)


def _chosen(slide: Slide, options: Options) -> tuple[range, range]:
    """Return which planes along t and z are written."""
    shown = slide.planes
    several = options.kind in ("ome-tiff", "ome-zarr")
    found = []
    for number, own, size in (
        (options.t, shown.t, shown.size_t),
        (options.z, shown.z, shown.size_z),
    ):
        if number is not None and number >= size:
            slide.plane(options.z, options.t)  # says that there is no such plane
        if number is None and several:
            found.append(range(size))
        else:
            one = own if number is None else number
            found.append(range(one, one + 1))
    return found[0], found[1]


def _sizes(plan: Plan) -> list[tuple[int, int, bool, int, int]]:
    return [
        (level.width, level.height, level.halved, level.tile_height, level.tile_width)
        for level in plan.levels
    ]


def _codings(plan: Plan) -> list[Coding | None]:
    return [level.coding for level in plan.levels]


def _of_plane(
    slide: Slide, options: Options, elsewhere: Elsewhere, *, averaged: bool, copied: bool
) -> Plan:
    """Decide how the plane is written that a slide shows.

    `averaged` has all levels but the first one made by averaging, and `copied` allows tiles to be
    copied.
    """
    chosen = (_halved if averaged else _levels)(slide, options)[: options.levels]
    base = slide.layout.levels[0]
    plane = PlaneNumber(slide.planes.t, slide.planes.z)
    if options.kind == "ome-tiff":
        check_ome(slide)
    raw_tiff = options.compression == "raw" and options.kind != "ome-zarr"
    planned: list[PlannedLevel] = []
    for source, window, halved in chosen:
        first = planned[0] if planned else None
        own = source.layout.grid.tile_height, source.layout.grid.tile_width
        # libtiff reads raw tiles of one size only, whatever their level, as RGB.
        alike = planned[-1] if halved else first if raw_tiff else None
        tile = _tile_size(source, options, alike)
        coding = None
        if copied and not halved and (tile == own or not (raw_tiff or options.tile_size)):
            coding = _copied(slide, options, elsewhere, source, window)
        if coding is not None:
            tile = own
        elif options.kind != "ome-zarr":
            coding = new_coding(slide.layout, options)
        downsample = 1.0
        if first is not None:
            downsample = source.layout.downsample(base) / first.source.layout.downsample(base)
            if averaged or options.region is not None:
                ratios = first.width / window.width, first.height / window.height
                downsample = sum(ratios) / 2
        planned.append(
            PlannedLevel(
                source, window, halved, downsample, *tile, coding, options.shard or 1, plane
            )
        )
    scale = planned[0].source.layout.downsample(base)
    return Plan(
        tuple(planned),
        (plane,),
        plane,
        base.channels,
        base.dtype,
        slide.layout.rgb,
        slide.layout.background,
        None if slide.mpp is None else (slide.mpp[0] * scale, slide.mpp[1] * scale),
        options.color,
        options.outline,
        slide.planes.z_spacing,
        slide.planes.time_step,
    )


class _Chosen(NamedTuple):
    source: PyramidLevel
    window: Rect
    halved: bool


def _halved(slide: Slide, options: Options) -> list[_Chosen]:
    """Choose one level, and average all others from it."""
    found = _levels(slide, options)[:1]
    while max(found[-1].window[2:]) > LARGEST_OVERVIEW:
        window = found[-1].window
        half = Rect(0, 0, -(-window.height // 2), -(-window.width // 2))
        found.append(_Chosen(found[0].source, half, True))
    return found


def _levels(slide: Slide, options: Options) -> list[_Chosen]:
    """Choose levels from the slide's pyramid; those a region does not fit on are averaged."""
    pyramid = slide.pyramid
    numbers = [level.number for level in pyramid]
    if options.level not in numbers:
        raise LevelError(
            f"'{slide.path}' has no level {options.level}; its levels are 0 to {max(numbers)}."
        )
    start = numbers.index(options.level)
    first = _Chosen(pyramid[start], window_of(slide, pyramid[start], options.region), False)
    chosen = [first]
    for level in pyramid[start + 1 :]:
        last = chosen[-1].window
        computed = level.number >= slide.level_count
        window: Rect | None = Rect(0, 0, level.layout.height, level.layout.width)
        if options.region is not None:
            if max(last.width, last.height) <= LARGEST_OVERVIEW:
                break
            window = None if computed else _smaller(first, level)
            if window is not None and window.width >= last.width:
                continue
        if computed or window is None:
            window = Rect(0, 0, -(-last.height // 2), -(-last.width // 2))
            chosen.append(_Chosen(level, window, True))
        else:
            chosen.append(_Chosen(level, window, False))
    return chosen


def _smaller(first: _Chosen, level: PyramidLevel) -> Rect | None:
    """Return the same window on a coarser level; None if its edges lie within pixels there."""
    found = []
    for start, length, fine, coarse in (
        (first.window.left, first.window.width, first.source.layout.width, level.layout.width),
        (first.window.top, first.window.height, first.source.layout.height, level.layout.height),
    ):
        step = round(fine / coarse)
        at_end = start + length == fine
        exact = abs(coarse * step - fine) < step
        if not exact or start % step or (length % step and not at_end):
            return None
        end = coarse if at_end else (start + length) // step
        found.append((start // step, end - start // step, step))
    (left, width, across), (top, height, down) = found
    return Rect(top, left, height, width) if across == down and min(width, height) > 0 else None


def _tile_size(
    source: PyramidLevel, options: Options, alike: PlannedLevel | None
) -> tuple[int, int]:
    if alike is not None:
        return alike.tile_height, alike.tile_width
    if options.tile_size is not None:
        return options.tile_size, options.tile_size
    grid = source.layout.grid
    sides = grid.tile_height, grid.tile_width
    fits = all(SMALLEST_TILE <= side <= LARGEST_TILE and not side % TILE_UNIT for side in sides)
    if options.compression == "raw" and options.kind != "ome-zarr":
        # libtiff reads no others as RGB (1024), GPUDirect Storage best these.
        layout = source.layout
        pixel = (layout.channels if is_rgb(layout) else 1) * layout.dtype.itemsize
        fits = fits and sides[0] * sides[1] * pixel % RAW_UNIT == 0
    return sides if fits and not source.layout.parts else (COMPUTED_TILE, COMPUTED_TILE)


def _copied(
    slide: Slide, options: Options, elsewhere: Elsewhere, source: PyramidLevel, window: Rect
) -> Coding | None:
    """Return how a level's tiles are encoded if they can be copied."""
    grid = source.layout.grid
    sides = grid.tile_height, grid.tile_width
    if options.kind == "ome-zarr" or source.number >= slide.level_count:
        return None
    if options.color != "stored" or options.outline is not None:
        return None
    for start, length, extent, side in (
        (window.left, window.width, source.layout.width, sides[1]),
        (window.top, window.height, source.layout.height, sides[0]),
    ):
        if start % side or (length % side and start + length != extent):
            return None
    coding = copied_coding(slide, source.layout, options)
    if coding is not None and coding.stripped and elsewhere.is_reached(slide, grid):
        return None
    return coding
