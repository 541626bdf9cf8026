"""What a viewer does when a slide has come: fit it, show a scale bar, open the inspector."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet, ref

from napari.utils.notifications import notification_manager

from napari_wsigpu.viewer.dock import SLIDES, is_known, open_dock, open_inspector
from napari_wsigpu.viewer.layers import slide_of
from napari_wsigpu.viewer.planes import show_plane
from napari_wsigpu.viewer.together import show_only, slides_of
from napari_wsigpu.viewer.window import (
    fit_to,
    keep_on_screen,
    keep_toasts_on_canvas,
    let_toasts_end,
    main_window,
    once_visible,
    soon,
)

if TYPE_CHECKING:
    from napari import Viewer

    from napari_wsigpu.slide.slide import Slide

# A scale bar and a dock take longer than a slide's first view: they follow it.
FURNISHING_MS = 100

_arrivals: WeakKeyDictionary[Viewer, _Arrivals] = WeakKeyDictionary()


def welcome_slides(viewer: Viewer) -> None:
    """Have a viewer show each new slide whole, and open the inspector with the first one.

    It stays whole, whatever size the canvas gets, until somebody moves the view; who closes the
    inspector will not be bothered again. Calling this again for the same viewer changes nothing.
    """
    if viewer not in _arrivals:
        _arrivals[viewer] = _Arrivals(viewer)
        notification_manager.notification_ready.connect(let_toasts_end, position="last")


def furnish(viewer: Viewer) -> bool:
    """Add now what was to follow the first view of a viewer's slides; whether there was any."""
    return viewer in _arrivals and _arrivals[viewer].furnish()


class _Arrivals:
    """The slides that came last, and the view that was chosen for them."""

    def __init__(self, viewer: Viewer) -> None:
        self._viewer = ref(viewer)
        self._known: WeakSet[Slide] = WeakSet()
        self._slides: WeakSet[Slide] = WeakSet()
        self._view: Any = None
        self._settling = False
        self._is_bare = False
        self._inspector_had_its_turn = False
        self._has_scale_bar = False
        viewer.layers.events.inserted.connect(self._on_inserted)
        viewer.events.reset_view.connect(self._on_fitted)
        # Windows and docks find their sizes later than one would know.
        viewer.canvas.events.size.connect(self._fit_soon)

    def _on_inserted(self, event: Any) -> None:
        viewer, slide = self._viewer(), slide_of(event.value)
        if viewer is None or slide is None or slide in self._known:
            return  # layers are split, doubled and put back, too
        window = main_window(viewer)
        if window is None or threading.current_thread() is not threading.main_thread():
            return
        self._known.add(slide)
        if not self._settling:
            self._settling = True
            self._slides.clear()
            self._view = _view(viewer)
            once_visible(window, self._settle)
        if slide.planes.names and not self._has_planes(viewer, slide):
            show_plane(viewer, event.value, slide)
        self._slides.add(slide)

    def _on_fitted(self, event: Any) -> None:
        """Take a fit for no choice of the user: napari fits the first layer by itself."""
        viewer = self._viewer()
        if viewer is not None and self._settling:
            self._view = _view(viewer)

    def _settle(self) -> None:
        viewer = self._viewer()
        window = None if viewer is None else main_window(viewer)
        self._settling = False
        if viewer is None or window is None:
            return
        keep_on_screen(window)
        self._show_first(viewer)
        self._is_bare = True
        soon(window, self.furnish, FURNISHING_MS)
        self._fit_soon()

    def furnish(self) -> bool:
        """Add scale bar and inspector, unless that was done or the slides have yet to settle."""
        viewer = self._viewer()
        window = None if viewer is None else main_window(viewer)
        if viewer is None or window is None or not self._is_bare:
            return False
        self._is_bare = False
        if not self._has_scale_bar and any(slide.mpp for slide in self._slides):
            self._has_scale_bar = True  # once: who hides it means it
            viewer.canvas.overlays.scale_bar.visible = True
        if not self._inspector_had_its_turn and self._layers(viewer):
            self._inspector_had_its_turn = open_inspector(viewer)
        return True

    def _show_first(self, viewer: Viewer) -> None:
        """Show the first of the slides that came alone, where there are several; list them all."""
        slides = slides_of(viewer)
        new = [slide for slide in slides if slide in self._slides]
        if len(slides) > 1 and new:
            show_only(viewer, new[0])
            self._view = _view(viewer)
            if is_known():
                open_dock(viewer, SLIDES, behind=True)

    def _fit_soon(self, event: Any = None) -> None:
        viewer = self._viewer()
        window = None if viewer is None else main_window(viewer)
        if window is not None:
            soon(window, self._fit)

    def _fit(self) -> None:
        """Fit the slides to the canvas, unless somebody has moved the view."""
        viewer = self._viewer()
        window = None if viewer is None else main_window(viewer)
        if viewer is None or window is None:
            return
        keep_toasts_on_canvas(window)
        if viewer.canvas.grid.enabled or self._view != _view(viewer):
            return
        layers = self._layers(viewer)
        if layers:
            fit_to(viewer, layers)
            self._view = _view(viewer)

    def _has_planes(self, viewer: Viewer, slide: Slide) -> bool:
        """Whether another layer has planes, of which the user may have chosen one."""
        return any(layer.ndim > 2 and slide_of(layer) is not slide for layer in viewer.layers)

    def _layers(self, viewer: Viewer) -> list[Any]:
        return [layer for layer in viewer.layers if slide_of(layer) in self._slides]


def _view(viewer: Viewer) -> Any:
    camera = viewer.scene.camera
    return tuple(camera.center), camera.zoom, tuple(camera.angles)
