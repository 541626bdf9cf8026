"""A DICOM segmentation as a napari layer of labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from napari_wsigpu.model.errors import AnnotationError
from napari_wsigpu.viewer.annotations.annotation_layers import (
    CLASS,
    NAME,
    SLIDE,
    image_placement,
    layer_name,
)
from napari_wsigpu.viewer.layers.label_layers import label_colors
from napari_wsigpu.viewer.layers.slide_layers import slide_of

if TYPE_CHECKING:
    from napari.layers import Layer

    from napari_wsigpu.annotations.dicom_segmentation import Segmentation
    from napari_wsigpu.viewer.annotations.annotation_layers import LayerData
    from napari_wsigpu.viewer.layers.placement import Attributes

LARGEST_SIDE = 4096  # pixels of a layer without coarser levels
MICROMETERS = 1000  # per millimeter


def segmentation_layer(found: Segmentation, name: str, slide_layer: Layer | None) -> LayerData:
    """Return the data of a layer of labels.

    Parameters
    ----------
    found : Segmentation
        The segmentation.
    name : str
        The file's name, for that of the layer.
    slide_layer : Layer, optional
        A layer of the slide to place it on: at its position on the glass if the slide is DICOM,
        else at the slide's corner.

    Returns
    -------
    (labels or levels, attributes, "labels")
        The features have the columns "index", "class", "name" and "color".

    Raises
    ------
    AnnotationError
        If it can't be placed on the slide.
    """
    colors = {
        number: "#{:02x}{:02x}{:02x}".format(*segment.color)
        for number, segment in found.segments.items()
        if segment.color is not None
    }
    segments = found.segments.items()
    attributes: Attributes = {
        "name": layer_name(slide_of(slide_layer), name, "segmentation"),
        "features": {
            "index": [number for number, _ in segments],
            CLASS: [segment.kind for _, segment in segments],
            NAME: [segment.name for _, segment in segments],
            "color": [colors.get(number, "") for number, _ in segments],
        },
        **_placement(found, slide_layer),
    }
    if colors:
        attributes["colormap"] = label_colors(
            {number: f"{color}ff" for number, color in colors.items()}
        )
    labels = found.labels
    if max(labels.shape) <= LARGEST_SIDE:
        return labels, attributes, "labels"
    levels = [labels]
    while max(levels[-1].shape) > LARGEST_SIDE // 4:
        levels.append(levels[-1][::2, ::2])  # a view of the same memory
    return levels, attributes | {"multiscale": True}, "labels"


def _placement(found: Segmentation, slide_layer: Layer | None) -> Attributes:
    size = (found.pixel_size[0] * MICROMETERS, found.pixel_size[1] * MICROMETERS)
    slide = slide_of(slide_layer)
    if slide_layer is None or slide is None:
        return {
            "scale": size[::-1],
            "units": ("micrometer", "micrometer"),
            "axis_labels": ("y", "x"),
        }
    if slide.vendor == "dicom":
        step, corner = found.place_on(slide.metadata["dicom"])
    elif slide.mpp is None:
        raise AnnotationError(
            f"The pixel size of '{slide.path}' is unknown, so the segmentation can't be placed on "
            "it; open the segmentation without the slide."
        )
    else:
        step, corner = (size[0] / slide.mpp[0], size[1] / slide.mpp[1]), (0.0, 0.0)
    return image_placement(slide_layer, step, corner) | {"metadata": {SLIDE: slide.path}}
