"""The scale and channels of a stack, from the metadata that ImageJ writes."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.formats import units
from napari_wsigpu.formats.fields import number, positive_number
from napari_wsigpu.model.layout import Channel
from napari_wsigpu.model.tags import RESUNIT, Tag

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import ArrayLike
    from tifffile import TiffFile, TiffPage

# ImageJ escapes non-ASCII letters. Programs write either of the two code points of mu.
ESCAPES = {"\\u00b5": "\N{MICRO SIGN}", "\\u03bc": "\N{MICRO SIGN}", "\\u00c5": "å"}


# The prefix that some programs add to a label, such as "c:1/3 z:2/5 - ".
PLANE, LONGEST_LABEL = re.compile(r"^(?:[czt]:\d+/\d+\s*)+(?:-\s*)?"), 80


class Scale(NamedTuple):
    """Micrometers per pixel (x, y), micrometers between z planes, and seconds between t planes.

    Each is None if the file does not state it.
    """

    mpp: tuple[float, float] | None = None
    z_spacing: float | None = None
    time_step: float | None = None


def scale_of(file: TiffFile, page: TiffPage) -> Scale:
    """Return the scale of a file with ImageJ's metadata; an empty one for other files."""
    metadata = file.imagej_metadata if file.is_imagej else None
    if not metadata:
        return Scale()
    across = _micrometers(metadata.get("unit"))
    down, deep = (_micrometers(metadata.get(f"{axis}unit")) or across for axis in "yz")
    step = positive_number(str(metadata.get("spacing", "")).removeprefix("-"))
    spacing = None if step is None or deep is None else step * deep
    mpp = None
    # With a unit in the tags, `pixel_size.from_tags` reads the size, as for other TIFFs.
    if page.tags.valueof(Tag.RESOLUTION_UNIT, RESUNIT.INCH) == RESUNIT.NONE and across and down:
        x, y = (_per_pixel(page, code) for code in (Tag.X_RESOLUTION, Tag.Y_RESOLUTION))
        mpp = (x * across, y * down) if x and y else None
    interval = positive_number(metadata.get("finterval"))
    unit = units.seconds(metadata.get("tunit", "s"))
    return Scale(mpp, spacing, interval * unit if interval and unit else None)


def contradiction(file: TiffFile, kind: str, planes: int) -> str | None:
    """Return a problem if ImageJ's metadata declares another number of planes than the file holds.

    Parameters
    ----------
    file : TiffFile
        The file.
    kind : str
        Kind of the series that tifffile found; "imagej" if it follows ImageJ's metadata.
    planes : int
        Number of planes of this series.
    """
    metadata = file.imagej_metadata if file.is_imagej else None
    if not metadata or kind not in ("imagej", "generic", "uniform"):
        return None
    counts = [metadata.get(name, 1) for name in ("images", "channels", "slices", "frames")]
    images, *lengths = (count if isinstance(count, int) else 1 for count in counts)
    # Some writers count the samples of a page as channels.
    declared, samples = max(images, math.prod(lengths)), file.pages.first.samplesperpixel
    held = len(file.pages)
    if kind == "imagej" and held <= planes:
        held = planes  # without directories, if the file is larger than 4 GiB
    if declared <= held * samples and not (kind == "imagej" and held > planes):
        return None
    return f"ImageJ's description declares {declared} planes, but the file holds {held}."


def channels(
    file: TiffFile, planes: int, count: int, shown: Mapping[str, tuple[int, int]]
) -> tuple[Channel, ...]:
    """Return the channels with ImageJ's labels, colors and ranges; empty without its metadata.

    Parameters
    ----------
    file : TiffFile
        The file.
    planes : int
        Number of planes in the file, over all axes.
    count : int
        Number of channels.
    shown : Mapping of str to (int, int)
        Index of the shown plane and number of planes along "z" and "t".
    """
    metadata = file.imagej_metadata if file.is_imagej else None
    if not metadata or count < 2:
        return ()
    labels, tables, ranges = (metadata.get(name) or () for name in ("Labels", "LUTs", "Ranges"))
    (z, depth), (t, _) = (shown.get(axis, (0, 1)) for axis in "zt")
    first = (t * depth + z) * count  # channels vary fastest
    names = [""] * count
    if isinstance(labels, list) and len(labels) == planes:
        names = [PLANE.sub("", str(label))[:LONGEST_LABEL] for label in labels[first:][:count]]
    if len({*names}) < count:  # the labels name a file, not channels
        names = [""] * count
    return tuple(
        Channel(
            name or f"channel {index}",
            _color(tables[index]) if len(tables) == count else None,
            _window(ranges[2 * index :][:2]) if len(ranges) == 2 * count else None,
        )
        for index, name in enumerate(names)
    )


def _color(table: ArrayLike) -> str | None:
    """Return the color of the brightest value in a lookup table; None if it is gray."""
    shades = np.asarray(table)
    if shades.shape != (3, 256) or len({*shades[:, -1].tolist()}) == 1:
        return None
    return "#" + "".join(f"{int(shade) & 255:02x}" for shade in shades[:, -1])


def _window(pair: Sequence[object]) -> tuple[float, float] | None:
    try:
        low, high = map(number, map(str, pair))
    except ValueError:
        return None
    return (low, high) if low < high else None


def _micrometers(unit: object) -> float | None:
    name = str(unit).lower()
    for escape, letter in ESCAPES.items():
        name = name.replace(escape, letter)
    return units.micrometers(name)


def _per_pixel(page: TiffPage, code: int) -> float | None:
    value = page.tags.valueof(code)
    if not isinstance(value, tuple) or len(value) != 2 or min(value) <= 0:
        return None
    return float(value[1] / value[0])
