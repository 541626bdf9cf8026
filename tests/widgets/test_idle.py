"""What docks cost while nothing happens."""

import json
import os
import subprocess
import sys

import pytest

MOST = 0.003  # of a core
# In a process of its own, because windows of other tests may still be there, with their timers.
SCRIPT = """
import json, time
import napari, napari_wsigpu
from npe2 import PluginManager
from qtpy.QtCore import QEventLoop, QTimer
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from napari_wsigpu.viewer.window.settings import PLUGIN

SECONDS, ATTEMPTS, MOST = 1, 8, {most}

def spin(seconds):
    # Let the event loop run as it does for people: without waking it up.
    loop = QEventLoop()
    QTimer.singleShot(int(1000 * seconds), loop.quit)
    loop.exec()

def spent_at_rest():
    # What part of a core is busy, once what came before has ended; it may take a while.
    for _ in range(ATTEMPTS):
        begin = time.process_time()
        spin(SECONDS)
        spent = (time.process_time() - begin) / SECONDS
        if spent <= MOST:
            break
    return spent

viewer = napari.Viewer()
viewer.window.resize(1500, 950)
[layer] = viewer.open(sample_path(), plugin=PLUGIN)
manifests = PluginManager.instance().iter_manifests()
[manifest] = [each for each in manifests if each.name == PLUGIN]
names = [widget.display_name for widget in manifest.contributions.widgets]
frames = [viewer.window.add_plugin_dock_widget(PLUGIN, name)[0] for name in names]
napari_wsigpu.wait(layer)
spin(2)
found = {{}}
for name, frame in zip(names, frames, strict=True):
    frame.raise_()
    found[name] = spent_at_rest()
print(json.dumps(found))
viewer.close()
"""


@pytest.mark.window
def test_open_docks_cost_nothing_at_rest(display, tmp_path):
    """All of them are open, and each is in front for a while."""
    environment = os.environ | {"NAPARI_CONFIG": str(tmp_path / "settings.yaml")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(most=MOST)],
        env=environment,
        timeout=120,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    spent = json.loads(done.stdout.splitlines()[-1])
    assert len(spent) == 6
    assert max(spent.values()) <= MOST, spent
