"""The dock "Slides": which of the viewer's slides are seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qtpy.QtCore import Qt
from qtpy.QtWidgets import (
    QLabel,
    QListWidget,
    QListWidgetItem,
    QPushButton,
    QVBoxLayout,
)
from superqt import QFlowLayout

from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.viewer.together import show_all, show_only, show_side_by_side, slides_of
from napari_wsigpu.widgets.facts import title
from napari_wsigpu.widgets.slide_dock import SlideDock

if TYPE_CHECKING:
    from collections.abc import Callable

    from napari import Viewer

    from napari_wsigpu.slide.slide import Slide

SPACING = 6  # pixels
NO_SLIDE = "Open slides to switch between them."


class SlideSwitcher(SlideDock):
    """Lists the viewer's slides; a click shows that slide alone.

    Parameters
    ----------
    napari_viewer : Viewer
        The viewer whose slides are listed.
    """

    def __init__(self, napari_viewer: Viewer) -> None:
        super().__init__(napari_viewer, NO_SLIDE)
        self._listed: list[Slide] = []
        self.list = QListWidget()
        self.list.setAccessibleName("Slides")
        self.list.setToolTip("Click a slide to see it alone")
        self.list.setTextElideMode(Qt.ElideMiddle)
        self.list.setHorizontalScrollBarPolicy(Qt.ScrollBarAlwaysOff)
        self.side_by_side = _button(
            "Side by side", "Show each slide beside the others, moved and zoomed together"
        )
        self.all = _button("All", "Show all slides in their places, one over the other")
        self.note = QLabel()
        self.note.setWordWrap(True)
        self.note.setAccessibleName("Note")
        self.note.hide()
        buttons = QFlowLayout()
        buttons.setHorizontalSpacing(SPACING)
        buttons.setVerticalSpacing(SPACING)
        buttons.addWidget(self.side_by_side)
        buttons.addWidget(self.all)
        layout = QVBoxLayout(self)
        layout.addWidget(self.empty)
        layout.addWidget(self.list, 1)
        layout.addLayout(buttons)
        layout.addWidget(self.note)
        layout.addStretch()

        self.list.itemClicked.connect(self._show_only)
        self.list.itemActivated.connect(self._show_only)
        self.side_by_side.clicked.connect(lambda: self._show(show_side_by_side))
        self.all.clicked.connect(lambda: self._show(show_all))
        self.listen(self.viewer.layers.events.inserted, self._offer)
        self.listen(self.viewer.layers.events.removed, self._offer)
        self.follow()

    def show_slide(self, slide: Slide | None) -> None:
        """Mark the active slide."""
        self._offer()

    def _offer(self, event: Any = None) -> None:
        slides = slides_of(self.viewer)
        if slides != self._listed:
            self._listed = slides
            self.list.clear()
            for slide in slides:
                item = QListWidgetItem(title(slide))
                item.setToolTip(slide.path)
                self.list.addItem(item)
            self.note.hide()
        if self.slide in slides:
            self.list.setCurrentRow(slides.index(self.slide))
        self.list.setVisible(bool(slides))
        for button in (self.side_by_side, self.all):
            button.setEnabled(len(slides) > 1)

    def _show_only(self, item: QListWidgetItem) -> None:
        slide = self._listed[self.list.row(item)]
        self._show(lambda viewer: show_only(viewer, slide))

    def _show(self, arrange: Callable[[Viewer], None]) -> None:
        try:
            arrange(self.viewer)
        except SlideError as error:
            self.note.setText(error.message)
            self.note.show()
        else:
            self.note.hide()


def _button(text: str, tip: str) -> QPushButton:
    button = QPushButton(text)
    button.setToolTip(tip)
    return button
