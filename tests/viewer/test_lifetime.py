"""Slides that several viewers show, and windows that are open as Python ends."""

import os
import subprocess
import sys

import pytest
from napari.components import ViewerModel
from napari.layers import Layer

from napari_wsigpu import open_slide
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from napari_wsigpu.viewer.drawing import progressive
from napari_wsigpu.viewer.layers.slide_layers import slide_layers
from napari_wsigpu.viewer.session.lifetime import manage_slides

# What is registered before napari runs after all that is registered later, and before PyQt's end.
ENDS_WITH_AN_OPEN_WINDOW = """
import atexit
from qtpy.QtWidgets import QApplication, QMainWindow

@atexit.register
def say_what_is_left():
    widgets = QApplication.topLevelWidgets()
    print("left:", [each for each in widgets if isinstance(each, QMainWindow)])

import napari
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
viewer = napari.Viewer()
viewer.window.resize(711, 533)
viewer.open(sample_path(), plugin="napari-wsigpu")
viewer.window.add_plugin_dock_widget("napari-wsigpu", "Navigator")
print("open:", viewer.window._qt_window.isVisible())
"""


@pytest.fixture
def viewers(qapp):
    viewers = ViewerModel(), ViewerModel()
    for viewer in viewers:
        manage_slides(viewer)
    yield viewers
    for viewer in viewers:
        viewer.layers.clear()


@pytest.fixture
def released(monkeypatch):
    """The slide, and one entry for each release."""
    with open_slide(sample_path()) as slide:
        calls = []
        monkeypatch.setattr(slide, "release", lambda: calls.append(slide))
        yield slide, calls


def test_slide_is_released_with_its_last_layer_in_any_viewer(viewers, released):
    slide, calls = released
    layers = [Layer.create(*slide_layers(slide)[0]) for _ in viewers]
    for viewer, layer in zip(viewers, layers, strict=True):
        viewer.layers.append(layer)
    viewers[0].layers.remove(layers[0])
    assert progressive.display_of(layers[0]) is None
    assert calls == []
    viewers[1].layers.remove(layers[1])
    assert calls == [slide]


def test_a_layer_stays_progressive_as_long_as_a_viewer_shows_it(viewers, released):
    slide, calls = released
    layer = Layer.create(*slide_layers(slide)[0])
    for viewer in viewers:
        viewer.layers.append(layer)
    viewers[1].layers.remove(layer)
    assert progressive.display_of(layer) is not None
    assert calls == []
    viewers[0].layers.remove(layer)
    assert progressive.display_of(layer) is None
    assert calls == [slide]


def test_no_window_is_left_to_be_deleted_as_python_ends(qapp, tmp_path):
    settings = tmp_path / "settings.yaml"
    done = subprocess.run(
        [sys.executable, "-c", ENDS_WITH_AN_OPEN_WINDOW],
        env=os.environ | {"NAPARI_CONFIG": str(settings)},
        timeout=120,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split("\n")[-3:] == ["open: True", "left: []", ""]
    assert "Traceback" not in done.stderr
    assert "711" not in settings.read_text()  # nobody chose that size
