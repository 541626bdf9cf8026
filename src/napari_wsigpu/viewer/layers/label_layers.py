"""Label images of a slide as napari's labels layers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from napari.utils.colormaps import CyclicLabelColormap, DirectLabelColormap, label_colormap

from napari_wsigpu.viewer.layers.placement import placement_of
from napari_wsigpu.viewer.layers.stack_axes import along_planes, stacked

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from napari_wsigpu.model.arrays import Array
    from napari_wsigpu.model.layout import LabelLayout
    from napari_wsigpu.reading.level import LevelArray
    from napari_wsigpu.reading.stack import StackLevel
    from napari_wsigpu.slide.slide import Slide
    from napari_wsigpu.viewer.layers.placement import Attributes

    Level = LevelArray | StackLevel
    LabelData = tuple[Sequence[Level] | Level | Array, Attributes, str]

# Labels of a single level are read into memory, up to this size in bytes, so that they can be
# painted on.
MOST_IN_MEMORY = 64 << 20
TRANSPARENT = "#00000000"
# Color of labels without a color in the file, if a `DirectLabelColormap` is needed.
UNNAMED = "#808080"
# Number of colors in napari's palette, and how often it repeats within 16-bit indices.
PALETTE, REPEATS = 49, 1337


def label_layers(slide: Slide, name: str, *, private: bool = False) -> list[LabelData]:
    """Return the data of a labels layer for each label image of a slide.

    Parameters
    ----------
    slide : Slide
        An open slide; the layers keep it open.
    name : str
        Name of the slide's layer, used as a prefix.
    private : bool
        Whether to include the names in the file and the properties of objects, which may identify
        a patient.

    Returns
    -------
    list of (levels, attributes, "labels")
        The data is the label image's `Slide.pyramid`, or the pixels of its only level. The
        attributes place them on the slide as the file states.
    """
    layers: list[LabelData] = []
    for number, label in enumerate(slide.layout.labels, 1):
        image = slide.labels[label.name]
        levels = [image.level_array(level.number, 0, tolerant=True) for level in image.pyramid]
        title = label.name if private else "labels" if number == 1 else f"labels {number}"
        attributes = _attributes(slide, label) | {"name": f"{name} {title}"}
        if label.properties:
            attributes["features"] = _features(label, private=private)
        data: Sequence[Level] = levels
        if slide.planes.names:
            data = stacked(slide, levels, partial(_level_of, label.name), 0)
            attributes = along_planes(slide.planes, attributes)
        if len(levels) > 1:
            layers.append((data, {"multiscale": True, **attributes}, "labels"))
        else:  # napari rejects a list of one level
            small = data[0].size * data[0].dtype.itemsize <= MOST_IN_MEMORY
            layers.append((np.asarray(data[0]) if small else data[0], attributes, "labels"))
    return layers


def _level_of(name: str, plane: Slide, shown: LevelArray) -> LevelArray:
    return plane.labels[name].level_array(shown.number, shown.channel, tolerant=True)


def _attributes(slide: Slide, label: LabelLayout) -> Attributes:
    attributes = placement_of(slide).attributes(label.step, label.offset)
    if label.colors:
        attributes["colormap"] = label_colors(label.colors)
    return attributes


def label_colors(colors: Mapping[int, str]) -> CyclicLabelColormap | DirectLabelColormap:
    """Return napari's cyclic colors, with the colors that the file gives to some labels."""
    cycle = np.resize(label_colormap(PALETTE).colors[1:], (PALETTE * REPEATS, 4))
    indices = {label: (label - 1) % len(cycle) for label in colors}
    if 0 in colors or len({*indices.values()}) < len(indices):
        # A cyclic colormap cannot color label 0, or give labels at the same index two colors.
        direct: dict[int | None, str] = {None: UNNAMED, 0: TRANSPARENT}
        direct.update(colors.items())
        return DirectLabelColormap(color_dict=direct)
    for label, index in indices.items():
        cycle[index] = np.frombuffer(bytes.fromhex(colors[label][1:]), np.uint8) / 255
    return CyclicLabelColormap(colors=np.vstack([np.zeros(4), cycle]))


def _features(label: LabelLayout, *, private: bool) -> dict[str, list[object]]:
    """Return the properties of objects by column; "index" holds their label values."""
    columns = {key for row in label.properties if private for key in row}
    columns -= {"label-value", "index"}
    return {"index": [row["label-value"] for row in label.properties]} | {
        key: [row.get(key) for row in label.properties] for key in sorted(columns)
    }
