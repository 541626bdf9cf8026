"""`LevelArray`: one level as the array-like that napari and scripts slice."""

from __future__ import annotations

import math
import operator
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from napari_wsigpu.model.geometry import Span
from napari_wsigpu.reading.dask_level import dask_array

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import dask.array
    from numpy.typing import DTypeLike, NDArray

    from napari_wsigpu.model.layout import LevelLayout

    Read = Callable[[Span, Span, int | None], NDArray[Any]]

VIEWER_CHUNK = 128


class PackedOwner(Protocol):
    """What levels belong to, on its way to tasks in other processes."""

    def use(self) -> AbstractContextManager[LevelOwner]:
        """Give out the owner, open at least as long as the context."""


class LevelOwner(Protocol):
    """What levels belong to: makes them again in another process."""

    @property
    def path(self) -> str:
        """Path of the file, for messages."""

    def level_array(
        self, index: int, channel: int | None = None, *, tolerant: bool = False
    ) -> LevelArray:
        """Return the level of that number."""

    def plane(self, z: int | None = None, t: int | None = None) -> LevelOwner:
        """Return a plane along z and t as an owner of its own."""

    def read_to_device(
        self, index: int, rows: Span, columns: Span, channel: int | None, device: str
    ) -> Any:
        """Return a region of a level, of one channel or all, in a device's memory."""

    def packed(self, device: str) -> PackedOwner:
        """Return what opens the slide for tasks that put pixels on a device; picklable."""

    def close(self) -> None:
        """Let go of everything for good."""


class AxisIndex(NamedTuple):
    """One axis of an index: the positions to read, then the view to take of them."""

    span: Span
    view: slice | int


@dataclass(eq=False, repr=False)
class LevelArray:
    """Lazily decoded pixels of one level.

    Slicing reads exactly the tiles that are needed and returns a new ndarray.

    Parameters
    ----------
    layout : LevelLayout
        The level.
    read : callable
        Reads (rows, columns, channel) of it.
    slide : LevelOwner
        The slide it belongs to.
    number : int
        Its number there.
    channel : int, optional
        Show this channel alone, as a two-dimensional array.
    tolerant : bool
        Whether `read` shows tiles that can't be decoded as background.

    Attributes
    ----------
    shape : tuple of int
        (height, width, channels), or (height, width) for one channel.
    dtype : numpy.dtype
        Type of one sample.
    ndim, size : int
        Number of axes and of samples.
    chunks : tuple of int
        Size of a tile along each axis. A viewer's array says at most 128: viewers draw whole
        chunks, and those of large tiles or of strips would be many times what a screen shows.
    slide, number, channel, tolerant
        As given.
    layout : LevelLayout
        What the level is.
    computed : bool
        Whether the level is computed from a finer one because the file lacks it.
    """

    layout: LevelLayout
    _read: Read
    slide: LevelOwner
    number: int
    channel: int | None = None
    _: KW_ONLY
    tolerant: bool = False

    def __post_init__(self) -> None:
        layout = self.layout
        samples = () if self.channel is not None else (layout.channels,)
        self.shape: tuple[int, ...] = (layout.height, layout.width, *samples)
        self.dtype = layout.dtype
        self.ndim = len(self.shape)
        self.size = math.prod(self.shape)
        largest = VIEWER_CHUNK if self.tolerant else max(layout.height, layout.width)
        self.chunks: tuple[int, ...] = (
            min(layout.grid.tile_height, layout.height, largest),
            min(layout.grid.tile_width, layout.width, largest),
            *samples,
        )
        self.computed = layout.computed

    def __getitem__(self, key: Any) -> NDArray[Any]:
        """Return the pixels at `key` on the host; see `read`.

        Of a viewer's level ``level[:, :, channel]`` is that channel's level, undecoded: so viewers
        split colours.
        """
        channel = self._whole_channel(key)
        pixels: NDArray[Any] = self.read(key) if channel is None else channel
        return pixels

    def _whole_channel(self, key: Any) -> Any:
        """Return the level of one channel if a viewer asks for all of it, else None."""
        if not (self.tolerant and self.ndim == 3 and isinstance(key, tuple) and len(key) == 3):
            return None
        if key[0] != slice(None) or key[1] != slice(None) or isinstance(key[2], slice):
            return None
        channel = _axis_index(key[2], self.shape[2]).span.start
        return self.slide.level_array(self.number, channel, tolerant=True)

    def read(self, key: Any, device: str = "cpu") -> Any:
        """Read the pixels at an index.

        Parameters
        ----------
        key : int, slice, Ellipsis or tuple of these
            As numpy takes it; slices may have any step.
        device : str
            Where the pixels shall be: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``. On a device, a tile
            that can't be decoded always raises.

        Returns
        -------
        ndarray or cupy.ndarray
            As numpy shapes it.

        Raises
        ------
        IndexError
            If an index is out of bounds or of another kind.
        TileError
            If a tile can't be decoded.
        DeviceError
            If the device can't be used.
        """
        rows, columns, *channels = (
            _axis_index(index, length)
            for index, length in zip(expand(key, self.ndim), self.shape, strict=True)
        )
        if device != "cpu":
            return self._read_to_device(rows, columns, channels, device)
        channel = self.channel
        views: tuple[slice | int, ...] = (rows.view, columns.view)
        if channels:
            if isinstance(channels[0].view, int):
                channel = channels[0].span.start
            else:
                start, step, length = channels[0].span
                taken = slice(start, start + step * length, step)
                pixels = self._read(rows.span, columns.span, None)
                whole = length == self.shape[2] and step == 1
                return (pixels if whole else pixels[..., taken])[*views, channels[0].view]
        return self._read(rows.span, columns.span, channel)[views]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("A level has to be decoded, so it can't be had without a copy.")
        return np.asarray(self[...], dtype=dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> LevelArray:
        return self

    def __reduce__(self) -> tuple[Callable[..., LevelArray], tuple[Any, ...]]:
        return _rebuild, (self.slide, self.number, self.channel, self.tolerant)

    def __repr__(self) -> str:
        return f"<LevelArray {self.shape} {self.dtype}>"

    def to_dask(self, tiles: int | None = None, device: str = "cpu") -> dask.array.Array:
        """Return the level as a Dask array; nothing is decoded yet.

        Its tasks may run in any process that reaches the file by the same path. Each process opens
        the slide once, whatever it is asked of it. As Dask runs tasks side by side, each decodes
        in its own thread there, unless the slide was opened with a number of `threads`.
        In this process tasks read through this slide, which has to stay open.

        Parameters
        ----------
        tiles : int, optional
            Tiles a chunk along each axis; by default chunks are about 32 MiB, as square as whole
            tiles allow.
        device : str
            Where the chunks shall be: ``"cpu"``, or ``"cuda"`` for CuPy arrays on the first device
            that the process sees. A slide of device ``"auto"`` is decoded there, too, in other
            processes.

        Raises
        ------
        ImportError
            If Dask is not installed.
        RegionError
            If `tiles` is not a whole number of at least 1.
        DeviceError
            If this process can't use the device.
        """
        return dask_array(self, tiles, device, {})

    def __dask_tokenize__(self) -> Any:
        from dask.base import normalize_token

        return normalize_token((self.slide, self.number, self.channel, self.tolerant))

    def _read_to_device(
        self, rows: AxisIndex, columns: AxisIndex, channels: list[AxisIndex], device: str
    ) -> Any:
        spans = rows.span, columns.span
        pixels = self.slide.read_to_device(self.number, *spans, self.channel, device)
        taken = [slice(None), slice(None)]
        for start, step, length in (axis.span for axis in channels):
            taken.append(slice(start, start + step * length, step))
        return pixels[tuple(taken)][tuple(axis.view for axis in (rows, columns, *channels))]


def _rebuild(slide: LevelOwner, index: int, channel: int | None, tolerant: bool) -> LevelArray:
    return slide.level_array(index, channel, tolerant=tolerant)


def expand(key: Any, ndim: int) -> tuple[Any, ...]:
    """Return one index an axis."""
    key = key if isinstance(key, tuple) else (key,)
    dots = [place for place, index in enumerate(key) if index is Ellipsis]
    if len(dots) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    if len(key) - len(dots) > ndim:
        raise IndexError(
            f"too many indices for level: it is {ndim}-dimensional, "
            f"but {len(key) - len(dots)} were indexed"
        )
    fill = (slice(None),) * (ndim - len(key) + len(dots))
    if not dots:
        return (*key, *fill)
    return (*key[: dots[0]], *fill, *key[dots[0] + 1 :])


def taken(axis: range, index: Any) -> range | int:
    """Return what an index takes of the positions along an axis."""
    if isinstance(index, slice):
        return axis[index]
    if isinstance(index, bool | np.bool_):
        raise IndexError("levels are indexed by integers, slices and '...', not by booleans")
    try:
        return axis[operator.index(index)]
    except TypeError:
        raise IndexError(
            f"levels are indexed by integers, slices and '...', not by {type(index).__name__}"
        ) from None
    except IndexError:
        raise IndexError(f"index {index} is out of bounds for axis with size {len(axis)}") from None


def _axis_index(index: Any, length: int) -> AxisIndex:
    found = taken(range(length), index)
    if isinstance(found, int):
        return AxisIndex(Span(found, 1, 1), 0)
    if found.step > 0:
        return AxisIndex(Span(found.start, found.step, len(found)), slice(None))
    last = found.start + (len(found) - 1) * found.step
    return AxisIndex(Span(last, -found.step, len(found)), slice(None, None, -1))
