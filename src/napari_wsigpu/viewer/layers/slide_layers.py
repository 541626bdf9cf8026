"""Conversion of slides to the data of napari layers, and back from layers to their slides."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from napari.layers import Image, Points, Shapes
from napari.utils import progress

from napari_wsigpu.display.composite_source import CompositeView, source_of
from napari_wsigpu.model.appearance import WHITE, channel_colors, contrast_limits
from napari_wsigpu.model.channel_groups import default_groups
from napari_wsigpu.model.errors import PlaneError
from napari_wsigpu.model.layout import Channel
from napari_wsigpu.model.privacy import Screen
from napari_wsigpu.reading.level import LevelArray
from napari_wsigpu.reading.stack import StackLevel
from napari_wsigpu.slide.slide import Slide
from napari_wsigpu.storage.remote.url import file_name
from napari_wsigpu.viewer.layers.label_layers import label_layers
from napari_wsigpu.viewer.layers.placement import placement_of
from napari_wsigpu.viewer.layers.stack_axes import along_planes, stacked
from napari_wsigpu.viewer.napari_internals import open_viewers, unwrapped
from napari_wsigpu.viewer.window.renderer import is_drawn_by_software

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from napari.layers import Layer

    from napari_wsigpu.display.composite_source import CompositeLevel
    from napari_wsigpu.model.channel_groups import ChannelGroup
    from napari_wsigpu.model.composite import ChannelStyle, Composite
    from napari_wsigpu.viewer.layers.placement import Attributes

    LayerData = tuple[Any, Attributes, str]

# Planes with more pixels than this are not read just to compute contrast limits.
QUICK_PIXELS = 1 << 24
# Slides with more channels than this become one composite layer, which napari draws faster.
MOST_SEPARATE = 4
RGB_TYPES = (np.uint8, np.uint16, np.float32)
RGB_CHANNELS = (
    Channel("red", "#ff0000"),
    Channel("green", "#00ff00"),
    Channel("blue", "#0000ff"),
    Channel("alpha"),
)
# napari's names for colormaps, by color.
NAMES = {
    "#00ffff": "cyan",
    "#ff00ff": "magenta",
    "#ffff00": "yellow",
    "#00ff00": "green",
    "#ff0000": "red",
    "#0000ff": "blue",
}


def slide_layers(slide: Slide, *, private: bool = False) -> list[LayerData]:
    """Return the data of one RGB layer or one layer per channel, and one per label image.

    A slide with more than `MOST_SEPARATE` channels gets one RGB layer, a composite of them.

    Parameters
    ----------
    slide : Slide
        An open slide; the layers keep it open.
    private : bool
        Whether names, metadata (which napari shows and saves) and features of labels may include
        information that identifies a patient.

    Returns
    -------
    list of (levels, attributes, "image" or "labels")
        The levels of `Slide.pyramid`, finest first: the stored levels, and computed ones where two
        stored levels differ by more than about a factor of 2 or the coarsest is larger than about
        1000 pixels a side. ``layer.data[i].computed`` tells them apart; ``layer.data[i].number`` is
        an index into `Slide.levels` if it is less than `Slide.level_count`.
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
    if len(slide.channels) > MOST_SEPARATE:
        composed = _composite_levels(slide)
        return [(composed, {"name": name, "rgb": True} | common, "image"), *labels]
    separate = channel_layers(slide, range(slide.layout.levels[0].channels), private=private)
    return separate + labels


def channel_layers(
    slide: Slide,
    numbers: Iterable[int],
    styles: Sequence[ChannelStyle] = (),
    *,
    private: bool,
) -> list[LayerData]:
    """Return the data of a layer for each of some channels; see `slide_layers`.

    By default, the layers look as the file says, otherwise as the `styles` of all channels.
    """
    screen = Screen(slide.metadata, slide.path)
    common = _attributes(slide, slide.metadata if private else screen.metadata)
    layers: list[LayerData] = []
    channels = slide.channels or RGB_CHANNELS[: slide.layout.levels[0].channels]
    several, name = len(channels) > 1, slide_name(slide)
    colors = channel_colors(channels)
    for index in numbers:
        channel, color, levels = channels[index], colors[index], _levels(slide, index)
        channel_name = channel.name if private else screen.text(channel.name)
        attributes = {
            "name": f"{name} {channel_name}" if several else name,
            "rgb": False,
            "contrast_limits": channel.window or _contrast_limits(slide, levels[-1], color),
            "colormap": _colormap(slide, color, several=several),
            "blending": "additive" if several else "translucent_no_depth",
            "visible": channel.visible,
            **common,
        }
        if styles:
            style = styles[index]
            limits = style.window or attributes["contrast_limits"]  # unknown while they are read
            look = {"contrast_limits": limits, "gamma": style.gamma, "visible": True}
            attributes |= look | {"colormap": _colormap(slide, style.color, several=several)}
        layers.append((levels, attributes, "image"))
    return layers


def slide_name(slide: Slide) -> str:
    """Return the name of a slide's layers: its file name without the suffix."""
    return stem_of(slide.path)


def stem_of(path: str) -> str:
    """Return the file name of the slide at `path` without the suffix."""
    # A suffix has a letter; the last part of a DICOM UID does not.
    return re.sub(r"(?i)(\.ome)?\.\w*[a-z]\w*$", "", file_name(path))


def slide_of(layer: Layer | None) -> Slide | None:
    """Return the slide that a layer shows; None for other layers and label images."""
    return slide_of_data(_finest(layer))


def slide_of_data(data: object) -> Slide | None:
    """Return the slide of a layer's finest level; None for other arrays and label images."""
    image = image_of_data(data)
    return None if image is None or image.layout.levels[0].categorical else image


def image_of(layer: Layer | None) -> Slide | None:
    """Return the slide or label image that a layer shows, or None."""
    return image_of_data(_finest(layer))


def image_of_data(data: object) -> Slide | None:
    """Return the slide or label image of a layer's finest level, or None."""
    data = unwrapped(data)
    if isinstance(data, LevelArray | StackLevel) and isinstance(data.slide, Slide):
        return data.slide
    return None


def _finest(layer: Layer | None) -> object:
    # Each access to `Shapes.data` creates a list of all vertices.
    if isinstance(layer, Shapes | Points):
        return None
    # A script may pass an object without data to `wait`, which then raises a LayerError.
    if layer is None or not hasattr(layer, "data"):
        return None
    return layer.data[0] if getattr(layer, "multiscale", False) else layer.data


def _levels(slide: Slide, channel: int | None = None) -> list[LevelArray] | list[StackLevel]:
    levels = [slide.level_array(level.number, channel, tolerant=True) for level in slide.pyramid]
    return stacked(slide, levels) if slide.planes.names else levels


def _composite_levels(slide: Slide) -> Sequence[CompositeLevel | StackLevel]:
    view = CompositeView(slide.composite())
    levels = [slide.composite_level(level.number, view) for level in slide.pyramid]
    if not slide.planes.names:
        return levels
    blank = levels[0].source.background("stored")
    return stacked(
        slide, levels, lambda plane, level: plane.composite_level(level.number, view), blank
    )


def shown_composite(layer: Layer | None) -> Composite | None:
    """Return the composite that a layer shows; None for other layers."""
    source = source_of(_finest(layer))
    return None if source is None else source.view.settings


def show_composite(layer: Layer, settings: Composite) -> None:
    """Change the composite that a layer shows.

    Raises
    ------
    SlideError
        If a channel that becomes visible has no window, and can't be read to find one.
    """
    source, slide = source_of(_finest(layer)), slide_of(layer)
    if source is not None and slide is not None:
        source.view.settings = slide.composite(settings=settings)
        for each in {layer, *_sharing(source.view)}:
            each.refresh(thumbnail=False, highlight=False, extent=False)  # the thumbnail follows


def _sharing(view: CompositeView) -> list[Layer]:
    """Return the layers that show a composite, such as a layer and its duplicate."""
    layers = [layer for viewer in open_viewers() for layer in viewer.layers]
    sources = [source_of(_finest(layer)) for layer in layers]
    return [
        layer
        for layer, source in zip(layers, sources, strict=True)
        if source is not None and source.view is view
    ]


def channel_groups(layer: Layer) -> list[ChannelGroup]:
    """Return the groups of channels to choose from: the user's, or else the default groups."""
    source = source_of(_finest(layer))
    if source is None:
        return []
    view = source.view
    return view.groups or default_groups(view.settings, view.initial)


def add_channel_groups(layer: Layer, groups: Sequence[ChannelGroup]) -> int:
    """Add to the user's groups, replacing those of the same names; return the first's number."""
    source, names = source_of(_finest(layer)), {group.name for group in groups}
    assert source is not None
    kept = [group for group in source.view.groups if group.name not in names]
    source.view.groups, source.view.chosen = [*kept, *groups], len(kept)
    return len(kept)


def shown_groups(layer: Layer, composite: Composite) -> tuple[list[ChannelGroup], int | None]:
    """Return the groups to choose from, and the number of the one that a composite shows."""
    source, groups = source_of(_finest(layer)), channel_groups(layer)
    alike = [n for n, group in enumerate(groups) if group.numbers == [*composite.visible]]
    chosen = None if source is None else source.view.chosen
    return groups, chosen if chosen in alike else next(iter(alike), None)


def choose_group(layer: Layer, number: int, composite: Composite) -> Composite:
    """Return a composite that shows a group, and prefer it to groups of the same channels."""
    source = source_of(_finest(layer))
    if source is not None:
        source.view.chosen = number
    return channel_groups(layer)[number].shown(composite)


def show_next_group(layer: Layer) -> None:
    """Show the group after the one that a layer shows; the first one after the last.

    Raises
    ------
    SlideError
        As in `show_composite`.
    """
    composite = shown_composite(layer)
    if composite is not None:
        groups, shown = shown_groups(layer, composite)
        following = 0 if shown is None else (shown + 1) % len(groups)
        show_composite(layer, choose_group(layer, following, composite))
        for viewer in open_viewers():  # a key has been pressed, so the mouse may be over a slide
            viewer.cursor.events.position(value=viewer.cursor.position)  # renews the status bar


def _attributes(slide: Slide, metadata: Attributes) -> Attributes:
    return {
        "multiscale": True,
        "metadata": metadata,
        "projection_mode": "none",  # napari's default converts planes to float
        # Nearest-neighbor sampling flickers while zooming between levels, but linear sampling
        # doubles the time of a frame that the CPU draws.
        "interpolation2d": "nearest" if is_drawn_by_software() else "linear",
        **along_planes(slide.planes, placement_of(slide).attributes()),
    }


def widen_limits(layer: Layer) -> None:
    """Set the range of a channel's contrast sliders to all values of its data type."""
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
        return contrast_limits(np.asarray(coarsest))
    found = []
    for plane in _sampled_planes(slide):
        with suppress(PlaneError):  # a slide may lack planes
            found.append(np.asarray(coarsest.level(plane)))
    return contrast_limits(np.stack(found))


def _rgb_limits(coarsest: LevelArray | StackLevel) -> tuple[float, float]:
    """Return the limits of an RGB layer: the range of an integer type, or of the float values."""
    if coarsest.dtype.kind == "u":
        return 0, float(np.iinfo(coarsest.dtype).max)
    values = np.asarray(coarsest)[..., :3]
    values = values[np.isfinite(values)]
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 1.0)
    return (low, high) if high > low else (min(low, 0.0), max(high, 1.0))


def _sampled_planes(slide: Slide) -> list[tuple[int, ...]]:
    """Return the planes to compute contrast limits from: only one if reading more is slow."""
    planes = slide.planes
    sizes = list(planes.sizes.values())
    shown = tuple({"z": planes.z, "t": planes.t}[name] for name in planes.names)
    base = slide.layout.levels[0]
    if slide.pyramid[-1].layout.computed and base.width * base.height > QUICK_PIXELS:
        return [shown]
    parts = (0.0, 0.5, 1.0)
    others = [tuple(round(part * (size - 1)) for size in sizes) for part in parts]
    return list(dict.fromkeys([shown, *others]))


def _colormap(slide: Slide, color: str | None, *, several: bool) -> str:
    if color is not None and color != WHITE:
        return NAMES.get(color, color)
    # Channel layers are blended additively; inverted colormaps would add up to white.
    inverted = slide.layout.levels[0].encoding.white_is_zero and not several
    return "gray_r" if inverted else "gray"


def _compute_overview(slide: Slide) -> None:
    """Compute the coarsest level with a progress bar, if the file does not store it."""
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
