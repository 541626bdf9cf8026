"""The "Navigator" dock: shows and changes the position of the view on a slide."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from magicgui.widgets import LineEdit

from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.slide.facts import TIMES
from napari_wsigpu.slide.pictures import pixel_aspect
from napari_wsigpu.viewer.layers.slide_layers import shown_composite
from napari_wsigpu.viewer.view.navigation import (
    MAGNIFICATIONS,
    center_on,
    describe_view,
    magnifications_of,
    magnify,
    objective_of,
    position_in,
)
from napari_wsigpu.viewer.window.main_window import single_shot
from napari_wsigpu.widgets.dock.slide_dock import SlideDock
from napari_wsigpu.widgets.kit.overview_map import OverviewMap
from napari_wsigpu.widgets.kit.parts import Hosted, Panel, Text, button, choice, offer, row
from napari_wsigpu.widgets.kit.picture import overview_image

if TYPE_CHECKING:
    from napari import Viewer
    from napari.utils.events import Event

    from napari_wsigpu.model.composite import Composite
    from napari_wsigpu.slide.slide import Slide

NO_SLIDE = "Open a slide, or select its layer, to navigate it."
UNKNOWN = "The file states neither the objective nor the pixel size"
MICROMETERS, PIXELS = "µm", "px"
# The map follows channels once they have not changed for this long.
REFRESH_MS, REST_MS = 30, 300


class Navigator(SlideDock):
    """Shows the view's position; its overview, buttons and coordinates move the view.

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
        self.go = button("Go", "Center the view on this position", self._go)
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

        self._refresh_timer = single_shot(self._refresh, REFRESH_MS, self.native)
        self._overview_timer = single_shot(self._read_overview, REST_MS, self.native)
        self._composite: Composite | None = None  # of the map
        self.map.native.moved.connect(self._center_on)
        self.goal.native.returnPressed.connect(self._go)
        camera, canvas = self.viewer.scene.camera.events, self.viewer.canvas.events
        self._has_mouse = False  # napari's cursor has a position before the mouse moves
        for signal in (camera.center, camera.zoom, canvas.size, self.viewer.events.theme):
            self.listen(signal, self._refresh_soon)
        self.listen(self.viewer.cursor.events.position, self._on_mouse_moved)
        self.follow()

    def show_slide(self, slide: Slide | None) -> None:
        """Show another slide, or none."""
        self.jobs.drop(self)
        if slide is None:
            return
        offered, objective = magnifications_of(slide), objective_of(slide)
        scanned = f"The slide was scanned at {objective or 0:.3g}{TIMES}"
        for number, each in self.buttons.items():
            each.enabled = number in offered
            tip = f"Show the slide as through a {number}{TIMES} objective"
            each.tooltip = tip if each.enabled else scanned if objective else UNKNOWN
        units = [PIXELS] if slide.mpp is None else [MICROMETERS, PIXELS]
        offer(self.unit, [(unit, unit) for unit in units])
        self.map.native.show_slide(slide.dimensions, pixel_aspect(slide))
        layer = self.layer_of_slide()
        if layer is not None and shown_composite(layer) is not None:
            # napari disconnects the method when the dock is deleted.
            layer.events.set_data.connect(self._refresh_soon)
        self._read_overview()
        self._refresh()

    def _read_overview(self) -> None:
        """Draw the map, with channels as the layer shows them."""
        slide, composite = self.slide, shown_composite(self.layer_of_slide())
        if slide is not None:
            self._composite = composite
            self.jobs.drop(self)
            work = partial(overview_image, slide, composite)
            done = partial(self.map.native.show_slide, slide.dimensions, pixel_aspect(slide))
            self.jobs.start("Reading the overview", slide, work, done, owner=self)

    def on_shown(self, spontaneous: bool = False) -> None:
        """Update the dock when it becomes visible."""
        super().on_shown(spontaneous)
        self.position.reserve(2)  # micrometers and pixels
        self._refresh_soon()

    def on_resized(self) -> None:
        """Update the frame, because resizing the dock also resizes the canvas."""
        self._refresh_soon()

    def _refresh_soon(self, event: Event | None = None) -> None:
        if self.visible and not self._refresh_timer.isActive():
            self._refresh_timer.start()

    def _refresh(self) -> None:
        layer, slide = self.layer_of_slide(), self.slide
        if layer is not None and slide is not None:
            found = describe_view(self.viewer, layer, slide)
            self.map.native.show_view(found.frame)
            self.magnification.value = found.magnification
            self.position.value = found.position if self._has_mouse else ""
            if shown_composite(layer) is not self._composite:
                self._overview_timer.start()

    def _on_mouse_moved(self, event: Event) -> None:
        self._has_mouse = True
        self._refresh_soon()

    def _center_on(self, x: float, y: float) -> None:
        layer = self.layer_of_slide()
        if layer is not None:
            center_on(self.viewer, layer, x, y)

    def _magnify(self, number: int) -> None:
        layer = self.layer_of_slide()
        if layer is not None and self.slide is not None:
            magnify(self.viewer, layer, self.slide, number)

    def _go(self) -> None:
        if self.slide is not None:
            try:
                in_micrometers = self.unit.value == MICROMETERS
                found = position_in(self.goal.value, self.slide, in_micrometers=in_micrometers)
            except SlideError as error:
                self.position.value = str(error)
            else:
                self._center_on(*found)
