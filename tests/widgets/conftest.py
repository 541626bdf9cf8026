"""The inspector in a viewer, and slides with things to hide."""

import threading
from functools import partial

import pytest
from napari.settings import get_settings
from qtpy.QtWidgets import QFileDialog

from napari_wsigpu.widgets.jobs import Jobs
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
    viewer,
    write_channels,
)


@pytest.fixture
def inspector(viewer):  # noqa: F811
    _, widget = viewer.window.add_plugin_dock_widget("napari-wsigpu", "Slide inspector")
    return widget


@pytest.fixture
def slide_is_open(viewer):  # noqa: F811
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
    assert button.isEnabled()
    button.click()


def quiet(qtbot):
    """Wait until no dock works any more."""
    qtbot.waitUntil(lambda: not workers(), timeout=20_000)
    qtbot.wait(20)


def assert_text_grows(parts, qtbot):
    """Check that the text of widgets follows napari's size of text."""
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
