"""`DevicePicture`: what a display shows of a slide, drawn where its tiles are decoded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.display.at_hand import TilesAtHand
from napari_wsigpu.display.blocks import blocks, covered, touched, under
from napari_wsigpu.display.device_pixels import DevicePixels
from napari_wsigpu.display.picture import WORTH_DRAWING, Composed, LevelPicture, Shown
from napari_wsigpu.display.resample import Axis
from napari_wsigpu.gpu.device.tables import SCALED
from napari_wsigpu.model.geometry import Rect
from napari_wsigpu.reading.on_device import Drawn

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.color import ColorTable
    from napari_wsigpu.display.drawing import View
    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.reading.cache import TileKey
    from napari_wsigpu.reading.on_device import TilesOnDevice

    Tile = tuple[int, int]

TYPES = ("uint8", "uint16", "float32")
HERE = np.zeros(0, np.uint8)


def draws(image: LevelLayout, channel: int | None) -> bool:
    """Whether a device can draw a level's pixels as a display shows them."""
    if channel is None and image.channels > 1:
        return image.channels in (3, 4) and image.dtype == np.uint8
    return image.dtype.name in TYPES


class DeviceTilesAtHand(TilesAtHand):
    """The tiles of a slide that a device has; `get` says only whether one is there.

    Parameters
    ----------
    on_device : TilesOnDevice
        Where they are; kept as an attribute.
    slide, levels, overview, blank, channel
        As for `TilesAtHand`.
    """

    def __init__(
        self,
        on_device: TilesOnDevice,
        slide: int,
        levels: Mapping[int, LevelLayout],
        overview: NDArray[Any],
        blank: Any,
        channel: int | None,
    ) -> None:
        super().__init__(slide, levels, overview, blank, channel, {})  # type: ignore[arg-type]
        self.on_device = on_device
        self.failed: set[tuple[int, int, int]] = set()

    def get(self, level: int, row: int, column: int) -> NDArray[Any] | None:
        """Return something if a tile is known now."""
        tile = np.array([[row, column]], np.int64)
        here = self.on_device.here(self.numbers[level], tile)[0]
        return HERE if here or self.is_blank(level, row, column) else None

    def is_blank(self, level: int, row: int, column: int) -> bool:
        """Whether a tile shows the background."""
        return (level, row, column) in self.failed or self._is_blank(level, row, column)

    def absent(self, level: int, cells: Rect) -> tuple[set[Tile], set[Tile]]:
        """Return those of a block of tiles that are not known, and those that are background."""
        tiles = np.array(list(cells.cells()), np.int64).reshape(-1, 2)
        here = self.on_device.here(self.numbers[level], tiles)
        others = {(row, column) for row, column in tiles[~here].tolist()}
        blank = {tile for tile in others if self.is_blank(level, *tile)}
        return others - blank, blank


@dataclass(eq=False)
class _Seen(Shown):
    """A view, of which nothing but its tiles is known."""

    missing: set[Tile] = field(default_factory=set)


class DevicePicture(LevelPicture[_Seen]):
    """A picture that a device draws of the tiles that it has.

    Since a device draws a view faster than it would be copied, each is drawn anew.

    Parameters
    ----------
    tiles : DeviceTilesAtHand
        Which pixels of the slide are at hand; kept as an attribute.
    table : ColorTable or None
        The colours that pixels get.
    """

    tiles: DeviceTilesAtHand

    def __init__(self, tiles: DeviceTilesAtHand, table: ColorTable | None) -> None:
        super().__init__(tiles)
        self._table = table
        self._overview: Any = None

    def compose(self, view: View, fetch: Callable[[], float] = lambda: 0.0) -> Composed:
        """Return the best pixels of a region, as `DevicePixels`; see `LevelPicture.compose`."""
        now = self._now
        begins = now is None or now.view != view
        if now is None or begins:
            now = _Seen(view)
        with now.landed:
            self._now = now  # before its tiles are looked up, so that none lands unseen
            cells = touched(self.levels[view.level], view.rect)
            now.missing, blank = self.tiles.absent(view.level, cells)
            if begins:
                self._list_tiles(now, cells.cells())
            self._wait(now, fetch())
            if len(now.missing) > WORTH_DRAWING * now.count:
                return self._stand_in(view)
            pixels, gone = self._draw(view, now.missing, blank)
            if gone:  # what was decoded meanwhile took their place
                now.missing |= gone
                self._wait(now, fetch())
                pixels, gone = self._draw(view, now.missing, blank)
            if gone:
                now.missing |= gone
                fetch()
            return Composed(view, pixels, not (now.missing or gone))

    def _take(self, now: _Seen, landed: Mapping[TileKey, Any]) -> None:
        """Note the tiles that the device has now, and those that failed."""
        numbers = self.tiles.numbers
        for key, decoded in landed.items():
            if not decoded:
                self.tiles.failed.add((numbers.index(key.level), key.row, key.column))
            if key.level == numbers[now.view.level]:
                now.missing.discard((key.row, key.column))

    def _draw_coarser(self, coarse: View, view: View, most_absent: float) -> Any:
        """Draw what stands in for a view; None if more than this share of its tiles is absent."""
        cells = touched(self.levels[coarse.level], coarse.rect)
        absent, blank = self.tiles.absent(coarse.level, cells)
        if len(absent) > most_absent * cells.height * cells.width:
            return None
        return self._draw(coarse, absent, blank)[0]

    # Drawing

    def _draw(
        self, view: View, missing: Collection[Tile], blank: Collection[Tile]
    ) -> tuple[Any, set[Tile]]:
        """Draw a view: own tiles, and where they are missing the best others.

        Returns
        -------
        pixels : DevicePixels
            The view.
        gone : set of (int, int)
            Own tiles that were here, but are not any more.
        """
        number = self.tiles.numbers[view.level]
        drawn: list[Drawn] = []
        of_overview: list[NDArray[np.void]] = []
        for level, block in self._approximations(view, missing):
            tiles, parts = self._scaled(view, level, block)
            if level == len(self.levels) - 1:
                of_overview.append(parts)
            else:
                drawn.append(Drawn(self.tiles.numbers[level], tiles, parts))
        cells = touched(self.levels[view.level], view.rect)
        left_out = {*missing, *blank}
        own = np.array([tile for tile in cells.cells() if tile not in left_out], np.int64)
        if len(own):
            parts = _own_parts(self.levels[view.level], view.rect, own)
            drawn.append(Drawn(number, own, parts))
        on_device, overview = self.tiles.on_device, self.tiles.overview
        if of_overview and self._overview is None:
            self._overview = on_device.backend.send(np.ascontiguousarray(overview))
        flat = overview.ndim == 2
        pixels, gone = on_device.draw(
            drawn,
            (view.rect.height, view.rect.width),
            (self.tiles.channel or 0) if flat else None,
            self._table,
            np.concatenate(of_overview) if of_overview else None,
            self._overview,
            self.tiles.blank,
            holes=bool(blank) or bool(self.tiles.failed),
        )
        channels = 1 if flat else overview.shape[2]
        address = on_device.device.address(pixels)
        own_gone = {(row, column) for level, row, column in gone if level == number}
        return DevicePixels(pixels, channels, on_device.backend.fetch, address), own_gone

    def _approximations(self, view: View, missing: Collection[Tile]) -> Iterator[tuple[int, Rect]]:
        """Yield levels and the blocks of missing tiles that they stand in for, the worst first."""
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
        """Whether a level has all pixels under a tile."""
        part = view.rect.intersection(covered(self.levels[view.level], Rect(*tile, 1, 1)))
        assert part is not None
        other = self.levels[level]
        cells = touched(other, under(self.levels[view.level], other, part)).cells()
        return all(place not in absent for place in cells)

    def _scaled(
        self, view: View, level: int, block: Rect
    ) -> tuple[NDArray[np.int64], NDArray[np.void]]:
        """Return how another level's tiles show a block of the view's."""
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


def _runs(tiles: NDArray[np.intp]) -> list[tuple[int, int, int]]:
    """Return each tile of a row of pixels, where it begins, and how many pixels it has."""
    begins = np.flatnonzero(np.diff(tiles, prepend=-1))
    lengths = np.diff(begins, append=len(tiles))
    return list(zip(tiles[begins].tolist(), begins.tolist(), lengths.tolist(), strict=True))


def _own_parts(image: LevelLayout, rect: Rect, tiles: NDArray[np.int64]) -> NDArray[np.void]:
    """Return how tiles show a region of their own level."""
    size = np.array([image.grid.tile_height, image.grid.tile_width])
    corner, beyond = np.array([rect.top, rect.left]), np.array([rect.bottom, rect.right])
    first = tiles * size
    begin = np.maximum(first, corner)
    end = np.minimum(np.minimum(first + size, beyond), [image.height, image.width])
    parts = np.zeros(len(tiles), SCALED)
    at = begin - corner
    parts["target"] = at[:, 0] * rect.width + at[:, 1]
    parts["pitch"] = rect.width
    parts["height"], parts["width"] = (end - begin).T
    parts["rows"], parts["columns"] = (end - first).T
    parts["top"], parts["left"] = (begin - first).T
    parts["down"] = parts["across"] = 1
    return parts
