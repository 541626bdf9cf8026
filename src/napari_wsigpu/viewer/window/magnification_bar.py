"""The bar on the canvas that fits a slide, or shows it at an objective's magnification."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING
from weakref import ref

from napari.layers import Image
from qtpy.compat import isalive
from qtpy.QtCore import QEvent, QObject, Qt
from qtpy.QtWidgets import QHBoxLayout, QPushButton, QWidget

from napari_wsigpu.slide.facts import TIMES
from napari_wsigpu.viewer.annotations.annotation_layers import SLIDE
from napari_wsigpu.viewer.layers.slide_layers import slide_of
from napari_wsigpu.viewer.napari_internals import qt_viewer
from napari_wsigpu.viewer.view.arrangement import active_slide, fit_slide, layer_of
from napari_wsigpu.viewer.view.navigation import (
    MAGNIFICATIONS,
    current_magnification,
    magnifications_of,
    magnify,
    objective_of,
)
from napari_wsigpu.viewer.window.main_window import single_shot
from napari_wsigpu.viewer.window.notifications import show_info

if TYPE_CHECKING:
    from collections.abc import Callable

    from napari import Viewer
    from napari.utils.events import Event

    from napari_wsigpu.slide.slide import Slide

MARGIN = 8  # pixels around the bar
SPACING = 2  # pixels between its buttons
MARK_MS = 50  # after the last movement


def add_magnification_bar(viewer: Viewer) -> None:
    """Add a bar to a viewer's canvas, unless napari does not expose it."""
    with suppress(AttributeError):
        MagnificationBar(viewer, qt_viewer(viewer).canvas.native)


class MagnificationBar(QWidget):  # type: ignore[misc]
    """Buttons that change the view of the active slide, placed away from the scale bar.

    Parameters
    ----------
    viewer : Viewer
        The viewer; the bar is hidden while it has no slide.
    canvas : QWidget
        The viewer's canvas, which owns the bar.

    Attributes
    ----------
    fit : QPushButton
        Fits the slide to the canvas; checked until the view changes.
    buttons : dict of int to QPushButton
        Buttons by magnification. Magnifications above the slide's own are hidden, and so are the
        lowest ones if the canvas is too narrow. The magnification of the view is checked.
    """

    def __init__(self, viewer: Viewer, canvas: QWidget) -> None:
        super().__init__(canvas)
        self._viewer = ref(viewer)
        self._slide: Callable[[], Slide | None] = _nothing
        self._offered: list[int] = []
        self._fitted: tuple[object, ...] = ()
        self.setAccessibleName("Magnification")
        self.setAttribute(Qt.WA_StyledBackground)  # otherwise the canvas shows through
        layout = QHBoxLayout(self)
        layout.setContentsMargins(SPACING, SPACING, SPACING, SPACING)
        layout.setSpacing(SPACING)
        self.fit = self._add("Fit", "Fit the slide to the window", fit_slide)
        self.buttons = {
            number: self._add(
                f"{number}{TIMES}",
                f"Show the slide as through a {number}{TIMES} objective",
                partial(magnify_slide, number=number),
            )
            for number in MAGNIFICATIONS
        }
        self.hide()
        canvas.installEventFilter(self)
        layers, camera = viewer.layers, viewer.scene.camera.events
        scale_bar = viewer.canvas.overlays.scale_bar.events
        for signal in (layers.events.inserted, layers.events.removed):
            signal.connect(self._follow)
        for signal in (layers.selection.events.active, viewer.dims.events.ndisplay):
            signal.connect(self._follow)
        # Marking at once would delay the frame that shows the movement.
        self._moved = single_shot(self._mark, MARK_MS, self)
        for signal in (camera.center, camera.zoom):
            signal.connect(self._mark_soon)
        for signal in (scale_bar.visible, scale_bar.position):
            signal.connect(self._place)
        viewer.events.reset_view.connect(self._on_fitted)

    def event(self, event: QEvent) -> bool:
        """Fit the bar to its buttons when they or their font change."""
        done = bool(super().event(event))
        if event.type() == QEvent.LayoutRequest:
            self._place()
        return done

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:  # noqa: N802
        """Move to the edge of a resized canvas, and uncheck "Fit", as the slide no longer fits."""
        if event.type() == QEvent.Resize and isalive(self):
            self._fitted = ()
            self._mark()
            self._place()
        return False

    def _add(self, text: str, tip: str, show: Callable[[Viewer, Slide], None]) -> QPushButton:
        def react() -> None:
            viewer, slide = self._viewer(), self._slide()
            if viewer is not None and slide is not None:
                show(viewer, slide)
            self._mark()  # a click has toggled the button

        button = QPushButton(text)
        button.setToolTip(tip)
        button.setAccessibleName(text)
        button.setCheckable(True)
        button.setFocusPolicy(Qt.NoFocus)  # keys still go to the canvas
        button.clicked.connect(react)
        self.layout().addWidget(button)
        return button

    def _follow(self, event: Event | None = None) -> None:
        """Show the buttons of the active slide."""
        viewer = self._viewer()
        if viewer is None or not isalive(self):
            return
        slide = active_slide(viewer, self._slide())
        self._slide = _nothing if slide is None else ref(slide)
        flat = slide is not None and viewer.dims.ndisplay == 2
        self._offered = magnifications_of(slide) if slide is not None and flat else []
        self.setVisible(slide is not None)
        self._place()
        self._mark()

    def _place(self, event: Event | None = None) -> None:
        viewer = self._viewer()
        if viewer is None or not isalive(self):
            return
        scale_bar, canvas = viewer.canvas.overlays.scale_bar, self.parentWidget()
        room = canvas.width() - 2 * MARGIN - 2 * SPACING - self.fit.sizeHint().width()
        for number, button in reversed(self.buttons.items()):
            if number in self._offered:
                room -= button.sizeHint().width() + SPACING
            button.setVisible(number in self._offered and room >= 0)
        size = self.sizeHint()
        at_top = not (scale_bar.visible and str(scale_bar.position).startswith("top"))
        y = MARGIN if at_top else canvas.height() - size.height() - MARGIN
        self.setGeometry(MARGIN, y, min(size.width(), canvas.width() - 2 * MARGIN), size.height())

    def _on_fitted(self, event: Event) -> None:
        viewer, slide = self._viewer(), self._slide()
        if viewer is None:
            return
        all_shown = all(each.visible for each in viewer.layers if slide_of(each) is not None)
        if slide is not None and not all_shown:  # napari has fitted hidden layers too
            with viewer.events.reset_view.blocker(self._on_fitted):
                fit_slide(viewer, slide)
        self._fitted = _view(viewer)
        self._mark()

    def _mark_soon(self, event: Event) -> None:
        if isalive(self):
            self._moved.start()

    def _mark(self) -> None:
        """Check the button of the current view."""
        viewer, slide = self._viewer(), self._slide()
        layer = None if viewer is None or slide is None else layer_of(viewer, slide)
        if viewer is None or slide is None or layer is None or not isalive(self):
            return
        self.fit.setChecked(self._fitted == _view(viewer))
        current = current_magnification(viewer, layer, slide)
        for number, button in self.buttons.items():
            button.setChecked(number == current)


def _nothing() -> None:
    return None


def magnify_slide(viewer: Viewer, slide: Slide, number: int) -> None:
    """Show a slide at an objective's magnification, or at the highest one that the bar offers."""
    layer, offered = layer_of(viewer, slide), magnifications_of(slide)
    if layer is not None and offered:
        shown = min(number, offered[-1])
        magnify(viewer, layer, slide, shown)
        if shown < number:
            show_info(
                f"The slide was scanned at {objective_of(slide):.3g}{TIMES}, so {shown}{TIMES} is "
                f"shown instead of {number}{TIMES}."
            )


def _view(viewer: Viewer) -> tuple[object, ...]:
    """Return what the canvas shows: position, zoom, and the places of the visible pictures."""
    pictures = [each for each in viewer.layers if isinstance(each, Image) and each.visible]
    # Heat maps, which lie on their slide, don't change what fits.
    places = frozenset(
        each.extent.world.tobytes() for each in pictures if SLIDE not in each.metadata
    )
    return tuple(viewer.scene.camera.center), viewer.scene.camera.zoom, places
