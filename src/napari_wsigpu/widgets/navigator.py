"""The dock "Navigator": where the view is on the slide, and how it gets elsewhere."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from magicgui.widgets import LineEdit
from qtpy.QtCore import QTimer

from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.slide.facts import TIMES
from napari_wsigpu.slide.pictures import aspect_of
from napari_wsigpu.viewer.navigation import (
    MAGNIFICATIONS,
    look_at,
    magnify,
    objective_of,
    position_in,
    whereabouts,
)
from napari_wsigpu.widgets.kit.overview_map import OverviewMap
from napari_wsigpu.widgets.kit.parts import Hosted, Panel, Text, button, choice, offer, row
from napari_wsigpu.widgets.kit.picture import overview_image
from napari_wsigpu.widgets.slide_dock import SlideDock

if TYPE_CHECKING:
    from napari import Viewer

    from napari_wsigpu.slide.slide import Slide

NO_SLIDE = "Open a slide, or select its layer, to find your way on it."
UNKNOWN = "The file names neither objective nor pixel size"
MICROMETRES, PIXELS = "µm", "px"
REFRESH_MS = 30


class Navigator(SlideDock):
    """Shows where the view is, and moves it: by the overview, magnification or position.

    Parameters
    ----------
    napari_viewer : Viewer
        The viewer.
    """

    title_in_tabs = "Navigator"

    def __init__(self, napari_viewer: Viewer) -> None:
        super().__init__(napari_viewer, NO_SLIDE)
        self.map = Hosted(OverviewMap(), "Overview")
        self.buttons = {
            number: button(f"{number}{TIMES}", UNKNOWN, partial(self._magnify, number))
            for number in MAGNIFICATIONS
        }
        self.magnification = Text("Magnification")
        self.goal = LineEdit(
            tooltip="Two numbers, x and y, from the upper left corner of the slide"
        )
        self.goal.native.setPlaceholderText("x, y")
        self.goal.native.setAccessibleName("Position")
        self.unit = choice("Unit", "The unit of the position")
        self.go = button("Go", "Move this position to the middle of the view", self._go)
        self.position = Text("Position under the mouse")
        jump = row(self.goal, self.unit, self.go)
        inner = Panel(
            self.map,
            row(*self.buttons.values(), narrow=True, spacing=3),
            jump,
            self.magnification,
            self.position,
        )
        for part, share in ((self.map, 1), (self.goal, 1)):
            part.native.parent().layout().setStretchFactor(part.native, share)
        inner.native.layout().addStretch()
        self.add_details(inner)

        self._timer = QTimer(self.native)
        self._timer.setSingleShot(True)
        self._timer.setInterval(REFRESH_MS)
        self._timer.timeout.connect(self._refresh)
        self.map.native.moved.connect(self._look_at)
        self.goal.native.returnPressed.connect(self._go)
        camera, canvas = self.viewer.scene.camera.events, self.viewer.canvas.events
        others = self.viewer.events.theme, self.viewer.cursor.events.position
        for signal in (camera.center, camera.zoom, canvas.size, *others):
            self.listen(signal, self._soon)
        self.follow()

    def show_slide(self, slide: Slide | None) -> None:
        """Show another slide, or none."""
        self.jobs.drop(self)
        if slide is None:
            return
        known = objective_of(slide) is not None
        for number, each in self.buttons.items():
            each.enabled = known
            each.tooltip = f"Show the slide as by a {number}{TIMES} objective" if known else UNKNOWN
        units = [PIXELS] if slide.mpp is None else [MICROMETRES, PIXELS]
        offer(self.unit, [(unit, unit) for unit in units])
        shown_as = slide.dimensions, aspect_of(slide)
        self.map.native.show_slide(*shown_as)
        self.jobs.start(
            "Reading the overview",
            slide,
            partial(overview_image, slide),
            partial(self.map.native.show_slide, *shown_as),
            owner=self,
        )
        self._refresh()

    def on_shown(self, event: Any) -> None:
        """Follow the view again."""
        super().on_shown(event)
        self._soon()

    def on_resized(self) -> None:
        """Show what is seen next to another size of this dock."""
        self._soon()

    def _soon(self, event: Any = None) -> None:
        if self.visible and not self._timer.isActive():
            self._timer.start()

    def _refresh(self) -> None:
        layer, slide = self.layer_of_slide(), self.slide
        if layer is not None and slide is not None:
            found = whereabouts(self.viewer, layer, slide)
            self.map.native.show_view(found.frame)
            self.magnification.value = found.magnification
            self.position.value = found.position

    def _look_at(self, x: float, y: float) -> None:
        layer = self.layer_of_slide()
        if layer is not None:
            look_at(self.viewer, layer, x, y)

    def _magnify(self, number: int) -> None:
        layer = self.layer_of_slide()
        if layer is not None and self.slide is not None:
            magnify(self.viewer, layer, self.slide, number)

    def _go(self) -> None:
        if self.slide is not None:
            try:
                in_micrometres = self.unit.value == MICROMETRES
                found = position_in(self.goal.value, self.slide, in_micrometres=in_micrometres)
            except SlideError as error:
                self.position.value = str(error)
            else:
                self._look_at(*found)
