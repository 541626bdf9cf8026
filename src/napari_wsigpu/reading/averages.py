"""`Averages`: compute tiles missing from the file by averaging the finer level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from napari_wsigpu import native
from napari_wsigpu.model.geometry import Rect
from napari_wsigpu.reading.average import area_average, can_halve
from napari_wsigpu.reading.mosaic import touches
from napari_wsigpu.reading.plan import Regions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from napari_wsigpu.model.arrays import Array, Integers
    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.reading.parts import SlideParts
    from napari_wsigpu.storage.buffers import TileMemory

# Bytes of finer pixels in a group. Two groups fit into the memory that `TileMemory` keeps.
GROUP_BYTES = 32 << 20


class Group(NamedTuple):
    """Tiles that are averaged together.

    Attributes
    ----------
    level : int
        Number of the finer level.
    tiles : list of int
        Indices of the tiles in the plan.
    pixels : list of ndarray
        Buffer for the finer pixels of each tile, already filled with background if the file
        holds none of them.
    held : Regions
        Regions of the finer level to read.
    held_pixels : list of ndarray
        The buffer of each of these regions.
    """

    level: int
    tiles: list[int]
    pixels: list[Array]
    held: Regions
    held_pixels: list[Array]


@dataclass(frozen=True, eq=False)
class Averages:
    """Computes tiles of one slide's images from finer levels.

    Parameters
    ----------
    parts : SlideParts
        The slide.
    memory : TileMemory
        Provides buffers for averaged tiles, and for the finer pixels under them.
    """

    _parts: SlideParts
    _memory: TileMemory

    def groups(self, number: int, places: Integers, tiles: Integers) -> Iterator[Group]:
        """Yield groups of tiles whose finer pixels fit into `GROUP_BYTES`, or of one tile.

        Parameters
        ----------
        number : int
            Number of the image.
        places : ndarray of int64, shape (tiles, 2)
            Row and column of all tiles of a plan.
        tiles : ndarray of int64
            Indices of the tiles to average.
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

    def halves(
        self, number: int, places: Integers, pixels: Sequence[Array], threads: int
    ) -> dict[int, Array]:
        """Average the finer pixels under tiles with the core, as far as it can; see `tile`.

        Returns
        -------
        dict of int to ndarray
            The averaged tiles, by their index in `places`.
        """
        image = self._parts.images[number]
        found: dict[int, Array] = {}
        if native.core is None or image.categorical or self._factors(number) != (2, 2):
            return found
        for index, place in enumerate(places.tolist()):
            rect = image.tile_rect(*place)
            shape = rect.height, rect.width, image.channels
            if can_halve(pixels[index], shape):
                found[index] = self._memory.empty(shape, image.dtype)
        native.core.halve([pixels[index] for index in found], [*found.values()], threads)
        return found

    def tile(self, number: int, place: Integers, pixels: Array) -> Array:
        """Average the finer pixels under a tile; return the tile, cropped to the image.

        Parameters
        ----------
        number : int
            Number of the image.
        place : ndarray of int64, shape (2,)
            Row and column of the tile.
        pixels : ndarray, shape (height, width, channels)
            Pixels of the finer level.
        """
        image = self._parts.images[number]
        rect = image.tile_rect(*place.tolist())
        tile = self._memory.empty((rect.height, rect.width, image.channels), image.dtype)
        if not pixels.size:
            tile[...] = self._parts.layout.background
            return tile
        down, across = self._factors(number)
        if image.categorical:
            average = pixels[::down, ::across]  # the mean of two labels would be a third label
        else:
            average = area_average(pixels, down, across)
        # The level may extend beyond the area that the finer level covers.
        tile[: average.shape[0], : average.shape[1]] = average
        tile[average.shape[0] :] = self._parts.layout.background
        tile[: average.shape[0], average.shape[1] :] = self._parts.layout.background
        return tile

    def _below(self, number: int, row: int, column: int) -> Rect:
        """Return the rectangle of the finer level that lies under a tile."""
        finer = self._parts.images[self._parts.finer[number]]
        down, across = self._factors(number)
        rect = self._parts.images[number].tile_rect(row, column)
        # The factors are rounded, so the rectangle may exceed the finer level.
        top, left = min(rect.top * down, finer.height), min(rect.left * across, finer.width)
        height = min(rect.height * down, finer.height - top)
        width = min(rect.width * across, finer.width - left)
        return Rect(top, left, height, width)

    def _group(self, number: int, tiles: list[int], rects: list[Rect]) -> Group:
        """Allocate the buffers of a group; `rects` are the finer rectangles under its tiles."""
        level = self._parts.finer[number]
        image = self._parts.images[level]
        pixels, held, held_pixels = [], [], []
        for rect in rects:
            target = self._memory.empty((rect.height, rect.width, image.channels), image.dtype)
            pixels.append(target)
            if self._is_blank(level, rect):
                target[...] = self._parts.layout.background
            else:
                held.append(rect)
                held_pixels.append(target)
        return Group(level, tiles, pixels, Regions.of(held), held_pixels)

    def _is_blank(self, number: int, rect: Rect) -> bool:
        """Return whether neither this level nor a finer one holds any tile of a region."""
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
    """Return how many rows and columns of the finer level one pixel averages."""
    return max(1, round(finer.height / image.height)), max(1, round(finer.width / image.width))
