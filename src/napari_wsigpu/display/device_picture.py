"""`DevicePicture`: a picture that is drawn on the device that decodes its tiles."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import compress
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.display.available_tiles import AvailableTiles
from napari_wsigpu.display.blocks import blocks, covered, touched, under
from napari_wsigpu.display.device_pixels import DevicePixels
from napari_wsigpu.display.picture import WORTH_DRAWING, Composed, LevelPicture, Shown
from napari_wsigpu.display.resample import Axis
from napari_wsigpu.display.source import hatched
from napari_wsigpu.gpu.device.kernel_tables import SCALED
from napari_wsigpu.model.geometry import Rect
from napari_wsigpu.reading.on_device import LevelTiles

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from napari_wsigpu.codecs.color import ColorTable
    from napari_wsigpu.display.drawing import View
    from napari_wsigpu.model.arrays import AnyArray, Array, DeviceArray, Indices, Integers, Records
    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.reading.cache import TileKey
    from napari_wsigpu.reading.on_device import DrawableTiles

    Tile = tuple[int, int]

TYPES = ("uint8", "uint16", "float32")
AVAILABLE = np.zeros(0, np.uint8)


def draws(image: LevelLayout, channel: int | None) -> bool:
    """Return whether a device can draw a level as a display shows it."""
    if channel is None and image.channels > 1:
        return image.channels in (3, 4) and image.dtype == np.uint8
    return image.dtype.name in TYPES


class AvailableDeviceTiles(AvailableTiles):
    """The tiles of a slide in device memory; `get` returns only whether a tile is available.

    Parameters
    ----------
    on_device : DrawableTiles
        The tiles in device memory; kept as an attribute.
    slide, levels, overview, blank, channel
        As in `AvailableTiles`.

    Attributes
    ----------
    failed : set of (int, int, int)
        Level, row and column of each tile that failed to decode and is hatched.
    """

    def __init__(
        self,
        on_device: DrawableTiles,
        slide: int,
        levels: Mapping[int, LevelLayout],
        overview: Array,
        blank: float | Array,
        channel: int | None,
    ) -> None:
        # Without a cache on the host, as `get` looks tiles up on the device.
        cache: Any = {}
        super().__init__(slide, levels, overview, blank, channel, cache, on_device.color)
        self.on_device = on_device
        self.failed: set[tuple[int, int, int]] = set()

    def get(self, level: int, row: int, column: int) -> Array | None:
        """Return an empty array if a tile is available; None otherwise."""
        tile = np.array([[row, column]], np.int64)
        here = self.on_device.decoded(self.numbers[level], tile)[0]
        return AVAILABLE if here or self.is_blank(level, row, column) else None

    def is_blank(self, level: int, row: int, column: int) -> bool:
        """Return whether there is nothing to decode: the tile is background, or it has failed."""
        return (level, row, column) in self.failed or self._is_blank(level, row, column)

    def absent(self, level: int, cells: Rect) -> tuple[set[Tile], set[Tile]]:
        """Return the unavailable tiles of a block, and its tiles with nothing to decode."""
        tiles = _tiles_in(cells)
        tiles = tiles[~self.on_device.ready(self.numbers[level], tiles)]
        others = [(row, column) for row, column in tiles.tolist()]
        if self.levels[level].parts or self.failed:
            blank = {tile for tile in others if self.is_blank(level, *tile)}
        else:
            blank = {*compress(others, self._is_lacking(level, *tiles.T))}
        return {*others} - blank, blank


@dataclass(eq=False)
class _ShownOnDevice(Shown):
    """A view that is drawn again in each call, so only the state of its tiles is kept."""

    missing: set[Tile] = field(default_factory=set)


class DevicePicture(LevelPicture[_ShownOnDevice]):
    """A picture that a device draws from tiles in its memory.

    Each view is drawn in full, which is faster on a device than copying the previous one.

    Parameters
    ----------
    tiles : AvailableDeviceTiles
        The available tiles of the slide; kept as an attribute.
    table : ColorTable or None
        Converts pixels to sRGB; None to show them as stored.
    """

    tiles: AvailableDeviceTiles

    def __init__(self, tiles: AvailableDeviceTiles, table: ColorTable | None) -> None:
        super().__init__(tiles)
        self._table = table
        # Pixels in the colors that are shown: the overview, on the host and on the device, and a
        # hatched tile on the device.
        self._overview: tuple[Array, DeviceArray] | None = None
        self._hatched: dict[tuple[int, ...], DeviceArray] = {}

    def compose(self, view: View, fetch: Callable[[], float] = lambda: 0.0) -> Composed:
        """Return the best pixels of a view as `DevicePixels`; see `LevelPicture.compose`."""
        now = self._now
        is_new = now is None or now.view != view
        if now is None or is_new:
            now = _ShownOnDevice(view)
        with now.changed:
            self._now = now  # before the lookup of its tiles, so that `add` misses none
            cells = touched(self.levels[view.level], view.rect)
            now.missing, blank = self.tiles.absent(view.level, cells)
            if is_new:
                self._list_tiles(now, cells.cells())
            self._wait(now, fetch())
            if len(now.missing) > WORTH_DRAWING * now.count:
                return self._coarser_view(view)
            pixels, gone = self._draw(view, now.missing, blank)
            if gone:  # newly decoded tiles have evicted them
                now.missing |= gone
                self._wait(now, fetch())
                pixels, gone = self._draw(view, now.missing, blank)
            if gone:
                now.missing |= gone
                fetch()
            return Composed(view, pixels, not (now.missing or gone))

    def _add(self, now: _ShownOnDevice, decoded: Mapping[TileKey, bool]) -> None:
        """Record the tiles that are now in device memory, and the failed tiles."""
        numbers = self.tiles.numbers
        for key, succeeded in decoded.items():
            if not succeeded:
                self.tiles.failed.add((numbers.index(key.image), key.row, key.column))
            if key.image == numbers[now.view.level]:
                now.missing.discard((key.row, key.column))

    def _draw_coarser(self, coarse: View, view: View, most_absent: float) -> AnyArray:
        """Draw a coarser view; return None if more than `most_absent` of its tiles are absent."""
        cells = touched(self.levels[coarse.level], coarse.rect)
        absent, blank = self.tiles.absent(coarse.level, cells)
        if len(absent) > most_absent * cells.height * cells.width:
            return None
        return self._draw(coarse, absent, blank)[0]

    def _draw(
        self, view: View, missing: Collection[Tile], blank: Collection[Tile]
    ) -> tuple[DevicePixels, set[Tile]]:
        """Draw a view's own tiles, and the best substitutes for missing ones.

        Returns
        -------
        pixels : DevicePixels
            The pixels of the view.
        gone : set of (int, int)
            Tiles of the view's own level that have been evicted since the lookup.
        """
        number = self.tiles.numbers[view.level]
        drawn: list[LevelTiles] = []
        of_overview: list[Records] = []
        for level, block in self._approximations(view, missing):
            tiles, parts = self._scaled(view, level, block)
            if level == len(self.levels) - 1:
                of_overview.append(parts)
            else:
                drawn.append(LevelTiles(self.tiles.numbers[level], tiles, parts))
        cells = touched(self.levels[view.level], view.rect)
        own, left_out = _tiles_in(cells), {*missing, *blank}
        if left_out:
            own = own[[tile not in left_out for tile in cells.cells()]]
        if len(own):
            parts = _own_parts(self.levels[view.level], view.rect, own)
            drawn.append(LevelTiles(number, own, parts))
        on_device, overview = self.tiles.on_device, self.tiles.overview
        pictures: list[tuple[DeviceArray, Records]] = []
        if of_overview:
            if self._overview is None or self._overview[0] is not overview:
                sent = on_device.backend.send(np.ascontiguousarray(overview))
                self._overview = overview, sent  # a composite's overview may be renewed
            pictures.append((self._overview[1], np.concatenate(of_overview)))
        failed = [tile for tile in blank if (view.level, *tile) in self.tiles.failed]
        if failed:
            parts = _own_parts(self.levels[view.level], view.rect, np.array(failed, np.int64))
            pictures.append((self._hatched_tile(view.level), parts))
        flat = overview.ndim == 2
        pixels, gone = on_device.draw(
            drawn,
            (view.rect.height, view.rect.width),
            (self.tiles.channel or 0) if flat else None,
            self._table,
            pictures,
            self.tiles.blank,
            holes=bool(blank) or bool(self.tiles.failed),
        )
        channels = 1 if flat else overview.shape[2]
        address = on_device.device.address(pixels)
        own_gone = {(row, column) for level, row, column in gone if level == number}
        return DevicePixels(pixels, channels, on_device.backend.fetch, address), own_gone

    def _hatched_tile(self, level: int) -> DeviceArray:
        """Return a tile on the device that is shown in place of damaged ones."""
        overview, grid = self.tiles.overview, self.levels[level].grid
        shape = grid.tile_height, grid.tile_width, *overview.shape[2:]
        if shape not in self._hatched:
            tile = hatched(shape, self.tiles.blank, overview.dtype)
            self._hatched[shape] = self.tiles.on_device.backend.send(tile)
        return self._hatched[shape]

    def _approximations(self, view: View, missing: Collection[Tile]) -> Iterator[tuple[int, Rect]]:
        """Yield levels and the blocks of missing tiles that they replace, worst first."""
        top = len(self.levels) - 1
        left = set(missing)
        found: list[tuple[int, list[Tile]]] = []
        for level in (view.level - 1, *range(view.level + 1, top)):
            if level < 0 or not left:
                continue
            other = self.levels[level]
            cells = touched(other, under(self.levels[view.level], other, view.rect))
            absent, blank = self.tiles.absent(level, cells)
            absent |= blank
            if len(absent) == cells.height * cells.width:
                continue
            good = [tile for tile in left if self._has(view, tile, level, absent)]
            found.append((level, good))
            left.difference_update(good)
        found.append((top, list(left)))
        for level, tiles in reversed(found):
            for block in blocks(tiles):
                yield level, block

    def _has(self, view: View, tile: Tile, level: int, absent: Collection[Tile]) -> bool:
        """Return whether all pixels of a level under a tile are available."""
        part = view.rect.intersection(covered(self.levels[view.level], Rect(*tile, 1, 1)))
        assert part is not None
        other = self.levels[level]
        cells = touched(other, under(self.levels[view.level], other, part)).cells()
        return all(place not in absent for place in cells)

    def _scaled(self, view: View, level: int, block: Rect) -> tuple[Integers, Records]:
        """Return the tiles of another level under a block of the view, and their scaled parts."""
        own, other = self.levels[view.level], self.levels[level]
        part = covered(own, block).intersection(view.rect)
        assert part is not None
        by_rows, by_columns = other.height / own.height, other.width / own.width
        down, across = Axis(part.top * by_rows, by_rows), Axis(part.left * by_columns, by_columns)
        whole = level == len(self.levels) - 1
        grid = other.grid
        high = other.height if whole else grid.tile_height
        wide = other.width if whole else grid.tile_width
        tiles, parts = [], []
        rows = _runs(down.under(part.height, other.height) // high)
        columns = _runs(across.under(part.width, other.width) // wide)
        for row, y, height in rows:
            for column, x, width in columns:
                tiles.append((row, column))
                first_row, first_column = row * high, column * wide
                target = (part.top - view.rect.top + y) * view.rect.width
                target += part.left - view.rect.left + x
                held = min(high, other.height - first_row), min(wide, other.width - first_column)
                top = down.start + y * by_rows - first_row
                left = across.start + x * by_columns - first_column
                size = view.rect.width, height, width
                parts.append((0, target, *size, *held, top, left, by_rows, by_columns))
        return np.array(tiles, np.int64), np.array(parts, SCALED)


def _tiles_in(cells: Rect) -> Integers:
    """Return the rows and columns of a block of tiles, in the order of `Rect.cells`."""
    return np.argwhere(np.ones(cells[2:], np.bool_)) + cells[:2]


def _runs(tiles: Indices) -> list[tuple[int, int, int]]:
    """Return (tile, start, length) of each run of pixels that lie in the same tile."""
    starts = np.flatnonzero(np.diff(tiles, prepend=-1))
    lengths = np.diff(starts, append=len(tiles))
    return list(zip(tiles[starts].tolist(), starts.tolist(), lengths.tolist(), strict=True))


def _own_parts(image: LevelLayout, rect: Rect, tiles: Integers) -> Records:
    """Return the parts of tiles that show a region of their own level."""
    size = np.array([image.grid.tile_height, image.grid.tile_width])
    corner, beyond = np.array([rect.top, rect.left]), np.array([rect.bottom, rect.right])
    first = tiles * size
    start = np.maximum(first, corner)
    end = np.minimum(np.minimum(first + size, beyond), [image.height, image.width])
    parts = np.zeros(len(tiles), SCALED)
    at = start - corner
    parts["target"] = at[:, 0] * rect.width + at[:, 1]
    parts["pitch"] = rect.width
    parts["height"], parts["width"] = (end - start).T
    parts["rows"], parts["columns"] = (end - first).T
    parts["top"], parts["left"] = (start - first).T
    parts["down"] = parts["across"] = 1
    return parts
