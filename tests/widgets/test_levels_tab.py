"""The levels as a table and a drawing."""

import numpy as np
import pytest
from qtpy.QtGui import QImage

from napari_wsigpu import open_slide
from napari_wsigpu.viewer.sample import sample_path
from napari_wsigpu.widgets.levels_tab import LevelsTab


@pytest.fixture
def tab(display):
    made = LevelsTab()
    display.addWidget(made)
    made.resize(500, 500)
    made.show()
    with open_slide(sample_path(), "cpu") as slide:
        made.show_slide(slide)
    return made


def drawn(widget):
    picture = widget.grab().toImage().convertToFormat(QImage.Format_RGB32)
    pixels = np.frombuffer(bytes(picture.constBits().asarray(picture.sizeInBytes())), np.uint32)
    return pixels.copy()


def test_a_row_a_level(tab):
    assert tab.table.rowCount() == 4
    rows = [[tab.table.item(row, column).text() for column in range(6)] for row in range(4)]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert [row[2] for row in rows] == ["1", "2", "4", "8"]


def test_choosing_a_row_changes_the_drawing(tab):
    before = drawn(tab.pyramid)
    tab.table.setCurrentCell(2, 0)
    assert (drawn(tab.pyramid) != before).any()


def test_the_table_needs_no_scrolling(tab, display):
    bar = tab.table.horizontalScrollBar()
    assert bar.maximum() == 0
    high = tab.table.rowHeight(0)
    tab.resize(300, 500)
    display.wait(50)
    assert bar.maximum() == 0
    assert tab.table.rowHeight(0) > high
    tab.resize(240, 500)
    display.wait(50)
    assert bar.maximum() == 0
    assert [tab.table.isColumnHidden(column) for column in range(6)].count(True) == 1
    tab.resize(500, 500)
    display.wait(50)
    assert not any(tab.table.isColumnHidden(column) for column in range(6))


def test_grows_with_the_font(tab, display):
    before = tab.pyramid.sizeHint()
    font = tab.font()
    font.setPointSizeF(font.pointSizeF() * 2)
    tab.setFont(font)
    display.wait(50)
    assert tab.pyramid.sizeHint().height() > 1.5 * before.height()


def test_shows_nothing_without_a_slide(tab):
    tab.show_slide(None)
    assert tab.table.rowCount() == 0
    assert tab.short.text() == ""
