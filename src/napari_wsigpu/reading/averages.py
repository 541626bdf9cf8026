"""`Averages`: tiles that no file holds, and what of the finer level each is the average of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from napari_wsigpu.model.geometry import Rect
from napari_wsigpu.reading.average import area_average
from napari_wsigpu.reading.mosaic import touches
from napari_wsigpu.reading.plan import Regions, tile_rect

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.reading.parts import SlideParts
    from napari_wsigpu.storage.buffers import RegionMemory, TileMemory

GROUP_BYTES = 64 << 20


class Group(NamedTuple):
    """Tiles that are averaged at a time.

    Attributes
    ----------
    level : int
        Number of the finer level.
    tiles : list of int
        Their indices in the plan.
    pixels : list of ndarray
        Where the finer pixels of each go; background already where the file holds none.
    held : Regions
        What of the finer level is to be read.
    held_pixels : list of ndarray
        Where each of these regions goes.
    """

    level: int
    tiles: list[int]
    pixels: list[NDArray[Any]]
    held: Regions
    held_pixels: list[NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Averages:
    """Averages tiles of one slide's images.

    Parameters
    ----------
    parts : SlideParts
        The slide.
    region_memory, tile_memory
        Where finer pixels and averaged tiles are kept.
    """

    _parts: SlideParts
    _regions: RegionMemory
    _tiles: TileMemory

    def groups(
        self, number: int, places: NDArray[np.int64], tiles: NDArray[np.int64]
    ) -> Iterator[Group]:
        """Yield so many tiles as fit into memory with what they average.

        Parameters
        ----------
        number : int
            The image.
        places : ndarray of int64, shape (tiles, 2)
            Row and column of all tiles of a plan.
        tiles : ndarray of int64
            Indices of those to average.
        """
        image = self._parts.images[number]
        pixel = image.channels * image.dtype.itemsize
        group: list[int] = []
        rects: list[Rect] = []
        size = 0
        for tile in tiles.tolist():
            rect = self._below(number, *places[tile].tolist())
            area = rect.height * rect.width * pixel
            if group and size + area > GROUP_BYTES:
                yield self._group(number, group, rects)
                group, rects, size = [], [], 0
            group.append(tile)
            rects.append(rect)
            size += area
        if group:
            yield self._group(number, group, rects)

    def tile(self, number: int, place: NDArray[np.int64], pixels: NDArray[Any]) -> NDArray[Any]:
        """Return a tile, cut to the image, from the finer pixels below it.

        Parameters
        ----------
        number : int
            The image.
        place : ndarray of int64, shape (2,)
            Row and column of the tile.
        pixels : ndarray, shape (height, width, channels)
            Of the finer level.
        """
        image = self._parts.images[number]
        rect = tile_rect(image, *place.tolist())
        shape = (rect.height, rect.width, image.channels)
        memory = self._tiles.take(int(np.prod(shape)) * image.dtype.itemsize)
        tile = memory.view(image.dtype).reshape(shape)
        if not pixels.size:
            tile[...] = self._parts.layout.background
            return tile
        down, across = self._factors(number)
        if image.categorical:
            average = pixels[::down, ::across]
        else:
            average = area_average(pixels, down, across)
        tile[: average.shape[0], : average.shape[1]] = average
        tile[average.shape[0] :] = self._parts.layout.background
        tile[: average.shape[0], average.shape[1] :] = self._parts.layout.background
        return tile

    def _below(self, number: int, row: int, column: int) -> Rect:
        """Return what of the finer level a tile averages."""
        finer = self._parts.images[self._parts.finer[number]]
        down, across = self._factors(number)
        rect = tile_rect(self._parts.images[number], row, column)
        top, left = min(rect.top * down, finer.height), min(rect.left * across, finer.width)
        height = min(rect.height * down, finer.height - top)
        width = min(rect.width * across, finer.width - left)
        return Rect(top, left, height, width)

    def _group(self, number: int, tiles: list[int], rects: list[Rect]) -> Group:
        level = self._parts.finer[number]
        image = self._parts.images[level]
        pixels, held, held_pixels = [], [], []
        for rect in rects:
            target = self._regions.empty((rect.height, rect.width, image.channels), image.dtype)
            pixels.append(target)
            if self._is_blank(level, rect):
                target[...] = self._parts.layout.background
            else:
                held.append(rect)
                held_pixels.append(target)
        return Group(level, tiles, pixels, Regions.of(held), held_pixels)

    def _is_blank(self, number: int, rect: Rect) -> bool:
        """Whether neither this level nor a finer one holds any tile of a region."""
        if not rect.height or not rect.width:
            return True
        image = self._parts.images[number]
        if image.parts:
            return not touches(image, rect)
        if not image.computed and image.grid.holds_any(*rect):
            return False
        if image.missing == "background":
            return True
        factor_y, factor_x = self._factors(number)
        top, left, height, width = rect
        finer = Rect(top * factor_y, left * factor_x, height * factor_y, width * factor_x)
        return self._is_blank(self._parts.finer[number], finer)

    def _factors(self, number: int) -> tuple[int, int]:
        return factors(self._parts.images[number], self._parts.images[self._parts.finer[number]])


def factors(image: LevelLayout, finer: LevelLayout) -> tuple[int, int]:
    """Return how many rows and columns of the finer level become one."""
    return max(1, round(finer.height / image.height)), max(1, round(finer.width / image.width))
