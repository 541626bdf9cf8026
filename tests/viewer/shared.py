"""One viewer for many tests: emptied after each, which fails the test that leaves something."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import napari
import numpy as np
import pytest
from app_model import Application
from napari._qt._qapp_model.qactions import init_qactions
from napari._qt.dialogs.qt_notification import NapariQtNotification
from napari._qt.qt_viewer import QtViewer
from napari.plugins import _initialize_plugins
from pydantic import BaseModel
from qtpy.QtCore import QEvent, Qt, QTimer
from qtpy.QtTest import QTest
from qtpy.QtWidgets import QApplication, QWidget

from napari_wsigpu.viewer.annotations.annotator import annotator_of
from napari_wsigpu.viewer.session import new_slides as arrival
from napari_wsigpu.viewer.session.lifetime import manage_slides
from napari_wsigpu.widgets.dock.slide_dock import SlideDock

SIZE = 700, 450  # small: software draws each pixel
PROGRESS_BARS = "napari._qt.dialogs.qt_activity_dialog.QtActivityDialog.handle_progress_change"
PARTS = ("scene", "canvas", "dims", "tooltip", "theme", "title", "help")


class SharedViewer:
    """A viewer that is opened when it is first asked for, and again after it was closed."""

    def __init__(self) -> None:
        self._viewer: napari.Viewer | None = None
        self._patch = pytest.MonkeyPatch()

    def open(self) -> napari.Viewer:
        """Return the viewer, with nothing in it."""
        if self._viewer is None:
            self._patch.setattr("napari._qt.threads.status_checker.StatusChecker.start", _nothing)
            self._patch.setattr("napari._qt.qt_viewer.QtViewer._get_console", _no_console)
            # napari 0.10 has no such constant any more.
            warning = "napari._qt.qt_main_window.SHOW_QT_WARNING"
            self._patch.setattr(warning, False, raising=False)
            self._patch.setattr(PROGRESS_BARS, _let_events_pass)
            self._viewer = viewer = make_viewer()
            window = viewer.window._qt_window
            manage_slides(viewer)
            self._values = {part: values_of(getattr(viewer, part)) for part in PARTS}
            self._listeners = listeners(viewer)
            self._size, self._layout = window.size(), window.saveState()
            gc.collect()
            gc.freeze()  # napari collects garbage whenever a layer goes
        return self._viewer

    def empty(self) -> None:
        """Take everything out of the viewer; say what of it can't be."""
        viewer = self._viewer
        if viewer is None:
            return
        if viewer not in napari.Viewer._instances:
            self.close()
            return
        window = viewer.window._qt_window
        annotator_of(viewer)._histories.clear()  # nothing is to be undone in the next test
        viewer.layers.clear()
        annotator_of(viewer)._record()
        annotator_of(viewer)._histories.clear()
        self._forget_slides(viewer)
        for dock in list(viewer.window._wrapped_dock_widgets.values()):
            viewer.window.remove_dock_widget(dock)
        for widget in QApplication.topLevelWidgets():
            if isinstance(getattr(widget, "_magic_widget", None), SlideDock):
                widget.deleteLater()  # what was in a dock, and a name in a test may still hold
        for toast in window.findChildren(NapariQtNotification):
            toast.close()
            toast.deleteLater()
        window.restoreState(self._layout)
        window.resize(self._size)
        for part, values in self._values.items():
            restore(viewer, part, values)
        turn()
        assert {part: values_of(getattr(viewer, part)) for part in PARTS} == self._values
        more = listeners(viewer) - self._listeners
        assert not more, f"something still listens to the viewer: {more}"
        others = [widget for widget in QApplication.topLevelWidgets() if widget.isVisible()]
        assert others == [window], "a window was left open"

    def close(self) -> None:
        """Close the viewer: nothing of it is left."""
        if self._viewer is None:
            return
        if self._viewer in napari.Viewer._instances:
            self._viewer.close()
        self._viewer = None
        self._patch.undo()
        turn()
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        Application.destroy("napari")
        _initialize_plugins.cache_clear()
        init_qactions.cache_clear()
        assert not QtViewer._instances, "something keeps the closed viewer"

    def _forget_slides(self, viewer: napari.Viewer) -> None:
        """Let the next slide be the first one again."""
        seen = arrival._new_slides.pop(viewer, None)
        if seen is None:
            return
        for timer in viewer.window._qt_window.findChildren(
            QTimer, options=Qt.FindDirectChildrenOnly
        ):
            if timer.isSingleShot():
                timer.stop()
                timer.deleteLater()
        viewer.layers.events.inserted.disconnect(seen._on_inserted)
        viewer.events.reset_view.disconnect(seen._on_fitted)
        viewer.canvas.events.size.disconnect(seen._fit_soon)


def make_viewer(show: bool = True) -> napari.Viewer:
    """Make a viewer, and wait until it is on the display."""
    viewer = napari.Viewer(show=show, show_welcome_screen=False)
    viewer.window._qt_window.resize(*SIZE)
    viewer.window._qt_window._save_current_window_settings = _nothing
    assert not show or QTest.qWaitForWindowExposed(viewer.window._qt_window)
    return viewer


def wait_for_layout(viewer: napari.Viewer) -> None:
    """Wait until the inspector has become a tab, as the window is too narrow for it."""
    window, end = viewer.window._qt_window, time.monotonic() + 30
    canvas = viewer.window._qt_viewer.canvas.native
    done = False
    while not done:
        assert time.monotonic() < end
        QTest.qWait(20)
        docks = [widget.native.parent() for widget in viewer.window.dock_widgets.values()]
        tabs = [window.tabifiedDockWidgets(dock) for dock in docks]
        done = bool(tabs) and all(tabs) and canvas.width() > 250
    QTest.qWait(100)


def turn() -> None:
    """Let the event loop turn, and what is to be deleted be deleted."""
    QApplication.processEvents()
    QApplication.sendPostedEvents(None, QEvent.DeferredDelete)
    QApplication.processEvents()


def values_of(part: Any) -> Any:
    """Return all values of a model, and of models in it, but those that Qt alone sets."""
    if isinstance(part, BaseModel):
        names = [name for name in type(part).model_fields if name != "size"]
        return {name: values_of(getattr(part, name)) for name in names}
    if isinstance(part, Mapping):
        return {name: values_of(value) for name, value in part.items()}
    return part.tolist() if isinstance(part, np.ndarray) else part


def restore(owner: Any, name: str, values: Any) -> None:
    """Set values of a model, and of models in it, that have changed."""
    part = owner[name] if isinstance(owner, Mapping) else getattr(owner, name)
    if isinstance(part, BaseModel | Mapping):
        for each, value in values.items():
            restore(part, each, value)
    elif values_of(part) != values:
        setattr(owner, name, values)


def listeners(viewer: napari.Viewer) -> Counter[str]:
    """Count which functions of ours, and methods of what lives, listen to a viewer's events."""
    layers = viewer.layers
    owners = (viewer, layers, layers.selection, viewer.dims, viewer.scene.camera, viewer.canvas)
    found: Counter[str] = Counter()
    for owner in owners:
        for name, event in owner.events.emitters.items():
            for callback in event.callbacks:
                holder, method = callback if isinstance(callback, tuple) else (None, "")
                listener = callback if holder is None else type(holder())
                if listener.__module__.startswith("napari_wsigpu"):
                    found[f"{name}: {listener.__qualname__} {method}"] += 1
    return found


def _nothing(*_: object, **__: object) -> None:
    pass


def _let_events_pass(*_: object) -> None:
    """Process events as napari does, without progress bars, which would redraw the window."""
    QApplication.processEvents()


def _no_console(*_: object) -> QWidget:
    console = QWidget()
    console._update_theme = _nothing
    return console
