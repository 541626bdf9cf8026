"""Metadata of a slide as tiffslide properties: a flat mapping of numbers and strings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from napari_wsigpu.compat.openslide.properties import bounds_of, flat, levels_of
from napari_wsigpu.compat.shared import mpp_of

if TYPE_CHECKING:
    from napari_wsigpu.model.layout import SlideLayout

# Vendors for which tiffslide reports the image description as a comment.
COMMENTING_VENDORS = ("aperio", "leica")


def tiffslide_properties(layout: SlideLayout) -> dict[str, object]:
    """Return the properties that tiffslide reports for a slide; None for unknown values."""
    tags = dict(layout.metadata.get("tiff", {}))
    description = tags.get("ImageDescription", "")
    comments = layout.vendor in COMMENTING_VENDORS
    mpp_x, mpp_y = mpp_of(layout) or (None, None)
    found: dict[str, object] = {
        "tiffslide.comment": description if comments else None,
        "tiffslide.vendor": None if layout.vendor == "generic-tiff" else layout.vendor,
        "tiffslide.quickhash-1": None,
        "tiffslide.background-color": None,
        "tiffslide.objective-power": layout.objective,
        "tiffslide.mpp-x": mpp_x,
        "tiffslide.mpp-y": mpp_y,
    }
    bounds = bounds_of(layout)
    found |= {
        "tiffslide.bounds-x": bounds and bounds.left,
        "tiffslide.bounds-y": bounds and bounds.top,
        "tiffslide.bounds-width": bounds and bounds.width,
        "tiffslide.bounds-height": bounds and bounds.height,
    }
    for name, value in layout.metadata.items():
        if name != "tiff":
            found |= {key: _typed(text) for key, text in flat(name, value)}
    if layout.vendor == "aperio":
        found["aperio.Header"] = description.partition("|")[0]
    found["tiff.ImageDescription"] = description
    if "MPP" not in layout.metadata.get("aperio", {}) and "XResolution" in tags:
        found["tiff.ResolutionUnit"] = str(tags.get("ResolutionUnit", "none")).upper()
        found["tiff.XResolution"] = tags["XResolution"]
        found["tiff.YResolution"] = tags.get("YResolution", tags["XResolution"])
    found["tiffslide.series-index"] = 0
    found["tiffslide.series-axes"] = axes_of(layout)
    return found | dict(levels_of(layout, "tiffslide"))


def axes_of(layout: SlideLayout) -> str:
    """Return the axes of a slide's arrays in tifffile's letters."""
    if layout.rgb:
        return "YXS"
    return "CYX" if layout.levels[0].channels > 1 else "YX"


def _typed(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
