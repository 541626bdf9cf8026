"""What ImageJ says of the sizes of a stack, in a page's description."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from napari_wsigpu.formats.fields import number, positive_number
from napari_wsigpu.formats.zarr import ngff
from napari_wsigpu.model.layout import Channel
from napari_wsigpu.model.tags import RESUNIT, Tag

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tifffile import TiffFile, TiffPage

# ImageJ writes letters beyond ASCII so; of the two that look like mu, programs write either.
ESCAPES = {"\\u00b5": "\N{MICRO SIGN}", "\\u03bc": "\N{MICRO SIGN}", "\\u00c5": "å"}


# What some programs write before a label, such as "c:1/3 z:2/5 - ".
PLANE, LONGEST_LABEL = re.compile(r"^(?:[czt]:\d+/\d+\s*)+(?:-\s*)?"), 80


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


def channels(
    file: TiffFile, planes: int, count: int, shown: Mapping[str, tuple[int, int]]
) -> tuple[Channel, ...]:
    """Return what ImageJ says of channels: labels, colours and ranges; empty if it says nothing.

    Parameters
    ----------
    file : TiffFile
        The file.
    planes, count : int
        How many planes it has, and how many of them are the channels of one.
    shown : Mapping of str to (int, int)
        Which plane along "z" and "t" is shown, and how many there are.
    """
    said = file.imagej_metadata if file.is_imagej else None
    if not said or count < 2:
        return ()
    labels, tables, ranges = (said.get(name) or () for name in ("Labels", "LUTs", "Ranges"))
    (z, depth), (t, _) = (shown.get(axis, (0, 1)) for axis in "zt")
    first = (t * depth + z) * count  # channels are the fastest axis
    names = [""] * count
    if isinstance(labels, list) and len(labels) == planes:
        names = [PLANE.sub("", str(label))[:LONGEST_LABEL] for label in labels[first:][:count]]
    if len({*names}) < count:  # of a file, not of a channel
        names = [""] * count
    return tuple(
        Channel(
            name or f"channel {index}",
            _color(tables[index]) if len(tables) == count else None,
            _window(ranges[2 * index :][:2]) if len(ranges) == 2 * count else None,
        )
        for index, name in enumerate(names)
    )


def _color(table: Any) -> str | None:
    """Return the colour of the brightest values; None for gray."""
    shades = np.asarray(table)
    if shades.shape != (3, 256) or len({*shades[:, -1].tolist()}) == 1:
        return None
    return "#" + "".join(f"{int(shade) & 255:02x}" for shade in shades[:, -1])


def _window(pair: Sequence[Any]) -> tuple[float, float] | None:
    try:
        low, high = map(number, map(str, pair))
    except ValueError:
        return None
    return (low, high) if low < high else None


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
