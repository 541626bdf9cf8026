"""Path in, `SlideLayout` out: opens the file once and asks each vendor whose it is."""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import struct
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
import tifffile

from napari_wsigpu.formats import foreign
from napari_wsigpu.formats.dicom import dicom, dicom_served
from napari_wsigpu.formats.fields import finite, iso_date
from napari_wsigpu.formats.registry import PATH_FORMATS, TIFF_FORMATS
from napari_wsigpu.formats.tiff import claims, companion, hamamatsu
from napari_wsigpu.formats.tiff.siblings import SIBLING
from napari_wsigpu.formats.vsi import vsi
from napari_wsigpu.formats.zarr import ome_zarr
from napari_wsigpu.model.errors import (
    CorruptSlideError,
    NotASlideError,
    SlideError,
    SlideNotFoundError,
    UnsupportedSlideError,
    file_error,
)
from napari_wsigpu.model.layout import RemoteFile, SlideFile
from napari_wsigpu.model.tags import TIFF_MAGIC
from napari_wsigpu.storage import truncation
from napari_wsigpu.storage.bounded import BoundedReader
from napari_wsigpu.storage.remote.readahead import ReadAheadFile
from napari_wsigpu.storage.remote.served import ServedFile
from napari_wsigpu.storage.remote.source import RemoteSource
from napari_wsigpu.storage.remote.url import file_name, is_url, public_url
from napari_wsigpu.storage.zarr.server import DOCUMENTS, ServerFolder, ZarrServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from napari_wsigpu.model.layout import SlideLayout
    from napari_wsigpu.storage.remote.remote_files import RemoteFilesSource
    from napari_wsigpu.storage.source import ByteSource

    Found = tuple[SlideLayout, RemoteSource | RemoteFilesSource | None]
    Plane = Mapping[str, Mapping[str, int]]

# What is wrong with a file is said by our errors; those who set up logging still get more.
logging.getLogger("tifffile").addHandler(logging.NullHandler())

HEAD = 1 << 16
NO_MORE_IMAGES = (
    "The file is cut off: its list of images leads beyond its end, so that levels, planes or "
    "pictures may be missing; get a fresh copy of it."
)
QUOTED = re.compile(r"'([^']{1,255})'")
WORDS_OF_FILES = re.compile(r"[\n'\"{\[<]")
ZARR = re.compile(r"\.zarr(/|$)")
SMALLEST_MPP, LARGEST_MPP = 1e-4, 1e5


def describe(path: str | os.PathLike[str], at: Mapping[str, int] | None = None) -> SlideLayout:
    """Describe a slide.

    Parameters
    ----------
    path : str or PathLike
        A TIFF file, whatever its name; a file of a DICOM slide, or the folder that holds one;
        the folder of an OME-Zarr image; the URL of one of these; OME-XML beside TIFF files that
        it describes.
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
    layout, source = _found(path, at)
    if source is not None:
        source.close()
    return layout


@contextmanager
def described(
    path: str | os.PathLike[str], at: Mapping[str, int] | None = None
) -> Iterator[tuple[SlideLayout, ByteSource | None]]:
    """Describe a slide for who goes on to read it, which saves connecting to a server again.

    Parameters
    ----------
    path, at
        As `describe` takes them.

    Yields
    ------
    SlideLayout
        As of `describe`.
    ByteSource or None
        What the file was read by, if that is worth keeping. Whoever leaves the context has to
        close it later; an error closes it.

    Raises
    ------
    SlideError
        As `describe` does.
    """
    layout, source = _found(path, at)
    try:
        yield layout, source
    except BaseException:
        if source is not None:
            source.close()
        raise


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


def _found(path: str | os.PathLike[str], at: Mapping[str, int] | None) -> Found:
    try:
        name = os.fsdecode(path)
    except TypeError:
        raise NotASlideError(f"{path!r} is no path; give the name of a slide's file.") from None
    plane: Plane = {} if at is None else {"at": at}
    if is_url(name):
        return _describe_url(name, plane)
    return _checked(_describe(str(Path(name).absolute()), plane)), None


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
    path, head, is_ndpi = Path(name), b"", False
    try:
        status = path.stat()
        is_folder = stat.S_ISDIR(status.st_mode)
        if not (is_folder or stat.S_ISREG(status.st_mode)):
            raise NotASlideError(f"'{name}' is no regular file; choose a slide's file.")
        if not is_folder:
            with path.open("rb", buffering=0) as file:
                head = file.read(HEAD)
                is_ndpi = hamamatsu.begins(file, status.st_size)
        for item in PATH_FORMATS:
            if item.module.probe(path, head):
                with _refusing(name):
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


def _describe_url(url: str, plane: Plane) -> Found:
    name = public_url(url)
    if ZARR.search(name):
        return _describe_zarr(url, plane), None
    try:
        return _describe_file(url, name, plane)
    except (NotASlideError, SlideNotFoundError):
        series = _describe_series(url, plane, is_folder=True)
        if series is not None:
            return series
        if "." in file_name(name):
            raise
        with suppress(NotASlideError):
            return _describe_zarr(url, plane), None
        raise


def _describe_file(url: str, name: str, plane: Plane) -> Found:
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
    return bool(head) and dicom.probe(Path(name), head)


def _describe_series(url: str, plane: Plane, *, is_folder: bool = False) -> Found | None:
    parse: Callable[..., Found | None] = dicom_served.parse_series
    found = parse(url, **plane, is_folder=is_folder)
    return None if found is None else (_checked(found[0]), found[1])


def _describe_source(source: ByteSource, described: SlideFile, plane: Plane) -> SlideLayout:
    name = described.path
    ahead = ReadAheadFile(source, described.size, name)
    file = BoundedReader(ahead)  # as tags are read by a few bytes each
    head = file.read(HEAD)
    if _is_dicom(name, head):
        return dicom_served.parse_alone(ServedFile(source, described), **plane)
    _check_head(name, head, served=True)
    file.seek(0)
    if vsi.begins(head) and vsi.lies_elsewhere(file):
        raise UnsupportedSlideError(
            f"'{name}' is an Olympus slide, whose tiles lie in other files, which are not read "
            "from servers; download it with its folder."
        )
    is_ndpi = hamamatsu.begins(file, described.size)
    file.seek(0)
    try:
        return _describe_tiff(described, file, plane, is_ndpi=is_ndpi)
    finally:
        if ahead.failure is not None:  # the parser may have gone on without what it lacked
            raise ahead.failure from None


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
    return _checked(replace(layout, remote=remote, labels=tuple(labels)))


def _check_head(name: str, head: bytes, *, served: bool = False) -> None:
    """Refuse what does not begin as a TIFF file does."""
    if not head:
        raise NotASlideError(f"'{name}' is empty; get a fresh copy of it.")
    if not head.startswith(TIFF_MAGIC):
        found = foreign.refusal(name, head)
        if found is not None:
            raise found
        advice = "choose a slide's file"
        if served:
            advice = "other formats are not read from servers, but for OME-Zarr: download it"
        raise NotASlideError(
            f"'{name}' is not a TIFF-based slide, nor one in DICOM (it does not begin as these "
            f"do); {advice}."
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
    with _refusing(name, "The TIFF structure of "):
        try:
            # Without `is_ndpi`, tifffile goes by the name; it subtracts numbers of any size.
            with (
                np.errstate(all="ignore"),
                tifffile.TiffFile(
                    stream, name=file_name(name), omexml=omexml, is_ndpi=is_ndpi
                ) as file,
            ):
                is_whole = claims.check(file, name)
                if not len(file.pages):
                    raise CorruptSlideError(
                        f"'{name}' is cut off: its list of images lies beyond the end of the file; "
                        "get a fresh copy of it."
                    )
                vendor = next(item.module for item in TIFF_FORMATS if item.module.probe(file))
                parse: Callable[..., SlideLayout] = vendor.parse
                layout = parse(file, source, **plane)
                cut_off = truncation.problem(layout) or (None if is_whole else NO_MORE_IMAGES)
                if cut_off is None:
                    return layout
                return replace(layout, problems=(cut_off, *layout.problems))
        except (SlideError, OSError, MemoryError):
            raise
        except Exception as error:
            if is_whole:
                raise
            raise CorruptSlideError(
                f"'{name}' is cut off: its list of images leads beyond its end; "
                "get a fresh copy of the file."
            ) from error


@contextmanager
def _refusing(name: str, structure: str = "") -> Iterator[None]:
    """Say of a file in one sentence what a parser trips over.

    Its own checks end here: on damaged structures it raises whatever the damaged value happened to
    break (struct.error, IndexError, AssertionError, ...).
    """
    try:
        yield
    except SlideError:
        raise
    except OSError as error:
        raise file_error(name, error) from error
    except MemoryError:
        raise UnsupportedSlideError(
            f"'{name}' claims more than there is memory for; get a fresh copy of the file."
        ) from None
    except Exception as error:
        raise CorruptSlideError(
            f"{structure}'{name}' is damaged ({_brief(error)}); get a fresh copy of the file."
        ) from error


def _brief(error: Exception) -> str:
    """Return the first words of an error, without what it quotes: that may name a patient."""
    if isinstance(error, struct.error):
        return "a tag ends too early"
    own = WORDS_OF_FILES.split(str(error), maxsplit=1)[0].rstrip(" :=(")
    return own[:120] or type(error).__name__
