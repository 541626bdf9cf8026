"""The inputs that tiffslide accepts: paths, URLs, fsspec files and binary streams."""

from __future__ import annotations

import os
from io import BufferedReader, FileIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast
from warnings import warn

import tifffile

from napari_wsigpu.formats.describe import describe_source
from napari_wsigpu.formats.image_file import VENDOR
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
from napari_wsigpu.storage.remote.remote_source import RemoteSource
from napari_wsigpu.storage.remote.url import file_name, is_supported, public_url
from napari_wsigpu.storage.stream import StreamSource

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Protocol

    from fsspec.spec import AbstractFileSystem

    class OpenFile(Protocol):
        """An fsspec file that is not open yet."""

        fs: AbstractFileSystem
        path: str

    Filename = str | os.PathLike[str] | IO[bytes] | OpenFile


class TiffFileError(SlideError, tifffile.TiffFileError):
    """The file is not a slide, or it is damaged."""


class SlideInput(NamedTuple):
    """A slide to open: a path or URL, or a stream.

    Attributes
    ----------
    path : str
        Path, URL, or name of the stream.
    stream : IO of bytes or None
        The stream to read, if the file is not opened by its path.
    owned : bool
        Whether the slide closes the stream.
    """

    path: str
    stream: IO[bytes] | None = None
    owned: bool = False

    def __str__(self) -> str:
        return public_url(self.path)


def resolve_input(filename: Filename, storage_options: Mapping[str, object] | None) -> SlideInput:
    """Return the input for a file name; files that only fsspec can read are opened.

    Parameters
    ----------
    filename : str, PathLike, fsspec.core.OpenFile or IO of bytes
        The file.
    storage_options : Mapping, optional
        Options of the fsspec file system if `filename` is a URL.

    Raises
    ------
    NotASlideError
        If `filename` has an unsupported type.
    SlideError
        If the file does not exist or cannot be opened.
    """
    if isinstance(filename, str | os.PathLike):
        return _resolve_path(os.fspath(filename), storage_options or {})
    if storage_options:
        warn("storage_options are ignored for an open file", UserWarning, stacklevel=4)
    if hasattr(filename, "seek") and hasattr(filename, "read"):
        stream = cast("IO[bytes]", filename)
        path = _path_of(stream)
        return SlideInput(path) if path else SlideInput(_name_of(stream), stream)
    if hasattr(filename, "fs") and hasattr(filename, "path"):
        return _resolve_fsspec(filename.fs, filename.path)
    raise NotASlideError(
        f"{filename!r} is not a path, URL or open file of a slide; pass one of these."
    )


def _resolve_path(path: str, options: Mapping[str, object]) -> SlideInput:
    if not options and (is_supported(path) or ("://" not in path and "::" not in path)):
        return SlideInput(path)
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise MissingPackageError(
            f"Reading '{public_url(path)}' requires fsspec; run pip install fsspec."
        ) from error
    try:
        return _resolve_fsspec(*url_to_fs(path, **options))
    except (ImportError, ValueError) as error:  # an unknown protocol
        raise UnsupportedSlideError(
            f"fsspec cannot read '{public_url(path)}' ({error}); download the file."
        ) from error


def _resolve_fsspec(system: AbstractFileSystem, path: str) -> SlideInput:
    """Return the input for a path in an fsspec file system."""
    from fsspec.implementations.local import LocalFileSystem

    if isinstance(system, LocalFileSystem):
        return SlideInput(path)
    try:
        return SlideInput(file_name(path), system.open(path, "rb"), owned=True)
    except FileNotFoundError:
        raise SlideNotFoundError(f"There is no file '{file_name(path)}'; check the path.") from None
    except OSError as error:
        raise file_error(file_name(path), error) from error


def _path_of(stream: IO[bytes]) -> str | None:
    """Return the path of the local file that a stream reads.

    Returns None if it reads no local file, or if the path now names another file.
    """
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


def open_input(source: SlideInput) -> Slide:
    """Open a slide.

    Raises
    ------
    TiffFileError
        If the file is not a slide, or it is damaged.
    SlideError
        If the slide cannot be read.
    """
    try:
        if source.stream is None:
            slide = open_slide(source.path)
            if slide.vendor == VENDOR:
                slide.close()
                raise TiffFileError(f"'{source}' is not a TIFF file; use NotTiffSlide.")
            return slide
        stream = StreamSource(source.stream, source.path, owned=source.owned)
        try:
            return Slide(describe_source(stream, stream.size, source.path), source=stream)
        except SlideError:
            stream.close()
            raise
    except (NotASlideError, CorruptSlideError, UnsupportedSlideError) as error:
        raise TiffFileError(str(error)) from error


def open_tifffile(slide_input: SlideInput, **options: Any) -> tifffile.TiffFile:
    """Open a slide with tifffile; `options` are passed to `tifffile.TiffFile`.

    Raises
    ------
    TiffFileError
        If the file is not a TIFF file.
    SlideError
        If the file cannot be read.
    """
    file: str | IO[bytes] = slide_input.path
    if slide_input.stream is not None or is_supported(slide_input.path):
        source = (
            RemoteSource.connect(slide_input.path)
            if slide_input.stream is None
            else StreamSource(slide_input.stream, slide_input.path)
        )
        file = cast("IO[bytes]", ReadAheadFile(source, source.size, str(slide_input)))
        options = {"name": file_name(slide_input.path)} | options
    try:
        return tifffile.TiffFile(file, **options)
    except tifffile.TiffFileError as error:
        raise TiffFileError(f"'{slide_input}' is not a TIFF file; use `.slide`.") from error
    except OSError as error:
        raise file_error(str(slide_input), error) from error
