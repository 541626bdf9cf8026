"""Metadata of a slide as tiffslide names it: one flat mapping, of numbers where they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from napari_wsigpu.compat.openslide.properties import bounds_of, flat
from napari_wsigpu.compat.shared import mpp_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from napari_wsigpu.model.layout import SlideLayout

PROPERTY_NAME_COMMENT = "tiffslide.comment"
PROPERTY_NAME_VENDOR = "tiffslide.vendor"
PROPERTY_NAME_QUICKHASH1 = "tiffslide.quickhash-1"
PROPERTY_NAME_BACKGROUND_COLOR = "tiffslide.background-color"
PROPERTY_NAME_OBJECTIVE_POWER = "tiffslide.objective-power"
PROPERTY_NAME_MPP_X = "tiffslide.mpp-x"
PROPERTY_NAME_MPP_Y = "tiffslide.mpp-y"
PROPERTY_NAME_BOUNDS_X = "tiffslide.bounds-x"
PROPERTY_NAME_BOUNDS_Y = "tiffslide.bounds-y"
PROPERTY_NAME_BOUNDS_WIDTH = "tiffslide.bounds-width"
PROPERTY_NAME_BOUNDS_HEIGHT = "tiffslide.bounds-height"

AXES = "tiffslide.series-axes"
# Vendors whose image description is the comment.
COMMENTING_VENDORS = ("aperio", "leica")


def tiffslide_properties(layout: SlideLayout) -> dict[str, Any]:
    """Return what tiffslide says of a slide, by its names; None is what the file doesn't say."""
    tags = dict(layout.metadata.get("tiff", {}))
    description = tags.get("ImageDescription", "")
    comments = layout.vendor in COMMENTING_VENDORS
    mpp_x, mpp_y = mpp_of(layout) or (None, None)
    found: dict[str, Any] = {
        PROPERTY_NAME_COMMENT: description if comments else None,
        PROPERTY_NAME_VENDOR: None if layout.vendor == "generic-tiff" else layout.vendor,
        PROPERTY_NAME_QUICKHASH1: None,
        PROPERTY_NAME_BACKGROUND_COLOR: None,
        PROPERTY_NAME_OBJECTIVE_POWER: layout.objective,
        PROPERTY_NAME_MPP_X: mpp_x,
        PROPERTY_NAME_MPP_Y: mpp_y,
    }
    bounds = bounds_of(layout)
    found |= {
        PROPERTY_NAME_BOUNDS_X: bounds and bounds.left,
        PROPERTY_NAME_BOUNDS_Y: bounds and bounds.top,
        PROPERTY_NAME_BOUNDS_WIDTH: bounds and bounds.width,
        PROPERTY_NAME_BOUNDS_HEIGHT: bounds and bounds.height,
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
    found[AXES] = axes_of(layout)
    return found | dict(_levels(layout))


def axes_of(layout: SlideLayout) -> str:
    """Return the axes of the arrays of a slide, by tifffile's letters."""
    if layout.rgb:
        return "YXS"
    return "CYX" if layout.levels[0].channels > 1 else "YX"


def _levels(layout: SlideLayout) -> Iterator[tuple[str, Any]]:
    for number, (level, downsample) in enumerate(
        zip(layout.levels, layout.downsamples, strict=True)
    ):
        name = f"tiffslide.level[{number}]"
        yield f"{name}.downsample", downsample
        yield f"{name}.height", level.height
        yield f"{name}.width", level.width
        if not level.parts:
            yield f"{name}.tile-height", level.grid.tile_height
            yield f"{name}.tile-width", level.grid.tile_width


def _typed(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
