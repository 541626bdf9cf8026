"""Huron TIFF: stored as Aperio's slides are, but described in lines of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from napari_wsigpu.formats import aperio, tiff

if TYPE_CHECKING:
    from tifffile import TiffFile

    from napari_wsigpu.formats.layout import SlideLayout

MAKE = 271


def probe(file: TiffFile) -> bool:
    """Whether Huron's software wrote the file, by its first page's make."""
    first = file.pages.first
    return first.is_tiled and str(first.tags.valueof(MAKE)).startswith("Huron")


def parse(file: TiffFile, path: str, file_size: int, modified_ns: int) -> SlideLayout:
    """Describe a Huron slide.

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
    layout = aperio.stored(file, path, file_size, modified_ns)
    first = file.pages.first
    pairs = [line.split("=", 1) for line in first.description.split("\n") if "=" in line]
    tags = tiff.tiff_metadata(first)
    tags.pop("ImageDescription", None)
    return replace(
        layout,
        vendor="huron",
        mpp=tiff.resolution_mpp(first),
        metadata={
            "huron": {key.strip(): value.strip() for key, value in pairs},
            "tiff": tags,
        },
        scanner=tiff.make_and_model(tags),
        scan_date=tags.get("DateTime"),
    )
