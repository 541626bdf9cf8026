"""What a viewer does for annotations: thin outlines, undo, and nothing that gets lost."""

from __future__ import annotations

import importlib
import sys
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import numpy as np
from napari.layers import Points, Shapes
from qtpy.QtCore import QEvent, QObject, QTimer
from qtpy.QtWidgets import QMessageBox

from napari_wsigpu.annotations import recovery
from napari_wsigpu.viewer.annotations import (
    FOR_EXPORT,
    SLIDE,
    annotation_layers_of,
    annotations_of,
    to_pixels,
)
from napari_wsigpu.viewer.history import History
from napari_wsigpu.viewer.layers import slide_of
from napari_wsigpu.viewer.navigation import screen_pixels
from napari_wsigpu.viewer.window import main_window

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from napari import Viewer
    from napari.layers import Layer
    from qtpy.QtWidgets import QMainWindow

    from napari_wsigpu.annotations import Annotation
    from napari_wsigpu.slide.slide import Slide

EDGE = 2  # pixels of the screen
SETTLED_MS = 100  # after which a change is one step to be undone
ZOOMED_MS = 150  # after which outlines get the width of another zoom
KEEP_MS = 5000  # after which unsaved annotations are kept on disk
LEAST_DRAG = 5  # pixels of the screen: less is a click that slipped
NEEDED = ("pandas", "scipy.linalg", "cffi.cparser", "napari._vispy.visuals.shapes")
DRAWN_BY_DRAGGING = ("add_rectangle", "add_ellipse", "add_line", "add_polygon_lasso")

_all: WeakKeyDictionary[Any, Annotating] = WeakKeyDictionary()


def annotating(viewer: Viewer) -> Annotating:
    """Return what looks after a viewer's annotations, from now on if nothing did."""
    viewer = getattr(viewer, "__wrapped__", viewer)  # napari hands proxies to docks
    if viewer not in _all:
        _all[viewer] = Annotating(viewer)
    return _all[viewer]


def is_looked_after(viewer: Viewer) -> bool:
    """Whether something looks after a viewer's annotations already."""
    return getattr(viewer, "__wrapped__", viewer) in _all


class Annotating:
    """Looks after the annotations of a viewer.

    Parameters
    ----------
    viewer : Viewer
        The viewer.
    """

    def __init__(self, viewer: Viewer) -> None:
        self._viewer = ref(viewer)
        self._histories: WeakKeyDictionary[Slide, History] = WeakKeyDictionary()
        self._touched: dict[int, Shapes | Points] = {}
        self._settled = _timer(SETTLED_MS, self._note)
        self._zoomed = _timer(ZOOMED_MS, self.fit_outlines)
        self._kept = _timer(KEEP_MS, self.keep)
        self._unkept: set[Slide] = set()
        self._guard: _Guard | None = None
        viewer.layers.events.inserted.connect(self._on_inserted)
        viewer.layers.events.removed.connect(self._on_removed)
        viewer.scene.camera.events.zoom.connect(self._on_zoom)
        for layer in viewer.layers:
            self._watch(layer)

    def close(self) -> None:
        """Look after nothing any more."""
        viewer = self._viewer()
        for timer in (self._settled, self._zoomed, self._kept):
            timer.stop()
        if viewer is not None:
            viewer.layers.events.inserted.disconnect(self._on_inserted)
            viewer.layers.events.removed.disconnect(self._on_removed)
            viewer.scene.camera.events.zoom.disconnect(self._on_zoom)
            _all.pop(viewer, None)

    def history(self, slide: Slide) -> History:
        """Return what can be undone on a slide."""
        return self._histories.setdefault(slide, History())

    def undo(self, slide: Slide, *, again: bool = False) -> bool:
        """Take back the last change on a slide, or make it again; whether there was one."""
        self._note()
        history = self.history(slide)
        done = history.redo() if again else history.undo()
        if done:
            self._keep_soon(slide)
            self.fit_outlines()
        return done

    def saved(self, slide: Slide) -> None:
        """Take note that a slide's annotations were saved."""
        self.history(slide).unsaved = False
        self._unkept.discard(slide)
        recovery.drop(slide.path)

    def unsaved(self) -> list[Slide]:
        """Return the slides whose annotations have changed since they were saved."""
        self._note()
        viewer = self._viewer()
        return [
            slide
            for slide, history in self._histories.items()
            if viewer is not None and history.unsaved and self.annotations(slide)
        ]

    def annotations(self, slide: Slide, others: Sequence[Layer] = ()) -> list[Annotation]:
        """Return what is drawn on a slide, and what other layers hold."""
        viewer = self._viewer()
        if viewer is None:
            return []
        slide_layer = next((each for each in viewer.layers if slide_of(each) is slide), None)
        found: list[Annotation] = []
        for layer in dict.fromkeys([*annotation_layers_of(viewer, slide), *others]):
            data = layer.as_layer_data_tuple()
            pixels_of = to_pixels(viewer, data[1], layer.ndim, slide_layer)
            found += annotations_of(data, pixels_of)
        return found

    def keep(self) -> None:
        """Keep what is not saved on disk, in another thread, in case that napari crashes."""
        for slide in self._unkept:
            work = partial(recovery.keep, slide.path, self.annotations(slide))
            threading.Thread(target=work, name="slide-annotations").start()
        self._unkept.clear()

    def fit_outlines(self) -> None:
        """Give all outlines the same width on screen, whatever the zoom."""
        viewer = self._viewer()
        for layer in () if viewer is None else viewer.layers:
            if isinstance(layer, Shapes) and {SLIDE, FOR_EXPORT} & layer.metadata.keys():
                width = outline_width(viewer, layer)
                if layer.current_edge_width != width:
                    with layer.block_update_properties():
                        layer.current_edge_width = width
                if any(each != width for each in layer.edge_width):
                    layer.edge_width = width
                    layer.events.edge_width()

    def _on_inserted(self, event: Any) -> None:
        self._watch(event.value)
        self._zoomed.start()

    def _watch(self, layer: Layer) -> None:
        viewer = self._viewer()
        if viewer is None or not isinstance(layer, Shapes | Points) or SLIDE not in layer.metadata:
            return
        slide = next((each for each in slides_with(viewer, layer)), None)
        if slide is None:
            return
        self.history(slide).watch(layer)
        touched = partial(self._touch, ref(layer))
        layer.events.data.connect(touched)
        layer.events.features.connect(touched)
        layer.mouse_drag_callbacks.append(drop_slips)
        window = main_window(viewer)
        if self._guard is None and window is not None:
            self._guard = _Guard(window, self)

    def _on_removed(self, event: Any) -> None:
        for history in self._histories.values():
            history.forget(event.value)

    def _on_zoom(self, event: Any) -> None:
        self._zoomed.start()

    def _touch(self, layer: ref[Any], event: Any) -> None:
        touched = layer()
        if touched is not None:
            self._touched[id(touched)] = touched
            self._settled.start()

    def _note(self) -> None:
        """Make one step of all that happened to each layer since the last."""
        viewer = self._viewer()
        if any(getattr(each, "_is_creating", False) for each in self._touched.values()):
            self._settled.start()  # somebody is still drawing
            return
        touched, self._touched = list(self._touched.values()), {}
        for layer in touched:
            for slide in () if viewer is None else slides_with(viewer, layer):
                if self.history(slide).note(layer):
                    self._keep_soon(slide)

    def _keep_soon(self, slide: Slide) -> None:
        self._unkept.add(slide)
        self._kept.start()


class _Guard(QObject):  # type: ignore[misc]
    """Asks before a window is closed that has unsaved annotations: by its button or its menu."""

    def __init__(self, window: QMainWindow, owner: Annotating) -> None:
        super().__init__(window)
        self._owner = owner
        window.installEventFilter(self)
        close = window.close

        def closed_by_menu(quit_app: bool = False, confirm_need: bool = False) -> Any:
            return None if confirm_need and self._stays(window) else close(quit_app, confirm_need)

        window.close = closed_by_menu

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:  # noqa: N802
        """Leave the window open if the user wants that."""
        if event.type() == QEvent.Close and event.spontaneous() and self._stays(watched):
            event.ignore()
            return True
        return False

    def _stays(self, window: Any) -> bool:
        slides = self._owner.unsaved()
        if slides and not ask_to_leave(window, len(slides)):
            return True
        for slide in slides:
            self._owner.saved(slide)  # nobody wants them
        return False


def ask_to_leave(window: Any, count: int) -> bool:
    """Ask whether a window is to be closed though the annotations of slides are not saved."""
    slides = "one slide" if count == 1 else f"{count} slides"
    text = f"The annotations of {slides} are not saved. Close the window without them?"
    answer = QMessageBox.warning(
        window, "Unsaved annotations", text, QMessageBox.Discard | QMessageBox.Cancel
    )
    return bool(answer == QMessageBox.Discard)


def preload() -> None:
    """Import what napari needs for its first shape, in another thread: it takes seconds."""
    names = [name for name in NEEDED if name not in sys.modules]
    if names:

        def work() -> None:
            for name in names:
                with suppress(ImportError):
                    importlib.import_module(name)

        threading.Thread(target=work, name="slide-preload", daemon=True).start()


def slides_with(viewer: Viewer, layer: Layer) -> list[Slide]:
    """Return the slides of a viewer that a layer's annotations lie on: one, or none."""
    slides = dict.fromkeys(slide_of(each) for each in viewer.layers)
    said = layer.metadata.get(SLIDE)
    return [slide for slide in slides if slide is not None and slide.path == said][:1]


def outline_width(viewer: Viewer, layer: Layer) -> float:
    """Return the width of outlines of a layer, in its own coordinates."""
    return EDGE / screen_pixels(viewer, layer)


def drop_slips(layer: Shapes, event: Any) -> Generator[None, None, None]:
    """Keep no shape that was drawn by moving the mouse a few pixels: it was a click."""
    if str(layer.mode) not in DRAWN_BY_DRAGGING:
        return
    positions, before = [event.pos], len(layer.data)
    yield
    while event.type == "mouse_move":
        positions.append(event.pos)
        yield
    if np.ptp(np.array(positions), axis=0).max() < LEAST_DRAG:
        QTimer.singleShot(0, partial(_remove_from, layer, before))  # napari has to finish it first


def _remove_from(layer: Shapes, first: int) -> None:
    layer._finish_drawing()  # an outline would go on without the button
    if len(layer.data) > first:
        layer.remove(list(range(first, len(layer.data))))


def _timer(interval_ms: int, react: Any) -> QTimer:
    timer = QTimer()
    timer.setSingleShot(True)
    timer.setInterval(interval_ms)
    timer.timeout.connect(react)
    return timer
