"""Argos AVS: one pyramid for each focal plane, then thumbnail and macro image."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from napari_wsigpu.formats import markup, tiff
from napari_wsigpu.formats.fields import positive_number
from napari_wsigpu.formats.layout import AssociatedLayout, SlideLayout

if TYPE_CHECKING:
    from tifffile import TiffFile, TiffPage

METADATA, ROOT = 65000, "Argos.Scan.Metadata"
NAMES_FROM_THE_END = {2: "thumbnail", 1: "macro"}


def probe(file: TiffFile) -> bool:
    """Whether Argos' software wrote the file, by its XML."""
    first = file.pages.first
    return first.is_tiled and ROOT in str(first.tags.valueof(METADATA))


def parse(file: TiffFile, path: str, file_size: int, modified_ns: int) -> SlideLayout:
    """Describe an Argos slide, by its central focal plane.

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
    root = markup.parse(str(first.tags.valueof(METADATA)))
    said = {} if root is None else markup.nested(root)
    fields: dict[str, Any] = said if isinstance(said, dict) else {}
    problems = [] if fields else ["The XML of the slide can't be read."]

    stacks: list[list[TiffPage]] = []
    associated: dict[str, AssociatedLayout] = {}
    for index, page in enumerate(pages):
        if page.is_tiled:
            if not stacks or page.imagewidth >= stacks[-1][-1].imagewidth:
                stacks.append([])
            stacks[-1].append(page)
        elif name := NAMES_FROM_THE_END.get(len(pages) - index):
            tiff.add_associated(associated, name, page, path, problems)
    shown = stacks[(len(stacks) - 1) // 2]
    levels = [tiff.page_level(page, path) for page in shown]
    base = levels[0]
    tiff.check_alike(levels, path)
    tiff.check_tiles_present(levels, path, file_size)
    rgb = tiff.is_rgb(base)
    tags = tiff.tiff_metadata(shown[0])
    barcode = fields.get("Barcode")
    return SlideLayout(
        path=path,
        file_size=file_size,
        modified_ns=modified_ns,
        vendor="argos",
        levels=tuple(levels),
        associated=tuple(associated.values()),
        rgb=rgb,
        channels=() if rgb else tiff.channel_names(base.channels),
        background=tiff.background(base),
        mpp=tiff.resolution_mpp(shown[0]),
        objective=positive_number(fields.get("ObjectiveMagnification")),
        metadata={"argos": fields, "tiff": tags},
        hidden_planes=len(stacks) - 1,
        scanner=tiff.make_and_model(tags),
        scan_date=tags.get("DateTime"),
        barcode=barcode if isinstance(barcode, str) and barcode else None,
        icc=tiff.icc_place(shown[0]),
        problems=tuple(problems),
    )
