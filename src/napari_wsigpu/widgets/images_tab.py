"""The inspector's tab "Associated images": a card for each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qtpy.QtCore import Signal
from qtpy.QtWidgets import QLabel, QVBoxLayout, QWidget

from napari_wsigpu.widgets.column import Column
from napari_wsigpu.widgets.image_card import ImageCard

if TYPE_CHECKING:
    from napari_wsigpu.slide.slide import Slide
    from napari_wsigpu.widgets.disclosure import Disclosure
    from napari_wsigpu.widgets.jobs import Jobs


class ImagesTab(Column):
    """Cards of the slide's associated images, decoded when the tab is looked at.

    Attributes
    ----------
    opened : Signal(str, object)
        Name and pixels of an image to be opened as a layer.
    cards : dict of str to ImageCard
        The cards by the images' names.
    """

    opened = Signal(str, object)

    def __init__(self, jobs: Jobs) -> None:
        inner = QWidget()
        super().__init__(inner)
        self._jobs = jobs
        self.cards: dict[str, ImageCard] = {}
        self.none = QLabel("The file holds no associated images.")
        self.none.setWordWrap(True)
        self._layout = QVBoxLayout(inner)
        self._layout.addWidget(self.none)
        self._layout.addStretch()

    def show_slide(self, slide: Slide | None, disclosure: Disclosure) -> None:
        """Show the images of another slide, or none."""
        for card in self.cards.values():
            card.forget()
            card.hide()  # without a parent it would be a window until it is deleted
            card.deleteLater()
        self.cards = {}
        if slide is not None:
            for name in slide.associated_images:
                card = ImageCard(slide, name, disclosure, self._jobs)
                card.opened.connect(self.opened)
                self._layout.insertWidget(self._layout.count() - 1, card)
                self.cards[name] = card
        self.none.setVisible(not self.cards)
        if self.isVisible():
            self._load()

    def reload(self) -> None:
        """Decode what is shown again."""
        for card in self.cards.values():
            card.reload()

    def showEvent(self, event: Any) -> None:  # noqa: N802
        """Decode what may be shown, now that it is looked at."""
        super().showEvent(event)
        self._load()

    def _load(self) -> None:
        for card in self.cards.values():
            card.load()
