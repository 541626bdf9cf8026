"""How much memory a cache takes and may take: a bar and a slider."""

from __future__ import annotations

import os
from typing import Any

from qtpy.QtCore import Qt, Signal
from qtpy.QtWidgets import QGridLayout, QLabel, QProgressBar, QSlider, QWidget

from napari_wsigpu.model.units import byte_size

LEAST = 64_000_000
UNKNOWN_MEMORY = 8_000_000_000
PART_OF_MEMORY = 2
FINE = 1000  # parts of the bar


def machine_memory() -> int:
    """Return the bytes of memory that the machine has, or a fixed number where it won't say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return UNKNOWN_MEMORY


def budgets(memory: int, present: int) -> list[int]:
    """Return the budgets to choose from: 64, 96, 128, 192, ... MB, up to half of the memory.

    Parameters
    ----------
    memory : int
        Bytes that there are.
    present : int
        The budget as it is, which is among them.
    """
    found, budget = {present, LEAST}, LEAST
    while budget <= memory // PART_OF_MEMORY:
        found |= {budget, budget * 3 // 2}
        budget *= 2
    return sorted(size for size in found if size <= memory // PART_OF_MEMORY or size == present)


class BudgetSlider(QSlider):  # type: ignore[misc]
    """A slider that the wheel moves only when it has the focus, not while one scrolls past."""

    def __init__(self) -> None:
        super().__init__(Qt.Horizontal)
        self.setFocusPolicy(Qt.StrongFocus)
        self.setTracking(False)
        self.setPageStep(2)

    def wheelEvent(self, event: Any) -> None:  # noqa: N802
        """Leave the wheel to what scrolls around it."""
        if self.hasFocus():
            super().wheelEvent(event)
        else:
            event.ignore()


class Budget(QWidget):  # type: ignore[misc]
    """Shows what a cache uses, and sets its budget when the slider is let go.

    Parameters
    ----------
    name : str
        The cache's name, for people.
    explanation : str
        What it holds.

    Attributes
    ----------
    chosen : Signal(object)
        The budget that was chosen, in bytes: more than Qt's integers hold.
    """

    chosen = Signal(object)

    def __init__(self, name: str, explanation: str) -> None:
        super().__init__()
        self._name = name
        self._sizes = [LEAST]
        self.title = QLabel(name)
        self.title.setWordWrap(True)
        self.used = QLabel()
        self.bar = QProgressBar()
        self.bar.setRange(0, FINE)
        self.bar.setTextVisible(False)
        self.bar.setAccessibleName(f"{name} used")
        self.slider = BudgetSlider()
        self.budget = QLabel()
        layout = QGridLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setColumnStretch(0, 1)
        layout.addWidget(self.title, 0, 0)
        layout.addWidget(self.used, 0, 1, Qt.AlignRight)
        layout.addWidget(self.bar, 1, 0, 1, 2)
        layout.addWidget(self.slider, 2, 0)
        layout.addWidget(self.budget, 2, 1, Qt.AlignRight)
        for part in (self.title, self.used, self.bar):
            part.setToolTip(explanation)
        self.slider.setToolTip(f"{name}: how much it may take, until napari is closed")
        self.slider.sliderMoved.connect(self._say)
        self.slider.valueChanged.connect(self._choose)

    def offer(self, memory: int, present: int) -> None:
        """Offer budgets of a machine or device that has so much memory."""
        self._sizes = budgets(memory, present)
        self._place(present)

    def show_use(self, used: int, budget: int) -> None:
        """Show how it is now, unless the slider is being dragged."""
        self.used.setText(f"{byte_size(used)} used")
        self.bar.setValue(round(FINE * min(1.0, used / budget)) if budget else FINE)
        if not self.slider.isSliderDown():
            self._place(budget)

    def _place(self, budget: int) -> None:
        if budget not in self._sizes:
            self._sizes = sorted({*self._sizes, budget})
        self.slider.blockSignals(True)
        self.slider.setRange(0, len(self._sizes) - 1)
        self.slider.setValue(self._sizes.index(budget))
        self.slider.blockSignals(False)
        self._say(self.slider.value())

    def _say(self, index: int) -> None:
        size = byte_size(self._sizes[index])
        self.budget.setText(f"of {size}")
        self.slider.setAccessibleName(f"{self._name}, at most {size}")

    def _choose(self, index: int) -> None:
        self._say(index)
        self.chosen.emit(self._sizes[index])
