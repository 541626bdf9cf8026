"""The "Channels" dock, used with the mouse."""

import pytest
from qtpy.QtCore import Qt
from qtpy.QtTest import QTest
from qtpy.QtWidgets import QStyle, QStyleOptionViewItem

from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from napari_wsigpu.viewer.layers.slide_layers import shown_composite
from napari_wsigpu.viewer.window.docks import open_dock
from tests.viewer.shared import wait_for_layout

pytestmark = pytest.mark.window
PLUGIN = "napari-wsigpu"


@pytest.fixture
def layer(viewer, write_channels):
    [layer] = viewer.open(write_channels(5)[0], plugin=PLUGIN)
    return layer


@pytest.fixture
def dock(viewer, layer, qtbot):
    dock = open_dock(viewer, "Channels")
    wait_for_layout(viewer)
    dock.native.parent().raise_()
    qtbot.waitUntil(lambda: not dock.list.native.visibleRegion().isEmpty())
    return dock


def check(dock, row):
    """Click the box of a row."""
    rows = dock.list.native
    option = QStyleOptionViewItem()
    rows.initViewItemOption(option)
    index = rows.model().index(row, 0)
    option.rect = rows.visualRect(index)
    option.features |= QStyleOptionViewItem.HasCheckIndicator
    box = rows.style().subElementRect(QStyle.SE_ItemViewItemCheckIndicator, option, rows)
    QTest.mouseClick(rows.viewport(), Qt.LeftButton, pos=box.center())


def click(button):
    QTest.mouseClick(button.native, Qt.LeftButton)


def names(dock):
    rows = dock.list.native
    items = map(rows.item, range(rows.count()))
    return [item.text() for item in items if not item.isHidden()]


def test_checked_channels_are_shown(layer, dock, qtbot):
    assert names(dock) == ["DAPI", "CD3", "CD8", "PanCK", "AF"]
    check(dock, 4)
    qtbot.waitUntil(lambda: shown_composite(layer).visible == (0, 1, 2, 3, 4))
    check(dock, 0)
    qtbot.waitUntil(lambda: shown_composite(layer).visible == (1, 2, 3, 4))
    dock.list.native.setCurrentRow(2)
    click(dock.solo)
    qtbot.waitUntil(lambda: shown_composite(layer).visible == (2,))
    dock.find.value = "cd"
    assert names(dock) == ["CD3", "CD8"]


def test_controls_change_the_selected_channel(layer, dock, qtbot):
    dock.list.native.setCurrentRow(1)
    qtbot.waitUntil(lambda: dock.histogram.native.range[1] > 3000)
    before = shown_composite(layer).channels
    dock.window.value = 500, 2500
    dock.gamma.value = 0.5
    dock.inverted.value = True
    composite = shown_composite(layer)
    low, high = composite.channels[1].window
    assert (low, high, composite.channels[1].gamma) == pytest.approx((500, 2500, 0.5), abs=50)
    assert composite.inverted
    assert composite.channels[0] == before[0]
    click(dock.auto)
    qtbot.waitUntil(lambda: shown_composite(layer).channels[1].window == before[1].window)


def test_channels_are_split_into_layers(viewer, layer, dock):
    click(dock.split)
    names = [each.name for each in viewer.layers]
    assert names == [
        "channels5",
        *(f"channels5 {name}" for name in ("DAPI", "CD3", "CD8", "PanCK")),
    ]
    assert [each.visible for each in viewer.layers] == [False, True, True, True, True]


def test_other_slides_have_no_channels_to_choose(viewer, write_channels, qtbot):
    viewer.open(write_channels(2)[0], plugin=PLUGIN)
    dock = open_dock(viewer, "Channels")
    qtbot.waitUntil(lambda: "is a layer" in dock.note.value)
    assert not dock.controls.visible
    viewer.open(sample_path(), plugin=PLUGIN)
    qtbot.waitUntil(lambda: "RGB" in dock.note.value)
