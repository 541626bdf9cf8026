"""Slides in a real napari window."""

import copy
import threading
from collections import Counter

import numpy as np
import psutil
import pytest
from napari.layers import Layer
from napari.utils.notifications import notification_manager

from napari_wsigpu import open_slide, wait
from napari_wsigpu.viewer.contributions.sample_slide import sample_path


def opened(path):
    """How often this process has a file open."""
    return Counter(file.path for file in psutil.Process().open_files())[str(path)]


def decoders():
    return [t for t in threading.enumerate() if t.name.startswith("wsigpu")]


def test_open_gives_exactly_the_pixels_of_a_script(viewer):
    [layer] = viewer.open(sample_path(), plugin="napari-wsigpu")
    with open_slide(sample_path()) as slide:
        for shown, exact in zip(layer.data, slide.levels, strict=True):
            np.testing.assert_array_equal(shown[100:500, 200:560], exact[100:500, 200:560])
    assert [str(unit) for unit in layer.units] == ["micrometer", "micrometer"]
    np.testing.assert_allclose(layer.scale, (0.499, 0.499))


@pytest.mark.parametrize("zoom", [0.2, 1.0, 4.0])
def test_canvas_shows_the_slide_in_its_place(viewer, zoom):
    [layer] = viewer.open(sample_path(), plugin="napari-wsigpu")
    layer.interpolation2d = "linear"
    x, y = 3300, 2600
    viewer.scene.camera.center = (0, y * 0.499, x * 0.499)
    viewer.scene.camera.zoom = zoom
    wait(layer)
    canvas = viewer.screenshot(flash=False)[..., :3].astype(float)
    middle_y, middle_x = canvas.shape[0] // 2, canvas.shape[1] // 2
    side = min(100, middle_y, middle_x)  # what earlier tests showed may have left it low
    assert side >= 40
    seen = canvas[middle_y - side : middle_y + side, middle_x - side : middle_x + side]
    half = round(side / zoom / 0.499)
    with open_slide(sample_path()) as slide:
        pixels = slide.read_region((x - half, y - half), (2 * half, 2 * half))
    for quarter_seen, quarter in zip(quarters(seen), quarters(pixels), strict=True):
        np.testing.assert_allclose(quarter_seen, quarter, atol=8)


def quarters(pixels):
    """Mean colour of each quarter of a picture."""
    height, width = pixels.shape[0] // 2, pixels.shape[1] // 2
    rows = (pixels[:height], pixels[height:])
    return [part.mean(axis=(0, 1)) for row in rows for part in (row[:, :width], row[:, width:])]


def test_sample_opens(viewer):
    [layer] = viewer.open_sample("napari-wsigpu", "he_phantom")
    assert layer.rgb
    assert len(layer.data) == 4


def test_several_channels_open_and_show(viewer, write_channels, qtbot):
    path, pixels, names = write_channels(4)
    layers = viewer.open(path, plugin="napari-wsigpu")
    assert [layer.name for layer in layers] == [f"channels4 {name}" for name in names]
    viewer.screenshot(flash=False)
    for index, layer in enumerate(layers):
        np.testing.assert_array_equal(np.asarray(layer.data[0]), pixels[index])


def test_file_and_threads_are_released_with_the_last_layer(viewer, write_channels):
    path, pixels, _ = write_channels(2)
    layers = viewer.open(path, plugin="napari-wsigpu")
    layers[0].data[0][:]
    assert opened(path) == 1
    viewer.layers.remove(layers[0])
    assert opened(path) == 1
    viewer.layers.remove(layers[1])
    assert opened(path) == 0
    assert decoders() == []
    np.testing.assert_array_equal(layers[0].data[0][:9], pixels[0, :9])
    layers[0].data[0].slide.close()


def test_duplicated_layer_keeps_the_slide(viewer):
    [layer] = viewer.open(sample_path(), plugin="napari-wsigpu")
    data, attributes, kind = layer.as_layer_data_tuple()
    viewer.add_layer(Layer.create(copy.deepcopy(data), attributes, kind))
    assert len(viewer.layers) == 2
    viewer.layers.remove(layer)
    assert viewer.layers[0].data[0][:10, :10].shape == (10, 10, 3)
    assert opened(sample_path()) == 1


def test_damaged_tile_is_notified_once(viewer, damaged_slide, qtbot):
    notification_manager.records.clear()
    [layer] = viewer.open(damaged_slide, plugin="napari-wsigpu")
    for _ in range(3):
        tile = layer.data[0][6 * 256 : 7 * 256, 8 * 256 : 9 * 256]
        assert (tile == 255).all()
    layer.refresh()
    qtbot.wait(100)
    records = notification_manager.records
    said = [record.message for record in records if record.severity == "warning"]
    assert len(said) == 1
    assert "level 0, row 6, column 8" in said[0]
    assert f"'{damaged_slide.name}'" in said[0]
    assert layer.data[0].slide.stats()["failed"] == 1


def test_closing_the_viewer_lets_everything_go(viewer):
    viewer.open(sample_path(), plugin="napari-wsigpu")
    viewer.screenshot(flash=False)
    viewer.close()
    assert opened(sample_path()) == 0
    assert decoders() == []
