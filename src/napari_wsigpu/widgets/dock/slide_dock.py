"""Base class of all docks, which follow the slide of the active layer."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from qtpy.compat import isalive
from qtpy.QtCore import QSize, Qt, QTimer
from qtpy.QtWidgets import QDockWidget, QMainWindow

from napari_wsigpu.viewer.layers.slide_layers import slide_of
from napari_wsigpu.viewer.napari_internals import main_window, unwrapped
from napari_wsigpu.viewer.view.arrangement import (
    active_slide,
    is_shown,
    layer_of,
    show_only,
    slides_of,
)
from napari_wsigpu.viewer.window.docks import SHARE, share_names
from napari_wsigpu.viewer.window.main_window import (
    LAYER_DOCKS,
    dock_of_layers,
    lay_out_docks,
    soon,
)
from napari_wsigpu.widgets.dock.jobs import Jobs
from napari_wsigpu.widgets.kit.parts import Column, Panel, Scrolled, Text

if TYPE_CHECKING:
    from collections.abc import Callable

    from magicgui.widgets import Container, Widget
    from napari import Viewer
    from napari.layers import Layer
    from napari.utils.events import Event

    from napari_wsigpu.slide.slide import Slide

LEAST_CANVAS = 500  # width in pixels that docks leave for the canvas
LEAST_SHARE = 0.45  # the same, relative to the window's width
PREFERRED_WIDTH = 32  # times the height of a line of text
MARGIN = 6  # pixels
ROOMY = 14  # lines of text that a dock must have room for before it reserves some for messages
SHARE_OF_HEIGHT = 0.75  # height of a dock that shares a column with the list of layers
LAYER_EVENTS = "inserted", "removed", "reordered", "renamed"


class SlideDock(Panel):
    """A dock that shows the slide of the active layer.

    While a layer of another kind is active, the dock keeps showing the last slide until the slide
    is removed from the viewer.

    Parameters
    ----------
    viewer : Viewer
        The viewer whose active layer the dock follows after `follow` is called.
    nothing : str
        Text to show while there is no slide.

    Attributes
    ----------
    slide : Slide or None
        The slide that is shown.
    empty : Text
        The text that is shown without a slide.
    jobs : Jobs
        The dock's slow jobs.
    details : Scrolled
        The widgets that are shown with a slide.
    title_in_tabs : str
        The dock's title, without the name of the plugin, for which tabs have no room.
    """

    details: Scrolled
    title_in_tabs = ""

    def __init__(self, viewer: Viewer, nothing: str) -> None:
        self.empty = Text("", nothing)
        super().__init__(self.empty, margin=MARGIN)
        # napari's proxy returns a new object for a layer each time, but docks compare layers.
        self.viewer = viewer = unwrapped(viewer)
        self.slide: Slide | None = None
        self.jobs = Jobs()
        self._is_docked = False
        window = main_window(viewer)
        self._window_size = None if window is None else window.size()
        self.empty.native.installEventFilter(self.native)
        self.native.hint = self._hint
        self.native.docked.connect(self._share_names)
        self.at_end: list[Callable[[], object]] = [self.jobs.close]
        self.native.destroyed.connect(_cleanup(self.at_end))
        for name in LAYER_EVENTS:  # napari connects these, and never disconnects them
            event = getattr(viewer.layers.events, name)
            self.at_end.append(partial(event.disconnect, self.reset_choices))

    def reserve(self, message: Text, lines: int) -> None:
        """Keep room for the lines of a message, unless the dock is low."""
        line = message.native.fontMetrics().lineSpacing()
        message.reserve(lines if self.native.height() >= ROOMY * line else 0)

    def add_details(self, inner: Container, *below: Widget) -> None:
        """Add a container that is shown with a slide, and widgets that are always shown below."""
        self.details = Scrolled(inner)
        self.extend([self.details, *below])
        self.stretch(self.details)

    def show_slide(self, slide: Slide | None) -> None:
        """Show another slide, or none."""
        raise NotImplementedError

    def drop_slide(self, slide: Slide) -> None:
        """Drop everything about a slide that was removed from the viewer."""
        self.jobs.drop_slide(slide)

    def follow(self) -> None:
        """Start to follow the active slide."""
        self.listen(self.viewer.layers.selection.events.active, self._follow)
        self.listen(self.viewer.layers.events.removed, self._on_removed)
        self._follow()

    def listen(self, signal: Event, slot: Callable[..., None]) -> None:
        """Connect a function to an event of napari until the dock is closed."""
        signal.connect(slot)
        self.at_end.append(partial(signal.disconnect, slot))

    def layer_of_slide(self) -> Layer | None:
        """Return a layer of the slide, preferably the active one."""
        return layer_of(self.viewer, self.slide)

    def slides(self) -> list[Slide]:
        """Return the slides of the viewer's layers."""
        return slides_of(self.viewer)

    def draw_in(self, layer: Layer, mode: str) -> None:
        """Let the user draw in a layer, which is moved above the slides that would hide it.

        If the slide is hidden, it is shown alone first.
        """
        layers = self.viewer.layers
        if self.slide is not None and not is_shown(self.viewer, self.slide):
            show_only(self.viewer, self.slide)
        index, has_cells = layers.index(layer), self.viewer.canvas.grid.enabled
        if not has_cells and any(slide_of(above) is not None for above in layers[index + 1 :]):
            layers.move(index, len(layers))
        layer.visible = True
        layers.selection.active = layer
        layer.mode = mode

    def _share_names(self) -> None:
        """Register the new dock's names now: napari may look it up before it is visible."""
        forget = share_names(self.viewer, self.native.parent(), self.title_in_tabs)
        self.native.left.connect(forget)

    def on_shown(self, spontaneous: bool = False) -> None:
        """Join the other docks as a tab when first shown; come to the front when shown again."""
        dock = self.native.parent()
        if not isinstance(dock, QDockWidget):
            return
        if not self._is_docked:
            self._is_docked = True
            dock.setWindowTitle(self.title_in_tabs)
            self._join_docks(dock)
            self._allow_small_windows(dock)
            soon(self.native, partial(self._widen_canvas, dock))
        elif not spontaneous:
            QTimer.singleShot(0, dock.raise_)  # Qt restores the tab only after this event

    def _join_docks(self, dock: QDockWidget) -> None:
        """Become a tab next to this plugin's other docks: a column has no room for two."""
        window = self.native.window()
        if not isinstance(window, QMainWindow) or dock.isFloating():
            return
        for other in window.findChildren(QDockWidget):
            is_ours = isinstance(getattr(other.widget(), "_magic_widget", None), SlideDock)
            if is_ours and other is not dock and not other.isFloating():
                window.tabifyDockWidget(other, dock)
                dock.raise_()

    def _allow_small_windows(self, dock: QDockWidget) -> None:
        """Make napari's layer controls scroll, like this dock.

        Otherwise, their height would set the minimum height of the window.
        """
        controls = self.native.window().findChild(QDockWidget, LAYER_DOCKS[0])
        if controls is not None and not isinstance(controls.widget(), Column):
            controls.setWidget(Column(controls.widget(), has_room=False))
        for each in (dock, controls):
            if each is not None:
                each.setMinimumHeight(0)  # else Qt keeps the largest one that the dock ever had

    def _widen_canvas(self, dock: QDockWidget) -> None:
        """Become a tab next to one of napari's layer docks if the canvas gets too narrow.

        The dock also becomes a tab if napari placed it below them. napari does this when the dock
        was last on that side: it restores the side of the window, but not the tabs. If Qt has made
        the window higher for docks below each other, it gets its height back.
        """
        window = self.native.window()
        if not isinstance(window, QMainWindow) or dock.isHidden() or dock.isFloating():
            return
        theirs = dock_of_layers(window)
        if theirs is None:
            return
        least = max(LEAST_CANVAS, LEAST_SHARE * window.width())
        is_below = window.dockWidgetArea(dock) == window.dockWidgetArea(theirs)
        if is_below or lay_out_docks(window) < least:
            # Qt 6.12 doesn't move a tab to other tabs, so take the dock out of its tabs first.
            window.addDockWidget(window.dockWidgetArea(theirs), dock)
            window.tabifyDockWidget(theirs, dock)
            dock.raise_()
            lay_out_docks(window)  # widens the canvas now, not in a later event
            before = self._window_size
            if before and before.width() == window.width() and not window.isMaximized():
                window.resize(before)
            soon(self.native, partial(self._take_height, window, dock))

    def _take_height(self, window: QMainWindow, dock: QDockWidget) -> None:
        """Take most of the height that is shared with the list of layers."""
        below = window.findChild(QDockWidget, LAYER_DOCKS[1])
        if below is not None and not below.isHidden():
            high = dock.height() + below.height()
            share = round(SHARE_OF_HEIGHT * high)
            window.resizeDocks([dock, below], [share, high - share], Qt.Vertical)

    def _hint(self, size: QSize) -> QSize:
        """Return the preferred width, limited to the dock's share of the window."""
        self.empty.native.ensurePolished()
        window = self.native.window()
        room = self.native.screen().availableGeometry().width()
        if isinstance(window, QMainWindow):
            room = min(window.width(), room)
        width = min(PREFERRED_WIDTH * self.native.fontMetrics().lineSpacing(), room // SHARE)
        return QSize(width, size.height())

    def _on_removed(self, event: Event) -> None:
        slide = slide_of(event.value)
        if slide is not None and slide not in self.slides():
            self.drop_slide(slide)
        self._follow()

    def _follow(self, event: Event | None = None) -> None:
        if not isalive(self.native):  # a closing window deletes its docks before its layers
            return
        slide = active_slide(self.viewer, self.slide)
        if slide is not self.slide or slide is None:
            self.slide = slide
            self.empty.visible = slide is None
            self.details.visible = slide is not None
            self.show_slide(slide)


def _cleanup(at_end: list[Callable[[], object]]) -> Callable[[], None]:
    """Return a function that cleans up without a reference to the widget being deleted."""

    def clean_up() -> None:
        for action in at_end:
            # A closed viewer may have already deleted its events and window.
            with suppress(AttributeError, RuntimeError):
                action()
        at_end.clear()

    return clean_up
