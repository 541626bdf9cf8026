"""Lifetime of slides in viewers: drawn progressively, and released with their last layer."""

from __future__ import annotations

import atexit
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakSet, ref

from napari_wsigpu.viewer.annotations.annotator import annotator_of
from napari_wsigpu.viewer.drawing.progressive import display_progressively, stop_display
from napari_wsigpu.viewer.layers.channel_values import show_channel_values
from napari_wsigpu.viewer.layers.slide_layers import shown_composite, slide_of, widen_limits
from napari_wsigpu.viewer.napari_internals import main_window
from napari_wsigpu.viewer.view.arrangement import (
    activate_shown,
    show_annotations,
    show_another,
    slides_of,
)
from napari_wsigpu.viewer.window.magnification_bar import add_magnification_bar
from napari_wsigpu.viewer.window.main_window import close_unsaved, soon
from napari_wsigpu.viewer.window.shortcuts import register_keys

if TYPE_CHECKING:
    from napari import Viewer
    from napari.layers import Layer
    from napari.utils.events import Event

_watched: WeakSet[Viewer] = WeakSet()
_open: WeakSet[Viewer] = WeakSet()


def manage_slides(viewer: Viewer) -> None:
    """Draw a viewer's slides progressively, and release each slide with its last layer.

    Releasing a slide closes its file, stops its threads and drops its tiles. Its annotations are
    hidden until the slide is opened again. Calling this again for the same viewer changes nothing.
    """
    if viewer in _watched:
        return
    _watched.add(viewer)
    _open.add(viewer)
    display_progressively(viewer)
    annotator_of(viewer)
    add_magnification_bar(viewer)
    register_keys()
    weak = ref(viewer)

    def on_inserted(event: Event) -> None:
        shown = weak()
        if shown is not None:
            _prepare(event.value, shown)

    def on_removed(event: Event) -> None:
        shown = weak()
        _release(event.value)
        if shown is not None:
            _react(event.value, shown)

    viewer.layers.events.inserted.connect(on_inserted)
    viewer.layers.events.removed.connect(on_removed)

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


def _prepare(layer: Layer, viewer: Viewer) -> None:
    """Prepare a new layer; the first layer of a slide shows the annotations that it left."""
    slide = slide_of(layer)
    if slide is not None:
        widen_limits(layer)
        paths = [each.path for each in map(slide_of, viewer.layers) if each is not None]
        if paths.count(slide.path) == 1:
            show_annotations(viewer, slide.path)
            annotator_of(viewer).adopt(layer)
    if shown_composite(layer) is not None:
        show_channel_values(layer)


def _react(removed: Layer, viewer: Viewer) -> None:
    """Hide a slide's annotations with its last layer; go on with a slide that is visible."""
    slide = slide_of(removed)
    then = activate_shown
    if slide is not None and all(each.path != slide.path for each in slides_of(viewer)):
        show_annotations(viewer, slide.path, visible=False)
        then = show_another
    window = main_window(viewer)
    if window is not None:
        # Wait until napari has removed all selected layers and chosen the next active one.
        soon(window, partial(then, viewer))


def _release(layer: Layer) -> None:
    """Stop a layer's display and release its slide, unless another open viewer shows them."""
    shown = [other for viewer in _open for other in viewer.layers]
    if all(other is not layer for other in shown):
        stop_display(layer)
    slide = slide_of(layer)
    if slide is not None and all(slide_of(other) is not slide for other in shown):
        slide.release()
