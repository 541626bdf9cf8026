"""Several slides in one viewer: one alone, all, or side by side under linked cameras."""

from __future__ import annotations

from typing import TYPE_CHECKING

from napari_wsigpu.model.errors import LayerError
from napari_wsigpu.viewer.annotations import SLIDE
from napari_wsigpu.viewer.layers import slide_of
from napari_wsigpu.viewer.window import fit_to

if TYPE_CHECKING:
    from napari import Viewer
    from napari.layers import Layer

    from napari_wsigpu.slide.slide import Slide


def slides_of(viewer: Viewer) -> list[Slide]:
    """Return the slides that a viewer holds, in the order of its layers."""
    found = (slide_of(layer) for layer in viewer.layers)
    return list(dict.fromkeys(slide for slide in found if slide is not None))


def layers_of(viewer: Viewer, slide: Slide) -> list[Layer]:
    """Return a slide's layers."""
    return [layer for layer in viewer.layers if slide_of(layer) is slide]


def show_only(viewer: Viewer, slide: Slide) -> None:
    """Show a slide with its annotations, hide those of all others, and fit it to the canvas."""
    viewer.canvas.grid.enabled = False
    paths = {each.path for each in slides_of(viewer)}
    for layer in viewer.layers:
        shown = slide_of(layer)
        path = layer.metadata.get(SLIDE) if shown is None else shown.path
        if path in paths:
            layer.visible = path == slide.path if shown is None else shown is slide
    layers = layers_of(viewer, slide)
    viewer.layers.selection.active = layers[-1]
    fit_to(viewer, layers)


def show_all(viewer: Viewer) -> None:
    """Show the layers of all slides, each in its place."""
    viewer.canvas.grid.enabled = False
    _reveal(viewer)
    for layer in viewer.layers:
        layer.visible = layer.visible or SLIDE in layer.metadata
    viewer.fit_to_view()


def show_side_by_side(viewer: Viewer) -> None:
    """Show each slide in a part of the canvas of its own; all are moved and zoomed together.

    Raises
    ------
    LayerError
        If slides have different numbers of layers, or layers of other things lie between:
        napari's grid has the same number of layers in each part.
    """
    slides = slides_of(viewer)
    groups = [layers_of(viewer, slide) for slide in slides]
    count = len(groups[0])
    others = [layer for layer in viewer.layers if slide_of(layer) is None and layer.visible]
    if others:
        raise LayerError(
            f"The layer '{others[0].name}' is of no slide; hide such layers to see slides side by "
            "side."
        )
    if any(len(group) != count for group in groups):
        raise LayerError(
            "The slides have different numbers of channels; slides can be seen side by side only "
            "if they have as many."
        )
    # A slide's layers have to follow each other; hidden layers of other things come last.
    order = [layer for group in groups for layer in group]
    rest = [layer for layer in viewer.layers if layer not in order]
    for index, layer in enumerate([*order, *rest]):
        viewer.layers.move(viewer.layers.index(layer), index)
    _reveal(viewer)
    grid = viewer.canvas.grid
    grid.stride, grid.shape = count, (-1, -1)
    grid.enabled = True
    viewer.fit_to_view()


def _reveal(viewer: Viewer) -> None:
    for slide in slides_of(viewer):
        layers = layers_of(viewer, slide)
        if not any(layer.visible for layer in layers):
            for layer in layers:
                layer.visible = True
