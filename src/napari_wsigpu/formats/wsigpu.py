"""TIFF files that this package writes.

Tiled pages are levels, finest first, as generic readers expect; other pages are associated images.
The ImageDescription of the first page is a JSON record of everything that has no TIFF tag:

``wsigpu``
    Version of the record, 1.
``vendor``, ``scanner``, ``scan_date``, ``barcode``
    As in `Slide.metadata` of the source. Absent or null if unknown, or private and not exported.
``objective``, ``mpp``
    Magnification and micrometers per pixel of level 0 of this file; absent or null if unknown.
``region``
    Position of an exported region in its source: x, y, width and height in pixels of the source's
    level 0. Absent if the whole slide was converted.
``background``
    Value of pixels that the file does not hold.
``channels``
    Name and color of each channel of a slide that is not RGB.
``downsamples``
    Number of level 0 pixels that one pixel of each level spans.
``metadata``
    The source's metadata under its vendor's name.

The record of an associated image is ``{"wsigpu": 1, "associated": name}``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeGuard

from napari_wsigpu.formats.fields import LONGEST_TEXT, Metadata, positive_number
from napari_wsigpu.formats.tiff import tiff
from napari_wsigpu.model.layout import Channel, LevelLayout, SlideFile, SlideLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tifffile import TiffFile

VERSION = 1
RECORD_NAMESPACE = "napari-wsigpu"  # of the record in OME-XML
# Only these names are accepted: a record may have been edited.
ASSOCIATED = frozenset({"label", "macro", "thumbnail"})
START = '{"wsigpu":'
LONGEST_RECORD = 16 << 20
DEEPEST = 64
LARGEST_COORDINATE = 1 << 32


def probe(file: TiffFile) -> bool:
    """Whether this package wrote the file, judging by the start of its first description."""
    first = file.pages.first
    return first.description.startswith(START) and first.is_tiled


def parse(file: TiffFile, source: SlideFile) -> SlideLayout:
    """Describe a converted slide."""
    pages = tiff.pages(file)
    first = pages[0]
    record = read_record(first.description)
    others = (page for page in pages if not page.is_tiled)
    stated = ((_text(read_record(page.description), "associated"), page) for page in others)
    named = ((name, page) for name, page in stated if name in ASSOCIATED)
    problems: list[str] = []
    associated = tiff.associated_images(named, source.path, problems)
    if not record:
        problems.append("The slide's record can't be read, so only its pixels are known.")
    layout = tiff.slide_layout(
        source,
        "wsigpu",
        [tiff.page_level(page, source.path) for page in pages if page.is_tiled],
        first,
        with_description=False,
        associated=associated,
        problems=problems,
    )
    return with_record(replace(layout, background=first.nodata, scanner=None), record)


def read_record(text: str) -> Metadata:
    """Parse a record; return an empty one if it is damaged or too large."""
    if len(text) > LONGEST_RECORD or _depth(text) > DEEPEST:
        return {}
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def origin(record: Mapping[str, object]) -> Metadata:
    """Return the vendor of the source slide and, if only a region was exported, that region."""
    region = record.get("region")
    exported = {"region": region} if _is_region(region) else {}
    return {"vendor": _text(record, "vendor"), **exported}


def region_of(metadata: Mapping[str, Any]) -> tuple[int, int, int, int] | None:
    """Return the position of an exported region in its source slide, from the slide's metadata.

    Returns
    -------
    tuple of int or None
        (x, y, width, height) in pixels of the source's level 0; None for a whole slide.
    """
    region = metadata.get("wsigpu", {}).get("region")
    return region and tuple(region)


def first_pixel(
    region: Sequence[int], size: tuple[int, int], mpp: tuple[float, float] | None
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the size of a region's pixels, and the center of its first pixel.

    Parameters
    ----------
    region : sequence of int
        (x, y, width, height) in pixels of the source slide's level 0.
    size : tuple of int
        (width, height) of the exported image.
    mpp : tuple of float or None
        Micrometers per pixel of the exported image, (x, y).

    Returns
    -------
    scale, first : tuple of float
        (x, y) in micrometers, or in pixels of the source if `mpp` is None. `first` is measured
        from the center of the source's first pixel.
    """
    steps = [whole / part for whole, part in zip(region[2:], size, strict=True)]
    scale = mpp or (steps[0], steps[1])
    x, y = (
        (at + (step - 1) / 2) * length / step
        for at, step, length in zip(region[:2], steps, scale, strict=True)
    )
    return scale, (x, y)


def with_record(layout: SlideLayout, record: Mapping[str, object]) -> SlideLayout:
    """Add the values of a record to a layout, except values of the wrong type or range."""
    mpp = _numbers(record.get("mpp"))
    scales = _numbers(record.get("downsamples"))
    levels = layout.levels
    if len(scales) == len(levels):
        levels = tuple(
            replace(level, reduction=scale) for level, scale in zip(levels, scales, strict=True)
        )
    background = record.get("background")
    sections = record.get("metadata")
    kept = dict(sections) if isinstance(sections, Mapping) else {}
    kept.pop("wsigpu", None)
    count = layout.levels[0].channels
    channels = _channels(record.get("channels"))
    return replace(
        layout,
        levels=levels,
        background=background if _fits(background, levels[0]) else layout.background,
        mpp=(mpp[0], mpp[1]) if len(mpp) == 2 else layout.mpp,
        objective=positive_number(record.get("objective")),
        scanner=_text(record, "scanner") or layout.scanner,
        scan_date=_text(record, "scan_date"),
        barcode=_text(record, "barcode"),
        channels=layout.channels if layout.rgb else tiff.channel_names(count, channels),
        metadata={
            "wsigpu": origin(record),
            **{key: value for key, value in kept.items() if isinstance(value, Mapping)},
            **layout.metadata,
        },
    )


def _numbers(values: object) -> list[float]:
    """Return a list of positive numbers; an empty one if any value is not such a number."""
    found = [positive_number(value) for value in values] if isinstance(values, list) else []
    numbers = [value for value in found if value is not None]
    return numbers if len(numbers) == len(found) else []


def _is_region(value: object) -> bool:
    """Whether a value is a list of x, y, width and height."""
    return (
        isinstance(value, list)
        and len(value) == 4
        and all(type(number) is int and 0 <= number < LARGEST_COORDINATE for number in value)
        and min(value[2:]) > 0
    )


def _channels(values: object) -> list[Channel]:
    items = values if isinstance(values, list) else []
    return [
        Channel(name, _color(item.get("color")))
        for item in items
        if isinstance(item, Mapping) and (name := _text(item, "name"))
    ]


def _color(value: object) -> str | None:
    is_color = isinstance(value, str) and re.fullmatch("#[0-9a-fA-F]{6}", value)
    return str(value) if is_color else None


def _text(record: Mapping[str, object], key: str) -> str | None:
    value = record.get(key)
    return value[:LONGEST_TEXT] if isinstance(value, str) and value else None


def _fits(value: object, level: LevelLayout) -> TypeGuard[float]:
    """Whether a value is a number that a pixel of a level can have."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if level.dtype.kind == "f":
        return math.isfinite(value) and abs(value) < 1e30
    bits = 8 * level.dtype.itemsize
    least, most = (0, 1 << bits) if level.dtype.kind == "u" else (-(1 << bits - 1), 1 << bits - 1)
    return math.isfinite(value) and least <= value < most


def _depth(text: str) -> int:
    """Return an upper bound on the depth of JSON text, because the parser is recursive."""
    depth = deepest = 0
    for sign in filter("[]{}".__contains__, text):
        depth += 1 if sign in "[{" else -1
        deepest = max(deepest, depth)
    return deepest
