"""Detect the format of a path or URL, and describe the slide as a `SlideLayout`."""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
import tifffile

from napari_wsigpu.formats import foreign
from napari_wsigpu.formats.fields import finite, iso_date
from napari_wsigpu.formats.registry import PATH_FORMATS, TIFF_FORMATS
from napari_wsigpu.formats.tiff import claims, companion, hamamatsu, slide_list
from napari_wsigpu.formats.tiff.siblings import SIBLING
from napari_wsigpu.model.errors import (
    CorruptSlideError,
    NotASlideError,
    SlideError,
    SlideNotFoundError,
    UnsupportedSlideError,
    file_error,
)
from napari_wsigpu.model.layout import RemoteFile, SlideFile
from napari_wsigpu.model.reasons import parser_reason
from napari_wsigpu.model.tags import TIFF_MAGIC
from napari_wsigpu.storage import truncation
from napari_wsigpu.storage.bounded import BoundedReader
from napari_wsigpu.storage.remote.url import (
    file_name,
    has_target,
    is_dicomweb,
    is_supported,
    is_url,
    public_url,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from napari_wsigpu.model.layout import SlideLayout
    from napari_wsigpu.storage.remote.dicom_frames import DicomWebSource
    from napari_wsigpu.storage.remote.remote_files import RemoteFilesSource
    from napari_wsigpu.storage.remote.remote_source import RemoteSource
    from napari_wsigpu.storage.source import ByteSource

    Found = tuple[SlideLayout, RemoteSource | RemoteFilesSource | DicomWebSource | None]
    # Keyword arguments of a `parse` function: `at`, or none, because not all formats have planes.
    Plane = Mapping[str, Mapping[str, int]]

# Keep tifffile's messages off stderr unless the application configures logging: this package
# reports problems with a file itself.
logging.getLogger("tifffile").addHandler(logging.NullHandler())

HEAD = 1 << 16
IMAGES_TRUNCATED = (
    "The file is truncated: its list of images continues beyond its end, or the description of an "
    "image does, so levels, planes, channels or associated images may be missing; get a fresh copy "
    "of it."
)
UNSELECTABLE = "can't be selected"
QUOTED = re.compile(r"'([^']{1,255})'")
# Characters that may start a quotation from the file in a parser's error message.
QUOTATION = re.compile(r"[\n'\"{\[<]")
ZARR = re.compile(r"\.zarr(/|$)")
SMALLEST_MPP, LARGEST_MPP = 1e-4, 1e5


def describe(path: str | os.PathLike[str], at: Mapping[str, int] | None = None) -> SlideLayout:
    """Describe a slide.

    Parameters
    ----------
    path : str or PathLike
        The file or folder of a slide, or its URL. TIFF and DICOM are recognized by content, not
        by name. An OME-XML companion file stands for the TIFF files that it describes.
    at : Mapping of str to int, optional
        Indices of the plane along "z" and "t", for slides with several `planes`.

    Returns
    -------
    SlideLayout
        Levels, associated images and metadata; no pixel is decoded.

    Raises
    ------
    SlideError
        `SlideNotFoundError`, `SlidePermissionError` or `SlideReadError` if the file can't be
        read, `NotASlideError` if it is not a slide, `CorruptSlideError` if it is damaged, or
        `UnsupportedSlideError` if it can't be shown.
    """
    layout, source = _describe_any(path, at)
    if source is not None:
        source.close()
    return layout


@contextmanager
def describe_for_reading(
    path: str | os.PathLike[str], at: Mapping[str, int] | None = None
) -> Iterator[tuple[SlideLayout, ByteSource | None]]:
    """Describe a slide, and keep the connection to its server for reading pixels.

    Parameters
    ----------
    path, at
        As in `describe`.

    Yields
    ------
    SlideLayout
        As returned by `describe`.
    ByteSource or None
        The open source of a remote slide; None for local files. If the `with` block succeeds, the
        caller owns the source and must close it; if the block raises, the source is closed.

    Raises
    ------
    SlideError
        As `describe` does.
    """
    layout, source = _describe_any(path, at)
    try:
        yield layout, source
    except BaseException:
        if source is not None:
            source.close()
        raise


def describe_source(source: ByteSource, size: int, name: str) -> SlideLayout:
    """Describe a TIFF slide from the caller's byte source.

    Parameters
    ----------
    source : ByteSource
        The file; the caller closes it.
    size : int
        Size of the file in bytes.
    name : str
        Name of the file, for messages.

    Returns
    -------
    SlideLayout
        As returned by `describe`; its path is `name`.

    Raises
    ------
    SlideError
        As `describe` does.
    """
    return _checked(_describe_source(source, SlideFile(name, size, 0), {}))


def _describe_any(path: str | os.PathLike[str], at: Mapping[str, int] | None) -> Found:
    try:
        name = os.fsdecode(path)
    except TypeError:
        raise NotASlideError(f"{path!r} is not a path; pass the path of a slide.") from None
    if not name:  # `Path` would take it for the current folder
        raise SlideNotFoundError("The path is empty; pass the path of a slide.")
    plane: Plane = {} if at is None else {"at": at}
    if is_url(name):
        return _describe_url(name, plane)
    return _checked(_describe_local(str(Path(name).absolute()), plane)), None


def _checked(layout: SlideLayout) -> SlideLayout:
    """Remove impossible values from a layout, and the names of other files from its problems."""
    # Folders are private: a problem that names one would be masked as a whole.
    problems = list(layout.problems)
    for path in (*(file.path for file in layout.files[:1]), layout.path):
        folder = path.removesuffix(Path(path).name)
        problems = [text.replace(f"'{folder}", "'") for text in problems]
    problems = [_without_siblings(text, layout) for text in problems]
    hidden = layout.unselectable_planes
    if hidden and not any(UNSELECTABLE in text for text in problems):
        problems.append(
            f"{hidden} of {hidden + layout.planes.count} planes {UNSELECTABLE} and are not shown."
        )
    mpp = layout.mpp
    if mpp is not None and not SMALLEST_MPP <= min(mpp) <= max(mpp) <= LARGEST_MPP:
        problems.append(
            f"The pixel size of {mpp[0]:g} x {mpp[1]:g} µm is impossible and is ignored."
        )
        mpp = None
    date = iso_date(layout.scan_date)
    metadata = finite(layout.metadata)
    return replace(layout, mpp=mpp, scan_date=date, metadata=metadata, problems=tuple(problems))


def _without_siblings(text: str, layout: SlideLayout) -> str:
    """Replace the quoted names of other files in a message, because they may name a patient."""
    folder, own = Path(layout.files[0].path).parent, Path(layout.path).name

    def replacement(found: re.Match[str]) -> str:
        name = found[1]
        return found[0] if name == own or not _is_file(folder / name) else SIBLING

    found = QUOTED.sub(replacement, text)
    return f"{found[:1].upper()}{found[1:]}" if found.startswith(SIBLING) else found


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # not a valid file name
        return False


def _describe_local(name: str, plane: Plane) -> SlideLayout:
    if "\0" in name:
        raise SlideNotFoundError(f"There is no file {name!r}; check the path.")
    path, head, is_ndpi = Path(name), b"", False
    try:
        status = path.stat()
        is_folder = stat.S_ISDIR(status.st_mode)
        if not is_folder:
            head, is_ndpi = _read_head(path, status)
        if slide_list.probe(head):
            listed = SlideFile.of(name, status)
            with _as_slide_errors(name):
                return slide_list.parse(listed, head, _describe_listed, plane.get("at", {}))
        is_tiff = head.startswith(TIFF_MAGIC)
        for item in PATH_FORMATS:
            if (item.like_tiff or not is_tiff) and item.module.probe(path, head):
                with _as_slide_errors(name):
                    parse: Callable[..., SlideLayout] = item.module.parse
                    return parse(path, **plane)
        if is_folder:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if companion.probe(head):
            first, xml = companion.main_file(path)
            source = SlideFile.of(str(first), first.stat())
            return replace(_describe_tiff(source, str(first), plane, xml), path=name)
    except SlideError:
        raise
    except OSError as error:
        raise file_error(name, error) from error
    _check_head(name, head)
    return _describe_tiff(SlideFile.of(name, status), name, plane, is_ndpi=is_ndpi)


def _read_head(path: Path, status: os.stat_result) -> tuple[bytes, bool]:
    """Return the first bytes of a file, and whether it is NDPI."""
    if not stat.S_ISREG(status.st_mode):  # opening a pipe would block
        raise NotASlideError(f"'{path}' is not a regular file; choose a slide file.")
    with path.open("rb", buffering=0) as file:
        return file.read(HEAD), hamamatsu.is_ndpi(file, status.st_size)


def _describe_listed(path: Path, at: Mapping[str, int]) -> SlideLayout:
    """Describe a TIFF that a list of slides names."""
    name = str(path)
    try:
        status = path.stat()
        head, is_ndpi = _read_head(path, status)
    except OSError as error:
        raise file_error(name, error) from error
    _check_head(name, head)
    plane: Plane = {"at": at} if at else {}
    return _describe_tiff(SlideFile.of(name, status), name, plane, is_ndpi=is_ndpi)


def _describe_url(url: str, plane: Plane) -> Found:
    name = public_url(url)
    if is_supported(url) and not has_target(url):
        raise SlideNotFoundError(f"'{name}' is not the URL of an object; check the URL.")
    if is_dicomweb(url):
        from napari_wsigpu.formats.dicom import dicom_web

        parse: Callable[..., tuple[SlideLayout, DicomWebSource]] = dicom_web.parse
        layout, source = parse(url, **plane)
        return _checked(layout), source
    if ZARR.search(name):
        return _describe_zarr(url, plane), None
    try:
        return _describe_remote_file(url, name, plane)
    except (NotASlideError, SlideNotFoundError):
        series = _describe_series(url, plane, is_folder=True)
        if series is not None:
            return series
        if "." in file_name(name):
            raise
        with suppress(NotASlideError):
            return _describe_zarr(url, plane), None
        raise


def _describe_remote_file(url: str, name: str, plane: Plane) -> Found:
    from napari_wsigpu.storage.remote.remote_source import RemoteSource

    source = RemoteSource.connect(url)
    try:
        if _is_dicom(name, bytes(source.read([(0, HEAD)])[0])):
            series = _describe_series(url, plane)
            if series is not None:
                source.close()
                return series
        layout = _describe_source(source, SlideFile(name, source.size, 0), plane)
        return _checked(replace(layout, remote=RemoteFile(url, source.version))), source
    except BaseException:
        source.close()
        raise


def _is_dicom(name: str, head: bytes) -> bool:
    from napari_wsigpu.formats.dicom import dicom

    return bool(head) and dicom.probe(Path(name), head)


def _describe_series(url: str, plane: Plane, *, is_folder: bool = False) -> Found | None:
    from napari_wsigpu.formats.dicom import dicom_served

    parse: Callable[..., Found | None] = dicom_served.parse_series
    found = parse(url, **plane, is_folder=is_folder)
    return None if found is None else (_checked(found[0]), found[1])


def _describe_source(source: ByteSource, opened: SlideFile, plane: Plane) -> SlideLayout:
    from napari_wsigpu.formats.dicom import dicom_served
    from napari_wsigpu.formats.vsi import vsi
    from napari_wsigpu.storage.remote.readahead import ReadAheadFile
    from napari_wsigpu.storage.remote.served import ServedFile

    name = opened.path
    ahead = ReadAheadFile(source, opened.size, name)
    file = BoundedReader(ahead)  # buffers: parsers read tags a few bytes at a time
    head = file.read(HEAD)
    if _is_dicom(name, head):
        return dicom_served.parse_alone(ServedFile(source, opened), **plane)
    _check_head(name, head, served=True)
    file.seek(0)
    if vsi.is_vsi(head) and vsi.has_external_tiles(file):
        raise UnsupportedSlideError(
            f"'{name}' is an Olympus slide with tiles in other files, which is not supported on "
            "servers; download it with its folder."
        )
    is_ndpi = hamamatsu.is_ndpi(file, opened.size)
    file.seek(0)
    try:
        return _describe_tiff(opened, file, plane, is_ndpi=is_ndpi)
    finally:
        if ahead.failure is not None:  # the parser may have ignored the missing bytes
            raise ahead.failure from None


def _describe_zarr(url: str, plane: Plane) -> SlideLayout:
    """Describe a Zarr hierarchy on a server, from the URL of its folder or of a metadata file."""
    from napari_wsigpu.formats.zarr import ome_zarr
    from napari_wsigpu.storage.zarr.server import DOCUMENTS, KeyFolder, ZarrServer

    folder, _, last = url.rstrip("/").rpartition("/")
    folder = folder if last in DOCUMENTS else url
    server = ZarrServer(folder)
    try:
        parse: Callable[..., SlideLayout] = ome_zarr.parse_folder
        layout = parse(KeyFolder(server), **plane)
        remote = RemoteFile(folder, server.version)
    finally:
        server.close()
    labels = (replace(item, layout=replace(item.layout, remote=remote)) for item in layout.labels)
    return _checked(replace(layout, remote=remote, labels=tuple(labels)))


def _check_head(name: str, head: bytes, *, served: bool = False) -> None:
    """Refuse a file that does not start with a TIFF header."""
    if not head:
        raise NotASlideError(f"'{name}' is empty; get a fresh copy of it.")
    if not head.startswith(TIFF_MAGIC):
        found = foreign.refusal(name, head)
        if found is not None:
            raise found
        advice = "choose a slide file"
        if served:
            advice = "download it, because servers are supported only for TIFF, DICOM and OME-Zarr"
        raise NotASlideError(
            f"'{name}' is not a TIFF or DICOM slide, according to its first bytes; {advice}."
        )


def _describe_tiff(
    source: SlideFile,
    stream: str | IO[bytes],
    plane: Plane,
    omexml: str | None = None,
    *,
    is_ndpi: bool = False,
) -> SlideLayout:
    name, is_whole = source.path, True
    with _as_slide_errors(name, "The TIFF structure of "):
        try:
            # Without `is_ndpi`, tifffile decides by the file name. It may also overflow NumPy
            # integers when it subtracts offsets of a damaged file.
            with (
                np.errstate(all="ignore"),
                tifffile.TiffFile(
                    stream, name=file_name(name), omexml=omexml, is_ndpi=is_ndpi
                ) as file,
            ):
                is_whole = claims.check(file, name)
                if not len(file.pages):
                    raise CorruptSlideError(
                        f"'{name}' is truncated: its list of images starts beyond the end of the "
                        "file; get a fresh copy of it."
                    )
                vendor = next(item.module for item in TIFF_FORMATS if item.module.probe(file))
                parse: Callable[..., SlideLayout] = vendor.parse
                layout = parse(file, source, **plane)
                cut_off = truncation.problem(layout) or (None if is_whole else IMAGES_TRUNCATED)
                if cut_off is None:
                    return layout
                return replace(layout, problems=(cut_off, *layout.problems))
        except (SlideError, OSError, MemoryError):
            raise
        except Exception as error:
            if is_whole:
                raise
            raise CorruptSlideError(
                f"'{name}' is truncated: its list of images continues beyond its end; "
                "get a fresh copy of the file."
            ) from error


@contextmanager
def _as_slide_errors(name: str, structure: str = "") -> Iterator[None]:
    """Convert any error of a parser to a `SlideError` that names the file.

    On damaged structures, parsers raise whatever exception the damaged value causes: struct.error,
    IndexError, AssertionError and others.
    """
    try:
        yield
    except SlideError:
        raise
    except OSError as error:
        raise file_error(name, error) from error
    except MemoryError:
        raise UnsupportedSlideError(
            f"'{name}' claims more data than fits in memory; get a fresh copy of the file."
        ) from None
    except Exception as error:
        raise CorruptSlideError(
            f"{structure}'{name}' is damaged ({_brief(error)}); get a fresh copy of the file."
        ) from error


def _brief(error: Exception) -> str:
    """Return an error's message up to its first quotation, which may name a patient."""
    own = QUOTATION.split(parser_reason(error), maxsplit=1)[0].rstrip(" :=(")
    return own or "its structure is invalid"
