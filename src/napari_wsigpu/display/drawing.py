"""`Drawing`: the pixels of one view, drawn from its own tiles or from tiles of other levels."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.display.blocks import blocks, covered, touched, under
from napari_wsigpu.display.resample import COARSE, Axis, draw, draw_smoothly, shows_blocks
from napari_wsigpu.model.geometry import Rect

if TYPE_CHECKING:
    from collections.abc import Iterator

    from napari_wsigpu.display.available_tiles import AvailableTiles, TileLookup
    from napari_wsigpu.model.arrays import Array, Indices

    Tile = tuple[int, int]


class View(NamedTuple):
    """A region of a level."""

    level: int
    rect: Rect


class Drawing:
    """The pixels of a view. Where nothing has been drawn yet, they are undefined.

    Parameters
    ----------
    view : View
        The view to draw.
    tiles : AvailableTiles
        The available tiles of the slide.
    pixels : ndarray, shape (height, width) or (height, width, channels)
        Receives the drawing; kept as an attribute.
    magnification : float
        Screen pixels per pixel of the view, along an axis.

    Attributes
    ----------
    view : View
        As given.
    missing : dict of (int, int) to int
        Tiles that do not show their own pixels yet, by row and column, and the rank of the
        substitute that they show: 0 for the next finer level, n for the nth coarser level,
        `nothing` if nothing has been drawn.
    nothing : int
        The rank of tiles where nothing has been drawn.
    """

    def __init__(
        self, view: View, tiles: AvailableTiles, pixels: Array, magnification: float = 1
    ) -> None:
        self.view = view
        self.pixels = pixels
        self.nothing = len(tiles.levels)
        self.missing: dict[Tile, int] = {}
        self._tiles = tiles
        self._levels = tiles.levels
        self._step = max(1, round(COARSE / magnification))

    @property
    def tiles(self) -> Iterator[Tile]:
        """Row and column of each tile that the view touches."""
        return touched(self._levels[self.view.level], self.view.rect).cells()

    @property
    def undrawn(self) -> int:
        """Number of tiles where nothing has been drawn."""
        return list(self.missing.values()).count(self.nothing)

    def part(self, tile: Tile) -> Rect:
        """Return the part of the view that a tile covers."""
        image = self._levels[self.view.level]
        part = self.view.rect.intersection(covered(image, Rect(*tile, 1, 1)))
        assert part is not None
        return part

    def paste(self, tile: Tile, own: Array) -> None:
        """Draw a tile's own pixels."""
        part = self.part(tile)
        inside = covered(self._levels[self.view.level], Rect(*tile, 1, 1)).slices(part)
        self.pixels[self.view.rect.slices(part)] = own[inside]
        self.missing.pop(tile, None)

    def approximate(self, lookup: TileLookup, *, coarser: bool = True) -> None:
        """Draw missing tiles from other levels that are better than the current pixels.

        Parameters
        ----------
        lookup : TileLookup
            Finds the tiles of other levels.
        coarser : bool
            Whether to use coarser levels too, or only the finer one.
        """
        by_level: dict[int, list[Tile]] = {}
        for tile, rank in self.missing.items():
            better = self._best_level(tile, rank if coarser else min(rank, 1), lookup)
            if better is not None:
                by_level.setdefault(better, []).append(tile)
        # Blocks of tiles from one level are drawn at once.
        for level, drawn in by_level.items():
            for block in blocks(drawn):
                self._draw(level, block, lookup)
            self.missing |= dict.fromkeys(drawn, self._rank(level))

    def _rank(self, level: int) -> int:
        """Return the rank of a level as a substitute; see `missing`."""
        return max(0, level - self.view.level)

    def _best_level(self, tile: Tile, rank: int, lookup: TileLookup) -> int | None:
        """Return the best level available for a whole tile; None if none is better than `rank`."""
        level: int = self.view.level
        top = len(self._levels) - 1
        if rank == 0:
            return None
        part = self.part(tile)
        for other in (level - 1, *range(level + 1, top)):
            if other < 0 or self._rank(other) >= rank:
                continue
            image = self._levels[other]
            cells = touched(image, under(self._levels[level], image, part)).cells()
            if all(lookup.tile(other, place) is not None for place in cells):
                return int(other)
        # The overview is the last level and always available.
        return top if self._rank(top) < rank else None

    def _draw(self, level: int, block: Rect, lookup: TileLookup) -> None:
        """Draw a block of the view's tiles from another level."""
        own, other = self._levels[self.view.level], self._levels[level]
        part = covered(own, block).intersection(self.view.rect)
        assert part is not None
        below = under(own, other, part)
        height, width = below.height, below.width
        by_rows, by_columns = other.height / own.height, other.width / own.width
        down = Axis(part.top * by_rows - below.top, by_rows)
        across = Axis(part.left * by_columns - below.left, by_columns)
        pixels = self.pixels[self.view.rect.slices(part)]
        if not own.categorical and shows_blocks(down, across, pixels, self._step):
            source = np.empty((height, width, *pixels.shape[2:]), pixels.dtype)
            self._gather(level, below, np.arange(height), np.arange(width), lookup, source)
            draw_smoothly(source, down, across, pixels, self._step)
        else:
            y, x = down.under(pixels.shape[0], height), across.under(pixels.shape[1], width)
            self._gather(level, below, y, x, lookup, pixels)

    def _gather(
        self,
        level: int,
        region: Rect,
        rows: Indices,
        columns: Indices,
        lookup: TileLookup,
        out: Array,
    ) -> None:
        """Draw the nearest pixel of a region of another level for each pixel of `out`.

        `rows` and `columns` are positions in the region; all of its tiles are available.
        """
        for top, left, tile in self._tiles_under(level, region, lookup):
            y = slice(*np.searchsorted(rows, (top, top + tile.shape[0])))
            x = slice(*np.searchsorted(columns, (left, left + tile.shape[1])))
            draw(tile, rows[y] - top, columns[x] - left, out[y, x])

    def _tiles_under(
        self, level: int, region: Rect, lookup: TileLookup
    ) -> Iterator[tuple[int, int, Array]]:
        """Yield the tiles under a region, each with its top and left relative to the region."""
        if level == len(self._levels) - 1:
            yield -region.top, -region.left, self._tiles.overview
            return
        image = self._levels[level]
        for row, column in touched(image, region).cells():
            tile = lookup.tile(level, (row, column))
            assert tile is not None
            top, left = row * image.grid.tile_height, column * image.grid.tile_width
            yield top - region.top, left - region.left, tile
