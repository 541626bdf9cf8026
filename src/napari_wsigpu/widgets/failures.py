"""The list of tiles that can't be decoded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qtpy.QtCore import Qt
from qtpy.QtWidgets import QAbstractItemView, QLabel, QListWidget, QVBoxLayout, QWidget

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MOST_ROWS = 200
LONGEST = 300  # characters
ROWS_SEEN = 6
NONE = "No tile has failed so far."


class Failures(QWidget):  # type: ignore[misc]
    """Names the first failed tiles of a slide and why each failed."""

    def __init__(self) -> None:
        super().__init__()
        self._count = -1
        self.title = QLabel()
        self.list = QListWidget()
        self.list.setWordWrap(True)
        self.list.setSpacing(1)
        self.list.setAccessibleName("Failed tiles")
        self.list.setHorizontalScrollBarPolicy(Qt.ScrollBarAlwaysOff)
        self.list.setSelectionMode(QAbstractItemView.SingleSelection)
        self.list.setTextElideMode(Qt.ElideNone)
        self.title.setBuddy(self.list)
        self.title.setWordWrap(True)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(self.title, 0, Qt.AlignTop)
        layout.addWidget(self.list, 1)

    def clear(self) -> None:
        """Forget what is shown."""
        self._count = -1

    def show_failures(self, count: int, read: Callable[[int], Mapping[str, str]]) -> None:
        """Show the failed tiles if there are others than before.

        Parameters
        ----------
        count : int
            How many there are.
        read : callable
            Returns names and reasons of the first so many.
        """
        if count == self._count:
            return
        self._count = count
        rows = [f"{name}: {why}" for name, why in read(MOST_ROWS).items()]
        more = count - len(rows)
        self.title.setText(f"Failed tiles: {count:,}, shown as background" if count else NONE)
        self.list.clear()
        self.list.addItems([_short(row) for row in rows])
        if more > 0:
            self.list.addItem(f"And {more:,} more.")
        self.list.setVisible(count > 0)
        self._fit()

    def changeEvent(self, event: Any) -> None:  # noqa: N802
        """Keep room for some rows of another font."""
        super().changeEvent(event)
        self._fit()

    def _fit(self) -> None:
        self.list.setMinimumHeight(ROWS_SEEN * self.list.fontMetrics().lineSpacing())


def _short(text: str) -> str:
    line = " ".join(text[: LONGEST + 1].split())
    return line if len(text) <= LONGEST else f"{line[:LONGEST]}…"
