"""The interface of every source of encoded bytes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np

from napari_wsigpu.model.geometry import Rect

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.model.layout import LevelLayout

    Buffer = bytearray | memoryview
    NewBuffer = Callable[[int], Buffer]

NO_REASONS: Mapping[int, str] = MappingProxyType({})


class Unreadable(bytes):
    """What a source returns a view of where it can't read bytes, but can others.

    It holds nothing but the reason, which whoever decodes it reports.

    Attributes
    ----------
    reason : str
        What is wrong, as the end of a sentence.
    """

    reason: str

    def __new__(cls, reason: str) -> Unreadable:
        """Say why."""
        found = super().__new__(cls)
        found.reason = reason
        return found


class JoinedBytes(NamedTuple):
    """Many ranges in one buffer.

    Attributes
    ----------
    buffer : bytearray or memoryview
        The bytes, and others between and after them.
    starts, lengths : ndarray of int64, shape (ranges,)
        Where each range lies in the buffer; shorter where the source ends before.
    reasons : Mapping of int to str
        Why ranges, by their index, could not be read though others can, as the end of a sentence.
    """

    buffer: Buffer
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    reasons: Mapping[int, str] = NO_REASONS


class LaterReads(NamedTuple):
    """Ranges of a source that is kept open for them, each read when it is asked for.

    Attributes
    ----------
    read_range : callable
        Returns the bytes of an offset and a length.
    close : callable
        Lets the source be closed.
    offsets, lengths : list of int
        Of the ranges.
    """

    read_range: Callable[[int, int], bytes]
    close: Callable[[], None]
    offsets: list[int]
    lengths: list[int]

    def read(self, index: int) -> bytes:
        """Return the bytes of a range, from any thread; fewer where the source ends before.

        Raises
        ------
        SlideError
            If the source can't be read.
        """
        return self.read_range(self.offsets[index], self.lengths[index])


@runtime_checkable
class ScatteredSource(Protocol):
    """One whose ranges, if they lie apart, are best read by those who use them."""

    def read_later(
        self, offsets: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> LaterReads | None:
        """Open the source for many ranges; None if they are better read at once.

        Raises
        ------
        SlideError
            If the source can't be read.
        """


class ByteSource(Protocol):
    """Encoded bytes by position, from any thread."""

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes of each (offset, length), in order; fewer where the source ends before.

        Raises
        ------
        SlideError
            If the source can't be read.
        """

    def read_joined(
        self,
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        new_buffer: NewBuffer = bytearray,
    ) -> JoinedBytes:
        """Read many ranges into one buffer.

        Parameters
        ----------
        offsets, lengths : ndarray of int64, shape (ranges,)
            In any order; they may overlap.
        new_buffer : callable
            Gives a buffer of at least so many bytes.

        Raises
        ------
        SlideError
            If the source can't be read.
        """

    def release(self) -> None:
        """Let go of handles until the next read."""

    def close(self) -> None:
        """Let go of handles for good; later reads raise `SlideClosedError`."""


Fill = Callable[[memoryview], int]
Source = TypeVar("Source", bound=ByteSource)


@runtime_checkable
class FillingSource(ByteSource, Protocol):
    """One that can read uncompressed tiles right to where they are wanted."""

    def fills(self, ranges: Sequence[tuple[int, int]]) -> list[Fill]:
        """Return what reads each (offset, length) later, in order.

        Returns
        -------
        list of callable
            Each fills a view of at most so many bytes, in any thread, and returns how many there
            were: fewer where the source ends before. It raises `SlideError` if the source can't
            be read, and ValueError if others of its bytes may be.

        Raises
        ------
        SlideError
            If the source can't be read.
        """


@runtime_checkable
class ScanSource(Protocol):
    """A source whose JPEG tiles can be joined as they are read."""

    def read_scans(self, scans: NDArray[Any], header: bytes, buffer: memoryview) -> bool:
        """Read the scans of JPEG tiles that share a header; see `native.Core.read_scans`.

        Returns
        -------
        bool
            False if the tiles have to be read as they are, because they differ, can't be read,
            or the native core is missing.

        Raises
        ------
        SlideError
            If the file can't be opened, or is not the one that was described.
        """


class ViewSource:
    """What reads ranges one by one, and copies them where they are wanted in one buffer."""

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes of each (offset, length); see `ByteSource.read`."""
        raise NotImplementedError

    def read_joined(
        self,
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        new_buffer: NewBuffer = bytearray,
    ) -> JoinedBytes:
        """Read many ranges into one buffer; see `ByteSource.read_joined`."""
        ranges = list(zip(offsets.tolist(), lengths.tolist(), strict=True))
        return join_views(self.read(ranges), new_buffer)


class DecodedTile(NamedTuple):
    """A tile of a level or associated image that lies uncompressed in a source."""

    image: LevelLayout
    row: int
    column: int

    @property
    def begin(self) -> int:
        """Offset of its first byte."""
        return int(self.image.grid.offsets[0, self.row, self.column])

    @property
    def rect(self) -> Rect:
        """The pixels of its image that it shows."""
        image, grid = self.image, self.image.grid
        top, left = self.row * grid.tile_height, self.column * grid.tile_width
        height, width = image.height - top, image.width - left
        return Rect(top, left, min(grid.tile_height, height), min(grid.tile_width, width))


class DecodedSource(ViewSource):
    """Images whose decoded tiles lie one after another, each image behind the last.

    Parameters
    ----------
    images : sequence of LevelLayout
        Whose offsets say where their tiles are thought to lie.
    """

    def __init__(self, images: Sequence[LevelLayout]) -> None:
        self._images = sorted(images, key=_begin)
        self._begins = [_begin(image) for image in self._images]

    def _tile_at(self, offset: int) -> DecodedTile | None:
        """Return the tile in which an offset lies."""
        number = bisect_right(self._begins, offset) - 1
        if number < 0:
            return None
        image = self._images[number]
        index = (offset - self._begins[number]) // image.tile_bytes
        row, column = divmod(index, image.grid.columns)
        return DecodedTile(image, row, column) if row < image.grid.rows else None


def _begin(image: LevelLayout) -> int:
    return DecodedTile(image, 0, 0).begin


class SourcesInTurn(Generic[Source]):
    """Several sources as one, as if they lay one after another.

    A range ends with the source in which it begins.

    Parameters
    ----------
    sources : sequence of ByteSource
        In the order in which they follow one another; closed with this.
    sizes : sequence of int
        Bytes of each.
    """

    def __init__(self, sources: Sequence[Source], sizes: Sequence[int]) -> None:
        self._sources = sources
        self._starts = np.array([0, *accumulate(sizes)][:-1], np.int64)

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes of each (offset, length), in order; see `ByteSource.read`."""
        views = [memoryview(b"")] * len(ranges)
        for source, start, members in self._owners(
            np.array([offset for offset, _ in ranges], np.int64)
        ):
            chosen = [(ranges[i][0] - start, ranges[i][1]) for i in members.tolist()]
            for index, view in zip(members.tolist(), source.read(chosen), strict=True):
                views[index] = view
        return views

    def release(self) -> None:
        """Let go of handles and connections until the next read."""
        for source in self._sources:
            source.release()

    def close(self) -> None:
        """Let go of them for good."""
        for source in self._sources:
            source.close()

    def _owners(self, offsets: NDArray[np.int64]) -> list[tuple[Source, int, NDArray[np.int64]]]:
        """Return each source that is asked for, where it begins, and the indices of its ranges."""
        owners = np.searchsorted(self._starts, offsets, "right") - 1
        return [
            (self._sources[owner], int(self._starts[owner]), np.flatnonzero(owners == owner))
            for owner in np.unique(owners).tolist()
        ]


def join_views(views: Sequence[memoryview], new_buffer: NewBuffer) -> JoinedBytes:
    """Copy ranges that were read one by one into one buffer, as `ByteSource.read_joined` does."""
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
