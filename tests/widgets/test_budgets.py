"""Bar and slider of a cache."""

import os

import psutil
import pytest
from qtpy.QtCore import QPoint, QPointF, Qt
from qtpy.QtGui import QWheelEvent
from qtpy.QtTest import QTest
from qtpy.QtWidgets import QApplication

from napari_wsigpu.widgets import budgets as module
from napari_wsigpu.widgets.budgets import Budget, budgets, machine_memory, memory_size

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def budget(display):
    made = Budget("Cache", "Tiles")
    display.addWidget(made)
    made.offer(4 * GIB, 512 * MIB)
    made.resize(300, 100)
    made.show()
    made.seen = []
    made.chosen.connect(made.seen.append)
    return made


def test_the_machines_memory_is_known():
    if not hasattr(os, "sysconf"):
        pytest.skip("this system has no sysconf")
    assert machine_memory() == psutil.virtual_memory().total


def test_a_system_that_says_no_memory_has_a_fixed_one(monkeypatch):
    monkeypatch.delattr(module.os, "sysconf", raising=False)
    assert machine_memory() == module.UNKNOWN_MEMORY


def test_budgets_go_up_to_half_of_the_memory():
    found = [size // MIB for size in budgets(2 * GIB, 512 * MIB)]
    assert found == [64, 96, 128, 192, 256, 384, 512, 768, 1024]


@pytest.mark.parametrize("present", [0, 500 * MIB, 64 * GIB])
@pytest.mark.parametrize("memory", [0, 32 * MIB, 16 * GIB])
def test_the_present_budget_is_among_them(memory, present):
    found = budgets(memory, present)
    assert present in found
    assert found == sorted(set(found))
    assert all(size <= memory // 2 for size in found if size != present)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 MiB"), (64 * MIB, "64 MiB"), (1536 * MIB, "1.5 GiB"), (16 * GIB, "16 GiB")],
)
def test_sizes_are_said_in_binary_units(size, text):
    assert memory_size(size) == text


def test_shows_how_it_is(budget):
    budget.show_use(128 * MIB, 512 * MIB)
    assert budget.used.text() == "128 MiB used"
    assert budget.budget.text() == "of 512 MiB"
    assert budget.bar.value() == budget.bar.maximum() // 4
    budget.show_use(0, 0)
    assert budget.budget.text() == "of 0 MiB"
    assert budget.seen == []


def test_a_budget_set_elsewhere_is_shown(budget):
    budget.show_use(0, 500 * MIB)
    assert budget.budget.text() == "of 500 MiB"
    budget.slider.triggerAction(budget.slider.SliderSingleStepAdd)
    assert budget.seen == [512 * MIB]


def test_keys_choose_at_once(budget):
    QTest.keyClick(budget.slider, Qt.Key_Right)
    assert budget.seen == [768 * MIB]
    assert budget.budget.text() == "of 768 MiB"
    assert budget.slider.accessibleName() == "Cache, at most 768 MiB"


def test_dragging_chooses_when_the_slider_is_let_go(budget):
    slider = budget.slider
    slider.setSliderDown(True)
    slider.setSliderPosition(0)
    assert budget.budget.text() == "of 64 MiB"
    budget.show_use(0, 512 * MIB)  # the clock ticks meanwhile
    assert slider.sliderPosition() == 0
    assert budget.seen == []
    slider.setSliderDown(False)
    assert budget.seen == [64 * MIB]


def test_scrolling_past_changes_nothing(budget):
    def turn():
        place = QPointF(10, 5)
        event = QWheelEvent(
            place,
            budget.slider.mapToGlobal(QPointF(10, 5)),
            QPoint(),
            QPoint(0, 120),
            Qt.NoButton,
            Qt.NoModifier,
            Qt.NoScrollPhase,
            False,
        )
        QApplication.sendEvent(budget.slider, event)

    budget.slider.clearFocus()
    turn()
    assert budget.seen == []
    budget.activateWindow()
    budget.slider.setFocus()
    QApplication.processEvents()
    turn()
    assert len(budget.seen) == 1
