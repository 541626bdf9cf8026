"""The dock "Slides": which of the viewer's slides are seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qtpy.QtCore import Qt
from qtpy.QtWidgets import QListWidget, QListWidgetItem

from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.viewer.together import show_all, show_only, show_side_by_side
from napari_wsigpu.widgets.facts import title
from napari_wsigpu.widgets.kit.parts import Hosted, Text, button, column, flow
from napari_wsigpu.widgets.slide_dock import SlideDock

if TYPE_CHECKING:
    from collections.abc import Callable

    from napari import Viewer

    from napari_wsigpu.slide.slide import Slide

NO_SLIDE = "Open slides to switch between them."


class SlideSwitcher(SlideDock):
    """Lists the viewer's slides; a click shows that slide alone.

    Parameters
    ----------
    napari_viewer : Viewer
        The viewer whose slides are listed.
    """

    title_in_tabs = "Slides"

    def __init__(self, napari_viewer: Viewer) -> None:
        super().__init__(napari_viewer, NO_SLIDE)
        self._listed: list[Slide] = []
        self.list = Hosted(QListWidget(), "Slides", "Click a slide to see it alone")
        self.list.native.setTextElideMode(Qt.ElideMiddle)
        self.list.native.setHorizontalScrollBarPolicy(Qt.ScrollBarAlwaysOff)
        self.side_by_side = button(
            "Side by side",
            "Show each slide beside the others, moved and zoomed together",
            lambda: self._show(show_side_by_side),
        )
        self.all = button(
            "All",
            "Show all slides in their places, one over the other",
            lambda: self._show(show_all),
        )
        self.note = Text("Note")
        self.note.say("")
        inner = column(self.list, flow(self.side_by_side, self.all), self.note)
        inner.native.layout().addStretch()
        self.add_details(inner)
        self.list.native.itemClicked.connect(self._show_only)
        self.list.native.itemActivated.connect(self._show_only)
        self.listen(self.viewer.layers.events.inserted, self._offer)
        self.listen(self.viewer.layers.events.removed, self._offer)
        self.follow()

    def show_slide(self, slide: Slide | None) -> None:
        """Mark the active slide."""
        self._offer()

    def _offer(self, event: Any = None) -> None:
        slides = self.slides()
        if slides != self._listed:
            self._listed = slides
            self.list.native.clear()
            for slide in slides:
                item = QListWidgetItem(title(slide))
                item.setToolTip(slide.path)
                self.list.native.addItem(item)
            self.note.say("")
        if self.slide in slides:
            self.list.native.setCurrentRow(slides.index(self.slide))
        self.side_by_side.enabled = self.all.enabled = len(slides) > 1

    def _show_only(self, item: QListWidgetItem) -> None:
        slide = self._listed[self.list.native.row(item)]
        self._show(lambda viewer: show_only(viewer, slide))

    def _show(self, arrange: Callable[[Viewer], None]) -> None:
        try:
            arrange(self.viewer)
        except SlideError as error:
            self.note.say(error.message)
        else:
            self.note.say("")
