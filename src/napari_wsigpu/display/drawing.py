"""`Drawing`: the pixels of one view, tile by tile its own or those of another level."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from napari_wsigpu.display.blocks import blocks, covered, touched, under
from napari_wsigpu.display.resample import COARSE, Axis, draw, draw_smoothly, shows_blocks
from napari_wsigpu.model.geometry import Rect

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from napari_wsigpu.display.at_hand import Hand, TilesAtHand

    Tile = tuple[int, int]


class View(NamedTuple):
    """A region of a level."""

    level: int
    rect: Rect


class Drawing:
    """Pixels of a view in an array of their own; where nothing was drawn they are undefined.

    Parameters
    ----------
    view : View
        What is drawn.
    tiles : TilesAtHand
        The slide.
    pixels : ndarray, shape (height, width) or (height, width, channels)
        What to draw in; kept as an attribute.
    magnified : float
        How many pixels a screen shows for one, along an axis.

    Attributes
    ----------
    view : View
        As given.
    missing : dict of (int, int) to int
        Row and column of each tile that does not show its own pixels yet, and how well what it
        shows stands in for them: 0 is a finer level, n the nth coarser one, `nothing` the worst.
    nothing : int
        The rank of tiles where nothing was drawn.
    """

    def __init__(
        self, view: View, tiles: TilesAtHand, pixels: NDArray[Any], magnified: float = 1
    ) -> None:
        self.view = view
        self.pixels = pixels
        self.nothing = len(tiles.levels)
        self.missing: dict[Tile, int] = {}
        self._tiles = tiles
        self._levels = tiles.levels
        self._step = max(1, round(COARSE / magnified))

    @property
    def tiles(self) -> Iterator[Tile]:
        """Row and column of each tile that the view touches."""
        return touched(self._levels[self.view.level], self.view.rect).cells()

    @property
    def undrawn(self) -> int:
        """How many tiles show nothing at all."""
        return list(self.missing.values()).count(self.nothing)

    def part(self, tile: Tile) -> Rect:
        """Return the part of the view that a tile covers."""
        image = self._levels[self.view.level]
        part = self.view.rect.intersection(covered(image, Rect(*tile, 1, 1)))
        assert part is not None
        return part

    def paste(self, tile: Tile, own: NDArray[Any]) -> None:
        """Show a tile's own pixels."""
        part = self.part(tile)
        inside = covered(self._levels[self.view.level], Rect(*tile, 1, 1)).slices(part)
        self.pixels[self.view.rect.slices(part)] = own[inside]
        self.missing.pop(tile, None)

    def approximate(self, hand: Hand, *, coarser: bool = True) -> None:
        """Draw missing tiles by pixels of other levels that are better than what they show.

        Parameters
        ----------
        hand : Hand
            Where those levels' tiles are.
        coarser : bool
            Whether coarser levels will do, or the finer one alone.
        """
        by_level: dict[int, list[Tile]] = {}
        for tile, rank in self.missing.items():
            better = self._best_level(tile, rank if coarser else min(rank, 1), hand)
            if better is not None:
                by_level.setdefault(better, []).append(tile)
        for level, drawn in by_level.items():
            for block in blocks(drawn):
                self._draw(level, block, hand)
            self.missing |= dict.fromkeys(drawn, self._rank(level))

    def _rank(self, level: int) -> int:
        """Order levels by how well they stand in for the view's: finer, then ever coarser ones."""
        return max(0, level - self.view.level)

    def _best_level(self, tile: Tile, rank: int, hand: Hand) -> int | None:
        """Return the best level that has all of a tile at hand, if it is better than a rank."""
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
            if all(hand.tile(other, place) is not None for place in cells):
                return int(other)
        return top if self._rank(top) < rank else None

    def _draw(self, level: int, block: Rect, hand: Hand) -> None:
        """Draw a block of the view's tiles by the pixels of another level."""
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
            self._gather(level, below, np.arange(height), np.arange(width), hand, source)
            draw_smoothly(source, down, across, pixels, self._step)
        else:
            y, x = down.under(pixels.shape[0], height), across.under(pixels.shape[1], width)
            self._gather(level, below, y, x, hand, pixels)

    def _gather(
        self,
        level: int,
        region: Rect,
        rows: NDArray[np.intp],
        columns: NDArray[np.intp],
        hand: Hand,
        out: NDArray[Any],
    ) -> None:
        """Draw one pixel of a region of another level, whose tiles are at hand, for each of `out`.

        `rows` and `columns` count from the region's corner.
        """
        for top, left, tile in self._pieces(level, region, hand):
            y = slice(*np.searchsorted(rows, (top, top + tile.shape[0])))
            x = slice(*np.searchsorted(columns, (left, left + tile.shape[1])))
            draw(tile, rows[y] - top, columns[x] - left, out[y, x])

    def _pieces(
        self, level: int, region: Rect, hand: Hand
    ) -> Iterator[tuple[int, int, NDArray[Any]]]:
        """Yield what is at hand under a region, and where it begins, seen from its corner."""
        if level == len(self._levels) - 1:
            yield -region.top, -region.left, self._tiles.overview
            return
        image = self._levels[level]
        for row, column in touched(image, region).cells():
            tile = hand.tile(level, (row, column))
            assert tile is not None
            top, left = row * image.grid.tile_height, column * image.grid.tile_width
            yield top - region.top, left - region.left, tile
