"""Pictures that a GPU draws, in a real napari window: the GPU is host memory, OpenGL is Mesa's."""

import gc
import time

import numpy as np
import psutil
import pytest
from napari._app_model import get_app_model
from napari.layers import Layer
from napari.layers.base._base_constants import Blending
from OpenGL import GL
from qtpy import PYSIDE6
from qtpy.QtGui import QOffscreenSurface, QOpenGLContext
from qtpy.QtWidgets import QApplication

import napari_wsigpu
from napari_wsigpu.display.device_picture import DevicePicture
from napari_wsigpu.display.device_pixels import DevicePixels
from napari_wsigpu.model.errors import DeviceError
from napari_wsigpu.slide import runtime
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from napari_wsigpu.viewer.drawing import frame_clock as frames
from napari_wsigpu.viewer.drawing import progressive, texture
from tests.conftest import has_display
from tests.viewer.shared import turn
from tests.viewer.test_progressive import MAGENTA, PLUGIN, canvas_of, look_at, settle
from tests.writers import slides
from tests.writers.icc import PROFILES

PLACE = 2600, 3300, 1


@pytest.fixture
def make_viewer(request):
    if not has_display():
        pytest.skip("there is no X display (install Xvfb)")
    make_napari_viewer = request.getfixturevalue("make_napari_viewer")

    return lambda: make_napari_viewer(show=True, strict_qt=True)


@pytest.fixture
def viewer(viewer):
    """A viewer in which nothing is magenta but the canvas."""
    viewer.canvas.background_color_override = "magenta"
    return viewer


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def gpu(request):
    """What decodes and draws: host memory that poses as a GPU, or one."""
    if request.param == "host":
        request.getfixturevalue("host_gpu")
        return request.param
    try:
        runtime.default().devices.worker(0)
    except DeviceError as error:
        pytest.skip(str(error))
    return request.param


def opened(viewer, device, path=None, color="stored"):
    [layer] = viewer.open(path or sample_path(), plugin=PLUGIN)
    layer.data[0].slide.device = device
    layer.data[0].slide.display_color = color
    look_at(viewer, layer, *PLACE)
    napari_wsigpu.wait(layer, 30)
    return layer


def interop(layer):
    return progressive.display_of(layer).interop


def exact(layer):
    (top, left), (bottom, right) = layer.corner_pixels
    return layer.data[layer.data_level][top : bottom + 1, left : right + 1]


LOOKS = {
    "as it is": {},
    "zoomed out": {"zoom": 0.4},
    "the overview": {"zoom": 0.08},
    "gamma": {"gamma": 0.5},
    "contrast limits": {"contrast_limits": (60, 190)},
    "rotated": {"rotate": 30},
    "interpolated": {"interpolation2d": "cubic"},
    **{str(blending): {"blending": blending, "opacity": 0.6} for blending in Blending},
}
# Where a GPU is host memory, both ways end in the same OpenGL.
ON_HOST = ("as it is", "zoomed out", "the overview", "contrast limits", "rotated", "additive")


def in_looks(viewer, layer, names):
    """Return what is drawn of a layer, looked at in some ways; it looks as before then."""
    drawn = {}
    for name in names:
        look = LOOKS[name]
        before = {key: getattr(layer, key) for key in look if key != "zoom"}
        for key, value in look.items():
            if key != "zoom":
                setattr(layer, key, value)
        look_at(viewer, layer, 900, 1100, look.get("zoom", 1))
        napari_wsigpu.wait(layer, 30)
        drawn[name] = canvas_of(viewer)
        for key, value in before.items():
            setattr(layer, key, value)
    return drawn


def switch_off(layer):
    """Draw a layer on the host from tiles of the same decoder."""
    progressive.display_of(layer)._texture.refuse(DeviceError("Switched off."))


def assert_same(drawn, others):
    for name, expected in others.items():
        np.testing.assert_array_equal(drawn[name], expected, name)


@pytest.mark.parametrize(
    ("gpu", "color"),
    [
        ("host", "srgb"),
        pytest.param("cuda", "stored", marks=pytest.mark.gpu),
        pytest.param("cuda", "srgb", marks=pytest.mark.gpu),
    ],
    indirect=["gpu"],
)
def test_a_layer_looks_the_same_with_interop_and_without(viewer, gpu, tmp_path, color):
    path = tmp_path / "profile.tif"
    options = {"tile": (256, 256), "compression": "jpeg", "iccprofile": PROFILES["table"]}
    slides.write_pyramid(path, slides.picture(1800, 2300), (2, 2, 2), **options, photometric="rgb")
    layer = opened(viewer, "cuda", path, color)
    names = ON_HOST if gpu == "host" else LOOKS
    drawn = in_looks(viewer, layer, names)
    assert interop(layer) == "on"
    np.testing.assert_array_equal(np.asarray(layer._slice.image.raw), exact(layer))
    switch_off(layer)
    settle()
    assert_same(drawn, in_looks(viewer, layer, names))
    assert interop(layer) == "Switched off"
    assert not any((each == MAGENTA).all(axis=-1).all() for each in drawn.values())


def doubled(viewer, layer):
    """Two layers over each other; one was hidden while the view moved."""
    copied = Layer.create(*layer.as_layer_data_tuple())
    viewer.add_layer(copied)
    copied.opacity = 0.5
    copied.translate = np.array(layer.translate) + 100 * np.array(layer.scale)
    look_at(viewer, layer, *PLACE)
    layer.visible = False
    settle()
    look_at(viewer, layer, PLACE[0] - 300, PLACE[1] - 200, 1)
    settle()
    layer.visible = True


def after_a_look_in_3d(viewer, layer):
    look_at(viewer, layer, *PLACE)
    viewer.add_layer(Layer.create(*layer.as_layer_data_tuple()))
    viewer.dims.ndisplay = 3
    settle()
    viewer.dims.ndisplay = 2
    viewer.layers.pop()
    look_at(viewer, layer, *PLACE)


def channels_in_a_grid(viewer, layer):
    viewer.layers.selection.active = layer
    get_app_model().commands.execute_command("napari.layer.split_rgb").result()
    viewer.canvas.grid.enabled = True
    settle()  # they are fitted
    look_at(viewer, viewer.layers[0], *PLACE[:2], 0.3)


@pytest.mark.parametrize("scene", [doubled, after_a_look_in_3d, channels_in_a_grid])
def test_scenes_look_the_same_with_interop_and_without(viewer, gpu, scene):
    scene(viewer, opened(viewer, "cuda"))
    drawn = []
    for way in ("on", "Switched off"):
        settle()
        for each in viewer.layers:
            napari_wsigpu.wait(each, 30)
            assert interop(each) == way
        drawn.append(canvas_of(viewer))
        for each in viewer.layers:
            switch_off(each)
    np.testing.assert_array_equal(*drawn)
    assert not (drawn[0] == MAGENTA).all(axis=-1).all()


def test_pixels_are_copied_to_the_host_only_on_access(viewer, host_gpu, monkeypatch):
    layer = opened(viewer, "cuda")
    settle()  # the overview may be copied in the background
    pixels = layer._slice.image.raw
    assert isinstance(pixels, DevicePixels)
    copied = []
    download = host_gpu.download
    monkeypatch.setattr(
        host_gpu, "download", lambda array, stream: copied.append(1) or download(array, stream)
    )
    for step in range(1, 5):  # over tiles that are there
        look_at(viewer, layer, PLACE[0] + step, PLACE[1] + step, 1)
        QApplication.processEvents()
    assert copied == []
    assert layer.get_value((0, 2600 * 0.499, 3300 * 0.499)[-2:], world=True) is not None
    np.testing.assert_array_equal(np.asarray(layer._slice.image.raw), exact(layer))
    assert copied


def test_a_gpu_is_waited_for_longer(viewer, host_gpu, monkeypatch):
    """A view that it decodes in that time is exact in its first frame."""
    monkeypatch.setattr(frames, "PATIENCE_SECONDS", 0)
    monkeypatch.setattr(frames, "MORE_PATIENCE_SECONDS", 20)
    layer = opened(viewer, "cuda")
    for y, x in [(1200, 1200), (4000, 5000)]:
        layer.data[0].slide.clear_cache()
        look_at(viewer, layer, y, x, 1)
        canvas_of(viewer)
        np.testing.assert_array_equal(np.asarray(layer._slice.image.raw), exact(layer))


def test_tiles_that_land_right_after_a_view_was_drawn_are_shown(make_viewer, host_gpu, monkeypatch):
    viewer = make_viewer()
    layer = opened(viewer, "cuda")
    monkeypatch.setattr(frames, "MORE_PATIENCE_SECONDS", 0)
    compose, waited_for = DevicePicture.compose, []

    def compose_and_wait(picture, *given):
        composed = compose(picture, *given)
        if picture.missing:
            end = time.monotonic() + 20
            while picture.missing and time.monotonic() < end:
                time.sleep(0.001)
            waited_for.append(not picture.missing)
        return composed

    monkeypatch.setattr(DevicePicture, "compose", compose_and_wait)
    layer.data[0].slide.clear_cache()
    look_at(viewer, layer, 1200, 1200, 1)
    canvas_of(viewer)
    settle()
    assert waited_for
    assert all(waited_for)
    np.testing.assert_array_equal(np.asarray(layer._slice.image.raw), exact(layer))


def test_nothing_is_begun_for_later_before_a_frame_is_on_screen(make_viewer, host_gpu, monkeypatch):
    viewer = make_viewer()
    layer = opened(viewer, "cuda")
    fetcher = layer.data[0].slide.runtime.fetcher
    pause_prefetch, said, when_drawn = fetcher.pause_prefetch, [], []
    monkeypatch.setattr(
        fetcher,
        "pause_prefetch",
        lambda seconds: said.append(seconds > 0) or pause_prefetch(seconds),
    )
    draw = viewer.window._qt_viewer.canvas._scene_canvas.events.draw
    draw.connect(lambda event: when_drawn.append(said[-1]), position="last")
    look_at(viewer, layer, 1200, 1200, 1)
    settle()
    assert when_drawn
    assert all(when_drawn)
    assert not said[-1]


def test_where_sharing_fails_the_host_draws(make_viewer, host_gpu):
    viewer = make_viewer()
    viewer.canvas.background_color_override = "magenta"
    asked = []

    def refuse(buffer, size):
        asked.append(buffer)
        raise DeviceError("OpenGL does not draw on 'cuda:0'.")

    host_gpu.shares = refuse
    for _ in range(2):
        layer = opened(viewer, "cuda")
        settle()
        assert interop(layer) == "OpenGL does not draw on 'cuda:0'"
        assert not (canvas_of(viewer) == MAGENTA).all(axis=-1).any()
        look_at(viewer, layer, 2000, 3000, 1)
        napari_wsigpu.wait(layer, 30)
        canvas_of(viewer)
        np.testing.assert_array_equal(np.asarray(layer._slice.image.raw), exact(layer))
        viewer.layers.remove(layer)
    assert len(asked) == 1  # each time costs device memory


def test_a_buffer_that_fails_later_is_given_up(viewer, host_gpu):
    layer = opened(viewer, "cuda")
    before = canvas_of(viewer)
    [shared] = host_gpu.shared_buffers

    def write(address, size):
        raise DeviceError("The context is lost.")

    shared.write = write
    layer.refresh()
    settle()
    np.testing.assert_array_equal(canvas_of(viewer), before)
    assert interop(layer) == "The context is lost"


def broken(*arguments, **named):
    raise DeviceError("The GPU is gone.")


@pytest.mark.parametrize("what", ["paste_scaled", "download", "share"])
def test_whatever_fails_the_layer_is_never_black(viewer, host_gpu, monkeypatch, what):
    """What draws on the device, what copies from it where textures can't be filled, or both."""
    layer = opened(viewer, "cuda")
    expected = canvas_of(viewer)
    if what != "paste_scaled":
        monkeypatch.setattr(host_gpu.shared_buffers[0], "write", broken)
    if what == "download":
        monkeypatch.setattr(DevicePixels, "host", property(broken))
    if what == "paste_scaled":
        monkeypatch.setattr(host_gpu, "paste_scaled", broken)
    layer.refresh()
    canvas_of(viewer)
    settle()
    napari_wsigpu.wait(layer, 30)
    assert interop(layer) == "The GPU is gone"
    np.testing.assert_array_equal(canvas_of(viewer), expected)
    assert isinstance(layer._slice.image.raw, DevicePixels if what == "share" else np.ndarray)


def test_where_tiles_can_not_be_read_to_the_device_the_host_draws(viewer, host_gpu, monkeypatch):
    layer = opened(viewer, "cuda")
    assert interop(layer) == "on"
    monkeypatch.setattr("napari_wsigpu.reading.on_device.TilesOnDevice.read", broken)
    layer.data[0].slide.clear_cache()
    look_at(viewer, layer, 2000, 3000, 1)
    settle()
    napari_wsigpu.wait(layer, 30)
    canvas_of(viewer)
    assert interop(layer) == "The GPU is gone"
    np.testing.assert_array_equal(np.asarray(layer._slice.image.raw), exact(layer))


def test_doctor_probes_the_opengl_renderer(viewer, host_gpu, monkeypatch):
    monkeypatch.setattr("napari_wsigpu.gpu.device.cuda.CudaDevice", lambda index: host_gpu)
    found = texture.probe()
    assert found["version"]
    assert "reason" not in found
    assert host_gpu.shared_buffers[-1].closed
    host_gpu.shares = broken
    assert texture.probe() == {"version": found["version"], "reason": "The GPU is gone"}


def test_slides_that_come_and_go_leave_no_device_memory(make_viewer, host_gpu):
    viewer = make_viewer()
    for _ in range(2):
        layer = opened(viewer, "cuda")
        canvas_of(viewer)
        viewer.layers.remove(layer)
        del layer
        turn()
        gc.collect()
        assert sum(type(found) is DevicePixels for found in gc.get_objects()) <= 1
        assert host_gpu.live == 0
    [shared] = host_gpu.shared_buffers
    assert not shared.closed
    beside = Beside(viewer)
    assert beside.has(shared.buffer)
    viewer.close()
    turn()
    assert shared.closed
    assert not beside.has(shared.buffer)


class Beside:
    """A context that shares the objects of a viewer's, and outlives it."""

    def __init__(self, viewer):
        self.context, self.surface = QOpenGLContext(), QOffscreenSurface()
        window = viewer.window._qt_viewer.canvas.native.context()
        self.context.setShareContext(window)
        self.context.setFormat(window.format())
        assert self.context.create()
        self.surface.setFormat(window.format())
        self.surface.create()

    def has(self, buffer):
        assert self.context.makeCurrent(self.surface)
        found = bool(GL.glIsBuffer(buffer))
        self.context.doneCurrent()
        return found


@pytest.mark.skipif(
    PYSIDE6, reason="with PySide6, napari cannot draw in a window after another one was closed"
)
def test_two_viewers_have_a_buffer_each(make_viewer, host_gpu):
    first, second = make_viewer(), make_viewer()
    one, other = opened(first, "cuda"), opened(second, "cuda")
    canvas_of(first), canvas_of(second)
    assert interop(one) == interop(other) == "on"
    assert len(host_gpu.shared_buffers) == 2
    second.close()
    settle()
    look_at(first, one, 2400, 3000, 1)
    napari_wsigpu.wait(one, 30)
    assert interop(one) == "on"
    np.testing.assert_array_equal(np.asarray(one._slice.image.raw), exact(one))


def held(viewer):
    """Return what is held: bytes on the device, textures, open files, threads."""
    import cupy

    gc.collect()
    viewer.window._qt_viewer.canvas._scene_canvas.set_current()
    free, _ = cupy.cuda.runtime.memGetInfo()
    process = psutil.Process()
    return {
        "device": -free,
        "textures": sum(bool(GL.glIsTexture(name)) for name in range(1, 5000)),
        "files": process.num_fds(),
        "threads": process.num_threads(),
    }


@pytest.mark.gpu
@pytest.mark.parametrize("gpu", ["cuda"], indirect=True)
def test_slides_that_come_and_go_leave_nothing_on_a_gpu(viewer, gpu):
    counts = []
    for cycle in range(200):
        layer = opened(viewer, "cuda")
        assert interop(layer) == "on"
        viewer.layers.remove(layer)
        del layer
        settle(0.02)
        if cycle in (19, 199):
            settle()
            counts.append(held(viewer))
    before, after = counts
    assert all(after[name] <= before[name] for name in before), counts
