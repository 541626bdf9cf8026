"""What a viewer that shows slides does from then on: draw without waiting, let go in the end."""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

from napari_wsigpu.viewer.annotating import annotating
from napari_wsigpu.viewer.layers import slide_of, widen_limits
from napari_wsigpu.viewer.progressive import display_progressively, on_window_closed, stop_display
from napari_wsigpu.viewer.window import close_unsaved

if TYPE_CHECKING:
    from napari import Viewer
    from napari.layers import Layer

_watched: WeakSet[Viewer] = WeakSet()
_open: WeakSet[Viewer] = WeakSet()


def look_after_slides(viewer: Viewer) -> None:
    """Have a viewer draw slides without waiting, and let go of those that leave it.

    With the last layer of a slide its file, threads and tiles go. Calling this again for the same
    viewer changes nothing.
    """
    if viewer in _watched:
        return
    _watched.add(viewer)
    _open.add(viewer)
    display_progressively(viewer)
    annotating(viewer)
    viewer.layers.events.inserted.connect(_on_inserted)
    viewer.layers.events.removed.connect(_on_removed)
    weak = ref(viewer)

    def on_closed() -> None:
        closed = weak()
        if closed is not None:
            _open.discard(closed)
            for layer in closed.layers:
                _let_go(layer)

    on_window_closed(viewer, on_closed)


@atexit.register
def close_windows() -> None:
    """Close the windows with slides that are open when Python ends.

    PyQt would delete them while it walks through a table of all that Python knows of Qt. What
    their docks and canvas have Python do meanwhile changes that table, which ended the process by
    a segmentation fault in every other run. What was registered last runs first: before PyQt's.
    """
    for viewer in list(_open):
        close_unsaved(viewer)


def _on_inserted(event: Any) -> None:
    if slide_of(event.value) is not None:
        widen_limits(event.value)


def _on_removed(event: Any) -> None:
    _let_go(event.value)


def _let_go(layer: Layer) -> None:
    """Let go of what no viewer needs any more."""
    shown = [other for viewer in _open for other in viewer.layers]
    if all(other is not layer for other in shown):
        stop_display(layer)
    slide = slide_of(layer)
    if slide is not None and all(slide_of(other) is not slide for other in shown):
        slide.release()
