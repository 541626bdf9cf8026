"""`DeepZoomGenerator`: Deep Zoom tiles of a slide, with OpenSlide's interface."""

from __future__ import annotations

import math
import operator
from io import BytesIO
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element, ElementTree, SubElement

from PIL import Image

from napari_wsigpu.compat.openslide.abstract import PROPERTY_NAME_BACKGROUND_COLOR
from napari_wsigpu.model.errors import RegionError

if TYPE_CHECKING:
    from napari_wsigpu.compat.openslide.abstract import AbstractSlide
    from napari_wsigpu.model.geometry import Pair

NAMESPACE = "http://schemas.microsoft.com/deepzoom/2008"


class DeepZoomGenerator:
    """Generates the tiles of a Deep Zoom pyramid, whose level 0 is a single pixel.

    Parameters
    ----------
    osr : AbstractSlide
        The slide.
    tile_size : int
        Side of a tile without overlap; `tile_size` + 2 * `overlap` should be a power of two.
    overlap : int
        Number of pixels added on each side that has a neighboring tile.
    limit_bounds : bool
        Show only the non-empty part of the slide, as given by its bounds.

    Raises
    ------
    RegionError
        If `tile_size` is below 1 or `overlap` below 0.
    """

    def __init__(
        self, osr: AbstractSlide, tile_size: int = 254, overlap: int = 1, limit_bounds: bool = False
    ) -> None:
        tile_size, overlap = operator.index(tile_size), operator.index(overlap)
        if tile_size < 1 or overlap < 0:
            raise RegionError(
                f"Invalid tile_size {tile_size} and overlap {overlap}; use at least 1 and 0."
            )
        self._slide = osr
        self._side, self._overlap, self._limited = tile_size, overlap, limit_bounds
        properties = osr.properties
        self._background = f"#{properties.get(PROPERTY_NAME_BACKGROUND_COLOR, 'ffffff')}"
        width, height = osr.dimensions
        self._corner = (0, 0)
        # (width, height) of the shown part of each slide level.
        self._shown = osr.level_dimensions
        if limit_bounds:
            x, y, bound_width, bound_height = (
                int(properties.get(f"openslide.bounds-{name}", whole))
                for name, whole in (("x", 0), ("y", 0), ("width", width), ("height", height))
            )
            self._corner = (x, y)
            self._shown = tuple(
                (math.ceil(columns * bound_width / width), math.ceil(rows * bound_height / height))
                for columns, rows in osr.level_dimensions
            )
        sizes = [self._shown[0]]
        while max(sizes[-1]) > 1:
            sizes.append((-(-sizes[-1][0] // 2), -(-sizes[-1][1] // 2)))
        self._sizes = tuple(reversed(sizes))
        self._steps = [2.0 ** (len(sizes) - 1 - level) for level in range(len(sizes))]
        self._levels = [osr.get_best_level_for_downsample(step) for step in self._steps]

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self._slide!r}, tile_size={self._side!r}, "
            f"overlap={self._overlap!r}, limit_bounds={self._limited!r})"
        )

    @property
    def level_count(self) -> int:
        """Number of Deep Zoom levels."""
        return len(self._sizes)

    @property
    def level_dimensions(self) -> tuple[Pair, ...]:
        """(width, height) of each Deep Zoom level."""
        return self._sizes

    @property
    def level_tiles(self) -> tuple[Pair, ...]:
        """Number of (columns, rows) of tiles in each Deep Zoom level."""
        side = self._side
        return tuple((-(-width // side), -(-height // side)) for width, height in self._sizes)

    @property
    def tile_count(self) -> int:
        """Number of tiles in all levels."""
        return sum(across * down for across, down in self.level_tiles)

    def get_tile(self, level: int, address: Pair) -> Image.Image:
        """Read a tile as an RGB image.

        Parameters
        ----------
        level : int
            Deep Zoom level.
        address : tuple of int
            (column, row) of the tile.

        Raises
        ------
        RegionError
            If the level or tile does not exist.
        """
        location, slide_level, read = self.get_tile_coordinates(level, address)
        size = self.get_tile_dimensions(level, address)
        region = self._slide.read_region(location, slide_level, read)
        tile = Image.new("RGB", region.size, self._background)
        tile.paste(region, mask=region)
        if tile.size != size:
            tile.thumbnail(size, Image.Resampling.LANCZOS)
        profile = region.info.get("icc_profile")
        if profile is not None:
            tile.info["icc_profile"] = profile
        return tile

    def get_tile_coordinates(self, level: int, address: Pair) -> tuple[Pair, int, Pair]:
        """Return the arguments (location, level, size) of `read_region` for a tile.

        `get_tile` scales the region down if the slide has no level of the tile's resolution.
        """
        slide_level, location, read, _ = self._tile(level, address)
        return location, slide_level, read

    def get_tile_dimensions(self, level: int, address: Pair) -> Pair:
        """Return (width, height) of a tile."""
        return self._tile(level, address)[3]

    def get_dzi(self, format: str) -> str:  # noqa: A002
        """Return the XML of the `.dzi` file for tiles in a format, ``"png"`` or ``"jpeg"``."""
        width, height = self._sizes[-1]
        side, overlap = str(self._side), str(self._overlap)
        image = Element("Image", TileSize=side, Overlap=overlap, Format=format, xmlns=NAMESPACE)
        SubElement(image, "Size", Width=str(width), Height=str(height))
        buffer = BytesIO()
        ElementTree(image).write(buffer, encoding="UTF-8")
        return buffer.getvalue().decode()

    def _tile(self, level: int, address: Pair) -> tuple[int, Pair, Pair, Pair]:
        """Return the slide level of a tile, the location and size to read, and the tile size."""
        # Small types of NumPy would overflow below.
        level, address = operator.index(level), _pair([*map(operator.index, address)])
        if not 0 <= level < self.level_count:
            last = self.level_count - 1
            raise RegionError(f"There is no Deep Zoom level {level!r}; use 0 to {last}.")
        counts = self.level_tiles[level]
        if not all(0 <= index < count for index, count in zip(address, counts, strict=True)):
            across, down = counts
            raise RegionError(
                f"Deep Zoom level {level} has no tile {address!r}; it has {across} x {down} tiles."
            )
        slide_level = self._levels[level]
        factor = self._slide.level_downsamples[slide_level]
        step = self._steps[level] / factor
        location, read, size = [], [], []
        for axis in range(2):
            index, count, whole = address[axis], counts[axis], self._sizes[level][axis]
            before = self._overlap if index else 0
            after = self._overlap if index < count - 1 else 0
            start = index * self._side
            length = min(self._side, whole - start) + before + after
            first = step * (start - before)
            location.append(int(factor * first + self._corner[axis]))
            left = self._shown[slide_level][axis] - math.ceil(first)
            read.append(int(min(math.ceil(step * length), left)))
            size.append(length)
        return slide_level, _pair(location), _pair(read), _pair(size)


def _pair(values: list[int]) -> Pair:
    first, second = values
    return first, second
