"""The bar of magnifications on the canvas, and the keys of the plugin's commands."""

from itertools import product

import numpy as np
import pytest
import tifffile
from app_model.types import KeyBinding
from napari._qt.widgets.qt_keyboard_settings import ShortcutEditor
from napari.settings import get_settings
from napari.utils.action_manager import action_manager
from napari.utils.notifications import notification_manager
from napari.utils.shortcuts import default_shortcuts
from npe2 import PluginManager
from qtpy.QtCore import Qt
from qtpy.QtTest import QTest

from napari_wsigpu import convert
from napari_wsigpu.slide.facts import TIMES
from napari_wsigpu.viewer.annotations.annotation_layers import SLIDE
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from napari_wsigpu.viewer.layers.slide_layers import slide_of
from napari_wsigpu.viewer.view.arrangement import active_slide, show_only
from napari_wsigpu.viewer.view.navigation import objective_of, screen_pixels
from napari_wsigpu.viewer.window.magnification_bar import MagnificationBar
from napari_wsigpu.viewer.window.shortcuts import register_keys
from tests.viewer.shared import wait_for_layout

PLUGIN = "napari-wsigpu"


@pytest.fixture
def bar(viewer):
    return viewer.window._qt_window.findChild(MagnificationBar)


@pytest.fixture
def layer(viewer, qtbot, bar):
    [layer] = viewer.open(sample_path(), plugin=PLUGIN)
    wait_for_layout(viewer)
    qtbot.waitUntil(bar.fit.isChecked)
    return layer


def click(button):
    QTest.mouseClick(button, Qt.LeftButton)


def press(viewer, key, modifiers=Qt.ControlModifier):
    QTest.keyClick(viewer.window._qt_viewer.canvas.native, key, modifiers)


def offered(bar):
    return [number for number, button in bar.buttons.items() if button.isVisible()]


def marked(bar):
    buttons = {"Fit": bar.fit, **bar.buttons}
    return [name for name, button in buttons.items() if button.isChecked()]


def magnification(viewer, layer):
    return screen_pixels(viewer, layer) * objective_of(slide_of(layer))


def assert_bar_is_apart(viewer, bar):
    canvas = viewer.window._qt_viewer.canvas.native
    buttons = [bar.fit, *(bar.buttons[number] for number in offered(bar))]
    assert viewer.canvas.overlays.scale_bar.visible
    for position, at_top in (("bottom_right", True), ("top_right", False)):
        viewer.canvas.overlays.scale_bar.position = position
        assert canvas.rect().contains(bar.geometry())
        assert (bar.geometry().center().y() < canvas.height() / 2) == at_top
        for button in buttons:
            assert button.width() >= button.fontMetrics().horizontalAdvance(button.text())
            assert bar.rect().contains(button.geometry())


def test_buttons_show_magnifications_up_to_that_of_the_slide(viewer, bar, layer, qtbot):
    assert offered(bar) == [1, 2, 5, 10, 20]  # the sample was scanned at 20x
    assert marked(bar) == ["Fit"]
    fitted = viewer.scene.camera.zoom
    for number in offered(bar):
        click(bar.buttons[number])
        assert magnification(viewer, layer) == pytest.approx(number)
        assert marked(bar) == [number]
    viewer.scene.camera.zoom *= 1.3
    assert marked(bar) == [20]  # the frame comes first
    qtbot.waitUntil(lambda: marked(bar) == [])
    click(bar.fit)
    assert viewer.scene.camera.zoom == pytest.approx(fitted)
    assert marked(bar) == ["Fit"]
    click(bar.fit)
    assert marked(bar) == ["Fit"]


def test_keys_stop_at_the_magnification_of_the_scan(viewer, bar, layer, qtbot):
    press(viewer, Qt.Key_6)
    qtbot.waitUntil(lambda: marked(bar) == [20])
    [said] = notification_manager.records
    assert (
        said.message
        == f"The slide was scanned at 20{TIMES}, so 20{TIMES} is shown instead of 40{TIMES}."
    )
    press(viewer, Qt.Key_5)
    assert len(notification_manager.records) == 1


def test_magnification_reached_by_other_means_is_marked(viewer, bar, layer, qtbot):
    viewer.scene.camera.zoom = 5 / objective_of(slide_of(layer)) / layer.scale[-1]
    qtbot.waitUntil(lambda: marked(bar) == [5])
    viewer.fit_to_view()
    qtbot.waitUntil(lambda: marked(bar) == ["Fit"])


def test_bar_follows_the_active_slide_and_hides_without_one(viewer, bar, layer, tmp_path):
    path = tmp_path / "plain.tif"
    tifffile.imwrite(path, np.zeros((600, 300), np.uint8), tile=(256, 256))
    [plain] = viewer.open(path, plugin=PLUGIN)
    assert (bar.fit.isVisible(), offered(bar)) == (True, [])  # of unknown pixel size
    viewer.layers.selection.active = layer
    assert 20 in offered(bar)
    viewer.add_points()  # which is no slide
    assert 20 in offered(bar)
    viewer.dims.ndisplay = 3
    assert (bar.fit.isVisible(), offered(bar)) == (True, [])
    viewer.dims.ndisplay = 2
    viewer.layers.remove(layer)
    assert offered(bar) == []
    viewer.layers.remove(plain)
    assert not bar.isVisible()


def test_bar_stays_on_the_canvas_and_off_the_scale_bar(viewer, bar, layer, qtbot):
    for size, theme in product([(700, 450), (1089, 630), (1920, 1080)], ["dark", "light"]):
        viewer.theme = theme
        viewer.window._qt_window.resize(*size)
        qtbot.wait(200)
        qtbot.waitUntil(lambda: assert_bar_is_apart(viewer, bar))


def test_narrow_canvas_has_the_highest_magnifications(viewer, bar, layer):
    canvas = bar.parentWidget()
    whole = canvas.size()
    for width, expected in ((140, [10, 20]), (60, []), (whole.width(), [1, 2, 5, 10, 20])):
        canvas.resize(width, whole.height())
        assert offered(bar) == expected
        assert_bar_is_apart(viewer, bar)


def test_keys_change_the_view(viewer, bar, layer, qtbot):
    press(viewer, Qt.Key_3)
    qtbot.waitUntil(lambda: marked(bar) == [5])
    press(viewer, Qt.Key_0)
    qtbot.waitUntil(lambda: marked(bar) == ["Fit"])


def test_keys_show_the_next_and_previous_slide(viewer, layer, write_channels):
    [other] = viewer.open(write_channels(1)[0], plugin=PLUGIN)
    slides = [slide_of(layer), slide_of(other)]
    now = slides.index(active_slide(viewer))
    for key, step in ((Qt.Key_Right, 1), (Qt.Key_Right, 1), (Qt.Key_Left, -1)):
        press(viewer, key)
        now = (now + step) % 2
        assert active_slide(viewer) is slides[now]
        assert [layer.visible, other.visible] == [now == 0, now == 1]


def test_a_key_opens_and_hides_the_inspector(viewer, layer, qtbot):
    [inspector] = {*viewer.window.dock_widgets.values()}
    dock = inspector.native.parent()
    qtbot.waitUntil(lambda: not inspector.native.visibleRegion().isEmpty())
    press(viewer, Qt.Key_I)
    assert not dock.isVisible()
    press(viewer, Qt.Key_I)
    assert dock.isVisible()
    assert {*viewer.window.dock_widgets.values()} == {inspector}


def test_keys_choose_tools(viewer, layer):
    both = Qt.ControlModifier | Qt.ShiftModifier
    for key, mode in (
        (Qt.Key_R, "add_rectangle"),
        (Qt.Key_F, "add_polygon_lasso"),
        (Qt.Key_L, "add_line"),
        (Qt.Key_M, "pan_zoom"),
        (Qt.Key_D, "add"),
    ):
        press(viewer, key, both)
        assert viewer.layers.selection.active.mode == mode


def test_commands_are_listed_in_the_preferences(viewer, layer, qtbot):
    editor = ShortcutEditor()
    qtbot.addWidget(editor)
    editor.layer_combo_box.setCurrentText(editor.VIEWER_KEYBINDINGS)
    table = editor._table
    listed = {
        table.item(row, 0).text(): table.item(row, 2).text() for row in range(table.rowCount())
    }
    assert listed["Fit the slide to the window"] == "Ctrl+0"
    contributed = PluginManager.instance().get_manifest(PLUGIN).contributions
    titles = {command.id: command.title for command in contributed.commands}
    assert {titles[each.command] for each in contributed.keybindings} <= set(listed)


def test_keys_that_the_user_chose_take_precedence(viewer, bar, layer, qtbot):
    name = "napari-wsigpu:magnify_5"
    before = action_manager.unbind_shortcut(name)
    try:
        get_settings().shortcuts.shortcuts = {name: ["Ctrl-9"]}
        action_manager.bind_shortcut(name, "Ctrl-9")  # as a new window does
        register_keys()
        click(bar.fit)
        fitted = viewer.scene.camera.zoom
        press(viewer, Qt.Key_3)
        assert viewer.scene.camera.zoom == fitted
        press(viewer, Qt.Key_9)
        qtbot.waitUntil(lambda: marked(bar) == [5])
    finally:
        action_manager.unbind_shortcut(name)
        for key in before:
            action_manager.bind_shortcut(name, key)


def test_keys_are_free_in_napari():
    contributed = PluginManager.instance().get_manifest(PLUGIN).contributions
    keys = [KeyBinding.from_str(each.key) for each in contributed.keybindings]
    assert len({str(key) for key in keys}) == len(keys)
    for name, used in default_shortcuts.items():
        assert not [key for key in used if key in keys], name
    for each in contributed.keybindings:
        assert callable(each.get_callable())


def test_scripts_and_the_menu_find_the_same_dock(viewer, layer):
    [inspector] = {*viewer.window.dock_widgets.values()}
    dock, found = viewer.window.add_plugin_dock_widget(PLUGIN, "Inspector")
    assert found is inspector
    assert dock is inspector.native.parent()
    viewer.window.remove_dock_widget(dock)
    assert not viewer.window.dock_widgets
    dock, new = viewer.window.add_plugin_dock_widget(PLUGIN, "Inspector")
    assert new is not inspector
    viewer.window._qt_viewer.canvas.native.setFocus()
    press(viewer, Qt.Key_I)  # finds the dock by its name in the menu
    assert {*viewer.window.dock_widgets.values()} == {new}


def test_napari_fits_only_the_slide_that_is_shown(viewer, bar, layer, tmp_path):
    convert(sample_path(), tmp_path / "part.tif", region=(3000, 2000, 512, 512))
    [part] = viewer.open(tmp_path / "part.tif", plugin=PLUGIN)
    QTest.qWait(200)
    show_only(viewer, slide_of(part))
    zoom = viewer.scene.camera.zoom
    viewer.scene.camera.zoom = zoom / 3
    viewer.fit_to_view()
    assert viewer.scene.camera.zoom == pytest.approx(zoom)
    assert marked(bar)[:1] == ["Fit"]
    picture = viewer.add_image(np.zeros((50, 50)), scale=(100, 100), translate=(0, 9000))
    viewer.fit_to_view()
    assert "Fit" in marked(bar)
    viewer.layers.remove(picture)
    assert "Fit" not in marked(bar)
    press(viewer, Qt.Key_0)
    heat_map = viewer.add_image(np.zeros((5, 5)), metadata={SLIDE: slide_of(part).path})
    viewer.layers.selection.active = heat_map
    QTest.qWait(200)
    assert "Fit" in marked(bar)
