"""Rectangles and positions, in whichever pixels they are said to be."""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """`length` positions along one axis: start, start + step, ... (step > 0)."""

    start: int
    step: int
    length: int


class Rect(NamedTuple):
    """A rectangle of pixels, or of tiles."""

    top: int
    left: int
    height: int
    width: int

    @property
    def bottom(self) -> int:
        """The row below the last one."""
        return self.top + self.height

    @property
    def right(self) -> int:
        """The column beyond the last one."""
        return self.left + self.width
