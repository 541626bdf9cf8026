"""Rectangles and positions, in whichever pixels they are said to be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, overload

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Self

    from numpy.typing import NDArray

    Integers = NDArray[np.int64]

# Rectangles that overlap in so many pairs, on average, are no picture of anything.
MOST_PAIRS, FEW_PAIRS = 64, 1 << 13
Value = TypeVar("Value")


class computed_once(Generic[Value]):  # noqa: N801 (a decorator)
    """A property that keeps its first value, as `functools.cached_property` does, without a lock.

    That of Python 3.11 locks one for all instances: a process forked meanwhile would wait for ever.
    """

    def __init__(self, function: Callable[[Any], Value]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...
    def __get__(self, instance: object | None, owner: type) -> Self | Value:
        if instance is None:
            return self
        value: Value = self._function(instance)
        vars(instance)[self._name] = value
        return value


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


def expand(first: Integers, count: Integers) -> tuple[Integers, Integers]:
    """Count up from each first number; return whose each number is, and the number."""
    count = np.maximum(count, 0)
    past = np.cumsum(count)
    owner = np.repeat(np.arange(len(count)), count)
    numbers = np.arange(int(past[-1]) if len(past) else 0)
    return owner, numbers + (first - past + count)[owner]


@dataclass(frozen=True, eq=False)
class Rects:
    """Many rectangles, found by where they are.

    Attributes
    ----------
    tops, lefts, bottoms, rights : ndarray of int64, shape (rectangles,)
        Their edges; `bottoms` and `rights` are beyond them.
    """

    tops: Integers
    lefts: Integers
    bottoms: Integers
    rights: Integers

    def __len__(self) -> int:
        return len(self.tops)

    def __getitem__(self, chosen: Integers | NDArray[np.bool_]) -> Rects:
        """Return some of them."""
        return Rects(*(edges[chosen] for edges in self.edges))

    @property
    def edges(self) -> tuple[Integers, Integers, Integers, Integers]:
        """Tops, lefts, bottoms, rights."""
        return self.tops, self.lefts, self.bottoms, self.rights

    @computed_once
    def _bins(self) -> tuple[int, int, int, Integers, Integers]:
        """Return side of the square bins, first column, their columns, and each one's entries."""
        sides = np.concatenate([self.bottoms - self.tops, self.rights - self.lefts])
        side = max(1, int(sides.mean())) if len(sides) else 1
        while True:
            rows = self.tops // side, (self.bottoms - 1) // side
            columns = self.lefts // side, (self.rights - 1) // side
            down, across = rows[1] - rows[0] + 1, columns[1] - columns[0] + 1
            if float((down.astype(float) * across).sum()) <= 8 * len(self) + 8:
                break
            side *= 2
        first = int(columns[0].min()) if len(self) else 0
        width = int(columns[1].max()) - first + 1 if len(self) else 1
        owner, row = expand(rows[0], down)
        again, column = expand(columns[0][owner], across[owner])
        keys = row[again] * width + column - first
        order = np.argsort(keys, kind="stable")
        return side, first, width, keys[order], owner[again][order]

    def touching(self, others: Rects, most: int | None = None) -> tuple[Integers, Integers]:
        """Return all pairs of one of `others` and one of these that share a pixel: their indices.

        Raises
        ------
        ValueError
            If more than `most` have to be looked at.
        """
        if len(self) * len(others) <= FEW_PAIRS:  # to compare all is faster than to look for some
            real = (self.tops < others.bottoms[:, None]) & (self.bottoms > others.tops[:, None])
            real &= (self.lefts < others.rights[:, None]) & (self.rights > others.lefts[:, None])
            one, other = np.nonzero(real & (others.bottoms > others.tops)[:, None])
            return one, other
        side, first, width, keys, items = self._bins
        begin = np.maximum(others.lefts // side - first, 0)
        end = np.minimum((others.rights - 1) // side - first, width - 1)
        # Rows of bins that hold nothing are not gone through.
        low, high = (int(keys[0]) // width, int(keys[-1]) // width) if len(keys) else (0, -1)
        above = np.maximum(others.tops // side, low)
        below = np.minimum((others.bottoms - 1) // side, high)
        some = (others.bottoms > others.tops) & (end >= begin)
        owner, row = expand(above, np.where(some, below - above + 1, 0))
        lowest = np.searchsorted(keys, row * width + begin[owner])
        highest = np.searchsorted(keys, row * width + end[owner], "right")
        if most is not None and int((highest - lowest).sum()) > most:
            raise ValueError("its pictures lie on top of each other")
        line, entry = expand(lowest, highest - lowest)
        pair = np.unique(owner[line] * max(1, len(self)) + items[entry])
        one, other = np.divmod(pair, max(1, len(self)))
        real = (
            (self.tops[other] < others.bottoms[one])
            & (self.bottoms[other] > others.tops[one])
            & (self.lefts[other] < others.rights[one])
            & (self.rights[other] > others.lefts[one])
        )
        return one[real], other[real]

    def visible(self) -> tuple[Integers, Rects]:
        """Return what is seen of them if each lies on top of those before it.

        Returns
        -------
        owner : ndarray of int64
            Whose each part is.
        parts : Rects
            No two of them share a pixel.

        Raises
        ------
        ValueError
            If far too many of them overlap.
        """
        below, above = self.touching(self, MOST_PAIRS * (len(self) + MOST_PAIRS))
        below, above = below[above > below], above[above > below]
        starts = np.searchsorted(below, np.arange(len(self) + 1))
        owner, parts, turn = np.arange(len(self)), self, 0
        while True:
            here = starts[owner] + turn
            cut = here < starts[owner + 1]
            if not cut.any():
                return owner, parts
            upper = self[above[here[cut]]]
            kept, old, whose = parts[~cut], parts[cut], owner[cut]
            top = np.clip(upper.tops, old.tops, old.bottoms)
            bottom = np.clip(upper.bottoms, top, old.bottoms)
            left = np.clip(upper.lefts, old.lefts, old.rights)
            right = np.clip(upper.rights, left, old.rights)
            pieces = (
                Rects(old.tops, old.lefts, top, old.rights),
                Rects(bottom, old.lefts, old.bottoms, old.rights),
                Rects(top, old.lefts, bottom, left),
                Rects(top, right, bottom, old.rights),
            )
            owner = np.concatenate([owner[~cut], *[whose] * len(pieces)])
            joined = zip(kept.edges, *(piece.edges for piece in pieces), strict=True)
            parts = Rects(*(np.concatenate(edges) for edges in joined))
            some = (parts.bottoms > parts.tops) & (parts.rights > parts.lefts)
            owner, parts, turn = owner[some], parts[some], turn + 1
