"""The part of the dock "Annotations" that makes and saves layers of labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qtpy.QtWidgets import QComboBox, QGridLayout, QPushButton, QSizePolicy, QWidget

from napari_wsigpu.viewer.new_labels import best_level
from napari_wsigpu.widgets.export_form import level_names

if TYPE_CHECKING:
    from napari_wsigpu.slide.slide import Slide


class LabelsPanel(QWidget):  # type: ignore[misc]
    """A level, and what is done with labels of it.

    Attributes
    ----------
    level : QComboBox
        Levels of the slide, by their names; the data are their numbers.
    add, save : QPushButton
        To make labels of that level, and to save the selected ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self.level = QComboBox()
        self.level.setAccessibleName("Level of new labels")
        self.level.setToolTip("The level whose pixels are painted; a finer one takes more memory")
        self.add = QPushButton("New labels")
        self.add.setToolTip("Paint on the slide with the pixels of this level")
        self.save = QPushButton("Save labels…")
        self.save.setToolTip(
            "Save the layer of labels that is selected as OME-Zarr, with its level of the slide"
        )
        layout = QGridLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(self.level, 0, 0, 1, 2)
        layout.addWidget(self.add, 1, 0)
        layout.addWidget(self.save, 1, 1)
        for part in (self.level, self.add, self.save):
            part.setSizePolicy(QSizePolicy.Ignored, QSizePolicy.Fixed)

    def show_slide(self, slide: Slide) -> None:
        """Offer the levels of another slide."""
        self.level.clear()
        for number, name in level_names(slide):
            self.level.addItem(name, number)
        self.level.setCurrentIndex(self.level.findData(best_level(slide)))
