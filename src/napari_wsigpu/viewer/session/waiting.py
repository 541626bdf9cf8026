"""`wait`: block a script or screenshot until a layer is drawn exactly."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from napari.layers import Labels
from qtpy.QtWidgets import QApplication

from napari_wsigpu.model.errors import DisplayTimeoutError, LayerError
from napari_wsigpu.viewer.drawing.canvas import update_view
from napari_wsigpu.viewer.drawing.progressive import display_of
from napari_wsigpu.viewer.layers.slide_layers import slide_of
from napari_wsigpu.viewer.napari_internals import open_viewers
from napari_wsigpu.viewer.session.new_slides import complete_view

if TYPE_CHECKING:
    from napari import Viewer
    from napari.layers import Layer

PAUSE_SECONDS = 0.005


def wait(layer: Layer, timeout: float) -> None:
    """Process events until a layer's slice is exact; see `napari_wsigpu.wait`."""
    slide = slide_of(layer)
    if slide is None and not isinstance(layer, Labels):
        raise LayerError(
            f"The layer '{layer}' shows no slide; wait for a layer of a slide or of its labels."
        )
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("wait was called in another thread; call it in the main thread.")
    name = layer.name if slide is None else slide.path
    viewers = [viewer for viewer in open_viewers() if layer in viewer.layers]
    end = time.monotonic() + timeout
    while not _is_exact(layer, viewers):
        display = display_of(layer)
        if display is not None and display.error is not None:
            raise display.error
        if time.monotonic() >= end:
            raise DisplayTimeoutError(
                f"'{name}' was not drawn exactly within {timeout:g} s; "
                "increase the timeout, or show a smaller region."
            )
        QApplication.processEvents()
        time.sleep(PAUSE_SECONDS)


def _is_exact(layer: Layer, viewers: list[Viewer]) -> bool:
    """Whether a layer shows the current view exactly, or is not shown at all."""
    if not layer.visible or not viewers:
        return True
    if any(complete_view(viewer) for viewer in viewers):
        return False  # the new dock changes the size of the canvas
    for viewer in viewers:
        update_view(viewer)
    display = display_of(layer)
    return layer.loaded and (display is None or display.exact)
