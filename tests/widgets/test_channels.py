"""The "Channels" dock, used with the mouse."""

import json
import shutil
import threading
from dataclasses import replace

import numpy as np
import pytest
import tifffile
from napari.layers import Layer as AnyLayer
from qtpy.QtCore import Qt
from qtpy.QtTest import QTest
from qtpy.QtWidgets import QInputDialog, QStyle, QStyleOptionViewItem

from napari_wsigpu import SlideError, wait
from napari_wsigpu.model.channel_groups import group_of
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from napari_wsigpu.viewer.contributions.view_commands import next_channels
from napari_wsigpu.viewer.layers.slide_layers import (
    add_channel_groups,
    show_composite,
    show_next_group,
    shown_composite,
    slide_of,
)
from napari_wsigpu.viewer.window.docks import open_dock
from napari_wsigpu.widgets.channels import channel_dock
from napari_wsigpu.widgets.dock import jobs
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


def wait_for_channels(layer, dock, qtbot, *channels):
    """Wait until a layer shows some channels and the dock says so, which is after the frame."""
    qtbot.waitUntil(lambda: shown(layer) == channels == checked(dock))


def checked(dock):
    rows = dock.list.native
    items = [rows.item(row).checkState() == Qt.Checked for row in range(rows.count())]
    return tuple(np.flatnonzero(items))


def wait_for_group(dock, qtbot, name):
    qtbot.waitUntil(lambda: dock.group.native.currentText() == name)


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


@pytest.fixture
def held(monkeypatch):
    """Hold the reads of limits until this event is set."""
    event, read = threading.Event(), channel_dock.contrast_limits

    def wait_and_read(pixels):
        assert event.wait(20)
        return read(pixels)

    monkeypatch.setattr(channel_dock, "contrast_limits", wait_and_read)
    yield event
    event.set()


def test_later_changes_survive_a_read(layer, dock, held, qtbot):
    check(dock, 4)
    dock.gamma.value = 0.5
    dock.inverted.value = True
    assert shown_composite(layer).channels[0].gamma == 0.5
    check(dock, 1)
    assert shown(layer) == (0, 2, 3)
    held.set()
    qtbot.waitUntil(lambda: shown(layer) == (0, 2, 3, 4))
    composite = shown_composite(layer)
    assert composite.inverted
    assert composite.channels[0].gamma == 0.5
    assert composite.channels[4].window is not None


def test_a_change_that_needs_no_read_comes_first(layer, dock, held, qtbot):
    check(dock, 4)
    check(dock, 4)
    click(dock.auto)
    dock.gamma.value = 0.5
    assert shown_composite(layer).channels[0].gamma == 0.5
    held.set()
    qtbot.waitUntil(lambda: shown_composite(layer).channels[4].window is not None)
    assert shown(layer) == (0, 1, 2, 3)
    assert shown_composite(layer).channels[0].gamma == 0.5


def test_unread_channels_replace_the_others_once_they_are_read(layer, dock, held, qtbot):
    dock.list.native.setCurrentRow(4)
    click(dock.solo)
    dock.inverted.native.click()
    assert (shown(layer), shown_composite(layer).inverted) == ((0, 1, 2, 3), True)
    qtbot.waitUntil(lambda: checked(dock) == (4,))
    check(dock, 0)
    held.set()
    wait_for_channels(layer, dock, qtbot, 0, 4)


def test_boxes_are_checked_before_the_dock_is_filled(layer, dock, qtbot):
    dock.list.native.setCurrentRow(1)
    click(dock.solo)
    check(dock, 4)
    wait_for_channels(layer, dock, qtbot, 1, 4)


def test_a_channel_that_cannot_be_read_hides_no_other(layer, dock, qtbot, monkeypatch):
    read, failing = channel_dock.contrast_limits, threading.Event()
    slide = slide_of(layer)
    broken = slide.channel_overview(3).tobytes()

    def fail_first(pixels):
        if pixels.tobytes() == broken:
            failing.set()
            raise SlideError("A tile is damaged.")
        assert failing.wait(20)
        return read(pixels)

    monkeypatch.setattr(channel_dock, "contrast_limits", fail_first)
    composite = shown_composite(layer).showing([0])
    for index in (3, 4):
        composite = composite.styled(index, replace(composite.channels[index], window=None))
    show_composite(layer, composite)
    qtbot.waitUntil(lambda: checked(dock) == (0,))
    check(dock, 4)
    check(dock, 3)
    wait_for_channels(layer, dock, qtbot, 0, 4)
    assert "damaged" in dock.note.value


def test_a_selected_channel_shows_its_own_limits_at_once(layer, dock, held, qtbot):
    qtbot.waitUntil(lambda: dock.histogram.native.range[1] > 1)
    composite = shown_composite(layer)
    style = replace(composite.channels[2], window=(7, 40_000), gamma=2.0)
    show_composite(layer, composite.styled(2, style))
    dock.list.native.setCurrentRow(2)
    assert (dock.low.value, dock.high.value, dock.gamma.value) == ("7", "40000", 2)
    assert dock.window.value == (7, 40_000)


def test_a_removed_layer_waits_for_nothing_when_it_returns(viewer, layer, dock, held, qtbot):
    check(dock, 4)
    viewer.layers.remove(layer)
    qtbot.waitUntil(lambda: dock.slide is None)
    held.set()
    viewer.layers.append(layer)
    qtbot.waitUntil(lambda: dock.slide is not None and checked(dock) == (0, 1, 2, 3))
    check(dock, 4)
    wait_for_channels(layer, dock, qtbot, 0, 1, 2, 3, 4)


def test_text_typed_for_another_slide_is_dropped(viewer, layer, dock, tmp_path, qtbot):
    dock.low.native.setFocus()
    QTest.keyClicks(dock.low.native, "9")
    copy = shutil.copy(slide_of(layer).path, tmp_path / "copy.ome.tif")
    before = shown_composite(layer)
    [other] = viewer.open(copy, plugin=PLUGIN)
    qtbot.waitUntil(lambda: dock.slide is slide_of(other))
    shown_before = shown_composite(other)
    QTest.keyClick(dock.low.native, Qt.Key_Return)
    assert shown_composite(layer) is before
    assert shown_composite(other) is shown_before


def test_a_read_of_a_removed_slide_reports_nothing(viewer, layer, dock, qtbot, monkeypatch):
    removed, ended = threading.Event(), threading.Event()

    def fail_late(_):
        assert removed.wait(20)
        ended.set()
        raise SlideError("The slide is closed.")

    monkeypatch.setattr(channel_dock, "contrast_limits", fail_late)
    reported = []
    monkeypatch.setattr(jobs, "show_error", reported.append)
    check(dock, 4)
    viewer.layers.remove(layer)
    removed.set()
    assert ended.wait(20)
    qtbot.wait(100)
    assert not reported
    assert not dock.note.value


def test_a_read_changes_the_layer_that_asked(viewer, layer, dock, held, tmp_path, qtbot):
    copy = shutil.copy(slide_of(layer).path, tmp_path / "copy.ome.tif")
    [other] = viewer.open(copy, plugin=PLUGIN)
    viewer.layers.selection.active = layer
    before = shown_composite(other)
    check(dock, 4)
    viewer.layers.selection.active = other
    held.set()
    qtbot.waitUntil(lambda: shown(layer) == (0, 1, 2, 3, 4))
    assert shown_composite(other) is before


def test_limits_of_small_floats(viewer, tmp_path, qtbot):
    pixels = np.random.default_rng(0).random((5, 300, 300), np.float32)
    tifffile.imwrite(tmp_path / "floats.ome.tif", pixels, metadata={"axes": "CYX"}, tile=(256, 256))
    [layer] = viewer.open(tmp_path / "floats.ome.tif", plugin=PLUGIN)
    dock = open_dock(viewer, "Channels")
    # The handles stay a step apart.
    qtbot.waitUntil(lambda: dock.window.step < 0.01)
    dock.window.value = 0.2, 0.3
    assert shown_composite(layer).channels[0].window == pytest.approx((0.2, 0.3), abs=0.01)


def shown(layer):
    return shown_composite(layer).visible


def test_groups_are_shown_added_saved_and_opened(viewer, layer, dock, qtbot, monkeypatch, tmp_path):
    assert [dock.group.native.itemText(row) for row in range(3)] == ["", "1 to 4", "5"]
    dock.group.value = 1
    wait_for_channels(layer, dock, qtbot, 4)
    next_channels(viewer)
    assert shown(layer) == (0, 1, 2, 3)
    wait_for_group(dock, qtbot, "1 to 4")
    check(dock, 3)
    wait_for_channels(layer, dock, qtbot, 0, 1, 2)
    qtbot.waitUntil(lambda: dock.group.value == -1)
    monkeypatch.setattr(QInputDialog, "getText", lambda *_: ("T cells", True))
    click(dock.add)
    assert dock.group.native.currentText() == "T cells"
    path = tmp_path / "groups.json"
    monkeypatch.setattr(channel_dock, "ask_where_to_save", lambda *_: str(path))
    click(dock.save)
    check(dock, 0)
    wait_for_channels(layer, dock, qtbot, 1, 2)
    monkeypatch.setattr(channel_dock, "ask_for_file", lambda *_: str(path))
    click(dock.open)
    wait_for_channels(layer, dock, qtbot, 0, 1, 2)
    wait_for_group(dock, qtbot, "T cells")
    path.write_text("{}")
    click(dock.open)
    assert "holds no channel groups" in dock.note.value
    assert shown(layer) == (0, 1, 2)
    check(dock, 0)
    wait_for_channels(layer, dock, qtbot, 1, 2)
    assert not dock.note.native.isVisible()


def test_buttons_need_visible_channels(layer, dock, qtbot):
    buttons = [each.native for each in (dock.add, dock.auto, dock.split)]
    assert all(each.isEnabled() for each in buttons)
    click(dock.solo)
    wait_for_channels(layer, dock, qtbot, 0)
    check(dock, 0)
    wait_for_channels(layer, dock, qtbot)
    qtbot.waitUntil(lambda: not any(each.isEnabled() for each in buttons))
    check(dock, 1)
    qtbot.waitUntil(lambda: all(each.isEnabled() for each in buttons))


def test_the_status_bar_states_the_values_of_visible_channels(layer):
    pixels = tifffile.imread(slide_of(layer).path)
    show_composite(layer, shown_composite(layer).showing([1, 4]))
    position = np.array([700, 900]) * layer.scale
    assert layer.data_level == 1
    status = layer.get_status(position, dims_displayed=[0, 1], world=True)
    expected = f"CD3 {pixels[1, 700, 900]}  AF {pixels[4, 700, 900]}"
    assert status["value"] == expected
    assert status["coordinates"].endswith(f": {expected}")
    outside = layer.get_status(-position, dims_displayed=[0, 1], world=True)
    assert "CD3" not in outside["value"]


def test_automatic_limits_are_those_of_the_shown_plane(viewer, tmp_path, qtbot):
    pixels = np.random.default_rng(3).integers(0, 1000, (2, 5, 300, 400), np.uint16)
    pixels[1] += 5000
    path = tmp_path / "stack.ome.tif"
    axes = {"axes": "ZCYX", "Channel": {"Name": list("abcde")}}
    tifffile.imwrite(path, pixels, metadata=axes, tile=(128, 128), photometric="minisblack")
    [layer] = viewer.open(path, plugin=PLUGIN)
    dock = open_dock(viewer, "Channels")
    wait_for_layout(viewer)  # until then, the plugin may move the slider to the slide's plane
    for plane, low in ((1, 5000), (0, 0)):
        viewer.dims.set_point(0, plane)
        click(dock.auto)
        qtbot.waitUntil(
            lambda low=low: low <= shown_composite(layer).channels[0].window[0] < low + 100
        )
    viewer.dims.set_point(0, 1)
    dock.list.native.setCurrentRow(3)
    qtbot.waitUntil(lambda: dock.histogram.native.range[0] >= 5000)


def test_the_next_group_shows_its_values_under_a_resting_mouse(viewer, layer):
    pixels = tifffile.imread(slide_of(layer).path)
    # Instead of the thread that a shown window has.
    viewer.cursor.events.position.connect(viewer.update_status_from_cursor)
    viewer.mouse_over_canvas = True
    viewer.cursor.position = tuple(np.array([700, 900]) * layer.scale)
    for index, name in ((1, "CD3"), (4, "AF")):
        show_composite(layer, shown_composite(layer).showing([index]))
        add_channel_groups(layer, [group_of(shown_composite(layer), name)])
    for index, name in ((1, "CD3"), (4, "AF")):
        show_next_group(layer)
        assert viewer.status["coordinates"].endswith(f": {name} {pixels[index, 700, 900]}")


def test_a_hidden_composite_is_stated_and_not_split_again(layer, dock):
    click(dock.split)
    assert "The composite is hidden" in dock.note.value
    assert not dock.split.native.isEnabled()
    assert dock.auto.native.isEnabled()
    layer.visible = True
    assert not dock.note.native.isVisible()
    assert dock.split.native.isEnabled()


def test_channels_are_split_into_layers(viewer, layer, dock):
    click(dock.split)
    names = [each.name for each in viewer.layers]
    assert names == [
        "channels5",
        *(f"channels5 {name}" for name in ("DAPI", "CD3", "CD8", "PanCK")),
    ]
    assert [each.visible for each in viewer.layers] == [False, True, True, True, True]


def test_split_layers_look_as_in_the_composite(viewer, layer, dock):
    composite = shown_composite(layer).showing([1, 4])
    style = replace(composite.channels[1], color="#ff8040", window=(300, 900), gamma=0.5)
    show_composite(layer, composite.styled(1, style))
    click(dock.split)
    _, first, second = viewer.layers
    assert (first.contrast_limits, first.gamma) == ([300, 900], 0.5)
    np.testing.assert_allclose(first.colormap.colors[-1][:3], np.array([255, 128, 64]) / 255)
    assert first.visible
    assert second.visible


def enter(field, text):
    """Type into a field, and press Enter."""
    field.native.setFocus()
    field.native.selectAll()
    QTest.keyClicks(field.native, text)
    QTest.keyClick(field.native, Qt.Key_Return)


def test_typed_limits_are_those_of_the_channel(layer, dock, qtbot):
    dock.list.native.setCurrentRow(1)
    qtbot.waitUntil(lambda: dock.histogram.native.range[1] > 3000)

    def window():
        return shown_composite(layer).channels[1].window

    low, _ = window()
    enter(dock.high, "2500")
    assert window() == (low, 2500)
    assert dock.window.max > 3000
    # Limits may lie beyond the values in the overview; reversed ones move together.
    enter(dock.high, "60000")
    enter(dock.low, "-5")
    assert window() == (-5, 60000)
    enter(dock.low, "70000")
    assert window() == (70000, 70000)
    enter(dock.high, "400")
    assert window() == (400, 400)
    enter(dock.low, "100")
    assert window() == (100, 400)
    for text in ("", "many", "nan", "1e999", "1e31"):
        enter(dock.high, text)
        assert window() == (100, 400)
        assert (dock.low.value, dock.high.value) == ("100", "400")
    assert dock.window.value == (100, 400)
    assert dock.window.max < 10_000  # a typing error does not widen the slider for good


def test_large_limits_stay_exact(viewer, tmp_path, qtbot):
    pixels = np.random.default_rng(0).integers(0, 1 << 28, (5, 300, 300), np.uint32)
    tifffile.imwrite(tmp_path / "large.ome.tif", pixels, metadata={"axes": "CYX"}, tile=(256, 256))
    [layer] = viewer.open(tmp_path / "large.ome.tif", plugin=PLUGIN)
    dock = open_dock(viewer, "Channels")
    qtbot.waitUntil(lambda: dock.histogram.native.range[1] > 1e8)
    before = shown_composite(layer)
    dock.high.native.setFocus()
    QTest.keyClick(dock.high.native, Qt.Key_Return)
    assert shown_composite(layer) is before
    enter(dock.high, "123456789")
    assert shown_composite(layer).channels[0].window[1] == 123_456_789
    qtbot.waitUntil(lambda: dock.high.value == "123456789")


def test_limits_that_the_user_sets_during_a_read_stay(layer, dock, held, qtbot):
    dock.list.native.setCurrentRow(1)
    before = shown_composite(layer)
    style = replace(before.channels[0], window=(1, 2))
    show_composite(layer, before.styled(0, style))
    click(dock.auto)
    enter(dock.high, "1234")
    held.set()
    qtbot.waitUntil(lambda: shown_composite(layer).channels[0].window == before.channels[0].window)
    assert shown_composite(layer).channels[1].window[1] == 1234


def test_a_group_of_channels_whose_limits_are_being_read(layer, dock, held, qtbot, monkeypatch):
    check(dock, 4)
    monkeypatch.setattr(QInputDialog, "getText", lambda *_: ("all", True))
    click(dock.add)
    check(dock, 0)
    assert shown(layer) == (1, 2, 3)
    held.set()
    wait_for_channels(layer, dock, qtbot, 1, 2, 3, 4)
    dock.group.value = 0
    wait_for_channels(layer, dock, qtbot, 0, 1, 2, 3, 4)


def test_channels_whose_limits_are_being_read_are_split(viewer, layer, dock, held, qtbot):
    check(dock, 4)
    click(dock.split)
    split = viewer.layers[-1]
    held.set()
    wait_for_channels(layer, dock, qtbot, 0, 1, 2, 3, 4)
    assert tuple(split.contrast_limits) == shown_composite(layer).channels[4].window


def test_a_script_may_open_the_dock_before_the_slide(viewer, write_channels, held, qtbot):
    _, dock = viewer.window.add_plugin_dock_widget(PLUGIN, "Channels")
    [layer] = viewer.open(write_channels(5)[0], plugin=PLUGIN)
    wait_for_layout(viewer)
    dock.native.parent().raise_()
    qtbot.waitUntil(lambda: not dock.list.native.visibleRegion().isEmpty())
    dock.inverted.native.click()
    assert shown_composite(layer).inverted
    check(dock, 4)
    layer.refresh()  # as when tiles arrive
    held.set()
    wait_for_channels(layer, dock, qtbot, 0, 1, 2, 3, 4)


def test_opened_groups_keep_the_others(layer, dock, qtbot, monkeypatch, tmp_path):
    monkeypatch.setattr(QInputDialog, "getText", lambda *_: ("mine", True))
    click(dock.add)
    channels = [{"id": number, "color": "00ff00"} for number in (2, 2, 3)]
    groups = [{"label": "empty", "channels": []}, {"label": "read", "channels": channels}]
    path = tmp_path / "groups.json"
    path.write_text(json.dumps({"groups": groups}))
    monkeypatch.setattr(channel_dock, "ask_for_file", lambda *_: str(path))
    for _ in range(2):
        click(dock.open)
        wait_for_channels(layer, dock, qtbot, 2, 3)
        wait_for_group(dock, qtbot, "read")
    assert [dock.group.native.itemText(row) for row in range(4)] == ["", "mine", "read", ""]


def test_groups_of_the_same_channels_are_told_apart(viewer, layer, dock, qtbot, monkeypatch):
    for name, gamma in (("dim", 0.5), ("bright", 2.0)):
        composite = shown_composite(layer)
        style = replace(composite.channels[0], gamma=gamma)
        show_composite(layer, composite.styled(0, style))
        monkeypatch.setattr(QInputDialog, "getText", lambda *_, name=name: (name, True))
        click(dock.add)
    assert dock.group.native.currentText() == "bright"
    for expected in ("dim", "bright", "dim"):
        next_channels(viewer)
        assert shown_composite(layer).channels[0].gamma == {"dim": 0.5, "bright": 2.0}[expected]
        wait_for_group(dock, qtbot, expected)
    dock.group.value = 1
    wait_for_group(dock, qtbot, "bright")
    assert shown_composite(layer).channels[0].gamma == 2


def test_groups_may_have_the_same_name_or_none(layer, dock, qtbot, monkeypatch, tmp_path):
    channel = {"id": 0, "label": "", "color": "0000ff", "min": 0, "max": 1, "gamma": 5}
    labels = "T", "T", ""
    groups = [{"label": label, "channels": [channel]} for label in labels]
    path = tmp_path / "groups.json"
    path.write_text(json.dumps({"groups": groups}), "utf-8-sig")
    monkeypatch.setattr(channel_dock, "ask_for_file", lambda *_: str(path))
    click(dock.open)
    wait_for_group(dock, qtbot, "T (1)")
    names = [dock.group.native.itemText(row) for row in range(4)]
    assert names == ["", "T (1)", "T (2)", "(3)"]
    assert shown_composite(layer).channels[0].gamma == 5


def test_duplicates_of_a_layer_change_together(viewer, layer, dock, qtbot):
    viewer.add_layer(AnyLayer.create(*layer.as_layer_data_tuple()))
    dock.list.native.setCurrentRow(2)
    click(dock.solo)
    qtbot.waitUntil(lambda: shown(layer) == (2,))
    for each in viewer.layers:
        wait(each)
    first, second = (np.asarray(each._slice.image.raw) for each in viewer.layers)
    np.testing.assert_array_equal(first, second)
    viewer.layers.remove(layer)
    next_channels(viewer)
    wait_for_channels(viewer.layers[0], dock, qtbot, 0, 1, 2, 3)


def test_a_layer_of_one_channel_decodes_no_other(viewer, layer, dock, qtbot):
    click(dock.split)
    shown, pixels = viewer.layers[2], slide_of(layer).levels[0][..., 1]
    for each in viewer.layers:
        each.visible = each is shown
    slide = slide_of(shown)
    wait(shown)  # also until the slide is fitted, which would undo the zoom

    def is_quiet():  # a tile that is fetched ahead is in no cache that could be cleared
        decoded = slide.stats()["decoded"]
        QTest.qWait(100)
        return slide.stats()["decoded"] == decoded

    qtbot.waitUntil(is_quiet)
    slide.clear_cache()
    before = slide.stats()
    viewer.scene.camera.zoom *= 4
    wait(shown)
    after = slide.stats()
    tiles = after["decoded"]["cpu"] - before["decoded"]["cpu"]
    channel_bytes = slide.pyramid[0].layout.tile_bytes // 5
    assert tiles > 0
    assert after["bytes_decoded"] - before["bytes_decoded"] == tiles * channel_bytes
    (top, left), (bottom, right) = shown.corner_pixels
    assert shown.data_level == 0
    expected = pixels[top : bottom + 1, left : right + 1]
    np.testing.assert_array_equal(np.asarray(shown._slice.image.raw), expected)


def test_other_slides_have_no_channels_to_choose(viewer, write_channels, qtbot):
    viewer.open(write_channels(2)[0], plugin=PLUGIN)
    dock = open_dock(viewer, "Channels")
    qtbot.waitUntil(lambda: "is a layer" in dock.note.value)
    assert not dock.controls.visible
    viewer.open(sample_path(), plugin=PLUGIN)
    qtbot.waitUntil(lambda: "RGB" in dock.note.value)
