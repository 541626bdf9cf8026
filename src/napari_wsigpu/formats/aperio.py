"""Aperio SVS: tiled pages are levels, other pages are associated images."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.errors import SlideError
from napari_wsigpu.formats import tiff
from napari_wsigpu.formats.layout import AssociatedLayout, Channel, LevelLayout, SlideLayout

if TYPE_CHECKING:
    from tifffile import TiffFile, TiffPage

logger = logging.getLogger(__name__)

NAMES_BY_SUBFILE_TYPE = {1: "label", 9: "macro"}


def probe(file: TiffFile) -> bool:
    """Whether Aperio's software wrote the file, by its first page's description."""
    first = file.pages.first
    return first.description.startswith("Aperio") and first.is_tiled


def parse(file: TiffFile, path: str, file_size: int, modified_ns: int) -> SlideLayout:
    """Describe an Aperio slide.

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
    levels: list[LevelLayout] = []
    associated: dict[str, AssociatedLayout] = {}
    sizes: set[tuple[int, int]] = set()
    hidden_planes = 0
    for index, page in enumerate(pages):
        size = (page.imagewidth, page.imagelength)
        if not page.is_tiled:
            name = _associated_name(page, index)
            if name and name not in associated:
                try:
                    image = tiff.page_level(page, path)
                    associated[name] = AssociatedLayout(name, image, icc=tiff.icc_place(page))
                except SlideError as error:
                    logger.warning("The %s image of '%s' is left out: %s", name, path, error)
        elif size in sizes:
            hidden_planes += size == (first.imagewidth, first.imagelength)
        else:
            sizes.add(size)
            levels.append(tiff.page_level(page, path, missing="finer" if levels else "background"))
    tiff.check_tiles_present(levels, path, file_size)

    header, fields = parse_description(first.description)
    mpp = positive_number(fields.get("MPP"))
    rgb = tiff.is_rgb(first) and levels[0].channels in (3, 4)
    dtype = levels[0].dtype
    count = levels[0].channels
    return SlideLayout(
        path=path,
        file_size=file_size,
        modified_ns=modified_ns,
        vendor="aperio",
        levels=tuple(levels),
        associated=tuple(associated.values()),
        rgb=rgb,
        channels=() if rgb else tuple(Channel(f"channel {i}") for i in range(count)),
        background=np.iinfo(dtype).max if rgb and dtype.kind == "u" else 0,
        mpp=None if mpp is None else (mpp, mpp),
        objective=positive_number(fields.get("AppMag")),
        metadata={"aperio": {"Header": header, **fields}, "tiff": tiff.tiff_metadata(first)},
        hidden_planes=hidden_planes,
        icc=tiff.icc_place(first),
    )


def parse_description(description: str) -> tuple[str, dict[str, str]]:
    """Split an ImageDescription into its header and its fields.

    Returns
    -------
    header : str
        All that stands before the first ``|``.
    fields : dict of str
        Each ``key = value``; of a key given twice the last value counts.
    """
    header, *parts = description.split("|")
    pairs = (part.split("=", 1) for part in parts if "=" in part)
    return header.strip(), {key.strip(): value.strip() for key, value in pairs}


def positive_number(text: Any) -> float | None:
    """Read a number with a decimal point or comma; None unless finite and above 0."""
    try:
        number = float(str(text).replace(",", "."))
    except ValueError:
        return None
    return number if math.isfinite(number) and number > 0 else None


def _associated_name(page: TiffPage, index: int) -> str | None:
    if index == 1:
        return "thumbnail"
    lines = page.description.splitlines()
    words = lines[1].split() if len(lines) > 1 else []
    if words and words[0] in NAMES_BY_SUBFILE_TYPE.values():
        return words[0]
    return NAMES_BY_SUBFILE_TYPE.get(page.subfiletype)
