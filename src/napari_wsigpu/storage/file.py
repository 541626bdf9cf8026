"""Encoded bytes from a local file."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import contextmanager
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from napari_wsigpu import native
from napari_wsigpu.model.errors import SlideChangedError, changed_error, file_error
from napari_wsigpu.native.tables import CHANGED, RANGE, VERSION
from napari_wsigpu.storage.readers import Readers
from napari_wsigpu.storage.source import JoinedBytes, LaterReads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.model.layout import SlideFile
    from napari_wsigpu.storage.source import Fill, NewBuffer

MERGE_GAP = 64 << 10
# So few are read at once, wherever they lie.
FEW_RANGES = 16
# From so many neighbours on, on average, one read of all is better than one for each.
LONGEST_RUN = 4
# More threads than these read no faster from the page cache.
FEEDING_THREADS = 4


class Run(NamedTuple):
    """`size` bytes of a file from `offset` on, and their place in a buffer."""

    offset: int
    place: int
    size: int


class Joined(NamedTuple):
    """How many ranges of a file come to lie in one buffer.

    Attributes
    ----------
    size : int
        Bytes of the buffer.
    ranges : ndarray of RANGE
        What is read into it.
    starts, lengths : ndarray of int64, shape (ranges,)
        Where each range lies in it; shorter where the file ends before.
    """

    size: int
    ranges: NDArray[Any]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @property
    def runs(self) -> list[Run]:
        """The ranges, for those who read them one by one."""
        return [Run(*run) for run in self.ranges.tolist()]


def join_ranges(
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    end: int,
    page: int = 1,
) -> Joined:
    """Plan to read many ranges into one buffer, those that lie near each other at once.

    Parameters
    ----------
    offsets, lengths : ndarray of int64, shape (ranges,)
        In any order; they may overlap.
    end : int
        Size of the file.
    page : int
        What offsets and sizes of runs, and their places, are to be multiples of, but for where
        the file ends.
    """
    lengths = np.maximum(np.minimum(lengths, end - offsets), 0)
    lengths[offsets < 0] = 0
    order = np.flatnonzero(lengths)
    if not len(order):
        return Joined(0, np.zeros(0, RANGE), np.zeros_like(offsets), lengths)
    begin = offsets[order]
    if (begin[1:] < begin[:-1]).any():
        order = order[np.argsort(begin, kind="stable")]
        begin = offsets[order]
    first, past = begin, begin + lengths[order]
    if page > 1:
        begin, past = first // page * page, np.minimum(-(-past // page) * page, end)
    reached = np.maximum.accumulate(past)
    apart = begin[1:] > reached[:-1] + MERGE_GAP
    edges = np.concatenate([[True], apart, [True]]).nonzero()[0]
    heads, stops = edges[:-1], edges[1:]
    sizes = reached[stops - 1] - begin[heads]
    places = sizes.cumsum() - sizes
    ranges = np.empty(len(heads), RANGE)
    ranges["offset"], ranges["place"], ranges["size"] = begin[heads], places, sizes
    starts = np.zeros(len(offsets), np.int64)
    starts[order] = first + np.repeat(places - begin[heads], stops - heads)
    return Joined(int(places[-1] + sizes[-1]), ranges, starts, lengths)


def check_unchanged(file: SlideFile, slide: str) -> None:
    """Make sure that a slide's file is the one that was described.

    Raises
    ------
    SlideChangedError
        If it is not.
    SlideError
        If it can't be looked at.
    """
    try:
        status = Path(file.path).stat()
    except OSError as error:
        raise file_error(file.path, error) from error
    if not file.is_still(status):
        raise changed_error(slide)


class FileSource:
    """A local file, opened at the first read and read by position from any thread.

    Parameters
    ----------
    file : SlideFile
        The file, which must be the same at each read.
    """

    def __init__(self, file: SlideFile) -> None:
        self._described = file
        self._path = file.path
        self._size = file.size
        self._readers = Readers(file.path)
        self._opening = threading.Lock()
        self._file: FileIO | None = None
        self._seek_lock = threading.Lock()
        times = file.modified_ns, -1 if file.changed_ns is None else file.changed_ns
        inode = -1 if file.inode is None else file.inode
        self._version = np.array([(file.size, *times, inode)], VERSION)
        # The core compares the file with it, except on Windows.
        self._compared = None if sys.platform == "win32" else int(self._version.ctypes.data)

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes of each (offset, length), in order; fewer where the file ends before."""
        # A damaged slide may name offsets beyond those that NumPy holds.
        inside = [(min(offset, self._size), min(length, self._size)) for offset, length in ranges]
        joined = self.read_joined(*np.array(inside, np.int64).reshape(-1, 2).T)
        view = memoryview(joined.buffer).toreadonly()
        places = zip(joined.starts.tolist(), joined.lengths.tolist(), strict=True)
        return [view[start : start + length] for start, length in places]

    def read_joined(
        self,
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        new_buffer: NewBuffer = bytearray,
    ) -> JoinedBytes:
        """Read many ranges into one buffer; see `ByteSource.read_joined`."""
        joined = self.join(offsets, lengths)
        buffer = new_buffer(joined.size)
        self.read_ranges(joined, memoryview(buffer))
        return JoinedBytes(buffer, joined.starts, joined.lengths)

    def read_ranges(self, joined: Joined, view: memoryview) -> None:
        """Read what `join` planned to a buffer, by the native core if there is much.

        Raises
        ------
        SlideError
            If the file can't be read.
        """
        with self._checked() as file:
            core = native.core
            if core is not None and len(joined.ranges) >= FEW_RANGES:
                address = np.frombuffer(view, np.uint8).ctypes.data
                if core.read_ranges(file.fileno(), joined.ranges, address, FEEDING_THREADS):
                    return
            for offset, place, size in joined.runs:  # where reading fails, this says why
                self.read_into(file, view[place : place + size], offset)

    def read_scans(self, scans: NDArray[Any], header: bytes, buffer: memoryview) -> bool:
        """Read the scans of JPEG tiles that share a header; see `ScanSource.read_scans`."""
        core = native.core
        if core is None:
            return False
        threads = min(FEEDING_THREADS, 1 + len(scans) // FEW_RANGES)
        target = np.frombuffer(buffer, np.uint8).ctypes.data
        with self._checked() as file:
            return core.read_scans(scans, header, target, file=file.fileno(), threads=threads)

    def read_later(
        self, offsets: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> LaterReads | None:
        """Open the file for many ranges; see `ScatteredSource.read_later`."""
        ends = offsets[:-1] + lengths[:-1]
        apart = (offsets[1:] > ends + MERGE_GAP) | (offsets[1:] < ends)
        if len(offsets) < FEW_RANGES or LONGEST_RUN * np.count_nonzero(apart) < len(offsets):
            return None
        reader = self._readers.enter()
        try:
            file = self._handle()
        except BaseException:
            self._readers.leave(reader)
            raise
        read, leave = partial(self.read_bytes, file), partial(self._readers.leave, reader)
        lengths = np.maximum(np.minimum(lengths, self._size - offsets), 0)
        return LaterReads(read, leave, offsets.tolist(), lengths.tolist())

    def fills(self, ranges: Sequence[tuple[int, int]]) -> list[Fill]:
        """Return what reads each (offset, length) later; see `FillingSource.fills`."""
        return [partial(self._fill, offset, length) for offset, length in ranges]

    def join(
        self,
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        page: int = 1,
    ) -> Joined:
        """Plan how many ranges are read into one buffer; see `join_ranges`."""
        return join_ranges(offsets, lengths, self._size, page)

    def checked_path(self) -> str:
        """Return the path, for others to read; errors as when the file is read."""
        with self._readers:
            self._handle()
        return self._path

    @property
    def readers(self) -> int:
        """How many threads read the file now."""
        return len(self._readers)

    def read_by(self, read: Callable[..., int], *given: Any) -> int:
        """Call a function of the native core that reads the file.

        Parameters
        ----------
        read : callable
            Takes the descriptor, the address of a `VERSION` record that the core compares with the
            file, or None where Python does, and what is given. Returns a number of bytes or
            `CHANGED`.

        Returns
        -------
        int
            What `read` returns.

        Raises
        ------
        SlideError
            If the file can't be opened, or is not the one that was described.
        """
        with self._readers:
            file = self._file
            if file is None or self._compared is None:
                file = self._handle()
            count = read(file.fileno(), self._compared, *given)
            if count == CHANGED:
                self._check_unchanged(file)
            return count

    @contextmanager
    def descriptor(self) -> Iterator[int]:
        """Give out the descriptor of the file, which stays open within.

        The file is checked before and after: all that was read is of one version.
        """
        with self._checked() as file:
            yield file.fileno()

    @contextmanager
    def reading(self) -> Iterator[Callable[[memoryview, int], None]]:
        """Give out what fills a view with the bytes from a position on; all threads may use it.

        The file is checked once.
        """
        with self._readers:
            file = self._handle()
            yield partial(self.read_into, file)

    @contextmanager
    def _checked(self) -> Iterator[FileIO]:
        """Give out the file; see `descriptor`."""
        with self._readers:
            file = self._handle()
            yield file
            self._check_unchanged(file)

    def _fill(self, offset: int, length: int, view: memoryview) -> int:
        length = max(0, min(length, len(view), self._size - offset)) if offset >= 0 else 0
        with self._readers:
            file = self._handle()
            self.read_into(file, view[:length], offset)
        return length

    def release(self) -> None:
        """Close the file, after reads in flight, until the next read opens it again."""
        with self._readers.none():
            if self._file is not None:
                self._file.close()
                self._file = None

    def close(self) -> None:
        """Close the file for good, after reads in flight."""
        self._readers.closed = True
        self.release()

    def _handle(self) -> FileIO:
        """Return the file, opened and as it was; a reader asks for it."""
        with self._opening:
            if self._file is None:
                self._file = self._open()
            file = self._file
        self._check_unchanged(file)
        return file

    def _open(self) -> FileIO:
        try:
            file = FileIO(self._path)
        except OSError as error:
            raise file_error(self._path, error) from error
        try:
            self._check_unchanged(file)
        except SlideChangedError:
            file.close()
            raise
        return file

    def _check_unchanged(self, file: FileIO) -> None:
        if not self._described.is_still(os.fstat(file.fileno())):
            if not os.path.lexists(self._path):
                raise SlideChangedError(
                    f"'{self._path}' was removed or renamed since it was opened; bring it back and "
                    "open the slide again."
                )
            raise changed_error(self._path)

    def read_into(self, file: FileIO, view: memoryview, offset: int) -> None:
        """Fill a view with bytes of the file, which is open and was checked."""
        while view:
            try:
                count = self._read_some(file, view, offset)
                if count == len(view):
                    return
            except OSError as error:
                raise file_error(self._path, error) from error
            if not count:
                raise SlideChangedError(f"'{self._path}' was cut short; open the slide again.")
            view, offset = view[count:], offset + count

    def _read_some(self, file: FileIO, view: memoryview, offset: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(file.fileno(), [view], offset)
        with self._seek_lock:
            file.seek(offset)
            return file.readinto(view)

    def read_bytes(self, file: FileIO, offset: int, length: int) -> bytes:
        """Return bytes of the file, which is open and was checked."""
        data = b""
        try:
            while len(data) < length:
                more = self._read_once(file, offset + len(data), length - len(data))
                if not more:
                    break
                data += more
        except OSError as error:
            raise file_error(self._path, error) from error
        return data

    def _read_once(self, file: FileIO, offset: int, length: int) -> bytes:
        if hasattr(os, "pread"):
            return os.pread(file.fileno(), length, offset)
        with self._seek_lock:
            file.seek(offset)
            return file.read(length)
