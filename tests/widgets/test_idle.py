"""What docks cost while nothing happens."""

import time

import pytest
from npe2 import PluginManager
from qtpy.QtCore import QEventLoop, QTimer

from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from napari_wsigpu.viewer.window.settings import PLUGIN

SECONDS, ATTEMPTS = 1, 8
MOST = 0.003  # of a core


def spin(seconds):
    """Let the event loop run as it does for people: without waking it up."""
    loop = QEventLoop()
    QTimer.singleShot(int(1000 * seconds), loop.quit)
    loop.exec()


def spent_at_rest():
    """Return what part of a core is busy, once what came before has ended; it may take a while."""
    for _ in range(ATTEMPTS):
        begin = time.process_time()
        spin(SECONDS)
        spent = (time.process_time() - begin) / SECONDS
        if spent <= MOST:
            break
    return spent


@pytest.mark.window
def test_open_docks_cost_nothing_at_rest(viewer, slide_is_open, settled):
    """All of them are open, and each is in front for a while."""
    viewer.window.resize(1500, 950)
    [manifest] = [each for each in PluginManager.instance().iter_manifests() if each.name == PLUGIN]
    names = [widget.display_name for widget in manifest.contributions.widgets]
    frames = [viewer.window.add_plugin_dock_widget(PLUGIN, name)[0] for name in names]
    assert len(frames) == 6
    slide_is_open(sample_path())  # now: with no inspector open, a toast may offer it, and fade away
    spin(2)
    settled()
    spent = {}
    for name, frame in zip(names, frames, strict=True):
        frame.raise_()
        spent[name] = spent_at_rest()
    assert max(spent.values()) <= MOST, spent
