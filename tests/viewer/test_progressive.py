"""Slides in a real napari window while their tiles are held back."""

import logging
import os
import shutil
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import tifffile
from napari.layers import Layer
from napari.settings import get_settings
from napari.utils.notifications import notification_manager
from qtpy.QtWidgets import QApplication

import napari_wsigpu
from napari_wsigpu import open_slide
from napari_wsigpu.codecs import cpu
from napari_wsigpu.model.errors import (
    DisplayTimeoutError,
    LayerError,
    SlideClosedError,
    SlideReadError,
)
from napari_wsigpu.slide import runtime
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from napari_wsigpu.viewer.drawing import frame_clock as frames
from napari_wsigpu.viewer.drawing import progressive
from napari_wsigpu.viewer.drawing import slice_request as requests
from napari_wsigpu.viewer.layers.slide_layers import slide_layers
from tests.conftest import has_display
from tests.test_display_color import with_profile
from tests.writers import slides, tiffbytes

PLUGIN = "napari-wsigpu"
MAGENTA = (255, 0, 255)


@pytest.fixture(params=["sync", "async"])
def slicing(request):
    get_settings().experimental.async_ = request.param == "async"
    return request.param


# What both ways of slicing share, seen by the one that has more to get wrong.
asynchronous = pytest.mark.parametrize("slicing", ["async"], indirect=True)


@pytest.fixture
def viewer(viewer):
    """A viewer in which nothing is magenta but the canvas."""
    viewer.canvas.background_color_override = "magenta"
    return viewer


@pytest.fixture
def new_viewer(make_napari_viewer):
    """A viewer of its own, under napari's strict checks of what a closed one leaves behind."""
    return make_napari_viewer(show=True, strict_qt=True)


def settle(seconds=0.2):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        QApplication.processEvents()
        time.sleep(0.005)


def look_at(viewer, layer, y, x, zoom):
    """Show a place, given in pixels of level 0, at `zoom` screen pixels a pixel of level 0."""
    scale = layer.scale[-2:]
    viewer.scene.camera.center = (0, y * scale[0], x * scale[1])
    viewer.scene.camera.zoom = zoom / scale[0]


def canvas_of(viewer):
    return viewer.screenshot(flash=False)[..., :3]


def blank_share(viewer):
    return (canvas_of(viewer) == MAGENTA).all(axis=-1).mean()


def shown(layer):
    """Return the slice that a layer shows, and the exact pixels of the same region."""
    (top, left), (bottom, right) = layer.corner_pixels
    exact = layer.data[layer.data_level][top : bottom + 1, left : right + 1]
    return np.asarray(layer._slice.image.raw), np.asarray(exact)


def decoded(layer):
    """Return the slice that a layer shows, and the same region as tifffile decodes it."""
    (top, left), (bottom, right) = layer.corner_pixels
    shape = layer.data[layer.data_level].shape
    with tifffile.TiffFile(sample_path()) as file:
        page = next(page for page in file.pages if page.shape == shape)
        exact = page.asarray()[top : bottom + 1, left : right + 1]
    return np.asarray(layer._slice.image.raw), exact


def fetching():
    return [thread for thread in threading.enumerate() if thread.name.startswith("wsigpu")]


def test_slices_do_not_wait_and_are_never_blank(viewer, slicing, gate):
    [layer] = viewer.open(sample_path(), plugin=PLUGIN)
    settle()
    gate.clear()
    for y, x, zoom in [(2600, 3300, 0.4), (2600, 3300, 1), (2700, 3000, 2), (2600, 3300, 0.3)]:
        look_at(viewer, layer, y, x, zoom)
        assert blank_share(viewer) == 0
        settle(0.05)
        assert blank_share(viewer) == 0
    look_at(viewer, layer, 2600, 3300, 1)
    canvas_of(viewer)
    assert not progressive.display_of(layer).exact
    assert not np.array_equal(*decoded(layer))
    gate.set()
    napari_wsigpu.wait(layer, 30)
    np.testing.assert_array_equal(*shown(layer))


def test_tiles_that_soon_land_are_waited_for(viewer, slicing, monkeypatch):
    """Once it is known that they take no longer than a slice may wait, no frame is coarse."""
    monkeypatch.setattr(frames, "PATIENCE_SECONDS", 20)
    # Prefetching would add tiles in flight whose duration is unknown.
    monkeypatch.setattr(progressive, "IDLE_MS", 100_000)
    [layer] = viewer.open(sample_path(), plugin=PLUGIN)
    look_at(viewer, layer, 2600, 3300, 1)
    napari_wsigpu.wait(layer, 30)
    for y, x in [(1200, 1200), (4000, 1500), (4000, 5000)]:
        layer.data[0].slide.clear_cache()
        look_at(viewer, layer, y, x, 1)
        canvas_of(viewer)
        np.testing.assert_array_equal(*shown(layer))
        assert layer.data_level == 0


def test_nobody_waits_for_tiles_that_take_longer(viewer, monkeypatch):
    monkeypatch.setattr(frames, "PATIENCE_SECONDS", 20)
    [layer] = viewer.open(sample_path(), plugin=PLUGIN)
    look_at(viewer, layer, 2600, 3300, 1)
    napari_wsigpu.wait(layer, 30)
    slide = layer.data[0].slide
    slide.clear_cache()
    gate = threading.Event()
    monkeypatch.setattr(runtime.default().fetcher, "expected", lambda keys: 21.0)
    read = slide.displayed.read_tiles
    monkeypatch.setattr(
        slide.displayed, "read_tiles", lambda *given: gate.wait(30) and read(*given)
    )
    begin = time.monotonic()
    look_at(viewer, layer, 4000, 1500, 1)
    canvas_of(viewer)
    assert time.monotonic() - begin < 15
    assert not progressive.display_of(layer).exact
    gate.set()  # before the slide goes, which waits for what reads it


def test_slice_after_wait_equals_tifffile(viewer, slicing):
    [layer] = viewer.open(sample_path(), plugin=PLUGIN)
    stored = {level.shape for level in layer.data[0].slide.levels}
    for y, x, zoom in [(2600, 3300, 1), (1200, 2000, 1), (1200, 2400, 1.5), (2600, 3300, 0.2)]:
        look_at(viewer, layer, y, x, zoom)
        napari_wsigpu.wait(layer, 30)
        if layer.data[layer.data_level].shape in stored:
            np.testing.assert_array_equal(*decoded(layer))
        np.testing.assert_array_equal(*shown(layer))


@asynchronous
def test_zooming_out_shows_no_flash(viewer, slicing, gate):
    """No pixel of the canvas turns to background that shows the slide before and after."""
    [layer] = viewer.open(sample_path(), plugin=PLUGIN)
    look_at(viewer, layer, 2600, 3300, 4)
    napari_wsigpu.wait(layer, 30)
    runtime.default().tiles.forget(layer.data[0].slide.displayed.slide)
    gate.clear()
    drawn = []
    scene = viewer.window._qt_viewer.canvas._scene_canvas

    def remember(event):
        from vispy.gloo.util import _screenshot

        drawn.append(_screenshot()[..., :3].copy())

    scene.events.draw.connect(remember, position="last")
    zoom = 4.0
    while zoom > 0.35:
        zoom /= 1.3
        look_at(viewer, layer, 2600, 3300, zoom)
        settle(0.03)
    scene.events.draw.disconnect(remember)
    assert len(drawn) >= 8
    for frame in drawn:
        assert not (frame == MAGENTA).all(axis=-1).any()


def test_scripts_read_exactly_and_wait_while_the_display_does_not(viewer, gate):
    [layer] = viewer.open(sample_path(), plugin=PLUGIN)
    gate.clear()
    look_at(viewer, layer, 2600, 3300, 1)
    canvas_of(viewer)
    threading.Timer(0.3, gate.set).start()
    begin = time.monotonic()
    pixels = layer.data[0][2600:2700, 3300:3400]
    assert time.monotonic() - begin > 0.2
    with open_slide(sample_path()) as slide:
        np.testing.assert_array_equal(pixels, slide.levels[0][2600:2700, 3300:3400])


def test_new_view_cancels_requests_of_the_old_one(viewer, gate):
    [layer] = viewer.open(sample_path(), plugin=PLUGIN)
    slide = layer.data[0].slide
    gate.clear()
    look_at(viewer, layer, 1200, 1200, 1)
    canvas_of(viewer)
    before = slide.stats()["display"]["queue"]
    look_at(viewer, layer, 4000, 5000, 4)
    canvas_of(viewer)
    assert slide.stats()["display"]["queue"] < before


def test_only_a_view_that_moves_on_requests_the_tiles_ahead(viewer, monkeypatch):
    """Where a view jumps to, its own tiles come first, and no direction is likelier."""
    monkeypatch.setattr(progressive, "IDLE_MS", 100_000)
    [layer] = viewer.open(sample_path(), plugin=PLUGIN)
    look_at(viewer, layer, 600, 700, 2)
    napari_wsigpu.wait(layer, 30)
    requested = []
    request = layer.data[0].slide.runtime.fetcher.request
    monkeypatch.setattr(
        layer.data[0].slide.runtime.fetcher,
        "request",
        lambda display, keys, ahead=(), **named: (
            requested.append(len(ahead)) or request(display, keys, ahead, **named)
        ),
    )
    look_at(viewer, layer, 4200, 5400, 2)
    napari_wsigpu.wait(layer, 30)
    assert requested
    assert not any(requested)
    look_at(viewer, layer, 4200, 5200, 2)
    napari_wsigpu.wait(layer, 30)
    assert any(requested)


@asynchronous
def test_layers_of_channels_share_their_tiles(viewer, slicing, write_channels):
    path, pixels, _ = write_channels(3)
    layers = viewer.open(path, plugin=PLUGIN)
    slide = layers[0].data[0].slide
    settle()
    slide.clear_cache()
    before = slide.stats()["decoded"]["cpu"]
    look_at(viewer, layers[0], 600, 750, 2)
    for layer in layers:
        napari_wsigpu.wait(layer, 30)
        np.testing.assert_array_equal(*shown(layer))
    assert layers[2].data_level == 0
    (top, left), (bottom, right) = layers[2].corner_pixels
    raw = layers[2]._slice.image.raw
    np.testing.assert_array_equal(raw, pixels[2, top : bottom + 1, left : right + 1])
    assert slide.stats()["decoded"]["cpu"] - before <= 2 * 30


@pytest.mark.parametrize(
    ("slicing", "grid"), [("sync", False), ("async", False), ("sync", True)], indirect=["slicing"]
)
def test_duplicated_layer_is_progressive_too(viewer, slicing, gate, grid):
    [layer] = viewer.open(sample_path(), plugin=PLUGIN)
    copied = Layer.create(*layer.as_layer_data_tuple())
    viewer.add_layer(copied)
    viewer.canvas.grid.enabled = grid
    settle()
    gate.clear()
    look_at(viewer, layer, 2600, 3300, 0.5)
    settle()
    gate.set()
    for each in (layer, copied):
        assert progressive.display_of(each) is not None
        napari_wsigpu.wait(each, 30)
        np.testing.assert_array_equal(*shown(each))
    if grid:
        return  # napari itself may crash if a layer is removed then, whatever it shows
    viewer.layers.remove(copied)
    assert progressive.display_of(copied) is None
    look_at(viewer, layer, 2000, 3000, 1)
    napari_wsigpu.wait(layer, 30)
    np.testing.assert_array_equal(*shown(layer))


@asynchronous
def test_two_viewers_show_their_own_places(viewer, another, slicing):
    viewers = [viewer, another()]
    layers = [viewer.open(sample_path(), plugin=PLUGIN)[0] for viewer in viewers]
    look_at(viewers[0], layers[0], 1500, 1500, 1)
    look_at(viewers[1], layers[1], 3500, 4500, 1)
    for layer in layers:
        assert progressive.display_of(layer) is not None
        napari_wsigpu.wait(layer, 30)
        np.testing.assert_array_equal(*shown(layer))
    assert not np.array_equal(layers[0].corner_pixels, layers[1].corner_pixels)


@pytest.mark.usefixtures("scanner_colours")
@asynchronous
def test_other_colours_are_followed_at_every_level(viewer, slicing, tmp_path):
    path = tmp_path / "colours.tif"
    slides.write_pyramid(path, slides.picture(1500, 1800), (2, 2), tile=(256, 256))
    viewer.open(sample_path(), plugin=PLUGIN)
    viewer.layers.clear()
    with with_profile(path) as slide:
        [(data, attributes, _)] = slide_layers(slide)
        layer = viewer.add_image(data, **attributes)
        for zoom in (1, 0.1):
            look_at(viewer, layer, 700, 900, zoom)
            for color in ("stored", "srgb", "stored", "srgb"):
                slide.display_color = color
                layer.refresh()
                napari_wsigpu.wait(layer, 30)
                raw, exact = shown(layer)
                np.testing.assert_array_equal(raw, exact)
                (top, left), (bottom, right) = layer.corner_pixels
                stored = slide.level_array(layer.data_level)
                stored = stored[top : bottom + 1, left : right + 1]
                assert np.array_equal(exact, stored) == (color == "stored")
        viewer.layers.clear()


@asynchronous
def test_three_dimensions_and_back(viewer, slicing):
    [layer] = viewer.open(sample_path(), plugin=PLUGIN)
    look_at(viewer, layer, 2600, 3300, 1)
    settle()
    viewer.dims.ndisplay = 3
    settle()
    viewer.dims.ndisplay = 2
    look_at(viewer, layer, 2600, 3300, 1)
    napari_wsigpu.wait(layer, 30)
    assert layer.data_level == 0
    np.testing.assert_array_equal(*shown(layer))


@asynchronous
def test_transposed_axes(viewer, slicing):
    [layer] = viewer.open(sample_path(), plugin=PLUGIN)
    viewer.dims.order = (1, 0)
    napari_wsigpu.wait(layer, 30)
    raw, exact = shown(layer)
    np.testing.assert_array_equal(raw, exact.swapaxes(0, 1))


@pytest.mark.parametrize(("slicing", "level"), [("sync", 0), ("async", 1)], indirect=["slicing"])
def test_a_locked_level_is_shown_whole(viewer, monkeypatch, slicing, level):
    monkeypatch.setattr(requests, "MOST_PIXELS", 20 << 20)
    [layer] = viewer.open(sample_path(), plugin=PLUGIN)
    layer.locked_data_level = level
    napari_wsigpu.wait(layer, 60)
    height, width = layer.data[level].shape[:2]
    expected = level if height * width <= 20 << 20 else level + 1
    np.testing.assert_array_equal(layer._slice.image.raw, layer.data[expected][...])
    extent = layer._transforms["tile2data"](np.array(layer._slice.image.raw.shape[:2]))
    np.testing.assert_allclose(extent, layer.data[0].shape[:2], rtol=1e-3)
    layer.locked_data_level = None
    look_at(viewer, layer, 2600, 3300, 1)
    napari_wsigpu.wait(layer, 30)
    np.testing.assert_array_equal(*shown(layer))


@asynchronous
def test_figures_are_exported_exactly(viewer, slicing, gate, tmp_path):
    path = tmp_path / "slide.tif"
    pixels = slides.picture(1100, 1300)
    slides.write_pyramid(path, pixels, (2, 2), tile=(256, 256))
    [layer] = viewer.open(path, plugin=PLUGIN)
    layer.data[0].slide.clear_cache()
    gate.clear()
    threading.Timer(0.3, gate.set).start()
    figure = viewer.export_figure()[..., :3]
    np.testing.assert_array_equal(figure, pixels)
    assert not progressive.display_of(layer).waits


def test_after_the_cache_is_cleared_failed_tiles_are_tried_again(viewer, monkeypatch, without_core):
    [layer] = viewer.open(sample_path(), plugin=PLUGIN)
    settle()
    layer.data[0].slide.clear_cache()
    decode_tile = cpu.decode_tile

    def broken(tile, memory):
        raise RuntimeError("for the moment")

    monkeypatch.setattr(cpu, "decode_tile", broken)
    monkeypatch.setattr(cpu, "whole_tile_decoder", lambda batch: None)
    look_at(viewer, layer, 2600, 3300, 1)
    napari_wsigpu.wait(layer, 30)
    assert not np.array_equal(*decoded(layer))
    monkeypatch.setattr(cpu, "decode_tile", decode_tile)
    layer.data[0].slide.clear_cache()
    layer.refresh()
    napari_wsigpu.wait(layer, 30)
    np.testing.assert_array_equal(*decoded(layer))


@asynchronous
def test_a_cleared_cache_makes_nobody_wait(viewer, slicing, gate):
    [layer] = viewer.open(sample_path(), plugin=PLUGIN)
    settle()
    gate.clear()
    for zoom in (0.4, 1):
        layer.data[0].slide.clear_cache()
        look_at(viewer, layer, 2600, 3300, zoom)
        assert blank_share(viewer) == 0
    gate.set()
    napari_wsigpu.wait(layer, 30)
    np.testing.assert_array_equal(*decoded(layer))


@pytest.mark.parametrize("steps", [(1,), (1, 2, 4)])
@pytest.mark.parametrize("samples", [1, 3])
def test_damaged_tiles_of_a_small_slide_are_hatched(viewer, tmp_path, steps, samples):
    """napari reads a level that fits into the canvas before the display can replace its tiles."""
    pixels = slides.picture(300, 400, samples)
    damaged = np.s_[64:128, 192:256]
    pages = [
        tiffbytes.page(
            pixels[::step, ::step],
            tiffbytes.deflate,
            compression=8,
            photometric=2 if samples == 3 else 1,
            tile=(64, 64),
            subfile_type=int(step > 1),
        )
        for step in steps
    ]
    tiles = list(pages[0].segments)
    tiles[7 + 3] = bytes(99)
    pages[0].segments = tiles
    path = tiffbytes.write(tmp_path / "small.tif", pages)
    [layer] = viewer.open(path, plugin=PLUGIN)
    look_at(viewer, layer, 150, 200, 2)
    napari_wsigpu.wait(layer, 30)
    assert layer.data_level == 0
    raw, exact = shown(layer)
    assert raw.shape[:2] == (300, 400)
    assert {*raw[damaged].ravel().tolist()} == {0, 255}
    assert (exact[damaged] == 0).all()  # scripts get no drawing
    raw, expected = raw.copy(), pixels if samples == 3 else pixels[..., 0]
    raw[damaged] = expected[damaged]
    np.testing.assert_array_equal(raw, expected)


def test_failed_tiles_do_not_keep_a_display_waiting(viewer, damaged_slide):
    [layer] = viewer.open(damaged_slide, plugin=PLUGIN)
    look_at(viewer, layer, 6.5 * 256, 8.5 * 256, 1)
    napari_wsigpu.wait(layer, 30)
    assert layer.data_level == 0
    raw, exact = shown(layer)
    (top, left), _ = layer.corner_pixels
    rows, columns = np.ogrid[: raw.shape[0], : raw.shape[1]]
    damaged = ((rows + top) // 256 == 6) & ((columns + left) // 256 == 8)
    np.testing.assert_array_equal(raw[~damaged], exact[~damaged])
    assert (exact[damaged] == 255).all()  # scripts get no drawing
    assert {*raw[damaged].ravel().tolist()} == {255, 127}  # hatched on the screen alone
    assert layer.data[0].slide.stats()["failed"] == 1


@pytest.mark.parametrize("budget", [0, 3 << 20])
def test_a_cache_smaller_than_the_view_only_costs_time(viewer, monkeypatch, budget):
    [layer] = viewer.open(sample_path(), plugin=PLUGIN)
    before = runtime.default().tiles.budget
    runtime.default().tiles.budget = budget
    try:
        look_at(viewer, layer, 2600, 3300, 1)
        napari_wsigpu.wait(layer, 30)
        np.testing.assert_array_equal(*shown(layer))
    finally:
        runtime.default().tiles.budget = before


def test_removing_a_layer_in_mid_decode_lets_everything_go(viewer, slicing, gate):
    [layer] = viewer.open(sample_path(), plugin=PLUGIN)
    slide = layer.data[0].slide
    gate.clear()
    look_at(viewer, layer, 2600, 3300, 1)
    canvas_of(viewer)
    threading.Timer(0.2, gate.set).start()
    viewer.layers.remove(layer)
    settle()
    assert progressive.display_of(layer) is None
    assert fetching() == []
    assert slide.stats()["display"]["queue"] == 0
    viewer.add_layer(layer)
    look_at(viewer, layer, 2600, 3300, 1)
    napari_wsigpu.wait(layer, 30)
    np.testing.assert_array_equal(*shown(layer))


def test_closing_the_viewer_in_mid_decode_leaves_nothing_behind(new_viewer, slicing, gate):
    [layer] = new_viewer.open(sample_path(), plugin=PLUGIN)
    gate.clear()
    look_at(new_viewer, layer, 2600, 3300, 1)
    canvas_of(new_viewer)
    threading.Timer(0.2, gate.set).start()
    new_viewer.close()
    settle(0.4)
    assert progressive.display_of(layer) is None
    assert fetching() == []


BEGIN = """
import sys, threading, time
import napari, psutil
from qtpy.QtTest import QTest
from qtpy.QtWidgets import QApplication
from napari_wsigpu.codecs import cpu
from napari_wsigpu.viewer.drawing import frame_clock as frames, progressive

path = sys.argv[1]
viewer = napari.Viewer()
[layer] = viewer.open(path, plugin="napari-wsigpu")
decode_tile = cpu.decode_tile
cpu.decode_tile = lambda *tile: time.sleep(0.05) or decode_tile(*tile)
cpu.whole_tile_decoder = lambda batch: None
viewer.scene.camera.center = (0, 2600 * 0.499, 3300 * 0.499)
viewer.scene.camera.zoom = 2
viewer.screenshot(flash=False)
assert any(thread.name == "wsigpu-fetch" for thread in threading.enumerate())
"""
CLOSE_THE_WINDOW = """
viewer.window._qt_window.close()
def is_left():
    yield progressive.display_of(layer) is not None
    yield any(thread.name.startswith("wsigpu") for thread in threading.enumerate())
    yield path in [file.path for file in psutil.Process().open_files()]

end = time.monotonic() + 20
while any(is_left()):
    assert time.monotonic() < end, list(is_left())
    QTest.qWait(20)
print("nothing is left")
"""


REMOVE_THE_FIRST = """
viewer = napari.Viewer()
first, second = (viewer.open(path, plugin="napari-wsigpu")[0] for _ in range(2))
for _ in range(2):
    QApplication.processEvents()
    viewer.layers.remove(first)
    viewer.scene.camera.zoom /= 2
    QApplication.processEvents()
    viewer.screenshot(flash=False)
    first, second = second, viewer.open(path, plugin="napari-wsigpu")[0]
"""
END_WITH_DOCKS = """
for dock in ("Inspector", "Annotate"):
    viewer.window.add_plugin_dock_widget("napari-wsigpu", dock)
QTest.qWait(500)
viewer.scene.camera.zoom = 1
QApplication.processEvents()
"""


def test_windows_slides_and_scripts_may_end_in_mid_decode(tmp_path):
    """napari 0.9.2 alone may end the process when the first of two slides is removed."""
    if not has_display():
        pytest.skip("there is no X display (install Xvfb)")
    path = shutil.copy(sample_path(), tmp_path / "slide.svs")
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + CLOSE_THE_WINDOW + REMOVE_THE_FIRST + END_WITH_DOCKS, path],
        env=os.environ | {"NAPARI_CONFIG": str(tmp_path / "settings.yaml"), "WSIGPU_NATIVE": "off"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "nothing is left" in done.stdout
    assert "Error" not in done.stderr
    assert "Traceback" not in done.stderr


def test_new_data_of_a_layer_are_followed(viewer, write_channels):
    [layer] = viewer.open(sample_path(), plugin=PLUGIN)
    settle()
    with layer.data[0].slide, open_slide(sample_path()) as other:
        layer.data = [other.level_array(each.number, tolerant=True) for each in other.pyramid]
        look_at(viewer, layer, 2600, 3300, 1)
        napari_wsigpu.wait(layer, 30)
        np.testing.assert_array_equal(*shown(layer))
        layer.data = [np.zeros((400, 400, 3), np.uint8), np.zeros((200, 200, 3), np.uint8)]
        settle()
        assert not layer._slice.image.raw.any()
        viewer.layers.clear()


def test_with_other_requests_exact_levels_are_shown_and_the_log_says_so(
    viewer, monkeypatch, caplog
):
    monkeypatch.setattr(requests, "REQUEST", (*requests.REQUEST, "_not_in_this_napari"))
    with caplog.at_level(logging.WARNING):
        [layer] = viewer.open(sample_path(), plugin=PLUGIN)
    assert "only once all tiles are decoded" in caplog.text
    look_at(viewer, layer, 2600, 3300, 1)
    napari_wsigpu.wait(layer, 30)
    np.testing.assert_array_equal(*shown(layer))


def test_wait_reports_errors(viewer, gate):
    [layer] = viewer.open(sample_path(), plugin=PLUGIN)
    picture = viewer.add_image(np.zeros((9, 9)))
    for other in (picture, "slide.svs", None):
        with pytest.raises(LayerError, match="shows no slide"):
            napari_wsigpu.wait(other)
    gate.clear()
    look_at(viewer, layer, 2600, 3300, 1)
    with pytest.raises(DisplayTimeoutError, match=r"within 0.1 s.*increase the timeout"):
        napari_wsigpu.wait(layer, timeout=0.1)
    gate.set()
    napari_wsigpu.wait(layer)
    layer.visible = False
    gate.clear()
    look_at(viewer, layer, 1600, 1300, 1)
    napari_wsigpu.wait(layer, timeout=0.1)


def test_wait_raises_why_tiles_can_not_be_had(viewer, monkeypatch):
    [layer] = viewer.open(sample_path(), plugin=PLUGIN)
    settle()
    slide = layer.data[0].slide

    def broken(keys, cancellation):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(slide.displayed, "read_tiles", broken)
    look_at(viewer, layer, 2600, 3300, 1)
    with pytest.raises(RuntimeError, match="the device is gone"):
        napari_wsigpu.wait(layer, 30)


class Unsteady:
    """Reads tiles of a slide, but fails so many times before."""

    def __init__(self, slide, error, times):
        self.read_tiles = slide.displayed.read_tiles
        self.error, self.left = error, times
        self.asked = []

    def __call__(self, keys, cancellation):
        self.asked.append(time.monotonic())
        if self.left:
            self.left -= 1
            raise self.error
        return self.read_tiles(keys, cancellation)


@pytest.fixture
def unsteady(viewer, monkeypatch):
    """Look at a slide whose tiles fail some times, with pauses that a test can wait for."""
    monkeypatch.setattr(progressive, "FIRST_PAUSE_MS", 50)
    monkeypatch.setattr(progressive, "LONGEST_PAUSE_MS", 200)

    def look(error, times):
        [layer] = viewer.open(sample_path(), plugin=PLUGIN)
        slide = layer.data[0].slide
        settle()
        slide.clear_cache()
        reader = Unsteady(slide, error, times)
        monkeypatch.setattr(slide.displayed, "read_tiles", reader)
        look_at(viewer, layer, 2600, 3300, 1)
        canvas_of(viewer)
        return viewer, layer, reader

    return look


AWAY = SlideReadError("'/slides/of Roe/a.svs' is away; try again later.")
SAID = "'a.svs' is away; try again later."


def test_a_view_that_failed_is_tried_again_by_itself(unsteady, slicing):
    _, layer, reader = unsteady(AWAY, 5)
    display = progressive.display_of(layer)
    assert not display.exact
    end = time.monotonic() + 30
    while not display.exact:
        assert time.monotonic() < end
        settle(0.02)
    pauses = np.diff(reader.asked[:6])
    assert (pauses > [0.045, 0.095, 0.19, 0.19, 0.19]).all()
    assert display.error is None
    np.testing.assert_array_equal(*decoded(layer))
    [warning] = [each for each in notification_manager.records if each.severity == "warning"]
    assert warning.message == f"Some tiles stay blurred until an automatic retry succeeds: {SAID}"


def test_permanent_errors_are_not_retried(unsteady):
    _, layer, reader = unsteady(SlideClosedError("The slide was closed."), 100)
    settle(0.5)
    assert len(reader.asked) == 1
    assert not progressive.display_of(layer).exact


@pytest.mark.parametrize("hide", [False, True])
def test_only_visible_tiles_are_retried(unsteady, hide):
    viewer, layer, reader = unsteady(AWAY, 100)
    end = time.monotonic() + 30
    while len(reader.asked) < 2:
        assert time.monotonic() < end
        settle(0.01)
    if hide:
        layer.visible = False
    else:
        viewer.reset_view()
        canvas_of(viewer)
    settle(0.1)
    asked = len(reader.asked)
    settle(0.5)
    assert len(reader.asked) == asked
    reader.left = 0
    layer.visible = True
    look_at(viewer, layer, 2600, 3300, 1)
    canvas_of(viewer)
    napari_wsigpu.wait(layer, 30)
    np.testing.assert_array_equal(*decoded(layer))


@pytest.mark.parametrize(
    ("slicing", "close"), [("sync", False), ("async", True)], indirect=["slicing"]
)
def test_nothing_is_tried_again_of_a_slide_that_left(unsteady, slicing, close):
    viewer, layer, reader = unsteady(AWAY, 100)
    end = time.monotonic() + 30
    while not reader.asked:
        assert time.monotonic() < end
        settle(0.01)
    if close:
        viewer.close()
    else:
        viewer.layers.remove(layer)
    asked = len(reader.asked)
    settle(0.5)
    assert len(reader.asked) == asked
    assert fetching() == []


@asynchronous
def test_hidden_layers_take_no_tiles_that_others_fetch(viewer, slicing, gate, monkeypatch):
    [layer] = viewer.open(sample_path(), plugin=PLUGIN)
    copied = Layer.create(*layer.as_layer_data_tuple())
    viewer.add_layer(copied)
    settle()
    gate.clear()
    look_at(viewer, layer, 2600, 3300, 0.45)
    canvas_of(viewer)
    layer.visible = False
    gate.set()
    napari_wsigpu.wait(copied, 30)
    settle()
    assert not progressive.display_of(layer).exact
    landed = []
    monkeypatch.setattr(
        progressive.ProgressiveDisplay,
        "deliver",
        lambda display, tiles, deliver=progressive.ProgressiveDisplay.deliver: (
            landed.append(display),
            deliver(display, tiles),
        ),
    )
    for y, x in [(800, 800), (1600, 4000), (4000, 1500), (4000, 5000)]:
        look_at(viewer, copied, y, x, 1)
        napari_wsigpu.wait(copied, 30)
    settle()
    assert set(landed) == {progressive.display_of(copied)}
    layer.visible = True
    napari_wsigpu.wait(layer, 30)
    np.testing.assert_array_equal(*shown(layer))


@asynchronous
def test_a_level_chosen_by_hand_is_shown(viewer, slicing):
    """Its corners are still those of the finer level then, beyond its end."""
    [layer] = viewer.open(sample_path(), plugin=PLUGIN)
    look_at(viewer, layer, 4600, 5600, 1)
    napari_wsigpu.wait(layer, 30)
    for level in (2, 1, 3):
        layer.data_level = level
        settle(0.05)
    look_at(viewer, layer, 2600, 3300, 1)
    napari_wsigpu.wait(layer, 30)
    np.testing.assert_array_equal(*shown(layer))
