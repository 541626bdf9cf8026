"""PerkinElmer (Akoya) QPTIFF: each page's XML identifies its level or associated image."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from napari_wsigpu.formats import markup
from napari_wsigpu.formats.fields import positive_number
from napari_wsigpu.formats.tiff import tiff
from napari_wsigpu.model.layout import Channel, SlideFile, SlideLayout

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

    from tifffile import TiffFile, TiffPage

    from napari_wsigpu.formats.fields import Metadata

ROOT = "PerkinElmer-QPI-ImageDescription"
ASSOCIATED = {"Thumbnail": "thumbnail", "Overview": "macro", "Macro": "macro", "Label": "label"}
LEVELS = ("FullResolution", "ReducedResolution")
DATES = ("AcquisitionDateTime", "DateTime", "Date")


def probe(file: TiffFile) -> bool:
    """Whether PerkinElmer or Akoya software wrote the file, judging by its first page's tags."""
    first = file.pages.first
    return first.software.startswith("PerkinElmer-QPI") or f"<{ROOT}" in first.description[:500]


def parse(file: TiffFile, source: SlideFile) -> SlideLayout:
    """Describe a QPTIFF slide."""
    path, pages = source.path, tiff.pages(file)
    descriptions = [markup.parse(page.description) for page in pages]
    kinds = [_kind(page, root, pages[0]) for page, root in zip(pages, descriptions, strict=True)]
    problems: list[str] = []
    if descriptions[0] is None:
        problems.append("The XML of the first page can't be read, so channels have no names.")
    sizes: dict[tuple[int, int], list[int]] = {}
    for index, (page, kind) in enumerate(zip(pages, kinds, strict=True)):
        if kind in LEVELS:
            sizes.setdefault((page.imagewidth, page.imagelength), []).append(index)
    named = zip(map(ASSOCIATED.get, kinds), pages, strict=True)
    associated = tiff.associated_images(named, path, problems)
    (full, *reduced) = sorted(sizes.items(), reverse=True)
    channel_pages = full[1]
    levels = [tiff.channels_level([pages[index] for index in channel_pages], path)]
    for (width, height), indices in reduced:
        if len(indices) == len(channel_pages):
            levels.append(tiff.channels_level([pages[index] for index in indices], path))
        else:
            problems.append(
                f"The level of {width} x {height} pixels is left out: it has {len(indices)} "
                f"channels instead of {len(channel_pages)}."
            )
    roots = [descriptions[index] for index in channel_pages]
    layout = tiff.slide_layout(
        source,
        "perkinelmer",
        levels,
        pages[channel_pages[0]],
        _metadata(roots),
        with_description=False,
        channels=_channels(roots),
        associated=associated,
        problems=problems,
    )
    root = roots[0]
    return replace(
        layout,
        objective=_objective(root),
        scanner=markup.text(root, "InstrumentType"),
        scan_date=next((date for key in DATES if (date := markup.text(root, key))), None)
        or layout.scan_date,
        barcode=markup.text(root, "Barcode"),
    )


def _kind(page: TiffPage, root: Element | None, first: TiffPage) -> str:
    """Return the ImageType of a page; if it has none, derive it from the page's storage."""
    if page.shape == first.shape and page.is_tiled == first.is_tiled:
        return "FullResolution"
    stated = markup.text(root, "ImageType")
    if stated is not None:
        return stated
    return "ReducedResolution" if page.is_tiled else "Thumbnail"


def _channels(roots: list[Element | None]) -> tuple[Channel, ...]:
    """Name channels by their biomarker, else by the dye or filter."""
    names = (markup.text(root, "Biomarker") or markup.text(root, "Name") for root in roots)
    return tuple(
        Channel(name or f"channel {index}", _color(markup.text(root, "Color")))
        for index, (name, root) in enumerate(zip(names, roots, strict=True))
    )


def _color(text: str | None) -> str | None:
    """Convert "r,g,b" to "#rrggbb"; None for black, which shows nothing."""
    parts = re.findall(r"\d{1,3}", text or "")
    if len(parts) != 3 or max(rgb := [int(part) for part in parts]) > 255 or not any(rgb):
        return None
    return "#{:02x}{:02x}{:02x}".format(*rgb)


def _objective(root: Element | None) -> float | None:
    """Read an objective like "20x"."""
    found = re.match(r"\s*(\d{1,4}(?:[.,]\d+)?)\s*[xX]?", markup.text(root, "Objective") or "")
    return positive_number(found[1]) if found else None


def _metadata(roots: list[Element | None]) -> Metadata:
    """Return the fields that all channels share, and differing fields under "Channels"."""
    parts = [markup.nested(root) for root in roots if root is not None]
    fields = [part for part in parts if isinstance(part, dict)]
    if not fields:
        return {}
    keys = {key for part in fields for key in part}
    differing = {key for key in keys if any(f.get(key) != fields[0].get(key) for f in fields)}
    found = {key: value for key, value in fields[0].items() if key not in differing}
    if differing:
        found["Channels"] = [
            {key: value for key, value in part.items() if key in differing} for part in fields
        ]
    return found
