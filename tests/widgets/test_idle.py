"""What docks cost while nothing happens."""

import time

from npe2 import PluginManager
from qtpy.QtCore import QEventLoop, QTimer

from napari_wsigpu.viewer.sample import sample_path
from napari_wsigpu.viewer.settings import PLUGIN

SECONDS = 2
MOST = 0.003  # of a core


def spin(seconds):
    """Let the event loop run as it does for people: without waking it up."""
    loop = QEventLoop()
    QTimer.singleShot(int(1000 * seconds), loop.quit)
    loop.exec()


def test_open_docks_cost_nothing_at_rest(viewer, slide_is_open, settled):
    """All of them are open, and each is in front for a while."""
    viewer.window.resize(1500, 950)
    slide_is_open(sample_path())
    [manifest] = [each for each in PluginManager.instance().iter_manifests() if each.name == PLUGIN]
    names = [widget.display_name for widget in manifest.contributions.widgets]
    frames = [viewer.window.add_plugin_dock_widget(PLUGIN, name)[0] for name in names]
    assert len(frames) == 6
    spin(2)
    settled()
    spent = {}
    for name, frame in zip(names, frames, strict=True):
        frame.raise_()
        spin(0.5)
        begin = time.process_time()
        spin(SECONDS)
        spent[name] = (time.process_time() - begin) / SECONDS
    assert max(spent.values()) <= MOST, spent
