"""Pictures that are no levels, laid beside their slide."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from napari_wsigpu.viewer.layers import slide_name, slide_of

if TYPE_CHECKING:
    from napari import Viewer
    from napari.layers import Image
    from numpy.typing import NDArray

    from napari_wsigpu.slide import Slide

GAP = 0.05


def add_beside(viewer: Viewer, slide: Slide, name: str, pixels: NDArray[Any]) -> Image:
    """Add a picture of unknown scale as a layer of its own, right of all others.

    It is drawn as large as fits the slide's frame, its units are pixels, and the view is moved so
    that both can be seen.

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
    frame = next(layer for layer in viewer.layers if slide_of(layer) is slide).extent.world[:, -2:]
    everything = viewer.layers.extent.world[:, -2:]
    height, width = frame[1] - frame[0]
    rgb = pixels.shape[2] in (3, 4)
    scale = min(height / pixels.shape[0], width / pixels.shape[1])
    layer = viewer.add_image(
        pixels if rgb else pixels[..., 0],
        name=f"{slide_name(slide)} {name}",
        rgb=rgb,
        scale=(scale, scale),
        translate=(frame[0, 0], everything[1, 1] + GAP * width),
        axis_labels=("y", "x"),
    )
    viewer.reset_view()
    return layer
