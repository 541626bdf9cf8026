"""The interface of every source of encoded bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Buffer = bytearray | memoryview
    Room = Callable[[int], Buffer]

MARGIN = 1024


class ByteRange(NamedTuple):
    """`length` bytes from `offset` on."""

    offset: int
    length: int


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
        room: Room = bytearray,
        apart: NDArray[np.bool_] | None = None,
    ) -> tuple[Buffer, NDArray[np.int64], NDArray[np.int64]]:
        """Read many ranges into one buffer.

        Parameters
        ----------
        offsets, lengths : ndarray of int64, shape (ranges,)
            In any order; they may overlap.
        room : callable
            Gives a buffer of at least so many bytes.
        apart : ndarray of bool, shape (ranges,), optional
            Before which ranges, as behind the last, there shall be `MARGIN` bytes more; a source
            that gains nothing by reading neighbours at once may leave no room.

        Returns
        -------
        buffer : bytearray or memoryview
            The bytes, and others between and after them.
        starts, lengths : ndarray of int64, shape (ranges,)
            Where each range lies in the buffer; shorter where the source ends before.

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


def join_views(
    views: Sequence[memoryview], room: Room
) -> tuple[Buffer, NDArray[np.int64], NDArray[np.int64]]:
    """Copy ranges that were read one by one into one buffer, as `ByteSource.read_joined` does."""
    lengths = np.array([len(view) for view in views], np.int64)
    starts = np.cumsum(lengths) - lengths
    buffer = room(int(lengths.sum()))
    target = memoryview(buffer)
    for start, view in zip(starts.tolist(), views, strict=True):
        target[start : start + len(view)] = view
    return buffer, starts, lengths
