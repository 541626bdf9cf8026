"""Encoded bytes from a local file, with many ranges merged into few reads."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import contextmanager
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakSet

import numpy as np

from napari_wsigpu import native
from napari_wsigpu.model.errors import SlideChangedError, changed_error, file_error
from napari_wsigpu.native.tables import CHANGED, RANGE, VERSION
from napari_wsigpu.storage.readers import Readers
from napari_wsigpu.storage.source import DeferredReads, JoinedBytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from napari_wsigpu.model.arrays import Array, Integers
    from napari_wsigpu.model.layout import SlideFile
    from napari_wsigpu.storage.source import Fill, NewBuffer

# Ranges at most this many bytes apart are merged: reading the gap is cheaper than another read.
MERGE_GAP = 64 << 10
# For fewer ranges than this, one joined read from Python is fast enough.
FEW_RANGES = 16
# A thread reads this many scans before another one has woken up.
SCANS_A_THREAD = 64
# If runs of adjacent ranges are longer than this on average, one joined read beats single reads.
LONGEST_RUN = 4
# More threads don't read the page cache any faster.
READ_THREADS = 4
# Bytes that a thread reads at once: one thread copies only 5 GB/s from the page cache.
PIECE = 512 << 10


class Run(NamedTuple):
    """`size` bytes to read from `offset` in a file to `position` in a buffer."""

    offset: int
    position: int
    size: int


class JoinedRanges(NamedTuple):
    """A plan to read many ranges of a file into one buffer.

    Attributes
    ----------
    size : int
        Size of the buffer in bytes.
    ranges : ndarray of RANGE
        The merged reads that fill it.
    starts, lengths : ndarray of int64, shape (ranges,)
        Position and length of each range in the buffer; truncated at the end of the file.
    """

    size: int
    ranges: Array
    starts: Integers
    lengths: Integers

    @property
    def runs(self) -> list[Run]:
        """The merged reads as tuples of Python integers."""
        return [Run(*run) for run in self.ranges.tolist()]


def join_ranges(offsets: Integers, lengths: Integers, end: int, page: int = 1) -> JoinedRanges:
    """Plan to read many ranges into one buffer, merging ranges that are close together.

    Parameters
    ----------
    offsets, lengths : ndarray of int64, shape (ranges,)
        In any order; they may overlap.
    end : int
        Size of the file.
    page : int
        Alignment in bytes of the offset, position and size of each run; only the size of a run
        at the end of the file may differ.
    """
    lengths = np.maximum(np.minimum(lengths, end - offsets), 0)
    lengths[offsets < 0] = 0
    order = np.flatnonzero(lengths)
    if not len(order):
        return JoinedRanges(0, np.zeros(0, RANGE), np.zeros_like(offsets), lengths)
    first = offsets[order]
    if (first[1:] < first[:-1]).any():
        order = order[np.argsort(first, kind="stable")]
        first = offsets[order]
    head, past = first, first + lengths[order]
    if page > 1:
        head, past = first // page * page, np.minimum(-(-past // page) * page, end)
    # Ranges may contain others, so a run ends at the largest end so far.
    reached = np.maximum.accumulate(past)
    apart = head[1:] > reached[:-1] + MERGE_GAP
    edges = np.concatenate([[True], apart, [True]]).nonzero()[0]
    heads, stops = edges[:-1], edges[1:]
    sizes = reached[stops - 1] - head[heads]
    positions = sizes.cumsum() - sizes
    ranges = np.empty(len(heads), RANGE)
    ranges["offset"], ranges["place"], ranges["size"] = head[heads], positions, sizes
    starts = np.zeros(len(offsets), np.int64)
    starts[order] = first + np.repeat(positions - head[heads], stops - heads)
    return JoinedRanges(int(positions[-1] + sizes[-1]), ranges, starts, lengths)


def _pieces_of(ranges: Array) -> Array:
    """Cut ranges into pieces of at most `PIECE` bytes."""
    counts = -(-ranges["size"] // PIECE)
    pieces = np.repeat(ranges, counts)
    skipped = PIECE * (np.arange(len(pieces)) - np.repeat(counts.cumsum() - counts, counts))
    pieces["offset"] += skipped
    pieces["place"] += skipped
    pieces["size"] = np.minimum(pieces["size"] - skipped, PIECE)
    return pieces


def check_unchanged(file: SlideFile, slide: str) -> None:
    """Check that a file has not changed since the slide was opened.

    Raises
    ------
    SlideChangedError
        If the file has changed.
    SlideError
        If the file is not accessible.
    """
    try:
        status = Path(file.path).stat()
    except OSError as error:
        raise file_error(file.path, error) from error
    if not file.matches(status):
        raise changed_error(slide)


_sources: WeakSet[FileSource] = WeakSet()


class FileSource:
    """A local file, opened by the first read and read by position from any thread.

    Each read checks that the file has not changed since the slide was opened.

    Parameters
    ----------
    file : SlideFile
        The file, with the size and times that it must still have.
    """

    def __init__(self, file: SlideFile) -> None:
        self._expected = file
        self._path = file.path
        self._size = file.size
        self._readers = Readers(file.path)
        self._opening = threading.Lock()  # guards the opening of `_file`
        self._file: FileIO | None = None
        _sources.add(self)
        self._seek_lock = threading.Lock()  # guards the file's position where there is no `pread`
        times = file.modified_ns, -1 if file.changed_ns is None else file.changed_ns
        inode = -1 if file.inode is None else file.inode
        self._version = np.array([(file.size, *times, inode)], VERSION)
        # The native core compares the file with this record, except on Windows.
        self._version_address = None if sys.platform == "win32" else self._version.ctypes.data

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes of each (offset, length), in order; fewer at the end of the file."""
        # Offsets in a damaged slide may be too large for int64.
        inside = [(min(offset, self._size), min(length, self._size)) for offset, length in ranges]
        joined = self.read_joined(*np.array(inside, np.int64).reshape(-1, 2).T)
        view = memoryview(joined.buffer).toreadonly()
        bounds = zip(joined.starts.tolist(), joined.lengths.tolist(), strict=True)
        return [view[start : start + length] for start, length in bounds]

    def read_joined(
        self, offsets: Integers, lengths: Integers, new_buffer: NewBuffer = bytearray
    ) -> JoinedBytes:
        """Read many ranges into one buffer; see `ByteSource.read_joined`."""
        joined = self.join(offsets, lengths)
        buffer = new_buffer(joined.size)
        self.read_ranges(joined, memoryview(buffer))
        return JoinedBytes(buffer, joined.starts, joined.lengths)

    def read_ranges(self, joined: JoinedRanges, view: memoryview) -> None:
        """Read the ranges that `join` planned; the native core reads many or large ones.

        Raises
        ------
        SlideError
            If the file can't be read.
        """
        with self._checked() as file:
            core, pieces = native.core, _pieces_of(joined.ranges)
            if core is not None and (len(pieces) >= FEW_RANGES or joined.size >= 2 * PIECE):
                address = np.frombuffer(view, np.uint8).ctypes.data
                if core.read_ranges(file.fileno(), pieces, address, READ_THREADS):
                    return
            # The core reports only that a read failed; reading again here raises the precise error.
            for offset, position, size in joined.runs:
                self.read_into(file, view[position : position + size], offset)

    def read_scans(self, scans: Array, header: bytes, buffer: memoryview) -> bool:
        """Read JPEG tiles without their common header, so that they can be joined.

        The parameters are those of `native.Core.read_scans`.

        Returns
        -------
        bool
            False if the caller must read the tiles one by one, because their headers differ, some
            can't be read, or the native core is missing.

        Raises
        ------
        SlideError
            If the file can't be opened, or has changed since the slide was opened.
        """
        core = native.core
        if core is None:
            return False
        threads = min(READ_THREADS, 1 + len(scans) // SCANS_A_THREAD)
        target = np.frombuffer(buffer, np.uint8).ctypes.data
        with self._checked() as file:
            return core.read_scans(scans, header, target, file=file.fileno(), threads=threads)

    def defer_reads(self, offsets: Integers, lengths: Integers) -> DeferredReads | None:
        """Open the file for scattered ranges, each to be read by the thread that decodes it.

        The caller counts as a reader until it calls the result's `close` method. Returns None if
        one joined read would be faster.
        """
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
        return DeferredReads(read, leave, offsets.tolist(), lengths.tolist())

    def fills(self, ranges: Sequence[tuple[int, int]]) -> list[Fill]:
        """Return one function per (offset, length), which reads it; see `FillingSource.fills`."""
        return [partial(self._fill, offset, length) for offset, length in ranges]

    def join(self, offsets: Integers, lengths: Integers) -> JoinedRanges:
        """Plan to read many ranges into one buffer; see `join_ranges`."""
        return join_ranges(offsets, lengths, self._size)

    def checked_path(self) -> str:
        """Return the path, for libraries that open the file themselves; raise as `read` does."""
        with self._readers:
            self._handle()
        return self._path

    @property
    def readers(self) -> int:
        """Number of threads that are reading the file."""
        return len(self._readers)

    def call_native(self, function: Callable[..., int], *arguments: object) -> int:
        """Call a function of the native core that reads the file.

        Parameters
        ----------
        function : callable
            Takes the file descriptor, the address of the `VERSION` record to compare the file with
            (None if Python has compared it), and `arguments`. Returns a number of bytes, or a
            negative code: `CHANGED` if the file differs from the record.

        Returns
        -------
        int
            The result of `function`.

        Raises
        ------
        SlideError
            If the file can't be opened, or has changed since the slide was opened.
        """
        with self._readers:
            file = self._file
            if file is None or self._version_address is None:
                file = self._handle()
            count = function(file.fileno(), self._version_address, *arguments)
            if count == CHANGED:
                self._check_unchanged(file)
            return count

    @contextmanager
    def descriptor(self) -> Iterator[int]:
        """Yield the descriptor of the file, which stays open while the context lasts.

        The file is checked before and after: all bytes read in between are from one version of it.
        """
        with self._checked() as file:
            yield file.fileno()

    @contextmanager
    def open_reader(self) -> Iterator[Callable[[memoryview, int], None]]:
        """Yield ``read(view, offset)``, which fills a view; any thread may call it.

        The file is checked once, at the start.
        """
        with self._readers:
            file = self._handle()
            yield partial(self.read_into, file)

    @contextmanager
    def _checked(self) -> Iterator[FileIO]:
        """Yield the open file, and check it before and after."""
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
        """Close the file once no thread is reading it; the next read reopens it."""
        with self._readers.exclusive():
            if self._file is not None:
                self._file.close()
                self._file = None

    def close(self) -> None:
        """Refuse new reads, and close the file once no thread is reading it."""
        self._readers.closed = True
        self.release()

    def _handle(self) -> FileIO:
        """Return the open file after checking it; the caller must be registered as a reader."""
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
        if not self._expected.matches(os.fstat(file.fileno())):
            if not os.path.lexists(self._path):
                raise SlideChangedError(
                    f"'{self._path}' has been removed or renamed since it was opened; restore it "
                    "and open the slide again."
                )
            raise changed_error(self._path)

    def read_into(self, file: FileIO, view: memoryview, offset: int) -> None:
        """Fill a view with the bytes at an offset; the file must be open and checked."""
        while view:
            try:
                count = self._read_some(file, view, offset)
                if count == len(view):
                    return
            except OSError as error:
                raise file_error(self._path, error) from error
            if not count:
                raise SlideChangedError(
                    f"'{self._path}' was truncated while it was being read; open the slide again."
                )
            view, offset = view[count:], offset + count

    def _read_some(self, file: FileIO, view: memoryview, offset: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(file.fileno(), [view], offset)
        with self._seek_lock:
            file.seek(offset)
            return file.readinto(view)

    def read_bytes(self, file: FileIO, offset: int, length: int) -> bytes:
        """Return bytes of the file, which must be open and checked; fewer at its end."""
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


def _close_inherited() -> None:
    """Close the handles that a forked process shares with its parent; the next read reopens."""
    for source in list(_sources):
        # Without locks, which threads of the parent may have held.
        file, source._file = source._file, None
        if file is not None:
            file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)
