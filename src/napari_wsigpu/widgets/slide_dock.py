"""What all docks do: follow the slide of the active layer, and use napari's size of text."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from qtpy.QtCore import QEvent, QObject, QSize, QTimer
from qtpy.QtWidgets import QDockWidget, QLabel, QMainWindow, QWidget

from napari_wsigpu.viewer.dock import SHARE
from napari_wsigpu.viewer.layers import slide_of
from napari_wsigpu.viewer.window import dock_of_layers, soon, width_beside_docks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from napari import Viewer
    from napari.layers import Layer

    from napari_wsigpu.slide.slide import Slide

USABLE_CANVAS = 400  # pixels of width
PREFERRED_WIDTH = 32  # lines of text


class SlideDock(QWidget):  # type: ignore[misc]
    """A dock that shows the slide of the active layer.

    While a layer of another kind is active, the slide that was shown last stays, as long as
    it is in the viewer.

    Parameters
    ----------
    viewer : Viewer
        The viewer whose active layer is followed, once `follow` was called.
    nothing : str
        What is said while there is no slide.

    Attributes
    ----------
    slide : Slide or None
        What is shown.
    empty : QLabel
        Says that there is no slide.
    """

    def __init__(self, viewer: Viewer, nothing: str) -> None:
        super().__init__()
        self.viewer = viewer
        self.slide: Slide | None = None
        self._placed = False
        self.empty = QLabel(nothing)
        self.empty.setWordWrap(True)
        self.empty.installEventFilter(self)
        self.at_end: list[Callable[[], object]] = []
        self.destroyed.connect(_end(self.at_end))

    def show_slide(self, slide: Slide | None) -> None:
        """Show another slide, or none."""
        raise NotImplementedError

    def let_go(self, slide: Slide) -> None:
        """Drop what is kept of a slide that has left the viewer."""

    def follow(self) -> None:
        """Show the active slide from now on."""
        self.listen(self.viewer.layers.selection.events.active, self._follow)
        self.listen(self.viewer.layers.events.removed, self._on_removed)
        self._follow()

    def listen(self, signal: Any, slot: Callable[..., None]) -> None:
        """Connect an event of napari as long as the dock lives."""
        signal.connect(slot)
        self.at_end.append(partial(signal.disconnect, slot))

    def share_a_place(self, dock: QDockWidget) -> None:
        """Come as a tab beside the other docks, which leave little room below."""
        window = self.window()
        if not isinstance(window, QMainWindow) or dock.isFloating():
            return
        for other in window.findChildren(SlideDock):
            place = other.parent()
            if other is not self and isinstance(place, QDockWidget) and not place.isFloating():
                window.tabifyDockWidget(place, dock)
                dock.raise_()

    def leave_the_canvas(self, dock: QDockWidget) -> None:
        """Be a tab elsewhere if the canvas is narrow."""
        window = self.window()
        if not isinstance(window, QMainWindow) or dock.isHidden() or dock.isFloating():
            return
        theirs = dock_of_layers(window)
        if theirs is not None and width_beside_docks(window) < USABLE_CANVAS:
            window.tabifyDockWidget(theirs, dock)
            dock.raise_()

    def draw_in(self, layer: Layer, mode: str) -> None:
        """Let the user draw in a layer, over all slides: what is drawn below one is not seen."""
        layers = self.viewer.layers
        place = layers.index(layer)
        if any(slide_of(above) is not None for above in layers[place + 1 :]):
            layers.move(place, len(layers))
        layer.visible = True
        layers.selection.active = layer
        layer.mode = mode

    def slides(self) -> list[Slide]:
        """Return the slides of the viewer's layers."""
        slides = (slide_of(layer) for layer in self.viewer.layers)
        return [slide for slide in slides if slide is not None]

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:  # noqa: N802
        """Use the size that napari's style gives to labels for all text, trees and tables too."""
        if watched is self.empty and event.type() in (QEvent.FontChange, QEvent.Polish):
            size, font = self.empty.font().pointSizeF(), self.font()
            if font.pointSizeF() != size:
                font.setPointSizeF(size)
                self.setFont(font)
        return bool(super().eventFilter(watched, event))

    def sizeHint(self) -> QSize:  # noqa: N802
        """Return a size that shows much, but leaves most of the window to the slide."""
        window = self.window()
        if isinstance(window, QMainWindow):
            room = min(window.width(), window.screen().availableGeometry().width())
        else:
            room = self.screen().availableGeometry().width()
        width = min(PREFERRED_WIDTH * self.fontMetrics().lineSpacing(), room // SHARE)
        return QSize(width, super().sizeHint().height())

    def showEvent(self, event: Any) -> None:  # noqa: N802
        """Have the style applied before the size of the dock is asked; come to the others."""
        self.empty.ensurePolished()
        super().showEvent(event)
        dock = self.parent()
        if not isinstance(dock, QDockWidget):
            return
        if not self._placed:
            self._placed = True
            self.share_a_place(dock)
            soon(self, partial(self.leave_the_canvas, dock))
        elif not event.spontaneous():
            QTimer.singleShot(0, dock.raise_)  # its tab comes back only after this event

    def _on_removed(self, event: Any) -> None:
        slide = slide_of(event.value)
        if slide is not None and slide not in self.slides():
            self.let_go(slide)
        self._follow()

    def _follow(self, event: Any = None) -> None:
        slides = self.slides()
        active = slide_of(self.viewer.layers.selection.active)
        kept = self.slide if self.slide in slides else None
        slide = active or kept or (slides[-1] if slides else None)
        if slide is not self.slide or slide is None:
            self.slide = slide
            self.empty.setVisible(slide is None)
            self.show_slide(slide)


def _end(at_end: Sequence[Callable[[], object]]) -> Callable[[], None]:
    """Return a function that ends all that goes on, and knows nothing of the dying widget."""

    def end() -> None:
        for leave in at_end:
            leave()

    return end
