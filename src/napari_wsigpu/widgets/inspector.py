"""The dock "Slide inspector": what the active slide is, and what its file says."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from napari.utils.notifications import show_info
from qtpy.QtCore import QSize, Qt
from qtpy.QtWidgets import (
    QAbstractItemView,
    QApplication,
    QFormLayout,
    QHeaderView,
    QLabel,
    QLineEdit,
    QPushButton,
    QTableWidget,
    QTableWidgetItem,
    QVBoxLayout,
    QWidget,
)

from napari_wsigpu.viewer.layers import slide_of
from napari_wsigpu.widgets.facts import LevelFacts, facts, flatten, level_facts, title

if TYPE_CHECKING:
    from collections.abc import Sequence

    from napari import Viewer

    from napari_wsigpu.slide import Slide

PREFERRED_WIDTH = 430
NO_SLIDE = "Open a slide, or select its layer, to see what it is."


class SlideInspector(QWidget):  # type: ignore[misc]
    """Shows the slide of the active layer.

    While a layer of another kind is active, the slide that was shown last stays, as long as
    it is in the viewer.

    Parameters
    ----------
    napari_viewer : Viewer
        The viewer whose active layer is followed.
    """

    def __init__(self, napari_viewer: Viewer) -> None:
        super().__init__()
        self._viewer = napari_viewer
        self.slide: Slide | None = None

        self.title = QLabel(NO_SLIDE)
        self.title.setWordWrap(True)
        self.title.setTextInteractionFlags(Qt.TextSelectableByMouse)
        self.facts = QFormLayout()
        self.levels = _table(LevelFacts._fields)
        self.search = QLineEdit()
        self.search.setPlaceholderText("Search names and values")
        self.search.setClearButtonEnabled(True)
        self.fields = _table(("name", "value"))
        self.copy = QPushButton("Copy as JSON")
        self.copy.setToolTip("Copy all metadata of the slide to the clipboard")
        self.details = QWidget()

        inner = QVBoxLayout(self.details)
        inner.setContentsMargins(0, 0, 0, 0)
        inner.addLayout(self.facts)
        inner.addWidget(QLabel("Levels"))
        inner.addWidget(self.levels, 1)
        inner.addWidget(QLabel("Metadata"))
        inner.addWidget(self.search)
        inner.addWidget(self.fields, 2)
        inner.addWidget(self.copy)
        outer = QVBoxLayout(self)
        outer.addWidget(self.title)
        outer.addWidget(self.details, 1)
        outer.addStretch()

        self.search.textChanged.connect(self._filter)
        self.copy.clicked.connect(self._copy)
        self._connections = (
            (napari_viewer.layers.selection.events.active, self._follow),
            (napari_viewer.layers.events.removed, self._follow),
        )
        for signal, slot in self._connections:
            signal.connect(slot)
        self.destroyed.connect(_disconnector(self._connections))
        self._follow()

    def sizeHint(self) -> QSize:  # noqa: N802
        """Return a size that holds the table of levels."""
        return QSize(PREFERRED_WIDTH, super().sizeHint().height())

    def _follow(self, event: Any = None) -> None:
        slide = slide_of(self._viewer.layers.selection.active)
        if slide is None and any(slide_of(layer) is self.slide for layer in self._viewer.layers):
            slide = self.slide
        self._show(slide)

    def _show(self, slide: Slide | None) -> None:
        self.slide = slide
        self.details.setVisible(slide is not None)
        while self.facts.rowCount():
            self.facts.removeRow(0)
        if slide is None:
            self.title.setText(NO_SLIDE)
            return
        self.title.setText(f"<b>{title(slide)}</b>")
        self.title.setToolTip(slide.path)
        for name, value in facts(slide):
            label = QLabel(value)
            label.setWordWrap(True)
            label.setTextInteractionFlags(Qt.TextSelectableByMouse)
            self.facts.addRow(name, label)
        _fill(self.levels, level_facts(slide))
        _fill(self.fields, list(flatten(slide.metadata)))
        self._filter(self.search.text())

    def _filter(self, text: str) -> None:
        wanted = text.casefold()
        for row in range(self.fields.rowCount()):
            cells = (self.fields.item(row, column).text() for column in range(2))
            self.fields.setRowHidden(row, all(wanted not in cell.casefold() for cell in cells))

    def _copy(self) -> None:
        if self.slide is not None:
            text = json.dumps(self.slide.metadata, indent=2, ensure_ascii=False)
            QApplication.clipboard().setText(text)
            show_info(f"Copied the metadata of {title(self.slide)}")


def _table(columns: Sequence[str]) -> QTableWidget:
    table = QTableWidget(0, len(columns))
    table.setHorizontalHeaderLabels([column.capitalize() for column in columns])
    table.verticalHeader().hide()
    table.setEditTriggers(QAbstractItemView.NoEditTriggers)
    table.setSelectionBehavior(QAbstractItemView.SelectRows)
    table.setWordWrap(False)
    table.setTabKeyNavigation(False)
    table.horizontalHeader().setSectionResizeMode(QHeaderView.ResizeToContents)
    table.horizontalHeader().setStretchLastSection(True)
    return table


def _fill(table: QTableWidget, rows: Sequence[Sequence[str]]) -> None:
    table.setRowCount(len(rows))
    for row, values in enumerate(rows):
        for column, value in enumerate(values):
            item = QTableWidgetItem(" ".join(value.split()))
            item.setToolTip(value)
            table.setItem(row, column, item)


def _disconnector(connections: Sequence[tuple[Any, Any]]) -> Any:
    """Return a function that ends connections and knows nothing of the dying widget."""

    def disconnect() -> None:
        for signal, slot in connections:
            signal.disconnect(slot)

    return disconnect
