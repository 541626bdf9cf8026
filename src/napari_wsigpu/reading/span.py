"""Positions along one axis of a level, and the tiles that they lie in."""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """`length` positions along one axis: start, start + step, ... (step > 0)."""

    start: int
    step: int
    length: int


class Overlap(NamedTuple):
    """The part of a span that lies in one tile."""

    tile: int
    target: slice
    source: slice


def overlaps(span: Span, tile_size: int) -> list[Overlap]:
    """Cut a span at the borders of tiles; tiles without a position are left out."""
    found = []
    start, step, length = span
    index = 0
    while index < length:
        position = start + index * step
        tile = position // tile_size
        end = min(length, -(-((tile + 1) * tile_size - start) // step))
        first = position - tile * tile_size
        source = slice(first, first + (end - index - 1) * step + 1, step)
        found.append(Overlap(tile, slice(index, end), source))
        index = end
    return found
