"""A plot of tiles per second over the last minute."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qtpy.QtCore import QPointF, QRectF, QSize, Qt
from qtpy.QtGui import QPainter, QPalette, QPen
from qtpy.QtWidgets import QSizePolicy, QWidget

from napari_wsigpu.slide.rates import SECONDS, Step, per_second
from napari_wsigpu.widgets.kit.theme import accent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qtpy.QtGui import QPaintEvent

# Multiples of the height of a line of text.
LINES = 6
INSET = 0.3
NOTHING = "No tiles were decoded in the last minute while this page was open."


class RatePlot(QWidget):  # type: ignore[misc]
    """Draws one bar per time step, as wide as the step; the highest bar is labeled."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: Sequence[Step] = ()
        self._now = 0.0
        self.setSizePolicy(QSizePolicy.Preferred, QSizePolicy.Fixed)
        self.setAccessibleName("Tiles decoded per second, over the last minute")
        self.setAccessibleDescription(NOTHING)
        self.setToolTip(self.accessibleName())

    @property
    def peak(self) -> float:
        """Highest rate of all steps, in tiles per second."""
        return max((step.rate(step.tiles) for step in self._steps), default=0.0)

    def show_steps(self, steps: Sequence[Step], now: float) -> None:
        """Plot the steps of the minute before `now`."""
        was_empty = not self.peak
        self._steps, self._now = tuple(steps), now
        # An empty plot does not change: do not redraw it while no tile is decoded.
        if was_empty and not self.peak:
            return
        self.setAccessibleDescription(self._peak_text() if self.peak else NOTHING)
        self.update()

    def sizeHint(self) -> QSize:  # noqa: N802
        """Return the size in pixels for the current font."""
        line = self.fontMetrics().lineSpacing()
        return QSize(12 * line, LINES * line)

    def minimumSizeHint(self) -> QSize:  # noqa: N802
        """Return the preferred height and a small width."""
        return QSize(0, self.sizeHint().height())

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Draw the bars between a baseline and the peak's label."""
        painter = QPainter(self)
        text = self.palette().color(QPalette.WindowText)
        line = self.fontMetrics().lineSpacing()
        inset = INSET * line
        area = QRectF(inset, 1.3 * line, self.width() - 2 * inset, self.height() - 2.6 * line)
        edge = QPen(text, 1)
        edge.setCosmetic(True)
        painter.setPen(edge)
        self._draw_bars(painter, area)
        painter.drawLine(area.bottomLeft(), area.bottomRight())
        below = QRectF(inset, area.bottom() + 0.2 * line, area.width(), line)
        painter.drawText(below, Qt.AlignLeft, f"{SECONDS:.0f} s ago")
        painter.drawText(below, Qt.AlignRight, "now")
        if not self.peak:
            painter.drawText(area, Qt.AlignCenter | Qt.TextWordWrap, NOTHING)
        painter.end()

    def _draw_bars(self, painter: QPainter, area: QRectF) -> None:
        highest = None
        for step in self._steps:
            rate = step.rate(step.tiles)
            if not rate:
                continue
            left, right = (self._across(time, area) for time in (step.start, step.end))
            high = area.height() * rate / self.peak
            bar = QRectF(left, area.bottom() - high, max(right - left, 1), high)
            painter.fillRect(bar, accent())
            painter.drawLine(bar.topLeft(), bar.topRight())
            if rate == self.peak:
                highest = bar
        if highest is not None:
            self._label(painter, highest, area)

    def _label(self, painter: QPainter, bar: QRectF, area: QRectF) -> None:
        """Write the label above a bar, moved inside the edges."""
        label, metrics = self._peak_text(), self.fontMetrics()
        wide = metrics.horizontalAdvance(label)
        left = max(area.left(), min(bar.center().x() - wide / 2, area.right() - wide))
        painter.drawText(QPointF(left, bar.top() - metrics.descent()), label)

    def _across(self, time: float, area: QRectF) -> float:
        part = max(0.0, 1 - (self._now - time) / SECONDS)
        return float(area.left() + area.width() * part)

    def _peak_text(self) -> str:
        return f"peak {per_second(self.peak)}"
