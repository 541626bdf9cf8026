"""Path in, `SlideLayout` out: opens the file once and asks each vendor whose it is."""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import struct
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

import tifffile

from napari_wsigpu import truncation
from napari_wsigpu.errors import (
    CorruptSlideError,
    NotASlideError,
    SlideError,
    SlideNotFoundError,
    UnsupportedSlideError,
    file_error,
)
from napari_wsigpu.formats import claims, dicom, ome_zarr
from napari_wsigpu.formats.fields import finite, iso_date
from napari_wsigpu.formats.registry import PATH_FORMATS, TIFF_FORMATS
from napari_wsigpu.layout import RemoteFile, SlideFile
from napari_wsigpu.storage.readahead import ReadAheadFile
from napari_wsigpu.storage.remote import RemoteSource
from napari_wsigpu.storage.url import file_name, is_url, public_url
from napari_wsigpu.storage.zarr_server import DOCUMENTS, ServerFolder, ZarrServer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from napari_wsigpu.layout import SlideLayout
    from napari_wsigpu.storage.source import ByteSource

    Plane = Mapping[str, Mapping[str, int]]

# What is wrong with a file is said by our errors; those who set up logging still get more.
logging.getLogger("tifffile").addHandler(logging.NullHandler())

HEAD = 1 << 16
QUOTED, SIBLING = re.compile(r"'([^']{1,255})'"), "another file"
ZARR = re.compile(r"\.zarr(/|$)")
SMALLEST_MPP, LARGEST_MPP = 1e-4, 1e5
TIFF_MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


def describe(path: str | os.PathLike[str], at: Mapping[str, int] | None = None) -> SlideLayout:
    """Describe a slide.

    Parameters
    ----------
    path : str or PathLike
        A TIFF file, whatever its name, or its URL; a file of a DICOM slide, or the folder that
        holds one; the folder of an OME-Zarr image.
    at : Mapping of str to int, optional
        The plane along "z" and "t" to describe, of a slide whose `planes` has it.

    Returns
    -------
    SlideLayout
        Levels, associated images and metadata; no pixel is decoded.

    Raises
    ------
    SlideError
        `SlideNotFoundError`, `SlidePermissionError` or `SlideReadError` if the file can't be
        read, `NotASlideError` if it is no slide at all, `CorruptSlideError` if it is damaged,
        `UnsupportedSlideError` if it holds what can't be shown.
    """
    try:
        name = os.fsdecode(path)
    except TypeError:
        raise NotASlideError(f"{path!r} is no path; give the name of a slide's file.") from None
    plane: Plane = {} if at is None else {"at": at}
    if is_url(name):
        layout = _describe_url(name, plane)
    else:
        layout = _describe(str(Path(name).absolute()), plane)
    return _checked(layout)


def describe_source(source: ByteSource, size: int, name: str) -> SlideLayout:
    """Describe a TIFF slide whose bytes somebody else reads.

    Parameters
    ----------
    source : ByteSource
        The file.
    size : int
        Its size in bytes.
    name : str
        Its name.

    Returns
    -------
    SlideLayout
        As of `describe`; its path is the name.

    Raises
    ------
    SlideError
        As `describe` does.
    """
    return _checked(_describe_source(source, SlideFile(name, size, 0), {}))


def _checked(layout: SlideLayout) -> SlideLayout:
    """Return a layout without what can't be, and without others' names in its problems."""
    # Folders are private, and would hide the whole sentence.
    problems = list(layout.problems)
    for path in (*(file.path for file in layout.files[:1]), layout.path):
        folder = path.removesuffix(Path(path).name)
        problems = [text.replace(f"'{folder}", "'") for text in problems]
    problems = [_without_siblings(text, layout) for text in problems]
    mpp = layout.mpp
    if mpp is not None and not SMALLEST_MPP <= min(mpp) <= max(mpp) <= LARGEST_MPP:
        problems.append(f"A pixel of {mpp[0]:g} x {mpp[1]:g} µm is not possible; none is given.")
        mpp = None
    date = iso_date(layout.scan_date)
    metadata = finite(layout.metadata)
    return replace(layout, mpp=mpp, scan_date=date, metadata=metadata, problems=tuple(problems))


def _without_siblings(text: str, layout: SlideLayout) -> str:
    """Return a sentence without the names of other files, which can name a patient."""
    folder, own = Path(layout.files[0].path).parent, Path(layout.path).name

    def named(found: re.Match[str]) -> str:
        name = found[1]
        return found[0] if name == own or not _is_file(folder / name) else SIBLING

    found = QUOTED.sub(named, text)
    return f"{found[:1].upper()}{found[1:]}" if found.startswith(SIBLING) else found


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # no name that a file can have
        return False


def _describe(name: str, plane: Plane) -> SlideLayout:
    if "\0" in name:
        raise SlideNotFoundError(f"There is no file {name!r}; check the path.")
    path, head = Path(name), b""
    try:
        status = path.stat()
        is_folder = stat.S_ISDIR(status.st_mode)
        if not (is_folder or stat.S_ISREG(status.st_mode)):
            raise NotASlideError(f"'{name}' is no regular file; choose a slide's file.")
        if not is_folder:
            with path.open("rb", buffering=0) as file:
                head = file.read(HEAD)
        for item in PATH_FORMATS:
            if item.module.probe(path, head):
                parse: Callable[..., SlideLayout] = item.module.parse
                return parse(path, **plane)
        if is_folder:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except SlideError:
        raise
    except OSError as error:
        raise file_error(name, error) from error
    _check_head(name, head)
    return _describe_tiff(SlideFile.of(name, status), name, plane)


def _describe_url(url: str, plane: Plane) -> SlideLayout:
    name = public_url(url)
    if ZARR.search(name):
        return _describe_zarr(url, plane)
    try:
        return _describe_file(url, name, plane)
    except (NotASlideError, SlideNotFoundError):
        if "." in file_name(name):
            raise
        with suppress(NotASlideError):
            return _describe_zarr(url, plane)
        raise


def _describe_file(url: str, name: str, plane: Plane) -> SlideLayout:
    source = RemoteSource.connect(url)
    try:
        layout = _describe_source(source, SlideFile(name, source.size, 0), plane)
        return replace(layout, remote=RemoteFile(url, source.version))
    finally:
        source.close()


def _describe_source(source: ByteSource, described: SlideFile, plane: Plane) -> SlideLayout:
    name = described.path
    file = ReadAheadFile(source, described.size, name)
    head = file.read(HEAD)
    if head[dicom.PREAMBLE :].startswith(dicom.MAGIC) and not head.startswith(TIFF_MAGIC):
        raise UnsupportedSlideError(
            f"'{name}' is DICOM, which can only be read from a disk; "
            "download the slide's whole folder."
        )
    _check_head(name, head)
    file.seek(0)
    try:
        return _describe_tiff(described, cast("IO[bytes]", file), plane)
    finally:
        if file.failure is not None:  # the parser may have gone on without what it lacked
            raise file.failure from None


def _describe_zarr(url: str, plane: Plane) -> SlideLayout:
    """Describe a Zarr hierarchy on a server, by the URL of a folder or of a document in it."""
    folder, _, last = url.rstrip("/").rpartition("/")
    folder = folder if last in DOCUMENTS else url
    server = ZarrServer(folder)
    try:
        parse: Callable[..., SlideLayout] = ome_zarr.parse_folder
        layout = parse(ServerFolder(server), **plane)
        remote = RemoteFile(folder, server.version)
    finally:
        server.close()
    labels = (replace(item, layout=replace(item.layout, remote=remote)) for item in layout.labels)
    return replace(layout, remote=remote, labels=tuple(labels))


def _check_head(name: str, head: bytes) -> None:
    """Refuse what does not begin as a TIFF file does."""
    if not head:
        raise NotASlideError(f"'{name}' is empty; get a fresh copy of it.")
    if not head.startswith(TIFF_MAGIC):
        raise NotASlideError(
            f"'{name}' is not a TIFF-based slide, nor one in DICOM (it does not begin as these "
            "do); choose a slide's file."
        )


def _describe_tiff(source: SlideFile, stream: str | IO[bytes], plane: Plane) -> SlideLayout:
    name = source.path
    try:
        with tifffile.TiffFile(stream, name=file_name(name)) as file:
            claims.check(file, name)
            if not len(file.pages):
                raise CorruptSlideError(
                    f"'{name}' is cut off: its list of images lies beyond the end of the file; "
                    "get a fresh copy of it."
                )
            vendor = next(item.module for item in TIFF_FORMATS if item.module.probe(file))
            parse: Callable[..., SlideLayout] = vendor.parse
            layout = parse(file, source, **plane)
            cut_off = truncation.problem(layout)
            return (
                layout if cut_off is None else replace(layout, problems=(cut_off, *layout.problems))
            )
    except SlideError:
        raise
    except OSError as error:
        raise file_error(name, error) from error
    except MemoryError:
        raise UnsupportedSlideError(
            f"'{name}' claims more than there is memory for; get a fresh copy of the file."
        ) from None
    except Exception as error:
        # The parser's own checks end here: on damaged structures it raises whatever the
        # damaged value happened to break (struct.error, IndexError, AssertionError, ...).
        raise CorruptSlideError(
            f"The TIFF structure of '{name}' is damaged ({_brief(error)}); "
            "get a fresh copy of the file."
        ) from error


def _brief(error: Exception) -> str:
    if isinstance(error, struct.error):
        return "a tag ends too early"
    return str(error).split("\n")[0][:120] or type(error).__name__
