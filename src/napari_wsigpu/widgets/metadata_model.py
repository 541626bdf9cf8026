"""Nested metadata as a tree that can be searched."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from qtpy.QtCore import QModelIndex, QSortFilterProxyModel, Qt
from qtpy.QtGui import QStandardItem, QStandardItemModel

from napari_wsigpu.privacy import MASK

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

KEY_ROLE = Qt.UserRole + 1
SEARCH_ROLE = Qt.UserRole + 2
FITS = 12  # characters that need no tooltip
LONGEST_CELL = 300
LONGEST_TOOLTIP = 2000


class MetadataModel(QSortFilterProxyModel):  # type: ignore[misc]
    """A tree of names and values; what doesn't hold the searched text is left out.

    Groups stay above what was found in them, and a group whose name was found stays whole.
    Long values are shortened in the tree alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self._metadata: Mapping[str, Any] = {}
        self._tree = QStandardItemModel(0, 2, self)
        self.setFilterRole(SEARCH_ROLE)
        self.setFilterCaseSensitivity(Qt.CaseInsensitive)
        self.setRecursiveFilteringEnabled(True)
        self.setAutoAcceptChildRows(True)

    def show_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Show other metadata."""
        self.setSourceModel(None)
        self._metadata = metadata
        self._tree = QStandardItemModel(0, 2, self)
        self._tree.setHorizontalHeaderLabels(("Name", "Value"))
        _fill(self._tree.invisibleRootItem(), metadata)
        self.setSourceModel(self._tree)

    def keys(self, index: QModelIndex) -> list[str | int]:
        """Return the keys that lead to a row, outermost first."""
        keys: list[str | int] = []
        index = index.siblingAtColumn(0)
        while index.isValid():
            keys.insert(0, index.data(KEY_ROLE))
            index = index.parent()
        return keys

    def path(self, index: QModelIndex) -> str:
        """Return a row's keys as one name, for example ``philips.SEQUENCE[0].ROWS``."""
        parts = [f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.keys(index)]
        return "".join(parts).removeprefix(".")

    def value(self, index: QModelIndex) -> str:
        """Return a row's whole value; of a group and a list as JSON."""
        value: Any = self._metadata
        for key in self.keys(index):
            value = value[key]
        if isinstance(value, str):
            return value
        return "" if value is None else json.dumps(value, indent=2, ensure_ascii=False)


def _fill(root: QStandardItem, metadata: Mapping[str, Any]) -> None:
    waiting: list[tuple[QStandardItem, Iterable[tuple[str | int, Any]]]] = [
        (root, metadata.items())
    ]
    while waiting:
        parent, entries = waiting.pop()
        for key, value in entries:
            name = QStandardItem(f"[{key}]" if isinstance(key, int) else _short(key))
            name.setData(key, KEY_ROLE)
            cell = QStandardItem()
            parent.appendRow((name, cell))
            if isinstance(value, dict):
                waiting.append((name, value.items()))
                text = ""
            elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
                waiting.append((name, enumerate(value)))
                cell.setText(f"{len(value):,} entries")
                text = ""
            else:
                text = _text(value)
                cell.setText(_short(text))
                if len(text) > FITS:
                    cell.setToolTip(_plain(text))
                if value == MASK:
                    font = cell.font()
                    font.setItalic(True)
                    cell.setFont(font)
            name.setData(f"{key}\n{text}", SEARCH_ROLE)
            if len(name.text()) > FITS:
                name.setToolTip(_plain(str(key)))


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _short(text: str) -> str:
    if len(text) <= LONGEST_CELL and text.isprintable():
        return text
    line = " ".join(text[: LONGEST_CELL + 1].split())
    return line if len(text) <= LONGEST_CELL else f"{line[:LONGEST_CELL]}…"


def _plain(text: str) -> str:
    """Return a tooltip that isn't taken for HTML."""
    start = text[:LONGEST_TOOLTIP].replace("&", "&amp;").replace("<", "&lt;")
    more = "…" if len(text) > LONGEST_TOOLTIP else ""
    return f"<span style='white-space: pre-wrap'>{start}{more}</span>"
