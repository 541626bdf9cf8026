"""Bar and slider of a cache."""

import os

import psutil
import pytest
from qtpy.QtCore import QPoint, QPointF, Qt
from qtpy.QtGui import QWheelEvent
from qtpy.QtTest import QTest
from qtpy.QtWidgets import QApplication, QSlider

from napari_wsigpu.model.limits import UNKNOWN_MEMORY, machine_memory
from napari_wsigpu.widgets.inspector.budgets import Budget, budgets

MB, GB = 10**6, 10**9


@pytest.fixture
def budget(display):
    seen = []
    made = Budget("Cache", "Tiles", seen.append)
    display.addWidget(made.native)
    made.offer(4 * GB, 512 * MB)
    made.native.resize(300, 100)
    made.show()
    made.seen = seen
    return made


def test_the_machines_memory_is_known():
    if not hasattr(os, "sysconf"):
        pytest.skip("this system has no sysconf")
    assert machine_memory() == psutil.virtual_memory().total


def test_a_system_that_says_no_memory_has_a_fixed_one(monkeypatch):
    monkeypatch.delattr(os, "sysconf", raising=False)
    assert machine_memory() == UNKNOWN_MEMORY


def test_budgets_go_up_to_half_of_the_memory():
    found = [size // MB for size in budgets(2 * GB, 512 * MB)]
    assert found == [64, 96, 128, 192, 256, 384, 512, 768]


@pytest.mark.parametrize("present", [0, 500 * MB, 64 * GB])
@pytest.mark.parametrize("memory", [0, 32 * MB, 16 * GB])
def test_the_present_budget_is_among_them(memory, present):
    found = budgets(memory, present)
    assert present in found
    assert found == sorted(set(found))
    assert all(size <= memory // 2 for size in found if size != present)


def test_shows_how_it_is(budget):
    budget.show_use(128 * MB, 512 * MB)
    assert budget.used.value == "128 MB used"
    assert budget.budget.value == "of 512 MB"
    assert budget.bar.value == budget.bar.max // 4
    budget.show_use(0, 0)
    assert budget.budget.value == "of 0 bytes"
    assert budget.seen == []


def test_a_budget_set_elsewhere_is_shown(budget):
    budget.show_use(0, 500 * MB)
    assert budget.budget.value == "of 500 MB"
    budget.slider.native.triggerAction(QSlider.SliderSingleStepAdd)
    assert budget.seen == [512 * MB]


def test_keys_choose_at_once(budget):
    QTest.keyClick(budget.slider.native, Qt.Key_Right)
    assert budget.seen == [768 * MB]
    assert budget.budget.value == "of 768 MB"
    assert budget.slider.native.accessibleName() == "Cache, at most 768 MB"


def test_dragging_chooses_when_the_slider_is_let_go(budget):
    slider = budget.slider.native
    slider.setSliderDown(True)
    slider.setSliderPosition(0)
    assert budget.budget.value == "of 64 MB"
    budget.show_use(0, 512 * MB)  # the clock ticks meanwhile
    assert slider.sliderPosition() == 0
    assert budget.seen == []
    slider.setSliderDown(False)
    assert budget.seen == [64 * MB]


def test_scrolling_past_changes_nothing(budget, display):
    def turn():
        place = QPointF(10, 5)
        event = QWheelEvent(
            place,
            budget.slider.native.mapToGlobal(QPointF(10, 5)),
            QPoint(),
            QPoint(0, 120),
            Qt.NoButton,
            Qt.NoModifier,
            Qt.NoScrollPhase,
            False,
        )
        QApplication.sendEvent(budget.slider.native, event)

    budget.slider.native.clearFocus()
    turn()
    assert budget.seen == []
    budget.native.activateWindow()
    budget.slider.native.setFocus()
    display.waitUntil(budget.slider.native.hasFocus)
    turn()
    assert len(budget.seen) == 1
