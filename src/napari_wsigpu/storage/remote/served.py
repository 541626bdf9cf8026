"""A stand-in for `pathlib.Path`, for header parsers that read a file through a source."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from napari_wsigpu.storage.bounded import BoundedReader
from napari_wsigpu.storage.remote.readahead import ReadAheadFile
from napari_wsigpu.storage.remote.url import file_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from napari_wsigpu.model.layout import SlideFile
    from napari_wsigpu.storage.source import ByteSource


class ServedFile:
    """A file on a server, or a stream that the caller has opened.

    Parameters
    ----------
    source : ByteSource
        Source of the file's bytes.
    file : SlideFile
        Size of the file, and the path to show in messages.

    Attributes
    ----------
    source, file
        The parameters.
    """

    def __init__(self, source: ByteSource, file: SlideFile) -> None:
        self.source, self.file = source, file

    def __str__(self) -> str:
        return self.file.path

    @property
    def name(self) -> str:
        """The last component of its path."""
        return file_name(self.file.path)

    @contextmanager
    def open(self) -> Iterator[BoundedReader]:
        """Yield a file object to read from.

        Raises
        ------
        SlideError
            On exit, if any read has failed, even if the parser ignored the failure.
        """
        ahead = ReadAheadFile(self.source, self.file.size, self.file.path)
        try:
            yield BoundedReader(ahead)
        finally:
            if ahead.failure is not None:
                raise ahead.failure from None
