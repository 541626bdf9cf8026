"""A histogram of a channel's values, with the limits between which it is shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from qtpy.QtCore import QRectF, QSize
from qtpy.QtGui import QColor, QPainter, QPalette
from qtpy.QtWidgets import QSizePolicy, QWidget

if TYPE_CHECKING:
    from qtpy.QtGui import QPaintEvent

    from napari_wsigpu.model.arrays import Array

BINS = 128
NARROW = 1e-9  # a range that is less, relative to its values, has no bins
LINES = 3  # height, in lines of text


class Histogram(QWidget):  # type: ignore[misc]
    """Draws the logarithm of the number of pixels per bin of values.

    Attributes
    ----------
    range : tuple of float
        The lowest and the highest value.
    """

    def __init__(self) -> None:
        super().__init__()
        self.range = 0.0, 1.0
        self._counts = np.zeros(BINS)
        self._window: tuple[float, float] | None = None
        self._color = ""
        self.setSizePolicy(QSizePolicy.Preferred, QSizePolicy.Fixed)

    def show_values(self, pixels: Array) -> None:
        """Compute the histogram of `pixels`, and redraw it."""
        finite = pixels[np.isfinite(pixels)].astype(np.float64)
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
        # All bins have a width, also those of equal values.
        narrow = high - low <= NARROW * max(abs(low), abs(high))
        self.range = low, low + max(1.0, abs(low)) if narrow else high
        self._counts = np.log1p(np.histogram(finite, BINS, self.range)[0])
        self.update()

    def mark(self, window: tuple[float, float] | None, color: str) -> None:
        """Highlight the bars within `window` in `color`; None highlights nothing."""
        self._window, self._color = window, color
        limits = "" if window is None else "{:.5g} to {:.5g}".format(*window)
        self.setAccessibleDescription(limits)
        self.update()

    def sizeHint(self) -> QSize:  # noqa: N802
        """Return the size in pixels for the current font."""
        line = self.fontMetrics().lineSpacing()
        return QSize(LINES * line, LINES * line)

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Draw one bar per bin, and dim the bars outside the limits."""
        painter = QPainter(self)
        outside = self.palette().color(QPalette.WindowText)
        outside.setAlphaF(0.3)
        low, high = self.range
        step, most = (high - low) / BINS, max(self._counts.max(), 1e-9)
        width = self.width() / BINS
        for index, count in enumerate(self._counts):
            middle = low + (index + 0.5) * step
            is_inside = self._window is not None and self._window[0] <= middle <= self._window[1]
            tall = self.height() * count / most
            bar = QRectF(index * width, self.height() - tall, width, tall)
            painter.fillRect(bar, QColor(self._color) if is_inside else outside)
        painter.end()
