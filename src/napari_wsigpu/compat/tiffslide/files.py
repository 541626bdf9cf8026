"""What tiffslide opens: paths, URLs of fsspec, its files, and any stream."""

from __future__ import annotations

import os
from io import BufferedReader, FileIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast
from warnings import warn

import tifffile

from napari_wsigpu.formats.describe import describe_source
from napari_wsigpu.model.errors import (
    CorruptSlideError,
    MissingPackageError,
    NotASlideError,
    SlideError,
    SlideNotFoundError,
    UnsupportedSlideError,
    file_error,
)
from napari_wsigpu.slide.slide import Slide, open_slide
from napari_wsigpu.storage.remote.readahead import ReadAheadFile
from napari_wsigpu.storage.remote.source import RemoteSource
from napari_wsigpu.storage.remote.url import file_name, is_supported, public_url
from napari_wsigpu.storage.stream import StreamSource

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Protocol

    class OpenFile(Protocol):
        """A file of fsspec that was not opened yet."""

        fs: Any
        path: str

    Filename = str | os.PathLike[str] | IO[bytes] | OpenFile


class TiffFileError(SlideError, tifffile.TiffFileError):
    """The file is no slide, or a damaged one."""


class Place(NamedTuple):
    """Where a file is: the path or URL of one that is opened by it, or a stream.

    Attributes
    ----------
    path : str
        Its path, URL or name.
    stream : IO of bytes or None
        The stream that it is read by.
    owned : bool
        Whether nobody else uses the stream.
    """

    path: str
    stream: IO[bytes] | None = None
    owned: bool = False

    def __str__(self) -> str:
        return public_url(self.path)


def find(filename: Filename, storage_options: Mapping[str, Any] | None) -> Place:
    """Return where a file is; what only fsspec knows is opened.

    Parameters
    ----------
    filename : str, PathLike, fsspec's OpenFile or IO of bytes
        The file.
    storage_options : Mapping, optional
        For fsspec's file system, where `filename` is a URL.

    Raises
    ------
    NotASlideError
        If it is nothing of that kind.
    SlideError
        If there is no such file, or it can't be opened.
    """
    if isinstance(filename, str | os.PathLike):
        return _find_path(os.fspath(filename), storage_options or {})
    if storage_options:
        warn("storage_options are of no use with an open file", UserWarning, stacklevel=4)
    if hasattr(filename, "seek") and hasattr(filename, "read"):
        stream = cast("IO[bytes]", filename)
        path = _path_of(stream)
        return Place(path) if path else Place(_name_of(stream), stream)
    if hasattr(filename, "fs") and hasattr(filename, "path"):
        return _find_in(filename.fs, filename.path)
    raise NotASlideError(f"{filename!r} is no path, URL or open file; give the name of a slide.")


def _find_path(path: str, options: Mapping[str, Any]) -> Place:
    if not options and (is_supported(path) or ("://" not in path and "::" not in path)):
        return Place(path)
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise MissingPackageError(
            f"'{public_url(path)}' is read by fsspec, which can't be imported; pip install fsspec."
        ) from error
    try:
        return _find_in(*url_to_fs(path, **options))
    except (ImportError, ValueError) as error:  # a protocol that it does not know
        raise UnsupportedSlideError(
            f"'{public_url(path)}' can't be read by fsspec ({error}); download the file."
        ) from error


def _find_in(system: Any, path: str) -> Place:
    """Return a file of one of fsspec's file systems."""
    from fsspec.implementations.local import LocalFileSystem

    if isinstance(system, LocalFileSystem):
        return Place(path)
    try:
        return Place(file_name(path), system.open(path, "rb"), owned=True)
    except FileNotFoundError:
        raise SlideNotFoundError(f"There is no file '{file_name(path)}'; check the path.") from None
    except OSError as error:
        raise file_error(file_name(path), error) from error


def _path_of(stream: IO[bytes]) -> str | None:
    """Return the path of a local file that a stream reads; None if its name is no longer its."""
    if not isinstance(stream, BufferedReader | FileIO) or not isinstance(stream.name, str):
        return None
    try:
        same = os.path.samestat(os.fstat(stream.fileno()), Path(stream.name).stat())
    except OSError:
        return None
    return stream.name if same else None


def _name_of(stream: IO[bytes]) -> str:
    for attribute in ("full_name", "path", "name"):
        name = getattr(stream, attribute, None)
        if isinstance(name, str) and name:
            return file_name(name)
    return "a stream"


def open_place(place: Place) -> Slide:
    """Open a slide.

    Raises
    ------
    TiffFileError
        If it is none, or a damaged one.
    SlideError
        If it can't be read.
    """
    try:
        if place.stream is None:
            return open_slide(place.path)
        source = StreamSource(place.stream, place.path, owned=place.owned)
        try:
            layout = describe_source(source, source.size, place.path)
            return Slide(layout, source=source)
        except SlideError:
            source.close()
            raise
    except (NotASlideError, CorruptSlideError, UnsupportedSlideError) as error:
        raise TiffFileError(str(error)) from error


def open_tifffile(place: Place, **options: Any) -> tifffile.TiffFile:
    """Open a slide by tifffile, whose options these are.

    Raises
    ------
    TiffFileError
        If it is no TIFF file.
    SlideError
        If it can't be read.
    """
    file: str | IO[bytes] = place.path
    if place.stream is not None or is_supported(place.path):
        source = (
            RemoteSource.connect(place.path)
            if place.stream is None
            else StreamSource(place.stream, place.path)
        )
        file = cast("IO[bytes]", ReadAheadFile(source, source.size, str(place)))
        options = {"name": file_name(place.path)} | options
    try:
        return tifffile.TiffFile(file, **options)
    except tifffile.TiffFileError as error:
        raise TiffFileError(f"'{place}' is no TIFF file; use its `slide`.") from error
    except OSError as error:
        raise file_error(str(place), error) from error
