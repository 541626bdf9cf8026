"""Associated images as layers: at the position that the file states, or next to the slide."""

from __future__ import annotations

from typing import TYPE_CHECKING

from napari.layers import Image

from napari_wsigpu.viewer.layers.placement import placement_of
from napari_wsigpu.viewer.layers.slide_layers import slide_name, slide_of
from napari_wsigpu.viewer.view.arrangement import ASSOCIATED, fit_slide

if TYPE_CHECKING:
    from napari import Viewer

    from napari_wsigpu.model.arrays import Array
    from napari_wsigpu.slide.slide import Slide

GAP = 0.05


def add_associated_image(viewer: Viewer, slide: Slide, name: str, pixels: Array) -> Image:
    """Add an associated image as a separate layer, and fit the view to it and the slide.

    If the file states which part of the glass the image covers, the layer is placed there, below
    the slide. Otherwise it is placed to the right of all layers and scaled to the slide's extent,
    in units of pixels: napari then shows no lengths in micrometers until the layer is removed.

    Parameters
    ----------
    viewer : Viewer
        The viewer that shows the slide.
    slide : Slide
        The slide that the image belongs to.
    name : str
        The image's name, such as "macro".
    pixels : ndarray, shape (height, width, channels)
        Gray, RGB or RGBA.
    """
    layers = [layer for layer in viewer.layers if slide_of(layer) is slide]
    frame = layers[0].extent.world[:, -2:]
    rgb = pixels.shape[2] in (3, 4)
    associated = next((item for item in slide.layout.associated if item.name == name), None)
    size = pixels.shape[1::-1]
    if associated is not None and associated.frame is not None:
        x, y, across, down = associated.frame
        step = across / size[0], down / size[1]
        place = {"units": layers[0].units[-2:]} | placement_of(slide).attributes(step, (x, y))
        index = min(viewer.layers.index(layer) for layer in layers)
    else:
        height, width = frame[1] - frame[0]
        scale = min(height / size[1], width / size[0])
        right = viewer.layers.extent.world[1, -1]
        place = {"scale": (scale, scale), "translate": (frame[0, 0], right + GAP * width)}
        index = len(viewer.layers)
    layer = Image(
        pixels if rgb else pixels[..., 0],
        name=f"{slide_name(slide)} {name}",
        rgb=rgb,
        metadata={ASSOCIATED: slide.path},
        **{"axis_labels": ("y", "x"), **place},
    )
    viewer.layers.insert(index, layer)
    fit_slide(viewer, slide)
    return layer
