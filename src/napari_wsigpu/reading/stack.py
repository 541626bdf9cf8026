"""`StackLevel`: one level in all planes of a slide as an array-like."""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING, cast

import numpy as np

from napari_wsigpu.model.errors import PlaneError
from napari_wsigpu.reading.level import expand, select

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import DTypeLike

    from napari_wsigpu.model.arrays import AnyArray, Array
    from napari_wsigpu.reading.level import LevelArray

    Axis = range | int
    LevelOf = Callable[[tuple[int, ...]], LevelArray]


class StackLevel:
    """Lazily decoded pixels of one level in all planes.

    Slicing that leaves several planes decodes nothing and returns another `StackLevel`, so that
    viewers can crop before they choose a plane; `numpy.asarray` decodes it. Slicing that leaves
    one plane returns its pixels.

    Parameters
    ----------
    shown : LevelArray
        The level in the current plane of the slide.
    sizes : sequence of int
        Number of planes along each axis in front of the axes of the level.
    level_of : callable
        Returns the level in the plane at a position along these axes.
    blank : int, float or ndarray, shape (channels,)
        Value that tolerant levels show for planes that the slide lacks; others raise an error.
    axes : tuple of range or int, optional
        Positions along each axis of the whole stack that this array selects.

    Attributes
    ----------
    shape : tuple of int
        (planes, ..., height, width, channels), or without channels for a single one.
    dtype : numpy.dtype
        Type of one sample.
    ndim, size : int
        Number of axes and of samples.
    chunks : tuple of int
        Size of a tile along each axis of a level; 1 along the axes of planes.
    sizes : tuple of int
        As given.
    level : callable
        `level_of`; raises a SlideError if the plane can't be opened.
    level_shape : tuple of int
        Shape of one plane.
    shown : LevelArray
        As given.
    slide, number, channel, tolerant, layout, computed
        As in `shown`.
    """

    def __init__(
        self,
        shown: LevelArray,
        sizes: Sequence[int],
        level_of: LevelOf,
        blank: float | Array = 0,
        axes: tuple[Axis, ...] | None = None,
    ) -> None:
        self.slide = shown.slide
        self.number = shown.number
        self.channel = shown.channel
        self.tolerant = shown.tolerant
        self.layout = shown.layout
        self.computed = shown.computed
        self.level_shape = shown.shape
        self.shown = shown
        self.sizes = tuple(sizes)
        self.level = level_of
        self._blank = blank
        self._axes = tuple(map(range, (*sizes, *shown.shape))) if axes is None else axes
        self.shape = tuple(len(axis) for axis in self._axes if isinstance(axis, range))
        self.dtype = shown.dtype
        self.ndim = len(self.shape)
        self.size = math.prod(self.shape)
        tiles = zip((*(1 for _ in sizes), *shown.chunks), self._axes, strict=True)
        self.chunks = tuple(
            min(tile, max(len(axis), 1)) for tile, axis in tiles if isinstance(axis, range)
        )

    def __getitem__(self, key: object) -> AnyArray:
        """Return the pixels at `key` if it leaves one plane, or else a part of the stack.

        For a tolerant stack, ``stack[..., channel]`` returns the stack of that channel: viewers
        split channels this way.
        """
        indices = iter(expand(key, self.ndim))
        axes = tuple(
            select(axis, next(indices)) if isinstance(axis, range) else axis for axis in self._axes
        )
        channel = self._whole_channel(axes)
        if channel is not None:
            of_channel = self._of_channel(channel)
            shown = cast("LevelArray", self.shown[:, :, channel])
            blank = np.broadcast_to(self._blank, self.level_shape[2:])[channel]
            return StackLevel(shown, self.sizes, of_channel, blank)
        part = StackLevel(self.shown, self.sizes, self.level, self._blank, axes)
        return part._pixels() if part._is_of_one_plane() else part

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError(
                "np.asarray(stack, copy=False) is not supported: decoding always copies."
            )
        return np.asarray(self._pixels(), dtype=dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __deepcopy__(self, memo: dict[int, object]) -> StackLevel:
        return self

    def __repr__(self) -> str:
        return f"<StackLevel {self.shape} {self.dtype}>"

    def _whole_channel(self, axes: tuple[Axis, ...]) -> int | None:
        """Return the channel if a viewer selects all pixels of a single one; None otherwise."""
        *others, last = axes
        whole = tuple(map(range, (*self.sizes, *self.shown.shape)))
        if not self.tolerant or self.shown.ndim != 3 or isinstance(last, range):
            return None
        return last if tuple(others) == whole[:-1] and self._axes == whole else None

    def _of_channel(self, channel: int) -> LevelOf:
        """Return a function like `level` for a single channel."""

        def level_of(position: tuple[int, ...]) -> LevelArray:
            return cast("LevelArray", self.level(position)[:, :, channel])

        return level_of

    def _is_of_one_plane(self) -> bool:
        return all(isinstance(axis, int) for axis in self._axes[: len(self.sizes)])

    def _pixels(self) -> AnyArray:
        planes, inside = self._axes[: len(self.sizes)], self._axes[len(self.sizes) :]
        key = tuple(axis if isinstance(axis, int) else _slice(axis) for axis in inside)
        choices = [[axis] if isinstance(axis, int) else axis for axis in planes]
        if self._is_of_one_plane():
            return self._of_plane(tuple(choice[0] for choice in choices), key)
        shape = (len(axis) for axis in inside if isinstance(axis, range))
        pixels = np.empty((math.prod(map(len, choices)), *shape), self.dtype)
        for number, position in enumerate(product(*choices)):
            pixels[number] = self._of_plane(position, key)
        return pixels.reshape(self.shape)

    def _of_plane(self, position: tuple[int, ...], key: tuple[slice | int, ...]) -> AnyArray:
        try:
            return self.level(position)[key]
        except PlaneError:
            if not self.tolerant:
                raise
            whole = np.broadcast_to(np.asarray(self._blank, self.dtype), self.level_shape)
            return whole[key].copy()


def _slice(axis: range) -> slice:
    """Return the slice that selects the positions of a range."""
    return slice(axis.start, axis.stop if axis.stop >= 0 else None, axis.step)
