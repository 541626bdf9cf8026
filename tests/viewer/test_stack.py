"""Stacks in a real napari window: sliders for t and z, each plane as tifffile or zarr has it."""

import os
import threading
import time

import numpy as np
import pytest
import tifffile
from napari.layers import Labels
from napari.utils.notifications import notification_manager
from qtpy.QtWidgets import QApplication

import napari_wsigpu
from napari_wsigpu import open_slide
from napari_wsigpu.slide.facts import facts
from napari_wsigpu.viewer.annotations.annotation_layers import flat_placement
from napari_wsigpu.viewer.contributions.slide_writer import write_slide
from napari_wsigpu.viewer.drawing import stack_planes as planes
from napari_wsigpu.viewer.drawing.progressive import display_of
from napari_wsigpu.viewer.layers.slide_layers import slide_layers, slide_of
from napari_wsigpu.viewer.view.region import drawn
from napari_wsigpu.widgets.export.export_dock import Export
from tests.writers import czis, slides
from tests.writers.stacks import write_ome, write_stack
from tests.writers.zarrs import write_label

PLUGIN = "napari-wsigpu"
SIZES = {"t": 2, "z": 5}
MIDDLE = (0, 2)


@pytest.fixture(scope="module")
def pixels():
    """Shape (t, z, c, y, x): planes differ in all their pixels, and in brightness."""
    shape = (*SIZES.values(), 2, 600, 800)
    noise = np.random.default_rng(0).integers(0, 50, shape[2:], np.uint16)
    brightness = np.arange(1, 11, dtype=np.uint16).reshape(*SIZES.values(), 1, 1, 1)
    return noise + 1000 * brightness


@pytest.fixture(scope="module")
def tiff(tmp_path_factory, pixels):
    path = tmp_path_factory.mktemp("stack") / "a.ome.tif"
    write_ome(path, pixels, side=128)
    return path


@pytest.fixture(scope="module")
def labelled(tmp_path_factory, pixels):
    """An OME-Zarr stack whose labels are the number of their plane."""
    path = tmp_path_factory.mktemp("stack") / "a.zarr"
    levels = [np.moveaxis(each, 2, 1) for each in (pixels, pixels[..., ::2, ::2])]
    write_stack(path, levels, side=256)
    numbers = np.broadcast_to(np.arange(1, 11).reshape(2, 5, 1, 1), (2, 5, 600, 800))
    levels = [numbers.astype(np.uint16), numbers[..., ::2, ::2].astype(np.uint16)]
    write_label(path, "cells", levels, axes="tzyx", version="0.4", chunks=(1, 1, 256, 256))
    return path


def settle(seconds=0.3):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        QApplication.processEvents()
        time.sleep(0.005)


def until(true, seconds=20):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        QApplication.processEvents()
        time.sleep(0.002)


def drag(viewer, axis, value):
    """Move a slider as the mouse does."""
    sliders = viewer.window._qt_viewer.dims.slider_widgets
    sliders[viewer.dims.axis_labels.index(axis)].slider.setValue(value)


def at(viewer):
    return viewer.dims.current_step[: len(SIZES)]


def shown(layer):
    """Return the slice that a layer shows, and where it lies in its level, as slices."""
    (top, left), (bottom, right) = layer.corner_pixels[:, -2:]
    return np.asarray(layer._slice.image.raw), (slice(top, bottom + 1), slice(left, right + 1))


def assert_exact(viewer, pixels, plane):
    for channel, layer in enumerate(viewer.layers):
        napari_wsigpu.wait(layer)
        found, region = shown(layer)
        step = 2**layer.data_level
        np.testing.assert_array_equal(found, pixels[(*plane, channel)][::step, ::step][region])


def zoom_in(viewer, layer):
    zoom_out(viewer, layer)  # napari keeps a larger slice of the same level
    viewer.scene.camera.center = (0, 100, 120)
    viewer.scene.camera.zoom = 8
    until(lambda: layer.data_level == 0 and layer.corner_pixels[1, -1] < 799)


def zoom_out(viewer, layer):
    settle(0.5)  # until the slide is fitted
    viewer.scene.camera.zoom = 0.5
    until(lambda: layer.data_level == 1)


@pytest.mark.parametrize("kind", ["tiff", "labelled"])
def test_layers_have_axes_for_planes(request, pixels, kind):
    with open_slide(request.getfixturevalue(kind)) as slide:
        layers = slide_layers(slide)
        for channel, (levels, attributes, _) in enumerate(layers[:2]):
            assert [level.shape for level in levels] == [(2, 5, 600, 800), (2, 5, 300, 400)]
            assert attributes["axis_labels"] == ("t", "z", "y", "x")
            assert attributes["scale"] == pytest.approx((0.25, 1.5, 0.5, 0.5))
            assert attributes["units"] == ("second", *["micrometer"] * 3)
            np.testing.assert_array_equal(levels[0][1, 3], pixels[1, 3, channel])
            low, high = attributes["contrast_limits"]
            assert low < 2000  # of the first plane
            assert high > 10_000  # of the last one


def test_sliders_choose_the_plane(tiff, pixels, viewer):
    layer, _ = viewer.open(tiff, plugin=PLUGIN)
    assert at(viewer) == MIDDLE
    assert viewer.dims.axis_labels == ("t", "z", "y", "x")
    assert_exact(viewer, pixels, MIDDLE)
    for axis, value, plane in (("z", 3, (0, 3)), ("t", 1, (1, 3)), ("z", 0, (1, 0))):
        drag(viewer, axis, value)
        assert_exact(viewer, pixels, plane)
        middle = (0, 0, 150, 200)
        value = layer.get_value(middle, world=True)
        assert value[1] == pixels[(*plane, 0)][300, 400]
    zoom_in(viewer, layer)
    for value in range(5):
        drag(viewer, "z", value)
        assert_exact(viewer, pixels, (1, value))
    zoom_out(viewer, layer)
    drag(viewer, "z", 1)
    assert_exact(viewer, pixels, (1, 1))
    assert slide_of(layer).stats()["failed_tiles"] == {}


def test_a_step_never_waits_and_is_never_blank(tiff, pixels, viewer, gate):
    layer, _ = viewer.open(tiff, plugin=PLUGIN)
    zoom_in(viewer, layer)
    assert_exact(viewer, pixels, MIDDLE)
    slide_of(layer).clear_cache()
    gate.clear()
    began = time.monotonic()
    for value in (0, 4):
        drag(viewer, "z", value)
        settle(0.1)
    assert time.monotonic() - began < 20  # what is held back is so for 30
    found, _ = shown(layer)
    assert not display_of(layer).exact
    assert found.min() >= 1000  # of a plane, not of none
    gate.set()
    assert_exact(viewer, pixels, (0, 4))


def test_neighboring_planes_of_a_resting_view_are_decoded_ahead(tiff, pixels, viewer, gate):
    layer, other = viewer.open(tiff, plugin=PLUGIN)
    zoom_in(viewer, layer)
    assert_exact(viewer, pixels, MIDDLE)
    fetcher = slide_of(layer).runtime.fetcher
    settle(1)
    until(lambda: fetcher._thread is None)
    gate.clear()
    for plane in ((0, 3), MIDDLE, (1, 2)):
        for axis, value in zip("tz", plane, strict=True):
            drag(viewer, axis, value)
        assert display_of(layer).exact
        assert display_of(other).exact
        assert_exact(viewer, pixels, plane)


def test_three_dimensions_and_back(tiff, pixels, viewer, monkeypatch):
    layer, _ = viewer.open(tiff, plugin=PLUGIN)
    viewer.dims.ndisplay = 3
    napari_wsigpu.wait(layer)
    np.testing.assert_array_equal(layer._slice.image.raw, pixels[0, :, 0, ::2, ::2])
    drag(viewer, "t", 1)
    napari_wsigpu.wait(layer)
    np.testing.assert_array_equal(layer._slice.image.raw, pixels[1, :, 0, ::2, ::2])
    viewer.dims.ndisplay = 2
    assert_exact(viewer, pixels, (1, 2))
    monkeypatch.setattr(planes, "MOST_VOLUME", 5 * 600 * 800 * 2 // 9 + 1)
    layer.locked_data_level = 0
    viewer.dims.ndisplay = 3
    napari_wsigpu.wait(layer)
    np.testing.assert_array_equal(layer._slice.image.raw, pixels[1, :, 0, ::3, ::3])
    corners = layer._transforms["tile2data"](np.array([[0, 0, 0, 0], [0, 4, 199, 266]]))
    np.testing.assert_allclose(corners[1], (0, 4, 597, 798), atol=1)


def test_a_cut_across_planes_and_their_mean(tiff, pixels, viewer):
    layer, _ = viewer.open(tiff, plugin=PLUGIN)
    layer.locked_data_level = 1
    layer.projection_mode = "mean"
    viewer.dims.thickness = (0, 3, 0, 0)
    expected = pixels[0, 1:4, 0, ::2, ::2].mean(axis=0)
    np.testing.assert_array_equal(layer._slice.image.raw, expected)
    viewer.dims.thickness = (0, 0, 0, 0)
    assert_exact(viewer, pixels, MIDDLE)
    viewer.dims.order = (0, 2, 1, 3)
    viewer.dims.set_current_step(2, 100)
    settle(0.1)
    np.testing.assert_array_equal(layer._slice.image.raw, pixels[0, :, 0, 100, ::2])
    layer.locked_data_level = None
    viewer.dims.order = (0, 1, 3, 2)
    settle(0.2)
    napari_wsigpu.wait(layer)
    found, region = shown(layer)
    step = 2**layer.data_level
    np.testing.assert_array_equal(found, pixels[0, 2, 0, ::step, ::step][region].T)
    assert min(found.shape) > 1


def test_labels_follow_the_sliders(labelled, viewer):
    viewer.open(labelled, plugin=PLUGIN)
    labels = viewer.layers[-1]
    assert isinstance(labels, Labels)
    for z, t in ((2, 0), (4, 0), (4, 1)):
        drag(viewer, "z", z)
        drag(viewer, "t", t)
        napari_wsigpu.wait(labels)
        assert labels.get_value((t * 0.25, z * 1.5, 150, 200), world=True)[1] == 5 * t + z + 1
        assert (np.asarray(labels._slice.image.raw) == 5 * t + z + 1).all()


def test_labels_of_a_cold_plane_are_not_waited_for(labelled, viewer, chunk_gate):
    viewer.open(labelled, plugin=PLUGIN)
    labels = viewer.layers[-1]
    napari_wsigpu.wait(labels)
    chunk_gate.clear()
    began = time.monotonic()
    drag(viewer, "z", 4)  # neither beside the one that is shown nor the first
    settle(0.1)
    assert time.monotonic() - began < 20  # what is held back is so for 30
    assert not display_of(labels).exact
    assert (np.asarray(labels._slice.image.raw) == 3).all()  # of the plane before
    chunk_gate.set()
    napari_wsigpu.wait(labels)
    assert (np.asarray(labels._slice.image.raw) == 5).all()


def test_a_plane_that_cannot_be_opened_is_said(tiff, pixels, viewer, tmp_path):
    path = tmp_path / "b.ome.tif"
    path.write_bytes(tiff.read_bytes())
    layer, _ = viewer.open(path, plugin=PLUGIN)
    assert_exact(viewer, pixels, MIDDLE)
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))
    notification_manager.records.clear()
    drag(viewer, "z", 4)
    until(lambda: not np.asarray(layer._slice.image.raw).any())
    said = [record.message for record in notification_manager.records]
    assert said
    assert all(each.startswith("Some planes stay blank: ") for each in said), said
    with pytest.raises(napari_wsigpu.errors.SlideError):
        napari_wsigpu.wait(layer)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_planes_that_a_slide_lacks_are_background(tmp_path, viewer):
    path = tmp_path / "a.czi"
    gray = slides.picture(90, 130, 1, "uint16")
    czis.write(path, [czis.Block(gray // (z + 1), z=z, t=t) for z, t in ((0, 1), (1, 0))])
    [layer] = viewer.open(path, plugin=PLUGIN)
    blank = slide_of(layer).layout.background
    for t, z in ((0, 1), (0, 0), (1, 1), (1, 0)):
        drag(viewer, "t", t)
        drag(viewer, "z", z)
        expected = np.full((90, 130), blank) if t == z else gray[..., 0] // (z + 1)
        until(lambda expected=expected: np.array_equal(layer._slice.image.raw, expected))
        np.testing.assert_array_equal(layer.data[0][t, z], expected)


def test_docks_know_the_plane(tiff, pixels, viewer, tmp_path):
    layer, _ = viewer.open(tiff, plugin=PLUGIN)
    slide = slide_of(layer)
    zoom_in(viewer, layer)
    drag(viewer, "z", 4)
    drag(viewer, "t", 1)
    _, dock = viewer.window.add_plugin_dock_widget(PLUGIN, "Export")
    assert "plane t = 1, z = 4" in dock.notes.value
    shapes = viewer.add_shapes(**flat_placement(layer))
    shapes.add(np.array([[60, 70], [60, 170], [160, 170], [160, 70]]))
    region = drawn(viewer, shapes, layer, slide)
    assert region[:4] == (70, 60, 100, 100)
    [plan] = dock.choices.plans(viewer, slide)
    path = tmp_path / "b.ome.tif"
    Export([(plan._replace(region=region), path)]).write(overwrite=False)
    np.testing.assert_array_equal(tifffile.imread(path), pixels[1, 4, :, 60:160, 70:170])
    [saved] = write_slide(str(tmp_path / "c.tif"), [layer.as_layer_data_tuple()])
    with open_slide(saved) as written:
        np.testing.assert_array_equal(written.levels[0][...], np.moveaxis(pixels[1, 4], 0, -1))
    assert dict(facts(slide))["Planes"].replace("\xa0", " ") == (
        "5 along z, 1.5 µm apart; 2 along t, 0.25 s apart"
    )


def test_figures_are_exact(tiff, pixels, viewer, gate):
    layer, _ = viewer.open(tiff, plugin=PLUGIN)
    display = display_of(layer)
    gate.clear()
    threading.Timer(0.5, gate.set).start()
    display.waits = True
    drag(viewer, "z", 4)
    display.waits = False
    found, region = shown(layer)
    step = 2**layer.data_level
    np.testing.assert_array_equal(found, pixels[0, 4, 0, ::step, ::step][region])


def test_a_duplicate_steps_too(tiff, pixels, viewer):
    layer, _ = viewer.open(tiff, plugin=PLUGIN)
    viewer.layers.remove(viewer.layers[1])
    copied = type(layer)(*[layer.as_layer_data_tuple()[0]], **layer.as_layer_data_tuple()[1])
    viewer.add_layer(copied)
    drag(viewer, "z", 4)
    for each in (layer, copied):
        napari_wsigpu.wait(each)
        found, region = shown(each)
        step = 2**each.data_level
        np.testing.assert_array_equal(found, pixels[0, 4, 0, ::step, ::step][region])


@pytest.mark.parametrize("close", [True, False])
def test_leaving_in_mid_step_lets_everything_go(tiff, viewer, gate, handles_of, close):
    layers = viewer.open(tiff, plugin=PLUGIN)
    slide = slide_of(layers[0])
    settle(0.3)
    slide.clear_cache()
    gate.clear()
    drag(viewer, "z", 4)
    settle(0.1)
    threading.Timer(0.3, gate.set).start()
    if close:
        viewer.close()
    else:
        viewer.layers.clear()
    settle(0.1)
    until(lambda: not [each for each in threading.enumerate() if each.name.startswith("wsigpu")])
    assert handles_of(tiff) == 0
