"""A drawing of a slide's levels, stacked as a pyramid."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from qtpy.QtCore import QPointF, QSize, Qt
from qtpy.QtGui import QPainter, QPalette, QPen, QPolygonF
from qtpy.QtWidgets import QSizePolicy, QWidget

from napari_wsigpu.widgets.kit.theme import accent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qtpy.QtGui import QPaintEvent

    from napari_wsigpu.model.layout import LevelLayout

# Multiples of the height of a line of text.
STEP = 1.15
DEPTH = 1.5
MARGIN = 0.3
SMALLEST = 0.14


class Pyramid(QWidget):  # type: ignore[misc]
    """Draws each level as a plane, the finest at the bottom; computed ones have dashed edges.

    The sides shrink with the logarithm of the downsample, so that every level is visible.
    """

    def __init__(self) -> None:
        super().__init__()
        self._levels: tuple[LevelLayout, ...] = ()
        self._labels: Sequence[str] = ()
        self._chosen = -1
        self.setSizePolicy(QSizePolicy.Preferred, QSizePolicy.Fixed)
        self.setAccessibleName("Pyramid of levels")

    def show_levels(self, levels: tuple[LevelLayout, ...], labels: Sequence[str]) -> None:
        """Set the levels to draw, each with its label."""
        self._levels, self._labels, self._chosen = levels, labels, -1
        self.updateGeometry()
        self.update()

    def choose(self, index: int) -> None:
        """Highlight one level; -1 for none."""
        self._chosen = index
        self.update()

    def sizeHint(self) -> QSize:  # noqa: N802
        """Return the size in pixels for the current font."""
        line = self.fontMetrics().lineSpacing()
        lines = STEP * max(len(self._levels) - 1, 0) + DEPTH + 2 * MARGIN
        return QSize(16 * line, math.ceil(lines * line))

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Draw the planes from the bottom up."""
        if not self._levels:
            return
        painter = QPainter(self)
        painter.setRenderHint(QPainter.Antialiasing)
        line = self.fontMetrics().lineSpacing()
        text_width = max(self.fontMetrics().horizontalAdvance(text) for text in self._labels)
        room = max(self.width() - text_width - 3 * line, 4 * line)
        base = self._levels[0]
        # At least 2: for a single level, the code below would divide by log2(1) = 0.
        most = math.log2(max(self._levels[-1].downsample(base), 2))
        for index, level in enumerate(self._levels):
            part = 1 - (1 - SMALLEST) * math.log2(max(level.downsample(base), 1)) / most
            middle = QPointF(
                room / 2 + line, self.height() - (MARGIN + DEPTH / 2 + index * STEP) * line
            )
            self._draw_plane(painter, middle, part * room / 2, part * DEPTH * line / 2, index)
            painter.drawText(
                QPointF(room + 2 * line, middle.y() + self.fontMetrics().capHeight() / 2),
                self._labels[index],
            )
        painter.end()

    def _draw_plane(
        self, painter: QPainter, middle: QPointF, across: float, deep: float, index: int
    ) -> None:
        slant = across / 4
        corners = (-across + slant, -deep), (across, -deep), (across - slant, deep), (-across, deep)
        plane = QPolygonF([middle + QPointF(x, y) for x, y in corners])
        chosen, computed = index == self._chosen, self._levels[index].computed
        text = self.palette().color(QPalette.WindowText)
        fill = accent()
        fill.setAlpha(255 if chosen else 60 if computed else 150)
        pen = QPen(text, 1, Qt.DashLine if computed else Qt.SolidLine)
        pen.setCosmetic(True)
        painter.setPen(pen)
        painter.setBrush(fill)
        painter.drawPolygon(plane)
        painter.setPen(text)
