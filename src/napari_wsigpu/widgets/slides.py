"""The dock "Slides": which of the viewer's slides are seen."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from qtpy.QtCore import QSize, Qt
from qtpy.QtGui import QIcon, QPixmap
from qtpy.QtWidgets import QListWidget, QListWidgetItem

from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.slide.facts import title
from napari_wsigpu.viewer.together import show_all, show_only, show_side_by_side
from napari_wsigpu.widgets.kit.parts import Hosted, Panel, Text, button, flow
from napari_wsigpu.widgets.kit.picture import overview_image
from napari_wsigpu.widgets.slide_dock import SlideDock

if TYPE_CHECKING:
    from collections.abc import Callable

    from napari import Viewer
    from qtpy.QtGui import QImage

    from napari_wsigpu.slide.slide import Slide

THUMBNAIL = 48  # pixels
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
        self.list.native.setIconSize(QSize(THUMBNAIL, THUMBNAIL))
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
        inner = Panel(self.list, flow(self.side_by_side, self.all), self.note)
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
            self.jobs.drop(self)
            self.list.native.clear()
            for row, slide in enumerate(slides):
                item = QListWidgetItem(title(slide))
                item.setToolTip(slide.path)
                self.list.native.addItem(item)
                work, show = partial(overview_image, slide), partial(self._show_thumbnail, row)
                self.jobs.start("Making thumbnails", slide, work, show, owner=self)
            self.note.say("")
        if self.slide in slides:
            self.list.native.setCurrentRow(slides.index(self.slide))
        self.side_by_side.enabled = self.all.enabled = len(slides) > 1

    def _show_thumbnail(self, row: int, image: QImage) -> None:
        self.list.native.item(row).setIcon(QIcon(QPixmap.fromImage(image)))

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
