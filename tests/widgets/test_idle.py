"""What docks cost while nothing happens."""

import time

import pytest
from qtpy.QtCore import QEventLoop, QTimer

from napari_wsigpu.viewer.sample import sample_path

SECONDS = 4
MOST = 0.003  # of a core


def spin(seconds):
    """Let the event loop run as it does for people: without waking it up."""
    loop = QEventLoop()
    QTimer.singleShot(int(1000 * seconds), loop.quit)
    loop.exec()


@pytest.mark.parametrize("name", ["Slide inspector", "Decode monitor", "Export region"])
def test_open_docks_cost_nothing_at_rest(viewer, slide_is_open, settled, name):
    viewer.window.resize(1500, 950)
    slide_is_open(sample_path())
    others = {"Slide inspector", "Decode monitor", "Export region"} - {name}
    for dock in (*sorted(others), name):
        frame, _ = viewer.window.add_plugin_dock_widget("napari-wsigpu", dock)
        spin(0.3)
    frame.raise_()
    spin(2)
    settled()
    begin = time.process_time()
    spin(SECONDS)
    assert (time.process_time() - begin) / SECONDS <= MOST
