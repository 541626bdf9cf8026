"""Philips TIFF: tiled pages are levels, whose true sizes follow from XML in the first page."""

from __future__ import annotations

import binascii
import math
import re
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from tifffile.tifffile import jpeg_shape

from napari_wsigpu.formats.fields import positive_number
from napari_wsigpu.formats.tiff import philips_xml, tiff
from napari_wsigpu.model.layout import (
    AssociatedLayout,
    Encoding,
    LevelLayout,
    SlideFile,
    SlideLayout,
    TileGrid,
)
from napari_wsigpu.model.limits import limits
from napari_wsigpu.model.tags import COMPRESSION, FILLORDER, PHOTOMETRIC, PREDICTOR

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tifffile import TiffFile, TiffPage

ROOT = re.compile(r"<DataObject\s[^>]*\bObjectType\s*=\s*[\"']DPUfsImport[\"']")
ROOT_WITHIN = 4096
SCANNED_IMAGES = "PIM_DP_SCANNED_IMAGES"
NAMES_BY_TYPE = {"LABELIMAGE": "label", "MACROIMAGE": "macro"}
NAMES_BY_DESCRIPTION = {"Label": "label", "Macro": "macro"}
JPEG_HEAD = 1 << 20
HIGHEST_OBJECTIVE = 200
ICC_SIGNATURE_AT = 36


def probe(file: TiffFile) -> bool:
    """Whether Philips' software wrote the file: by its name, and the XML's root if it can be seen.

    Without that root only the full name counts, so that a slide is known by broken XML too.
    """
    first = file.pages.first
    if not (first.is_tiled and first.software.startswith("Philips")):
        return False
    return first.software.startswith("Philips DP") or bool(
        ROOT.search(first.description[:ROOT_WITHIN])
    )


def parse(file: TiffFile, source: SlideFile) -> SlideLayout:
    """Describe a Philips slide."""
    path, pages = source.path, tiff.pages(file)
    first = pages[0]
    problems: list[str] = []
    described = _described(first.description, path, problems)
    slide = described.attributes
    levels = _levels([page for page in pages if page.is_tiled], slide, path, problems)
    named = (
        (NAMES_BY_DESCRIPTION.get(page.description[:5]), page)
        for page in pages
        if not page.is_tiled
    )
    associated = tiff.associated_images(named, path, problems)
    associated += _pictures_of_xml(described.pictures, associated, path, problems)

    spacing = philips_xml.spacing(slide.get(philips_xml.SPACING))
    mpp = None if spacing is None else (1e3 * spacing[1], 1e3 * spacing[0])
    if mpp is None and philips_xml.SPACING in slide:
        problems.append(
            f"The pixel spacing of '{path}' is no pair of numbers above 0; its pixel size is "
            "not given."
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


def _described(xml: str, path: str, problems: list[str]) -> philips_xml.Description:
    """Read the XML, and lift the attributes of its whole-slide image to those of the slide."""
    try:
        found = philips_xml.parse(xml)
    except ValueError as error:
        problems.append(
            f"The XML in '{path}' can't be read ({error}); get a fresh copy of the file, for what "
            "it says of pixel size, padding and scanner is unknown."
        )
        return philips_xml.Description({}, [], ())
    if found.left_out:
        problems.append(
            f"What '{path}' says in {', '.join(found.left_out[:3])} is too long to be kept; "
            "it is left out."
        )
    scanned = found.attributes.get(SCANNED_IMAGES)
    images = scanned if isinstance(scanned, list) else []
    main = [image for image in images if _text(image, "PIM_DP_IMAGE_TYPE") == "WSI"]
    if len(main) != 1:
        problems.append(
            f"The XML in '{path}' describes {len(main)} whole-slide images instead of one; "
            f"{'the first counts' if main else 'its pixel size and padding are unknown'}."
        )
    slide: dict[str, Any] = {}
    for name, value in found.attributes.items():
        slide |= main[0] if main and name == SCANNED_IMAGES else {name: value}
    if main:
        slide[SCANNED_IMAGES] = [image for image in images if image is not main[0]]
    return found._replace(attributes=slide)


def _levels(
    pages: Sequence[TiffPage], slide: Mapping[str, Any], path: str, problems: list[str]
) -> list[LevelLayout]:
    downsamples = _downsamples(pages, slide)
    if downsamples is not None:
        width, height = pages[0].imagewidth, pages[0].imagelength
        return [
            replace(
                tiff.page_level(
                    page, path, size=(max(1, width // downsample), max(1, height // downsample))
                ),
                reduction=downsample,
            )
            for page, downsample in zip(pages, downsamples, strict=True)
        ]
    if len(pages) > 1 and slide:
        problems.append(
            f"The pixel spacings in '{path}' don't fit its levels, which are shown as they are "
            "stored, with padding at the right and lower edge."
        )
    levels = [tiff.page_level(pages[0], path)]
    for page in pages[1:]:
        level = tiff.page_level(page, path)
        base, finer = levels[0], levels[-1]
        smaller = level.width * level.height < finer.width * finer.height
        if smaller and (level.channels, level.dtype) == (base.channels, base.dtype):
            levels.append(level)
    return levels


def _downsamples(pages: Sequence[TiffPage], slide: Mapping[str, Any]) -> list[int] | None:
    """Return each level's downsample by its pixel spacing, or None where they can't be true."""
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
        if (
            downsample <= downsamples[-1]
            or first.imagewidth // downsample > page.imagewidth
            or first.imagelength // downsample > page.imagelength
        ):
            return None
        downsamples.append(downsample)
    return downsamples[1:]


def _pictures_of_xml(
    pictures: Sequence[tuple[Mapping[str, Any], str]],
    of_pages: Sequence[AssociatedLayout],
    path: str,
    problems: list[str],
) -> list[AssociatedLayout]:
    """Describe those pictures that no page holds."""
    held = {image.name for image in of_pages}
    found: dict[str, AssociatedLayout] = {}
    for owner, text in pictures:
        name = NAMES_BY_TYPE.get(_text(owner, "PIM_DP_IMAGE_TYPE"))
        if name is None or name in held or name in found:
            continue
        try:
            data = binascii.a2b_base64(text)
            found[name] = AssociatedLayout(name, _jpeg_image(data), data)
        except (ValueError, struct.error) as error:
            problems.append(
                f"The {name} image in the XML of '{path}' is no JPEG in base64 that can be shown "
                f"({error}); it is left out."
            )
    return list(found.values())


def _jpeg_image(data: bytes) -> LevelLayout:
    if not data.startswith(b"\xff\xd8\xff"):
        raise ValueError("it does not begin as a JPEG does")
    bits, height, width, samples = jpeg_shape(data[:JPEG_HEAD])
    if bits != 8 or samples not in (1, 3) or not 0 < height * width <= limits.tile_bytes // samples:
        raise ValueError(f"{width} x {height} pixels, {samples} samples of {bits} bit")
    encoding = Encoding(
        compression=COMPRESSION.JPEG,
        photometric=PHOTOMETRIC.RGB if samples == 3 else PHOTOMETRIC.MINISBLACK,
        predictor=PREDICTOR.NONE,
        fill_order=FILLORDER.MSB2LSB,
        byte_order="<",
        dtype="uint8",
        samples=samples,
        jpeg_color="auto" if samples == 3 else "gray",
    )
    offset, length = np.zeros((1, 1, 1), np.int64), np.full((1, 1, 1), len(data), np.int64)
    return LevelLayout(width, height, samples, encoding, TileGrid(height, width, offset, length))


def _icc_of_xml(slide: Mapping[str, Any]) -> bytes | None:
    management = slide.get("DP_COLOR_MANAGEMENT")
    for attributes in (slide, *(management if isinstance(management, list) else ())):
        try:
            profile = binascii.a2b_base64(_text(attributes, "DICOM_ICCPROFILE"))
        except ValueError:
            continue
        if profile[ICC_SIGNATURE_AT:].startswith(b"acsp"):
            return profile
    return None


def _text(attributes: Mapping[str, Any], name: str) -> str:
    value = attributes.get(name)
    return value.strip() if isinstance(value, str) else ""


def _scanner(slide: Mapping[str, Any]) -> str | None:
    names = (_text(slide, "DICOM_MANUFACTURER"), _text(slide, "DICOM_MANUFACTURERS_MODEL_NAME"))
    return " ".join(filter(None, names)) or None


def _objective(derivation: str) -> float | None:
    """Read the magnification: the first of the levels that the slide was derived from.

    Some writers put numbers of another kind there, which are higher than any magnification.
    """
    for item in derivation.split("-"):
        name, _, value = item.partition("=")
        if name == "sourceFilename":  # what follows is a name, which may hold dashes
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
        problems.append(f"The barcode of '{path}' is no text in base64; it is not given.")
        return None
