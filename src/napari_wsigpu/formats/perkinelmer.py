"""PerkinElmer (Akoya) QPTIFF: each page's XML says whether it is a channel, level or picture."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from napari_wsigpu.formats import markup, tiff
from napari_wsigpu.formats.fields import positive_number
from napari_wsigpu.formats.layout import AssociatedLayout, Channel, SlideLayout

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

    from tifffile import TiffFile, TiffPage

ROOT = "PerkinElmer-QPI-ImageDescription"
ASSOCIATED = {"Thumbnail": "thumbnail", "Overview": "macro", "Macro": "macro", "Label": "label"}
LEVELS = ("FullResolution", "ReducedResolution")
DATES = ("AcquisitionDateTime", "DateTime", "Date")


def probe(file: TiffFile) -> bool:
    """Whether PerkinElmer's or Akoya's software wrote the file, by its first page."""
    first = file.pages.first
    return first.software.startswith("PerkinElmer-QPI") or f"<{ROOT}" in first.description[:500]


def parse(file: TiffFile, path: str, file_size: int, modified_ns: int) -> SlideLayout:
    """Describe a QPTIFF slide.

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
    described = [markup.parse(page.description) for page in pages]
    kinds = [_kind(page, root, pages[0]) for page, root in zip(pages, described, strict=True)]
    problems: list[str] = []
    if described[0] is None:
        problems.append("The XML in the first page can't be read, so that channels have no names.")
    sizes: dict[tuple[int, int], list[int]] = {}
    associated: dict[str, AssociatedLayout] = {}
    for index, (page, kind) in enumerate(zip(pages, kinds, strict=True)):
        if kind in LEVELS:
            sizes.setdefault((page.imagewidth, page.imagelength), []).append(index)
        elif name := ASSOCIATED.get(kind, ""):
            tiff.add_associated(associated, name, page, path, problems)
    (full, *reduced) = sorted(sizes.items(), reverse=True)
    channels_of = full[1]
    levels = [tiff.channels_level([pages[index] for index in channels_of], path)]
    for (width, height), indices in reduced:
        if len(indices) == len(channels_of):
            levels.append(tiff.channels_level([pages[index] for index in indices], path))
        else:
            problems.append(
                f"The level of {width} x {height} pixels is left out: it has {len(indices)} "
                f"channels instead of {len(channels_of)}."
            )
    base = levels[0]
    tiff.check_alike(levels, path)
    tiff.check_tiles_present(levels, path, file_size)
    first, root = pages[channels_of[0]], described[channels_of[0]]
    rgb = tiff.is_rgb(base)
    roots = [described[index] for index in channels_of]
    tags = tiff.tiff_metadata(first)
    tags.pop("ImageDescription", None)
    return SlideLayout(
        path=path,
        file_size=file_size,
        modified_ns=modified_ns,
        vendor="perkinelmer",
        levels=tuple(levels),
        associated=tuple(associated.values()),
        rgb=rgb,
        channels=() if rgb else tiff.channel_names(base.channels, _channels(roots)),
        background=tiff.background(base),
        mpp=tiff.resolution_mpp(first),
        objective=_objective(root),
        metadata={"perkinelmer": _metadata(roots), "tiff": tags},
        scanner=markup.text(root, "InstrumentType"),
        scan_date=next((date for key in DATES if (date := markup.text(root, key))), None)
        or tags.get("DateTime"),
        barcode=markup.text(root, "Barcode"),
        icc=tiff.icc_place(first),
        problems=tuple(problems),
    )


def _kind(page: TiffPage, root: Element | None, first: TiffPage) -> str:
    """Return the ImageType of a page, or what a page without one must be by its place."""
    if page.shape == first.shape and page.is_tiled == first.is_tiled:
        return "FullResolution"
    said = markup.text(root, "ImageType")
    if said is not None:
        return said
    return "ReducedResolution" if page.is_tiled else "Thumbnail"


def _channels(roots: list[Element | None]) -> tuple[Channel, ...]:
    return tuple(
        Channel(markup.text(root, "Name") or f"channel {index}", _color(markup.text(root, "Color")))
        for index, root in enumerate(roots)
    )


def _color(text: str | None) -> str | None:
    """Turn "r,g,b" into "#rrggbb"; black is no display colour."""
    parts = re.findall(r"\d{1,3}", text or "")
    if len(parts) != 3 or max(rgb := [int(part) for part in parts]) > 255 or not any(rgb):
        return None
    return "#{:02x}{:02x}{:02x}".format(*rgb)


def _objective(root: Element | None) -> float | None:
    """Read an objective like "20x"."""
    found = re.match(r"\s*(\d{1,4}(?:[.,]\d+)?)\s*[xX]?", markup.text(root, "Objective") or "")
    return positive_number(found[1]) if found else None


def _metadata(roots: list[Element | None]) -> dict[str, Any]:
    """Return what the first channel's XML says, and what of it differs between channels."""
    parts = [markup.nested(root) for root in roots if root is not None]
    fields = [part for part in parts if isinstance(part, dict)]
    if not fields:
        return {}
    differing = {
        key
        for part in fields[1:]
        for key in {*part, *fields[0]}
        if part.get(key) != fields[0].get(key)
    }
    found = {key: value for key, value in fields[0].items() if key not in differing}
    if differing:
        found["Channels"] = [
            {key: value for key, value in part.items() if key in differing} for part in fields
        ]
    return found
