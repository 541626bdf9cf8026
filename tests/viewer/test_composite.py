"""Slides with many channels, which are one layer in a real napari window."""

from dataclasses import replace

import numpy as np
import pytest
import tifffile

from napari_wsigpu import wait
from napari_wsigpu.display import composite_source
from napari_wsigpu.slide import runtime
from napari_wsigpu.viewer.drawing import slice_request
from napari_wsigpu.viewer.drawing.progressive import display_of
from napari_wsigpu.viewer.layers.slide_layers import show_composite, shown_composite, slide_of
from tests.viewer.shared import wait_for_layout

PLUGIN = "napari-wsigpu"


@pytest.fixture
def layer(viewer, write_channels):
    [layer] = viewer.open(write_channels(5)[0], plugin=PLUGIN)
    wait_for_layout(viewer)
    return layer


def assert_shown(layer, slide, tolerance=0):
    """Check that the slice is the composite, and return the composite."""
    wait(layer)
    settings, level = shown_composite(layer), layer.data_level
    whole = slide.read_region((0, 0), slide.level_dimensions[level], level, composite=settings)
    (top, left), (bottom, right) = layer.corner_pixels[:, -2:]
    pixels = np.asarray(layer._slice.image.raw).squeeze()
    expected = whole[top : bottom + 1, left : right + 1].astype(int)
    np.testing.assert_allclose(pixels.astype(int), expected, rtol=0, atol=tolerance)
    return settings


def test_changes_of_one_of_many_channels_show(layer, monkeypatch):
    monkeypatch.setattr(composite_source, "MANY_CHANNELS", 5)
    slide = slide_of(layer)
    show_composite(layer, slide.composite(range(5)))
    wait(layer)
    for index, high in ((3, 900), (3, 2500), (1, 1500)):
        composite = shown_composite(layer)
        style = replace(composite.channels[index], window=(150, high))
        show_composite(layer, composite.styled(index, style))
        assert_shown(layer, slide, tolerance=1)


def test_many_channels_are_one_layer(layer):
    assert layer.rgb
    assert layer.data[0].shape == (1200, 1500, 3)
    settings = assert_shown(layer, slide_of(layer))
    assert [style.name for style in settings.channels] == ["DAPI", "CD3", "CD8", "PanCK", "AF"]
    assert settings.visible == (0, 1, 2, 3)


@pytest.mark.parametrize("zoom", [1, 4])
def test_changed_composite_is_drawn_without_decoding(viewer, layer, zoom):
    viewer.scene.camera.zoom *= zoom
    slide = slide_of(layer)
    settings = assert_shown(layer, slide)
    decoded = slide.stats()["decoded"]
    style = replace(settings.channels[0], color="#ffffff", window=(500, 1500), gamma=0.5)
    show_composite(layer, replace(settings.styled(0, style), inverted=True))
    assert display_of(layer).exact  # already in the first slice
    assert slide.stats()["decoded"] == decoded
    assert_shown(layer, slide)
    show_composite(layer, shown_composite(layer).showing([0, 2, 4]))
    assert assert_shown(layer, slide).visible == (0, 2, 4)


def test_thumbnail_follows_a_changed_composite(viewer, layer, qtbot):
    viewer.scene.camera.zoom *= 4
    assert_shown(layer, slide_of(layer))
    assert layer.data_level < len(layer.data) - 1
    assert layer.thumbnail[..., :3].any()
    show_composite(layer, shown_composite(layer).showing([]))
    qtbot.wait_until(lambda: not layer.thumbnail[..., :3].any())


def test_overview_shows_a_composite_that_was_changed_before(viewer, layer):
    viewer.scene.camera.zoom *= 4
    assert_shown(layer, slide_of(layer))
    show_composite(layer, shown_composite(layer).showing([4]))
    viewer.scene.camera.zoom /= 16
    assert_shown(layer, slide_of(layer))
    assert layer.data_level == len(layer.data) - 1


@pytest.mark.parametrize("most_pixels", [1, slice_request.MOST_PIXELS])
def test_overview_replaces_views_in_the_changed_colors(viewer, layer, monkeypatch, most_pixels):
    viewer.scene.camera.zoom *= 4
    assert_shown(layer, slide_of(layer))
    slide_of(layer).clear_cache()
    monkeypatch.setattr(slice_request, "MOST_PIXELS", most_pixels)
    monkeypatch.setattr(runtime.default().fetcher, "request", lambda *_, **__: None)
    settings = shown_composite(layer).showing([4])
    red = replace(settings.channels[4], color="#ff0000", window=(0, 1))
    show_composite(layer, settings.styled(4, red))
    assert (np.asarray(layer._slice.image.raw) == (255, 0, 0)).all()


def test_prefetching_keeps_the_channels_of_the_view(viewer, write_channels, monkeypatch, qtbot):
    fetcher = runtime.default().fetcher
    monkeypatch.setattr(runtime.default().tiles, "budget", 16_000_000)
    [layer] = viewer.open(write_channels(5)[0], plugin=PLUGIN)
    wait_for_layout(viewer)
    viewer.scene.camera.zoom *= 4
    slide = slide_of(layer)
    settings = assert_shown(layer, slide)
    qtbot.wait_until(lambda: fetcher.stats(slide.displayed.slide)["prefetched"] > 0)
    before = 0
    while before != (before := fetcher.stats(slide.displayed.slide)["prefetched"]):
        qtbot.wait(300)
    decoded = slide.stats()["decoded"]
    style = replace(settings.channels[0], window=(500, 1500))
    show_composite(layer, settings.styled(0, style))
    assert display_of(layer).exact
    assert slide.stats()["decoded"] == decoded


def test_composite_without_channels_is_black(layer):
    show_composite(layer, shown_composite(layer).showing([]))
    wait(layer)
    assert not np.asarray(layer._slice.image.raw).any()


def test_planes_share_the_composite(viewer, tmp_path):
    pixels = np.random.default_rng(3).integers(0, 4000, (3, 5, 300, 400), np.uint16)
    path = tmp_path / "stack.ome.tif"
    axes = {"axes": "ZCYX", "Channel": {"Name": list("abcde")}}
    tifffile.imwrite(path, pixels, metadata=axes, tile=(128, 128), photometric="minisblack")
    [layer] = viewer.open(path, plugin=PLUGIN)
    assert layer.data[0].shape == (3, 300, 400, 3) if layer.multiscale else layer.rgb
    for plane in (0, 2):
        viewer.dims.set_point(0, plane)
        assert_shown(layer, slide_of(layer).plane(z=plane))
    show_composite(layer, shown_composite(layer).showing([4]))
    for plane in (2, 1):
        viewer.dims.set_point(0, plane)
        assert_shown(layer, slide_of(layer).plane(z=plane))
