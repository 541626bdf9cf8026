"""Pictures that are no levels, laid where the file says, or beside their slide."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from napari.layers import Image

from napari_wsigpu.viewer.layers import slide_name, slide_of
from napari_wsigpu.viewer.place import place_of

if TYPE_CHECKING:
    from napari import Viewer
    from numpy.typing import NDArray

    from napari_wsigpu.slide.slide import Slide

GAP = 0.05


def add_beside(viewer: Viewer, slide: Slide, name: str, pixels: NDArray[Any]) -> Image:
    """Add an associated image as a layer of its own, and show both.

    It lies below the slide where the file says what it covers. If its scale is unknown, it is
    drawn as large as fits the slide's frame, right of all layers. Its units are the slide's:
    napari measures nothing where units differ.

    Parameters
    ----------
    viewer : Viewer
        The viewer that shows the slide.
    slide : Slide
        The slide that it belongs to.
    name : str
        The picture's name.
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
        place = place_of(slide).attributes(step, (x, y))
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
        **{"units": layers[0].units[-2:], "axis_labels": ("y", "x"), **place},
    )
    viewer.layers.insert(index, layer)
    viewer.reset_view()
    return layer
