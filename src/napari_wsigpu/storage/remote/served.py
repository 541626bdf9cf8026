"""A file whose bytes a source gives, as much of a `Path` as a parser of headers needs."""

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
    """A file on a server, or of somebody's stream.

    Parameters
    ----------
    source : ByteSource
        Its bytes.
    file : SlideFile
        What is known of it; its path is shown.

    Attributes
    ----------
    source, file
        The same.
    """

    def __init__(self, source: ByteSource, file: SlideFile) -> None:
        self.source, self.file = source, file

    def __str__(self) -> str:
        return self.file.path

    @property
    def name(self) -> str:
        """The last part of its path."""
        return file_name(self.file.path)

    @contextmanager
    def open(self) -> Iterator[BoundedReader]:
        """Give the file to be read.

        Raises
        ------
        SlideError
            When it is closed, if it could not be read, though its parser went on without.
        """
        ahead = ReadAheadFile(self.source, self.file.size, self.file.path)
        try:
            yield BoundedReader(ahead)
        finally:
            if ahead.failure is not None:
                raise ahead.failure from None
