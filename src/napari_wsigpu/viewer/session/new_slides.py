"""Reaction to new slides: fit them, show a scale bar and open the inspector."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

from napari.utils.notifications import notification_manager

from napari_wsigpu.annotations import recovery
from napari_wsigpu.slide.facts import title
from napari_wsigpu.viewer.layers.slide_layers import shown_composite, slide_of
from napari_wsigpu.viewer.layers.stack_axes import show_plane
from napari_wsigpu.viewer.napari_internals import main_window
from napari_wsigpu.viewer.view.arrangement import (
    keep_view,
    raise_annotations,
    show_only,
    slides_of,
)
from napari_wsigpu.viewer.window.docks import (
    ANNOTATE,
    CHANNELS,
    SLIDES,
    is_known,
    open_dock,
    open_inspector,
    raise_dock,
)
from napari_wsigpu.viewer.window.main_window import (
    camera_view,
    fit_again,
    fit_to,
    keep_on_screen,
    keep_toasts_on_canvas,
    let_toasts_end,
    once_visible,
    soon,
)
from napari_wsigpu.viewer.window.notifications import show_info

if TYPE_CHECKING:
    from napari import Viewer
    from napari.layers import Layer
    from napari.utils.events import Event

    from napari_wsigpu.slide.slide import Slide
    from napari_wsigpu.viewer.window.main_window import CameraView

# Delay of scale bar and inspector, which take longer to show than a slide's first view.
COMPLETION_MS = 100

_new_slides: WeakKeyDictionary[Viewer, _NewSlides] = WeakKeyDictionary()


def show_new_slides(viewer: Viewer) -> None:
    """Fit each new slide to the canvas, and open the inspector with the first one.

    The slide is fitted again whenever the canvas changes its size, until the user moves the view.
    An inspector that the user closed is not opened again. Calling this again for the same viewer
    changes nothing.
    """
    if viewer not in _new_slides:
        _new_slides[viewer] = _NewSlides(viewer)
        notification_manager.notification_ready.connect(let_toasts_end, position="last")


def complete_view(viewer: Viewer) -> bool:
    """Add scale bar and inspector now if they are pending; return whether they were."""
    return viewer in _new_slides and _new_slides[viewer].complete_view()


class _NewSlides:
    """The slides that were last added to a viewer, and the view that was chosen for them."""

    def __init__(self, viewer: Viewer) -> None:
        self._viewer = ref(viewer)
        self._known: WeakSet[Slide] = WeakSet()
        self._slides: WeakSet[Slide] = WeakSet()
        self._view: CameraView | None = None
        self._active: ReferenceType[Layer] | None = None  # the active layer before new slides
        self._is_fitting = False
        self._is_incomplete = False
        self._inspector_was_offered = self._channels_were_offered = False
        self._has_scale_bar = False
        viewer.layers.events.inserted.connect(self._on_inserted)
        viewer.events.reset_view.connect(self._on_fitted)
        # Windows and docks get their final sizes a few iterations of the event loop later.
        viewer.canvas.events.size.connect(self._fit_soon)

    def _on_inserted(self, event: Event) -> None:
        viewer, slide = self._viewer(), slide_of(event.value)
        if viewer is None or slide is None or slide in self._known:
            return  # a layer was split, duplicated or added again
        window = main_window(viewer)
        if window is None or threading.current_thread() is not threading.main_thread():
            return
        self._known.add(slide)
        if not self._is_fitting:
            self._is_fitting = True
            self._slides.clear()
            self._view = camera_view(viewer)
            active = viewer.layers.selection.active
            self._active = None if active is None else ref(active)
            once_visible(window, self._show_new)
        if slide.planes.names and not self._has_planes(viewer, slide):
            show_plane(viewer, event.value, slide)
        self._slides.add(slide)

    def _on_fitted(self, event: Event) -> None:
        """Adopt the view that napari chose for the first layer: the user has not moved it."""
        viewer = self._viewer()
        if viewer is not None and self._is_fitting:
            self._view = camera_view(viewer)

    def _show_new(self) -> None:
        viewer = self._viewer()
        window = None if viewer is None else main_window(viewer)
        self._is_fitting = False
        if viewer is None or window is None:
            return
        keep_on_screen(window)
        raise_annotations(viewer, [*self._slides])
        self._show_first(viewer)
        self._is_incomplete = True
        soon(window, self.complete_view, COMPLETION_MS)
        self._fit_soon()

    def complete_view(self) -> bool:
        """Add scale bar and inspector if they are pending; return whether they were."""
        viewer = self._viewer()
        window = None if viewer is None else main_window(viewer)
        if viewer is None or window is None or not self._is_incomplete:
            return False
        self._is_incomplete = False
        if not self._has_scale_bar and any(slide.mpp for slide in self._slides):
            self._has_scale_bar = True  # only once: the user may hide it
            viewer.canvas.overlays.scale_bar.visible = True
        if not self._inspector_was_offered and self._layers(viewer):
            self._inspector_was_offered = open_inspector(viewer)
        composed = any(map(shown_composite, self._layers(viewer)))
        if composed and is_known() and not self._channels_were_offered:
            self._channels_were_offered = True
            open_dock(viewer, CHANNELS, behind=True)
        lost = [slide for slide in self._slides if recovery.orphans(slide.path)]
        if lost and is_known():
            raise_dock(viewer, ANNOTATE)  # it offers them for longer than a notification
        for slide in lost:
            show_info(f"Annotate can restore unsaved annotations of '{title(slide)}'.")
        return True

    def _show_first(self, viewer: Viewer) -> None:
        """If there are several slides, show only the first new one, and list them all in a dock."""
        slides = slides_of(viewer)
        new = [slide for slide in slides if slide in self._slides]
        if len(slides) > 1 and new:
            keep_view(viewer, new)
            active = self._active and self._active()
            if active in viewer.layers:  # its tool is kept, but napari has activated a new layer
                viewer.layers.selection.active = active
            show_only(viewer, new[0])
            self._view = camera_view(viewer)
            if is_known():
                open_dock(viewer, SLIDES, behind=True)

    def _fit_soon(self, event: Event | None = None) -> None:
        viewer = self._viewer()
        window = None if viewer is None else main_window(viewer)
        if window is not None:
            soon(window, self._fit)

    def _fit(self) -> None:
        """Fit the slides to the canvas, unless the user has moved the view."""
        viewer = self._viewer()
        window = None if viewer is None else main_window(viewer)
        if viewer is None or window is None:
            return
        keep_toasts_on_canvas(window)
        if fit_again(viewer):
            return
        if viewer.canvas.grid.enabled or self._view != camera_view(viewer):
            return
        layers = self._layers(viewer)
        if layers:
            fit_to(viewer, layers)
            self._view = camera_view(viewer)

    def _has_planes(self, viewer: Viewer, slide: Slide) -> bool:
        """Whether another layer has planes, so that the user may have chosen one."""
        return any(layer.ndim > 2 and slide_of(layer) is not slide for layer in viewer.layers)

    def _layers(self, viewer: Viewer) -> list[Layer]:
        return [layer for layer in viewer.layers if slide_of(layer) in self._slides]
