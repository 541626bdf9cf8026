"""A remote file as a parser of headers reads it: forwards, in leaps, a few bytes at a time."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING

from napari_wsigpu.model.errors import CorruptSlideError, SlideError
from napari_wsigpu.model.limits import limits

if TYPE_CHECKING:
    from typing import Any

    from napari_wsigpu.storage.source import ByteSource

FIRST_STEP, LARGEST_STEP = 128 << 10, 8 << 20
GROWTH = 4
TAIL = 512 << 10


class ReadAheadFile(io.RawIOBase):
    """A source as a file that is read ahead, farther the longer it is read on.

    With the first leap away from its begin the file's end is read as well: parts of a header that
    do not lie in front mostly lie there.

    Parameters
    ----------
    source : ByteSource
        Where the bytes are; it keeps what it read.
    size : int
        Size of the file in bytes.
    name : str
        The file's name, for errors.

    Attributes
    ----------
    name : str
        The same, which parsers ask of a file.
    failure : SlideError or None
        The first error; parsers may go on without what they could not read.
    """

    def __init__(self, source: ByteSource, size: int, name: str) -> None:
        super().__init__()
        self._source = source
        self._size = size
        self.name = name
        self._position = 0
        self._known: list[tuple[int, int]] = []
        self._step = FIRST_STEP
        self._leapt = False
        self._fetched = 0
        self.failure: SlideError | None = None

    def readable(self) -> bool:
        """Whether it can be read: it can."""
        return True

    def seekable(self) -> bool:
        """Whether it can be read in any order: it can."""
        return True

    def tell(self) -> int:
        """Return the position that is read next."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a position, as in any file."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise OSError("a position before the file's begin")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read on into a buffer; fewer bytes at the file's end."""
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

    def _read_ahead(self, begin: int, length: int) -> None:
        """Have the source read what comes next, unless that was done."""
        end = begin + length
        if any(first <= begin and end <= last for first, last in self._known):
            return
        if not self._known or any(first <= begin <= last for first, last in self._known):
            self._step = min(self._step * GROWTH, LARGEST_STEP) if self._known else FIRST_STEP
            leaps = False
        else:
            self._step = FIRST_STEP
            leaps = not self._leapt
        # Behind a long list, as of tiles' offsets, there mostly lies another one.
        ahead = [(begin, max(2 * length, self._step))]
        if leaps:
            self._leapt = True
            ahead.append((max(0, self._size - TAIL), TAIL))
        self._fetched += sum(wanted for _, wanted in ahead)
        if self._fetched > limits.header_bytes:
            raise CorruptSlideError(
                f"The header of '{self.name}' seems to be larger than any slide's: "
                f"{limits.advice('header_bytes')}."
            )
        self._source.read(ahead)
        self._known += [(first, min(first + wanted, self._size)) for first, wanted in ahead]
