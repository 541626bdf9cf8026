"""Lifetime of slides in viewers: drawn progressively, and released with their last layer."""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING
from weakref import WeakSet, ref

from napari_wsigpu.viewer.annotations.annotator import annotator_of
from napari_wsigpu.viewer.drawing.progressive import display_progressively, stop_display
from napari_wsigpu.viewer.layers.channel_values import show_channel_values
from napari_wsigpu.viewer.layers.slide_layers import shown_composite, slide_of, widen_limits
from napari_wsigpu.viewer.napari_internals import main_window
from napari_wsigpu.viewer.window.magnification_bar import add_magnification_bar
from napari_wsigpu.viewer.window.main_window import close_unsaved
from napari_wsigpu.viewer.window.shortcuts import register_keys

if TYPE_CHECKING:
    from napari import Viewer
    from napari.layers import Layer
    from napari.utils.events import Event

_watched: WeakSet[Viewer] = WeakSet()
_open: WeakSet[Viewer] = WeakSet()


def manage_slides(viewer: Viewer) -> None:
    """Draw a viewer's slides progressively, and release each slide with its last layer.

    Releasing a slide closes its file, stops its threads and drops its tiles. Calling this again
    for the same viewer changes nothing.
    """
    if viewer in _watched:
        return
    _watched.add(viewer)
    _open.add(viewer)
    display_progressively(viewer)
    annotator_of(viewer)
    add_magnification_bar(viewer)
    register_keys()
    viewer.layers.events.inserted.connect(_on_inserted)
    viewer.layers.events.removed.connect(_on_removed)
    weak = ref(viewer)

    def on_closed() -> None:
        closed = weak()
        if closed is not None:
            _open.discard(closed)
            for layer in closed.layers:
                _release(layer)

    window = main_window(viewer)
    if window is not None:
        window.destroyed.connect(on_closed)


@atexit.register
def close_windows() -> None:
    """Close the windows that still show slides when Python exits.

    Otherwise, PyQt deletes them while it iterates over its table of wrapped objects. Callbacks of
    docks and canvas change that table, which crashed every other run. This handler runs before
    PyQt's, as `atexit` runs the last registered handler first.
    """
    for viewer in list(_open):
        close_unsaved(viewer)


def _on_inserted(event: Event) -> None:
    if slide_of(event.value) is not None:
        widen_limits(event.value)
    if shown_composite(event.value) is not None:
        show_channel_values(event.value)


def _on_removed(event: Event) -> None:
    _release(event.value)


def _release(layer: Layer) -> None:
    """Stop a layer's display and release its slide, unless another open viewer shows them."""
    shown = [other for viewer in _open for other in viewer.layers]
    if all(other is not layer for other in shown):
        stop_display(layer)
    slide = slide_of(layer)
    if slide is not None and all(slide_of(other) is not slide for other in shown):
        slide.release()
