"""Path in, `SlideLayout` out: opens the file once and asks each vendor whose it is."""

from __future__ import annotations

import logging
import os
import stat
import struct
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import tifffile

from napari_wsigpu.errors import (
    CorruptSlideError,
    NotASlideError,
    SlideError,
    SlideNotFoundError,
    UnsupportedSlideError,
    file_error,
)
from napari_wsigpu.formats import (
    aperio,
    argos,
    dicom,
    foreign,
    hamamatsu,
    huron,
    leica,
    ome,
    perkinelmer,
    philips,
    tiff,
    trestle,
    ventana,
)
from napari_wsigpu.formats.fields import iso_date

if TYPE_CHECKING:
    from tifffile import TiffFile

    from napari_wsigpu.formats.layout import SlideLayout

# What is wrong with a file is said by our errors; those who set up logging still get more.
logging.getLogger("tifffile").addHandler(logging.NullHandler())


class Vendor(Protocol):
    """A module that describes one vendor's files."""

    def probe(self, file: TiffFile) -> bool:
        """Whether the file is one of them, by its content."""

    def parse(self, file: TiffFile, path: str, file_size: int, modified_ns: int) -> SlideLayout:
        """Describe the slide."""


# What none of them claims is described by `tiff`.
VENDORS: tuple[Vendor, ...] = (
    aperio,
    philips,
    leica,
    trestle,
    ventana,
    argos,
    hamamatsu,
    huron,
    perkinelmer,
    ome,
)
SMALLEST_MPP, LARGEST_MPP = 1e-4, 1e5
TIFF_MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


def describe(path: str | os.PathLike[str]) -> SlideLayout:
    """Describe a slide.

    Parameters
    ----------
    path : str or PathLike
        A TIFF file, whatever its name; a file of a DICOM slide, or the folder that holds one.

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
    layout = _describe(str(Path(path).absolute()))
    # Folders are private, and would hide the whole sentence.
    folder = Path(layout.files[0].path if layout.files else layout.path).parent
    problems = [text.replace(f"'{folder}{os.sep}", "'") for text in layout.problems]
    mpp = layout.mpp
    if mpp is not None and not SMALLEST_MPP <= min(mpp) <= max(mpp) <= LARGEST_MPP:
        problems.append(f"A pixel of {mpp[0]:g} x {mpp[1]:g} µm is not possible; none is given.")
        mpp = None
    date = iso_date(layout.scan_date)
    return replace(layout, mpp=mpp, scan_date=date, problems=tuple(problems))


def _describe(name: str) -> SlideLayout:
    if "\0" in name:
        raise SlideNotFoundError(f"There is no file {name!r}; check the path.")
    try:
        status = Path(name).stat()
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            raise NotASlideError(f"'{name}' is no regular file; choose a slide's file.")
        if dicom.probe(Path(name)):
            return dicom.parse(Path(name))
        with Path(name).open("rb") as file:
            head = file.read(foreign.HEAD)
    except SlideError:
        raise
    except OSError as error:
        raise file_error(name, error) from error
    if not head.startswith(TIFF_MAGIC):
        if refusal := foreign.refusal(name, head):
            raise UnsupportedSlideError(refusal)
        raise NotASlideError(
            f"'{name}' is not a TIFF-based slide, nor one in DICOM (it does not begin as these "
            "do); choose a slide's file."
        )
    return _describe_tiff(name, status)


def _describe_tiff(name: str, status: os.stat_result) -> SlideLayout:
    try:
        with tifffile.TiffFile(name) as file:
            if not len(file.pages):
                raise CorruptSlideError(
                    f"'{name}' is cut off: its list of images lies beyond the end of the file; "
                    "get a fresh copy of it."
                )
            parse = next((vendor.parse for vendor in VENDORS if vendor.probe(file)), tiff.parse)
            return parse(file, name, status.st_size, status.st_mtime_ns)
    except SlideError:
        raise
    except OSError as error:
        raise file_error(name, error) from error
    except (MemoryError, RecursionError):
        raise
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
