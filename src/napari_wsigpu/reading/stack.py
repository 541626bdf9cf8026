"""`StackLevel`: one level of all planes of a slide as an array-like."""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from napari_wsigpu.model.errors import PlaneError
from napari_wsigpu.reading.level import expand, taken

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import DTypeLike, NDArray

    from napari_wsigpu.reading.level import LevelArray

    Axis = range | int
    LevelOf = Callable[[tuple[int, ...]], LevelArray]


class StackLevel:
    """Lazily decoded pixels of one level, of all planes.

    While more than one plane is chosen, slicing decodes nothing and returns another `StackLevel`,
    which `numpy.asarray` reads; so viewers may cut a region before they choose a plane. Of one
    plane, slicing returns the pixels.

    Parameters
    ----------
    shown : LevelArray
        The level of the plane that the slide shows.
    sizes : sequence of int
        How many planes there are along each axis before those of the level.
    level_of : callable
        Returns the level of the plane at a position along these axes.
    blank : int, float or ndarray, shape (channels,)
        What a viewer's level shows of planes that the slide lacks; any other raises.

    Attributes
    ----------
    shape : tuple of int
        (planes, ..., height, width, channels), or without channels for one of them.
    dtype : numpy.dtype
        Type of one sample.
    ndim, size : int
        Number of axes and of samples.
    chunks : tuple of int
        Of one plane, as those of its level.
    sizes : tuple of int
        As given.
    level : callable
        `level_of`; raises SlideError if the plane can't be opened.
    level_shape : tuple of int
        Shape of one plane.
    slide, number, channel, tolerant, layout, computed
        Those of the level of the plane that the slide shows.
    """

    def __init__(
        self,
        shown: LevelArray,
        sizes: Sequence[int],
        level_of: LevelOf,
        blank: Any = 0,
        axes: tuple[Axis, ...] | None = None,
    ) -> None:
        self.slide = shown.slide
        self.number = shown.number
        self.channel = shown.channel
        self.tolerant = shown.tolerant
        self.layout = shown.layout
        self.computed = shown.computed
        self.level_shape = shown.shape
        self._shown = shown
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

    def __getitem__(self, key: Any) -> Any:
        """Return the pixels at `key` if that is in one plane, else a part of the stack.

        Of a viewer's stack ``stack[..., channel]`` is that channel's stack: so viewers split
        colours.
        """
        indices = iter(expand(key, self.ndim))
        axes = tuple(
            taken(axis, next(indices)) if isinstance(axis, range) else axis for axis in self._axes
        )
        channel = self._whole_channel(axes)
        if channel is not None:
            of_channel = self._of_channel(channel)
            shown: Any = self._shown[:, :, channel]
            blank = np.broadcast_to(self._blank, self.level_shape[2:])[channel]
            return StackLevel(shown, self.sizes, of_channel, blank)
        part = StackLevel(self._shown, self.sizes, self.level, self._blank, axes)
        return part._pixels() if part._is_of_one_plane() else part

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("A stack has to be decoded, so it can't be had without a copy.")
        return np.asarray(self._pixels(), dtype=dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> StackLevel:
        return self

    def __repr__(self) -> str:
        return f"<StackLevel {self.shape} {self.dtype}>"

    def _whole_channel(self, axes: tuple[Axis, ...]) -> int | None:
        """Return which channel a viewer asks for all of, if it does."""
        *others, last = axes
        whole = tuple(map(range, (*self.sizes, *self._shown.shape)))
        if not self.tolerant or self._shown.ndim != 3 or isinstance(last, range):
            return None
        return last if tuple(others) == whole[:-1] and self._axes == whole else None

    def _of_channel(self, channel: int) -> LevelOf:
        def level_of(position: tuple[int, ...]) -> LevelArray:
            split: Any = self.level(position)[:, :, channel]
            return cast("LevelArray", split)

        return level_of

    def _is_of_one_plane(self) -> bool:
        return all(isinstance(axis, int) for axis in self._axes[: len(self.sizes)])

    def _pixels(self) -> Any:
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

    def _of_plane(self, position: tuple[int, ...], key: tuple[slice | int, ...]) -> Any:
        try:
            return self.level(position)[key]
        except PlaneError:
            if not self.tolerant:
                raise
            whole = np.broadcast_to(np.asarray(self._blank, self.dtype), self.level_shape)
            return whole[key].copy()


def _slice(axis: range) -> slice:
    """Return the slice that takes these positions of an axis from 0 on."""
    return slice(axis.start, axis.stop if axis.stop >= 0 else None, axis.step)
