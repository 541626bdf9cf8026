"""Channel values in the status bar, for layers that show a composite."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np

from napari_wsigpu.display.composite_source import source_of
from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.model.privacy import Screen
from napari_wsigpu.reading.stack import StackLevel
from napari_wsigpu.viewer.layers.slide_layers import slide_of
from napari_wsigpu.viewer.window.settings import settings

if TYPE_CHECKING:
    from napari.layers import Layer


def show_channel_values(layer: Layer) -> None:
    """Make a layer's status show the values of its visible channels instead of RGB."""
    weak, get_status = ref(layer), type(layer).get_status

    def status(*arguments: Any, **options: Any) -> dict[str, str]:
        shown = weak()
        assert shown is not None  # napari has just called its method
        found: dict[str, str] = get_status(shown, *arguments, **options)
        position = arguments[0] if arguments else options.get("position")
        if position is not None:
            values = _values(shown, np.asarray(position), world=options.get("world", False))
            if values:
                found["value"] = values
                found["coordinates"] = f"{found['coords']}: {values}"
        return found

    layer.get_status = status


def _values(layer: Layer, position: np.ndarray[Any, Any], *, world: bool) -> str:
    """Return the names and values at a position as text; empty if there are none."""
    level, slide = layer.data[layer.data_level], slide_of(layer)
    source = source_of(level)
    if source is None or slide is None:
        return ""
    height, width = layer.data[0].shape[-3:-1]
    rows, columns = level.shape[-3:-1]
    y, x = (layer.world_to_data(position) if world else position)[-2:]
    # Centers of pixels have integer coordinates.
    row = math.floor((y + 0.5) * rows / height)
    column = math.floor((x + 0.5) * columns / width)
    if not (0 <= row < rows and 0 <= column < columns):
        return ""
    number = (level.shown if isinstance(level, StackLevel) else level).number
    try:
        values = source.values(number, row, column)
    except SlideError:  # the status is computed in a thread; the slide may just have been closed
        return ""
    screen = None if settings().show_private else Screen(slide.metadata, slide.path)
    names = (name if screen is None else screen.text(name) for name, _ in values)
    return "  ".join(f"{name} {value:g}" for name, (_, value) in zip(names, values, strict=True))
