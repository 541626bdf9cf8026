"""Sets of tiles as rectangles, which are read and drawn faster than tile by tile."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from napari_wsigpu.model.geometry import Rect

if TYPE_CHECKING:
    from collections.abc import Collection

    from napari_wsigpu.model.layout import LevelLayout


def blocks(tiles: Collection[tuple[int, int]]) -> list[Rect]:
    """Cut a set of tiles, given by row and column, into few rectangles that don't overlap."""
    found: list[Rect] = []
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
                found.append(Rect(row, left, 1, right - left))
            else:
                found[index] = found[index]._replace(height=row + 1 - found[index].top)
            grown[left, right] = index
        growing, last = grown, row
    return found


def covered(image: LevelLayout, block: Rect) -> Rect:
    """Return the pixels of an image that a block of its tiles covers."""
    height, width = image.grid.tile_height, image.grid.tile_width
    return Rect.between(
        block.top * height,
        min(block.bottom * height, image.height),
        block.left * width,
        min(block.right * width, image.width),
    )


def touched(image: LevelLayout, pixels: Rect) -> Rect:
    """Return the tiles that pixels of an image lie in."""
    height, width = image.grid.tile_height, image.grid.tile_width
    return Rect.between(
        pixels.top // height,
        -(-pixels.bottom // height),
        pixels.left // width,
        -(-pixels.right // width),
    )


def under(own: LevelLayout, other: LevelLayout, part: Rect) -> Rect:
    """Return the pixels of another level that lie under a part of one."""
    down, across = other.height / own.height, other.width / own.width
    top, bottom = (int((y + 0.5) * down) for y in (part.top, part.bottom - 1))
    left, right = (int((x + 0.5) * across) for x in (part.left, part.right - 1))
    return Rect.between(
        min(top, other.height - 1),
        min(bottom, other.height - 1) + 1,
        min(left, other.width - 1),
        min(right, other.width - 1) + 1,
    )


def _runs(columns: list[int]) -> list[tuple[int, int]]:
    """Cut ascending numbers into runs without a gap, (first, beyond the last)."""
    gaps = [index for index, (a, b) in enumerate(pairwise(columns), 1) if b > a + 1]
    return [(columns[a], columns[b - 1] + 1) for a, b in pairwise((0, *gaps, len(columns)))]
