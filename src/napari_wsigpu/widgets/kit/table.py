"""A table over rows that are plain data, and asked for as they are looked at."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

from qtpy.QtCore import QAbstractTableModel, QItemSelection, QItemSelectionModel, QModelIndex, Qt
from qtpy.QtWidgets import QAbstractItemView, QHeaderView, QTableView

from napari_wsigpu.widgets.kit.parts import Hosted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

MEASURED = 20  # rows by which columns are as wide as their texts


class Rows(Protocol):
    """What a table shows."""

    def __len__(self) -> int: ...

    @property
    def titles(self) -> Sequence[tuple[str, str]]:
        """Text and tooltip of each column's head."""

    def text(self, row: int, column: int) -> str:
        """Return what a cell shows."""

    def is_number(self, column: int) -> bool:
        """Whether a column holds numbers, which stand at the right."""

    def is_editable(self, column: int) -> bool:
        """Whether the user may write into a column."""


class _Model(QAbstractTableModel):  # type: ignore[misc]
    def __init__(self, rows: Rows, edit: Callable[[int, int, str], object]) -> None:
        super().__init__()
        self.rows, self._edit = rows, edit

    def show(self, rows: Rows) -> None:
        self.beginResetModel()
        self.rows = rows
        self.endResetModel()

    def rowCount(self, parent: QModelIndex | None = None) -> int:  # noqa: N802
        return len(self.rows)

    def columnCount(self, parent: QModelIndex | None = None) -> int:  # noqa: N802
        return len(self.rows.titles)

    def headerData(self, section: int, orientation: Any, role: int = Qt.DisplayRole) -> Any:  # noqa: N802
        if orientation == Qt.Vertical:
            return section + 1 if role == Qt.DisplayRole else None
        title, tip = self.rows.titles[section]
        return {Qt.DisplayRole: title, Qt.ToolTipRole: tip}.get(role)

    def data(self, index: QModelIndex, role: int = Qt.DisplayRole) -> Any:
        if role == Qt.TextAlignmentRole and self.rows.is_number(index.column()):
            return int(Qt.AlignRight | Qt.AlignVCenter)
        if role in (Qt.DisplayRole, Qt.EditRole, Qt.ToolTipRole):
            return self.rows.text(index.row(), index.column())
        return None

    def flags(self, index: QModelIndex) -> Any:
        editable = self.rows.is_editable(index.column())
        return super().flags(index) | (Qt.ItemIsEditable if editable else Qt.NoItemFlags)

    def setData(self, index: QModelIndex, value: Any, role: int = Qt.EditRole) -> bool:  # noqa: N802
        if role != Qt.EditRole or not self.rows.is_editable(index.column()):
            return False
        if str(value) != self.rows.text(index.row(), index.column()):
            self._edit(index.row(), index.column(), str(value))
        return True


class Table(Hosted[QTableView]):
    """Rows that can be selected, clicked and edited.

    Parameters
    ----------
    name : str
        Its accessible name.
    rows : Rows
        What is shown at first.
    selected, clicked : callable
        Called when other rows are selected, and with the row that was clicked.
    edited : callable
        Called with row, column and text that the user wrote.
    """

    def __init__(
        self,
        name: str,
        rows: Rows,
        selected: Callable[[], object],
        clicked: Callable[[int], object],
        edited: Callable[[int, int, str], object],
    ) -> None:
        super().__init__(QTableView(), name)
        self.model = _Model(rows, edited)
        self._selected, self._syncing = selected, False
        table = self.native
        self.model.setParent(table)
        table.setModel(self.model)
        table.setSelectionBehavior(QAbstractItemView.SelectRows)
        table.setWordWrap(False)
        table.horizontalHeader().setSectionResizeMode(QHeaderView.Interactive)
        table.horizontalHeader().setHighlightSections(False)
        table.horizontalHeader().setResizeContentsPrecision(MEASURED)
        table.verticalHeader().hide()
        table.verticalHeader().setDefaultSectionSize(table.fontMetrics().lineSpacing() + 6)
        table.selectionModel().selectionChanged.connect(self._tell)
        table.clicked.connect(lambda index: clicked(index.row()))

    def show_rows(self, rows: Rows) -> None:
        """Show other rows; none is selected."""
        self._syncing = True
        self.model.show(rows)
        self._syncing = False
        self.native.resizeColumnsToContents()

    @property
    def selection(self) -> list[int]:
        """The selected rows, in order."""
        ranges = self.native.selectionModel().selection()
        found = {row for each in ranges for row in range(each.top(), each.bottom() + 1)}
        return sorted(found)

    def select(self, rows: Iterable[int]) -> None:
        """Select other rows, and tell nobody."""
        rows = sorted(rows)
        selection, last = QItemSelection(), self.model.columnCount() - 1
        # Qt compares each range with all others, so the fewer the better.
        for _, group in groupby(enumerate(rows), key=lambda item: item[1] - item[0]):
            run = [row for _, row in group]
            first, end = self.model.index(run[0], 0), self.model.index(run[-1], last)
            selection.select(first, end)
        self._syncing = True
        self.native.selectionModel().select(selection, QItemSelectionModel.ClearAndSelect)
        self._syncing = False
        if rows:
            self.native.scrollTo(self.model.index(rows[0], 0))

    def _tell(self, *_: Any) -> None:
        if not self._syncing:
            self._selected()
