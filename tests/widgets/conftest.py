"""Docks in a viewer, and slides with things to hide."""

import threading
from functools import partial

import napari
import numpy as np
import pytest
from napari.components import ViewerModel
from napari.plugins import _initialize_plugins
from napari.settings import get_settings
from npe2 import PluginManager
from qtpy.QtCore import QPoint, Qt
from qtpy.QtTest import QTest
from qtpy.QtWidgets import QDockWidget, QFileDialog, QMainWindow

from napari_wsigpu.viewer.layers.slide_layers import slide_of
from napari_wsigpu.widgets.dock.jobs import Jobs
from tests.conftest import has_display
from tests.viewer.conftest import (  # noqa: F401
    another,
    close_shared,
    damaged_slide,
    make_napari_viewer,
    modules_are_no_garbage,
    no_notifications,
    own_settings,
    plugins_are_found_once,
    private_parts_are_out_of_reach,
    signatures_are_found_once,
    write_channels,
)
from tests.viewer.conftest import viewer as viewer_with_window  # noqa: F401


@pytest.fixture
def viewer(request):
    """What docks see of a viewer; the whole viewer, at ten times the cost, if a test is marked."""
    whole = request.node.get_closest_marker("window")
    return request.getfixturevalue("viewer_with_window" if whole else "model")


@pytest.fixture
def model(display, own_settings, no_notifications, monkeypatch):  # noqa: F811
    """A viewer without its window."""
    from tests.viewer.shared import listeners, turn

    _initialize_plugins()
    monkeypatch.setattr(napari, "current_viewer", lambda: None)
    made = ViewerModel()

    def let_go(event):
        slide = slide_of(event.value)
        if slide is not None and all(slide_of(other) is not slide for other in made.layers):
            slide.release()

    made.layers.events.removed.connect(let_go)
    yield made
    made.layers.clear()
    turn()
    assert not listeners(made)


@pytest.fixture
def add_dock(viewer, request):
    """Add a dock by its name in the menu to the viewer's window, or to a bare one."""
    if hasattr(viewer, "window"):
        yield lambda name: viewer.window.add_plugin_dock_widget("napari-wsigpu", name)[1]
        return
    window = QMainWindow()
    window.resize(1000, 800)

    def add(name):
        manifest = PluginManager.instance().get_manifest("napari-wsigpu")
        [found] = [each for each in manifest.contributions.widgets if each.display_name == name]
        widget = found.get_callable()(viewer)
        dock = QDockWidget(name, window)
        dock.setWidget(widget.native)
        window.addDockWidget(Qt.RightDockWidgetArea, dock)
        window.show()
        return widget

    yield add
    window.close()
    window.deleteLater()


@pytest.fixture
def inspector(add_dock):
    return add_dock("Inspector")


@pytest.fixture
def slide_is_open(viewer):
    """Open slides with this plugin and return the first layer of each."""

    def open_slides(*paths):
        return [viewer.open(path, plugin="napari-wsigpu")[0] for path in paths]

    return open_slides


@pytest.fixture
def display(request):
    """A running Qt application, where there is a display."""
    if not has_display():
        pytest.skip("there is no X display (install Xvfb)")
    return request.getfixturevalue("qtbot")


@pytest.fixture
def jobs(display):
    made = Jobs()
    yield made
    made.close()


@pytest.fixture
def answer(monkeypatch):
    """Choose a path in the dialog for saving; "" cancels it."""

    def choose(path, kind=""):
        def use(dialog):
            if kind:
                dialog.selectNameFilter(kind)
                dialog.filterSelected.emit(kind)
            dialog.selectFile(str(path))
            return bool(path)

        monkeypatch.setattr(QFileDialog, "exec", use)

    return choose


@pytest.fixture
def gate():
    """A lock that holds work in another thread until the test lets it go on."""
    opened = threading.Event()
    yield opened
    opened.set()


def workers():
    """Names of the threads in which docks work."""
    names = (thread.name for thread in threading.enumerate())
    return [name for name in names if name.startswith("slide-inspector")]


def click(button):
    button = getattr(button, "native", button)
    assert button.isEnabled()
    button.click()


def drag(viewer, start, end, pause=20):
    """Press the mouse at a part of the canvas's width and height, move it, and release it."""
    canvas = viewer.window._qt_viewer.canvas.native
    size = np.array([canvas.width(), canvas.height()])
    first, last = (QPoint(*(size * each).astype(int).tolist()) for each in (start, end))
    QTest.mouseMove(canvas, first)
    QTest.mousePress(canvas, Qt.LeftButton, Qt.NoModifier, first)
    for share in (0.5, 1):
        QTest.mouseMove(canvas, first + (last - first) * share)
        QTest.qWait(pause)
    QTest.mouseRelease(canvas, Qt.LeftButton, Qt.NoModifier, last)


def quiet(qtbot):
    """Wait until no dock works any more."""
    qtbot.waitUntil(lambda: not workers(), timeout=20_000)
    qtbot.wait(20)


def assert_text_grows(parts, qtbot):
    """Check that the text of widgets follows napari's size of text."""
    parts = [getattr(part, "native", part) for part in parts]
    before = [part.fontMetrics().height() for part in parts]
    appearance = get_settings().appearance
    size = appearance.font_size
    try:
        appearance.font_size = 2 * size
        qtbot.wait(50)
        after = [part.fontMetrics().height() for part in parts]
    finally:
        appearance.font_size = size
    assert all(big > 1.7 * small for big, small in zip(after, before, strict=True))


@pytest.fixture
def settled(display):
    """Wait until all work is done and its results were handed over."""
    return partial(quiet, display)
