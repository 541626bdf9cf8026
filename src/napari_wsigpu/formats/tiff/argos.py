"""Argos AVS: one pyramid for each focal plane, followed by the thumbnail and the macro image."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from napari_wsigpu.formats import markup
from napari_wsigpu.formats.fields import positive_number
from napari_wsigpu.formats.tiff import tiff
from napari_wsigpu.model.layout import Planes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tifffile import TiffFile, TiffPage

    from napari_wsigpu.formats.fields import Metadata
    from napari_wsigpu.model.layout import SlideFile, SlideLayout

METADATA, ROOT = 65000, "Argos.Scan.Metadata"
NAMES_FROM_THE_END = {2: "thumbnail", 1: "macro"}


def probe(file: TiffFile) -> bool:
    """Whether Argos' software wrote the file, judging by the XML in its private tag."""
    first = file.pages.first
    return first.is_tiled and ROOT in str(first.tags.valueof(METADATA))


def parse(
    file: TiffFile, source: SlideFile, at: Mapping[str, int] = tiff.DEFAULT_PLANE
) -> SlideLayout:
    """Describe an Argos slide at the focal plane `at` "z"; the central one by default."""
    pages = tiff.pages(file)
    first = pages[0]
    root = markup.parse(str(first.tags.valueof(METADATA)))
    parsed = {} if root is None else markup.nested(root)
    fields: Metadata = parsed if isinstance(parsed, dict) else {}
    problems = [] if fields else ["The XML of the slide can't be read."]

    stacks: list[list[TiffPage]] = []
    named: list[tuple[str | None, TiffPage]] = []
    for index, page in enumerate(pages):
        if page.is_tiled:
            # A page as wide as the one before it, or wider, starts the next focal plane.
            if not stacks or page.imagewidth >= stacks[-1][-1].imagewidth:
                stacks.append([])
            stacks[-1].append(page)
        else:
            named.append((NAMES_FROM_THE_END.get(len(pages) - index), page))
    z = at.get("z", (len(stacks) - 1) // 2)
    shown = stacks[z]
    layout = tiff.slide_layout(
        source,
        "argos",
        [tiff.page_level(page, source.path) for page in shown],
        shown[0],
        fields,
        associated=tiff.associated_images(named, source.path, problems),
        problems=problems,
    )
    barcode = fields.get("Barcode")
    return replace(
        layout,
        objective=positive_number(fields.get("ObjectiveMagnification")),
        other_planes=len(stacks) - 1,
        planes=Planes(z, size_z=len(stacks)),
        barcode=barcode if isinstance(barcode, str) and barcode else None,
    )
