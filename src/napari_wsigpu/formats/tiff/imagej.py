"""What ImageJ says of the sizes of a stack, in a page's description."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from napari_wsigpu.formats.fields import positive_number
from napari_wsigpu.formats.zarr import ngff
from napari_wsigpu.model.tags import RESUNIT, Tag

if TYPE_CHECKING:
    from tifffile import TiffFile, TiffPage

# ImageJ writes letters beyond ASCII so; of the two that look like mu, programs write either.
ESCAPES = {"\\u00b5": "\N{MICRO SIGN}", "\\u03bc": "\N{MICRO SIGN}", "\\u00c5": "å"}


class Scale(NamedTuple):
    """Micrometres a pixel (x, y) and between planes, and seconds; None where it does not say."""

    mpp: tuple[float, float] | None = None
    z_spacing: float | None = None
    time_step: float | None = None


def scale_of(file: TiffFile, page: TiffPage) -> Scale:
    """Return the scale of a file that ImageJ wrote, or a program that writes such files."""
    said = file.imagej_metadata if file.is_imagej else None
    if not said:
        return Scale()
    across = _micrometres(said.get("unit"))
    down, deep = (_micrometres(said.get(f"{axis}unit")) or across for axis in "yz")
    step = positive_number(str(said.get("spacing", "")).removeprefix("-"))
    spacing = None if step is None or deep is None else step * deep
    mpp = None
    # Other units of the tags are as good as in any TIFF.
    if page.tags.valueof(Tag.RESOLUTION_UNIT, RESUNIT.INCH) == RESUNIT.NONE and across and down:
        x, y = (_per_pixel(page, code) for code in (Tag.X_RESOLUTION, Tag.Y_RESOLUTION))
        mpp = (x * across, y * down) if x and y else None
    every, unit = positive_number(said.get("finterval")), ngff.seconds(said.get("tunit", "s"))
    return Scale(mpp, spacing, every * unit if every and unit else None)


def _micrometres(unit: Any) -> float | None:
    name = str(unit).lower()
    for escape, letter in ESCAPES.items():
        name = name.replace(escape, letter)
    return ngff.micrometres(name)


def _per_pixel(page: TiffPage, code: int) -> float | None:
    value = page.tags.valueof(code)
    if not isinstance(value, tuple) or len(value) != 2 or min(value) <= 0:
        return None
    return float(value[1] / value[0])
