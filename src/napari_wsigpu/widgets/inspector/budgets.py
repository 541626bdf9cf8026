"""A cache's memory use and its budget, as a bar and a slider."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magicgui.widgets import ProgressBar
from qtpy.QtCore import Qt
from qtpy.QtWidgets import QSlider

from napari_wsigpu.model.units import byte_size
from napari_wsigpu.widgets.kit.parts import Hosted, Panel, Text, row

if TYPE_CHECKING:
    from collections.abc import Callable

    from qtpy.QtGui import QWheelEvent

LEAST = 64_000_000
PART_OF_MEMORY = 2
FINE = 1000  # parts of the bar


def budgets(memory: int, present: int) -> list[int]:
    """Return the budgets to choose from: 64, 96, 128, 192, ... MB, up to half of the memory.

    Parameters
    ----------
    memory : int
        Memory of the machine or device in bytes.
    present : int
        The current budget, which is included.
    """
    found, budget = {present, LEAST}, LEAST
    while budget <= memory // PART_OF_MEMORY:
        found |= {budget, budget * 3 // 2}
        budget *= 2
    return sorted(size for size in found if size <= memory // PART_OF_MEMORY or size == present)


class BudgetSlider(QSlider):  # type: ignore[misc]
    """A slider that ignores the wheel unless it has focus: scrolling the page doesn't move it."""

    def __init__(self) -> None:
        super().__init__(Qt.Horizontal)
        self.setFocusPolicy(Qt.StrongFocus)
        self.setTracking(False)
        self.setPageStep(2)

    def wheelEvent(self, event: QWheelEvent) -> None:  # noqa: N802
        """Pass the event on to the scroll area unless the slider has focus."""
        if self.hasFocus():
            super().wheelEvent(event)
        else:
            event.ignore()


class Budget(Panel):
    """Shows a cache's memory usage, and sets its budget when the slider is released.

    Parameters
    ----------
    name, explanation : str
        Name and content of the cache, as shown to the user.
    choose : callable
        Called with the chosen budget in bytes.
    """

    def __init__(self, name: str, explanation: str, choose: Callable[[int], object]) -> None:
        self._cache, self._chosen = name, choose
        self._sizes = [LEAST]
        self.title, self.used, self.budget = Text("", name), Text(f"{name} used"), Text("")
        self.bar = ProgressBar(min=0, max=FINE, tooltip=explanation)
        self.bar.native.setTextVisible(False)
        self.bar.native.setAccessibleName(f"{name} used")
        tip = f"{name}: maximum size, until napari is closed"
        self.slider = Hosted(BudgetSlider(), tip=tip)
        self.title.tooltip = self.used.tooltip = explanation
        top, bottom = row(self.title, self.used), row(self.slider, self.budget)
        super().__init__(top, self.bar, bottom)
        self.used.native.setAlignment(Qt.AlignRight)
        bottom.native.layout().setStretchFactor(self.slider.native, 1)
        self.slider.native.sliderMoved.connect(self._say)
        self.slider.native.valueChanged.connect(self._choose)

    def offer(self, memory: int, present: int) -> None:
        """Offer budgets that suit the memory of a machine or device."""
        self._sizes = budgets(memory, present)
        self._place(present)

    def show_use(self, used: int, budget: int) -> None:
        """Update the memory usage, and the budget too unless the user is dragging the slider."""
        self.used.value = f"{byte_size(used)} used"
        self.bar.value = round(FINE * min(1.0, used / budget)) if budget else FINE
        if not self.slider.native.isSliderDown():
            self._place(budget)

    def _place(self, budget: int) -> None:
        if budget not in self._sizes:
            self._sizes = sorted({*self._sizes, budget})
        slider = self.slider.native
        # Without signals, which would set the budget again: this only displays it.
        slider.blockSignals(True)
        slider.setRange(0, len(self._sizes) - 1)
        slider.setValue(self._sizes.index(budget))
        slider.blockSignals(False)
        self._say(slider.value())

    def _say(self, index: int) -> None:
        size = byte_size(self._sizes[index])
        self.budget.value = f"of {size}"
        self.slider.native.setAccessibleName(f"{self._cache}, at most {size}")

    def _choose(self, index: int) -> None:
        self._say(index)
        self._chosen(self._sizes[index])
