"""What all docks do: follow the slide of the active layer, and use napari's size of text."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from qtpy.compat import isalive
from qtpy.QtCore import QSize, Qt, QTimer
from qtpy.QtWidgets import QDockWidget, QMainWindow

from napari_wsigpu.viewer.dock import SHARE
from napari_wsigpu.viewer.layers import slide_of
from napari_wsigpu.viewer.together import slides_of
from napari_wsigpu.viewer.window import LAYER_DOCKS, dock_of_layers, soon, width_beside_docks
from napari_wsigpu.widgets.jobs import Jobs
from napari_wsigpu.widgets.kit.parts import Panel, Scrolled, Text

if TYPE_CHECKING:
    from collections.abc import Callable

    from magicgui.widgets import Container, Widget
    from napari import Viewer
    from napari.layers import Layer

    from napari_wsigpu.slide.slide import Slide

LEAST_CANVAS = 500  # pixels of width that the slide keeps
LEAST_SHARE = 0.45  # of the window's width
PREFERRED_WIDTH = 32  # lines of text
MARGIN = 6  # pixels
SHARE_OF_HEIGHT = 0.65  # of a window, for a dock among those of layers
LAYER_EVENTS = "inserted", "removed", "reordered", "renamed"


class SlideDock(Panel):
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
    empty : Text
        Says that there is no slide.
    jobs : Jobs
        The dock's slow work.
    details : Container or Scrolled
        What is shown of a slide.
    title_in_tabs : str
        The dock's title; napari's has the plugin's name, which tabs have no room for.
    """

    details: Container
    title_in_tabs = ""

    def __init__(self, viewer: Viewer, nothing: str) -> None:
        self.empty = Text("", nothing)
        super().__init__(self.empty, margin=MARGIN)
        self.viewer = viewer
        self.slide: Slide | None = None
        self.jobs = Jobs()
        self._placed = False
        self.empty.native.installEventFilter(self.native)
        self.native.hint = self._hint
        self.at_end: list[Callable[[], object]] = [self.jobs.close]
        self.native.destroyed.connect(_end(self.at_end))
        for name in LAYER_EVENTS:  # napari connects them, and never takes that back
            event = getattr(viewer.layers.events, name)
            self.at_end.append(partial(event.disconnect, self.reset_choices))

    def add_details(self, inner: Container, *below: Widget, scrolled: bool = False) -> None:
        """Show a container while there is a slide, and parts below it in any case."""
        self.details = Scrolled(inner) if scrolled else inner
        self.extend([self.details, *below])
        self.stretch(self.details)

    def show_slide(self, slide: Slide | None) -> None:
        """Show another slide, or none."""
        raise NotImplementedError

    def let_go(self, slide: Slide) -> None:
        """Drop what is kept of a slide that has left the viewer."""
        self.jobs.let_go(slide)

    def follow(self) -> None:
        """Show the active slide from now on."""
        self.listen(self.viewer.layers.selection.events.active, self._follow)
        self.listen(self.viewer.layers.events.removed, self._on_removed)
        self._follow()

    def listen(self, signal: Any, slot: Callable[..., None]) -> None:
        """Connect an event of napari as long as the dock lives."""
        signal.connect(slot)
        self.at_end.append(partial(signal.disconnect, slot))

    def layer_of_slide(self) -> Layer | None:
        """Return a layer of the slide, the active one if it is."""
        layers = [self.viewer.layers.selection.active, *self.viewer.layers]
        return next((each for each in layers if each and slide_of(each) is self.slide), None)

    def slides(self) -> list[Slide]:
        """Return the slides of the viewer's layers."""
        return slides_of(self.viewer)

    def draw_in(self, layer: Layer, mode: str) -> None:
        """Let the user draw in a layer, over all slides: what is drawn below one is not seen."""
        layers = self.viewer.layers
        place = layers.index(layer)
        if any(slide_of(above) is not None for above in layers[place + 1 :]):
            layers.move(place, len(layers))
        layer.visible = True
        layers.selection.active = layer
        layer.mode = mode

    def on_shown(self, event: Any) -> None:
        """Come to the other docks when it is shown first, and before them when it is again."""
        dock = self.native.parent()
        if not isinstance(dock, QDockWidget):
            return
        if not self._placed:
            self._placed = True
            dock.setWindowTitle(self.title_in_tabs)
            self._share_a_place(dock)
            soon(self.native, partial(self._leave_the_canvas, dock))
        elif not event.spontaneous():
            QTimer.singleShot(0, dock.raise_)  # its tab comes back only after this event

    def _share_a_place(self, dock: QDockWidget) -> None:
        """Come as a tab with the other docks, which leave little room below."""
        window = self.native.window()
        if not isinstance(window, QMainWindow) or dock.isFloating():
            return
        for other in window.findChildren(QDockWidget):
            is_ours = isinstance(getattr(other.widget(), "_magic_widget", None), SlideDock)
            if is_ours and other is not dock and not other.isFloating():
                window.tabifyDockWidget(other, dock)
                dock.raise_()

    def _leave_the_canvas(self, dock: QDockWidget) -> None:
        """Be a tab elsewhere if the canvas is narrow."""
        window = self.native.window()
        if not isinstance(window, QMainWindow) or dock.isHidden() or dock.isFloating():
            return
        theirs = dock_of_layers(window)
        least = max(LEAST_CANVAS, LEAST_SHARE * window.width())
        if theirs is not None and width_beside_docks(window) < least:
            window.tabifyDockWidget(theirs, dock)
            dock.raise_()
            width_beside_docks(window)  # gives the canvas its room back now, not a turn later
            soon(self.native, partial(self._be_higher, window, dock))

    def _be_higher(self, window: QMainWindow, dock: QDockWidget) -> None:
        """Take more of the height than the list of layers, which needs less."""
        below = window.findChild(QDockWidget, LAYER_DOCKS[1])
        if below is not None and not below.isHidden():
            high = dock.height() + below.height()
            share = round(SHARE_OF_HEIGHT * high)
            window.resizeDocks([dock, below], [share, high - share], Qt.Vertical)

    def _hint(self, size: QSize) -> QSize:
        """Return a size that shows much, but leaves most of the window to the slide."""
        self.empty.native.ensurePolished()
        window = self.native.window()
        room = self.native.screen().availableGeometry().width()
        if isinstance(window, QMainWindow):
            room = min(window.width(), room)
        width = min(PREFERRED_WIDTH * self.native.fontMetrics().lineSpacing(), room // SHARE)
        return QSize(width, size.height())

    def _on_removed(self, event: Any) -> None:
        slide = slide_of(event.value)
        if slide is not None and slide not in self.slides():
            self.let_go(slide)
        self._follow()

    def _follow(self, event: Any = None) -> None:
        if not isalive(self.native):  # a window that closes takes its docks before its layers
            return
        slides = self.slides()
        active = slide_of(self.viewer.layers.selection.active)
        kept = self.slide if self.slide in slides else None
        slide = active or kept or (slides[-1] if slides else None)
        if slide is not self.slide or slide is None:
            self.slide = slide
            self.empty.visible = slide is None
            self.details.visible = slide is not None
            self.show_slide(slide)


def _end(at_end: list[Callable[[], object]]) -> Callable[[], None]:
    """Return a function that ends all that goes on, and knows nothing of the dying widget."""

    def end() -> None:
        for leave in at_end:
            # The events and the window of a closed viewer may be gone already.
            with suppress(AttributeError, RuntimeError):
                leave()
        at_end.clear()

    return end
