"""The plan of a conversion: its planes, levels and tiles, and the source of their pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.model.errors import ConversionError
from napari_wsigpu.model.geometry import Rect
from napari_wsigpu.reading.mosaic import touches

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.color import Color
    from napari_wsigpu.conversion.coding import Coding
    from napari_wsigpu.conversion.options import Outline, Region
    from napari_wsigpu.model.arrays import DType
    from napari_wsigpu.model.layout import PyramidLevel
    from napari_wsigpu.slide.slide import Slide

BLOCK_SIDE = 2048


class PlaneNumber(NamedTuple):
    """Index of a plane along t and z."""

    t: int = 0
    z: int = 0


FIRST = PlaneNumber()


@dataclass(frozen=True, slots=True, eq=False)
class PlannedLevel:
    """One level to write.

    Attributes
    ----------
    source : PyramidLevel
        The slide level that provides the pixels.
    window : Rect
        The part of the source level to write, in its pixels.
    halved : bool
        Whether the pixels are the 2 x 2 averages of the previous planned level instead.
    downsample : float
        Downsample relative to the first planned level.
    tile_height, tile_width : int
        Tile size in pixels.
    coding : Coding or None
        Tile encoding in TIFF; None for OME-Zarr.
    shard : int
        In OME-Zarr, a file holds `shard` x `shard` tiles.
    plane : PlaneNumber
        The plane of the slide.
    missing : bool
        Whether the slide lacks this plane, so that nothing is written for it.
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
        """Width in pixels."""
        return self.window.width

    @property
    def height(self) -> int:
        """Height in pixels."""
        return self.window.height

    @property
    def copied(self) -> bool:
        """Whether encoded tiles are copied without decoding."""
        return self.coding is not None and self.coding.copied

    @property
    def planes(self) -> int:
        """Number of segments per tile."""
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
        """Number of tile rows and columns that are read at once, (rows, columns)."""
        rows, columns = (
            max(1, BLOCK_SIDE // (side * self.shard)) * self.shard
            for side in (self.tile_height, self.tile_width)
        )
        return rows, columns


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """All decisions of a conversion, made before the first tile is read.

    Attributes
    ----------
    levels : tuple of PlannedLevel
        Levels of the result, plane by plane, finest first; the same number for each plane.
    planes : tuple of PlaneNumber
        Planes to write, sorted by t, then z: all combinations of the chosen t and z.
    shown : PlaneNumber
        The plane that the slide shows.
    channels : int
        Samples per pixel.
    dtype : numpy.dtype
        Sample type.
    rgb : bool
        Whether the channels are red, green, blue (and alpha).
    background : int or float
        Sample value of tiles that are not written.
    mpp : tuple of float or None
        Pixel size of the result in micrometers, (x, y).
    color : {"stored", "srgb"}
        Color space of the written pixels.
    outline : tuple of tuple of (float, float), optional
        Rings in pixels of the slide's level 0; pixels outside become background.
    z_spacing, time_step : float, optional
        Distance between planes in micrometers and seconds.
    position : Mapping of str to float
        Center of the first pixel and plane by axis, if the slide states it: x and y in micrometers
        (in pixels of the result if `mpp` is None), z in micrometers, t in seconds.
    """

    levels: tuple[PlannedLevel, ...]
    planes: tuple[PlaneNumber, ...]
    shown: PlaneNumber
    channels: int
    dtype: DType
    rgb: bool
    background: float
    mpp: tuple[float, float] | None
    color: Color = "stored"
    outline: Outline | None = None
    z_spacing: float | None = None
    time_step: float | None = None
    position: Mapping[str, float] = field(default_factory=dict)

    @property
    def levels_per_plane(self) -> int:
        """Number of levels per plane."""
        return len(self.levels) // len(self.planes)

    @property
    def pyramid(self) -> tuple[PlannedLevel, ...]:
        """Levels of the first plane."""
        return self.levels[: self.levels_per_plane]

    @property
    def stack_axes(self) -> dict[str, list[int]]:
        """Plane numbers along "t" and "z", for axes with more than one plane."""
        found = {"t": {plane.t for plane in self.planes}, "z": {plane.z for plane in self.planes}}
        return {axis: sorted(numbers) for axis, numbers in found.items() if len(numbers) > 1}

    @property
    def missing(self) -> int:
        """Number of planes that the slide lacks."""
        return sum(level.missing for level in self.levels) // self.levels_per_plane

    def indices_of(self, level: int) -> list[int]:
        """Return the indices in `levels` of one pyramid level in all planes."""
        return list(range(level, len(self.levels), self.levels_per_plane))

    @property
    def groups(self) -> Iterator[range]:
        """Yield the indices of each level that is read, with the levels averaged from it."""
        starts = [index for index, level in enumerate(self.levels) if not level.halved]
        ends = [*starts[1:], len(self.levels)]
        yield from (range(start, end) for start, end in zip(starts, ends, strict=True))

    @property
    def is_part(self) -> bool:
        """Whether only a part of the slide is written."""
        first = self.levels[0]
        whole = first.source.layout.height, first.source.layout.width
        return self.outline is not None or (first.height, first.width) != whole

    def blank_tiles(self, index: int) -> NDArray[np.bool_]:
        """Return a mask of tiles without stored source pixels, shape (rows, columns)."""
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
        if self.color != "stored":  # readers fill missing tiles with the unconverted background
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
    """Return the window of a level that a region in pixels of level 0 covers.

    Raises
    ------
    ConversionError
        If the region extends beyond the slide.
    """
    layout = level.layout
    if region is None:
        return Rect(0, 0, layout.height, layout.width)
    x, y, width, height = region
    if min(x, y) < 0 or x + width > slide.dimensions[0] or y + height > slide.dimensions[1]:
        raise ConversionError(
            f"The region {x},{y},{width},{height} extends beyond the slide "
            f"({slide.dimensions[0]} x {slide.dimensions[1]} pixels); choose a region within it."
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
    """Return the source offsets and byte counts of tiles of a copied level.

    Returns
    -------
    ndarray of int64, shape (2, planes, tiles)
    """
    rows, columns = np.array(tiles, np.int64).reshape(-1, 2).T
    rows = rows + level.window.top // level.tile_height
    columns = columns + level.window.left // level.tile_width
    return np.stack(level.source.layout.grid.ranges(rows, columns))
