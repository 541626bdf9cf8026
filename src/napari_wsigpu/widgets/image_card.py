"""One associated image in the inspector: its picture, and what can be done with it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtpy.QtCore import Signal
from qtpy.QtWidgets import (
    QHBoxLayout,
    QLabel,
    QPushButton,
    QVBoxLayout,
    QWidget,
)
from superqt import QFlowLayout

from napari_wsigpu.model.privacy import PRIVATE_IMAGES
from napari_wsigpu.viewer.layers import slide_name
from napari_wsigpu.viewer.notifications import show_info
from napari_wsigpu.widgets.facts import TIMES
from napari_wsigpu.widgets.picture_view import PictureView, to_image
from napari_wsigpu.widgets.pictures import associated, rgb, save
from napari_wsigpu.widgets.saving import ask_where_to_save

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from qtpy.QtGui import QImage

    from napari_wsigpu.slide.slide import Slide
    from napari_wsigpu.widgets.disclosure import Disclosure
    from napari_wsigpu.widgets.jobs import Jobs

WIDTH, HEIGHT = 18, 9
SPACING = 6  # pixels
FILTERS = "PNG (*.png);;TIFF (*.tif *.tiff)"
VEIL = "Private: neither decoded nor shown until you ask."


class ImageCard(QWidget):  # type: ignore[misc]
    """A card of one associated image; nothing is decoded before `load` or a click.

    Attributes
    ----------
    opened : Signal(str, object)
        Name and pixels of the image, to be opened as a layer.
    """

    opened = Signal(str, object)

    def __init__(self, slide: Slide, name: str, disclosure: Disclosure, jobs: Jobs) -> None:
        super().__init__()
        self._slide = slide
        self._name = name
        self._disclosure = disclosure
        self._jobs = jobs
        self._asked = False
        self._broken = False

        width, height = slide.associated_images[name].size
        self.title = QLabel(f"<b>{name}</b>")
        self.size_label = QLabel(f"{width:,} {TIMES} {height:,} px")
        self.picture = PictureView(WIDTH, HEIGHT)
        self.picture.setAccessibleName(f"{name} image")
        self.reveal = _button("Show", f"Show the {name} image", self._toggle)
        self.open = _button(
            "Open as layer", f"Open the {name} image as a layer beside the slide", self._open
        )
        self.save = _button("Save…", f"Save the {name} image as PNG or TIFF", self._save)

        head = QHBoxLayout()
        head.addWidget(self.title)
        head.addStretch()
        head.addWidget(self.size_label)
        buttons = QFlowLayout()
        buttons.setHorizontalSpacing(SPACING)
        buttons.setVerticalSpacing(SPACING)
        for button in (self.reveal, self.open, self.save):
            buttons.addWidget(button)
        layout = QVBoxLayout(self)
        layout.addLayout(head)
        layout.addWidget(self.picture)
        layout.addLayout(buttons)
        self.reveal.setVisible(name.casefold() in PRIVATE_IMAGES)
        self._update()

    def load(self) -> None:
        """Decode and show the picture, unless it is hidden or was asked for already."""
        if self._asked or self._disclosure.hides(self._name):
            return
        self._asked = True
        self._broken = False
        self._update()
        self.picture.show_text("Decoding…")
        self._jobs.start(
            f"Decoding the {self._name} image",
            self._slide,
            partial(_preview, self._slide, self._name),
            self.picture.show_picture,
            self._fail,
            owner=self,
        )

    def reload(self) -> None:
        """Decode the picture again, if it is shown."""
        if self._asked:
            self.forget()
            self.load()

    def forget(self) -> None:
        """Drop what is being done for this card."""
        self._jobs.drop(self)
        self._asked = False

    def _toggle(self) -> None:
        if self._disclosure.hides(self._name):
            self._disclosure.images.add(self._name.casefold())
            self.load()
        else:
            self._disclosure.images.discard(self._name.casefold())
            self.forget()
        self._update()

    def _update(self) -> None:
        hidden = self._disclosure.hides(self._name)
        self.reveal.setText("Show" if hidden else "Hide")
        self.reveal.setAccessibleName(f"{self.reveal.text()} the {self._name} image")
        self.reveal.setToolTip(self.reveal.accessibleName())
        for button in (self.open, self.save):
            button.setEnabled(not hidden and not self._broken)
        if hidden:
            self.picture.show_veil(VEIL)

    def _fail(self, sentence: str) -> None:
        self._broken = True
        self._update()
        self.picture.show_text(sentence)

    def _open(self) -> None:
        self._jobs.start(
            f"Opening the {self._name} image",
            self._slide,
            partial(associated, self._slide, self._name),
            self._emit,
            self._fail,
            owner=self,
        )

    def _emit(self, pixels: NDArray[Any]) -> None:
        self.opened.emit(self._name, pixels)

    def _save(self) -> None:
        folder = Path(self._slide.path).parent
        start = folder / f"{slide_name(self._slide)} {self._name}.png"
        path = ask_where_to_save(self, f"Save the {self._name} image", start, FILTERS)
        if not path:
            return
        slide, name = self._slide, self._name
        self._jobs.start(
            f"Saving the {name} image",
            slide,
            lambda: save(associated(slide, name), path),
            lambda _: show_info(f"Saved '{Path(path).name}'."),
        )


def _preview(slide: Slide, name: str) -> QImage:
    return to_image(rgb(associated(slide, name)))


def _button(text: str, name: str, slot: Any) -> QPushButton:
    button = QPushButton(text)
    button.setAccessibleName(name)
    button.setToolTip(name)
    button.clicked.connect(slot)
    return button
