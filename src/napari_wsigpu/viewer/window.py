"""A viewer's window, which napari keeps to itself."""

from __future__ import annotations

from contextlib import suppress
from inspect import signature
from typing import TYPE_CHECKING

from qtpy.QtCore import QEvent, QObject, QTimer
from qtpy.QtWidgets import QDockWidget, QMainWindow, QWidget

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from napari import Viewer
    from napari.layers import Layer

LAYER_DOCKS = "layer controls", "layer list"  # as napari names them
TOAST_MARGIN = 8  # pixels that napari leaves beside one
SHOWING_MS = 200  # until a window that is shown has the size that it will have


def main_window(viewer: Viewer) -> QMainWindow | None:
    """Return a viewer's window; None where it has none, or it is closed."""
    with suppress(AttributeError, RuntimeError):
        window = viewer.window._qt_window
        if isinstance(window, QMainWindow):
            return window
    return None


def dock_of_layers(window: QMainWindow) -> QDockWidget | None:
    """Return one of napari's own docks beside the canvas; None if all are hidden or float."""
    docks = [window.findChild(QDockWidget, name) for name in LAYER_DOCKS]
    shown = (dock for dock in docks if dock and not dock.isHidden() and not dock.isFloating())
    return next(shown, None)


def width_beside_docks(window: QMainWindow) -> int:
    """Return how wide what docks surround is, once all that was docked by now has its size.

    The canvas takes that size only when it is drawn.
    """
    layout, center = window.layout(), window.centralWidget()
    if layout is not None:
        layout.activate()
    return window.width() if center is None else int(center.width())


def keep_on_screen(window: QMainWindow) -> None:
    """Make a window smaller that is wider or higher than all screens together."""
    screens = window.screen().availableVirtualGeometry().size()
    size = window.size().boundedTo(screens)
    if size != window.size():
        window.resize(size)


def close_unsaved(viewer: Viewer) -> None:
    """Close a viewer's window that nobody chose to leave: its size is not kept for the next one."""
    window = main_window(viewer)
    if window is not None:
        window._save_current_window_settings = lambda: None
        viewer.window.close()


def keep_toasts_on_canvas(window: QWidget) -> None:
    """Have notifications lie within the canvas: they are 400 pixels wide, and stay where it ended.

    Where that is more than the canvas, they become narrower.
    """
    from napari._qt.dialogs.qt_notification import NapariQtNotification

    for toast in window.findChildren(NapariQtNotification):
        room = toast.parentWidget().width() - 2 * TOAST_MARGIN
        if room < toast.width():
            toast.message.setMinimumWidth(0)
            toast.source_label.hide()  # leaves the room to the buttons
            toast.setFixedWidth(room)
        toast.geom_anim.stop()  # it slides to where it would have been
        toast.move_to_bottom_right()


def let_toasts_end(event: object = None) -> None:
    """Let notifications fade that came while no window was active.

    napari leaves their timers as new ones are. Once a window is active, they fire without a pause,
    which takes a core, and end nothing.
    """
    from napari._qt.dialogs.qt_notification import NapariQtNotification

    for toast in NapariQtNotification._instances:
        if toast.timer.interval() == 0 < toast.DISMISS_AFTER:
            toast.timer.setSingleShot(True)
            toast.timer.setInterval(toast.DISMISS_AFTER)
            toast.timer.timeout.connect(toast.close_with_fade)


def soon(owner: QObject, react: Callable[[], object], pause_ms: int = 0) -> None:
    """Have a function called one turn of the event loop later, unless its owner is gone."""
    timer = QTimer(owner)
    timer.setSingleShot(True)
    timer.timeout.connect(react)
    timer.timeout.connect(timer.deleteLater)
    timer.start(pause_ms)


def once_visible(window: QMainWindow, react: Callable[[], None]) -> None:
    """Have a function called soon, but not before the window is visible."""
    if window.isVisible():
        soon(window, react)
    else:
        _Showing(window, react)


class _Showing(QObject):  # type: ignore[misc]
    """Waits for a window to be shown."""

    def __init__(self, window: QMainWindow, react: Callable[[], None]) -> None:
        super().__init__(window)
        self._react = react
        window.installEventFilter(self)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:  # noqa: N802
        """React to the first time that it is shown."""
        if event.type() == QEvent.Show:
            watched.removeEventFilter(self)
            soon(watched, self._react, SHOWING_MS)
            self.deleteLater()
        return False


def fit_to(viewer: Viewer, layers: Sequence[Layer]) -> None:
    """Fit layers to the canvas; all of them where napari can't fit some.

    These are napari 0.9.0, and flat layers beside a stack.
    """
    deep = max(layer.ndim for layer in layers) == viewer.dims.ndim
    if deep and "layers" in signature(viewer.fit_to_view).parameters:
        viewer.fit_to_view(layers=layers)
    else:
        viewer.fit_to_view()
