"""Read-ahead for header parsers, which read a remote file in many small steps."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING

from napari_wsigpu.model.errors import CorruptSlideError, SlideError
from napari_wsigpu.model.limits import limits

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from napari_wsigpu.storage.source import ByteSource

FIRST_STEP, LARGEST_STEP = 128 << 10, 8 << 20
GROWTH = 4
TAIL = 512 << 10


class ReadAheadFile(io.RawIOBase):
    """A file object that reads ahead, in steps that grow while reads are sequential.

    The first jump away from the start also reads the end of the file, since the parts of a header
    that are not at the start are usually there.

    Parameters
    ----------
    source : ByteSource
        The source; it must cache what it reads, because this object does not.
    size : int
        Size of the file in bytes.
    name : str
        The file's name, for errors.

    Attributes
    ----------
    name : str
        The file's name, which some parsers look up.
    failure : SlideError or None
        The first error. Some parsers swallow errors and continue without the data.
    """

    def __init__(self, source: ByteSource, size: int, name: str) -> None:
        super().__init__()
        self._source = source
        self._size = size
        self.name = name
        self._position = 0
        self._fetched_ranges: list[tuple[int, int]] = []  # start and end
        self._step = FIRST_STEP
        self._has_jumped = False
        self._fetched_bytes = 0
        self.failure: SlideError | None = None

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position of the next read."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position, as in any file, and return it."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise OSError("negative seek position")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Buffer) -> int:
        """Fill a buffer from the current position, and return the number of bytes read."""
        view = memoryview(buffer).cast("B")
        length = max(0, min(len(view), self._size - self._position))
        if self.failure is not None:
            raise self.failure
        try:
            self._read_ahead(self._position, length)
            [data] = self._source.read([(self._position, length)])
        except SlideError as error:
            self.failure = self.failure or error
            raise
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _read_ahead(self, start: int, length: int) -> None:
        """Make the source cache a range and the bytes after it, unless it already has."""
        end, fetched = start + length, self._fetched_ranges
        if any(first <= start and end <= last for first, last in fetched):
            return
        if not fetched or any(first <= start <= last for first, last in fetched):
            self._step = min(self._step * GROWTH, LARGEST_STEP) if fetched else FIRST_STEP
            first_jump = False
        else:
            self._step = FIRST_STEP
            first_jump = not self._has_jumped
        # A long array, such as the offsets of tiles, is usually followed by another one.
        ahead = [(start, max(2 * length, self._step))]
        if first_jump:
            self._has_jumped = True
            ahead.append((max(0, self._size - TAIL), TAIL))
        self._fetched_bytes += sum(count for _, count in ahead)
        if self._fetched_bytes > limits.header_bytes:
            raise CorruptSlideError(
                f"The header of '{self.name}' is larger than in any known slide: "
                f"{limits.advice('header_bytes')}."
            )
        self._source.read(ahead)
        fetched += [(first, min(first + count, self._size)) for first, count in ahead]
