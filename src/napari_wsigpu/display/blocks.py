"""Sets of tiles as rectangles, which are read and drawn faster than tile by tile."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple

from napari_wsigpu.geometry import Span

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from napari_wsigpu.layout import LevelLayout


class Block(NamedTuple):
    """A rectangle of tiles; `bottom` and `right` are beyond it."""

    top: int
    bottom: int
    left: int
    right: int

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Yield row and column of each of its tiles."""
        for row in range(self.top, self.bottom):
            for column in range(self.left, self.right):
                yield row, column


def blocks(tiles: Collection[tuple[int, int]]) -> list[Block]:
    """Cut a set of tiles, given by row and column, into few rectangles that don't overlap."""
    found: list[Block] = []
    growing: dict[tuple[int, int], int] = {}
    last = None
    for row, in_row in groupby(sorted(set(tiles)), key=lambda tile: tile[0]):
        runs = _runs([column for _, column in in_row])
        if row - 1 != last:
            growing = {}
        grown: dict[tuple[int, int], int] = {}
        for left, right in runs:
            index = growing.get((left, right))
            if index is None:
                index = len(found)
                found.append(Block(row, row + 1, left, right))
            else:
                found[index] = found[index]._replace(bottom=row + 1)
            grown[left, right] = index
        growing, last = grown, row
    return found


def extent(image: LevelLayout, block: Block) -> tuple[Span, Span]:
    """Return the rows and columns of an image that a block covers."""
    height, width = image.grid.tile_height, image.grid.tile_width
    top, left = block.top * height, block.left * width
    bottom, right = min(block.bottom * height, image.height), min(block.right * width, image.width)
    return Span(top, 1, bottom - top), Span(left, 1, right - left)


def _runs(columns: list[int]) -> list[tuple[int, int]]:
    """Cut ascending numbers into runs without a gap, (first, beyond the last)."""
    gaps = [index for index, (a, b) in enumerate(pairwise(columns), 1) if b > a + 1]
    return [(columns[a], columns[b - 1] + 1) for a, b in pairwise((0, *gaps, len(columns)))]
