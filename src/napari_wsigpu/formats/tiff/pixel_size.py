"""The pixel size of a TIFF, from the most reliable of several sources."""

from __future__ import annotations

import codecs
import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from napari_wsigpu.formats import markup, units
from napari_wsigpu.formats.fields import MOST_FIELDS, pairs, positive_number
from napari_wsigpu.formats.tiff import imagej
from napari_wsigpu.model.tags import RESUNIT, Tag

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from tifffile import TiffFile, TiffPage

    from napari_wsigpu.formats.fields import Metadata
    from napari_wsigpu.model.layout import SlideLayout

    Size = tuple[float, float]

INCH, CENTIMETER = 25400.0, 10000.0
MICROMETERS = {
    RESUNIT.INCH: INCH,
    RESUNIT.CENTIMETER: CENTIMETER,
    RESUNIT.MILLIMETER: 1000.0,
    RESUNIT.MICROMETER: 1.0,
}
# Dots per inch of screens, which programs write by default if they don't know the pixel size.
SCREENS = (72.0, 96.0)
# Relative difference up to which two sizes count as equal.
TOLERANCE = 0.01
# Two sources, as problems name them.
DESCRIPTION, RESOLUTION_TAGS = "Aperio's description", "the resolution tags"
DEFAULT = "The pixel size is unknown: the file states {}, the default of many programs."
NANOMETER, METER = 1e-3, 1e6
HITACHI, LONGEST_TEXT = "[SemImageFile]", 1 << 16
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def with_size(
    layout: SlideLayout, file: TiffFile, page: TiffPage, stated: Size | None = None
) -> SlideLayout:
    """Return a layout with its pixel size, and a problem for each source that contradicts it.

    The objective comes from an Aperio description, which files without tiles can have too.

    Parameters
    ----------
    layout : SlideLayout
        The layout.
    file, page : TiffFile, TiffPage
        The file, and the page of level 0.
    stated : tuple of float, optional
        Micrometers per pixel (x, y) from the file's OME-XML, which takes precedence.
    """
    is_aperio = page.description.startswith("Aperio")
    fields = pairs(page.description.split("|")) if is_aperio else {}
    layout = replace(layout, objective=layout.objective or positive_number(fields.get("AppMag")))
    sizes = {
        "the OME-XML": stated,
        **dict(_from_vendor_tags(page)),
        "the text file of Hitachi's microscope": _from_hitachi(file),
        DESCRIPTION: _size(fields.get("MPP"), fields.get("MPP")),
        "ImageJ's description": imagej.scale_of(file, page).mpp,
        RESOLUTION_TAGS: from_tags(page),
    }
    known = {source: size for source, size in sizes.items() if size is not None}
    if not known:
        default = default_of(*_resolution(page))
        added = [DEFAULT.format(default)] if default else []
        return replace(layout, problems=(*layout.problems, *added))
    mpp = next(iter(known.values()))
    return replace(layout, mpp=mpp, problems=(*layout.problems, *contradictions(known)))


def contradictions(sizes: Mapping[str, Size]) -> Iterator[str]:
    """Yield a sentence for each source whose size differs from the first one's, which is used."""
    (source, mpp), *others = sizes.items()
    for other, size in others:
        if not all(map(_equal, mpp, size)):
            yield (
                f"The pixel size is {mpp[0]:.4g} µm according to {source}, which is used, but "
                f"{size[0]:.4g} µm according to {other}."
            )


def from_tags(page: TiffPage) -> Size | None:
    """Return micrometers per pixel (x, y) from the resolution tags (TIFF 6.0, section 8).

    None if the tags are missing, have no unit of length or hold a program's default.
    """
    return from_resolution(*_resolution(page))


def from_resolution(x: float | None, y: float | None, micrometers: float | None) -> Size | None:
    """Return micrometers per pixel (x, y); None if unknown or `default_of` recognizes it.

    Parameters
    ----------
    x, y : float or None
        Pixels per unit of length; None or 0 if unknown.
    micrometers : float or None
        The unit in micrometers; None if unknown.
    """
    if micrometers is None or not x or not y or default_of(x, y, micrometers) is not None:
        return None
    return _size(micrometers / x, micrometers / y)


def default_of(x: float | None, y: float | None, micrometers: float | None) -> str | None:
    """Return a resolution as text if it is a program's default; None if it may be real.

    The parameters are those of `from_resolution`.
    """
    if not x or x != y or micrometers is None:
        return None
    dots = x * INCH / micrometers
    if x == 1 and micrometers in (INCH, CENTIMETER):
        return f"1 pixel per {'inch' if micrometers == INCH else 'centimeter'}"
    screen = next((screen for screen in SCREENS if abs(dots - screen) < 0.05), None)
    return None if screen is None else f"{screen:g} dpi"


def _resolution(page: TiffPage) -> tuple[float | None, float | None, float | None]:
    """Return pixels per unit (x, y) and the unit in micrometers; None for what is unknown."""
    unit = page.tags.valueof(Tag.RESOLUTION_UNIT, RESUNIT.INCH)
    x, y = (_pixels_per_unit(page, code) for code in (Tag.X_RESOLUTION, Tag.Y_RESOLUTION))
    return x, y, MICROMETERS.get(unit)


def _pixels_per_unit(page: TiffPage, code: int) -> float | None:
    value = page.tags.valueof(code)
    if isinstance(value, tuple):
        value = value[0] / value[1] if len(value) > 1 and value[1] else None
    return positive_number(value) if isinstance(value, int | float) else None


def _equal(size: float, other: float) -> bool:
    return abs(size - other) <= TOLERANCE * size


def _size(x: Any, y: Any, micrometers: float = 1.0) -> Size | None:
    """Return a size in micrometers; None unless both numbers are positive and finite."""
    with suppress(TypeError, ValueError, OverflowError, ZeroDivisionError):
        found = tuple(map(float, (x, y)))
        if micrometers != 1:  # remove the rounding error of the product
            found = tuple(float(f"{each * micrometers:.12g}") for each in found)
        if min(found) > 0 and math.isfinite(sum(found)):
            return found[0], found[1]
    return None


def _from_vendor_tags(page: TiffPage) -> Iterator[tuple[str, Size]]:
    """Yield the sizes in vendors' private tags, which tifffile has parsed."""
    for name, code, read in VENDORS:
        value = page.tags.valueof(code)
        # The file declares the types of its tags, so a value may have any type.
        with suppress(TypeError, ValueError, KeyError, IndexError, AttributeError):
            size = None if value is None else read(value)
            if size is not None:
                yield f"the tags of {name}", size


def _from_hitachi(file: TiffFile) -> Size | None:
    """Return the pixel size in the text file that Hitachi microscopes write next to a picture."""
    path = Path(file.filehandle.path)
    if not file.filehandle.dirname:  # a stream
        return None
    text_file = path.with_suffix(".txt")
    if not text_file.is_file():  # opening a pipe would block
        return None
    with suppress(OSError), text_file.open("rb") as stream:
        text = stream.read(LONGEST_TEXT)
        encoding = "utf-16" if text.startswith(UTF_16) else "latin1"
        header, *lines = text.decode(encoding, "replace").splitlines()[:MOST_FIELDS] or [""]
        fields = pairs(lines)
        if header == HITACHI and fields.get("ImageName", "").lower() == path.name.lower():
            return _size(fields.get("PixelSize"), fields.get("PixelSize"), NANOMETER)
    return None


def _fei(value: Mapping[str, Metadata]) -> Size | None:
    sections = (value.get(name, {}) for name in ("Scan", "EScan", "IScan"))
    section = next((each for each in sections if "PixelWidth" in each), {})
    return _size(section.get("PixelWidth"), section.get("PixelHeight"), METER)


def _titan(value: str) -> Size | None:
    root = markup.parse(value)
    pixel = None if root is None else root.find(".//PixelSize")
    return None if pixel is None else _size(pixel.findtext("X"), pixel.findtext("Y"), METER)


def _zeiss_sem(value: Metadata) -> Size | None:
    for key in ("ap_image_pixel_size", "ap_pixel_size"):
        if len(stated := value.get(key, ())) == 3:
            return _size(stated[1], stated[1], units.micrometers(stated[2]) or 0.0)
    return _size(value[""][3], value[""][3], METER)


def _tvips(value: Metadata) -> Size | None:
    if value["Version"] == 1:
        side = value["PhysicalPixelSize"] / value["Magnification"]
        return _size(side, side, NANOMETER)
    return _size(value["PixelSizeX"], value["PixelSizeY"], NANOMETER)


def _metamorph(value: Metadata) -> Size | None:
    unit = units.micrometers(str(value["CalibrationUnits"])) or 0.0
    return _size(value["XCalibration"], value["YCalibration"], unit)


def _of_keys(x: str, y: str, micrometers: float) -> Callable[[Metadata], Size | None]:
    return lambda value: _size(value[x], value[y], micrometers)


# The vendor, its tag's code, and the function that reads the value that tifffile parsed.
VENDORS: Iterable[tuple[str, int, Callable[[Any], Size | None]]] = (
    ("FEI", 34680, _fei),
    ("FEI", 34682, _fei),
    ("FEI", 34683, _titan),
    ("Zeiss", 34118, _zeiss_sem),
    ("Zeiss", 34412, _of_keys("VoxelSizeX", "VoxelSizeY", METER)),
    ("TVIPS", 37706, _tvips),
    ("Olympus", 33560, _of_keys("pixelsizex", "pixelsizey", METER)),
    ("MetaMorph", 33628, _metamorph),
    ("Micro-Manager", 51123, _of_keys("PixelSizeUm", "PixelSizeUm", 1.0)),
)
