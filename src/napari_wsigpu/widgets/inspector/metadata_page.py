"""The inspector's "Metadata" page: the file's metadata, to search, copy and export."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from magicgui.widgets import CheckBox
from qtpy.QtCore import QEvent, QModelIndex, Qt, Signal
from qtpy.QtGui import QKeySequence
from qtpy.QtWidgets import QAction, QApplication, QLineEdit, QTreeView

from napari_wsigpu.model.privacy import MASK
from napari_wsigpu.slide.facts import FileReport, file_report, has_many_fields
from napari_wsigpu.slide.pictures import save_text
from napari_wsigpu.viewer.window.main_window import single_shot
from napari_wsigpu.viewer.window.notifications import show_info
from napari_wsigpu.viewer.window.saving import ask_where_to_save, say_saved
from napari_wsigpu.widgets.kit.metadata_model import Field, MetadataModel, fields_of
from napari_wsigpu.widgets.kit.parts import (
    PAGE_MARGIN,
    Hosted,
    LeavesSlideKeys,
    Panel,
    Text,
    button,
    row,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from qtpy.QtGui import QKeyEvent

    from napari_wsigpu.slide.slide import Slide
    from napari_wsigpu.widgets.dock.jobs import Jobs
    from napari_wsigpu.widgets.inspector.disclosure import Disclosure

TYPING_MS = 150
NOTHING = "No field contains this text."
NOTHING_SHOWN = f"{NOTHING} Hidden values are not searched."
PREPARING = "Preparing the metadata…"
PRIVATE = "Also show, copy and export data that may identify the patient, such as names and dates"


class Prepared(NamedTuple):
    """Metadata that is ready to be shown, with or without private fields."""

    report: FileReport
    fields: list[Field]


EMPTY = Prepared(FileReport({}, []), [])


class SearchLine(QLineEdit):  # type: ignore[misc]
    """A search line with keys that move to the results and clear the search."""

    left = Signal()

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        """Clear on Esc, and move to the results on Down."""
        if event.key() == Qt.Key_Escape and self.text():
            self.clear()
        elif event.key() == Qt.Key_Down:
            self.left.emit()
        else:
            super().keyPressEvent(event)


class MetadataTree(LeavesSlideKeys, QTreeView):  # type: ignore[misc]
    """A tree that supports the standard keys for copying."""

    copied = Signal()

    def __init__(self, model: MetadataModel) -> None:
        super().__init__()
        model.setParent(self)
        self.setModel(model)
        self.setUniformRowHeights(True)
        self.setEditTriggers(QTreeView.NoEditTriggers)
        self.setContextMenuPolicy(Qt.ActionsContextMenu)
        self.setTextElideMode(Qt.ElideRight)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarAlwaysOff)

    def event(self, event: QEvent) -> bool:
        """Claim the copy shortcut before the window's shortcuts get it."""
        if event.type() == QEvent.ShortcutOverride and event.matches(QKeySequence.Copy):
            event.accept()
            return True
        return bool(super().event(event))

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        """Copy the selection, or pass the key on."""
        if event.matches(QKeySequence.Copy):
            self.copied.emit()
        else:
            super().keyPressEvent(event)


class MetadataPage(Panel):
    """A tree of the slide's metadata.

    Parameters
    ----------
    jobs : Jobs
        The dock's slow jobs.
    warn : callable
        Called with a list of sentences about problems with the slide's file. They contain private
        values only while private fields are shown.
    """

    def __init__(self, jobs: Jobs, warn: Callable[[list[str]], object]) -> None:
        self._jobs, self._warn = jobs, warn
        self._slide: Slide | None = None
        self._disclosure: Disclosure | None = None
        self._metadata: dict[str, object] = {}
        self._prepared: WeakKeyDictionary[Slide, dict[bool, Prepared]] = WeakKeyDictionary()
        self.search = Hosted(SearchLine(), "Search metadata", "Find text in the fields (Ctrl+F)")
        self.search.native.setPlaceholderText("Search names and values")
        self.search.native.setClearButtonEnabled(True)
        self.model = MetadataModel()
        self.tree = Hosted(MetadataTree(self.model), "Metadata")
        self.nothing = Text("", NOTHING)
        self.private = CheckBox(text="Show private f&ields", tooltip=PRIVATE)
        self.private.native.setAccessibleName("Show private fields")
        self.copy_value = button(
            "Copy val&ue", "Copy the whole value of the selected row", self._copy_value
        )
        self.copy_path = button(
            "&Copy path", "Copy the names of the selected row and its groups", self._copy_path
        )
        self.copy_json = button(
            "Copy as &JSON", "Copy all metadata to the clipboard", self._copy_json
        )
        self.export = button("&Export…", "Save all metadata as a JSON file", self._export)
        for each in (self.copy_value, self.copy_path):
            action = QAction(each.text.replace("&", ""), self.tree.native)
            action.triggered.connect(each.native.click)
            self.tree.native.addAction(action)
        self._copy_row = row(self.copy_value, self.copy_path, narrow=True)
        super().__init__(
            self.search,
            self.nothing,
            self.tree,
            self.private,
            self._copy_row,
            row(self.copy_json, self.export, narrow=True),
            margin=PAGE_MARGIN,
        )
        self.stretch(self.tree)
        self._typing = single_shot(self._search, TYPING_MS, self.native)
        self.search.native.textChanged.connect(lambda _: self._typing.start())
        self.search.native.returnPressed.connect(self._search)
        self.search.native.left.connect(self._enter_tree)
        self.private.native.toggled.connect(self._disclose)
        self.tree.native.selectionModel().currentChanged.connect(self._enable)
        self.tree.native.copied.connect(self._copy_value)
        self._show()

    def show_slide(self, slide: Slide | None, disclosure: Disclosure) -> None:
        """Show the metadata of another slide, or none."""
        self._slide, self._disclosure = slide, disclosure
        self.private.native.blockSignals(True)
        self.private.value = disclosure.fields
        self.private.native.blockSignals(False)
        self._show()

    def set_compact(self, *, compact: bool) -> None:
        """Hide or show the buttons that copy a row; the context menu offers the same actions."""
        self._copy_row.native.setHidden(compact)

    def find(self) -> None:
        """Move the focus to the search line."""
        self.search.native.setFocus()
        self.search.native.selectAll()

    def _show(self) -> None:
        """Show the metadata without hidden values, which never reach the tree."""
        self._jobs.drop(self)
        slide = self._slide
        if slide is None or self._disclosure is None:
            self._show_prepared(EMPTY)
            return
        private = self._disclosure.fields
        known = self._prepared.setdefault(slide, {})

        def prepare() -> Prepared:
            report = file_report(slide, private=private)
            # Store the result even if another slide is shown by then.
            return known.setdefault(private, Prepared(report, fields_of(report.metadata)))

        if private in known:
            self._show_prepared(known[private])
        elif has_many_fields(slide):
            self._show_prepared(EMPTY)
            self.nothing.say(PREPARING)
            show = self._show_prepared
            self._jobs.start("Preparing the metadata", slide, prepare, show, owner=self)
        else:
            self._show_prepared(prepare())

    def _show_prepared(self, prepared: Prepared) -> None:
        self._metadata = prepared.report.metadata
        tree = self.tree.native
        tree.setCurrentIndex(QModelIndex())
        self.model.fields = prepared.fields
        self._search()
        tree.setColumnWidth(0, min(tree.sizeHintForColumn(0), max(self.width, 1) // 2))
        self._warn(prepared.report.problems)

    def _search(self) -> None:
        self._typing.stop()
        text, tree = self.search.native.text(), self.tree.native
        current = self.model.number(tree.currentIndex())
        self.model.search(text)
        if text:
            tree.expandAll()
        else:
            tree.collapseAll()
            tree.expandToDepth(0)
        last = self.model.rowCount() - 1
        more = self.model.number(self.model.index(last, 0)) is None
        tree.setFirstColumnSpanned(last, QModelIndex(), more)
        tree.setCurrentIndex(self.model.row(current))
        hides = any(MASK in field.searched for field in self.model.fields)
        self.nothing.value = NOTHING_SHOWN if hides else NOTHING
        self.nothing.visible = bool(text) and last < 0
        self._enable()

    def _enter_tree(self) -> None:
        if self._typing.isActive():
            self._search()
        tree = self.tree.native
        tree.setFocus()
        if not tree.currentIndex().isValid():
            tree.setCurrentIndex(self.model.index(0, 0))

    def _enable(self, current: QModelIndex | None = None, previous: object = None) -> None:
        self.copy_json.enabled = self.export.enabled = bool(self._metadata)
        selected = self.tree.native.currentIndex().isValid()
        self.copy_value.enabled = self.copy_path.enabled = selected

    def _disclose(self, shown: bool) -> None:
        if self._disclosure is not None:
            self._disclosure.fields = shown
            self._show()

    def _copy_value(self) -> None:
        if self.tree.native.currentIndex().isValid():
            QApplication.clipboard().setText(self.model.value(self.tree.native.currentIndex()))

    def _copy_path(self) -> None:
        QApplication.clipboard().setText(self.model.path(self.tree.native.currentIndex()))

    def _copy_json(self) -> None:
        QApplication.clipboard().setText(_json(self._metadata))
        show_info("Copied the metadata.")

    def _export(self) -> None:
        slide, metadata = self._slide, self._metadata
        if slide is None:
            return
        start = Path(slide.path).with_suffix(".json")
        path = ask_where_to_save(self.native, "Export metadata", start, "JSON (*.json)")
        if path:
            work, done = partial(_save, metadata, path), partial(say_saved, path)
            self._jobs.start("Exporting metadata", slide, work, done)


def _json(metadata: dict[str, object]) -> str:
    return json.dumps(metadata, indent=2, ensure_ascii=False)


def _save(metadata: dict[str, object], path: str) -> None:
    save_text(_json(metadata), path)
