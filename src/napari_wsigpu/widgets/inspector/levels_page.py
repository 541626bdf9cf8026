"""The inspector's "Levels" page: the pyramid as a drawing and a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qtpy.QtCore import QEvent, Qt
from qtpy.QtWidgets import QAbstractItemView, QHeaderView, QStyle, QTableWidget, QTableWidgetItem

from napari_wsigpu.slide.facts import LevelFacts, level_facts, levels_in_short
from napari_wsigpu.widgets.kit.parts import PAGE_MARGIN, Hosted, Panel, Text
from napari_wsigpu.widgets.kit.pyramid import Pyramid

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from qtpy.QtGui import QResizeEvent

    from napari_wsigpu.slide.slide import Slide

HEADERS = ("#", "Size", "Down", "Tile", "Bytes", "Compression")
TILE = HEADERS.index("Tile")
LEAST = 4  # characters
TIPS = LevelFacts(
    "Level number, 0 for the finest; levels that are computed for viewers have none",
    "Width and height in pixels",
    "Downsample: pixels of level 0 per pixel along each axis",
    "Width and height of a tile in pixels",
    "Bytes of all tiles in the file",
    "How tiles are compressed; computed levels are averaged from a finer one",
)


class LevelsTable(QTableWidget):  # type: ignore[misc]
    """A table that wraps its text instead of scrolling sideways."""

    def __init__(self) -> None:
        super().__init__(0, len(HEADERS))
        self.setHorizontalHeaderLabels(HEADERS)
        for column, tip in enumerate(TIPS):
            self.horizontalHeaderItem(column).setToolTip(tip)
        self.horizontalHeaderItem(len(HEADERS) - 1).setTextAlignment(Qt.AlignLeft | Qt.AlignVCenter)
        self.verticalHeader().hide()
        self.verticalHeader().setSectionResizeMode(QHeaderView.ResizeToContents)
        self.horizontalHeader().setStretchLastSection(True)
        self.horizontalHeader().setHighlightSections(False)
        self.horizontalHeader().setMinimumSectionSize(1)
        self.setEditTriggers(QAbstractItemView.NoEditTriggers)
        self.setSelectionBehavior(QAbstractItemView.SelectRows)
        self.setSelectionMode(QAbstractItemView.SingleSelection)
        self.setTabKeyNavigation(False)

    def show_levels(self, rows: Sequence[LevelFacts]) -> None:
        """Replace the rows."""
        self.setRowCount(len(rows))
        for number, row in enumerate(rows):
            for column, value in enumerate(row):
                item = QTableWidgetItem(value)
                item.setToolTip(value)
                if column < len(row) - 1:
                    item.setTextAlignment(Qt.AlignRight | Qt.AlignVCenter)
                self.setItem(number, column, item)
        self._fit()

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802
        """Distribute the new width."""
        super().resizeEvent(event)
        self._fit()

    def changeEvent(self, event: QEvent) -> None:  # noqa: N802
        """Distribute the width again after a change of the font."""
        super().changeEvent(event)
        if event.type() in (QEvent.FontChange, QEvent.StyleChange):
            self._fit()

    def _fit(self) -> None:
        columns = range(len(HEADERS))
        whole = [self._width(column, lambda text: [text]) for column in columns]
        words = [self._width(column, lambda text: text.split(" ")) for column in columns]
        room = self.viewport().width()
        widths = whole if sum(whole[:-1]) + words[-1] <= room else words
        least = LEAST * self.fontMetrics().averageCharWidth()
        # If there is too little room, hide the tile size, which rarely differs between levels.
        self.setColumnHidden(TILE, sum(widths[:-1]) + least > room)
        if self.isColumnHidden(TILE):
            widths[TILE] = 0
        # The last column takes the remaining width, and elides words that are wider.
        widths[-1] = max(room - sum(widths[:-1]), least)
        for column in columns:
            self.setColumnWidth(column, widths[column])

    def _width(self, column: int, parts: Callable[[str], list[str]]) -> int:
        cells = (self.item(row, column) for row in range(self.rowCount()))
        texts = [part for cell in cells if cell is not None for part in parts(cell.text())]
        if column < len(HEADERS) - 1:
            texts.append(HEADERS[column])
        metrics = self.fontMetrics()
        widest = max((metrics.horizontalAdvance(text) for text in texts), default=0)
        margin = self.style().pixelMetric(QStyle.PM_FocusFrameHMargin, None, self) + 1
        return int(widest + 2 * margin + 0.6 * metrics.averageCharWidth())


class LevelsPage(Panel):
    """The levels of a slide, including computed ones."""

    def __init__(self) -> None:
        self.pyramid = Hosted(Pyramid(), "Pyramid of levels")
        self.short = Text("Summary of the levels")
        self.table = Hosted(LevelsTable(), "Levels")
        super().__init__(self.pyramid, self.short, self.table, margin=PAGE_MARGIN)
        self.stretch(self.table)
        self.table.native.currentCellChanged.connect(self.pyramid.native.choose)

    def show_slide(self, slide: Slide | None) -> None:
        """Show the levels of another slide, or none."""
        rows = [] if slide is None else level_facts(slide)
        self.short.value = "" if slide is None else levels_in_short(slide)
        labels = [f"{row.level}:  {row.size}" if row.level else row.size for row in rows]
        levels = () if slide is None else tuple(level.layout for level in slide.pyramid)
        self.pyramid.native.show_levels(levels, labels)
        self.table.native.show_levels(rows)
