"""Rectangles and positions along an axis; the caller chooses the unit, pixels or tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar, overload

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Self

    from numpy.typing import NDArray

    Integers = NDArray[np.int64]
    Mask = NDArray[np.bool_]
    # A location (x, y) or size (width, height), unless stated otherwise.
    Pair = tuple[int, int]

# A mosaic with more overlapping pairs per rectangle, on average, is considered damaged.
MOST_PAIRS = 64
# Up to this number of pairs, comparing all of them is faster than building an index.
FEW_PAIRS = 1 << 13
Value = TypeVar("Value")


class computed_once(Generic[Value]):  # noqa: N801 (a decorator)
    """A property that is computed once per instance, as with `functools.cached_property`.

    It takes no lock. `cached_property` in Python 3.11 has one lock for all instances, so a process
    that is forked while another thread holds that lock would wait forever. Without a lock, two
    threads may both compute the first value; the later one is kept.
    """

    def __init__(self, function: Callable[..., Value]) -> None:
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
    """`length` positions along one axis: start, start + step, ... with step > 0."""

    start: int
    step: int
    length: int


class Rect(NamedTuple):
    """A rectangle of pixels or of tiles."""

    top: int
    left: int
    height: int
    width: int

    @property
    def bottom(self) -> int:
        """First row below the rectangle."""
        return self.top + self.height

    @property
    def right(self) -> int:
        """First column to the right of the rectangle."""
        return self.left + self.width

    @property
    def center(self) -> tuple[float, float]:
        """(y, x) of the center."""
        return self.top + self.height / 2, self.left + self.width / 2

    @classmethod
    def between(cls, top: int, bottom: int, left: int, right: int) -> Rect:
        """Return the rectangle with these edges; `bottom` and `right` are exclusive."""
        return cls(top, left, bottom - top, right - left)

    def intersection(self, other: Rect) -> Rect | None:
        """Return the common part of two rectangles; None if they do not overlap."""
        top, bottom = max(self.top, other.top), min(self.bottom, other.bottom)
        left, right = max(self.left, other.left), min(self.right, other.right)
        shared = Rect.between(top, bottom, left, right)
        return shared if shared.height > 0 and shared.width > 0 else None

    def contains(self, other: Rect) -> bool:
        """Whether `other` lies entirely within this rectangle."""
        return (
            self.top <= other.top
            and other.bottom <= self.bottom
            and self.left <= other.left
            and other.right <= self.right
        )

    def slices(self, inner: Rect) -> tuple[slice, slice]:
        """Return the row and column slices of `inner`, relative to this rectangle's corner."""
        top, left = inner.top - self.top, inner.left - self.left
        return slice(top, top + inner.height), slice(left, left + inner.width)

    def cells(self) -> Iterator[tuple[int, int]]:
        """Yield (row, column) of each position, row by row."""
        for row in range(self.top, self.bottom):
            for column in range(self.left, self.right):
                yield row, column


def expand(first: Integers, count: Integers) -> tuple[Integers, Integers]:
    """Concatenate the ranges from ``first[i]`` to ``first[i] + count[i] - 1``.

    Returns
    -------
    owner : ndarray of int64
        For each number, the index i of its range.
    numbers : ndarray of int64
        The numbers themselves.
    """
    count = np.maximum(count, 0)
    past = np.cumsum(count)
    owner = np.repeat(np.arange(len(count)), count)
    numbers = np.arange(int(past[-1]) if len(past) else 0)
    return owner, numbers + (first - past + count)[owner]


@dataclass(frozen=True, eq=False)
class Rects:
    """Many rectangles, with a spatial index to find overlaps.

    Attributes
    ----------
    tops, lefts, bottoms, rights : ndarray of int64, shape (rectangles,)
        Edges; `bottoms` and `rights` are exclusive.
    """

    tops: Integers
    lefts: Integers
    bottoms: Integers
    rights: Integers

    def __len__(self) -> int:
        return len(self.tops)

    def __getitem__(self, chosen: Integers | Mask) -> Rects:
        """Return a selection of the rectangles."""
        return Rects(*(edges[chosen] for edges in self.edges))

    @property
    def edges(self) -> tuple[Integers, Integers, Integers, Integers]:
        """Tops, lefts, bottoms, rights."""
        return self.tops, self.lefts, self.bottoms, self.rights

    @computed_once
    def _bins(self) -> tuple[int, int, int, Integers, Integers]:
        """Assign the rectangles to square bins.

        Returns
        -------
        side, first, width : int
            Side of a bin in pixels, the first column of bins, and the number of columns.
        keys, items : ndarray of int64
            Bin numbers in ascending order, each with the index of a rectangle that touches the bin.
        """
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
        """Return all overlapping pairs: indices into `others`, and indices into these rectangles.

        Raises
        ------
        ValueError
            If more than `most` candidate pairs would have to be compared.
        """
        if len(self) * len(others) <= FEW_PAIRS:
            real = (self.tops < others.bottoms[:, None]) & (self.bottoms > others.tops[:, None])
            real &= (self.lefts < others.rights[:, None]) & (self.rights > others.lefts[:, None])
            one, other = np.nonzero(real & (others.bottoms > others.tops)[:, None])
            return one, other
        side, first, width, keys, items = self._bins
        start = np.maximum(others.lefts // side - first, 0)
        stop = np.minimum((others.rights - 1) // side - first, width - 1)
        # Skip rows of bins above the first and below the last rectangle.
        low, high = (int(keys[0]) // width, int(keys[-1]) // width) if len(keys) else (0, -1)
        above = np.maximum(others.tops // side, low)
        below = np.minimum((others.bottoms - 1) // side, high)
        some = (others.bottoms > others.tops) & (stop >= start)
        owner, row = expand(above, np.where(some, below - above + 1, 0))
        lowest = np.searchsorted(keys, row * width + start[owner])
        highest = np.searchsorted(keys, row * width + stop[owner], "right")
        if most is not None and int((highest - lowest).sum()) > most:
            raise ValueError("too many of its images overlap")
        line, entry = expand(lowest, highest - lowest)
        # A pair that shares several bins is found once per bin.
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
        """Cut the rectangles so that none overlaps another; later ones cover earlier ones.

        Returns
        -------
        owner : ndarray of int64
            Index of the rectangle that each part belongs to.
        parts : Rects
            The visible parts.

        Raises
        ------
        ValueError
            If far too many rectangles overlap.
        """
        below, above = self.touching(self, MOST_PAIRS * (len(self) + MOST_PAIRS))
        below, above = below[above > below], above[above > below]
        starts = np.searchsorted(below, np.arange(len(self) + 1))
        # In round `turn`, each part is cut by the `turn`-th of the rectangles above its owner.
        owner, parts, turn = np.arange(len(self)), self, 0
        while True:
            here = starts[owner] + turn
            cut = here < starts[owner + 1]
            if not cut.any():
                return owner, parts
            upper = self[above[here[cut]]]
            kept, old, owners = parts[~cut], parts[cut], owner[cut]
            top = np.clip(upper.tops, old.tops, old.bottoms)
            bottom = np.clip(upper.bottoms, top, old.bottoms)
            left = np.clip(upper.lefts, old.lefts, old.rights)
            right = np.clip(upper.rights, left, old.rights)
            # The rest is above, below, left and right of the rectangle on top.
            rests = (
                Rects(old.tops, old.lefts, top, old.rights),
                Rects(bottom, old.lefts, old.bottoms, old.rights),
                Rects(top, old.lefts, bottom, left),
                Rects(top, right, bottom, old.rights),
            )
            owner = np.concatenate([owner[~cut], *[owners] * len(rests)])
            joined = zip(kept.edges, *(rest.edges for rest in rests), strict=True)
            parts = Rects(*(np.concatenate(edges) for edges in joined))
            some = (parts.bottoms > parts.tops) & (parts.rights > parts.lefts)
            owner, parts, turn = owner[some], parts[some], turn + 1
