"""A viewer's window, which napari keeps to itself."""

from __future__ import annotations

from contextlib import suppress
from inspect import signature
from typing import TYPE_CHECKING

from qtpy.QtCore import QEvent, QObject, QTimer
from qtpy.QtWidgets import QMainWindow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from napari import Viewer
    from napari.layers import Layer

SHOWING_MS = 200  # until a window that is shown has the size that it will have


def main_window(viewer: Viewer) -> QMainWindow | None:
    """Return a viewer's window; None where it has none, or it is closed."""
    with suppress(AttributeError, RuntimeError):
        window = viewer.window._qt_window
        if isinstance(window, QMainWindow):
            return window
    return None


def canvas_width_on_screen(viewer: Viewer, window: QMainWindow) -> int:
    """Return how wide the canvas would be if the window were no wider than its screen."""
    beyond: int = window.width() - window.screen().availableGeometry().width()
    return int(viewer.canvas.size[1]) - max(beyond, 0)


def keep_on_screen(window: QMainWindow) -> None:
    """Make a window smaller that is wider or higher than all screens together."""
    screens = window.screen().availableVirtualGeometry().size()
    size = window.size().boundedTo(screens)
    if size != window.size():
        window.resize(size)


def soon(window: QMainWindow, react: Callable[[], None], pause_ms: int = 0) -> None:
    """Have a function called one turn of the event loop later, unless the window is gone."""
    timer = QTimer(window)
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
