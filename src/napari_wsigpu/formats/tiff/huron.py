"""Huron TIFF: Aperio's page layout, with a description of one ``key = value`` per line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from napari_wsigpu.formats.fields import pairs
from napari_wsigpu.formats.tiff import aperio, tiff
from napari_wsigpu.model.tags import Tag

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tifffile import TiffFile

    from napari_wsigpu.model.layout import SlideFile, SlideLayout


def probe(file: TiffFile) -> bool:
    """Whether Huron's software wrote the file, judging by the Make tag of its first page."""
    first = file.pages.first
    return first.is_tiled and str(first.tags.valueof(Tag.MAKE)).startswith("Huron")


def parse(
    file: TiffFile, source: SlideFile, at: Mapping[str, int] = tiff.DEFAULT_PLANE
) -> SlideLayout:
    """Describe a Huron slide; see `aperio.describe_pages`."""
    fields = pairs(file.pages.first.description.split("\n"))
    return aperio.describe_pages(file, source, "huron", fields, at, with_description=False)
