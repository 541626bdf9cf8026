"""Labels layers to paint on, at the resolution of one level of a slide."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.model.errors import LevelError
from napari_wsigpu.viewer.annotations.annotation_layers import SLIDE, image_placement, layer_name

if TYPE_CHECKING:
    from napari import Viewer
    from napari.layers import Labels, Layer

    from napari_wsigpu.model.arrays import Array
    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.slide.slide import Slide
    from napari_wsigpu.viewer.layers.placement import Attributes

LEVEL = "level"
COMFORTABLE = 1 << 24  # pixels that napari paints without a noticeable delay
MOST = 1 << 29  # pixels


def best_level(slide: Slide) -> int:
    """Return the number of the finest level with at most `COMFORTABLE` pixels, or the coarsest."""
    fits = [level for level in slide.pyramid if _pixels(level.layout) <= COMFORTABLE]
    return (fits or [slide.pyramid[-1]])[0].number


def add_labels(
    viewer: Viewer,
    layer: Layer,
    slide: Slide,
    number: int,
    pixels: Array | None = None,
    name: str = "",
) -> Labels:
    """Add a labels layer above a slide, at the resolution of a level.

    Parameters
    ----------
    viewer, layer
        A viewer and one of its layers that shows the slide.
    slide : Slide
        The slide.
    number : int
        Number of the level in `Slide.pyramid`.
    pixels : ndarray, optional
        Object numbers, as large as the level; by default there is no object.
    name : str
        What the labels show; the layer's name also states the slide.

    Raises
    ------
    LevelError
        If labels of the level's size would take more than 1 GB.
    """
    image = next(level.layout for level in slide.pyramid if level.number == number)
    if _pixels(image) > MOST:
        raise LevelError(
            f"Labels of {image.width:,} x {image.height:,} pixels would take more than 1 GB; "
            "choose a coarser level."
        )
    downsample = image.downsample(slide.layout.levels[0])
    attributes: Attributes = image_placement(layer, (downsample, downsample)) | {
        "name": layer_name(slide, name, "labels"),
        "metadata": {SLIDE: slide.path, LEVEL: number},
    }
    if pixels is None:
        pixels = np.zeros((image.height, image.width), np.uint16)
    return viewer.add_labels(pixels, **attributes)


def _pixels(image: LevelLayout) -> int:
    return int(image.width * image.height)
