"""`LevelArray`: one level as an array-like for napari and scripts."""

from __future__ import annotations

import math
import operator
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import numpy as np

from napari_wsigpu.model.geometry import Span
from napari_wsigpu.reading.dask_level import dask_array

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from typing import SupportsIndex

    import dask.array
    from numpy.typing import DTypeLike

    from napari_wsigpu.model.arrays import AnyArray, Array
    from napari_wsigpu.model.layout import LevelLayout

    Read = Callable[[Span, Span, int | None], Array]

VIEWER_CHUNK = 128


class PackedOwner(Protocol):
    """A picklable stand-in for a level owner, for tasks in other processes."""

    def use(self) -> AbstractContextManager[LevelOwner]:
        """Provide the owner, which stays open at least until the context ends."""


class LevelOwner(Protocol):
    """The slide, or plane of a slide, that levels belong to; it recreates unpickled levels."""

    @property
    def path(self) -> str:
        """Path of the slide, for messages."""

    def level_array(
        self, index: int, channel: int | None = None, *, tolerant: bool = False
    ) -> LevelArray:
        """Return a level by its number."""

    def plane(self, z: int | None = None, t: int | None = None) -> LevelOwner:
        """Return the plane at a position in z and t as an owner."""

    def read_to_device(
        self, index: int, rows: Span, columns: Span, channel: int | None, device: str
    ) -> AnyArray:
        """Read a region of a level, in one channel or all, to device memory."""

    def reads_channels_apart(self, number: int) -> bool:
        """Return whether the channels of a level are decoded one by one."""

    def packed(self, device: str) -> PackedOwner:
        """Return a picklable object that opens the slide for tasks that read to a device."""

    def close(self) -> None:
        """Close the owner for good."""


class AxisIndex(NamedTuple):
    """The index of one axis: positions to read, and the view of them to return."""

    span: Span
    view: slice | int


@dataclass(eq=False, repr=False)
class LevelArray:
    """Lazily decoded pixels of one level.

    Slicing reads only the tiles that it needs and returns a new ndarray.

    Parameters
    ----------
    layout : LevelLayout
        The level.
    read : callable
        ``read(rows, columns, channel)`` reads spans of the level.
    slide : LevelOwner
        The slide that the level belongs to.
    number : int
        Number of the level in the slide.
    channel : int, optional
        Show only this channel, as a two-dimensional array.
    tolerant : bool
        Whether `read` shows tiles that fail to decode as background, for viewers.

    Attributes
    ----------
    shape : tuple of int
        (height, width, channels), or (height, width) for one channel.
    dtype : numpy.dtype
        Type of one sample.
    ndim, size : int
        Number of axes and of samples.
    chunks : tuple of int
        Size of a tile along each axis. Tolerant arrays report at most 128: viewers draw whole
        chunks, and large tiles or strips would exceed the screen many times over.
    slide, number, channel, tolerant
        As given.
    layout : LevelLayout
        Description of the level.
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

    def __getitem__(self, key: object) -> Array:
        """Return the pixels at `key` on the host; see `read`.

        For a tolerant level, ``level[:, :, channel]`` returns the level of that channel without
        decoding it: viewers split channels this way.
        """
        channel = self._whole_channel(key)
        return self.read(key) if channel is None else channel

    def _whole_channel(self, key: object) -> AnyArray:
        """Return the level of one channel if a viewer selects all of its pixels; None otherwise."""
        if not (self.tolerant and self.ndim == 3 and isinstance(key, tuple) and len(key) == 3):
            return None
        if key[0] != slice(None) or key[1] != slice(None) or isinstance(key[2], slice):
            return None
        return self._of_channel(_axis_index(key[2], self.shape[2]).span.start)

    def _of_channel(self, channel: int) -> LevelArray:
        return self.slide.level_array(self.number, channel, tolerant=True)

    def read(self, key: object, device: str = "cpu") -> AnyArray:
        """Read the pixels at an index.

        Parameters
        ----------
        key : int, slice, Ellipsis or tuple of these
            A NumPy index; slices may have any step.
        device : str
            Where to put the pixels: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``. On a device, a tile that
            fails to decode always raises an error.

        Returns
        -------
        ndarray or cupy.ndarray
            The pixels, in the shape that NumPy indexing gives.

        Raises
        ------
        IndexError
            If an index is out of bounds or of an unsupported type.
        TileError
            If a tile fails to decode.
        DeviceError
            If the device can't be used.
        """
        rows, columns, *channels = (
            _axis_index(index, length)
            for index, length in zip(expand(key, self.ndim), self.shape, strict=True)
        )

        def read(channel: int | None) -> AnyArray:
            spans = rows.span, columns.span
            if device == "cpu":
                return self._read(*spans, channel)
            return self.slide.read_to_device(self.number, *spans, channel, device)

        channel = self.channel
        views: tuple[slice | int, ...] = (rows.view, columns.view)
        if channels:
            if isinstance(channels[0].view, int):
                channel = channels[0].span.start
            else:
                start, step, length = channels[0].span
                chosen = slice(start, start + step * length, step)
                whole = length == self.shape[2] and step == 1
                if length and not whole and self.slide.reads_channels_apart(self.number):
                    apart = [read(each) for each in range(start, chosen.stop, step)]
                    return np.stack(apart, axis=-1)[*views, channels[0].view]
                pixels = read(None)
                return (pixels if whole else pixels[..., chosen])[*views, channels[0].view]
        return read(channel)[views]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError(
                "np.asarray(level, copy=False) is not supported: decoding always copies."
            )
        return np.asarray(self[...], dtype=dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __deepcopy__(self, memo: dict[int, object]) -> LevelArray:
        # Levels are immutable, and a deep copy of the slide is the slide itself.
        return self

    def __reduce__(self) -> tuple[Callable[..., LevelArray], tuple[object, ...]]:
        return _rebuild, (self.slide, self.number, self.channel, self.tolerant)

    def __repr__(self) -> str:
        return f"<LevelArray {self.shape} {self.dtype}>"

    def to_dask(self, tiles: int | None = None, device: str = "cpu") -> dask.array.Array:
        """Return the level as a Dask array; nothing is decoded yet.

        Tasks may run in any process that can open the file by the same path. Each process opens
        the slide once for all tasks. Dask runs tasks concurrently, so each task decodes in its
        own thread, unless the slide was opened with a number of `threads`. In this process, tasks
        read from this slide, which must stay open.

        Parameters
        ----------
        tiles : int, optional
            Tiles per chunk along each axis. By default, chunks have about 32 MiB and are as square
            as whole tiles allow.
        device : str
            Where to put the chunks: ``"cpu"``, or for CuPy arrays ``"cuda:N"``, or ``"cuda"`` for
            the GPU chosen for the slide, or else the first GPU. If the slide's device is
            ``"auto"``, other processes then also decode on that device.

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

    def __dask_tokenize__(self) -> AnyArray:
        from dask.base import normalize_token

        return normalize_token((self.slide, self.number, self.channel, self.tolerant))


def _rebuild(slide: LevelOwner, index: int, channel: int | None, tolerant: bool) -> LevelArray:
    return slide.level_array(index, channel, tolerant=tolerant)


def expand(key: object, ndim: int) -> tuple[object, ...]:
    """Expand an index to one item per axis."""
    key = key if isinstance(key, tuple) else (key,)
    dots = [axis for axis, index in enumerate(key) if index is Ellipsis]
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


def select(axis: range, index: object) -> range | int:
    """Return the positions along an axis that an index selects."""
    if isinstance(index, slice):
        return axis[index]
    if isinstance(index, bool | np.bool_):
        raise IndexError("levels are indexed by integers, slices and '...', not by booleans")
    try:
        return axis[operator.index(cast("SupportsIndex", index))]
    except TypeError:
        raise IndexError(
            f"levels are indexed by integers, slices and '...', not by {type(index).__name__}"
        ) from None
    except IndexError:
        raise IndexError(f"index {index} is out of bounds for axis with size {len(axis)}") from None


def _axis_index(index: object, length: int) -> AxisIndex:
    """Convert the index of an axis; for a negative step, read forward, then reverse."""
    found = select(range(length), index)
    if isinstance(found, int):
        return AxisIndex(Span(found, 1, 1), 0)
    if found.step > 0:
        return AxisIndex(Span(found.start, found.step, len(found)), slice(None))
    last = found.start + (len(found) - 1) * found.step
    return AxisIndex(Span(last, -found.step, len(found)), slice(None, None, -1))
