"""The inspector's tab "Metadata": everything the file says, to search, copy and export."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from qtpy.QtCore import QEvent, QModelIndex, Qt, QTimer, Signal
from qtpy.QtGui import QKeySequence
from qtpy.QtWidgets import (
    QAction,
    QApplication,
    QCheckBox,
    QGridLayout,
    QHBoxLayout,
    QLabel,
    QLineEdit,
    QPushButton,
    QTreeView,
    QVBoxLayout,
    QWidget,
)

from napari_wsigpu.model.privacy import MASK
from napari_wsigpu.viewer.notifications import show_info
from napari_wsigpu.widgets.facts import Said, said, says_much
from napari_wsigpu.widgets.metadata_model import Field, MetadataModel, fields_of
from napari_wsigpu.widgets.pictures import save_text
from napari_wsigpu.widgets.saving import ask_where_to_save

if TYPE_CHECKING:
    from collections.abc import Callable

    from napari_wsigpu.slide.slide import Slide
    from napari_wsigpu.widgets.disclosure import Disclosure
    from napari_wsigpu.widgets.jobs import Jobs


TYPING_MS = 150
NOTHING = "Nothing holds this text."
NOTHING_SHOWN = f"{NOTHING} Hidden values are not searched."
PREPARING = "Preparing the metadata…"


class Prepared(NamedTuple):
    """What the file says, with or without what is private, ready to be shown."""

    said: Said
    fields: list[Field]


class SearchLine(QLineEdit):  # type: ignore[misc]
    """A line whose keys lead to what was found, and back to everything."""

    left = Signal()

    def keyPressEvent(self, event: Any) -> None:  # noqa: N802
        """Clear on Esc, leave on Down, or do what lines do."""
        if event.key() == Qt.Key_Escape and self.text():
            self.clear()
        elif event.key() == Qt.Key_Down:
            self.left.emit()
        else:
            super().keyPressEvent(event)


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
    problems : Signal(object)
        What is wrong with the slide's file, with or without what is private: a list of sentences.
    """

    problems = Signal(object)

    def __init__(self, jobs: Jobs) -> None:
        super().__init__()
        self._jobs = jobs
        self._slide: Slide | None = None
        self._disclosure: Disclosure | None = None
        self._metadata: dict[str, Any] = {}
        self._prepared: WeakKeyDictionary[Slide, dict[bool, Prepared]] = WeakKeyDictionary()
        self._typing = QTimer(self)
        self._typing.setSingleShot(True)
        self._typing.setInterval(TYPING_MS)

        self.search = SearchLine()
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
        self.nothing = QLabel(NOTHING)
        self.nothing.setWordWrap(True)
        self.private = QCheckBox("Show private f&ields")
        self.private.setToolTip(
            "Show, copy and export also what may name the patient, such as names, dates and codes"
        )

        self.copy_value = self._button(
            "Copy val&ue", "Copy the whole value of the selected row", self._copy_value
        )
        self.copy_path = self._button(
            "&Copy path", "Copy the names that lead to the selected row", self._copy_path
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

        self.search.textChanged.connect(lambda _: self._typing.start())
        self.search.returnPressed.connect(self._search)
        self.search.left.connect(self._enter_tree)
        self._typing.timeout.connect(self._search)
        self.tree.selectionModel().currentChanged.connect(self._enable)
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
        self._jobs.drop(self)
        slide = self._slide
        if slide is None or self._disclosure is None:
            self._show_prepared(Prepared(Said({}, []), []))
            return
        private = self._disclosure.fields
        known = self._prepared.setdefault(slide, {})
        if private not in known and says_much(slide):
            self._show_prepared(Prepared(Said({}, []), []))
            self.nothing.setText(PREPARING)
            self.nothing.show()
            self._jobs.start(
                "Preparing the metadata",
                slide,
                lambda: known.update({private: _prepare(slide, private)}),
                lambda _: self._show_prepared(known[private]),
                owner=self,
            )
            return
        if private not in known:
            known[private] = _prepare(slide, private)
        self._show_prepared(known[private])

    def _show_prepared(self, prepared: Prepared) -> None:
        self._metadata = prepared.said.metadata
        self.tree.setCurrentIndex(QModelIndex())
        self.model.fields = prepared.fields
        self._search()
        widest = self.tree.sizeHintForColumn(0)
        self.tree.setColumnWidth(0, min(widest, max(self.width(), 1) // 2))
        self.problems.emit(prepared.said.problems)

    def _search(self) -> None:
        self._typing.stop()
        text = self.search.text()
        current = self.model.number(self.tree.currentIndex())
        self.model.search(text)
        if text:
            self.tree.expandAll()
        else:
            self.tree.collapseAll()
            self.tree.expandToDepth(0)
        last = self.model.rowCount() - 1
        more = self.model.number(self.model.index(last, 0)) is None
        self.tree.setFirstColumnSpanned(last, QModelIndex(), more)
        self.tree.setCurrentIndex(self.model.row(current))
        hides = any(MASK in field.searched for field in self.model.fields)
        self.nothing.setText(NOTHING_SHOWN if hides else NOTHING)
        self.nothing.setVisible(bool(text) and last < 0)
        self._enable()

    def _enter_tree(self) -> None:
        if self._typing.isActive():
            self._search()
        self.tree.setFocus()
        if not self.tree.currentIndex().isValid():
            self.tree.setCurrentIndex(self.model.index(0, 0))

    def _enable(self, current: QModelIndex | None = None, previous: Any = None) -> None:
        selected = self.tree.currentIndex().isValid()
        for button in (self.copy_json, self.export):
            button.setEnabled(bool(self._metadata))
        self.copy_value.setEnabled(selected)
        self.copy_path.setEnabled(selected)

    def _disclose(self, shown: bool) -> None:
        if self._disclosure is not None:
            self._disclosure.fields = shown
            self._show()

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
        path = ask_where_to_save(self, "Export metadata", start, "JSON (*.json)")
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


def _prepare(slide: Slide, private: bool) -> Prepared:
    found = said(slide, private=private)
    return Prepared(found, fields_of(found.metadata))


def _json(metadata: dict[str, Any]) -> str:
    return json.dumps(metadata, indent=2, ensure_ascii=False)


def _say_saved(path: str, result: None) -> None:
    show_info(f"Saved '{Path(path).name}'.")
