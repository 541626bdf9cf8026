"""What a conversion writes: which levels, in which tiles, and where their pixels come from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from napari_wsigpu.conversion.coding import Coding, check_ome, copied_coding, new_coding
from napari_wsigpu.conversion.options import LARGEST_TILE, TILE_UNIT
from napari_wsigpu.errors import ConversionError, LevelError
from napari_wsigpu.formats.tiff import is_rgb
from napari_wsigpu.geometry import Rect
from napari_wsigpu.layout import COMPUTED_TILE
from napari_wsigpu.reading.mosaic import touches
from napari_wsigpu.slide import LARGEST_OVERVIEW

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.color import Color
    from napari_wsigpu.conversion.options import Options, Outline, Region
    from napari_wsigpu.layout import PyramidLevel
    from napari_wsigpu.slide import Slide

SMALLEST_TILE = 64
BLOCK_SIDE = 2048
RAW_UNIT = 4096


class Window(NamedTuple):
    """A rectangle of a level in its own pixels."""

    left: int
    top: int
    width: int
    height: int


@dataclass(frozen=True, slots=True, eq=False)
class PlannedLevel:
    """One level of what is written.

    Attributes
    ----------
    source : PyramidLevel
        The slide's level that it shows.
    window : Window
        The part of that.
    halved : bool
        Whether it is the 2 x 2 average of the planned level before instead.
    downsample : float
        How many pixels of the first planned level one of its pixels spans.
    tile_height, tile_width : int
        Size of its tiles.
    coding : Coding or None
        How a TIFF stores it; None for OME-Zarr.
    shard : int
        How many tiles, across and down, share a file of OME-Zarr.
    """

    source: PyramidLevel
    window: Window
    halved: bool
    downsample: float
    tile_height: int
    tile_width: int
    coding: Coding | None
    shard: int = 1

    @property
    def width(self) -> int:
        """Its width in pixels."""
        return self.window.width

    @property
    def height(self) -> int:
        """Its height in pixels."""
        return self.window.height

    @property
    def copied(self) -> bool:
        """Whether its tiles are copied as they are encoded."""
        return self.coding is not None and self.coding.copied

    @property
    def planes(self) -> int:
        """How many segments a tile has."""
        return 1 if self.coding is None else self.coding.planes

    @property
    def rows(self) -> int:
        """Number of tile rows."""
        return math.ceil(self.height / self.tile_height)

    @property
    def columns(self) -> int:
        """Number of tile columns."""
        return math.ceil(self.width / self.tile_width)

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return self.rows * self.columns

    @property
    def block(self) -> tuple[int, int]:
        """How many rows and columns of tiles are read at once."""
        rows, columns = (
            max(1, BLOCK_SIDE // (side * self.shard)) * self.shard
            for side in (self.tile_height, self.tile_width)
        )
        return rows, columns


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """All of a conversion that is decided before the first tile is read.

    Attributes
    ----------
    levels : tuple of PlannedLevel
        Levels of the result, finest first.
    channels : int
        Samples a pixel.
    dtype : numpy.dtype
        Type of a sample.
    rgb : bool
        Whether the channels are red, green, blue (and alpha).
    background : int or float
        What tiles show that are not written.
    mpp : tuple of float or None
        Micrometres a pixel of the result, (x, y).
    color : {"stored", "srgb"}
        What pixels become.
    outline : tuple of tuple of (float, float), optional
        Rings in pixels of the slide's level 0; what lies outside of them becomes background.
    """

    levels: tuple[PlannedLevel, ...]
    channels: int
    dtype: np.dtype[Any]
    rgb: bool
    background: float
    mpp: tuple[float, float] | None
    color: Color = "stored"
    outline: Outline | None = None

    @property
    def groups(self) -> Iterator[range]:
        """Yield the indices of each level that is read and of those averaged from it."""
        starts = [index for index, level in enumerate(self.levels) if not level.halved]
        ends = [*starts[1:], len(self.levels)]
        yield from (range(start, end) for start, end in zip(starts, ends, strict=True))

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """(planes, rows, columns) of each level's tiles."""
        return [(level.planes, level.rows, level.columns) for level in self.levels]

    @property
    def raw_bytes(self) -> int:
        """Size of all pixels."""
        pixels = sum(level.width * level.height for level in self.levels)
        return pixels * self.channels * self.dtype.itemsize

    @property
    def is_part(self) -> bool:
        """Whether a part of the slide is written, not all of it."""
        first = self.levels[0]
        layout = first.source.layout
        return self.outline is not None or (first.width, first.height) != (
            layout.width,
            layout.height,
        )

    def blank_tiles(self, index: int) -> NDArray[np.bool_]:
        """Return which tiles of a level the source does not hold, by row and column."""
        level = self.levels[index]
        blank = np.zeros((level.rows, level.columns), np.bool_)
        if self._holds_all(index):
            return blank
        for row, column in product(range(level.rows), range(level.columns)):
            top, left = row * level.tile_height, column * level.tile_width
            height = min(level.tile_height, level.height - top)
            width = min(level.tile_width, level.width - left)
            blank[row, column] = self._is_blank(index, Window(left, top, width, height))
        return blank

    def _holds_all(self, index: int) -> bool:
        if self.color != "stored":  # readers show the background as it is stored
            return True
        level = self.levels[index]
        if level.halved:
            return self._holds_all(index - 1)
        layout = level.source.layout
        return not layout.parts and bool(layout.grid.byte_counts.all())

    def _is_blank(self, index: int, part: Window) -> bool:
        level = self.levels[index]
        if level.halved:
            return self._is_blank(index - 1, Window(*(2 * value for value in part)))
        layout = level.source.layout
        left, top = level.window.left + part.left, level.window.top + part.top
        width, height = min(part.width, layout.width - left), min(part.height, layout.height - top)
        if layout.parts:
            return not touches(layout, Rect(top, left, height, width))
        missing = not layout.grid.holds_any(top, left, height, width)
        return missing and layout.missing == "background" and not layout.computed


def make_plan(slide: Slide, options: Options) -> Plan:
    """Decide what to write.

    Raises
    ------
    ConversionError
        If the region is not within the slide, or the samples can't be encoded so.
    LevelError
        If there is no such level.
    """
    chosen = _levels(slide, options)[: options.levels]
    base = slide.layout.levels[0]
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
        if not halved and (tile == own or not (raw_tiff or options.tile_size)):
            coding = _copied(slide, options, source, window)
        if coding is not None:
            tile = own
        elif options.kind != "ome-zarr":
            coding = new_coding(slide.layout, options)
        downsample = 1.0
        if first is not None:
            downsample = source.layout.downsample(base) / first.source.layout.downsample(base)
            if options.region is not None:
                ratios = first.width / window.width, first.height / window.height
                downsample = sum(ratios) / 2
        planned.append(
            PlannedLevel(source, window, halved, downsample, *tile, coding, options.shard or 1)
        )
    scale = planned[0].source.layout.downsample(base)
    return Plan(
        tuple(planned),
        base.channels,
        base.dtype,
        slide.layout.rgb,
        slide.layout.background,
        None if slide.mpp is None else (slide.mpp[0] * scale, slide.mpp[1] * scale),
        options.color,
        options.outline,
    )


class _Chosen(NamedTuple):
    source: PyramidLevel
    window: Window
    halved: bool


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
        window: Window | None = Window(0, 0, level.layout.width, level.layout.height)
        if options.region is not None:
            if max(last.width, last.height) <= LARGEST_OVERVIEW:
                break
            window = None if computed else _smaller(first, level)
            if window is not None and window.width >= last.width:
                continue
        if computed or window is None:
            window = Window(0, 0, -(-last.width // 2), -(-last.height // 2))
            chosen.append(_Chosen(level, window, True))
        else:
            chosen.append(_Chosen(level, window, False))
    return chosen


def window_of(slide: Slide, level: PyramidLevel, region: Region | None) -> Window:
    """Return what a region, in pixels of level 0, is on a level.

    Raises
    ------
    ConversionError
        If it is not within the slide.
    """
    layout = level.layout
    if region is None:
        return Window(0, 0, layout.width, layout.height)
    x, y, width, height = region
    if min(x, y) < 0 or x + width > slide.dimensions[0] or y + height > slide.dimensions[1]:
        raise ConversionError(
            f"The region {x},{y},{width},{height} reaches beyond the slide of "
            f"{slide.dimensions[0]} x {slide.dimensions[1]} pixels; give one within it."
        )
    scale = layout.downsample(slide.layout.levels[0])
    left, top = (
        min(_rounded(x / scale), layout.width - 1),
        min(_rounded(y / scale), layout.height - 1),
    )
    return Window(
        left,
        top,
        min(max(1, _rounded(width / scale)), layout.width - left),
        min(max(1, _rounded(height / scale)), layout.height - top),
    )


def _smaller(first: _Chosen, level: PyramidLevel) -> Window | None:
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
    return Window(left, top, width, height) if across == down and min(width, height) > 0 else None


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


def _copied(slide: Slide, options: Options, source: PyramidLevel, window: Window) -> Coding | None:
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
    return copied_coding(slide, source.layout, options)


def _rounded(value: float) -> int:
    return math.floor(value + 0.5)


def segments_of(level: PlannedLevel, tiles: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """Return offsets and byte counts of a copied level's tiles in the source.

    Returns
    -------
    ndarray of int64, shape (2, planes, tiles)
    """
    rows, columns = np.array(tiles, np.int64).reshape(-1, 2).T
    rows = rows + level.window.top // level.tile_height
    columns = columns + level.window.left // level.tile_width
    return np.stack(level.source.layout.grid.ranges(rows, columns))
