"""`Slide` in, napari layer data out."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from napari.layers import Image
from napari.utils import progress

from napari_wsigpu.model.appearance import channel_colors, shown_limits
from napari_wsigpu.model.errors import PlaneError
from napari_wsigpu.model.layout import Channel
from napari_wsigpu.model.privacy import Screen
from napari_wsigpu.reading.level import LevelArray
from napari_wsigpu.reading.stack import StackLevel
from napari_wsigpu.slide.slide import Slide
from napari_wsigpu.storage.remote.url import file_name
from napari_wsigpu.viewer.labels import label_layers
from napari_wsigpu.viewer.place import place_of
from napari_wsigpu.viewer.planes import along_planes, stacked
from napari_wsigpu.viewer.renderer import is_drawn_by_software

if TYPE_CHECKING:
    from napari.layers import Layer

    LayerData = tuple[Any, dict[str, Any], str]

# A plane without an overview that is read to find contrast limits has at most so many pixels.
QUICK_PIXELS = 1 << 24
RGB_TYPES = (np.uint8, np.uint16, np.float32)
RGB_CHANNELS = (
    Channel("red", "#ff0000"),
    Channel("green", "#00ff00"),
    Channel("blue", "#0000ff"),
    Channel("alpha"),
)
# Colours that napari has names for.
NAMES = {
    "#00ffff": "cyan",
    "#ff00ff": "magenta",
    "#ffff00": "yellow",
    "#00ff00": "green",
    "#ff0000": "red",
    "#0000ff": "blue",
    "#ffffff": "gray",
}


def slide_layers(slide: Slide, *, private: bool = False) -> list[LayerData]:
    """Return one multiscale RGB layer, or one layer a channel; and one a label image.

    Parameters
    ----------
    slide : Slide
        An open slide; the layers keep it.
    private : bool
        Whether the layers say what can name a patient: in their names, their metadata, which
        napari shows and saves, and in the features of label images.

    Returns
    -------
    list of (levels, attributes, "image" or "labels")
        The levels are those of `Slide.pyramid`, finest first: the slide's, others computed
        between those that are more than about twice as large as the next, and others below them,
        so that the coarsest is no larger than about 1000 pixels a side. ``layer.data[i].computed``
        says which the file lacks; ``layer.data[i].number`` is the index in `Slide.levels` where
        it is less than `Slide.level_count`.
    """
    _compute_overview(slide)
    screen = Screen(slide.metadata, slide.path)
    metadata = slide.metadata if private else screen.metadata
    name, common = slide_name(slide), _attributes(slide, metadata)
    labels = label_layers(slide, name, private=private)
    if slide.layout.rgb and slide.levels[0].dtype in RGB_TYPES:
        levels = _levels(slide)
        attributes = {"name": name, "rgb": True, "contrast_limits": _rgb_limits(levels[-1])}
        return [(levels, attributes | common, "image"), *labels]
    layers: list[LayerData] = []
    channels = slide.channels or RGB_CHANNELS[: slide.layout.levels[0].channels]
    several = len(channels) > 1
    colors = channel_colors(channels)
    for index, (channel, color) in enumerate(zip(channels, colors, strict=True)):
        levels = _levels(slide, index)
        said = channel.name if private else screen.text(channel.name)
        attributes = {
            "name": f"{name} {said}" if several else name,
            "rgb": False,
            "contrast_limits": channel.window or _contrast_limits(slide, levels[-1], color),
            "colormap": NAMES.get(color, color) if color else _gray(slide),
            "blending": "additive" if several else "translucent_no_depth",
            "visible": channel.visible,
            **common,
        }
        layers.append((levels, attributes, "image"))
    return layers + labels


def slide_name(slide: Slide) -> str:
    """Return the slide's file name without its suffix, as its layers are named."""
    return re.sub(r"(?i)(\.ome)?\.\w+$", "", file_name(slide.path))


def slide_of(layer: Layer | None) -> Slide | None:
    """Return the slide that a layer shows, or None; label images are no slides of their own."""
    return slide_of_data(_finest(layer))


def slide_of_data(data: Any) -> Slide | None:
    """Return the slide that a layer's finest level is of, or None."""
    image = image_of_data(data)
    return None if image is None or data.layout.categorical else image


def image_of(layer: Layer | None) -> Slide | None:
    """Return the slide or label image that a layer shows, or None."""
    return image_of_data(_finest(layer))


def image_of_data(data: Any) -> Slide | None:
    """Return the slide or label image that a layer's finest level is of, or None."""
    data = getattr(data, "__wrapped__", data)  # napari hands proxies to widgets of plugins
    shown = isinstance(data, LevelArray | StackLevel) and isinstance(data.slide, Slide)
    return data.slide if shown else None


def _finest(layer: Layer | None) -> Any:
    data: Any = getattr(layer, "data", None)
    return data[0] if getattr(layer, "multiscale", False) else data


def _levels(slide: Slide, channel: int | None = None) -> list[LevelArray] | list[StackLevel]:
    levels = [slide.level_array(level.number, channel, tolerant=True) for level in slide.pyramid]
    return stacked(slide, levels) if slide.planes.names else levels


def _attributes(slide: Slide, metadata: dict[str, Any]) -> dict[str, Any]:
    return {
        "multiscale": True,
        "metadata": metadata,
        # Between levels a slide is shown smaller than its pixels; the nearest ones would flicker.
        # A processor that has to draw, too, takes twice the time for a frame.
        "projection_mode": "none",  # by napari's own, planes become floating-point numbers
        "interpolation2d": "nearest" if is_drawn_by_software() else "linear",
        **along_planes(slide.planes, place_of(slide).attributes()),
    }


def widen_limits(layer: Layer) -> None:
    """Let a channel's contrast limits be moved over all values that its pixels can have."""
    dtype = np.dtype(layer.dtype)
    if isinstance(layer, Image) and not layer.rgb and dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        layer.contrast_limits_range = (float(bounds.min), float(bounds.max))


def _contrast_limits(
    slide: Slide, coarsest: LevelArray | StackLevel, color: str | None
) -> tuple[float, float]:
    if coarsest.dtype == np.uint8 and color is None:
        return 0, 255
    if isinstance(coarsest, LevelArray):
        return shown_limits(np.asarray(coarsest))
    found = []
    for plane in _sampled_planes(slide):
        with suppress(PlaneError):  # some slides lack some
            found.append(np.asarray(coarsest.level(plane)))
    return shown_limits(np.stack(found))


def _rgb_limits(coarsest: LevelArray | StackLevel) -> tuple[float, float]:
    """Return what is black and white of RGB: all that integers can be, or the range of floats."""
    if coarsest.dtype.kind == "u":
        return 0, float(np.iinfo(coarsest.dtype).max)
    values = np.asarray(coarsest)[..., :3]
    values = values[np.isfinite(values)]
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 1.0)
    return (low, high) if high > low else (min(low, 0.0), max(high, 1.0))


def _sampled_planes(slide: Slide) -> list[tuple[int, ...]]:
    """Return the plane that is shown, and where overviews are quickly had some others."""
    planes = slide.planes
    sizes = list(planes.sizes.values())
    shown = tuple({"z": planes.z, "t": planes.t}[name] for name in planes.names)
    base = slide.layout.levels[0]
    if slide.pyramid[-1].layout.computed and base.width * base.height > QUICK_PIXELS:
        return [shown]
    parts = (0.0, 0.5, 1.0)
    others = [tuple(round(part * (size - 1)) for size in sizes) for part in parts]
    return list(dict.fromkeys([shown, *others]))


def _gray(slide: Slide) -> str:
    return "gray_r" if slide.layout.levels[0].encoding.white_is_zero else "gray"


def _compute_overview(slide: Slide) -> None:
    """Compute the coarsest level, with a progress bar, where the file has none."""
    coarsest = slide.pyramid[-1]
    if not coarsest.layout.computed:
        return
    overview = slide.level_array(coarsest.number, tolerant=True)
    grid = coarsest.layout.grid
    rows, columns = grid.tile_height, grid.tile_width
    corners = [
        (y, x)
        for y in range(0, overview.shape[0], rows)
        for x in range(0, overview.shape[1], columns)
    ]
    for y, x in progress(corners, desc=f"Overview of {file_name(slide.path)}"):
        overview[y : y + rows, x : x + columns]
