"""An image that can be replaced by a placeholder for privacy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from qtpy.QtCore import QPoint, QPointF, QRect, QSize, QSizeF, Qt
from qtpy.QtGui import QColor, QIcon, QImage, QPainter, QPalette, QPixmap, QRadialGradient
from qtpy.QtWidgets import QLabel, QSizePolicy

from napari_wsigpu.slide.pictures import overview, pixel_aspect

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from qtpy.QtGui import QPaintEvent

    from napari_wsigpu.model.composite import Composite
    from napari_wsigpu.slide.slide import Slide

LONGEST_SIDE = 1024
SMALLEST = 3
# Spots of the placeholder: (x, y, radius) relative to its size.
SPOTS = ((0.2, 0.35, 0.3), (0.45, 0.7, 0.25), (0.62, 0.3, 0.28), (0.85, 0.6, 0.32))


class PictureView(QLabel):  # type: ignore[misc]
    """Shows an image as large as possible, a line of text, or a placeholder.

    Parameters
    ----------
    width, height : float
        Largest size as a multiple of the line height, so that it grows with the font.

    Attributes
    ----------
    image : QImage or None
        The image that is shown.
    veiled : bool
        Whether a placeholder is shown instead of the image.
    """

    def __init__(self, width: float, height: float) -> None:
        super().__init__()
        self._lines = (width, height)
        self.image: QImage | None = None
        self.veiled = False
        self.setAlignment(Qt.AlignCenter)
        self.setTextFormat(Qt.PlainText)
        self.setWordWrap(True)
        self.setSizePolicy(QSizePolicy.Preferred, QSizePolicy.Fixed)

    def show_picture(self, image: QImage) -> None:
        """Show an image."""
        self._set(image, "", veiled=False)

    def show_text(self, text: str) -> None:
        """Show a line of text instead of an image."""
        self._set(None, text, veiled=False)

    def show_veil(self, text: str) -> None:
        """Show a placeholder, which is the same for all images, and a line of text."""
        self._set(None, text, veiled=True)

    def sizeHint(self) -> QSize:  # noqa: N802
        """Return the size in pixels for the current font."""
        line = self.fontMetrics().lineSpacing()
        size = QSize(round(self._lines[0] * line), round(self._lines[1] * line))
        if self.image is not None:
            size.setWidth(self.image.size().scaled(size, Qt.KeepAspectRatio).width())
        return size

    def heightForWidth(self, width: int) -> int:  # noqa: N802
        """Return the same height for every width."""
        height: int = self.sizeHint().height()
        return height

    def minimumSizeHint(self) -> QSize:  # noqa: N802
        """Return the smallest useful size."""
        return QSize(self.fontMetrics().lineSpacing() * SMALLEST, self.sizeHint().height())

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: N802
        """Draw the image or the placeholder."""
        painter = QPainter(self)
        painter.setRenderHints(QPainter.Antialiasing | QPainter.SmoothPixmapTransform)
        if self.image is None:
            self._paint_ground(painter)
        else:
            size = self.image.size().scaled(self.size(), Qt.KeepAspectRatio)
            painter.drawImage(QRect(QPoint(0, 0), size), self.image)
        painter.end()
        super().paintEvent(event)

    def _set(self, image: QImage | None, text: str, *, veiled: bool) -> None:
        self.image, self.veiled = image, veiled
        self.setText(text)
        self.updateGeometry()
        self.update()

    def _paint_ground(self, painter: QPainter) -> None:
        color = self.palette().color(QPalette.WindowText)
        painter.setPen(Qt.NoPen)
        painter.setBrush(_faint(color, 24))
        corner = self.fontMetrics().lineSpacing() / 3
        painter.drawRoundedRect(self.rect(), corner, corner)
        if self.veiled:
            for x, y, radius in SPOTS:
                middle = QPointF(x * self.width(), y * self.height())
                spot = QRadialGradient(middle, radius * self.width())
                spot.setColorAt(0, _faint(color, 50))
                spot.setColorAt(1, _faint(color, 0))
                painter.setBrush(spot)
                painter.drawRoundedRect(self.rect(), corner, corner)


def overview_image(slide: Slide, composite: Composite | None = None) -> QImage:
    """Return a slide's overview with the slide's aspect ratio; see `overview` and `to_image`."""
    return to_image(overview(slide, composite), pixel_aspect(slide))


def to_image(pixels: NDArray[np.uint8], aspect: float = 1.0) -> QImage:
    """Return a QImage of (height, width, 3) bytes, of at most `LONGEST_SIDE` pixels a side.

    Any thread may call this. A pixel is `aspect` times as wide as it is high.
    """
    pixels = np.ascontiguousarray(pixels)
    height, width = pixels.shape[:2]
    image = QImage(pixels.data, width, height, 3 * width, QImage.Format_RGB888)
    exact = QSizeF(width * max(aspect, 1), height / min(aspect, 1))
    if max(exact.width(), exact.height()) > LONGEST_SIDE:
        exact.scale(LONGEST_SIDE, LONGEST_SIDE, Qt.KeepAspectRatio)
    size = exact.toSize().expandedTo(QSize(1, 1))
    if size == image.size():
        return image.copy()
    return image.scaled(size, Qt.IgnoreAspectRatio, Qt.SmoothTransformation)


def _faint(color: QColor, alpha: int) -> QColor:
    faint = QColor(color)
    faint.setAlpha(alpha)
    return faint


def icon_of(pixmap: QPixmap) -> QIcon:
    """Return an icon that keeps its colors, which Qt would tint in selected rows."""
    icon = QIcon(pixmap)
    icon.addPixmap(pixmap, QIcon.Selected)
    return icon
