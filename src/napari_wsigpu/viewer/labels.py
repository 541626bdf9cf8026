"""Label images of a slide as napari's labels layers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from napari.utils.colormaps import CyclicLabelColormap, DirectLabelColormap, label_colormap

from napari_wsigpu.viewer.place import place_of
from napari_wsigpu.viewer.planes import along_planes, stacked

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from napari_wsigpu.model.layout import LabelLayout
    from napari_wsigpu.reading.level import LevelArray
    from napari_wsigpu.slide.slide import Slide

    LabelData = tuple[list[LevelArray] | NDArray[Any], dict[str, Any], str]

# Labels without a pyramid can be painted on, unless they are a stack that is larger.
MOST_IN_MEMORY = 64 << 20
TRANSPARENT = "#00000000"
# Of labels whose colour the file does not say, where napari can show no more than what it says.
UNNAMED = "#808080"
# napari's colours, as often as they fit into its 16 bits.
PALETTE, REPEATS = 49, 1337


def label_layers(slide: Slide, name: str, *, private: bool = False) -> list[LabelData]:
    """Return a labels layer for each label image of a slide.

    Parameters
    ----------
    slide : Slide
        An open slide; the layers keep it.
    name : str
        Name of the slide's layer, which the layers' names begin with.
    private : bool
        Whether the label images' own names and the properties of their objects are told; people
        write there what they like.

    Returns
    -------
    list of (levels, attributes, "labels")
        The levels are those of the label image's `Slide.pyramid`, or the pixels of its only one;
        they lie where the label image does on the slide.
    """
    layers: list[LabelData] = []
    for number, label in enumerate(slide.layout.labels, 1):
        image = slide.labels[label.name]
        levels = [image.level_array(level.number, 0, tolerant=True) for level in image.pyramid]
        title = label.name if private else "labels" if number == 1 else f"labels {number}"
        attributes = _attributes(slide, label) | {"name": f"{name} {title}"}
        if label.properties:
            attributes["features"] = _features(label, private=private)
        data: Any = levels
        if slide.planes.names:
            data = stacked(slide, levels, partial(_label_of, label.name))
            attributes = along_planes(slide.planes, attributes)
        if len(levels) > 1:
            layers.append((data, {"multiscale": True, **attributes}, "labels"))
        else:  # napari takes no list of one level
            small = data[0].size * data[0].dtype.itemsize <= MOST_IN_MEMORY
            layers.append((np.asarray(data[0]) if small else data[0], attributes, "labels"))
    return layers


def _label_of(name: str, plane: Slide) -> Slide:
    return plane.labels[name]


def _attributes(slide: Slide, label: LabelLayout) -> dict[str, Any]:
    attributes = place_of(slide).attributes(label.step, label.offset)
    if label.colors:
        attributes["colormap"] = _colormap(label.colors)
    return attributes


def _colormap(colors: Mapping[int, str]) -> CyclicLabelColormap | DirectLabelColormap:
    """Return napari's colours, in turn, but for some labels."""
    shown = np.resize(label_colormap(PALETTE).colors[1:], (PALETTE * REPEATS, 4))
    said = {label: (label - 1) % len(shown) for label in colors}
    if 0 in colors or len({*said.values()}) < len(said):
        # The background has no colour in turn, and labels that lie far apart have the same.
        direct: dict[int | None, str] = {None: UNNAMED, 0: TRANSPARENT}
        direct.update(colors.items())
        return DirectLabelColormap(color_dict=direct)
    for label, place in said.items():
        shown[place] = np.frombuffer(bytes.fromhex(colors[label][1:]), np.uint8) / 255
    return CyclicLabelColormap(colors=np.vstack([np.zeros(4), shown]))


def _features(label: LabelLayout, *, private: bool) -> dict[str, list[Any]]:
    """Return the properties of objects by column; "index" holds their numbers."""
    columns = {key for said in label.properties if private for key in said}
    columns -= {"label-value", "index"}
    return {"index": [said["label-value"] for said in label.properties]} | {
        key: [said.get(key) for said in label.properties] for key in sorted(columns)
    }
