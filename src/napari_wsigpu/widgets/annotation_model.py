"""The table of a layer of shapes: what each is, and how large on the glass."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from qtpy.QtCore import QAbstractTableModel, QModelIndex, Qt, Signal

from napari_wsigpu.annotations import measure
from napari_wsigpu.viewer.annotations import CLASS, NAME, shape_annotations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from napari.layers import Shapes

    from napari_wsigpu.annotations import Measurement
    from napari_wsigpu.viewer.annotations import ToPixels

AT_ONCE = 256  # rows that are measured together
SQUARE_MM = 1e-6
EDITABLE = (NAME, CLASS)


class Column(NamedTuple):
    """A column of the table.

    Attributes
    ----------
    title, unit, tip : str
        What its head says.
    value : str
        Which of a `Measurement` it shows, or none for a text.
    factor : float
        From square pixels or square micrometres to the unit.
    """

    title: str
    unit: str
    tip: str
    value: str = ""
    factor: float = 1.0


TEXTS = (
    Column("Name", "", "Name of the object; double-click to change it"),
    Column("Class", "", "Class of the object; double-click to change it"),
)
SHAPE = Column("Shape", "", "What was drawn")
OUTLINE = "Length of the outline, around holes too"
IN_MICROMETRES = (
    *TEXTS,
    Column("Area", "mm²", "Area without holes", "area", SQUARE_MM),
    Column("Area", "µm²", "Area without holes", "area"),
    Column("Length", "µm", "Length of a line", "length"),
    Column("Perimeter", "µm", OUTLINE, "perimeter"),
    SHAPE,
)
IN_PIXELS = (
    *TEXTS,
    Column("Area", "px²", "Area without holes", "area"),
    Column("Length", "px", "Length of a line", "length"),
    Column("Perimeter", "px", OUTLINE, "perimeter"),
    SHAPE,
)


class AnnotationModel(QAbstractTableModel):  # type: ignore[misc]
    """Rows are measured when they are first looked at, so that there may be many.

    Attributes
    ----------
    edited : Signal(int, str, str)
        The user wrote a new name or class: row, column of the layer's features, text.
    """

    edited = Signal(int, str, str)

    def __init__(self) -> None:
        super().__init__()
        self._types: list[str] = []
        self._vertices: list[Any] = []
        self._texts: dict[str, list[str]] = {}
        self._pixels_of: ToPixels = np.asarray
        self._mpp: tuple[float, float] | None = None
        self._measured: dict[int, list[Measurement]] = {}

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns, by whether the size of a pixel is known."""
        return IN_PIXELS if self._mpp is None else IN_MICROMETRES

    def show_shapes(
        self, shapes: Shapes | None, pixels_of: ToPixels, mpp: tuple[float, float] | None
    ) -> None:
        """Show another layer, or how it is now.

        Parameters
        ----------
        shapes : Shapes, optional
            The layer.
        pixels_of : callable
            From its data coordinates to (y, x) on the slide.
        mpp : tuple of float, optional
            Micrometres a pixel; without it, sizes are in pixels.
        """
        self.beginResetModel()
        self._vertices = [] if shapes is None else list(shapes.data)
        self._types = [] if shapes is None else [str(each) for each in shapes.shape_type]
        self._texts = {}
        if shapes is not None:
            for name in EDITABLE:
                column = list(shapes.features[name]) if name in shapes.features else []
                self._texts[name] = [text if isinstance(text, str) else "" for text in column]
        self._pixels_of, self._mpp = pixels_of, mpp
        self._measured = {}
        self.endResetModel()

    def rowCount(self, parent: QModelIndex | None = None) -> int:  # noqa: N802
        """Return the number of shapes."""
        return len(self._types)

    def columnCount(self, parent: QModelIndex | None = None) -> int:  # noqa: N802
        """Return the number of columns."""
        return len(self.columns)

    def headerData(self, section: int, orientation: Any, role: int = Qt.DisplayRole) -> Any:  # noqa: N802
        """Return a column's title with its unit, or a row's number."""
        if orientation == Qt.Vertical:
            return section + 1 if role == Qt.DisplayRole else None
        column = self.columns[section]
        if role == Qt.ToolTipRole:
            return column.tip
        if role == Qt.DisplayRole:
            return f"{column.title}\n{column.unit}" if column.unit else column.title
        return None

    def data(self, index: QModelIndex, role: int = Qt.DisplayRole) -> Any:
        """Return what a cell shows."""
        row, column = index.row(), index.column()
        is_number = bool(self.columns[column].value)
        if role == Qt.TextAlignmentRole and is_number:
            return int(Qt.AlignRight | Qt.AlignVCenter)
        if role not in (Qt.DisplayRole, Qt.EditRole, Qt.ToolTipRole):
            return None
        if not is_number:
            return self._text(row, column)
        value = self._value(row, self.columns[column])
        return "" if value is None else _readable(value)

    def flags(self, index: QModelIndex) -> Any:
        """Let names and classes be edited."""
        editable = Qt.ItemIsEditable if index.column() < len(EDITABLE) else Qt.NoItemFlags
        return super().flags(index) | editable

    def setData(self, index: QModelIndex, value: Any, role: int = Qt.EditRole) -> bool:  # noqa: N802
        """Tell of a new name or class."""
        if role != Qt.EditRole or index.column() >= len(EDITABLE):
            return False
        if str(value) != self._text(index.row(), index.column()):
            self.edited.emit(index.row(), EDITABLE[index.column()], str(value))
        return True

    def measurement(self, row: int) -> Measurement:
        """Return how large a shape is, in micrometres where the size of a pixel is known."""
        first = row - row % AT_ONCE
        if first not in self._measured:
            chosen = slice(first, first + AT_ONCE)
            found = shape_annotations(self._vertices[chosen], self._types[chosen], self._pixels_of)
            self._measured[first] = [measure(each, self._mpp or (1.0, 1.0)) for each in found]
        return self._measured[first][row - first]

    def table(self, rows: Sequence[int] | None = None, separator: str = ",") -> str:
        """Return rows, or all, as text with a line of titles, in full precision.

        Parameters
        ----------
        rows : sequence of int, optional
            Which rows.
        separator : str
            Between cells: a comma for CSV, a tab for spreadsheets.
        """
        text = io.StringIO()
        writer = csv.writer(text, delimiter=separator, lineterminator="\n")
        writer.writerow([f"{each.title} {each.unit}".strip() for each in self.columns])
        for row in range(self.rowCount()) if rows is None else rows:
            writer.writerow([self._cell(row, column) for column in range(len(self.columns))])
        return text.getvalue()

    def _cell(self, row: int, column: int) -> str:
        if not self.columns[column].value:
            return self._text(row, column)
        value = self._value(row, self.columns[column])
        return "" if value is None else f"{value:.10g}"

    def _value(self, row: int, column: Column) -> float | None:
        value: float | None = getattr(self.measurement(row), column.value)
        return None if value is None else value * column.factor

    def _text(self, row: int, column: int) -> str:
        if column >= len(EDITABLE):
            return self._types[row]
        texts = self._texts.get(EDITABLE[column], [])
        return texts[row] if row < len(texts) else ""


def _readable(value: float) -> str:
    """Return a number with at least four digits, and no more than needed."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if value >= 1e-3 or not value else f"{value:.2e}"
