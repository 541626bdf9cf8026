"""OME-XML: pixel size and channels of an OME-TIFF."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from defusedxml import DefusedXmlException, ElementTree

from napari_wsigpu.formats.layout import Channel

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

MICROMETRES = {
    "m": 1e6, "dm": 1e5, "cm": 1e4, "mm": 1e3, "µm": 1.0, "\N{GREEK SMALL LETTER MU}m": 1.0,
    "um": 1.0, "nm": 1e-3, "pm": 1e-6, "Å": 1e-4, "in": 25400.0,
}  # fmt: skip


class OmeDescription(NamedTuple):
    """What OME-XML says of the first image."""

    mpp: tuple[float, float] | None
    channels: tuple[Channel, ...]
    metadata: dict[str, Any]


def parse(xml: str | None) -> OmeDescription | None:
    """Read OME-XML, or return None where it can't be parsed or holds no image."""
    try:
        root = ElementTree.fromstring(xml or "")
    except (ElementTree.ParseError, DefusedXmlException, ValueError):
        return None
    images = [element for element in root if _name(element) == "Image"]
    if not images:
        return None
    image = images[0]
    pixels = next((element for element in image if _name(element) == "Pixels"), None)
    if pixels is None:
        return None
    sizes = [_micrometres(pixels, axis) for axis in "XY"]
    channels = [element for element in pixels if _name(element) == "Channel"]
    metadata = {
        "Image": dict(image.attrib),
        "Pixels": dict(pixels.attrib),
        "Channels": [dict(channel.attrib) for channel in channels],
    }
    return OmeDescription(
        mpp=None if sizes[0] is None or sizes[1] is None else (sizes[0], sizes[1]),
        channels=tuple(
            Channel(channel.get("Name") or f"channel {index}", _color(channel.get("Color")))
            for index, channel in enumerate(channels)
        ),
        metadata=metadata,
    )


def _name(element: Element) -> str:
    return element.tag.rpartition("}")[2]


def _micrometres(pixels: Element, axis: str) -> float | None:
    unit = MICROMETRES.get(pixels.get(f"PhysicalSize{axis}Unit", "µm"))
    try:
        size = float(pixels.get(f"PhysicalSize{axis}", "nan")) * (unit or math.nan)
    except ValueError:
        return None
    return size if math.isfinite(size) and size > 0 else None


def _color(value: str | None) -> str | None:
    """Turn OME's signed RGBA integer into "#rrggbb"; black is no display colour."""
    try:
        rgb = (int(value or "") & 0xFFFFFFFF) >> 8
    except ValueError:
        return None
    return f"#{rgb:06x}" if rgb else None
