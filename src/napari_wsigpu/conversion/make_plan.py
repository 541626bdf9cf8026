"""Plan a conversion: choose planes, levels and tile sizes, and which tiles are copied."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from napari_wsigpu.conversion.coding import (
    Coding,
    check_ome,
    coding_above,
    copied_coding,
    new_coding,
)
from napari_wsigpu.conversion.conversion_plan import Plan, PlaneNumber, PlannedLevel, window_of
from napari_wsigpu.conversion.occupied_ranges import OccupiedRanges
from napari_wsigpu.conversion.options import LARGEST_TILE, TILE_UNIT
from napari_wsigpu.formats.tiff.tiff import is_rgb
from napari_wsigpu.model.errors import ConversionError, PlaneError
from napari_wsigpu.model.geometry import Rect
from napari_wsigpu.slide.containers import no_level
from napari_wsigpu.slide.slide import LARGEST_OVERVIEW

if TYPE_CHECKING:
    from napari_wsigpu.conversion.options import Options
    from napari_wsigpu.model.geometry import Pair
    from napari_wsigpu.model.layout import PyramidLevel
    from napari_wsigpu.slide.slide import Slide

SMALLEST_TILE = 64
TILE = 512  # for sources whose tiles do not suit the target
RAW_UNIT = 4096


def make_plan(slide: Slide, options: Options) -> Plan:
    """Return the plan of a conversion; OME-TIFF and OME-Zarr get all planes unless one is chosen.

    Raises
    ------
    ConversionError
        If the region extends beyond the slide, the compression cannot hold the samples, or the
        planes differ in size or type.
    LevelError, PlaneError
        If the slide has no such level or plane.
    """
    planes = [PlaneNumber(*numbers) for numbers in product(*_chosen_planes(slide, options))]
    shown = PlaneNumber(slide.planes.t, slide.planes.z)
    found: dict[PlaneNumber, Slide] = {}
    plane_errors: list[PlaneError] = []
    for plane in sorted(planes, key=shown.__ne__):  # `found` starts with the shown plane
        try:
            found[plane] = slide.plane(plane.z, plane.t)
        except PlaneError as error:
            plane_errors.append(error)
    if not found:
        raise plane_errors[0]
    # All planes of a level must have the same size, tiles and encoding. If they differ, first
    # average all coarser levels from the finest, then encode all tiles instead of copying them.
    averaged, copied = False, True
    occupied = OccupiedRanges()
    while True:
        plans = {
            plane: _plan_of_plane(view, options, occupied, averaged=averaged, copied=copied)
            for plane, view in found.items()
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
            f"The planes of '{slide.path}' differ in size, tiles or samples; choose z and t."
        )
    levels = [
        level if plane in plans else replace(level, plane=plane, missing=True)
        for plane in planes
        for level in plans.get(plane, first).levels
    ]
    return replace(first, levels=tuple(levels), planes=tuple(planes), shown=shown)


def _chosen_planes(slide: Slide, options: Options) -> tuple[range, range]:
    """Return the plane numbers to write along t and z."""
    shown = slide.planes
    several = options.kind in ("ome-tiff", "ome-zarr")
    found = []
    axes = (options.t, shown.t, shown.size_t), (options.z, shown.z, shown.size_z)
    for number, default, size in axes:
        if number is not None and number >= size:
            slide.plane(options.z, options.t)  # raises PlaneError
        if number is None and several:
            found.append(range(size))
        else:
            one = default if number is None else number
            found.append(range(one, one + 1))
    return found[0], found[1]


def _sizes(plan: Plan) -> list[tuple[int, int, bool, int, int]]:
    return [
        (level.width, level.height, level.halved, level.tile_height, level.tile_width)
        for level in plan.levels
    ]


def _codings(plan: Plan) -> list[Coding | None]:
    return [level.coding for level in plan.levels]


def _plan_of_plane(
    slide: Slide, options: Options, occupied: OccupiedRanges, *, averaged: bool, copied: bool
) -> Plan:
    """Return the plan of the plane that a slide shows.

    Parameters
    ----------
    slide, options
        The slide, showing the plane, and the options of the conversion.
    occupied : OccupiedRanges
        Finds tiles that must not be copied.
    averaged : bool
        Whether to average all levels from the finest one.
    copied : bool
        Whether tiles may be copied.
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
        stored_tile = source.layout.grid.tile_height, source.layout.grid.tile_width
        # In a raw RGB pyramid, libtiff requires the same tile size in every level.
        same_tiles_as = planned[-1] if halved else first if raw_tiff else None
        tile = _tile_size(source, options, same_tiles_as)
        coding = None
        if copied and not halved and (tile == stored_tile or not (raw_tiff or options.tile_size)):
            coding = _copied(slide, options, occupied, source, window)
        if coding is not None:
            tile = stored_tile
        elif options.kind != "ome-zarr":
            coding = _new_coding(slide, options, planned[-1] if halved else None)
        downsample = 1.0
        if first is not None:
            downsample = source.layout.downsample(base) / first.source.layout.downsample(base)
            if averaged or options.region is not None:
                ratios = first.width / window.width, first.height / window.height
                downsample = sum(ratios) / 2
        shard = options.shard or 1
        level = PlannedLevel(source, window, halved, downsample, *tile, coding, shard, plane)
        planned.append(level)
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
        _position(slide, planned[0], scale),
    )


def _new_coding(slide: Slide, options: Options, below: PlannedLevel | None) -> Coding:
    """Return the encoding of a level that is read, or averaged from the level `below`."""
    above = None
    if below is not None and not options.lossless and options.compression is None:
        above = below.coding
    if above is not None and below is not None and above.copied:
        above = coding_above(slide, below.source.layout, above, options)
    return above or new_coding(slide.layout, options)


def _position(slide: Slide, first: PlannedLevel, scale: float) -> dict[str, float]:
    """Return the center of the first pixel and plane by axis, if the slide states a position."""
    found = dict(slide.planes.starts)
    if any(slide.layout.first):
        unit = 1.0 if slide.mpp else scale
        sizes = slide.mpp or (1.0, 1.0)
        corner = first.window.left, first.window.top
        for axis, start, edge, size in zip("xy", slide.layout.first, corner, sizes, strict=True):
            found[axis] = (start + ((edge + 0.5) * scale - 0.5) * size) / unit
    return found


class _Chosen(NamedTuple):
    source: PyramidLevel
    window: Rect
    halved: bool


def _halved(slide: Slide, options: Options) -> list[_Chosen]:
    """Choose one level to read, and average all coarser levels from it."""
    found = _levels(slide, options)[:1]
    while max(found[-1].window[2:]) > LARGEST_OVERVIEW:
        window = found[-1].window
        half = Rect(0, 0, -(-window.height // 2), -(-window.width // 2))
        found.append(_Chosen(found[0].source, half, True))
    return found


def _levels(slide: Slide, options: Options) -> list[_Chosen]:
    """Choose levels of the slide's pyramid.

    A level is averaged instead if the edges of the region fall within its pixels.
    """
    pyramid = slide.pyramid
    numbers = [level.number for level in pyramid]
    if options.level not in numbers:
        raise no_level(slide.path, options.level, len(pyramid))
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
    """Return the same window on a coarser level; None if its edges fall within pixels there."""
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


def _tile_size(source: PyramidLevel, options: Options, same_tiles_as: PlannedLevel | None) -> Pair:
    if same_tiles_as is not None:
        return same_tiles_as.tile_height, same_tiles_as.tile_width
    if options.tile_size is not None:
        return options.tile_size, options.tile_size
    grid = source.layout.grid
    sides = grid.tile_height, grid.tile_width
    fits = all(SMALLEST_TILE <= side <= LARGEST_TILE and not side % TILE_UNIT for side in sides)
    if options.compression == "raw" and options.kind != "ome-zarr":
        # libtiff reads raw RGB only if the size of a tile is a multiple of 1024 bytes; GPUDirect
        # Storage is fastest with multiples of 4096.
        layout = source.layout
        pixel = (layout.channels if is_rgb(layout) else 1) * layout.dtype.itemsize
        fits = fits and sides[0] * sides[1] * pixel % RAW_UNIT == 0
    return sides if fits and not source.layout.parts else (TILE, TILE)


def _copied(
    slide: Slide, options: Options, occupied: OccupiedRanges, source: PyramidLevel, window: Rect
) -> Coding | None:
    """Return the encoding of a level whose tiles can be copied; None for others."""
    grid = source.layout.grid
    sides = grid.tile_height, grid.tile_width
    if options.kind in ("ome-zarr", "png") or source.number >= slide.level_count:
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
    if coding is not None and coding.redacted and occupied.overlap(slide, grid):
        return None
    return coding
