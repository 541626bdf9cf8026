"""What ImageJ says of the sizes of a stack, in a page's description."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from napari_wsigpu.formats.fields import positive_number
from napari_wsigpu.formats.zarr.ngff import MICROMETRES
from napari_wsigpu.model.tags import RESUNIT, Tag

if TYPE_CHECKING:
    from tifffile import TiffFile, TiffPage

SECONDS = {"s", "sec", "second", "seconds"}
MICRO = "\\u00B5"  # as ImageJ writes it


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
    name = str(said.get("unit", "")).replace(MICRO, "µ").rstrip("s").lower()
    unit = MICROMETRES.get(name)
    mpp = spacing = None
    if unit is not None:
        step = positive_number(str(said.get("spacing", "")).removeprefix("-"))
        spacing = None if step is None else step * unit
        # Other units of the tags are as good as in any TIFF.
        if page.tags.valueof(Tag.RESOLUTION_UNIT, RESUNIT.INCH) == RESUNIT.NONE:
            x, y = (_per_pixel(page, code) for code in (Tag.X_RESOLUTION, Tag.Y_RESOLUTION))
            mpp = (x * unit, y * unit) if x and y else None
    every = positive_number(said.get("finterval"))
    return Scale(mpp, spacing, every if str(said.get("tunit", "s")) in SECONDS else None)


def _per_pixel(page: TiffPage, code: int) -> float | None:
    value = page.tags.valueof(code)
    if not isinstance(value, tuple) or len(value) != 2 or min(value) <= 0:
        return None
    return float(value[1] / value[0])
