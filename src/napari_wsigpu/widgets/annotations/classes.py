"""Classes of annotations with QuPath's colors."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np
from napari.layers import Points
from napari.utils.colormaps.standardize_color import rgb_to_hex, transform_color

from napari_wsigpu.annotations import recovery
from napari_wsigpu.viewer.annotations.annotation_layers import (
    CLASS,
    LIGHT,
    colored_parts,
    rims,
    set_new_objects,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from napari.layers import Shapes

# QuPath's default classes and their colors.
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
UNUSUAL = (
    *("#00ffff", "#ff00ff", "#ffff00", "#00ff00", "#ff8000", "#0080ff"),
    *("#8000ff", "#ff0080", "#00ff80", "#80ff00", "#ff80c0", "#80c0ff"),
)
NONE = "#ff0000"  # color of objects without a class
COLOR = re.compile("#[0-9a-f]{6}")


def offered_classes() -> dict[str, str]:
    """Return the classes to offer: QuPath's, as far as the user has not changed them."""
    with suppress(OSError, ValueError):
        found = json.loads(_offered().read_text("utf-8"))
        if isinstance(found, dict):
            colors = {str(name): str(color) for name, color in found.items()}
            return {name: color for name, color in colors.items() if COLOR.fullmatch(color)}
    return dict(USUAL)


def keep_offered(classes: Mapping[str, str]) -> None:
    """Keep the classes to offer, with their colors "#rrggbb", for other sessions."""
    text = json.dumps(dict(classes))
    recovery.write_private(_offered(), lambda part: part.write_text(text, "utf-8"))


def _offered() -> Path:
    return recovery.folder() / "offered.json"


def classes_of(layers: Iterable[Shapes | Points], offered: Mapping[str, str]) -> dict[str, str]:
    """Return the offered classes and those of some layers, each with its color "#rrggbb".

    A class has the color of its first object, or else the color in which it is offered.
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
    return {**offered, **found}


def new_color(name: str, known: Mapping[str, str]) -> str:
    """Return a color for a new class, which depends on its name.

    Other names have other colors, also in other sessions, unless `UNUSUAL` has too few.
    """
    free = [color for color in UNUSUAL if color not in known.values()] or UNUSUAL
    return free[crc32(name.encode()) % len(free)]


def classify(layer: Shapes | Points, rows: Iterable[int], name: str, color: str) -> None:
    """Assign a class and its color to objects of a layer and to new ones."""
    rows = sorted(rows)
    if rows or CLASS not in layer.features:
        set_texts(layer, CLASS, rows, name)
    parts = colored_parts(layer)
    light = f"{color}{LIGHT:02x}" if "edge" in parts else color  # of the fill of an outline
    of_parts = {"face": transform_color(light), "edge": transform_color(color)}
    of_parts["border"] = rims(of_parts["edge"])
    new_colors = {part: of_parts[part][0] for part in parts}
    set_new_objects(layer, {CLASS: name}, new_colors)
    for part, new_color in new_colors.items() if rows else ():
        colors = np.array(getattr(layer, f"{part}_color"))
        colors[rows] = new_color
        setattr(layer, f"{part}_color", colors)


def reclassify(layer: Shapes | Points, rows: Iterable[int], name: str, color: str) -> None:
    """Assign a class and its color to objects of a layer; new ones keep their class."""
    defaults = layer.feature_defaults
    classify(layer, rows, name, color)
    layer.feature_defaults = defaults


def set_texts(layer: Shapes | Points, column: str, rows: Iterable[int], text: str) -> None:
    """Write `text` to the given rows of a column in a layer's features."""
    features = layer.features.copy()
    values: list[object] = list(features[column]) if column in features else [""] * len(features)
    for row in rows:
        values[row] = text
    features[column] = np.array(values, object)  # of no row, pandas would make numbers
    layer.features = features
