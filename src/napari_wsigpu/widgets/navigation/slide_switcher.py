"""The "Slides" dock: chooses which of a viewer's slides are visible."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from qtpy.QtCore import QSize, Qt
from qtpy.QtGui import QPixmap
from qtpy.QtWidgets import QListWidget, QListWidgetItem

from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.slide.facts import title
from napari_wsigpu.viewer.annotations.annotator import annotator_of
from napari_wsigpu.viewer.napari_internals import main_window
from napari_wsigpu.viewer.view.arrangement import (
    has_copy,
    line_up,
    remove_slide,
    show_all,
    show_only,
    show_side_by_side,
)
from napari_wsigpu.viewer.window.main_window import soon
from napari_wsigpu.widgets.dock.slide_dock import SlideDock
from napari_wsigpu.widgets.kit.parts import Hosted, LeavesSlideKeys, Panel, Text, button, flow
from napari_wsigpu.widgets.kit.picture import icon_of, overview_image

if TYPE_CHECKING:
    from collections.abc import Callable

    from napari import Viewer
    from napari.utils.events import Event
    from qtpy.QtGui import QImage

    from napari_wsigpu.slide.slide import Slide

THUMBNAIL = 48  # pixels
NO_SLIDE = "Open slides to switch between them."


class _List(LeavesSlideKeys, QListWidget):  # type: ignore[misc]
    pass


class SlideSwitcher(SlideDock):
    """Lists the viewer's slides; a click on one hides all others.

    Parameters
    ----------
    napari_viewer : Viewer
        The viewer whose slides are listed.
    """

    title_in_tabs = "Slides"

    def __init__(self, napari_viewer: Viewer) -> None:
        super().__init__(napari_viewer, NO_SLIDE)
        self._listed: list[Slide] = []
        self._is_side_by_side = False
        self.list = Hosted(_List(), "Slides", "Click a slide to hide the others")
        self.list.native.setTextElideMode(Qt.ElideMiddle)
        self.list.native.setIconSize(QSize(THUMBNAIL, THUMBNAIL))
        self.list.native.setHorizontalScrollBarPolicy(Qt.ScrollBarAlwaysOff)
        self.side_by_side = button(
            "Side by side",
            "Show the slides next to each other, and move and zoom them together",
            lambda: self._show(show_side_by_side),
        )
        self.all = button(
            "All",
            "Show all slides at their positions, where they may overlap",
            lambda: self._show(show_all),
        )
        self.remove = button(
            "Remove", "Remove the marked slide and its annotations from the window", self._remove
        )
        self.note = Text("Note")
        inner = Panel(self.list, flow(self.side_by_side, self.all, self.remove), self.note)
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

    def _offer(self, event: Event | None = None) -> None:
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
        if self._is_side_by_side:
            soon(self.native, self._line_up)

    def _show_thumbnail(self, row: int, image: QImage) -> None:
        self.list.native.item(row).setIcon(icon_of(QPixmap.fromImage(image)))

    def _show_only(self, item: QListWidgetItem) -> None:
        slide = self._listed[self.list.native.row(item)]
        self._show(lambda viewer: show_only(viewer, slide))

    def _show(self, arrange: Callable[[Viewer], None]) -> None:
        self._is_side_by_side = arrange is show_side_by_side
        self._arrange(arrange)

    def _remove(self) -> None:
        slide = self.slide
        if slide is None:
            return
        keeper, window = annotator_of(self.viewer), main_window(self.viewer)
        if window is not None and not has_copy(self.viewer, slide):
            if not keeper.may_leave(window, slide.path):
                return
            keeper.saved(slide.path)  # or discarded
        remove_slide(self.viewer, slide)

    def _line_up(self) -> None:
        """While slides are side by side, move new layers to the grid cells of their slides."""
        if len(self.slides()) > 1 and self.viewer.canvas.grid.enabled:
            self._arrange(line_up)

    def _arrange(self, arrange: Callable[[Viewer], None]) -> None:
        try:
            arrange(self.viewer)
        except SlideError as error:
            self.note.say(error.message)
        else:
            self.note.say("")
