"""A slide on a server in a viewer: few requests, no wait, no secret on screen."""

import time

import numpy as np
import pytest
from napari.utils.notifications import notification_manager
from qtpy.QtWidgets import QApplication

import napari_wsigpu
from napari_wsigpu.model.errors import SlideError, SlideNotFoundError
from napari_wsigpu.storage.remote.disk_cache import disk_cache
from napari_wsigpu.viewer.contributions.slide_reader import get_reader, read_slides
from napari_wsigpu.viewer.drawing import progressive
from napari_wsigpu.viewer.drawing.progressive import display_of
from napari_wsigpu.viewer.layers.slide_layers import slide_of
from tests.conftest import decoding_threads
from tests.fakes.rangeserver import RangeServer, status
from tests.writers import sparse

SECRETS = "?X-Amz-Signature=" + 50 * "SECRET"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    sparse.write(folder / "a slide.svs")
    (folder / "x.txt").write_text("no slide")
    return folder


@pytest.fixture
def server(folder):
    with RangeServer(folder) as server:
        server.latency = 0.05
        yield server
    disk_cache().clear()


def test_takes_urls_of_slides(server):
    for name in ("a%20slide.svs", "missing.svs", "missing.txt"):
        assert get_reader(server.url(name) + SECRETS) is read_slides
    assert get_reader(server.url("x.txt") + SECRETS) is None
    with pytest.raises(SlideNotFoundError, match="There is no file"):
        read_slides(server.url("missing.svs") + SECRETS)


def test_a_slide_is_described_once_for_each_time_that_it_is_opened(server):
    url = server.url("a%20slide.svs")
    for etag in ('"one"', '"two"'):
        server.etag = etag
        server.requests.clear()
        reader = get_reader(url)
        asked = len(server.requests)
        assert asked
        [(levels, *_)] = reader(url)
        assert len(server.requests) == asked
        with levels[0].slide as slide:
            assert slide.layout.remote.version.endswith(etag)
    [(levels, *_)] = reader(url)
    assert len(server.requests) > asked
    levels[0].slide.close()


def test_the_first_view_takes_few_requests(viewer, server):
    viewer.window.resize(1200, 950)
    QApplication.processEvents()
    [layer] = viewer.open(server.url("a%20slide.svs") + SECRETS, plugin="napari-wsigpu")
    napari_wsigpu.wait(layer)
    assert len(server.requests) <= 15
    slide = slide_of(layer)
    assert layer.name == "a slide"
    assert layer.source.path == slide.path == server.url("a%20slide.svs")
    assert layer.source.reader_plugin == "napari-wsigpu"
    assert "SECRET" not in f"{layer} {layer.metadata} {layer.get_source_str()}"
    with napari_wsigpu.open_slide(server.folder / "a slide.svs", device="cpu") as local:
        np.testing.assert_array_equal(np.asarray(layer.data[-1]), local.levels[-1][...])


def test_a_slow_server_is_not_waited_for(viewer, server):
    [layer] = viewer.open(server.url("a%20slide.svs"), plugin="napari-wsigpu")
    napari_wsigpu.wait(layer)
    server.latency = 30
    asked = len(server.requests)
    begin = time.perf_counter()
    viewer.scene.camera.zoom = 1.0
    end = begin + 20
    while len(server.requests) == asked:
        assert time.perf_counter() < end
        QApplication.processEvents()
    assert not display_of(layer).exact
    viewer.layers.clear()
    assert time.perf_counter() < end
    assert decoding_threads() == []
    assert [item for item in notification_manager.records if item.severity == "warning"] == []


def expire(server):
    server.always = status(403)


def lose(server):
    server.always = status(404)


def send_no_parts(server):
    server.ranges = False


@pytest.mark.parametrize("fail", [expire, lose, send_no_parts])
def test_a_server_that_fails_for_a_while_leaves_nothing_white(viewer, server, monkeypatch, fail):
    monkeypatch.setattr(progressive, "FIRST_PAUSE_MS", 50)
    [layer] = viewer.open(server.url("a%20slide.svs"), plugin="napari-wsigpu")
    napari_wsigpu.wait(layer)
    fail(server)
    scale = layer.scale[-2:]
    viewer.scene.camera.center = (0, 300 * scale[0], 300 * scale[1])
    viewer.scene.camera.zoom = 1 / scale[0]
    for _ in range(3):
        with pytest.raises(SlideError):
            napari_wsigpu.wait(layer)
        assert not display_of(layer).exact
    server.always, server.ranges = None, True
    end = time.perf_counter() + 30
    while not display_of(layer).exact:
        assert time.perf_counter() < end
        QApplication.processEvents()
    napari_wsigpu.wait(layer)
    (top, left), (bottom, right) = layer.corner_pixels
    assert layer.data_level == 0
    with napari_wsigpu.open_slide(server.folder / "a slide.svs", device="cpu") as local:
        exact = local.levels[0][top : bottom + 1, left : right + 1]
    np.testing.assert_array_equal(np.asarray(layer._slice.image.raw), exact)
    [warning] = [item for item in notification_manager.records if item.severity == "warning"]
    assert warning.message.startswith("Some tiles stay blurred until an automatic retry succeeds")
