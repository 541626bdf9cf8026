"""Philips TIFF: tiled pages are padded levels, whose true sizes follow from the XML."""

from __future__ import annotations

import binascii
import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from napari_wsigpu.formats.fields import positive_number
from napari_wsigpu.formats.pictures import jpeg_picture
from napari_wsigpu.formats.tiff import philips_xml, tiff
from napari_wsigpu.model.layout import AssociatedLayout, LevelLayout, SlideFile, SlideLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tifffile import TiffFile, TiffPage

    from napari_wsigpu.formats.fields import Metadata

ROOT = re.compile(r"<DataObject\s[^>]*\bObjectType\s*=\s*[\"']DPUfsImport[\"']")
ROOT_WITHIN = 4096
SCANNED_IMAGES = "PIM_DP_SCANNED_IMAGES"
NAMES_BY_TYPE = {"LABELIMAGE": "label", "MACROIMAGE": "macro"}
NAMES_BY_DESCRIPTION = {"Label": "label", "Macro": "macro"}
JPEG_HEAD = 1 << 20  # bytes of a JPEG in which its frame header must lie
HIGHEST_OBJECTIVE = 200
ICC_SIGNATURE_AT = 36


def probe(file: TiffFile) -> bool:
    """Whether Philips' software wrote the file, judging by its Software tag and its XML's root.

    The full name "Philips DP" is enough without that root, so that a slide with broken XML is
    recognized too.
    """
    first = file.pages.first
    if not (first.is_tiled and first.software.startswith("Philips")):
        return False
    has_root = ROOT.search(first.description[:ROOT_WITHIN]) is not None
    return has_root or first.software.startswith("Philips DP")


def parse(file: TiffFile, source: SlideFile) -> SlideLayout:
    """Describe a Philips slide."""
    path, pages = source.path, tiff.pages(file)
    first = pages[0]
    problems: list[str] = []
    description = _description(first.description, path, problems)
    slide = description.attributes
    levels = _levels([page for page in pages if page.is_tiled], slide, path, problems)
    others = (page for page in pages if not page.is_tiled)
    named = ((NAMES_BY_DESCRIPTION.get(page.description[:5]), page) for page in others)
    associated = tiff.associated_images(named, path, problems)
    associated += _pictures_of_xml(description.pictures, associated, path, problems)

    spacing = philips_xml.spacing(slide.get(philips_xml.SPACING))
    mpp = None if spacing is None else (1e3 * spacing[1], 1e3 * spacing[0])
    if mpp is None and philips_xml.SPACING in slide:
        problems.append(
            f"The pixel spacing of '{path}' is not a pair of positive numbers; the pixel size is "
            "unknown."
        )
    barcode = _barcode(_text(slide, "PIM_DP_UFS_BARCODE"), path, problems)
    layout = tiff.slide_layout(
        source,
        "philips",
        levels,
        first,
        slide,
        with_description=False,
        associated=associated,
        problems=problems,
    )
    return replace(
        layout,
        mpp=mpp,
        objective=_objective(_text(slide, "DICOM_DERIVATION_DESCRIPTION")),
        scanner=_scanner(slide),
        scan_date=_text(slide, "DICOM_ACQUISITION_DATETIME") or None,
        barcode=barcode,
        icc=layout.icc or _icc_of_xml(slide),
    )


def _description(xml: str, path: str, problems: list[str]) -> philips_xml.Description:
    """Read the XML, and merge the attributes of its whole-slide image into the slide's."""
    try:
        found = philips_xml.parse(xml)
    except ValueError as error:
        problems.append(
            f"The XML in '{path}' can't be read ({error}), so pixel size, padding and scanner are "
            "unknown; get a fresh copy of the file."
        )
        return philips_xml.Description({}, [], ())
    if found.left_out:
        problems.append(
            f"The attribute(s) {', '.join(found.left_out[:3])} of '{path}' are too long and are "
            "left out."
        )
    scanned = found.attributes.get(SCANNED_IMAGES)
    images = scanned if isinstance(scanned, list) else []
    main = [image for image in images if _text(image, "PIM_DP_IMAGE_TYPE") == "WSI"]
    if len(main) != 1:
        problems.append(
            f"The XML in '{path}' describes {len(main)} whole-slide images instead of one; "
            f"{'the first one is used' if main else 'pixel size and padding are unknown'}."
        )
    slide: Metadata = {}
    for name, value in found.attributes.items():
        slide |= main[0] if main and name == SCANNED_IMAGES else {name: value}
    if main:
        slide[SCANNED_IMAGES] = [image for image in images if image is not main[0]]
    return found._replace(attributes=slide)


def _levels(
    pages: Sequence[TiffPage], slide: Metadata, path: str, problems: list[str]
) -> list[LevelLayout]:
    downsamples = _downsamples(pages, slide)
    if downsamples is not None:
        width, height = pages[0].imagewidth, pages[0].imagelength
        levels = []
        for page, downsample in zip(pages, downsamples, strict=True):
            size = max(1, width // downsample), max(1, height // downsample)
            level = tiff.page_level(page, path, size=size)
            levels.append(replace(level, reduction=downsample))
        return levels
    if len(pages) > 1 and slide:
        problems.append(
            f"The pixel spacings in '{path}' don't match its levels, which are shown as stored, "
            "with padding at the right and bottom edges."
        )
    levels = [tiff.page_level(pages[0], path)]
    for page in pages[1:]:
        level = tiff.page_level(page, path)
        base, finer = levels[0], levels[-1]
        smaller = level.width * level.height < finer.width * finer.height
        if smaller and (level.channels, level.dtype) == (base.channels, base.dtype):
            levels.append(level)
    return levels


def _downsamples(pages: Sequence[TiffPage], slide: Metadata) -> list[int] | None:
    """Return each level's downsample from its pixel spacing; None if they contradict the pages."""
    sequence = slide.get("PIIM_PIXEL_DATA_REPRESENTATION_SEQUENCE")
    entries = sequence if isinstance(sequence, list) else []
    spacings = [
        philips_xml.spacing(entry[philips_xml.SPACING])
        for entry in entries
        if philips_xml.SPACING in entry
    ]
    if len(spacings) != len(pages):
        return None
    first = pages[0]
    kind = (first.samplesperpixel, first.dtype)
    downsamples = [0]
    for page, spacing in zip(pages, spacings, strict=True):
        if spacing is None or spacings[0] is None or (page.samplesperpixel, page.dtype) != kind:
            return None
        ratio = (spacing[0] / spacings[0][0] + spacing[1] / spacings[0][1]) / 2
        if not ratio <= max(first.imagewidth, first.imagelength):
            return None
        downsample = math.floor(ratio + 0.5)
        if downsample <= downsamples[-1]:
            return None
        width, height = first.imagewidth // downsample, first.imagelength // downsample
        if width > page.imagewidth or height > page.imagelength:
            return None
        downsamples.append(downsample)
    return downsamples[1:]


def _pictures_of_xml(
    pictures: Sequence[tuple[Metadata, str]],
    of_pages: Sequence[AssociatedLayout],
    path: str,
    problems: list[str],
) -> list[AssociatedLayout]:
    """Describe the associated images that only the XML holds."""
    held = {image.name for image in of_pages}
    found: dict[str, AssociatedLayout] = {}
    for owner, text in pictures:
        name = NAMES_BY_TYPE.get(_text(owner, "PIM_DP_IMAGE_TYPE"))
        if name is None or name in held or name in found:
            continue
        try:
            data = binascii.a2b_base64(text)
            found[name] = AssociatedLayout(name, jpeg_picture(data[:JPEG_HEAD], 0, len(data)), data)
        except ValueError as error:
            problems.append(
                f"The {name} image in the XML of '{path}' is not a readable base64 JPEG "
                f"({error}) and is left out."
            )
    return list(found.values())


def _icc_of_xml(slide: Metadata) -> bytes | None:
    management = slide.get("DP_COLOR_MANAGEMENT")
    for attributes in (slide, *(management if isinstance(management, list) else ())):
        try:
            profile = binascii.a2b_base64(_text(attributes, "DICOM_ICCPROFILE"))
        except ValueError:
            continue
        if profile[ICC_SIGNATURE_AT:].startswith(b"acsp"):
            return profile
    return None


def _text(attributes: Metadata, name: str) -> str:
    value = attributes.get(name)
    return value.strip() if isinstance(value, str) else ""


def _scanner(slide: Metadata) -> str | None:
    names = (_text(slide, "DICOM_MANUFACTURER"), _text(slide, "DICOM_MANUFACTURERS_MODEL_NAME"))
    return " ".join(filter(None, names)) or None


def _objective(derivation: str) -> float | None:
    """Return the magnification, which is the first of the levels in the derivation description.

    Some writers store another number there, which is higher than any magnification.
    """
    for item in derivation.split("-"):
        name, _, value = item.partition("=")
        if name == "sourceFilename":  # the rest is a file name, which may contain dashes
            break
        if name == "levels":
            number = positive_number(value.split(",")[0])
            plausible = number is not None and number <= HIGHEST_OBJECTIVE and number % 1 == 0
            return number if plausible else None
    return None


def _barcode(text: str, path: str, problems: list[str]) -> str | None:
    try:
        return binascii.a2b_base64("".join(text.split()), strict_mode=True).decode() or None
    except ValueError:
        problems.append(f"The barcode of '{path}' is not valid base64 and is left out.")
        return None
