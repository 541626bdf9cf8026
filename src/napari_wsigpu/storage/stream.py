"""Encoded bytes from a seekable stream that the caller has opened."""

from __future__ import annotations

import os
import threading
from io import BytesIO
from typing import IO, TYPE_CHECKING

from napari_wsigpu.model.errors import SlideReadError, file_error
from napari_wsigpu.storage.readers import closed_error
from napari_wsigpu.storage.source import ViewSource

if TYPE_CHECKING:
    from collections.abc import Sequence


class StreamSource(ViewSource):
    """A seekable binary stream, read by one thread at a time.

    Parameters
    ----------
    stream : IO of bytes
        The stream. It must stay open, and nothing else may use it while a read is in progress.
    name : str
        Name of the stream, for messages.
    owned : bool
        Whether `close` closes the stream.

    Attributes
    ----------
    size : int
        Size in bytes.
    """

    def __init__(self, stream: IO[bytes], name: str, *, owned: bool = False) -> None:
        self._stream, self._name, self._owned = stream, name, owned
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._closed = False
        self.size = stream.seek(0, os.SEEK_END)

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes of each (offset, length), in order; fewer at the end of the stream.

        Raises
        ------
        SlideClosedError
            If the source was closed.
        SlideError
            If the stream can't be read, or belongs to the process that this one was forked from.
        """
        self._check_process()
        with self._lock:
            if self._closed:
                raise closed_error(self._name)
            try:
                return [self._read(*each) for each in ranges]
            except (OSError, ValueError) as error:  # ValueError: the stream was closed
                raise file_error(self._name, OSError(str(error))) from error

    def _check_process(self) -> None:
        """Refuse to read in a forked child, unless the stream is in memory.

        The child has its own copy of a `BytesIO`. It shares the position of an open file with the
        parent, which may move it at any time.
        """
        if self._process == os.getpid():
            return
        if not isinstance(self._stream, BytesIO):
            raise SlideReadError(
                f"'{self._name}' was opened from a stream by the process that this one was forked "
                "from; open the slide again in this process, or open it from a path."
            )
        # A thread of the parent may have held the old lock at the moment of the fork.
        self._lock, self._process = threading.Lock(), os.getpid()

    def _read(self, offset: int, length: int) -> memoryview:
        self._stream.seek(offset)
        data = self._stream.read(length)
        while 0 < len(data) < length and (more := self._stream.read(length - len(data))):
            data += more
        return memoryview(data)

    def release(self) -> None:
        """Do nothing: a closed stream could not be reopened."""

    def close(self) -> None:
        """Refuse further reads, and close the stream if it is owned; may be called twice."""
        with self._lock:
            if self._owned and not self._closed:
                self._stream.close()
            self._closed = True
