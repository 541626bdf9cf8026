"""A slide comes into a window: it is shown whole, and the inspector opens where there is room."""

import threading

import numpy as np
import pytest
from napari._qt.dialogs.qt_notification import NapariQtNotification
from napari.components import ViewerModel
from napari.settings import get_plugin_settings, get_settings
from napari.utils.notifications import show_info
from npe2 import PluginManager
from qtpy.QtCore import QEvent, QPoint, Qt, QTimer
from qtpy.QtTest import QTest
from qtpy.QtWidgets import QApplication, QDockWidget, QWidget

from napari_wsigpu import wait
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from napari_wsigpu.viewer.contributions.slide_reader import read_slides
from napari_wsigpu.viewer.napari_internals import open_viewers
from napari_wsigpu.viewer.session import new_slides as arrival
from napari_wsigpu.viewer.session.new_slides import complete_view, show_new_slides
from napari_wsigpu.widgets.inspector.inspector import SlideInspector
from tests.viewer.shared import turn

ROW_OF_TABS = 30  # pixels


def inspectors(viewer):
    widgets = {*viewer.window.dock_widgets.values()}  # each has two names
    return [widget for widget in widgets if isinstance(widget, SlideInspector)]


@pytest.fixture(scope="module", autouse=True)
def docks_as_wide_as_at_first(shared):
    """What napari shows of layers beside slides has made its docks wider and higher for good."""
    shared.close()


@pytest.fixture
def viewer(viewer, monkeypatch):
    """A viewer with room for the inspector, whose toasts stay until they are looked at."""
    monkeypatch.setattr(NapariQtNotification, "DISMISS_AFTER", 0)
    viewer.window.resize(1400, 800)
    settle()
    return viewer


def settle():
    """Let the event loop turn until all that was to come has come."""
    QTest.qWait(50)
    for viewer in open_viewers():
        complete_view(viewer)
    QTest.qWait(100)


def open_slide_in(viewer):
    layers = viewer.open(sample_path(), plugin="napari-wsigpu")
    settle()
    return layers


def size_of(viewer):
    return viewer.window.geometry()[2:]


def canvas_of(viewer):
    return viewer.window._qt_viewer.canvas.native


def is_whole(viewer, layer):
    """Whether all of a layer is on the canvas, and fills it along one axis."""
    (top, left), (bottom, right) = layer.extent.world
    middle, zoom = viewer.scene.camera.center[-2:], viewer.scene.camera.zoom
    half = np.array(viewer.canvas.size) / (2 * zoom)
    (above, before), (below, behind) = middle - half, middle + half
    whole = above <= top and before <= left and bottom <= below and right <= behind
    filled = max((bottom - top) / (below - above), (right - left) / (behind - before))
    return whole and filled > 0.9


def menu_of(viewer):
    """Return the plugin's menu and its item for the inspector, as they are when it is shown."""
    manifest = PluginManager.instance().get_manifest("napari-wsigpu")
    [menu] = [
        action.menu()
        for action in viewer.window.plugins_menu.actions()
        if action.text() == manifest.display_name
    ]
    menu.aboutToShow.emit()
    [item] = [action for action in menu.actions() if action.text() == "Inspector"]
    return menu, item


@pytest.mark.parametrize("size", [(1280, 800), (1600, 1000)])
def test_whole_slide_is_visible_next_to_the_inspector(viewer, size):
    viewer.window.resize(*size)
    settle()
    [layer] = open_slide_in(viewer)
    [inspector] = inspectors(viewer)
    canvas = viewer.canvas.size[1]
    assert size_of(viewer) == size
    assert inspector.native.parent().width() <= size[0] / 4 + 1
    assert canvas >= max(500, 0.45 * size[0])
    assert is_whole(viewer, layer)


def test_scale_bar_and_inspector_follow_the_first_view(viewer, monkeypatch):
    monkeypatch.setattr(arrival, "COMPLETION_MS", 60_000)
    [layer] = viewer.open(sample_path(), plugin="napari-wsigpu")
    QTest.qWait(50)
    assert layer.loaded
    assert not viewer.canvas.overlays.scale_bar.visible
    assert inspectors(viewer) == []
    wait(layer)  # `wait` completes the view first
    assert viewer.canvas.overlays.scale_bar.visible
    assert len(inspectors(viewer)) == 1


@pytest.mark.parametrize("size", [(700, 560), (1089, 630)])
def test_inspector_becomes_a_tab_in_a_narrow_window(viewer, size, qtbot):
    window = viewer.window._qt_window
    viewer.window.resize(*size)
    settings = get_plugin_settings("napari-wsigpu").slides
    settings.open_inspector = False
    open_slide_in(viewer)  # napari's controls of the layer enlarge its docks for good
    (width, height), before = size_of(viewer), viewer.canvas.size[1]
    viewer.layers.clear()
    settings.open_inspector = True
    [layer] = open_slide_in(viewer)
    [inspector] = inspectors(viewer)
    dock = inspector.native.parent()
    assert [each.objectName() for each in window.tabifiedDockWidgets(dock)] == ["layer controls"]
    assert not dock.visibleRegion().isEmpty()
    assert window.findChildren(NapariQtNotification) == []  # it would cover the scale bar
    assert size_of(viewer)[0] == width == size[0]
    assert size_of(viewer)[1] <= height + ROW_OF_TABS
    assert viewer.canvas.size[1] == before
    qtbot.waitUntil(lambda: is_whole(viewer, layer))


def test_inspector_becomes_a_tab_where_it_was_a_tab_when_napari_was_closed(viewer, qtbot):
    size = (1089, 630)  # Qt makes the window higher for docks below each other
    viewer.window.resize(*size)
    settle()
    title = "Inspector (Slides by napari-wsigpu)"
    get_settings().application.plugin_widget_positions = {title: "left"}
    open_slide_in(viewer)
    settle()
    assert size_of(viewer) == size
    viewer.window.resize(1600, 1000)
    [inspector] = inspectors(viewer)
    dock = inspector.native.parent()
    tabs = viewer.window._qt_window.tabifiedDockWidgets(dock)
    assert [each.objectName() for each in tabs] == ["layer controls"]
    qtbot.waitUntil(lambda: dock.height() > 300)


@pytest.mark.parametrize("name", ["Inspector", "Navigator", "Annotate", "Export"])
def test_a_dock_of_the_menu_leaves_a_canvas_to_use(viewer, name):
    viewer.window.resize(700, 560)
    settle()
    get_plugin_settings("napari-wsigpu").slides.open_inspector = False
    [layer] = open_slide_in(viewer)
    before = viewer.canvas.size[1]
    _, widget = viewer.window.add_plugin_dock_widget("napari-wsigpu", name)
    settle()
    assert viewer.canvas.size[1] == before > 300
    assert size_of(viewer)[0] == 700
    assert is_whole(viewer, layer)
    window, dock = viewer.window._qt_window, widget.native.parent()
    assert [each.objectName() for each in window.tabifiedDockWidgets(dock)] == ["layer controls"]
    assert not dock.visibleRegion().isEmpty()


def test_docks_leave_a_canvas_to_use_where_the_layer_controls_are_hidden(viewer):
    viewer.window.resize(700, 560)
    settle()
    get_plugin_settings("napari-wsigpu").slides.open_inspector = False
    [layer] = open_slide_in(viewer)
    window = viewer.window._qt_window
    controls = window.findChild(QDockWidget, "layer controls")
    controls.hide()
    settle()
    before = viewer.canvas.size[1]
    for name in ("Inspector", "Export", "Navigator"):
        _, widget = viewer.window.add_plugin_dock_widget("napari-wsigpu", name)
        settle()
        assert viewer.screenshot(flash=False).shape[1] == before > 300
        tabs = window.tabifiedDockWidgets(widget.native.parent())
        assert "layer list" in [each.objectName() for each in tabs]
    assert is_whole(viewer, layer)
    controls.show()


@pytest.mark.parametrize("names", [("Navigator", "Inspector"), ("Inspector", "Slides")])
def test_docks_come_as_tabs_in_any_order(viewer, names):
    get_plugin_settings("napari-wsigpu").slides.open_inspector = False
    viewer.window.resize(1600, 1000)
    settle()
    open_slide_in(viewer)
    docks = []
    for name in names:
        docks.append(viewer.window.add_plugin_dock_widget("napari-wsigpu", name)[0])
        settle()
    window = viewer.window._qt_window
    assert window.tabifiedDockWidgets(docks[0]) == docks[1:]
    assert docks[0].visibleRegion().isEmpty()
    assert not docks[1].visibleRegion().isEmpty()


def test_whole_slide_is_visible_next_to_a_dock_from_the_menu(viewer):
    viewer.window.resize(1089, 630)
    settle()
    [layer] = open_slide_in(viewer)
    viewer.window.add_plugin_dock_widget("napari-wsigpu", "Navigator")
    settle()
    assert viewer.canvas.size[1] >= 400
    assert is_whole(viewer, layer)
    viewer.scene.camera.zoom *= 3
    zoom = viewer.scene.camera.zoom
    viewer.window.add_plugin_dock_widget("napari-wsigpu", "Export")
    settle()
    assert viewer.scene.camera.zoom == zoom


def let_time_pass(viewer):
    """Run the window's delayed calls now."""
    for timer in viewer.window._qt_window.findChildren(QTimer):
        if timer.isActive() and timer.isSingleShot():
            timer.start(0)
    settle()


def test_slide_stays_fitted_until_the_user_moves_the_view(viewer):
    [layer] = open_slide_in(viewer)
    for size in ((1600, 1000), (900, 600), (1400, 800)):
        let_time_pass(viewer)
        viewer.window.resize(*size)
        settle()
        assert is_whole(viewer, layer)
    viewer.window.add_plugin_dock_widget("napari-wsigpu", "Navigator")
    settle()
    assert is_whole(viewer, layer)
    QTest.mousePress(canvas_of(viewer), Qt.LeftButton, pos=QPoint(200, 200))
    QTest.mouseMove(canvas_of(viewer), QPoint(240, 200))
    QTest.mouseRelease(canvas_of(viewer), Qt.LeftButton, pos=QPoint(240, 200))
    settle()
    camera = viewer.scene.camera
    view = camera.center, camera.zoom
    viewer.window.resize(1000, 700)
    settle()
    assert (camera.center, camera.zoom) == view
    assert not is_whole(viewer, layer)


def test_the_inspector_scrolls_its_tabs_alone(viewer):
    viewer.window.resize(1089, 630)
    settle()
    open_slide_in(viewer)
    _, inspector = viewer.window.add_plugin_dock_widget("napari-wsigpu", "Inspector")
    for tab in range(inspector.tabs.native.count()):
        inspector.tabs.native.setCurrentIndex(tab)
        settle()
        assert inspector.details.native.verticalScrollBar().maximum() == 0
    viewer.window.resize(1400, 1000)
    settle()
    assert inspector.header.thumbnail.visible


def test_a_window_wider_than_all_screens_is_made_smaller(viewer):
    screen = viewer.window._qt_window.screen().availableGeometry()
    viewer.window.resize(screen.width() + 200, 700)
    settle()
    [layer] = open_slide_in(viewer)
    assert size_of(viewer)[0] == screen.width()
    assert is_whole(viewer, layer)


def test_view_moved_by_the_user_is_kept(viewer):
    viewer.open(sample_path(), plugin="napari-wsigpu")
    viewer.scene.camera.zoom = 3
    settle()
    assert len(inspectors(viewer)) == 1
    assert viewer.scene.camera.zoom == 3


def test_a_screenshot_right_after_opening_shows_the_slide(viewer):
    viewer.window.resize(700, 560)
    settle()
    viewer.open(sample_path(), plugin="napari-wsigpu")
    picture = viewer.screenshot(flash=False)
    assert picture.shape[1] > 250
    assert (picture[..., :3].min(axis=2) > 200).mean() > 0.2  # glass


def test_a_second_slide_is_shown_whole(viewer, write_channels):
    open_slide_in(viewer)
    first = viewer.scene.camera.zoom
    [layer] = viewer.open(write_channels(1)[0], plugin="napari-wsigpu")
    settle()
    assert viewer.scene.camera.zoom > 1.5 * first
    assert is_whole(viewer, layer)


def test_a_window_that_is_shown_later_is_no_wider_than_before(another, qtbot):
    viewer = another(show=False)
    [layer] = viewer.open(sample_path(), plugin="napari-wsigpu")
    settle()
    assert inspectors(viewer) == []
    viewer.window.resize(1300, 800)
    viewer.window._qt_window.show()
    qtbot.waitUntil(lambda: bool(inspectors(viewer)))
    settle()
    assert size_of(viewer) == (1300, 800)
    assert len(inspectors(viewer)) == 1
    assert is_whole(viewer, layer)


def test_the_menu_knows_the_inspector_that_opened_by_itself(viewer):
    open_slide_in(viewer)
    [inspector] = inspectors(viewer)
    _, item = menu_of(viewer)
    assert item.isChecked()
    item.trigger()
    settle()
    assert not inspector.visible
    item.trigger()
    settle()
    assert inspector.visible
    assert inspectors(viewer) == [inspector]


def test_opens_with_the_first_slide_and_shows_it(viewer):
    assert inspectors(viewer) == []
    [layer] = open_slide_in(viewer)
    [inspector] = inspectors(viewer)
    assert inspector.visible
    assert inspector.slide is layer.data[0].slide


def test_opens_with_the_sample_and_with_channels(viewer, write_channels):
    layers = viewer.open(write_channels(3)[0], plugin="napari-wsigpu")
    viewer.open_sample("napari-wsigpu", "he_phantom")
    settle()
    assert len(layers) == 3
    assert len(viewer.layers) == 4
    assert len(inspectors(viewer)) == 1


def test_opens_no_second_one(viewer):
    open_slide_in(viewer)
    open_slide_in(viewer)
    assert len(inspectors(viewer)) == 1


def test_one_that_is_open_stays_the_only_one(viewer):
    _, widget = viewer.window.add_plugin_dock_widget("napari-wsigpu", "Inspector")
    open_slide_in(viewer)
    assert inspectors(viewer) == [widget]


def test_stays_closed(viewer):
    open_slide_in(viewer)
    [inspector] = inspectors(viewer)
    viewer.window.remove_dock_widget(inspector.native)
    inspector.native.deleteLater()
    open_slide_in(viewer)
    viewer.layers.clear()
    open_slide_in(viewer)
    assert inspectors(viewer) == []


def test_the_setting_is_read_live(viewer):
    page = get_plugin_settings("napari-wsigpu").slides
    page.open_inspector = False
    open_slide_in(viewer)
    assert inspectors(viewer) == []
    page.open_inspector = True
    open_slide_in(viewer)
    assert len(inspectors(viewer)) == 1


def test_other_layers_open_nothing(viewer):
    show_new_slides(viewer)
    viewer.add_image(np.zeros((8, 8)))
    settle()
    assert inspectors(viewer) == []


def test_nothing_opens_without_a_window():
    viewer = ViewerModel()
    [(levels, attributes, _)] = read_slides(str(sample_path()))
    viewer.add_image(levels, **attributes)
    assert len(viewer.layers) == 1
    levels[0].slide.close()


def test_reading_alone_opens_nothing(viewer):
    [(levels, *_)] = read_slides(str(sample_path()))
    assert inspectors(viewer) == []
    levels[0].slide.close()


def test_reading_in_another_thread_opens_nothing_there(viewer):
    read = []
    thread = threading.Thread(target=lambda: read.extend(read_slides(str(sample_path()))))
    thread.start()
    thread.join()
    settle()
    assert inspectors(viewer) == []
    [(levels, attributes, _)] = read
    viewer.add_image(levels, **attributes)
    settle()
    assert len(inspectors(viewer)) == 1


def test_a_toast_that_came_while_the_window_was_not_active_fades(viewer, qtbot, monkeypatch):
    monkeypatch.setattr(NapariQtNotification, "DISMISS_AFTER", 50)
    open_slide_in(viewer)
    window, other = viewer.window._qt_window, QWidget()
    qtbot.addWidget(other)
    other.show()
    other.activateWindow()
    qtbot.waitUntil(lambda: other.isActiveWindow() and not window.isActiveWindow())
    deleted = NapariQtNotification("Its window was closed.", "info")
    deleted.show()  # napari lists it from now on
    deleted.deleteLater()
    turn()
    show_info("Something happened.")
    [toast] = window.findChildren(NapariQtNotification)
    window.activateWindow()

    def is_gone():
        if not window.findChildren(NapariQtNotification):
            return True
        # The mouse passes; the pointer of the display may lie on the toast, too, and hold it.
        animation = toast.opacity_anim
        if not toast.timer.isActive() and animation.state() == animation.State.Stopped:
            for event in (QEvent.Enter, QEvent.Leave):
                QApplication.sendEvent(toast, QEvent(event))
        return False

    qtbot.waitUntil(is_gone)


def test_each_of_several_toasts_fades(viewer, qtbot, monkeypatch):
    monkeypatch.setattr(NapariQtNotification, "DISMISS_AFTER", 50)
    open_slide_in(viewer)
    window = viewer.window._qt_window
    window.activateWindow()
    qtbot.waitUntil(window.isActiveWindow)
    # Under the pointer of the display, a toast stays.
    monkeypatch.setattr(NapariQtNotification, "underMouse", lambda toast: False)
    monkeypatch.setattr(NapariQtNotification, "enterEvent", lambda toast, event: None)
    for number in range(3):
        show_info(f"Number {number}.")
    assert len(window.findChildren(NapariQtNotification)) == 3
    qtbot.waitUntil(lambda: not window.findChildren(NapariQtNotification))


def test_a_notification_from_a_thread_moves_toasts_in_the_main_thread(viewer, qtbot, monkeypatch):
    open_slide_in(viewer)
    show_info("First.")
    [first] = viewer.window._qt_window.findChildren(NapariQtNotification)
    moved = []

    def note(toast):
        if toast is first:
            moved.append(threading.current_thread())

    monkeypatch.setattr(NapariQtNotification, "move_to_bottom_right", note)
    notifier = threading.Thread(target=show_info, args=("Second.",))
    notifier.start()
    notifier.join()
    assert not moved
    qtbot.waitUntil(lambda: bool(moved))
    assert set(moved) == {threading.main_thread()}
