"""`DeepZoomGenerator`: Deep Zoom tiles of a slide, by OpenSlide's names."""

from __future__ import annotations

import math
from io import BytesIO
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element, ElementTree, SubElement

from PIL import Image

from napari_wsigpu.compat.openslide.abstract import PROPERTY_NAME_BACKGROUND_COLOR
from napari_wsigpu.model.errors import RegionError

if TYPE_CHECKING:
    from napari_wsigpu.compat.openslide.abstract import AbstractSlide

    Pair = tuple[int, int]

NAMESPACE = "http://schemas.microsoft.com/deepzoom/2008"


class DeepZoomGenerator:
    """Cuts a slide into the tiles of a Deep Zoom pyramid, whose level 0 is one pixel.

    Parameters
    ----------
    osr : AbstractSlide
        The slide.
    tile_size : int
        Side of a tile without its overlap; with twice that it is best a power of two.
    overlap : int
        How many pixels a tile shares with each neighbour.
    limit_bounds : bool
        Show only what the slide's bounds say is not empty.

    Raises
    ------
    RegionError
        If tiles can't be so.
    """

    def __init__(
        self,
        osr: AbstractSlide,
        tile_size: int = 254,
        overlap: int = 1,
        limit_bounds: bool = False,
    ) -> None:
        if tile_size < 1 or overlap < 0:
            raise RegionError(
                f"Tiles of {tile_size} pixels that overlap by {overlap} can't be; use at least 1 "
                "and 0."
            )
        self._slide = osr
        self._side, self._overlap, self._limited = tile_size, overlap, limit_bounds
        properties = osr.properties
        self._background = f"#{properties.get(PROPERTY_NAME_BACKGROUND_COLOR, 'ffffff')}"
        width, height = osr.dimensions
        self._corner = (0, 0)
        # What of each level of the slide is shown.
        self._shown = osr.level_dimensions
        if limit_bounds:
            x, y, bound_width, bound_height = (
                int(properties.get(f"openslide.bounds-{name}", whole))
                for name, whole in (("x", 0), ("y", 0), ("width", width), ("height", height))
            )
            self._corner = (x, y)
            self._shown = tuple(
                (
                    math.ceil(columns * bound_width / width),
                    math.ceil(rows * bound_height / height),
                )
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
        """How many tiles each Deep Zoom level has, (across, down)."""
        return tuple(
            (-(-width // self._side), -(-height // self._side)) for width, height in self._sizes
        )

    @property
    def tile_count(self) -> int:
        """How many tiles there are, on all levels."""
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
            If there is no such level or tile.
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
        """Return the arguments of `read_region` that read a tile.

        Its pixels are then averaged, if the slide has no level of their size.
        """
        slide_level, location, read, _ = self._tile(level, address)
        return location, slide_level, read

    def get_tile_dimensions(self, level: int, address: Pair) -> Pair:
        """Return (width, height) of a tile."""
        return self._tile(level, address)[3]

    def get_dzi(self, format: str) -> str:  # noqa: A002
        """Return the XML of the `.dzi` file, for tiles of a format: ``"png"`` or ``"jpeg"``."""
        width, height = self._sizes[-1]
        image = Element(
            "Image",
            TileSize=str(self._side),
            Overlap=str(self._overlap),
            Format=format,
            xmlns=NAMESPACE,
        )
        SubElement(image, "Size", Width=str(width), Height=str(height))
        buffer = BytesIO()
        ElementTree(image).write(buffer, encoding="UTF-8")
        return buffer.getvalue().decode()

    def _tile(self, level: int, address: Pair) -> tuple[int, Pair, Pair, Pair]:
        """Return the slide's level, what of it is read, and the size of a tile."""
        if not 0 <= level < self.level_count:
            raise RegionError(
                f"There is no Deep Zoom level {level!r}; they are 0 to {self.level_count - 1}."
            )
        counts = self.level_tiles[level]
        if not all(0 <= place < count for place, count in zip(address, counts, strict=True)):
            raise RegionError(
                f"Deep Zoom level {level} has no tile {address!r}, but {counts[0]} x {counts[1]}."
            )
        slide_level = self._levels[level]
        factor = self._slide.level_downsamples[slide_level]
        step = self._steps[level] / factor
        location, read, size = [], [], []
        for axis in range(2):
            place, count, whole = address[axis], counts[axis], self._sizes[level][axis]
            before = self._overlap if place else 0
            after = self._overlap if place < count - 1 else 0
            begin = place * self._side
            length = min(self._side, whole - begin) + before + after
            first = step * (begin - before)
            location.append(int(factor * first + self._corner[axis]))
            left = self._shown[slide_level][axis] - math.ceil(first)
            read.append(int(min(math.ceil(step * length), left)))
            size.append(length)
        return slide_level, _pair(location), _pair(read), _pair(size)


def _pair(values: list[int]) -> Pair:
    first, second = values
    return first, second
