"""What a display shows of a slide while tiles are still being decoded."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from napari_wsigpu.display.blocks import blocks, covered, touched
from napari_wsigpu.display.resample import Axis, draw, draw_smoothly, shows_blocks
from napari_wsigpu.geometry import Rect
from napari_wsigpu.reading.cache import TileKey
from napari_wsigpu.reading.mosaic import touches
from napari_wsigpu.reading.plan import tile_rect

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from numpy.typing import NDArray

    from napari_wsigpu.layout import LevelLayout
    from napari_wsigpu.memory import PictureMemory
    from napari_wsigpu.reading.cache import TileCache

    Tile = tuple[int, int]


class View(NamedTuple):
    """A region of a level."""

    level: int
    rect: Rect


class Picture:
    """One display's picture of a slide's levels, composed of what is at hand; never waits.

    Tiles that are not at hand yet show the best other pixels there are: those of the next finer
    level, else of the coarser ones, at last of the overview, which always is at hand.

    `land` may be called by any thread, everything else by one.

    Parameters
    ----------
    slide : int
        Number of the slide in the keys of its tiles, in the colours that are shown.
    levels : Mapping of int to LevelLayout
        The levels of the display by their numbers, finest first.
    overview : ndarray
        All pixels of the coarsest level; kept as an attribute.
    blank : int, float or ndarray, shape (channels,)
        Value of pixels that the file does not hold.
    channel : int or None
        The channel that is shown; None for all.
    cache : TileCache
        Where tiles are at hand.
    memory : PictureMemory
        What to compose in.

    Attributes
    ----------
    levels : list of LevelLayout
        The levels, finest first.
    found, lacked : list of TileKey
        The tiles of the view that were at hand when it was composed first, and the others.
    """

    def __init__(
        self,
        slide: int,
        levels: Mapping[int, LevelLayout],
        overview: NDArray[Any],
        blank: Any,
        channel: int | None,
        cache: TileCache,
        memory: PictureMemory,
    ) -> None:
        self._slide = slide
        self._numbers = list(levels)
        self.levels = list(levels.values())
        self.overview = overview
        self._blank = blank
        self._channel = channel
        self._cache = cache
        self._memory = memory
        self._lock = threading.Lock()
        self._landed: dict[TileKey, NDArray[Any]] = {}
        self._served: set[TileKey] = set()
        self._view: View | None = None
        self._pixels: NDArray[Any] = overview
        self._missing: dict[Tile, int] = {}
        self._touched: dict[tuple[int, int, int], bool] = {}
        self.found: list[TileKey] = []
        self.lacked: list[TileKey] = []

    @property
    def view(self) -> View | None:
        """The region that was composed last."""
        return self._view

    @property
    def missing(self) -> Collection[Tile]:
        """Row and column of each tile of the view that does not show its own pixels yet."""
        return self._missing.keys()

    def key_of(self, level: int, row: int, column: int) -> TileKey:
        """Name a tile, its level being an index in `levels`."""
        return TileKey(self._slide, self._numbers[level], row, column)

    def land(self, tiles: Mapping[TileKey, NDArray[Any]]) -> bool:
        """Take decoded tiles; return whether the view may show better pixels by them."""
        with self._lock:
            view = self._view
            if view is None or not self._missing:
                return False
            useful = self._numbers[max(0, view.level - 1) :]
            own = self._numbers[view.level]
            taken = {
                key: self._shown(tile)
                for key, tile in tiles.items()
                if key.slide == self._slide
                and key.level in useful
                and (key.level != own or (key.row, key.column) in self._missing)
            }
            self._landed |= taken
            self._served |= taken.keys()
            return bool(taken)

    @property
    def complete_at_hand(self) -> bool:
        """Whether composing the view again would show its own pixels everywhere."""
        with self._lock:
            view = self._view
            return view is None or all(
                self.key_of(view.level, *tile) in self._landed for tile in self._missing
            )

    def compose(self, view: View) -> NDArray[Any]:
        """Return the best pixels at hand of a region; the same array while it is the same one."""
        with self._lock:
            landed, self._landed = self._landed, {}
            hand = _Hand(self, landed)
            if view != self._view:
                self._served.clear()
                self._begin(view, hand)
            self._improve(hand)
        return self._pixels

    def was_served(self, level: int, row: int, column: int) -> bool:
        """Whether a tile has landed for this view, though it may be at hand no more."""
        return self.key_of(level, row, column) in self._served

    def is_blank(self, level: int, row: int, column: int) -> bool:
        """Whether a tile is known to be background without decoding anything."""
        image = self.levels[level]
        if image.parts:
            place = level, row, column
            if place not in self._touched:
                self._touched[place] = touches(image, tile_rect(image, row, column))
            return not self._touched[place]
        return image.missing == "background" and not image.grid.byte_counts[:, row, column].any()

    def at_hand(self, level: int, row: int, column: int) -> NDArray[Any] | None:
        """Return the pixels of a tile if they are known now, as the display shows them."""
        tile = self._cache.get(self.key_of(level, row, column))
        if tile is not None:
            return self._shown(tile)
        if self.is_blank(level, row, column):
            image = self.levels[level]
            shape = (image.grid.tile_height, image.grid.tile_width, image.channels)
            return self._shown(np.broadcast_to(np.asarray(self._blank, image.dtype), shape))
        return None

    def _shown(self, tile: NDArray[Any]) -> NDArray[Any]:
        return tile if self._channel is None else tile[..., self._channel]

    def _begin(self, view: View, hand: _Hand) -> None:
        """Compose another region: of the old picture, as far as it goes, and of what is at hand."""
        image = self.levels[view.level]
        shape = (view.rect.height, view.rect.width, *self.overview.shape[2:])
        old_view, old, old_missing = self._view, self._pixels, self._missing
        common = None
        if old_view is not None and old_view.level == view.level:
            common = view.rect.intersection(old_view.rect)
        pixels = self._memory.empty(shape, image.dtype)
        fresh: dict[Tile, NDArray[Any] | None] = {}
        missing: dict[Tile, int] = {}
        tiles = list(touched(image, view.rect).cells())
        for tile in tiles:
            if common is not None and common.contains(_clipped(view, image, tile)):
                if tile in old_missing:
                    missing[tile] = old_missing[tile]
            else:
                fresh[tile] = hand.tile(view.level, tile)
        self._view, self._pixels, self._missing = view, pixels, missing
        absent = [tile for tile, pixels_of in fresh.items() if pixels_of is None]
        self._approximate(dict.fromkeys(absent, len(self.levels)), hand)
        if common is not None and old_view is not None:
            pixels[view.rect.slices(common)] = old[old_view.rect.slices(common)]
        for tile, own in fresh.items():
            if own is not None:
                self._paste(tile, own)
        keys = {tile: self.key_of(view.level, *tile) for tile in tiles}
        self.found = [key for tile, key in keys.items() if tile not in self._missing]
        self.lacked = [keys[tile] for tile in self._missing]

    def _improve(self, hand: _Hand) -> None:
        """Show tiles that came to hand since, and better pixels for those that did not."""
        assert self._view is not None
        for tile in list(self._missing):
            own = hand.tile(self._view.level, tile)
            if own is not None:
                self._paste(tile, own)
                del self._missing[tile]
        self._approximate(self._missing, hand)

    def _paste(self, tile: Tile, own: NDArray[Any]) -> None:
        assert self._view is not None
        _put(self._pixels, self._view, self.levels[self._view.level], tile, own)

    def _approximate(self, shown: Mapping[Tile, int], hand: _Hand) -> None:
        """Draw tiles by pixels of other levels that are better than what is shown.

        `shown` is the rank of the level that each tile shows now.
        """
        by_level: dict[int, list[Tile]] = {}
        for tile, rank in shown.items():
            better = self._best_level(tile, rank, hand)
            if better is not None:
                by_level.setdefault(better, []).append(tile)
        for level, tiles in by_level.items():
            for block in blocks(tiles):
                self._draw(level, block, hand)
            self._missing |= dict.fromkeys(tiles, self._rank(level))

    def _rank(self, level: int) -> int:
        """Order levels by how well they stand in for the view's: finer, then ever coarser ones."""
        assert self._view is not None
        return max(0, level - self._view.level)

    def _best_level(self, tile: Tile, rank: int, hand: _Hand) -> int | None:
        """Return the best level that has all of a tile at hand, if it is better than a rank."""
        assert self._view is not None
        level: int = self._view.level
        top = len(self.levels) - 1
        part = _clipped(self._view, self.levels[level], tile)
        for other in (level - 1, *range(level + 1, top)):
            if other < 0 or self._rank(other) >= rank:
                continue
            under = touched(self.levels[other], self._under(part, other))
            if all(hand.tile(other, place) is not None for place in under.cells()):
                return int(other)
        return top if self._rank(top) < rank else None

    def _under(self, part: Rect, level: int) -> Rect:
        """Return the region of another level that lies under a part of the view."""
        assert self._view is not None
        own, other = self.levels[self._view.level], self.levels[level]
        down, across = other.height / own.height, other.width / own.width
        top, bottom = (int((y + 0.5) * down) for y in (part.top, part.bottom - 1))
        left, right = (int((x + 0.5) * across) for x in (part.left, part.right - 1))
        return Rect.between(
            min(top, other.height - 1),
            min(bottom, other.height - 1) + 1,
            min(left, other.width - 1),
            min(right, other.width - 1) + 1,
        )

    def _draw(self, level: int, block: Rect, hand: _Hand) -> None:
        """Draw a block of the view's tiles by the pixels of another level."""
        assert self._view is not None
        own, other = self.levels[self._view.level], self.levels[level]
        part = covered(own, block).intersection(self._view.rect)
        assert part is not None
        under = self._under(part, level)
        height, width = under.height, under.width
        by_rows, by_columns = other.height / own.height, other.width / own.width
        down = Axis(part.top * by_rows - under.top, by_rows)
        across = Axis(part.left * by_columns - under.left, by_columns)
        pixels = self._pixels[self._view.rect.slices(part)]
        if shows_blocks(down, across, pixels):
            source = np.empty((height, width, *pixels.shape[2:]), pixels.dtype)
            self._gather(level, under, np.arange(height), np.arange(width), hand, source)
            draw_smoothly(source, down, across, pixels)
        else:
            y, x = down.under(pixels.shape[0], height), across.under(pixels.shape[1], width)
            self._gather(level, under, y, x, hand, pixels)

    def _gather(
        self,
        level: int,
        under: Rect,
        rows: NDArray[np.intp],
        columns: NDArray[np.intp],
        hand: _Hand,
        out: NDArray[Any],
    ) -> None:
        """Draw one pixel of a region of another level, whose tiles are at hand, for each of `out`.

        `rows` and `columns` count from the region's corner.
        """
        for top, left, tile in self._pieces(level, under, hand):
            y = slice(*np.searchsorted(rows, (top, top + tile.shape[0])))
            x = slice(*np.searchsorted(columns, (left, left + tile.shape[1])))
            draw(tile, rows[y] - top, columns[x] - left, out[y, x])

    def _pieces(
        self, level: int, under: Rect, hand: _Hand
    ) -> Iterator[tuple[int, int, NDArray[Any]]]:
        """Yield what is at hand under a region, and where it begins, seen from its corner."""
        if level == len(self.levels) - 1:
            yield -under.top, -under.left, self.overview
            return
        image = self.levels[level]
        for row, column in touched(image, under).cells():
            tile = hand.tile(level, (row, column))
            assert tile is not None
            top, left = row * image.grid.tile_height, column * image.grid.tile_width
            yield top - under.top, left - under.left, tile


class _Hand:
    """Tiles that were found at hand during one composition, so that none is looked up twice."""

    def __init__(self, picture: Picture, landed: Mapping[TileKey, NDArray[Any]]) -> None:
        self._picture = picture
        self._landed = landed
        self._tiles: dict[tuple[int, Tile], NDArray[Any] | None] = {}

    def tile(self, level: int, tile: Tile) -> NDArray[Any] | None:
        """Return a tile's pixels, or None if it is not at hand."""
        place = level, tile
        if place not in self._tiles:
            pixels = self._landed.get(self._picture.key_of(level, *tile))
            self._tiles[place] = self._picture.at_hand(level, *tile) if pixels is None else pixels
        return self._tiles[place]


def _put(
    pixels: NDArray[Any], view: View, image: LevelLayout, tile: Tile, own: NDArray[Any]
) -> None:
    """Copy what a view shows of a tile to its place in the view's pixels."""
    part = _clipped(view, image, tile)
    pixels[view.rect.slices(part)] = own[covered(image, Rect(*tile, 1, 1)).slices(part)]


def _clipped(view: View, image: LevelLayout, tile: Tile) -> Rect:
    """Return the part of a view that a tile covers."""
    part = view.rect.intersection(covered(image, Rect(*tile, 1, 1)))
    assert part is not None
    return part
