"""The inspector's tab "Metadata": everything the file says, to search, copy and export."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from napari.utils.notifications import show_info
from qtpy.QtCore import QEvent, QModelIndex, Qt, Signal
from qtpy.QtGui import QKeySequence
from qtpy.QtWidgets import (
    QAction,
    QApplication,
    QCheckBox,
    QFileDialog,
    QGridLayout,
    QHBoxLayout,
    QLabel,
    QLineEdit,
    QPushButton,
    QTreeView,
    QVBoxLayout,
    QWidget,
)

from napari_wsigpu.privacy import masked
from napari_wsigpu.widgets.metadata_model import MetadataModel
from napari_wsigpu.widgets.pictures import save_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from napari_wsigpu.slide import Slide
    from napari_wsigpu.widgets.disclosure import Disclosure
    from napari_wsigpu.widgets.jobs import Jobs


class MetadataTree(QTreeView):  # type: ignore[misc]
    """A tree that copies with the keys that copy everywhere."""

    copied = Signal()

    def event(self, event: QEvent) -> bool:
        """Take the keys for copying before the window's own shortcuts do."""
        if event.type() == QEvent.ShortcutOverride and event.matches(QKeySequence.Copy):
            event.accept()
            return True
        return bool(super().event(event))

    def keyPressEvent(self, event: Any) -> None:  # noqa: N802
        """Copy, or do what trees do."""
        if event.matches(QKeySequence.Copy):
            self.copied.emit()
        else:
            super().keyPressEvent(event)


class MetadataTab(QWidget):  # type: ignore[misc]
    """A tree of the slide's metadata.

    Attributes
    ----------
    disclosed : Signal(object)
        The `Disclosure` in which the user has shown or hidden private fields.
    """

    disclosed = Signal(object)

    def __init__(self, jobs: Jobs) -> None:
        super().__init__()
        self._jobs = jobs
        self._slide: Slide | None = None
        self._disclosure: Disclosure | None = None
        self._metadata: dict[str, Any] = {}

        self.search = QLineEdit()
        self.search.setPlaceholderText("Names and values")
        self.search.setClearButtonEnabled(True)
        self.search.setAccessibleName("Search metadata")
        label = QLabel("&Search")
        label.setBuddy(self.search)
        self.model = MetadataModel()
        self.model.setParent(self)
        self.tree = MetadataTree()
        self.tree.setModel(self.model)
        self.tree.setUniformRowHeights(True)
        self.tree.setEditTriggers(QTreeView.NoEditTriggers)
        self.tree.setAccessibleName("Metadata")
        self.tree.setContextMenuPolicy(Qt.ActionsContextMenu)
        self.tree.setTextElideMode(Qt.ElideRight)
        self.tree.setHorizontalScrollBarPolicy(Qt.ScrollBarAlwaysOff)
        self.nothing = QLabel("Nothing holds this text.")
        self.private = QCheckBox("Show &private fields")
        self.private.setToolTip(
            "Show, copy and export also what may name the patient, such as names, dates and codes"
        )

        self.copy_value = self._button(
            "Copy &value", "Copy the whole value of the selected row", self._copy_value
        )
        self.copy_path = self._button(
            "Copy pat&h", "Copy the names that lead to the selected row", self._copy_path
        )
        self.copy_json = self._button(
            "Copy as &JSON", "Copy all metadata to the clipboard", self._copy_json
        )
        self.export = self._button("&Export…", "Save all metadata as a JSON file", self._export)
        for button in (self.copy_value, self.copy_path):
            action = QAction(button.text().replace("&", ""), self.tree)
            action.triggered.connect(button.click)
            self.tree.addAction(action)

        top = QHBoxLayout()
        top.addWidget(label)
        top.addWidget(self.search, 1)
        buttons = QGridLayout()
        for place, button in enumerate(
            (self.copy_value, self.copy_path, self.copy_json, self.export)
        ):
            buttons.addWidget(button, *divmod(place, 2))
        layout = QVBoxLayout(self)
        layout.addLayout(top)
        layout.addWidget(self.tree, 1)
        layout.addWidget(self.nothing)
        layout.addWidget(self.private)
        layout.addLayout(buttons)

        self.search.textChanged.connect(self._search)
        self.private.toggled.connect(self._disclose)
        self.tree.copied.connect(self._copy_value)
        self._show()

    def show_slide(self, slide: Slide | None, disclosure: Disclosure) -> None:
        """Show the metadata of another slide, or none."""
        self._slide, self._disclosure = slide, disclosure
        self.private.blockSignals(True)
        self.private.setChecked(disclosure.fields)
        self.private.blockSignals(False)
        self._show()

    def _show(self) -> None:
        """Show what may be shown: hidden values don't even reach the tree."""
        metadata = {} if self._slide is None else self._slide.metadata
        shown = self._disclosure is not None and self._disclosure.fields
        self._metadata = metadata if shown else masked(metadata)
        self.model.show_metadata(self._metadata)
        self.tree.selectionModel().currentChanged.connect(self._enable)
        self._search(self.search.text())
        widest = self.tree.sizeHintForColumn(0)
        self.tree.setColumnWidth(0, min(widest, max(self.width(), 1) // 2))
        self._enable()

    def _search(self, text: str) -> None:
        self.model.setFilterFixedString(text)
        if text:
            self.tree.expandAll()
        else:
            self.tree.collapseAll()
            self.tree.expandToDepth(0)
        self.nothing.setVisible(bool(text) and not self.model.rowCount())

    def _enable(self, current: QModelIndex | None = None, previous: Any = None) -> None:
        selected = self.tree.currentIndex().isValid()
        self.copy_value.setEnabled(selected)
        self.copy_path.setEnabled(selected)

    def _disclose(self, shown: bool) -> None:
        if self._disclosure is not None:
            self._disclosure.fields = shown
            self._show()
            self.disclosed.emit(self._disclosure)

    def _copy_value(self) -> None:
        if self.tree.currentIndex().isValid():
            QApplication.clipboard().setText(self.model.value(self.tree.currentIndex()))

    def _copy_path(self) -> None:
        QApplication.clipboard().setText(self.model.path(self.tree.currentIndex()))

    def _copy_json(self) -> None:
        QApplication.clipboard().setText(_json(self._metadata))
        show_info("Copied the metadata")

    def _export(self) -> None:
        slide = self._slide
        if slide is None:
            return
        start = Path(slide.path).with_suffix(".json")
        path, _ = QFileDialog.getSaveFileName(self, "Export metadata", str(start), "JSON (*.json)")
        if path:
            metadata = self._metadata
            self._jobs.start(
                "Exporting metadata",
                slide,
                lambda: save_text(_json(metadata), path),
                partial(_say_saved, path),
            )

    def _button(self, text: str, tip: str, slot: Callable[[], None]) -> QPushButton:
        button = QPushButton(text)
        button.setToolTip(tip)
        button.clicked.connect(slot)
        return button


def _json(metadata: dict[str, Any]) -> str:
    return json.dumps(metadata, indent=2, ensure_ascii=False)


def _say_saved(path: str, result: None) -> None:
    show_info(f"Saved {path}")
