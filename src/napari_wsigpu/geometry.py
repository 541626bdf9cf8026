"""Rectangles and positions, in whichever pixels they are said to be."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator


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

    @property
    def centre(self) -> tuple[float, float]:
        """(y, x) of its middle."""
        return self.top + self.height / 2, self.left + self.width / 2

    @classmethod
    def between(cls, top: int, bottom: int, left: int, right: int) -> Rect:
        """Return the rectangle of these edges; `bottom` and `right` are beyond it."""
        return cls(top, left, bottom - top, right - left)

    def intersection(self, other: Rect) -> Rect | None:
        """Return what is in both; None if nothing is."""
        shared = Rect.between(
            max(self.top, other.top),
            min(self.bottom, other.bottom),
            max(self.left, other.left),
            min(self.right, other.right),
        )
        return shared if shared.height > 0 and shared.width > 0 else None

    def contains(self, other: Rect) -> bool:
        """Whether no part of another one lies outside."""
        return (
            self.top <= other.top
            and other.bottom <= self.bottom
            and self.left <= other.left
            and other.right <= self.right
        )

    def slices(self, inner: Rect) -> tuple[slice, slice]:
        """Return the rows and columns of another one that lies in this one, from its corner."""
        top, left = inner.top - self.top, inner.left - self.left
        return slice(top, top + inner.height), slice(left, left + inner.width)

    def cells(self) -> Iterator[tuple[int, int]]:
        """Yield row and column of each position, row by row."""
        for row in range(self.top, self.bottom):
            for column in range(self.left, self.right):
                yield row, column
