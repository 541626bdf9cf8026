"""A layer of labels that covers a slide at one of its levels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.model.errors import LevelError
from napari_wsigpu.viewer.annotations import SLIDE, flat_placement

if TYPE_CHECKING:
    from napari import Viewer
    from napari.layers import Labels, Layer

    from napari_wsigpu.slide.slide import Slide

LEVEL = "level"
COMFORTABLE = 1 << 24  # pixels that are painted without waiting
MOST = 1 << 29


def best_level(slide: Slide) -> int:
    """Return the number of the finest level that is comfortable to paint on."""
    fits = [level for level in slide.pyramid if _pixels(level.layout) <= COMFORTABLE]
    return (fits or [slide.pyramid[-1]])[0].number


def add_labels(viewer: Viewer, layer: Layer, slide: Slide, number: int) -> Labels:
    """Add an empty layer of labels over a slide, with the pixels of a level.

    Parameters
    ----------
    viewer, layer
        A viewer, and a layer of the slide in it.
    slide : Slide
        The slide.
    number : int
        Number of the level in `Slide.pyramid`.

    Raises
    ------
    LevelError
        If the level has more pixels than labels can be kept of.
    """
    image = next(level.layout for level in slide.pyramid if level.number == number)
    if _pixels(image) > MOST:
        raise LevelError(
            f"Labels of {image.width:,} x {image.height:,} pixels would take more than 1 GB; "
            "choose a coarser level."
        )
    downsample = image.downsample(slide.layout.levels[0])
    # napari has a layer's place at the centre of its first pixel.
    first = np.zeros(layer.ndim)
    first[-2:] = (downsample - 1) / 2
    place = layer.affine.inverse(layer.data_to_world(first))
    attributes: dict[str, Any] = flat_placement(layer) | {
        "name": "Labels",
        "scale": np.array(layer.scale)[-2:] * downsample,
        "translate": place[-2:],
        "metadata": {SLIDE: slide.path, LEVEL: number},
    }
    return viewer.add_labels(np.zeros((image.height, image.width), np.uint16), **attributes)


def _pixels(image: Any) -> int:
    return int(image.width * image.height)
