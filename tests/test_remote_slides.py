"""Slides on servers have the same pixels and facts as on disk, and need few requests."""

import logging
import multiprocessing
import pickle
import shutil
import time
from base64 import b64encode
from itertools import pairwise

import numpy as np
import pytest
import tifffile

from napari_wsigpu import open_slide
from napari_wsigpu.cli import main
from napari_wsigpu.formats import describe as describing
from napari_wsigpu.model.errors import (
    CorruptSlideError,
    DeviceError,
    NotASlideError,
    SlideChangedError,
    SlideClosedError,
    SlideNotFoundError,
    SlidePermissionError,
    SlideReadError,
    TileError,
    UnsupportedSlideError,
)
from napari_wsigpu.storage.remote import connection, disk_cache
from tests.conftest import decoding_threads, shared_slide
from tests.fakes.rangeserver import RangeServer, break_off, status
from tests.writers import slides, sparse

SECRETS = "?X-Amz-Signature=SECRET"
LATENCY = 0.05


@pytest.fixture(autouse=True)
def empty_caches():
    yield
    disk_cache.disk_cache().clear()
    assert decoding_threads() == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    slides.write_aperio(folder / "a slide.svs", slides.picture(700, 900))
    sparse.write(folder / "large.svs")
    sparse.write(folder / "large cog.svs", in_front=True)
    return folder


@pytest.fixture
def server(folder):
    with RangeServer(folder) as server:
        yield server


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(connection, "RETRIES", 1)
    monkeypatch.setattr(connection, "PAUSES", (0.01, 0.01))


def test_a_slide_is_the_same_as_on_disk(server, folder):
    with (
        open_slide(folder / "a slide.svs", device="cpu") as local,
        open_slide(server.url("a%20slide.svs"), device="cpu") as slide,
    ):
        assert slide.path == server.url("a%20slide.svs")
        assert slide.metadata == local.metadata
        assert slide.level_dimensions == local.level_dimensions
        assert slide.layout.problems == local.layout.problems
        for level, expected in zip(slide.levels, local.levels, strict=True):
            np.testing.assert_array_equal(level[...], expected[...])
        assert set(slide.associated_images) == set(local.associated_images) != set()
        for name, image in slide.associated_images.items():
            np.testing.assert_array_equal(image.read(), local.associated_images[name].read())


@pytest.mark.parametrize(
    "name",
    [
        "CMU-1-Small-Region.svs",
        "CMU-1-JP2K-Region.svs",
        "openslide-boxes.tiff",
        "rasterio-cogeo.tif",
        "minerva-2048_ome6_tiled.ome.tif",
        "ndpi-test3-DAPI-387.ndpi",
    ],
)
def test_real_slides_are_the_same_as_on_disk(name):
    path = shared_slide(name)
    with (
        RangeServer(path.parent) as server,
        open_slide(path, device="cpu") as local,
        open_slide(server.url(name), device="cpu") as slide,
    ):
        assert (slide.vendor, slide.metadata) == (local.vendor, local.metadata)
        assert slide.layout.problems == local.layout.problems
        assert slide.level_dimensions == local.level_dimensions
        for level, expected in zip(slide.levels[-2:], local.levels[-2:], strict=True):
            np.testing.assert_array_equal(level[:2048, :2048], expected[:2048, :2048])
        for key, image in local.associated_images.items():
            np.testing.assert_array_equal(slide.associated_images[key].read(), image.read())


def test_an_overview_is_not_taken_for_an_olympus_slide():
    path = shared_slide("found/vsi-ets-test-jpg2k.vsi")
    with (
        RangeServer(path.parent) as server,
        pytest.raises(UnsupportedSlideError, match="an Olympus slide with tiles in other"),
    ):
        open_slide(server.url(path.name))


class TestFirstView:
    """The first view of a slide of one gigabyte on a server with a latency of 50 ms."""

    @staticmethod
    def view(url):
        """Open a slide and read the level that a screen shows at first; return it and seconds."""
        begin = time.perf_counter()
        with open_slide(url, device="cpu") as slide:
            level = slide.level_count - 1
            pixels = slide.read_region((0, 0), (1200, 950), level)
            seconds = time.perf_counter() - begin
            detail = slide.read_region((20000, 100), (1024, 512))
        return pixels, detail, seconds

    @pytest.mark.parametrize(
        ("name", "header", "most"), [("large.svs", 8, 15), ("large%20cog.svs", 3, 15)]
    )
    def test_takes_few_requests(self, server, folder, name, header, most):
        path = folder / name.replace("%20", " ")
        assert path.stat().st_size > 1e9
        server.latency = LATENCY
        describing.describe(server.url(name))
        assert len(server.requests) <= header
        disk_cache.disk_cache().clear()
        server.requests.clear()
        pixels, detail, seconds = self.view(server.url(name))
        assert len(server.requests) <= most
        assert sum(request.length for request in server.requests) < 8 << 20
        assert seconds < 5  # much less unless the machine does other things as well
        with tifffile.TiffFile(path) as file:
            np.testing.assert_array_equal(pixels[:950, :1024], file.pages[-1].asarray()[:950])
        with open_slide(path, device="cpu") as local:
            np.testing.assert_array_equal(detail, local.read_region((20000, 100), (1024, 512)))

        server.requests.clear()
        again, detail_again, _ = self.view(server.url(name))
        assert len(server.requests) == 1  # which asks for the version
        np.testing.assert_array_equal(again, pixels)
        np.testing.assert_array_equal(detail_again, detail)

    def test_without_a_cache_on_disk(self, server, monkeypatch):
        monkeypatch.setattr(disk_cache.disk_cache(), "budget", 0)
        for _ in range(2):
            server.requests.clear()
            self.view(server.url("large.svs"))
            assert 3 < len(server.requests) <= 15
        assert not list(disk_cache.disk_cache().folder.glob("*/*"))


class TestOneConnection:
    """A slide is read with the connection that has read its header."""

    def test_no_byte_is_requested_twice(self, server, monkeypatch):
        monkeypatch.setattr(disk_cache.disk_cache(), "budget", 0)
        with open_slide(server.url("a%20slide.svs"), device="cpu") as slide:
            assert "wsigpu-remote" in decoding_threads()
            slide.read_region((0, 0), (900, 700))
        asked = sorted((request.begin, request.end) for request in server.requests)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(asked))

    def test_failed_open_leaves_no_thread(self, server):
        with pytest.raises(DeviceError):
            open_slide(server.url("a%20slide.svs"), device="abacus")
        assert decoding_threads() == []

    def test_describing_leaves_no_thread(self, server):
        describing.describe(server.url("a%20slide.svs"))
        assert decoding_threads() == []


@pytest.mark.parametrize("sides", [(300, 900), (900, 300)])
def test_a_slide_that_changed_is_read_when_it_is_opened_again(server, tmp_path, sides):
    path = tmp_path / "x.svs"
    server.folder = tmp_path
    slides.write_aperio(path, slides.picture(sides[0], sides[0]))
    with open_slide(server.url("x.svs"), device="cpu") as slide:
        slides.write_aperio(path, slides.picture(sides[1], sides[1]))
        server.etag = '"two"'
        slide.release()
        disk_cache.disk_cache().clear()
        with pytest.raises(SlideChangedError, match="open the slide again"):
            slide.read_region((sides[0] - 200, sides[0] - 200), (200, 200))
        with open_slide(server.url("x.svs"), device="cpu") as again:
            found = again.levels[0][...]
    with open_slide(path, device="cpu") as local:
        np.testing.assert_array_equal(found, local.levels[0][...])


def test_tiles_survive_broken_connections(server, folder):
    with open_slide(server.url("a%20slide.svs"), device="cpu") as slide:
        server.troubles = [break_off(), status(503), break_off(9)]
        disk_cache.disk_cache().clear()
        slide.release()
        pixels = slide.levels[0][...]
        assert server.troubles == []
        with open_slide(folder / "a slide.svs", device="cpu") as local:
            np.testing.assert_array_equal(pixels, local.levels[0][...])


def test_a_server_that_goes_away(quick, server, folder):
    with open_slide(server.url("large.svs") + SECRETS, device="cpu") as slide:
        server.always = status(500)
        with pytest.raises(SlideReadError, match="internal error") as caught:
            slide.read_region((20000, 0), (512, 512))
        assert "SECRET" not in str(caught.value)
        with pytest.raises(SlideReadError, match="internal error"):
            slide.level_array(0, tolerant=True)[0:256, 20224:20480]
        server.always = None
        with open_slide(folder / "large.svs", device="cpu") as local:
            expected = local.levels[0][0:256, 20224:20480]
        np.testing.assert_array_equal(
            slide.level_array(0, tolerant=True)[0:256, 20224:20480], expected
        )


@pytest.mark.parametrize(
    ("code", "kind"),
    [(403, SlidePermissionError), (404, SlideNotFoundError)],
)
def test_no_server_that_fails_is_shown_as_background(quick, server, folder, code, kind):
    with (
        open_slide(server.url("large.svs"), device="cpu") as slide,
        open_slide(folder / "large.svs", device="cpu") as local,
    ):
        level = slide.level_array(0, tolerant=True)
        server.always = status(code)
        with pytest.raises(kind, match=r"large\.svs"):
            level[:600, :600]
        server.always, server.ranges = None, False
        with pytest.raises(UnsupportedSlideError, match="download the whole slide"):
            level[:600, :600]
        server.ranges = True
        np.testing.assert_array_equal(level[:600, :600], local.levels[0][:600, :600])
        assert slide.stats()["failed"] == 0


def test_a_header_is_read_wholly_or_not_at_all(quick, server):
    """The parser treats an unreadable tag as missing."""
    url = server.url("large.svs")
    describing.describe(url)
    needed = len(server.requests)
    assert needed > 2
    for sound in range(needed):
        disk_cache.disk_cache().clear()
        server.requests.clear()
        server.trouble_from = sound
        with pytest.raises(SlideReadError, match="internal error"):
            open_slide(url)
        assert len(server.requests) > sound


def test_no_secret_is_shown(server, caplog, capsys, tmp_path):
    caplog.set_level(logging.DEBUG)
    url = server.url("a%20slide.svs").replace("//", "//user:SECRET@") + SECRETS
    with open_slide(url, device="cpu") as slide:
        slide.read_region((0, 0), (100, 100))
        told = [
            slide.path,
            repr(slide),
            repr(slide.layout),
            str(slide.metadata),
            str(slide.stats()),
        ]
        told += map(repr, (slide.levels, slide.associated_images))
    with pytest.raises(SlideClosedError) as caught:
        slide.read_region((0, 0), (100, 100))
    assert main(["info", "--json", url]) == 0
    assert main(["info", url.replace("slide", "missing")]) == 1
    out, err = capsys.readouterr()
    told += [str(caught.value), caplog.text, out, err]
    assert "SECRET" not in " ".join(told)
    assert server.url("a%20slide.svs") in out
    login = f"Basic {b64encode(b'user:SECRET').decode()}"
    assert {request.headers["authorization"] for request in server.requests} == {login}
    assert all(request.path.endswith(SECRETS) for request in server.requests)


def read_in_another_process(data, queue):
    with pickle.loads(data) as slide:
        queue.put(slide.read_region((10, 10), (300, 200)))


def test_a_pickled_slide_opens_in_another_process(server):
    with open_slide(server.url("a%20slide.svs") + SECRETS, device="cpu") as slide:
        data = pickle.dumps(slide)
        assert repr(pickle.loads(data).layout).count("SECRET") == 0
        expected = slide.read_region((10, 10), (300, 200))
        server.requests.clear()
        disk_cache.disk_cache().clear()
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        process = context.Process(target=read_in_another_process, args=(data, queue))
        process.start()
        np.testing.assert_array_equal(queue.get(timeout=60), expected)
        process.join()
    assert server.requests
    assert all(request.path.endswith(SECRETS) for request in server.requests)


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        (b"no slide", NotASlideError, "is not a TIFF or DICOM slide"),
        (
            bytes(128) + b"DICM" + bytes(99),
            NotASlideError,
            "is a DICOM file, but not a whole-slide",
        ),
        (b"ZISRAWFILE" + bytes(99), NotASlideError, "is not a TIFF or DICOM slide"),
        (
            b"II*\0\xff\xff\xff\x7f",
            CorruptSlideError,
            "is truncated: its list of images starts beyond",
        ),
        (b"", NotASlideError, "is empty"),
    ],
)
def test_other_files_are_refused(tmp_path, content, kind, words):
    (tmp_path / "x.svs").write_bytes(content)
    with RangeServer(tmp_path) as server, pytest.raises(kind, match=words) as caught:
        open_slide(server.url("x.svs") + SECRETS)
    assert f"'{server.url('x.svs')}'" in str(caught.value)


def test_a_damaged_tile(server, folder, tmp_path):
    path = tmp_path / "cut.svs"
    shutil.copy(folder / "a slide.svs", path)
    with tifffile.TiffFile(path) as file:
        page = file.pages.first
        first = page.dataoffsets[0]
    with path.open("r+b") as stream:
        stream.seek(first)
        stream.write(bytes(50))
    server.folder = tmp_path
    with open_slide(server.url("cut.svs"), device="cpu") as slide, pytest.raises(TileError):
        slide.read_region((0, 0), (10, 10))


@pytest.fixture(scope="module")
def bucket(folder):
    """A client of a server that speaks S3, with a slide in a bucket."""
    boto3 = pytest.importorskip("boto3")
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "SECRETID",
        "AWS_SECRET_ACCESS_KEY": "SECRETKEY",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        client = boto3.client("s3")
        client.create_bucket(Bucket="slides")
        client.upload_file(str(folder / "a slide.svs"), "slides", "some folder/a slide.svs")
        yield client
        client.close()
    server.stop()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
class TestObjectStore:
    @pytest.mark.parametrize("key", ["some folder/a slide.svs", "some%20folder/a%20slide.svs"])
    def test_slides_of_a_bucket(self, bucket, folder, key):
        with (
            open_slide(f"s3://slides/{key}", device="cpu") as slide,
            open_slide(folder / "a slide.svs", device="cpu") as local,
        ):
            assert slide.path == f"s3://slides/{key}"
            np.testing.assert_array_equal(slide.levels[0][...], local.levels[0][...])
            again = pickle.loads(pickle.dumps(slide))
            np.testing.assert_array_equal(again.levels[1][...], local.levels[1][...])
            again.close()
            assert "SECRET" not in f"{slide} {slide.layout}"

    def test_presigned_links(self, bucket, folder):
        url = bucket.generate_presigned_url(
            "get_object", {"Bucket": "slides", "Key": "some folder/a slide.svs"}
        )
        assert "Signature" in url
        with open_slide(url, device="cpu") as slide:
            assert slide.path == url.partition("?")[0]
            assert slide.read_region((0, 0), (10, 10)).shape == (10, 10, 3)

    def test_missing_object(self, bucket):
        with pytest.raises(FileNotFoundError, match=r"There is no file at 's3://slides/none.svs'"):
            open_slide("s3://slides/none.svs")
