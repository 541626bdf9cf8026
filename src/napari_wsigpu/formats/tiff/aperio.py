"""Aperio SVS: tiled pages are levels, other pages are associated images."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from napari_wsigpu.formats.fields import pairs, positive_number
from napari_wsigpu.formats.tiff import pixel_size, tiff
from napari_wsigpu.formats.tiff.pixel_size import DESCRIPTION, RESOLUTION_TAGS
from napari_wsigpu.model.layout import Planes
from napari_wsigpu.model.tags import FILETYPE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tifffile import TiffFile, TiffPage

    from napari_wsigpu.model.layout import LevelLayout, SlideFile, SlideLayout

NAMES_BY_SUBFILE_TYPE: dict[int, str] = {
    FILETYPE.REDUCEDIMAGE: "label",
    FILETYPE.MACRO | FILETYPE.REDUCEDIMAGE: "macro",
}
REDUCED_FROM = " -> "
DATES = ("%m/%d/%y", "%m/%d/%Y")
TIME = re.compile(r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d")
ZONE = re.compile(r"(?:GMT|UTC)?([+-]\d{2}):?(\d{2})")
MODEL = re.compile(r"Aperio Leica Biosystems (\S+(?: DX)?)")
# The scanned area within the stripes of the sensor: "46920x33014 [0,100 46000x32914]". The last
# digit of the first number is enough: "\d+" would start again at each digit of a long run.
AREA = re.compile(r"\dx\d{1,9} \[\d{1,9},\d{1,9}[ ,](\d{1,9})x(\d{1,9})\]")
# Magnification times MPP is about 10, or 7 with some cameras.
LEAST_PRODUCT, LARGEST_PRODUCT = 6.5, 15.0


def probe(file: TiffFile) -> bool:
    """Whether Aperio's software wrote the file, judging by its first page's description."""
    first = file.pages.first
    return first.description.startswith("Aperio") and first.is_tiled


def parse(
    file: TiffFile, source: SlideFile, at: Mapping[str, int] = tiff.DEFAULT_PLANE
) -> SlideLayout:
    """Describe an Aperio slide at the focal plane `at` "z"; the first one by default."""
    header, fields = parse_description(file.pages.first.description)
    layout = describe_pages(file, source, "aperio", {"Header": header, **fields}, at)
    mpp = positive_number(fields.get("MPP"))
    return replace(
        layout,
        # Otherwise the resolution tags, which other programs write.
        mpp=layout.mpp if mpp is None else (mpp, mpp),
        objective=positive_number(fields.get("AppMag")),
        scanner=scanner(header, fields),
        scan_date=scan_date(fields),
        barcode=_barcode(fields),
        problems=(*layout.problems, *_contradictions(header, fields, layout)),
    )


def describe_pages(
    file: TiffFile,
    source: SlideFile,
    vendor: str,
    fields: Mapping[str, str],
    at: Mapping[str, int] = tiff.DEFAULT_PLANE,
    *,
    with_description: bool = True,
) -> SlideLayout:
    """Describe a file with Aperio's page layout; see `tiff.slide_layout` for the parameters.

    Pages of the same size are focal planes, in file order, if every size occurs equally often and
    with one sample type.
    """
    path, pages = source.path, tiff.pages(file)
    first = pages[0]
    planes: dict[tuple[int, int], list[TiffPage]] = {}
    named: list[tuple[str | None, TiffPage]] = []
    problems: list[str] = []
    for index, page in enumerate(pages):
        if page.is_tiled:
            planes.setdefault((page.imagewidth, page.imagelength), []).append(page)
        else:
            named.append((_associated_name(page, index), page))
    count = len(planes[first.imagewidth, first.imagelength])
    complete = all(
        len(same) == count and len({(page.dtype, page.samplesperpixel) for page in same}) == 1
        for same in planes.values()
    )
    z = at.get("z", 0)
    # A missing tile of a lower level is averaged from the finer level, as in OpenSlide.
    levels: list[LevelLayout] = []
    for same in planes.values():
        missing: Literal["finer", "background"] = "finer" if levels else "background"
        level = tiff.page_level(same[z], path, missing=missing)
        suspect = vendor == "aperio" and bool(levels)
        levels.append(_without_suspect_tiles(level, levels[-1]) if suspect else level)
    layout = tiff.slide_layout(
        source,
        vendor,
        levels,
        first,
        fields,
        with_description=with_description,
        associated=tiff.associated_images(named, path, problems),
        problems=problems,
    )
    found = Planes(z, size_z=count if complete else 1)
    return replace(layout, other_planes=count - 1, planes=found)


def _without_suspect_tiles(level: LevelLayout, finer: LevelLayout) -> LevelLayout:
    """Mark tiles as missing that the scanner computed from missing tiles of the finer level.

    An error in Aperio's encoder leaves some tiles empty and corrupts the coarser tiles above them.
    """
    rows, columns = (finer.grid.byte_counts == 0).any(axis=0).nonzero()
    if not len(rows):
        return level
    grid = level.grid
    down, across = (
        # Number of finer tiles per tile, with halves rounded up as in OpenSlide.
        max(1, math.floor(fine / coarse + 0.5))
        for fine, coarse in ((finer.grid.rows, grid.rows), (finer.grid.columns, grid.columns))
    )
    byte_counts = grid.byte_counts.copy()
    rows, columns = (
        (rows // down).clip(max=grid.rows - 1),
        (columns // across).clip(max=grid.columns - 1),
    )
    byte_counts[:, rows, columns] = 0
    return replace(level, grid=replace(grid, byte_counts=byte_counts))


def parse_description(description: str) -> tuple[str, dict[str, str]]:
    """Split an ImageDescription into its header and its fields.

    Returns
    -------
    header : str
        The text before the first ``|``.
    fields : dict of str
        Each ``key = value`` pair; the last value of a repeated key.
    """
    header, *parts = description.split("|")
    return header.strip(), pairs(parts)


def scanner(header: str, fields: Mapping[str, str]) -> str | None:
    """Return the scanner's name, such as ``"Aperio GT450 (SN1111)"``; None if it is unknown.

    The model comes from the field ScannerType or from the header, else it is "ScanScope". The
    field ScanScope ID, a serial number or a name that the lab chose, follows in parentheses.
    """
    found = MODEL.match(header)
    model = fields.get("ScannerType") or (found and found[1])
    number = fields.get("ScanScope ID")
    if not (model or number):
        return None
    name = f"Aperio {(model or 'ScanScope').removeprefix('Aperio ')}"
    return f"{name} ({number})" if number else name


def scan_date(fields: Mapping[str, str]) -> str | None:
    """Return the date and time of the scan; None if the file gives no date.

    Returns
    -------
    str or None
        ISO 8601, converted from Aperio's month/day/year, with the time zone if it is given; the
        unchanged text of the fields if the date has another form.
    """
    date, time, zone = (fields.get(key, "") for key in ("Date", "Time", "Time Zone"))
    if not date:
        return None
    day = None
    for form in DATES:
        with suppress(ValueError):
            day = day or datetime.strptime(date, form).date().isoformat()
    hours = ZONE.fullmatch(zone)
    if day is None or (time and not TIME.fullmatch(time)):
        return " ".join(filter(None, (date, time, zone)))
    if not time:
        return day
    return f"{day}T{time}{f'{hours[1]}:{hours[2]}' if hours else ''}"


def _barcode(fields: Mapping[str, str]) -> str | None:
    codes = (value for key, value in fields.items() if "barcode" in key.lower())
    return next(filter(None, codes), None)


def _contradictions(header: str, fields: Mapping[str, str], layout: SlideLayout) -> Iterator[str]:
    """Yield the contradictions within the description, and between it and the tags and pixels."""
    base, by_tags = layout.levels[0], layout.mpp
    mpp, objective = (positive_number(fields.get(key)) for key in ("MPP", "AppMag"))
    if mpp is not None and by_tags is not None:
        yield from pixel_size.contradictions({DESCRIPTION: (mpp, mpp), RESOLUTION_TAGS: by_tags})
    if mpp is None and (by_tags is None or "MPP" in fields):
        wrong = "is missing"
        if "MPP" in fields:
            wrong = f"is not a positive number ({fields['MPP']:.20})"
        effect = "lengths can't be measured" if by_tags is None else "the resolution tags are used"
        yield f"The pixel size (MPP) {wrong}, so {effect}."
    if objective is None and "AppMag" in fields:
        yield f"The magnification (AppMag) is not a positive number ({fields['AppMag']:.20})."
    if mpp and objective and not LEAST_PRODUCT <= mpp * objective <= LARGEST_PRODUCT:
        yield (
            f"The magnification of {objective:g} does not match {mpp:g} µm per pixel; "
            "one of them is wrong."
        )
    area = AREA.search(header)
    if area and (int(area[1]), int(area[2])) != (base.width, base.height):
        yield (
            f"The description gives {area[1]} x {area[2]} pixels, but the slide has "
            f"{base.width} x {base.height}: it was cropped or scaled, or the description is wrong."
        )


def _associated_name(page: TiffPage, index: int) -> str | None:
    """Return the name of an untiled page; None if it has none.

    The second page is the thumbnail if it has no other name, or if its description only states how
    it was reduced ("... -> ...").
    """
    lines = page.description.splitlines()
    words = lines[1].split() if len(lines) > 1 else []
    named = words[0] if words and words[0] in NAMES_BY_SUBFILE_TYPE.values() else None
    name = named or NAMES_BY_SUBFILE_TYPE.get(page.subfiletype)
    if index == 1 and (name is None or (named is None and REDUCED_FROM in page.description)):
        return "thumbnail"
    return name
