"""Interfaces of sources of encoded bytes, and classes that several sources share."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from napari_wsigpu.model.arrays import Integers
    from napari_wsigpu.model.geometry import Rect
    from napari_wsigpu.model.layout import LevelLayout

    Buffer = bytearray | memoryview
    NewBuffer = Callable[[int], Buffer]

# Distance between the virtual offsets of consecutive channels, and a bound on the number of
# channels (exclusive), so that all virtual offsets fit in an int64.
CHANNEL_STEP, MOST_CHANNELS = 1 << 52, 1 << 10
NO_REASONS: Mapping[int, str] = MappingProxyType({})


class Unreadable(bytes):
    """Empty placeholder for a range that can't be read, although the source itself can.

    The source returns a view of it; the decoder recognizes it and reports the reason.

    Attributes
    ----------
    reason : str
        The reason, as a clause that can end a sentence.
    """

    reason: str

    def __new__(cls, reason: str) -> Unreadable:
        """Create a placeholder with a reason."""
        found = super().__new__(cls)
        found.reason = reason
        return found


class JoinedBytes(NamedTuple):
    """Many ranges in one buffer.

    Attributes
    ----------
    buffer : bytearray or memoryview
        The bytes of the ranges, with unused bytes between and after them.
    starts, lengths : ndarray of int64, shape (ranges,)
        Position and length of each range in the buffer; truncated at the end of the source.
    reasons : Mapping of int to str
        The reason for each range that could not be read, by index of the range.
    """

    buffer: Buffer
    starts: Integers
    lengths: Integers
    reasons: Mapping[int, str] = NO_REASONS


class DeferredReads(NamedTuple):
    """Ranges of a source to read one by one; the source stays open until `close` is called.

    Attributes
    ----------
    read_range : callable
        ``read_range(offset, length)`` returns the bytes of a range.
    close : callable
        Lets the source close its file; must be called exactly once.
    offsets, lengths : list of int
        Offset and length of each range in the source.
    """

    read_range: Callable[[int, int], bytes]
    close: Callable[[], None]
    offsets: list[int]
    lengths: list[int]

    def read(self, index: int) -> bytes:
        """Return the bytes of one range, in any thread; fewer at the end of the source.

        Raises
        ------
        SlideError
            If the source can't be read.
        """
        return self.read_range(self.offsets[index], self.lengths[index])


class ByteSource(Protocol):
    """Encoded bytes, read by position from any thread."""

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes of each (offset, length), in order; fewer at the end of the source.

        Raises
        ------
        SlideError
            If the source can't be read.
        """

    def read_joined(
        self, offsets: Integers, lengths: Integers, new_buffer: NewBuffer = bytearray
    ) -> JoinedBytes:
        """Read many ranges into one buffer.

        Parameters
        ----------
        offsets, lengths : ndarray of int64, shape (ranges,)
            In any order; they may overlap.
        new_buffer : callable
            Takes a size, and returns a writable buffer of at least that many bytes.

        Raises
        ------
        SlideError
            If the source can't be read.
        """

    def release(self) -> None:
        """Release all handles; the next read reopens them."""

    def close(self) -> None:
        """Release all handles for good; later reads raise `SlideClosedError`."""


Fill = Callable[[memoryview], int]
Source = TypeVar("Source", bound=ByteSource)


@runtime_checkable
class FillingSource(ByteSource, Protocol):
    """A source that can read uncompressed tiles directly into the caller's memory."""

    def fills(self, ranges: Sequence[tuple[int, int]]) -> list[Fill]:
        """Return one function for each (offset, length), in order, that reads it when called.

        Returns
        -------
        list of callable
            Each reads into a view and returns the number of bytes read: at most the length, fewer
            at the end of the source. Any thread may call it. It raises `SlideError` if the source
            can't be read, and ValueError if only this range can't.

        Raises
        ------
        SlideError
            If the source can't be read.
        """


class ViewSource:
    """Base class of sources that read each range separately; `read_joined` copies the ranges."""

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes of each (offset, length); see `ByteSource.read`."""
        raise NotImplementedError

    def read_joined(
        self, offsets: Integers, lengths: Integers, new_buffer: NewBuffer = bytearray
    ) -> JoinedBytes:
        """Read many ranges into one buffer; see `ByteSource.read_joined`."""
        ranges = list(zip(offsets.tolist(), lengths.tolist(), strict=True))
        return join_views(self.read(ranges), new_buffer)


class DecodedTile(NamedTuple):
    """A tile of a level or associated image that its source delivers uncompressed."""

    image: LevelLayout
    row: int
    column: int

    @property
    def start(self) -> int:
        """Offset of the tile's first byte in the source."""
        return int(self.image.grid.offsets[0, self.row, self.column])

    @property
    def rect(self) -> Rect:
        """The pixels of the image that the tile covers, without padding at the edges."""
        return self.image.tile_rect(self.row, self.column)


class DecodedSource(ViewSource):
    """Base class of sources that decode tiles themselves.

    Offsets are virtual, as if the decoded tiles of each image followed one another row by row, and
    each image followed the previous one. From `CHANNEL_STEP` on, the offsets repeat once per
    channel: a tile at an offset from `image_of_channel` contains the pixels of that channel only.

    Parameters
    ----------
    images : sequence of LevelLayout
        The images, with virtual offsets in their grids.
    """

    def __init__(self, images: Sequence[LevelLayout]) -> None:
        self._images = sorted(images, key=_start)
        self._starts = [_start(image) for image in self._images]
        self._of_channel = lru_cache(maxsize=None)(image_of_channel)

    def _tile_at(self, offset: int) -> DecodedTile | None:
        """Return the tile that contains a virtual offset; None if there is none."""
        found = self._stored_tile(offset)
        if found is not None or offset < CHANNEL_STEP:
            return found
        number, offset = divmod(offset, CHANNEL_STEP)
        found = self._stored_tile(offset)
        if found is None or not can_address_channels(found.image) or number > found.image.channels:
            return None
        return found._replace(image=self._of_channel(found.image, number - 1))

    def _stored_tile(self, offset: int) -> DecodedTile | None:
        number = bisect_right(self._starts, offset) - 1
        if number < 0:
            return None
        image = self._images[number]
        index = (offset - self._starts[number]) // image.tile_bytes
        row, column = divmod(index, image.grid.columns)
        return DecodedTile(image, row, column) if row < image.grid.rows else None


def can_address_channels(image: LevelLayout) -> bool:
    """Return whether each channel's tiles in an array have their own offsets."""
    end = int(image.grid.offsets.max(initial=0)) + image.tile_bytes
    fits = end < CHANNEL_STEP and image.channels < MOST_CHANNELS
    return image.array is not None and image.array.channels_apart and fits


def image_of_channel(image: LevelLayout, channel: int) -> LevelLayout:
    """Return one channel of an array as an image whose tiles a `DecodedSource` reads."""
    array, grid = image.array, image.grid
    assert array is not None
    letters = zip(array.axes, array.position, strict=True)
    position = tuple(channel if letter == "c" else index for letter, index in letters)
    return replace(
        image,
        channels=1,
        encoding=replace(image.encoding, samples=1),
        array=replace(array, position=position),
        grid=replace(
            grid,
            offsets=grid.offsets + (channel + 1) * CHANNEL_STEP,
            byte_counts=grid.byte_counts // image.channels,
        ),
    )


def _start(image: LevelLayout) -> int:
    return DecodedTile(image, 0, 0).start


class ConcatenatedSource(Generic[Source]):
    """Several sources, addressed as if they were concatenated.

    No range extends beyond the source in which it starts.

    Parameters
    ----------
    sources : sequence of ByteSource
        The sources in order; this source owns and closes them.
    sizes : sequence of int
        Size of each source in bytes.
    """

    def __init__(self, sources: Sequence[Source], sizes: Sequence[int]) -> None:
        self._sources = sources
        self._starts = np.array([0, *accumulate(sizes)][:-1], np.int64)

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes of each (offset, length), in order; see `ByteSource.read`."""
        views = [memoryview(b"")] * len(ranges)
        offsets = np.array([offset for offset, _ in ranges], np.int64)
        for source, start, members in self._owners(offsets):
            chosen = [(ranges[i][0] - start, ranges[i][1]) for i in members.tolist()]
            for index, view in zip(members.tolist(), source.read(chosen), strict=True):
                views[index] = view
        return views

    def release(self) -> None:
        """Release handles and connections; the next read reopens them."""
        for source in self._sources:
            source.release()

    def close(self) -> None:
        """Release handles and connections for good."""
        for source in self._sources:
            source.close()

    def _owners(self, offsets: Integers) -> list[tuple[Source, int, Integers]]:
        """Return each source that contains offsets, its start, and the indices of those offsets."""
        owners = np.searchsorted(self._starts, offsets, "right") - 1
        return [
            (self._sources[owner], int(self._starts[owner]), np.flatnonzero(owners == owner))
            for owner in np.unique(owners).tolist()
        ]


def join_views(views: Sequence[memoryview], new_buffer: NewBuffer) -> JoinedBytes:
    """Copy ranges that were read one by one into the result of `ByteSource.read_joined`."""
    lengths = np.array([len(view) for view in views], np.int64)
    starts = np.cumsum(lengths) - lengths
    buffer = new_buffer(int(lengths.sum()))
    target = memoryview(buffer)
    for start, view in zip(starts.tolist(), views, strict=True):
        target[start : start + len(view)] = view
    reasons = {
        index: view.obj.reason
        for index, view in enumerate(views)
        if isinstance(view.obj, Unreadable)
    }
    return JoinedBytes(buffer, starts, lengths, reasons)
