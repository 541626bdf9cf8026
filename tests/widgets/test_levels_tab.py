"""The levels as a table and a drawing."""

import pytest

from napari_wsigpu import open_slide
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from napari_wsigpu.widgets.inspector.levels_page import LevelsPage


@pytest.fixture
def tab(display):
    made = LevelsPage()
    display.addWidget(made.native)
    made.native.resize(500, 500)
    made.show()
    with open_slide(sample_path(), "cpu") as slide:
        made.show_slide(slide)
    return made


def test_a_row_a_level(tab):
    assert tab.table.native.rowCount() == 4
    rows = [[tab.table.native.item(row, column).text() for column in range(6)] for row in range(4)]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert [row[2] for row in rows] == ["1", "2", "4", "8"]


def test_choosing_a_row_changes_the_drawing(tab):
    before = tab.pyramid.native.grab().toImage()
    tab.table.native.setCurrentCell(2, 0)
    assert tab.pyramid.native.grab().toImage() != before


def test_the_table_needs_no_scrolling(tab, display):
    bar = tab.table.native.horizontalScrollBar()
    assert bar.maximum() == 0
    high = tab.table.native.rowHeight(0)
    tab.native.resize(300, 500)
    display.wait(50)
    assert bar.maximum() == 0
    assert tab.table.native.rowHeight(0) > high
    tab.native.resize(240, 500)
    display.wait(50)
    assert bar.maximum() == 0
    assert [tab.table.native.isColumnHidden(column) for column in range(6)].count(True) == 1
    tab.native.resize(500, 500)
    display.wait(50)
    assert not any(tab.table.native.isColumnHidden(column) for column in range(6))


def test_grows_with_the_font(tab, display):
    before = tab.pyramid.native.sizeHint()
    font = tab.native.font()
    font.setPointSizeF(font.pointSizeF() * 2)
    tab.native.setFont(font)
    display.wait(50)
    assert tab.pyramid.native.sizeHint().height() > 1.5 * before.height()


def test_shows_nothing_without_a_slide(tab):
    tab.show_slide(None)
    assert tab.table.native.rowCount() == 0
    assert tab.short.value == ""
