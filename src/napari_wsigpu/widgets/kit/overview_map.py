"""A slide's overview with a draggable frame around the visible area."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from qtpy.QtCore import QPointF, QRectF, QSize, Qt, Signal
from qtpy.QtGui import QPainter, QPen, QPolygonF
from qtpy.QtWidgets import QSizePolicy, QWidget

from napari_wsigpu.widgets.kit.theme import accent

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from qtpy.QtGui import QImage, QMouseEvent, QPaintEvent, QResizeEvent


HEIGHT = 11  # lines of text
LEAST_HEIGHT = 4
LEAST = 6  # pixels of the screen: a smaller frame becomes a cross
FRAME = 2
MAX_COORDINATE = 1e6


class OverviewMap(QWidget):  # type: ignore[misc]
    """Shows the position of the view on a slide.

    Attributes
    ----------
    moved : Signal(float, float)
        Position (x, y) that the user clicked or dragged to, in pixels of level 0.
    image : QImage or None
        The overview.
    view : ndarray or None
        Corners (x, y) of the frame, in pixels of level 0.
    """

    moved = Signal(float, float)

    def __init__(self) -> None:
        super().__init__()
        self.image: QImage | None = None
        self._size, self._aspect = (1, 1), 1.0
        self.view: NDArray[np.float64] | None = None
        self.setAccessibleName("Overview")
        self.setToolTip("Click or drag to move the view")
        self.setCursor(Qt.CrossCursor)
        self.setSizePolicy(QSizePolicy.Preferred, QSizePolicy.Preferred)

    def show_slide(self, size: tuple[int, int], aspect: float, image: QImage | None = None) -> None:
        """Show another slide of (width, height) pixels; a later call may add its image.

        A pixel is `aspect` times as wide as it is high.
        """
        self._size, self._aspect, self.image = size, aspect, image
        self._fit()
        self.update()

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: N802
        """Limit the height to the image's height."""
        super().resizeEvent(event)
        self._fit()

    def _fit(self) -> None:
        width, height = self._extent()
        least = self.minimumSizeHint().height()
        self.setMaximumHeight(max(round(self.width() * height / width), least))

    def show_view(self, corners: NDArray[np.float64] | None) -> None:
        """Move the frame to the given corners; None hides it."""
        self.view = corners
        self.update()

    def sizeHint(self) -> QSize:  # noqa: N802
        """Return the size in pixels for the current font."""
        line = self.fontMetrics().lineSpacing()
        return QSize(2 * HEIGHT * line, HEIGHT * line)

    def minimumSizeHint(self) -> QSize:  # noqa: N802
        """Return the smallest useful size."""
        line = self.fontMetrics().lineSpacing()
        return QSize(2 * LEAST_HEIGHT * line, LEAST_HEIGHT * line)

    def widget_position(self, x: float, y: float) -> QPointF:
        """Return the position of a pixel of level 0 on the widget."""
        area = self._area()
        width, height = self._size
        return QPointF(
            area.left() + x / width * area.width(), area.top() + y / height * area.height()
        )

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Draw the image and the frame."""
        painter = QPainter(self)
        painter.setRenderHints(QPainter.Antialiasing | QPainter.SmoothPixmapTransform)
        area = self._area()
        if self.image is None:
            painter.fillRect(area, self.palette().mid())
        else:
            painter.drawImage(area, self.image)
        if self.view is not None:
            painter.setPen(QPen(accent(), FRAME))
            painter.setClipRect(self.rect())
            # A view far outside the slide would overflow the integers that Qt uses for drawing.
            near = np.clip(self.view, -MAX_COORDINATE, MAX_COORDINATE)
            frame = QPolygonF([self.widget_position(x, y) for x, y in near.tolist()])
            if max(frame.boundingRect().width(), frame.boundingRect().height()) >= LEAST:
                painter.drawPolygon(frame)
            else:
                middle = frame.boundingRect().center()
                for step in (QPointF(LEAST, 0), QPointF(0, LEAST)):
                    painter.drawLine(middle - step, middle + step)
        painter.end()

    def mousePressEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Move the view to the mouse."""
        if event.button() == Qt.LeftButton:
            self._follow(event)

    def mouseMoveEvent(self, event: QMouseEvent) -> None:  # noqa: N802
        """Drag the view."""
        if event.buttons() & Qt.LeftButton:
            self._follow(event)

    def _follow(self, event: QMouseEvent) -> None:
        at, area = event.pos(), self._area()
        across = (at.x() - area.left()) / area.width()
        down = (at.y() - area.top()) / area.height()
        width, height = self._size
        self.moved.emit(min(max(across, 0), 1) * width, min(max(down, 0), 1) * height)

    def _extent(self) -> tuple[float, float]:
        """Return the slide's width and height, both in pixel widths."""
        return self._size[0], self._size[1] / self._aspect

    def _area(self) -> QRectF:
        """Return the area of the slide, which is centered and as large as possible."""
        width, height = self._extent()
        scale = min(self.width() / width, self.height() / height)
        size = max(width * scale, 1), max(height * scale, 1)
        return QRectF((self.width() - size[0]) / 2, (self.height() - size[1]) / 2, *size)
