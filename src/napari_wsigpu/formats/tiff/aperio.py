"""Aperio SVS: tiled pages are levels, other pages are associated images."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from napari_wsigpu.formats.fields import pairs, positive_number
from napari_wsigpu.formats.tiff import tiff
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
# The scanned area within the stripes: "46920x33014 [0,100 46000x32914]".
AREA = re.compile(r"\d+x\d+ \[\d+,\d+[ ,](\d{1,9})x(\d{1,9})\]")
# Scanners' objectives and pixel sizes multiply to 10, or to 7 with some cameras.
LEAST_PRODUCT, LARGEST_PRODUCT = 6.5, 15.0


def probe(file: TiffFile) -> bool:
    """Whether Aperio's software wrote the file, by its first page's description."""
    first = file.pages.first
    return first.description.startswith("Aperio") and first.is_tiled


def parse(file: TiffFile, source: SlideFile, at: Mapping[str, int] = tiff.MIDDLE) -> SlideLayout:
    """Describe an Aperio slide: the focal plane `at` "z", else the first one."""
    header, fields = parse_description(file.pages.first.description)
    layout = stored(file, source, "aperio", {"Header": header, **fields}, at)
    mpp = positive_number(fields.get("MPP"))
    return replace(
        layout,
        mpp=None if mpp is None else (mpp, mpp),
        objective=positive_number(fields.get("AppMag")),
        scanner=scanner(header, fields),
        scan_date=scan_date(fields),
        barcode=_barcode(fields),
        problems=(*layout.problems, *_contradictions(header, fields, layout.levels[0])),
    )


def stored(
    file: TiffFile,
    source: SlideFile,
    vendor: str,
    fields: Mapping[str, str],
    at: Mapping[str, int] = tiff.MIDDLE,
    *,
    with_description: bool = True,
) -> SlideLayout:
    """Describe a slide that is stored as Aperio's are; arguments as of `tiff.slide_layout`.

    Pages of one size are focal planes, in the file's order, if each size has equally many, whose
    samples are alike.
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
    alike = all(
        len(same) == count and len({(page.dtype, page.samplesperpixel) for page in same}) == 1
        for same in planes.values()
    )
    z = at.get("z", 0)
    levels: list[LevelLayout] = []
    for same in planes.values():
        missing: Literal["finer", "background"] = "finer" if levels else "background"
        levels.append(tiff.page_level(same[z], path, missing=missing))
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
    found = Planes(z, size_z=count if alike else 1)
    return replace(layout, hidden_planes=count - 1, planes=found)


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
    return header.strip(), pairs(parts)


def scanner(header: str, fields: Mapping[str, str]) -> str | None:
    """Name the scanner, for example ``"Aperio GT450 (SN1111)"``; None where the file doesn't.

    The model is the field ScannerType or in the header, else "ScanScope"; in parentheses
    follows the field ScanScope ID, which is a serial number or the scanner's own name.
    """
    found = MODEL.match(header)
    model = fields.get("ScannerType") or (found and found[1])
    number = fields.get("ScanScope ID")
    if not (model or number):
        return None
    name = f"Aperio {(model or 'ScanScope').removeprefix('Aperio ')}"
    return f"{name} ({number})" if number else name


def scan_date(fields: Mapping[str, str]) -> str | None:
    """Return date and time of the scan; None where the file gives no date.

    Returns
    -------
    str or None
        ISO 8601 from Aperio's month/day/year, with the time zone if it is given; the fields'
        own text where that is no such date.
    """
    date, time, zone = (fields.get(key, "") for key in ("Date", "Time", "Time Zone"))
    if not date:
        return None
    day = _iso_day(date)
    hours = ZONE.fullmatch(zone)
    if day is None or (time and not TIME.fullmatch(time)):
        return " ".join(filter(None, (date, time, zone)))
    if not time:
        return day
    return f"{day}T{time}{f'{hours[1]}:{hours[2]}' if hours else ''}"


def _iso_day(date: str) -> str | None:
    for form in DATES:
        try:
            return datetime.strptime(date, form).date().isoformat()
        except ValueError:
            continue
    return None


def _barcode(fields: Mapping[str, str]) -> str | None:
    codes = (value for key, value in fields.items() if "barcode" in key.lower())
    return next(filter(None, codes), None)


def _contradictions(header: str, fields: Mapping[str, str], base: LevelLayout) -> Iterator[str]:
    """Say where the description contradicts itself or the pixels."""
    mpp, objective = (positive_number(fields.get(key)) for key in ("MPP", "AppMag"))
    if mpp is None:
        wrong = f"is no positive number ({fields['MPP']:.20})" if "MPP" in fields else "is missing"
        yield f"The pixel size (MPP) {wrong}, so lengths can't be measured."
    if objective is None and "AppMag" in fields:
        yield f"The magnification (AppMag) is no positive number ({fields['AppMag']:.20})."
    if mpp and objective and not LEAST_PRODUCT <= mpp * objective <= LARGEST_PRODUCT:
        yield (
            f"The magnification of {objective:g} does not go with {mpp:g} µm per pixel; "
            "one of them is wrong."
        )
    area = AREA.search(header)
    if area and (int(area[1]), int(area[2])) != (base.width, base.height):
        yield (
            f"The description is of {area[1]} x {area[2]} pixels, but the slide has "
            f"{base.width} x {base.height}: it was cut or scaled, or the description is wrong."
        )


def _associated_name(page: TiffPage, index: int) -> str | None:
    """Name a picture; the thumbnail is known by its place, and by saying what it was made of."""
    lines = page.description.splitlines()
    words = lines[1].split() if len(lines) > 1 else []
    named = words[0] if words and words[0] in NAMES_BY_SUBFILE_TYPE.values() else None
    name = named or NAMES_BY_SUBFILE_TYPE.get(page.subfiletype)
    if index == 1 and (name is None or (named is None and REDUCED_FROM in page.description)):
        return "thumbnail"
    return name
