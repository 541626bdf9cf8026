"""A drawing of tiles a second over the last minute."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qtpy.QtCore import QPointF, QRectF, QSize, Qt
from qtpy.QtGui import QPainter, QPalette, QPen
from qtpy.QtWidgets import QSizePolicy, QWidget

from napari_wsigpu.slide.rates import SECONDS, Step, per_second
from napari_wsigpu.widgets.kit.theme import accent

if TYPE_CHECKING:
    from collections.abc import Sequence

# In lines of text.
LINES = 6
INSET = 0.3
NOTHING = "No tile was decoded in the last minute that this was open."


class RatePlot(QWidget):  # type: ignore[misc]
    """Draws a bar for each step, as wide as it took; the highest is labelled."""

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
        """Most tiles a second of all steps that are drawn."""
        return max((step.rate(step.tiles) for step in self._steps), default=0.0)

    def show_steps(self, steps: Sequence[Step], now: float) -> None:
        """Draw other steps, the last minute before `now`."""
        was_empty = not self.peak
        self._steps, self._now = tuple(steps), now
        if was_empty and not self.peak:
            return
        self.setAccessibleDescription(self._peak_text() if self.peak else NOTHING)
        self.update()

    def sizeHint(self) -> QSize:  # noqa: N802
        """Return the size in pixels for the font that is used."""
        line = self.fontMetrics().lineSpacing()
        return QSize(12 * line, LINES * line)

    def minimumSizeHint(self) -> QSize:  # noqa: N802
        """Return a size that is as high, but may be narrow."""
        return QSize(0, self.sizeHint().height())

    def paintEvent(self, event: Any) -> None:  # noqa: N802
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
            left, right = (self._across(time, area) for time in (step.begin, step.end))
            high = area.height() * rate / self.peak
            bar = QRectF(left, area.bottom() - high, max(right - left, 1), high)
            painter.fillRect(bar, accent())
            painter.drawLine(bar.topLeft(), bar.topRight())
            if rate == self.peak:
                highest = bar
        if highest is not None:
            self._label(painter, highest, area)

    def _label(self, painter: QPainter, bar: QRectF, area: QRectF) -> None:
        """Write above a bar, as near as the edges let."""
        label, metrics = self._peak_text(), self.fontMetrics()
        wide = metrics.horizontalAdvance(label)
        left = max(area.left(), min(bar.center().x() - wide / 2, area.right() - wide))
        painter.drawText(QPointF(left, bar.top() - metrics.descent()), label)

    def _across(self, time: float, area: QRectF) -> float:
        part = max(0.0, 1 - (self._now - time) / SECONDS)
        return float(area.left() + area.width() * part)

    def _peak_text(self) -> str:
        return f"peak {per_second(self.peak)}"
