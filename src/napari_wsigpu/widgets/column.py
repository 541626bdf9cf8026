"""A column that is scrolled up and down where the window is too low, but never sideways."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qtpy.QtCore import QEvent, QSize, Qt
from qtpy.QtWidgets import QFrame, QScrollArea

if TYPE_CHECKING:
    from qtpy.QtWidgets import QWidget


class Column(QScrollArea):  # type: ignore[misc]
    """Shows a widget at its own width.

    Parameters
    ----------
    widget : QWidget
        What is shown.
    """

    def __init__(self, widget: QWidget) -> None:
        super().__init__()
        self.setWidget(widget)
        self.setWidgetResizable(True)
        self.setFrameShape(QFrame.NoFrame)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarAlwaysOff)

    def event(self, event: QEvent) -> bool:
        """Ask for another width when the widget does."""
        if event.type() == QEvent.LayoutRequest:
            self.updateGeometry()
        return bool(super().event(event))

    def minimumSizeHint(self) -> QSize:  # noqa: N802
        """Return the widget's least width beside the scroll bar, and any height."""
        bar = self.verticalScrollBar().sizeHint().width()
        height = super().minimumSizeHint().height()
        return QSize(self.widget().minimumSizeHint().width() + bar, height)
