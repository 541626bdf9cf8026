"""Trestle TIFF: every page is a level; tiles that overlap are not placed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.errors import UnsupportedSlideError
from napari_wsigpu.formats import tiff
from napari_wsigpu.formats.aperio import positive_number
from napari_wsigpu.formats.layout import SlideLayout

if TYPE_CHECKING:
    from tifffile import TiffFile, TiffPage

SOFTWARE, OVERLAPS = "MedScan", "OverlapsXY"


def probe(file: TiffFile) -> bool:
    """Whether Trestle's software wrote the file, by its name."""
    first = file.pages.first
    return first.is_tiled and first.software.startswith(SOFTWARE) and bool(first.description)


def parse(file: TiffFile, path: str, file_size: int, modified_ns: int) -> SlideLayout:
    """Describe a Trestle slide.

    Parameters
    ----------
    file : TiffFile
        The open file.
    path : str
        Its absolute path.
    file_size, modified_ns : int
        Its size in bytes and its modification time.

    Raises
    ------
    CorruptSlideError, UnsupportedSlideError
        If the structure is damaged, or can't be shown as a slide.
    """
    pages: list[TiffPage] = [page.aspage() for page in file.pages]
    first = pages[0]
    pairs = [part.split("=", 1) for part in first.description.split(";") if "=" in part]
    fields = {key.strip(): value.strip() for key, value in pairs}
    if re.search("[1-9]", fields.get(OVERLAPS, "")):
        raise UnsupportedSlideError(
            f"'{path}' is a Trestle slide, whose overlapping tiles can't be placed; convert it to "
            "a pyramidal TIFF with vips (vips tiffsave --tile --pyramid) or QuPath."
        )
    levels = [tiff.page_level(page, path) for page in pages if page.is_tiled]
    base = levels[0]
    tiff.check_alike(levels, path)
    tiff.check_tiles_present(levels, path, file_size)
    rgb = tiff.is_rgb(first) and base.channels in (3, 4)
    tags = tiff.tiff_metadata(first)
    x, y = (positive_number(tags.get(f"{axis}Resolution")) for axis in "XY")
    return SlideLayout(
        path=path,
        file_size=file_size,
        modified_ns=modified_ns,
        vendor="trestle",
        levels=tuple(levels),
        rgb=rgb,
        channels=() if rgb else tiff.unnamed_channels(base.channels),
        background=np.iinfo(base.dtype).max if rgb and base.dtype.kind == "u" else 0,
        # Trestle's resolution tags hold micrometres, whatever their unit says.
        mpp=(x, y) if x is not None and y is not None else None,
        objective=positive_number(fields.get("Objective Power")),
        metadata={"trestle": fields, "tiff": tags},
        scanner=tiff.make_and_model(tags),
        scan_date=tags.get("DateTime"),
        icc=tiff.icc_place(first),
    )
