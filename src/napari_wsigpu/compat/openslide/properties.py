"""Metadata of a slide as OpenSlide properties: a flat mapping of strings."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from napari_wsigpu.compat.shared import mpp_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from napari_wsigpu.model.geometry import Rect
    from napari_wsigpu.model.layout import SlideLayout
    from napari_wsigpu.slide.slide import Slide

# OpenSlide computes no quickhash if the smallest level has more bytes.
MOST_HASHED = 5 << 20
HASHED_TAGS = (
    "ImageDescription Make Model Software DateTime Artist HostComputer Copyright DocumentName"
)
# Vendors with the generic TIFF quickhash, and vendors whose files state a background color.
HASHED_VENDORS, COLORED_VENDORS = ("aperio", "generic-tiff"), ("mirax", "trestle")


def openslide_properties(slide: Slide) -> dict[str, str]:
    """Return the properties that OpenSlide reports for a slide.

    Vendor fields keep their names, prefixed with the vendor. Numbers are written in full precision.
    """
    layout = slide.layout
    found = {name: _text(value) for name, value in sorted(_general(slide))}
    for name, value in layout.metadata.items():
        found |= dict(flat(name, value))
    comment = found.get("tiff.ImageDescription")
    if comment is not None:
        found["openslide.comment"] = comment
    quickhash = _quickhash(slide)
    if quickhash is not None:
        found["openslide.quickhash-1"] = quickhash
    return found


def _general(slide: Slide) -> Iterator[tuple[str, object]]:
    layout = slide.layout
    yield "openslide.vendor", layout.vendor
    mpp = mpp_of(layout)
    if mpp is not None:
        yield "openslide.mpp-x", mpp[0]
        yield "openslide.mpp-y", mpp[1]
    if layout.objective is not None:
        yield "openslide.objective-power", layout.objective
    if layout.barcode is not None:
        yield "openslide.barcode", layout.barcode
    profile = slide.icc_profile
    if profile is not None:
        yield "openslide.icc-size", len(profile)
    if layout.vendor in COLORED_VENDORS:
        yield "openslide.background-color", f"{int(layout.background):02X}" * 3
    bounds = bounds_of(layout)
    if bounds is not None:
        for name, number in zip(("y", "x", "height", "width"), bounds, strict=True):
            yield f"openslide.bounds-{name}", number
    yield "openslide.level-count", slide.level_count
    yield from levels_of(layout, "openslide")
    for associated in layout.associated:
        name = f"openslide.associated.{associated.name}"
        yield f"{name}.width", associated.image.width
        yield f"{name}.height", associated.image.height
        profile = slide.associated_images[associated.name].icc_profile
        if profile is not None:
            yield f"{name}.icc-size", len(profile)


def levels_of(layout: SlideLayout, prefix: str) -> Iterator[tuple[str, object]]:
    """Yield the properties of the levels; `prefix` is "openslide" or "tiffslide"."""
    for number, level in enumerate(layout.levels):
        name = f"{prefix}.level[{number}]"
        yield f"{name}.downsample", layout.downsamples[number]
        yield f"{name}.height", level.height
        yield f"{name}.width", level.width
        if not level.parts:
            yield f"{name}.tile-height", level.grid.tile_height
            yield f"{name}.tile-width", level.grid.tile_width


def bounds_of(layout: SlideLayout) -> Rect | None:
    """Return the scanned part of a mosaic, or None for other slides."""
    bounds = [part.bounds for part in layout.levels[0].parts]
    if not bounds:
        return None
    top, left = min(each.top for each in bounds), min(each.left for each in bounds)
    bottom, right = max(each.bottom for each in bounds), max(each.right for each in bounds)
    return bounds[0].between(top, bottom, left, right)


def flat(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield (dotted name, text) of each leaf of a nested metadata field."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flat(f"{name}.{key}", item)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from flat(f"{name}[{number}]", item)
    elif value is not None:
        yield name, _text(value)


def _text(value: object) -> str:
    return f"{value:.17g}" if isinstance(value, float) else str(value)


def _quickhash(slide: Slide) -> str | None:
    """Return OpenSlide's quickhash: SHA-256 of the smallest level's stored bytes and some tags.

    For DICOM it is the hash of the series UID.
    """
    layout = slide.layout
    if layout.vendor == "dicom":
        series = layout.metadata["dicom"].get("SeriesInstanceUID")
        return None if series is None else hashlib.sha256(f"{series}\0".encode()).hexdigest()
    if layout.vendor not in HASHED_VENDORS or layout.remote is not None or len(layout.files) != 1:
        return None
    grid = layout.levels[-1].grid
    counts = grid.byte_counts.ravel()
    if layout.levels[-1].parts or counts.sum() > MOST_HASHED:
        return None
    tags: Mapping[str, object] = layout.metadata.get("tiff", {})
    digest = hashlib.sha256()
    ranges = list(zip(grid.offsets.ravel().tolist(), counts.tolist(), strict=True))
    for data in slide.read_bytes(ranges):
        digest.update(data)
    for name in HASHED_TAGS.split():
        digest.update(f"tiff.{name}\0{tags.get(name, '')}\0".encode())
    return digest.hexdigest()
