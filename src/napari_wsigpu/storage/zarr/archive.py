"""Zarr hierarchies in one ZIP file (OME-Zarr RFC-9), read without extracting it."""

from __future__ import annotations

import os
import struct
import threading
from concurrent.futures import Future
from io import FileIO
from typing import TYPE_CHECKING, NamedTuple
from zipfile import ZIP_STORED, ZipFile

from napari_wsigpu.model.errors import (
    CorruptSlideError,
    SlideError,
    SlideNotFoundError,
    UnsupportedSlideError,
    changed_error,
    file_error,
)
from napari_wsigpu.model.limits import limits
from napari_wsigpu.storage.file_source import FileSource
from napari_wsigpu.storage.remote.connection import Response
from napari_wsigpu.storage.zarr.chunks import ChunkFiles, Location
from napari_wsigpu.storage.zarr.server import DOCUMENTS, LARGEST_DOCUMENT, KeyFolder

if TYPE_CHECKING:
    from napari_wsigpu.model.layout import SlideFile

ENTRY = b"PK\3\4"
# Header of an entry (APPNOTE 4.3.7): signature, and the lengths of its name and extra field.
LOCAL_HEADER = struct.Struct("<4s22xHH")
ENCRYPTED = 1  # flag bit 0 (APPNOTE 4.4.4)
# `zipfile` needs about ten times as much memory as the size of the central directory.
INDEX_SHARE = 8


class _Entry(NamedTuple):
    """Position of an entry's header in the archive, and size of its content in bytes."""

    header: int
    size: int


class _IndexedFile(FileIO):
    """A file for `zipfile`, which reads the whole central directory with one call."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Read bytes; refuse sizes that are too large for a central directory."""
        if (size or 0) > limits.header_bytes // INDEX_SHARE:
            raise UnsupportedSlideError(
                f"The central directory of '{self.name}' is larger than 1/{INDEX_SHARE} of the "
                "limit 'header_bytes'; if you trust the file, raise the limit, or save the arrays "
                "with shards."
            )
        return super().read(size)


class ZipArchive:
    """A ZIP file of stored entries, read by position from any thread.

    All reads share one handle; see `FileSource`.

    Parameters
    ----------
    file : SlideFile
        The archive, with the size and times that it must still have.

    Attributes
    ----------
    name : str
        Its path.
    """

    def __init__(self, file: SlideFile) -> None:
        self.name = file.path
        self._file = file
        self._source = FileSource(file)
        self._lock = threading.Lock()  # guards the creation of `_index`
        self._index: dict[str, _Entry] | None = None

    @property
    def root(self) -> KeyFolder:
        """The folder of the hierarchy: the archive's root, or the only folder in it.

        Raises
        ------
        SlideError
            If the archive can't be read, or its entries are compressed.
        """
        names = self._entries()
        folders = {name.partition("/")[0] for name in names}
        alone = "" if any(name in names for name in DOCUMENTS) or len(folders) > 1 else folders
        return KeyFolder(self, next(iter(alone), ""))

    def files(self, key: str) -> ChunkFiles:
        """Return the files of the array in a folder."""
        return ChunkFiles(
            lambda name: self._locate(f"{key}/{name}".strip("/")),
            lambda _: self._source.open_reader(),
        )

    def check(self) -> None:
        """Raise a `SlideError` if the archive was closed, or has changed."""
        self._source.checked_path()

    def _locate(self, key: str) -> Location | None:
        """Return the location of an entry's content; None if there is no such entry."""
        entry = self._entries().get(key)
        if entry is None:
            return None
        [header] = self._source.read([(entry.header, LOCAL_HEADER.size)])
        if len(header) < LOCAL_HEADER.size:
            raise ValueError("the position of an entry in the archive is wrong")
        signature, *lengths = LOCAL_HEADER.unpack(header)
        start = entry.header + LOCAL_HEADER.size + sum(lengths)
        if signature != ENTRY or start + entry.size > self._file.size:
            raise ValueError("the position of an entry in the archive is wrong")
        return Location(self.name, start, entry.size)

    def document(self, key: str) -> bytes | None:
        """Return the content of a metadata document; None if there is none.

        Raises
        ------
        CorruptSlideError
            If it is too large, or its position in the archive is wrong.
        SlideError
            If the archive can't be read.
        """
        entry = self._entries().get(key)
        if entry is None:
            return None
        if entry.size > LARGEST_DOCUMENT:
            raise CorruptSlideError(
                f"'{self.name}/{key}' is too large for a metadata file ({entry.size >> 20} MiB); "
                "get a fresh copy of it."
            )
        try:
            return self._read(key, 0, None)
        except ValueError as error:
            raise CorruptSlideError(
                f"'{self.name}/{key}' can't be read ({error}); get a fresh copy of the archive."
            ) from error

    def get(self, key: str, offset: int = 0, length: int | None = None) -> Future[Response]:
        """Read an entry or a range of it; see `ZarrServer.get`."""
        found: Future[Response] = Future()
        try:
            data = self._read(key, offset, length)
        except Exception as error:
            found.set_exception(error)
        else:
            found.set_result(Response(memoryview(data), len(data), ""))
        return found

    def release(self) -> None:
        """Close the file once no thread is reading it; the next read reopens it."""
        self._source.release()

    def close(self) -> None:
        """Refuse new reads, and close the file once no thread is reading it."""
        self._source.close()

    def _read(self, key: str, offset: int, length: int | None) -> bytes:
        """Return a range of an entry; a negative offset counts from its end."""
        found = self._locate(key)
        if found is None:
            raise SlideNotFoundError(f"'{self.name}' has no entry '{key}'; get a fresh copy of it.")
        _, start, size = found
        first = min(size, offset) if offset >= 0 else max(0, size + offset)
        count = size - first if length is None else min(length, size - first)
        [data] = self._source.read([(start + first, count)])
        return bytes(data)

    def _entries(self) -> dict[str, _Entry]:
        with self._lock:
            if self._index is None:
                self._index = self._read_index()
            return self._index

    def _read_index(self) -> dict[str, _Entry]:
        try:
            with _IndexedFile(self.name) as file, ZipFile(file) as archive:
                if not self._file.matches(os.fstat(file.fileno())):
                    raise changed_error(self.name)
                items = [item for item in archive.infolist() if not item.is_dir()]
        except SlideError:
            raise
        except OSError as error:
            raise file_error(self.name, error) from error
        except Exception as error:  # `zipfile` raises many kinds on damaged files
            raise CorruptSlideError(
                f"The archive '{self.name}' is damaged or truncated; get a fresh copy of it."
            ) from error
        if any(item.flag_bits & ENCRYPTED for item in items):
            raise UnsupportedSlideError(
                f"The archive '{self.name}' is encrypted; unpack it and open its contents."
            )
        if any(item.compress_type != ZIP_STORED for item in items):
            raise UnsupportedSlideError(
                f"The entries of the archive '{self.name}' are compressed, so parts of them can't "
                "be read; zip it without compression (zip -0), or unpack it and open its contents."
            )
        return {item.filename: _Entry(item.header_offset, item.file_size) for item in items}
