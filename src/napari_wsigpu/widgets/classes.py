"""Classes of annotations, and the colors that QuPath gives to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from napari.layers import Points
from napari.utils.colormaps.standardize_color import rgb_to_hex

from napari_wsigpu.viewer.annotations import CLASS, LIGHT

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from napari.layers import Shapes

# QuPath's own classes and their colors.
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
NONE = "#ff0000"


def classes_of(layers: Iterable[Shapes | Points]) -> dict[str, str]:
    """Return QuPath's classes and those of some layers, each with its color "#rrggbb".

    A class has the color of its first object, or QuPath's, or a new one.
    """
    found: dict[str, str] = {}
    for layer in layers:
        if CLASS not in layer.features:
            continue
        colors = layer.face_color if isinstance(layer, Points) else layer.edge_color
        stated = layer.features[CLASS]
        for index in np.flatnonzero(~stated.duplicated().to_numpy()):
            name = stated.iloc[index]
            if isinstance(name, str) and name and name not in found:
                found[name] = str(rgb_to_hex(colors[index])[0])[:7].lower()
    own = {name: color for name, color in found.items() if name not in USUAL}
    return {name: found.get(name, color) for name, color in USUAL.items()} | own


def new_color(known: Sequence[str]) -> str:
    """Return the color of a class that nobody has used yet, by the names of those that are."""
    return UNUSUAL[len([name for name in known if name not in USUAL]) % len(UNUSUAL)]


def classify(layer: Shapes | Points, rows: Iterable[int], name: str, color: str) -> None:
    """Give objects a class and its color, and those that are drawn from now on."""
    rows = sorted(rows)
    if rows:
        set_texts(layer, CLASS, rows, name)
    defaults = {each: layer.feature_defaults[each].iloc[0] for each in layer.feature_defaults}
    layer.feature_defaults = {**defaults, CLASS: name}
    before = set(layer.selected_data)
    if before != set(rows):
        layer.selected_data = set(rows)
    # Setting these recolors the selected objects, and the next one.
    if isinstance(layer, Points):
        layer.current_face_color = color
    else:
        layer.current_edge_color = color
        layer.current_face_color = f"{color}{LIGHT:02x}"
    if before != set(rows):
        layer.selected_data = before


def set_texts(layer: Shapes | Points, column: str, rows: Iterable[int], text: str) -> None:
    """Write a text into cells of a layer's table of features."""
    features = layer.features.copy()
    values: list[Any] = list(features[column]) if column in features else [""] * len(features)
    for row in rows:
        values[row] = text
    features[column] = values
    layer.features = features
