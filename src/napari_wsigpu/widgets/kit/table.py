"""A table that reads its rows on demand from plain data."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

from qtpy.QtCore import QAbstractTableModel, QItemSelection, QItemSelectionModel, QModelIndex, Qt
from qtpy.QtWidgets import QAbstractItemView, QHeaderView, QScrollBar, QTableView

from napari_wsigpu.widgets.kit.parts import Hosted, LeavesSlideKeys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from qtpy.QtGui import QKeyEvent, QWheelEvent

MEASURED = 20  # rows that determine the width of columns
WIDEST = 16  # characters of a column; tooltips show longer texts
# Rows that are sorted again when they change. Sorting more takes long enough to be noticed.
MOST_SORTED = 5000


class Rows(Protocol):
    """Data of a table."""

    def __len__(self) -> int: ...

    @property
    def titles(self) -> Sequence[tuple[str, str]]:
        """Title and tooltip of each column."""

    def text(self, row: int, column: int) -> str:
        """Return the text of a cell."""

    def key(self, row: int, column: int) -> float | str | None:
        """Return what a cell is sorted by; None if it is empty."""

    def is_number(self, column: int) -> bool:
        """Whether a column contains numbers, which are aligned to the right."""

    def is_editable(self, column: int) -> bool:
        """Whether the user may edit a column."""


class _Model(QAbstractTableModel):  # type: ignore[misc]
    def __init__(self, rows: Rows, edit: Callable[[int, int, str], object]) -> None:
        super().__init__()
        self._edit = edit
        self.show(rows)

    def show(self, rows: Rows, column: int = -1, *, descending: bool = False) -> None:
        """Show rows, sorted by a column unless it is -1; empty cells are always last."""
        self.beginResetModel()
        self.rows = rows
        self.order = list(range(len(rows)))
        if column >= 0:
            keys: dict[int, Any] = {row: rows.key(row, column) for row in self.order}
            filled = [row for row, key in keys.items() if key is not None]
            filled.sort(key=keys.__getitem__, reverse=descending)
            self.order = filled + [row for row, key in keys.items() if key is None]
        self.endResetModel()

    def rowCount(self, parent: QModelIndex | None = None) -> int:  # noqa: N802
        return len(self.rows)

    def columnCount(self, parent: QModelIndex | None = None) -> int:  # noqa: N802
        return len(self.rows.titles)

    def headerData(  # noqa: N802
        self, section: int, orientation: Qt.Orientation, role: int = Qt.DisplayRole
    ) -> object:
        if orientation == Qt.Vertical:
            return section + 1 if role == Qt.DisplayRole else None
        title, tip = self.rows.titles[section]
        return {Qt.DisplayRole: title, Qt.ToolTipRole: tip}.get(role)

    def data(self, index: QModelIndex, role: int = Qt.DisplayRole) -> object:
        if role == Qt.TextAlignmentRole and self.rows.is_number(index.column()):
            return int(Qt.AlignRight | Qt.AlignVCenter)
        if role in (Qt.DisplayRole, Qt.EditRole, Qt.ToolTipRole):
            return self.rows.text(self.order[index.row()], index.column())
        return None

    def flags(self, index: QModelIndex) -> Qt.ItemFlag:
        editable = self.rows.is_editable(index.column())
        return super().flags(index) | (Qt.ItemIsEditable if editable else Qt.NoItemFlags)

    def setData(self, index: QModelIndex, value: object, role: int = Qt.EditRole) -> bool:  # noqa: N802
        if role != Qt.EditRole or not self.rows.is_editable(index.column()):
            return False
        row = self.order[index.row()]
        if str(value) != self.rows.text(row, index.column()):
            self._edit(row, index.column(), str(value))
        return True


class _View(LeavesSlideKeys, QTableView):  # type: ignore[misc]
    def __init__(self, delete: Callable[[], object]) -> None:
        super().__init__()
        self._delete = delete

    def keyPressEvent(self, event: QKeyEvent) -> None:  # noqa: N802
        if event.key() in (Qt.Key_Delete, Qt.Key_Backspace):
            self._delete()
        else:
            super().keyPressEvent(event)


class _Bar(QScrollBar):  # type: ignore[misc]
    """A scroll bar that leaves the wheel to what is around it, so that rows don't move sideways."""

    def wheelEvent(self, event: QWheelEvent) -> None:  # noqa: N802
        event.ignore()


class Table(Hosted[QTableView]):
    """Rows that can be sorted, selected, clicked, edited and deleted.

    A click on a title sorts by that column, ascending, then descending, then not at all. Callers
    number rows as in `rows`, however they are sorted.

    Parameters
    ----------
    name : str
        Accessible name.
    rows : Rows
        The initial rows.
    selected : callable
        Called when the selection changes.
    clicked, edited, deleted : callable
        `clicked` is called with the row that was clicked; `edited`, with the row, the column and
        the new text of the cell; `deleted`, if the user presses Delete.
    """

    def __init__(
        self,
        name: str,
        rows: Rows,
        selected: Callable[[], object],
        clicked: Callable[[int], object],
        edited: Callable[[int, int, str], object],
        deleted: Callable[[], object],
    ) -> None:
        super().__init__(_View(deleted), name)
        self.model = _Model(rows, edited)
        self._selected, self._syncing = selected, False
        table = self.native
        self.model.setParent(table)
        table.setModel(self.model)
        table.setSelectionBehavior(QAbstractItemView.SelectRows)
        table.setWordWrap(False)
        table.setHorizontalScrollBar(_Bar(Qt.Horizontal))
        table.horizontalHeader().setSectionResizeMode(QHeaderView.Interactive)
        table.horizontalHeader().setHighlightSections(False)
        table.horizontalHeader().setSortIndicatorShown(True)
        table.horizontalHeader().setSortIndicatorClearable(True)
        table.horizontalHeader().setSortIndicator(-1, Qt.AscendingOrder)
        table.horizontalHeader().sortIndicatorChanged.connect(self._sort)
        table.horizontalHeader().setStretchLastSection(True)
        table.horizontalHeader().setResizeContentsPrecision(MEASURED)
        # With the table's selection model, the header would read every selected cell on each
        # repaint.
        table.horizontalHeader().setSelectionModel(QItemSelectionModel(self.model, table))
        table.verticalHeader().hide()
        table.verticalHeader().setDefaultSectionSize(table.fontMetrics().lineSpacing() + 4)
        table.selectionModel().selectionChanged.connect(self._report_selection)
        table.clicked.connect(lambda index: clicked(self.model.order[index.row()]))

    def show_rows(self, rows: Rows) -> None:
        """Replace the rows and clear the selection."""
        header = self.native.horizontalHeader()
        if len(rows) > MOST_SORTED:
            header.setSortIndicator(-1, Qt.AscendingOrder)
        self._show(rows)
        # While it is shown, every column is wide enough for the arrow that only one has.
        header.setSortIndicatorShown(False)
        self.native.resizeColumnsToContents()
        header.setSortIndicatorShown(True)
        widest = WIDEST * self.native.fontMetrics().averageCharWidth()
        for column in range(self.model.columnCount()):
            self.native.setColumnWidth(column, min(self.native.columnWidth(column), widest))
        self._make_room_for_arrow()

    def _show(self, rows: Rows) -> None:
        header = self.native.horizontalHeader()
        descending = header.sortIndicatorOrder() == Qt.DescendingOrder
        self._syncing = True
        self.model.show(rows, header.sortIndicatorSection(), descending=descending)
        self._syncing = False

    def _sort(self, *_: object) -> None:
        chosen = self.selection
        self._show(self.model.rows)
        self.select(chosen)
        self._make_room_for_arrow()

    def _make_room_for_arrow(self) -> None:
        header = self.native.horizontalHeader()
        column = header.sortIndicatorSection()
        if column >= 0:
            header.resizeSection(
                column, max(header.sectionSize(column), header.sectionSizeHint(column))
            )

    @property
    def order(self) -> list[int]:
        """All rows, in the order in which they are shown."""
        return self.model.order

    @property
    def selection(self) -> list[int]:
        """The selected rows, in the order in which they are shown."""
        ranges = self.native.selectionModel().selection()
        found = {row for each in ranges for row in range(each.top(), each.bottom() + 1)}
        return [self.model.order[row] for row in sorted(found)]

    @property
    def current(self) -> int:
        """The row that was clicked last; -1 if there is none."""
        row = int(self.native.currentIndex().row())
        return self.model.order[row] if row >= 0 else -1

    def select(self, rows: Iterable[int]) -> None:
        """Select rows without calling `selected`."""
        chosen = {*rows}
        rows = [place for place, row in enumerate(self.model.order) if row in chosen]
        selection, last = QItemSelection(), self.model.columnCount() - 1
        # Qt compares each range with all others: merge adjacent rows into a few ranges.
        for _, group in groupby(enumerate(rows), key=lambda item: item[1] - item[0]):
            run = [row for _, row in group]
            first, end = self.model.index(run[0], 0), self.model.index(run[-1], last)
            selection.select(first, end)
        self._syncing = True
        self.native.selectionModel().select(selection, QItemSelectionModel.ClearAndSelect)
        self._syncing = False
        if rows:  # scroll vertically only
            bar = self.native.horizontalScrollBar()
            column = bar.value()
            self.native.scrollTo(self.model.index(rows[0], 0))
            bar.setValue(column)

    def _report_selection(self, *_: object) -> None:
        if not self._syncing:
            self._selected()
