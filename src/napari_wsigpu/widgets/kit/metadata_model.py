"""Nested metadata as a tree that can be searched."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qtpy.QtCore import QModelIndex, Qt
from qtpy.QtGui import QStandardItem, QStandardItemModel

from napari_wsigpu.model.privacy import MASK

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

NUMBER_ROLE = Qt.UserRole + 1
MOST_ROWS = 5000  # rows that are built fast enough while the user types
FITS = 12  # characters; longer text gets a tooltip
LONGEST_CELL = 300
LONGEST_TOOLTIP = 2000


@dataclass(frozen=True, slots=True)
class Field:
    """A field or group of metadata.

    Attributes
    ----------
    parent : int
        Index of the group that contains the field; -1 at the top.
    key : str or int
        Name of the field, or its index in a list.
    value : object
        Value in the file.
    searched : str
        Name and value in lower case, for the search.
    """

    parent: int
    key: str | int
    value: object
    searched: str


def fields_of(metadata: Mapping[str, object]) -> list[Field]:
    """Return all fields and groups of nested metadata, outer ones first.

    Any thread may call this.
    """
    found: list[Field] = []
    waiting: deque[tuple[int, Iterable[tuple[str | int, object]]]] = deque([(-1, metadata.items())])
    # Breadth first, so that each group has an index before its fields refer to it.
    while waiting:
        parent, entries = waiting.popleft()
        for key, value in entries:
            inner = _entries(value)
            text = _text(value) if inner is None else ""
            if inner is not None:
                waiting.append((len(found), inner))
            found.append(Field(parent, key, value, f"{key}\n{text}".casefold()))
    return found


class MetadataModel(QStandardItemModel):  # type: ignore[misc]
    """A tree of names and values that shows only matches of the search.

    Groups are shown above their matching fields; a group whose name matches is shown whole. The
    tree shortens long values; it shows at most `MOST_ROWS` rows, and says how many more there are.

    Attributes
    ----------
    fields : sequence of Field
        The result of `fields_of`; the next `search` shows it.
    """

    def __init__(self) -> None:
        super().__init__(0, 2)
        self.setHorizontalHeaderLabels(("Name", "Value"))
        self.fields: Sequence[Field] = ()
        self._items: dict[int, QStandardItem] = {}

    def search(self, text: str) -> None:
        """Show the fields that contain `text`, ignoring case; an empty string shows all fields."""
        self.setRowCount(0)
        found = _holding(self.fields, text.casefold())
        self._items = {}
        for number in found[:MOST_ROWS]:
            self._items[number], cell = _row(number, self.fields[number])
            parent = self._items.get(self.fields[number].parent)
            if parent is not None:
                parent.appendRow((self._items[number], cell))
            else:
                self.appendRow((self._items[number], cell))
        more = len(found) - MOST_ROWS
        if more > 0:
            last = QStandardItem(f"And {more:,} more: search, or copy as JSON")
            last.setFlags(Qt.NoItemFlags)
            self.appendRow(last)

    def number(self, index: QModelIndex) -> int | None:
        """Return the index of a row's field, by which `row` finds the field in later searches."""
        number: int | None = index.siblingAtColumn(0).data(NUMBER_ROLE)
        return number

    def row(self, number: int | None) -> QModelIndex:
        """Return the row of a field; an invalid index if it is not shown."""
        item = None if number is None else self._items.get(number)
        return QModelIndex() if item is None else item.index()

    def path(self, index: QModelIndex) -> str:
        """Return a row's keys as one name, for example ``philips.SEQUENCE[0].ROWS``."""
        parts: list[str] = []
        number = index.siblingAtColumn(0).data(NUMBER_ROLE)
        while number >= 0:
            key = self.fields[number].key
            parts.insert(0, f"[{key}]" if isinstance(key, int) else f".{key}")
            number = self.fields[number].parent
        return "".join(parts).removeprefix(".")

    def value(self, index: QModelIndex) -> str:
        """Return a row's complete value, as JSON if it isn't a string."""
        value = self.fields[index.siblingAtColumn(0).data(NUMBER_ROLE)].value
        if isinstance(value, str):
            return value
        return "" if value is None else json.dumps(value, indent=2, ensure_ascii=False)


def _entries(value: object) -> Iterable[tuple[str | int, object]] | None:
    """Return the entries of a group; None if the value is a single field."""
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        return enumerate(value)
    return None


def _holding(fields: Sequence[Field], text: str) -> list[int]:
    """Return the indices of matching fields, of everything below them, and of their groups."""
    kept: list[bool] = []
    for field in fields:  # a group comes before its content
        kept.append((field.parent >= 0 and kept[field.parent]) or text in field.searched)
    for number in range(len(fields) - 1, -1, -1):
        if kept[number] and fields[number].parent >= 0:
            kept[fields[number].parent] = True
    return [number for number, is_kept in enumerate(kept) if is_kept]


def _row(number: int, field: Field) -> tuple[QStandardItem, QStandardItem]:
    key, value = field.key, field.value
    name = QStandardItem(f"[{key}]" if isinstance(key, int) else _short(key))
    name.setData(number, NUMBER_ROLE)
    if len(name.text()) > FITS:
        name.setToolTip(_plain(str(key)))
    cell = QStandardItem()
    if _entries(value) is not None:
        cell.setText(f"{len(value):,} entries" if isinstance(value, list) else "")
        return name, cell
    text = _text(value)
    cell.setText(_short(text))
    if len(text) > FITS:
        cell.setToolTip(_plain(text))
    if value == MASK:
        font = cell.font()
        font.setItalic(True)
        cell.setFont(font)
    return name, cell


def _text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _short(text: str) -> str:
    if len(text) <= LONGEST_CELL and text.isprintable():
        return text
    line = " ".join(text[: LONGEST_CELL + 1].split())
    return line if len(text) <= LONGEST_CELL else f"{line[:LONGEST_CELL]}…"


def _plain(text: str) -> str:
    """Escape a tooltip, so that Qt does not render it as HTML."""
    start = text[:LONGEST_TOOLTIP].replace("&", "&amp;").replace("<", "&lt;")
    more = "…" if len(text) > LONGEST_TOOLTIP else ""
    return f"<span style='white-space: pre-wrap'>{start}{more}</span>"
