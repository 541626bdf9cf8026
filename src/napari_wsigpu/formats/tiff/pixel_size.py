"""How large the pixels of a TIFF are, by all that may say it: the most reliable source counts."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from napari_wsigpu.formats import markup
from napari_wsigpu.formats.fields import positive_number
from napari_wsigpu.formats.tiff import imagej
from napari_wsigpu.formats.zarr import ngff
from napari_wsigpu.model.tags import RESUNIT, Tag

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from tifffile import TiffFile, TiffPage

    from napari_wsigpu.model.layout import SlideLayout

    Size = tuple[float, float]

INCH = 25400.0
MICROMETRES = {
    RESUNIT.INCH: INCH,
    RESUNIT.CENTIMETER: 10000.0,
    RESUNIT.MILLIMETER: 1000.0,
    RESUNIT.MICROMETER: 1.0,
}
# What programs write that know nothing of the pixels' size: screens, and the least fraction.
SCREENS = (72.0, 96.0)
# By how much of it sizes may differ that say the same.
UNLIKE = 0.01
NANOMETRE, METRE = 1e-3, 1e6


def with_size(
    layout: SlideLayout, file: TiffFile, page: TiffPage, stated: Size | None = None
) -> SlideLayout:
    """Return a layout with the size of its pixels, and what is doubtful about that.

    Parameters
    ----------
    layout : SlideLayout
        The layout.
    file, page : TiffFile, TiffPage
        The file, and the page that is level 0.
    stated : tuple of float, optional
        Micrometres (x, y) by the file's OME-XML, which counts before all else.
    """
    sizes = {
        "the OME-XML": stated,
        **dict(_by_vendors(page)),
        "ImageJ's description": imagej.scale_of(file, page).mpp,
        "the resolution tags": by_tags(page),
    }
    known = [(source, size) for source, size in sizes.items() if size is not None]
    if not known:
        default = _default(page)
        said = (
            f"The size of a pixel is unknown: the file says {default}, as programs do by default."
        )
        return replace(layout, problems=(*layout.problems, *([said] if default else [])))
    source, mpp = known[0]
    unlike = (
        f"The size of a pixel is {mpp[0]:.4g} µm by {source}, which counts, but {size[0]:.4g} µm "
        f"by {other}."
        for other, size in known[1:]
        if not all(map(_alike, mpp, size))
    )
    return replace(layout, mpp=mpp, problems=(*layout.problems, *unlike))


def by_tags(page: TiffPage) -> Size | None:
    """Return micrometres a pixel (x, y) by the resolution tags; None if these measure nothing."""
    micrometres = MICROMETRES.get(page.tags.valueof(Tag.RESOLUTION_UNIT, RESUNIT.INCH))
    x, y = (_resolution(page, code) for code in (Tag.X_RESOLUTION, Tag.Y_RESOLUTION))
    if micrometres is None or not x or not y or _default(page) is not None:
        return None
    return _size(micrometres / x, micrometres / y)


def _default(page: TiffPage) -> str | None:
    """Return a resolution that means that none is known; None for others."""
    unit = page.tags.valueof(Tag.RESOLUTION_UNIT, RESUNIT.INCH)
    x, y = (_resolution(page, code) for code in (Tag.X_RESOLUTION, Tag.Y_RESOLUTION))
    if not x or x != y or unit not in MICROMETRES:
        return None
    dots = x * INCH / MICROMETRES[unit]
    if x == 1 and unit in (RESUNIT.INCH, RESUNIT.CENTIMETER):
        return f"1 pixel {'an inch' if unit == RESUNIT.INCH else 'a centimetre'}"
    screen = next((screen for screen in SCREENS if abs(dots - screen) < 0.05), None)
    return None if screen is None else f"{screen:g} dpi"


def _resolution(page: TiffPage, code: int) -> float | None:
    value = page.tags.valueof(code)
    if isinstance(value, tuple):
        value = value[0] / value[1] if len(value) > 1 and value[1] else None
    return positive_number(value) if isinstance(value, int | float) else None


def _alike(size: float, other: float) -> bool:
    return abs(size - other) <= UNLIKE * size


def _size(x: Any, y: Any, micrometres: float = 1.0) -> Size | None:
    """Return a size in micrometres, if both numbers are possible."""
    with suppress(TypeError, ValueError, OverflowError, ZeroDivisionError):
        found = tuple(map(float, (x, y)))
        if micrometres != 1:  # metres times a million is rarely the number that was meant
            found = tuple(float(f"{each * micrometres:.12g}") for each in found)
        if min(found) > 0 and math.isfinite(sum(found)):
            return found[0], found[1]
    return None


def _by_vendors(page: TiffPage) -> Iterator[tuple[str, Size]]:
    """Yield what vendors' own tags say, which tifffile has parsed."""
    for name, code, read in VENDORS:
        value = page.tags.valueof(code)
        # A value may be of any kind: the file says of which type its tags are.
        with suppress(TypeError, ValueError, KeyError, IndexError, AttributeError):
            size = None if value is None else read(value)
            if size is not None:
                yield f"the tags of {name}", size


def _fei(value: Mapping[str, Mapping[str, Any]]) -> Size | None:
    sections = (value.get(name, {}) for name in ("Scan", "EScan", "IScan"))
    section = next((each for each in sections if "PixelWidth" in each), {})
    return _size(section.get("PixelWidth"), section.get("PixelHeight"), METRE)


def _titan(value: str) -> Size | None:
    root = markup.parse(value)
    pixel = None if root is None else root.find(".//PixelSize")
    return None if pixel is None else _size(pixel.findtext("X"), pixel.findtext("Y"), METRE)


def _zeiss_sem(value: Mapping[str, tuple[Any, ...]]) -> Size | None:
    for key in ("ap_image_pixel_size", "ap_pixel_size"):
        if len(stated := value.get(key, ())) == 3:
            return _size(stated[1], stated[1], ngff.micrometres(stated[2]) or 0.0)
    return _size(value[""][3], value[""][3], METRE)


def _tvips(value: Mapping[str, Any]) -> Size | None:
    if value["Version"] == 1:
        side = value["PhysicalPixelSize"] / value["Magnification"]
        return _size(side, side, NANOMETRE)
    return _size(value["PixelSizeX"], value["PixelSizeY"], NANOMETRE)


def _metamorph(value: Mapping[str, Any]) -> Size | None:
    unit = ngff.micrometres(str(value["CalibrationUnits"])) or 0.0
    return _size(value["XCalibration"], value["YCalibration"], unit)


def _of_keys(x: str, y: str, micrometres: float) -> Callable[[Mapping[str, Any]], Size | None]:
    return lambda value: _size(value[x], value[y], micrometres)


# Whose tag, its number, and what reads the value that tifffile makes of it.
VENDORS: Iterable[tuple[str, int, Callable[[Any], Size | None]]] = (
    ("FEI", 34680, _fei),
    ("FEI", 34682, _fei),
    ("FEI", 34683, _titan),
    ("Zeiss", 34118, _zeiss_sem),
    ("Zeiss", 34412, _of_keys("VoxelSizeX", "VoxelSizeY", METRE)),
    ("TVIPS", 37706, _tvips),
    ("Olympus", 33560, _of_keys("pixelsizex", "pixelsizey", METRE)),
    ("MetaMorph", 33628, _metamorph),
    ("Micro-Manager", 51123, _of_keys("PixelSizeUm", "PixelSizeUm", 1.0)),
)
