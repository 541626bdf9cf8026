"""Layout of a viewer's window, its notifications, and delayed calls."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

from qtpy.QtCore import QEvent, QObject, QTimer
from qtpy.QtWidgets import QDockWidget, QMainWindow, QMessageBox, QWidget
from superqt import ensure_main_thread

from napari_wsigpu.viewer.napari_internals import forget_window_settings, main_window, toasts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from napari import Viewer
    from napari.layers import Layer

    # Center, zoom and angles of the camera.
    CameraView = tuple[tuple[float, ...], float, tuple[float, ...]]

LAYER_DOCKS = "layer controls", "layer list"  # as napari names them
TOAST_MARGIN = 8  # pixels, as napari sets it
SHOWING_MS = 200  # until a new window has its final size

# The view that `fit_to` last chose in each viewer, and the layers that it shows.
_fits: WeakKeyDictionary[Viewer, tuple[CameraView, WeakSet[Layer]]] = WeakKeyDictionary()


def dock_of_layers(window: QMainWindow) -> QDockWidget | None:
    """Return one of napari's docks for layers; None if all are hidden or floating."""
    docks = [window.findChild(QDockWidget, name) for name in LAYER_DOCKS]
    shown = (dock for dock in docks if dock and not dock.isHidden() and not dock.isFloating())
    return next(shown, None)


def lay_out_docks(window: QMainWindow) -> int:
    """Lay out the docks, and return the width that they leave for the canvas.

    The canvas itself is not resized before its next frame.
    """
    layout, center = window.layout(), window.centralWidget()
    if layout is not None:
        layout.activate()
    return window.width() if center is None else int(center.width())


def keep_on_screen(window: QMainWindow) -> None:
    """Shrink a window that is larger than all screens together."""
    screens = window.screen().availableVirtualGeometry().size()
    size = window.size().boundedTo(screens)
    if size != window.size():
        window.resize(size)


def close_unsaved(viewer: Viewer) -> None:
    """Close a viewer's window without saving its size, because the user did not close it."""
    window = main_window(viewer)
    if window is not None:
        forget_window_settings(window)
        viewer.window.close()


def keep_toasts_on_canvas(window: QWidget) -> None:
    """Move notifications into the canvas, and shrink notifications that are wider than it.

    napari makes them 400 pixels wide. It moves them when the canvas is resized, but an animation
    that is still running then ends at the old position.
    """
    for toast in toasts(window):
        room = toast.parentWidget().width() - 2 * TOAST_MARGIN
        if 0 < room < toast.width():  # a canvas that is not laid out has no room
            toast.message.setMinimumWidth(0)
            toast.source_label.hide()  # makes room for the buttons
            toast.setFixedWidth(room)
        toast.geom_anim.stop()  # the animation would end at the old position
        toast.move_to_bottom_right()


# A notification can come from any thread. If another thread stopped an animation, Qt's timer would
# keep a pointer to it after its deletion.
@ensure_main_thread
def let_toasts_end(event: object = None) -> None:
    """Let notifications fade if they appeared while no window was active; keep them on canvases.

    napari sets no interval for their timers. When the mouse leaves such a notification, or a newer
    one is closed, its timer fires continuously, which occupies a core but closes nothing. And the
    timers that napari stops when a newer notification appears are never started again.
    """
    for window in {toast.window() for toast in toasts()}:
        keep_toasts_on_canvas(window)
    for toast in toasts():
        if toast.timer.interval() == 0 < toast.DISMISS_AFTER:
            toast.timer.setSingleShot(True)
            toast.timer.setInterval(toast.DISMISS_AFTER)
            toast.timer.timeout.connect(toast.close_with_fade)
    for older in toasts()[:-1]:
        is_held = older.underMouse() or older.property("expanded") or older.timer.isActive()
        if older.timer.isSingleShot() and older.window().isActiveWindow() and not is_held:
            older.timer_start()


def may_discard(
    parent: QWidget,
    title: str,
    text: str,
    accept: QMessageBox.StandardButton = QMessageBox.Discard,
) -> bool:
    """Ask whether to discard something; return the answer, which is no for the Enter key."""
    buttons = accept | QMessageBox.Cancel
    return bool(QMessageBox.warning(parent, title, text, buttons, QMessageBox.Cancel) == accept)


def single_shot(
    react: Callable[[], object], pause_ms: int = 0, owner: QObject | None = None
) -> QTimer:
    """Return a timer that calls a function once, `pause_ms` after the timer's last start."""
    timer = QTimer(owner)
    timer.setSingleShot(True)
    timer.setInterval(pause_ms)
    timer.timeout.connect(react)
    return timer


def soon(owner: QObject, react: Callable[[], object], pause_ms: int = 0) -> None:
    """Call a function in a later turn of the event loop, unless its owner is deleted first."""
    timer = single_shot(react, pause_ms, owner)
    timer.timeout.connect(timer.deleteLater)
    timer.start()


def once_visible(window: QMainWindow, react: Callable[[], None]) -> None:
    """Call a function soon, but not before the window is visible."""
    if window.isVisible():
        soon(window, react)
    else:
        _Showing(window, react)


class _Showing(QObject):  # type: ignore[misc]
    """Event filter that waits for a window to be shown."""

    def __init__(self, window: QMainWindow, react: Callable[[], None]) -> None:
        super().__init__(window)
        self._react = react
        window.installEventFilter(self)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:  # noqa: N802
        """Call the function when the window is shown for the first time."""
        if event.type() == QEvent.Show:
            watched.removeEventFilter(self)
            soon(watched, self._react, SHOWING_MS)
            self.deleteLater()
        return False


def fit_to(viewer: Viewer, layers: Sequence[Layer]) -> None:
    """Fit layers to the canvas, or the viewer's whole content if napari cannot fit only these.

    napari 0.9.0 cannot fit individual layers, and no version can fit two-dimensional layers next to
    a stack.
    """
    has_all_axes = max(layer.ndim for layer in layers) == viewer.dims.ndim
    if has_all_axes and "layers" in signature(viewer.fit_to_view).parameters:
        viewer.fit_to_view(layers=layers)
    else:
        viewer.fit_to_view()
    _fits[viewer] = camera_view(viewer), WeakSet(layers)


def fit_again(viewer: Viewer) -> bool:
    """Fit the layers of the last `fit_to`; return False if the view was moved since."""
    if viewer not in _fits:
        return False
    view, layers = _fits[viewer]
    shown = [layer for layer in layers if layer in viewer.layers]
    if view != camera_view(viewer) or not shown:
        return False
    fit_to(viewer, shown)
    return True


def moved_view(viewer: Viewer) -> CameraView | None:
    """Return the view, or None if it is as `fit_to` has left it."""
    view = camera_view(viewer)
    return None if viewer in _fits and _fits[viewer][0] == view else view


def camera_view(viewer: Viewer) -> CameraView:
    """Return center, zoom and angles of the camera."""
    camera = viewer.scene.camera
    return tuple(camera.center), camera.zoom, tuple(camera.angles)
