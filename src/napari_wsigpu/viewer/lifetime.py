"""When the last layer of a slide leaves a viewer, its file, threads and tiles are let go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from napari_wsigpu.viewer.layers import slide_of

if TYPE_CHECKING:
    from napari import Viewer


def release_removed_slides(viewer: Viewer) -> None:
    """Watch a viewer's layers; calling it again for the same viewer changes nothing."""
    viewer.layers.events.removed.connect(_on_removed)


def _on_removed(event: Any) -> None:
    slide = slide_of(event.value)
    if slide is not None and all(slide_of(layer) is not slide for layer in event.source):
        slide.release()
