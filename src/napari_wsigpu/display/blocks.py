"""Group tiles into rectangles, which are drawn faster than single tiles."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from napari_wsigpu.model.geometry import Rect

if TYPE_CHECKING:
    from collections.abc import Collection

    from napari_wsigpu.model.layout import LevelLayout


def blocks(tiles: Collection[tuple[int, int]]) -> list[Rect]:
    """Cover a set of tiles, given by row and column, with few rectangles that don't overlap."""
    found: list[Rect] = []
    # Index in `found` of each block that the previous row ended with, by its columns.
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
    """Return the pixels that a block of tiles covers, cut to the image."""
    height, width = image.grid.tile_height, image.grid.tile_width
    return Rect.between(
        block.top * height,
        min(block.bottom * height, image.height),
        block.left * width,
        min(block.right * width, image.width),
    )


def touched(image: LevelLayout, pixels: Rect) -> Rect:
    """Return the block of tiles that a rectangle of pixels touches."""
    height, width = image.grid.tile_height, image.grid.tile_width
    return Rect.between(
        pixels.top // height,
        -(-pixels.bottom // height),
        pixels.left // width,
        -(-pixels.right // width),
    )


def under(own: LevelLayout, other: LevelLayout, part: Rect) -> Rect:
    """Return the pixels of another level that nearest-neighbor sampling reads under a part."""
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
    """Split ascending numbers into runs without gaps, as (first, last + 1)."""
    gaps = [index for index, (a, b) in enumerate(pairwise(columns), 1) if b > a + 1]
    return [(columns[a], columns[b - 1] + 1) for a, b in pairwise((0, *gaps, len(columns)))]
