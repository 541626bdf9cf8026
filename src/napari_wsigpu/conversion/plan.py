"""What a conversion writes: which levels, in which tiles, and where their pixels come from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from napari_wsigpu.model.errors import ConversionError
from napari_wsigpu.model.geometry import Rect
from napari_wsigpu.reading.mosaic import touches

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.color import Color
    from napari_wsigpu.conversion.coding import Coding
    from napari_wsigpu.conversion.options import Outline, Region
    from napari_wsigpu.model.layout import PyramidLevel
    from napari_wsigpu.slide.slide import Slide

BLOCK_SIDE = 2048


class PlaneNumber(NamedTuple):
    """Where a plane is along t and z."""

    t: int = 0
    z: int = 0


FIRST = PlaneNumber()


@dataclass(frozen=True, slots=True, eq=False)
class PlannedLevel:
    """One level of what is written.

    Attributes
    ----------
    source : PyramidLevel
        The slide's level that it shows.
    window : Rect
        The part of that, in its pixels.
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
    plane : PlaneNumber
        Which plane of the slide it shows.
    missing : bool
        Whether the slide lacks that plane: nothing is written of it.
    """

    source: PyramidLevel
    window: Rect
    halved: bool
    downsample: float
    tile_height: int
    tile_width: int
    coding: Coding | None
    shard: int = 1
    plane: PlaneNumber = FIRST
    missing: bool = False

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
        Levels of the result: of each plane as many, finest first.
    planes : tuple of PlaneNumber
        The slide's planes that are written, by t, then by z: all of some of each.
    shown : PlaneNumber
        The one that the slide shows.
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
    z_spacing, time_step : float, optional
        Micrometres and seconds from one plane to the next.
    """

    levels: tuple[PlannedLevel, ...]
    planes: tuple[PlaneNumber, ...]
    shown: PlaneNumber
    channels: int
    dtype: np.dtype[Any]
    rgb: bool
    background: float
    mpp: tuple[float, float] | None
    color: Color = "stored"
    outline: Outline | None = None
    z_spacing: float | None = None
    time_step: float | None = None

    @property
    def depth(self) -> int:
        """How many levels each plane has."""
        return len(self.levels) // len(self.planes)

    @property
    def pyramid(self) -> tuple[PlannedLevel, ...]:
        """The levels of the first plane."""
        return self.levels[: self.depth]

    @property
    def along(self) -> dict[str, list[int]]:
        """The numbers of the slide's planes along "t" and "z", where there are several."""
        found = {
            "t": sorted({plane.t for plane in self.planes}),
            "z": sorted({plane.z for plane in self.planes}),
        }
        return {axis: numbers for axis, numbers in found.items() if len(numbers) > 1}

    @property
    def missing(self) -> int:
        """How many of the planes the slide lacks."""
        return sum(level.missing for level in self.levels) // self.depth

    def of_planes(self, level: int) -> list[int]:
        """Return the indices, in `levels`, of a level of the pyramid in each plane."""
        return list(range(level, len(self.levels), self.depth))

    @property
    def groups(self) -> Iterator[range]:
        """Yield the indices of each level that is read and of those averaged from it."""
        starts = [index for index, level in enumerate(self.levels) if not level.halved]
        ends = [*starts[1:], len(self.levels)]
        yield from (range(start, end) for start, end in zip(starts, ends, strict=True))

    @property
    def is_part(self) -> bool:
        """Whether a part of the slide is written, not all of it."""
        first = self.levels[0]
        whole = first.source.layout.height, first.source.layout.width
        return self.outline is not None or (first.height, first.width) != whole

    def blank_tiles(self, index: int) -> NDArray[np.bool_]:
        """Return which tiles of a level the source does not hold, by row and column."""
        level = self.levels[index]
        blank = np.full((level.rows, level.columns), level.missing)
        if level.missing or self._holds_all(index):
            return blank
        for row, column in product(range(level.rows), range(level.columns)):
            top, left = row * level.tile_height, column * level.tile_width
            height = min(level.tile_height, level.height - top)
            width = min(level.tile_width, level.width - left)
            blank[row, column] = self._is_blank(index, Rect(top, left, height, width))
        return blank

    def _holds_all(self, index: int) -> bool:
        if self.color != "stored":  # readers show the background as it is stored
            return True
        level = self.levels[index]
        if level.halved:
            return self._holds_all(index - 1)
        layout = level.source.layout
        return not layout.parts and bool(layout.grid.byte_counts.all())

    def _is_blank(self, index: int, part: Rect) -> bool:
        level = self.levels[index]
        if level.halved:
            return self._is_blank(index - 1, Rect(*(2 * value for value in part)))
        layout = level.source.layout
        left, top = level.window.left + part.left, level.window.top + part.top
        width, height = min(part.width, layout.width - left), min(part.height, layout.height - top)
        if layout.parts:
            return not touches(layout, Rect(top, left, height, width))
        missing = not layout.grid.holds_any(top, left, height, width)
        return missing and layout.missing == "background" and not layout.computed


def window_of(slide: Slide, level: PyramidLevel, region: Region | None) -> Rect:
    """Return what a region, in pixels of level 0, is on a level.

    Raises
    ------
    ConversionError
        If it is not within the slide.
    """
    layout = level.layout
    if region is None:
        return Rect(0, 0, layout.height, layout.width)
    x, y, width, height = region
    if min(x, y) < 0 or x + width > slide.dimensions[0] or y + height > slide.dimensions[1]:
        raise ConversionError(
            f"The region {x},{y},{width},{height} reaches beyond the slide of "
            f"{slide.dimensions[0]} x {slide.dimensions[1]} pixels; give one within it."
        )
    scale = layout.downsample(slide.layout.levels[0])
    left = min(_rounded(x / scale), layout.width - 1)
    top = min(_rounded(y / scale), layout.height - 1)
    width = min(max(1, _rounded(width / scale)), layout.width - left)
    height = min(max(1, _rounded(height / scale)), layout.height - top)
    return Rect(top, left, height, width)


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
