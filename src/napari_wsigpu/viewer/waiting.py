"""`wait`: for scripts and screenshots, until what is on screen is exact."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from napari.layers import Labels
from qtpy.QtWidgets import QApplication

from napari_wsigpu.model.errors import DisplayTimeoutError, LayerError
from napari_wsigpu.viewer.arrival import furnish
from napari_wsigpu.viewer.canvas import update_view
from napari_wsigpu.viewer.layers import slide_of
from napari_wsigpu.viewer.progressive import display_of, open_viewers

if TYPE_CHECKING:
    from napari import Viewer
    from napari.layers import Layer

PAUSE_SECONDS = 0.005


def wait(layer: Layer, timeout: float) -> None:
    """Handle the application's events until a layer's slice is exact; see `napari_wsigpu.wait`."""
    slide = slide_of(layer)
    if slide is None and not isinstance(layer, Labels):
        raise LayerError(
            f"The layer '{layer}' shows no slide; wait for a layer of a slide, or of its labels."
        )
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("wait can only be called in the main thread, which draws.")
    name = layer.name if slide is None else slide.path
    viewers = [viewer for viewer in open_viewers() if layer in viewer.layers]
    end = time.monotonic() + timeout
    while not _is_settled(layer, viewers):
        display = display_of(layer)
        if display is not None and display.error is not None:
            raise display.error
        if time.monotonic() >= end:
            raise DisplayTimeoutError(
                f"'{name}' was not drawn exactly within {timeout:g} s; "
                "wait longer, or look at a smaller region."
            )
        QApplication.processEvents()
        time.sleep(PAUSE_SECONDS)


def _is_settled(layer: Layer, viewers: list[Viewer]) -> bool:
    """Whether what a layer shows of the view as it is now is exact, or nothing is shown."""
    if not layer.visible or not viewers:
        return True
    if any(furnish(viewer) for viewer in viewers):
        return False  # a dock makes the canvas smaller
    for viewer in viewers:
        update_view(viewer)
    display = display_of(layer)
    return layer.loaded and (display is None or display.exact)
