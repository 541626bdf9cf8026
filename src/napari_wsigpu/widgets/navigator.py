"""The dock "Navigator": where the view is on the slide, and how it gets elsewhere."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

from qtpy.QtCore import Qt, QTimer
from qtpy.QtWidgets import (
    QComboBox,
    QHBoxLayout,
    QLabel,
    QLineEdit,
    QPushButton,
    QSizePolicy,
    QVBoxLayout,
    QWidget,
)

from napari_wsigpu.viewer.layers import slide_of
from napari_wsigpu.viewer.navigation import (
    cursor,
    look_at,
    objective_of,
    screen_pixels,
    set_screen_pixels,
    view,
)
from napari_wsigpu.widgets.facts import TIMES
from napari_wsigpu.widgets.jobs import Jobs
from napari_wsigpu.widgets.overview_map import OverviewMap
from napari_wsigpu.widgets.picture_view import overview_image
from napari_wsigpu.widgets.pictures import aspect_of
from napari_wsigpu.widgets.slide_dock import SlideDock

if TYPE_CHECKING:
    from napari import Viewer
    from napari.layers import Layer

    from napari_wsigpu.slide.slide import Slide

NO_SLIDE = "Open a slide, or select its layer, to find your way on it."
MAGNIFICATIONS = (1, 5, 10, 20, 40)
MICROMETRES, PIXELS = "µm", "px"
# As it is written by hand, or copied from the line below, other tables or a script.
POSITION = re.compile(
    r"[\s(\[]*(?:x\s*[=:]?)?\s*([-+]?[\d.]+)\s*(?:µm|um|px)?[\s,;]+(?:y\s*[=:]?)?\s*"
    r"([-+]?[\d.]+)\s*(?:µm|um|px)?[\s)\]]*",
    re.IGNORECASE,
)
REFRESH_MS = 30


class Navigator(SlideDock):
    """Shows where the view is, and moves it: by the overview, magnification or position.

    Parameters
    ----------
    napari_viewer : Viewer
        The viewer.
    """

    def __init__(self, napari_viewer: Viewer) -> None:
        super().__init__(napari_viewer, NO_SLIDE)
        self._jobs = Jobs()
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.setInterval(REFRESH_MS)
        self.map = OverviewMap()
        self.buttons = {number: QPushButton(f"{number}{TIMES}")
                        for number in MAGNIFICATIONS}  # fmt: skip
        self.magnification = QLabel()
        self.magnification.setAccessibleName("Magnification")
        self.goal = QLineEdit()
        self.goal.setPlaceholderText("x, y")
        self.goal.setAccessibleName("Position")
        self.goal.setToolTip("Two numbers, x and y, from the upper left corner of the slide")
        self.unit = QComboBox()
        self.unit.setAccessibleName("Unit")
        self.go = QPushButton("Go")
        self.go.setToolTip("Move this position to the middle of the view")
        self.position = QLabel()
        self.position.setAccessibleName("Position under the mouse")
        self.position.setTextFormat(Qt.PlainText)
        self.position.setWordWrap(True)
        self._arrange()

        self.map.moved.connect(self._look_at)
        for number, button in self.buttons.items():
            button.setSizePolicy(QSizePolicy.Ignored, QSizePolicy.Fixed)
            button.clicked.connect(partial(self._magnify, number))
        self.go.clicked.connect(self._go)
        self.goal.returnPressed.connect(self._go)
        self._timer.timeout.connect(self._refresh)
        camera = self.viewer.scene.camera
        for signal in (camera.events.center, camera.events.zoom, self.viewer.events.theme):
            self.listen(signal, self._soon)
        self.listen(self.viewer.cursor.events.position, self._soon)
        self.at_end.append(self._jobs.close)
        self.follow()

    def _arrange(self) -> None:
        self.details = QWidget()
        inner = QVBoxLayout(self.details)
        inner.setContentsMargins(0, 0, 0, 0)
        inner.addWidget(self.map, 1)
        inner.addLayout(_row(*self.buttons.values()))
        jump = _row(self.goal, self.unit, self.go)
        jump.setStretch(0, 1)
        inner.addLayout(jump)
        inner.addWidget(self.magnification)
        inner.addWidget(self.position)
        inner.addStretch()
        outer = QVBoxLayout(self)
        outer.addWidget(self.empty)
        outer.addWidget(self.details, 1)

    def show_slide(self, slide: Slide | None) -> None:
        """Show another slide, or none."""
        self._jobs.drop(self)
        self.details.setVisible(slide is not None)
        if slide is None:
            return
        known = objective_of(slide)
        for number, button in self.buttons.items():
            button.setEnabled(known is not None)
            said = f"Show the slide as by a {number}{TIMES} objective"
            button.setToolTip(said if known else "The file names neither objective nor pixel size")
        self.unit.clear()
        self.unit.addItems([PIXELS] if slide.mpp is None else [MICROMETRES, PIXELS])
        shown_as = slide.dimensions, aspect_of(slide)
        self.map.show_slide(*shown_as)
        self._jobs.start(
            "Reading the overview",
            slide,
            partial(overview_image, slide),
            partial(self.map.show_slide, *shown_as),
            owner=self,
        )
        self._refresh()

    def let_go(self, slide: Slide) -> None:
        """Work on a slide that has left the viewer no more."""
        self._jobs.let_go(slide)

    def showEvent(self, event: Any) -> None:  # noqa: N802
        """Come beside the other docks."""
        super().showEvent(event)
        self._soon()

    def resizeEvent(self, event: Any) -> None:  # noqa: N802
        """Show what is seen beside another size of this dock."""
        super().resizeEvent(event)
        self._soon()

    def _layer(self) -> Layer | None:
        """Return a layer of the slide, the active one if it is."""
        layers = [self.viewer.layers.selection.active, *self.viewer.layers]
        return next((each for each in layers if each and slide_of(each) is self.slide), None)

    def _soon(self, event: Any = None) -> None:
        if self.isVisible() and not self._timer.isActive():
            self._timer.start()

    def _refresh(self) -> None:
        layer, slide = self._layer(), self.slide
        if layer is None or slide is None:
            return
        flat = self.viewer.dims.ndisplay == 2
        self.map.show_view(view(self.viewer, layer) if flat else None)
        objective = objective_of(slide)
        shown = screen_pixels(self.viewer, layer)
        self.magnification.setText(
            f"Shown at {shown * objective:.3g}{TIMES}" if objective else f"Shown at {shown:.1%}"
        )
        x, y = cursor(self.viewer, layer)
        width, height = slide.dimensions
        text = ""
        if self.viewer.mouse_over_canvas and 0 <= x < width and 0 <= y < height:
            text = f"x {int(x)}, y {int(y)} px"
            if slide.mpp is not None:
                text = f"x {x * slide.mpp[0]:.1f}, y {y * slide.mpp[1]:.1f} µm\n{text}"
        self.position.setText(text)

    def _look_at(self, x: float, y: float) -> None:
        layer = self._layer()
        if layer is not None:
            look_at(self.viewer, layer, x, y)

    def _magnify(self, number: int) -> None:
        layer, slide = self._layer(), self.slide
        objective = None if slide is None else objective_of(slide)
        if layer is not None and objective:
            set_screen_pixels(self.viewer, layer, number / objective)

    def _go(self) -> None:
        slide = self.slide
        found = POSITION.fullmatch(self.goal.text())
        if slide is None:
            return
        try:
            x, y = (float(text) for text in found.groups()) if found else (None, None)
        except ValueError:
            x = y = None
        if x is None or y is None:
            self.position.setText("Write two numbers, x and y: 12000, 8500")
            return
        if self.unit.currentText() == MICROMETRES and slide.mpp is not None:
            x, y = x / slide.mpp[0], y / slide.mpp[1]
        width, height = slide.dimensions
        if not (0 <= x <= width and 0 <= y <= height):
            self.position.setText("This position lies outside of the slide.")
            return
        self._look_at(x, y)


def _row(*widgets: QWidget) -> QHBoxLayout:
    row = QHBoxLayout()
    row.setSpacing(3)
    for widget in widgets:
        row.addWidget(widget)
    return row
