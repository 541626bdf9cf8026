"""Commands that change a viewer's view; `napari.yaml` binds them to keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

# Needed at run time: napari passes the viewer to parameters of this type.
from napari import Viewer  # noqa: TC002

from napari_wsigpu.viewer.layers.slide_layers import show_next_group, shown_composite, slide_of
from napari_wsigpu.viewer.view.arrangement import active_slide, fit_slide, show_next
from napari_wsigpu.viewer.view.navigation import MAGNIFICATIONS
from napari_wsigpu.viewer.window.docks import INSPECTOR, toggle_dock
from napari_wsigpu.viewer.window.magnification_bar import magnify_slide

if TYPE_CHECKING:
    from collections.abc import Callable


def fit(viewer: Viewer) -> None:
    """Fit the active slide to the canvas."""
    slide = active_slide(viewer)
    if slide is not None:
        fit_slide(viewer, slide)


def _magnifier(number: int) -> Callable[[Viewer], None]:
    def magnify(viewer: Viewer) -> None:
        slide = active_slide(viewer)
        if slide is not None:
            magnify_slide(viewer, slide, number)

    return magnify


magnify_1, magnify_2, magnify_5, magnify_10, magnify_20, magnify_40 = map(
    _magnifier, MAGNIFICATIONS
)


def next_slide(viewer: Viewer) -> None:
    """Show only the slide after the active one."""
    show_next(viewer)


def previous_slide(viewer: Viewer) -> None:
    """Show only the slide before the active one."""
    show_next(viewer, -1)


def next_channels(viewer: Viewer) -> None:
    """Show the next group of channels of the active slide."""
    slide = active_slide(viewer)
    for layer in viewer.layers:
        if slide is not None and slide_of(layer) is slide and shown_composite(layer) is not None:
            show_next_group(layer)
            return  # duplicates of the layer share its composite


def toggle_inspector(viewer: Viewer) -> None:
    """Open the inspector, or hide it if it is in front."""
    toggle_dock(viewer, INSPECTOR)


def move_slide(viewer: Viewer) -> None:
    """Let the mouse move the view again instead of drawing."""
    active = viewer.layers.selection.active
    if active is not None:
        active.mode = "pan_zoom"
