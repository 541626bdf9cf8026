"""Names of shapes' classes, and the colours that QuPath gives to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.viewer.annotations import CLASS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from napari.layers import Shapes

# QuPath's own classes and their colours.
USUAL = {
    "Tumor": "#c80000",
    "Stroma": "#96c896",
    "Immune cells": "#a05aa0",
    "Necrosis": "#323232",
    "Other": "#ffc800",
    "Region*": "#0000b4",
    "Ignore*": "#b4b4b4",
    "Positive": "#fa3e3e",
    "Negative": "#7070e1",
}
UNUSUAL = ("#00ffff", "#ff00ff", "#ffff00", "#00ff00", "#ff8000", "#0080ff")


def classes_of(shapes: Shapes) -> list[str]:
    """Return the classes of a layer's shapes, each once."""
    if CLASS not in shapes.features:
        return []
    stated = dict.fromkeys(shapes.features[CLASS])
    return [name for name in stated if isinstance(name, str) and name]


def color_of(shapes: Shapes, name: str) -> Any:
    """Return the colour of a class: that of its first shape, or QuPath's, or a new one."""
    if CLASS in shapes.features:
        [found] = np.nonzero(np.asarray(shapes.features[CLASS] == name))
        if len(found):
            return shapes.edge_color[found[0]]
    others = [other for other in classes_of(shapes) if other not in USUAL]
    return USUAL.get(name, UNUSUAL[len(others) % len(UNUSUAL)])


def classify(shapes: Shapes, rows: Iterable[int], name: str) -> None:
    """Give shapes a class and its colour; without any, those that are drawn from now on."""
    rows = sorted(rows)
    color = color_of(shapes, name) if name else "#ff0000"
    set_texts(shapes, CLASS, rows, name)
    shapes.feature_defaults = {**_defaults(shapes), CLASS: name}
    before = set(shapes.selected_data)
    shapes.selected_data = set(rows)
    shapes.current_edge_color = color  # of the selected shapes, and of the next one
    shapes.selected_data = before


def set_texts(shapes: Shapes, column: str, rows: Iterable[int], text: str) -> None:
    """Write a text into cells of a layer's table of features."""
    features = shapes.features.copy()
    values = list(features[column]) if column in features else [""] * len(features)
    for row in rows:
        values[row] = text
    features[column] = values
    shapes.features = features


def _defaults(shapes: Shapes) -> dict[str, Any]:
    return {name: shapes.feature_defaults[name].iloc[0] for name in shapes.feature_defaults}
