"""TIFF files that this package writes.

Tiled pages are levels, finest first, as generic readers expect them; others are associated images.
The ImageDescription of the first page is a record in JSON of what the tags can't say:

``wsigpu``
    Version of the record, 1.
``vendor``, ``scanner``, ``scan_date``, ``barcode``, ``objective``, ``mpp``
    As `Slide.metadata` says them of the source; those of the result's own level 0 for the last
    two. Absent or null where they are unknown, or private and not asked for.
``region``
    Where a part of a slide lies in that: x, y, width and height in pixels of its level 0. Absent
    from whole slides.
``background``
    Value of pixels that the file does not hold.
``channels``
    Name and colour of each channel of a slide that is not RGB.
``downsamples``
    How many pixels of level 0 one pixel of each level spans.
``metadata``
    The source's fields under its vendor's name.

That of an associated image is ``{"wsigpu": 1, "associated": name}``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeGuard

from napari_wsigpu.formats.fields import LONGEST_TEXT, positive_number
from napari_wsigpu.formats.tiff import tiff
from napari_wsigpu.model.layout import Channel, LevelLayout, SlideFile, SlideLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tifffile import TiffFile

VERSION = 1
RECORD_NAMESPACE = "napari-wsigpu"  # of the record in OME-XML
# People may name others as they like, so that these alone are taken.
ASSOCIATED = frozenset({"label", "macro", "thumbnail"})
START = '{"wsigpu":'
LONGEST_RECORD = 16 << 20
DEEPEST = 64
LARGEST_PLACE = 1 << 32


def probe(file: TiffFile) -> bool:
    """Whether this package wrote the file, by how its first description begins."""
    first = file.pages.first
    return first.description.startswith(START) and first.is_tiled


def parse(file: TiffFile, source: SlideFile) -> SlideLayout:
    """Describe a slide that was converted."""
    pages = tiff.pages(file)
    first = pages[0]
    record = read_record(first.description)
    stated = (
        (_text(read_record(page.description), "associated"), page)
        for page in pages
        if not page.is_tiled
    )
    named = ((name, page) for name, page in stated if name in ASSOCIATED)
    problems: list[str] = []
    associated = tiff.associated_images(named, source.path, problems)
    if not record:
        problems.append("The record of the slide can't be read, so that only its pixels are known.")
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


def read_record(text: str) -> dict[str, Any]:
    """Read a record; an empty one if it is damaged or too large."""
    if len(text) > LONGEST_RECORD or _depth(text) > DEEPEST:
        return {}
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def origin(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a record says of the slide that a file was made of."""
    region = record.get("region")
    place = {"region": region} if _is_region(region) else {}
    return {"vendor": _text(record, "vendor"), **place}


def region_of(metadata: Mapping[str, Any]) -> tuple[int, int, int, int] | None:
    """Return where a part of a slide lies in that, by its metadata; None if it is no part.

    Returns
    -------
    tuple of int or None
        (x, y, width, height) in pixels of that slide's level 0.
    """
    region = metadata.get("wsigpu", {}).get("region")
    return region and tuple(region)


def first_pixel(
    region: Sequence[int], size: tuple[int, int], mpp: tuple[float, float] | None
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the size of a region's pixels, and where the centre of the first one lies.

    Parameters
    ----------
    region : sequence of int
        (x, y, width, height) in pixels of the slide that it was cut from.
    size : tuple of int
        (width, height) of what was made of it.
    mpp : tuple of float or None
        Micrometres of a pixel of that, (x, y).

    Returns
    -------
    scale, first : tuple of float
        (x, y) in micrometres, or in pixels of that slide where these are not known; from the centre
        of that slide's first pixel.
    """
    steps = [whole / part for whole, part in zip(region[2:], size, strict=True)]
    scale = mpp or (steps[0], steps[1])
    x, y = (
        (at + (step - 1) / 2) * length / step
        for at, step, length in zip(region[:2], steps, scale, strict=True)
    )
    return scale, (x, y)


def with_record(layout: SlideLayout, record: Mapping[str, Any]) -> SlideLayout:
    """Add what a record says to a slide; each of its values is checked, and left out if wrong."""
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


def _numbers(values: Any) -> list[float]:
    """Return positive numbers; none if any is not."""
    found = [positive_number(value) for value in values] if isinstance(values, list) else []
    numbers = [value for value in found if value is not None]
    return numbers if len(numbers) == len(found) else []


def _is_region(value: Any) -> bool:
    """Whether a value is x, y, width and height."""
    return (
        isinstance(value, list)
        and len(value) == 4
        and all(type(number) is int and 0 <= number < LARGEST_PLACE for number in value)
        and min(value[2:]) > 0
    )


def _channels(values: Any) -> list[Channel]:
    items = values if isinstance(values, list) else []
    return [
        Channel(name, _color(item.get("color")))
        for item in items
        if isinstance(item, Mapping) and (name := _text(item, "name"))
    ]


def _color(value: Any) -> str | None:
    if not isinstance(value, str) or len(value) != 7 or value[0] != "#":
        return None
    return value if all(digit in "0123456789abcdefABCDEF" for digit in value[1:]) else None


def _text(record: Mapping[str, Any], key: str) -> str | None:
    value = record.get(key)
    return value[:LONGEST_TEXT] if isinstance(value, str) and value else None


def _fits(value: Any, level: LevelLayout) -> TypeGuard[float]:
    """Whether a number can be a pixel of a level."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if level.dtype.kind == "f":
        return math.isfinite(value) and abs(value) < 1e30
    bits = 8 * level.dtype.itemsize
    least, most = (0, 1 << bits) if level.dtype.kind == "u" else (-(1 << bits - 1), 1 << bits - 1)
    return math.isfinite(value) and least <= value < most


def _depth(text: str) -> int:
    """Return a bound of how deep JSON is nested, as the parser would run out of stack."""
    depth = deepest = 0
    for sign in filter("[]{}".__contains__, text):
        depth += 1 if sign in "[{" else -1
        deepest = max(deepest, depth)
    return deepest
