"""Slides that several viewers show."""

import pytest
from napari.components import ViewerModel
from napari.layers import Layer

from napari_wsigpu import open_slide
from napari_wsigpu.viewer import progressive
from napari_wsigpu.viewer.layers import slide_layers
from napari_wsigpu.viewer.lifetime import look_after_slides
from napari_wsigpu.viewer.sample import sample_path


@pytest.fixture
def viewers(qapp):
    viewers = ViewerModel(), ViewerModel()
    for viewer in viewers:
        look_after_slides(viewer)
    yield viewers
    for viewer in viewers:
        viewer.layers.clear()


@pytest.fixture
def released(monkeypatch):
    """The slide, and whether it was let go, once for each time."""
    with open_slide(sample_path()) as slide:
        calls = []
        monkeypatch.setattr(slide, "release", lambda: calls.append(slide))
        yield slide, calls


def test_a_slide_is_let_go_with_the_last_layer_in_any_viewer(viewers, released):
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
