"""Slides on DICOMweb servers equal their files, and need few requests."""

import json
import logging
import os
import pickle
import subprocess
import sys
from base64 import b64encode

import numpy as np
import pytest

pytest.importorskip("pydicom")
pytest.importorskip("wsidicom")
pytest.importorskip("obstore")

from pydicom import dcmread

from napari_wsigpu import open_slide, set_request_headers
from napari_wsigpu.conversion import convert
from napari_wsigpu.formats.describe import describe
from napari_wsigpu.model.errors import (
    CorruptSlideError,
    NotASlideError,
    SlideChangedError,
    SlideClosedError,
    SlideError,
    SlideNotFoundError,
    SlidePermissionError,
    SlideReadError,
    TileError,
    UnsupportedSlideError,
)
from napari_wsigpu.model.limits import limits
from napari_wsigpu.slide.facts import level_facts, levels_in_short
from napari_wsigpu.storage.remote import disk_cache, http_store
from napari_wsigpu.storage.remote.url import is_dicomweb
from tests.conftest import decoding_threads
from tests.fakes.dicomwebserver import DicomWebServer, frames_of, multipart, respond
from tests.fakes.rangeserver import RangeServer, redirect, status
from tests.test_remote_slides import quick as quick
from tests.writers import dicomslides, slides

PIXELS = slides.picture(300, 500)
SMALL, SMALL_GRAY = slides.picture(130, 150), slides.picture(130, 150, 1)
KINDS = dicomslides.KINDS | dicomslides.FURTHER
FRAMES_TYPE = 'multipart/related; type="image/jpeg"; boundary="a boundary"'


@pytest.fixture(autouse=True)
def empty_caches():
    yield
    disk_cache.disk_cache().clear()
    assert decoding_threads() == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A pyramid of JPEGs with an uncompressed label."""
    folder = tmp_path_factory.mktemp("dicom")
    dicomslides.write_slide(folder, PIXELS)
    label = dicomslides.instance(slides.picture(64, 50), "raw", flavor="LABEL")
    dicomslides.save(folder / "label.dcm", label)
    return folder


@pytest.fixture
def server(folder):
    with served(folder) as server:
        yield server


def served(folder):
    return DicomWebServer(folder, [dcmread(path) for path in sorted(folder.glob("*.dcm"))])


def same_pixels(slide, local):
    assert slide.level_dimensions == local.level_dimensions
    for level, expected in zip(slide.levels, local.levels, strict=True):
        np.testing.assert_array_equal(level[...], expected[...])
    assert set(slide.associated_images) == set(local.associated_images)
    for name, image in slide.associated_images.items():
        np.testing.assert_array_equal(image.read(), local.associated_images[name].read())
        assert image.icc_profile == local.associated_images[name].icc_profile


def same_facts(slide, local):
    file_meta = {
        "FileMetaInformationGroupLength", "ImplementationClassUID", "ImplementationVersionName",
        "MediaStorageSOPClassUID", "MediaStorageSOPInstanceUID",
    }  # fmt: skip
    expected = {
        key: value for key, value in local.metadata["dicom"].items() if key not in file_meta
    }
    assert slide.metadata["dicom"] == expected
    assert slide.metadata["dicom"]["PatientName"] == "Müller^Ada"
    for name in ("vendor", "mpp", "objective", "planes", "icc_profile", "channels"):
        assert getattr(slide, name) == getattr(local, name)
    for name in ("scanner", "scan_date", "barcode", "problems", "rgb", "background"):
        assert getattr(slide.layout, name) == getattr(local.layout, name)


@pytest.mark.parametrize(
    "options",
    [{}, {"chunked": True}, {"strict": True}, {"names_syntax": False}, {"bulk": 64}],
    ids=str,
)
def test_a_series_is_the_same_as_its_files(server, folder, options):
    vars(server).update(options)
    with (
        open_slide(folder, device="cpu") as local,
        open_slide(server.series_url, device="cpu") as slide,
    ):
        assert slide.path == server.series_url
        assert slide.icc_profile == dicomslides.ICC
        same_pixels(slide, local)
        same_facts(slide, local)
        slide.release()
        same_pixels(slide, local)
        with pickle.loads(pickle.dumps(slide)) as again:
            same_pixels(again, local)


@pytest.mark.parametrize("kind", KINDS)
def test_each_encoding(tmp_path, kind):
    pixels = SMALL_GRAY if "gray" in kind else SMALL
    path = dicomslides.save(tmp_path / "a.dcm", dicomslides.instance(pixels, kind))
    with (
        served(tmp_path) as server,
        open_slide(path, device="cpu") as local,
    ):
        server.strict = True
        with open_slide(server.series_url, device="cpu") as slide:
            same_pixels(slide, local)


def several_files(folder, **options):
    for number, (first, past) in enumerate([(0, 11), (11, 27), (27, 40)], start=1):
        part = dicomslides.instance(PIXELS, part=(first, past, number), **options)
        dicomslides.save(folder / f"{number}.dcm", part)


def planes_and_paths(folder):
    planes = [slides.picture(100, 150, 1) // (index + 1) for index in range(4)]
    dataset = dicomslides.instance(planes[0], "raw gray")
    dataset.OpticalPathSequence = [dicomslides.item(OpticalPathIdentifier=name) for name in "AB"]
    dataset.NumberOfOpticalPaths = dataset.TotalPixelMatrixFocalPlanes = 2
    measures = dataset.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
    measures.SpacingBetweenSlices = 0.002
    frames = [tile for plane in planes for tile in dicomslides.tiles_of(plane)]
    dataset.NumberOfFrames = len(frames)
    dataset.PixelData = b"".join(tile.tobytes() for tile in frames)
    dicomslides.save(folder / "a.dcm", dataset)


def planar(folder):
    dataset = dicomslides.instance(PIXELS, "raw", PlanarConfiguration=1)
    frames = [dicomslides.planar(tile) for tile in dicomslides.tiles_of(PIXELS)]
    dataset.PixelData = b"".join(frames)
    dicomslides.save(folder / "a.dcm", dataset)


def sparse_paths_and_depths(folder):
    """Save frames that name optical path and depth one by one, without shared measures."""
    dataset = dicomslides.instance(SMALL_GRAY, "jpeg gray", sparse=True, missing=(3, 7))
    measures = dataset.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence
    del dataset.SharedFunctionalGroupsSequence
    for group in dataset.PerFrameFunctionalGroupsSequence:
        group.PixelMeasuresSequence = measures
        group.OpticalPathIdentificationSequence = [dicomslides.item(OpticalPathIdentifier="0")]
        group.PlanePositionSlideSequence[0].ZOffsetInSlideCoordinateSystem = 0.5
    dicomslides.save(folder / "a.dcm", dataset)


def palette(folder):
    table = np.arange(256, dtype="<u2") * 257
    attributes = {"PhotometricInterpretation": "PALETTE COLOR"}
    for number, color in enumerate(("Red", "Green", "Blue"), start=1):
        attributes[f"{color}PaletteColorLookupTableDescriptor"] = [256, 0, 16]
        attributes[f"{color}PaletteColorLookupTableData"] = (table // number).tobytes()
    dicomslides.save(folder / "a.dcm", dicomslides.instance(SMALL_GRAY, "raw gray", **attributes))


@pytest.mark.parametrize(
    "write",
    [
        several_files,
        lambda folder: several_files(folder, sparse=True),
        planes_and_paths,
        planar,
        sparse_paths_and_depths,
        palette,
    ],
)
def test_the_structure_of_an_instance(tmp_path, write):
    write(tmp_path)
    with (
        served(tmp_path) as server,
        open_slide(tmp_path, device="cpu") as local,
        open_slide(server.series_url, device="cpu") as slide,
    ):
        same_pixels(slide, local)
        assert slide.layout.problems == local.layout.problems
        assert (slide.planes, slide.mpp) == (local.planes, local.mpp)
        for z in range(slide.planes.size_z):
            np.testing.assert_array_equal(
                slide.plane(z).levels[0][...], local.plane(z).levels[0][...]
            )


@pytest.mark.parametrize("kind", ["jpeg ycbcr", "jpeg 2000 rct"])
@pytest.mark.filterwarnings("ignore")
def test_wsidicom_reads_the_same(tmp_path, kind):
    pytest.importorskip("dicomweb_client")
    from wsidicom import WsiDicom, WsiDicomWebClient

    dicomslides.write_slide(tmp_path, PIXELS, kind=kind)
    with served(tmp_path) as server:
        server.strict = True
        first = next(iter(server.instances.values()))
        client = WsiDicomWebClient.create_client(server.root)
        with (
            WsiDicom.open_web(client, first.StudyInstanceUID, first.SeriesInstanceUID) as other,
            open_slide(server.series_url, device="cpu") as slide,
        ):
            assert slide.level_count == len(other.levels) == 3
            for number, level in enumerate(slide.levels):
                size = level.shape[1], level.shape[0]
                expected = np.asarray(other.read_region((0, 0), number, size))
                np.testing.assert_array_equal(level[...], expected)
            assert slide.mpp[0] == pytest.approx(other.levels[0].mpp.width)
        client._client._session.close()


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    pixels = slides.picture(2048, 2048)
    dicomslides.save(folder / "a.dcm", dicomslides.instance(pixels, "jpeg rgb", side=256))
    return folder


class TestRequests:
    def test_a_view_takes_few(self, large):
        with served(large) as server, open_slide(server.series_url, device="cpu") as slide:
            assert len(server.requests) == 2  # the metadata and a first frame
            server.requests.clear()
            slide.read_region((0, 0), (2048, 2048))
            assert len(server.frame_requests) == 4
            assert [path.count(",") for path in server.frame_requests] == [15] * 4
            slide.release()
            slide.read_region((300, 300), (900, 900))
            assert len(server.requests) == 4  # the disk cache has all frames

    def test_no_frame_is_requested_twice(self, large, monkeypatch):
        monkeypatch.setattr(disk_cache.disk_cache(), "budget", 0)
        with served(large) as server, open_slide(server.series_url, device="cpu") as slide:
            server.requests.clear()
            for left in (0, 100, 500, 100):
                slide.read_region((left, 0), (600, 600))
            asked = [n for path in server.frame_requests for n in path.split("/")[-1].split(",")]
            assert len(set(asked)) == len(asked)

    def test_that_are_refused_open_no_slide_twice(self, server, quick):
        server.always = status(404)
        with pytest.raises(SlideNotFoundError):
            open_slide(server.series_url)
        assert len(server.requests) == 1

    def test_a_closed_slide_sends_none(self, server):
        slide = open_slide(server.series_url, device="cpu")
        slide.close()
        server.requests.clear()
        with pytest.raises(SlideClosedError):
            slide.levels[0][...]
        assert not server.requests


class TestSecrets:
    def test_are_sent_to_the_server_only(self, folder, server):
        login = server.series_url.replace("//", "//user:SECRET@") + "?token=SECRET"
        with RangeServer(folder) as other, open_slide(login, device="cpu") as slide:
            assert "SECRET" not in f"{slide} {slide.layout} {slide.path}"
            header = f"Basic {b64encode(b'user:SECRET').decode()}"
            assert all(each.headers["authorization"] == header for each in server.requests)
            assert all(each.path.endswith("?token=SECRET") for each in server.requests)
            server.always = redirect(other.url("elsewhere"))
            with pytest.raises(TileError) as caught:
                slide.levels[0][...]
            assert "SECRET" not in str(caught.value)
            assert other.requests
            assert "SECRET" not in str(other.requests)

    def test_headers_of_users(self, folder, server, caplog):
        """A token reaches its server, and nothing else: no other server, text, log or pickle."""
        caplog.set_level(logging.DEBUG)
        token = "Bearer SECRET"
        set_request_headers(server.root, {"Authorization": "Bearer old", "X-Site": "SECRET"})
        with RangeServer(folder) as other, open_slide(server.series_url, device="cpu") as slide:
            set_request_headers(server.url("elsewhere"), {"Authorization": token})
            server.requests.clear()
            disk_cache.disk_cache().clear()
            slide.release()
            slide.levels[0][:64, :64]
            assert {each.headers["authorization"] for each in server.requests} == {token}
            assert not any("x-site" in each.headers for each in server.requests)
            pickled = pickle.dumps([slide, slide.levels, slide.opener("cpu")])
            server.always = redirect(other.url("elsewhere"))
            disk_cache.disk_cache().clear()
            with pytest.raises(TileError) as caught:
                slide.levels[0][...]
            assert other.requests
            texts = f"{slide!r} {slide.layout} {dir(slide)} {slide.metadata} {slide.stats()}"
            texts += f"{caught.value!r} {other.requests} {caplog.text}"
            server.always = status(401)
            with pytest.raises(SlidePermissionError) as refused:
                open_slide(server.series_url)
            assert "SECRET" not in f"{texts} {refused.value!r}"
            assert b"SECRET" not in pickled
        set_request_headers(server.root, {})

    def test_headers_that_are_not_valid(self):
        for headers in ({"a b": "SECRET"}, {"a": "SECRET\r\nb: c"}, {"a": 1}):
            with pytest.raises(UnsupportedSlideError, match="request header 'a") as caught:
                set_request_headers("https://host", headers)
            assert "SECRET" not in str(caught.value)
        for url in ("host", "s3://host", "https://", "https://host:x", "https://u:SECRET@/"):
            with pytest.raises(
                UnsupportedSlideError, match="not the URL of a web server"
            ) as caught:
                set_request_headers(url, {})
            assert "SECRET" not in str(caught.value)

    def test_headers_in_the_environment(self, server):
        code = "import sys, napari_wsigpu\nnapari_wsigpu.open_slide(sys.argv[1], 'cpu').close()"
        command = [sys.executable, "-c", code, server.series_url]
        headers = json.dumps({server.root: {"Authorization": "Bearer SECRET"}})
        for value, expected in ((headers, {"Bearer SECRET"}), ("[SECRET", {None})):
            server.requests.clear()
            environment = {**os.environ, "WSIGPU_REQUEST_HEADERS": value}
            done = subprocess.run(
                command, env=environment, check=True, capture_output=True, text=True, timeout=120
            )
            assert {each.headers.get("authorization") for each in server.requests} == expected
            assert "SECRET" not in done.stdout + done.stderr
            assert ("WSIGPU_REQUEST_HEADERS is not valid" in done.stderr) == (None in expected)

    def test_redirects_into_the_machine_are_refused(self, folder, server, monkeypatch):
        monkeypatch.setattr(http_store, "is_local_address", lambda text: text == "localhost")
        monkeypatch.setattr(http_store, "is_local_name", lambda host: host == "localhost")
        with RangeServer(folder) as inside:
            server.always = redirect(inside.url("x").replace("127.0.0.1", "localhost"))
            with pytest.raises(SlideReadError, match="to limits"):
                open_slide(server.series_url)
        assert not inside.requests


@pytest.mark.usefixtures("quick")
class TestFailures:
    @pytest.fixture(autouse=True)
    def no_pauses(self, monkeypatch):
        monkeypatch.setattr(http_store, "PAUSES", (0.01, None))

    @staticmethod
    def refuses(server, kind, match):
        with pytest.raises(kind, match=match) as caught:
            open_slide(server.series_url)
        assert caught.type is kind
        text = str(caught.value)
        assert server.series_url in text
        assert text.endswith(".")
        assert "\n" not in text

    @pytest.mark.parametrize(
        ("code", "kind", "match"),
        [
            (401, SlidePermissionError, "permission to read"),
            (403, SlidePermissionError, "permission to read"),
            (404, SlideNotFoundError, "no file"),
            (500, SlideReadError, "internal error"),
            (503, SlideReadError, "too busy"),
            (204, SlideReadError, "can't be read"),
        ],
    )
    def test_a_status(self, server, code, kind, match):
        server.always = status(code)
        self.refuses(server, kind, match)

    @pytest.mark.parametrize("code", [401, 403, 500])
    def test_a_status_of_frames(self, server, code):
        with open_slide(server.series_url, device="cpu") as slide:
            server.always = status(code)
            kind = SlideReadError if code == 500 else SlidePermissionError
            with pytest.raises(kind, match=server.series_url):
                slide.levels[0][...]

    def test_frames_that_are_not_sent_as_they_are_stored(self, server):
        server.edit = lambda attributes: None
        server.always = respond_status(406)
        self.refuses(server, UnsupportedSlideError, "does not send its images as they are stored")

    @pytest.mark.parametrize(
        "body", [b"", b"<html>", b"{}", b"[1]", b'[{"00080016": 1}]', b"[" * 9999]
    )
    def test_damaged_metadata(self, server, body):
        server.always = respond(body, "application/dicom+json")
        kind = NotASlideError if body == b"{}" else CorruptSlideError
        self.refuses(server, kind, server.series_url)

    @pytest.mark.parametrize("path", ["metadata", "frames"])
    @pytest.mark.parametrize("media_type", ["text/html; charset=utf-8", "", "multipart/related"])
    def test_another_media_type(self, server, path, media_type):
        server.always = respond(b"<html>log in</html>", media_type, path)
        self.refuses(server, UnsupportedSlideError, "DICOMweb server")

    @pytest.mark.parametrize("end", [10, 200, -30, -4])
    def test_truncated_frames(self, server, end):
        with open_slide(server.series_url, device="cpu") as slide:
            frame = frames_of(server.instances[slide.metadata["dicom"]["SOPInstanceUID"]])[0]
            body = multipart([frame], "image/jpeg")[:end]
            server.always = respond(body, FRAMES_TYPE)
            with pytest.raises(SlideReadError, match="incomplete data"):
                slide.read_region((0, 0), (10, 10))

    def test_a_lost_frame_does_not_affect_others(self, server, folder):
        with (
            open_slide(folder, device="cpu") as local,
            open_slide(server.series_url, device="cpu") as slide,
        ):
            server.missing = {3}
            with pytest.raises(TileError, match=r"row 0, column 2 .* missing from the server"):
                slide.levels[0][...]
            found = slide.level_array(0, tolerant=True)[...]
            expected = local.levels[0][...]
            assert (found[:64, 128:192] == 255).all()
            expected[:64, 128:192] = 255
            np.testing.assert_array_equal(found, expected)

    def test_an_instance_without_frames_is_left_out(self, server):
        label = next(uid for uid, each in server.instances.items() if each.ImageType[2] == "LABEL")
        server.always = respond_status(404, label)
        with open_slide(server.series_url, device="cpu") as slide:
            assert not slide.associated_images
            [problem] = slide.layout.problems
            assert problem.startswith("Another file is left out")
            assert label not in problem

    def test_series_that_are_no_slide(self, server):
        def edit(attributes):
            attributes["00080016"]["Value"] = ["1.2.840.10008.5.1.4.1.1.2"]

        server.edit = edit
        self.refuses(server, NotASlideError, "not of whole-slide images")

    def test_a_changed_series_is_noticed(self, server):
        with open_slide(server.series_url, device="cpu") as slide:
            kept = pickle.dumps(slide)

        def edit(attributes):
            attributes["00180022"] = {"vr": "CS", "Value": ["NEW"]}

        server.edit = edit
        with pickle.loads(kept) as slide, pytest.raises(SlideChangedError):
            slide.metadata  # noqa: B018

    def test_frames_of_unnamed_encoding(self, server):
        frame = frames_of(next(iter(server.instances.values())))[0]
        body = multipart([frame], "application/octet-stream")
        server.always = respond(body, FRAMES_TYPE, "frames")
        self.refuses(server, UnsupportedSlideError, "does not state how")


def respond_status(code, path="frames"):
    """Answer with a status if the path contains `path`."""

    def trouble(handler):
        if path in handler.path and "frames" in handler.path:
            handler.answer(code)
        else:
            handler.serve()

    return trouble


@pytest.mark.usefixtures("quick")
class TestHostileServers:
    @pytest.mark.parametrize("uid", ["../../../secret", "1.2/frames/1?x", "", "1" * 65, 7.5e300])
    def test_identifiers_that_are_paths(self, server, uid):
        def edit(attributes):
            attributes["00080018"]["Value"] = [uid]

        server.edit = edit
        with pytest.raises(CorruptSlideError, match="sent damaged metadata"):
            open_slide(server.series_url)
        assert len(server.requests) == 1

    @pytest.mark.parametrize(
        "base", ["http://169.254.169.254/latest", "/etc", "file:///etc", "x://[", "instances/../.."]
    )
    def test_bulk_data_elsewhere_is_not_read(self, server, base):
        server.bulk, server.bulk_base = 64, base
        with open_slide(server.series_url, device="cpu") as slide:
            assert slide.icc_profile is None
            assert "ICC profile" in slide.layout.problems[0]
        assert not any("bulkdata" in each.path for each in server.requests)

    def test_relative_bulk_data(self, server):
        uid = next(iter(server.instances))
        server.bulk, server.bulk_base = 64, f"instances/{uid}"
        with open_slide(server.series_url, device="cpu") as slide:
            assert slide.icc_profile == dicomslides.ICC

    def test_lost_bulk_data(self, server):
        server.bulk, server.bulk_base = 64, f"{server.series_url}/instances/1.2"
        with open_slide(server.series_url, device="cpu") as slide:
            assert slide.icc_profile is None
            assert "ICC profile" in slide.layout.problems[0]

    @pytest.mark.parametrize("chunked", [False, True])
    def test_endless_metadata(self, server, monkeypatch, chunked):
        monkeypatch.setattr(limits, "header_bytes", 1000)
        server.chunked = chunked
        with pytest.raises(UnsupportedSlideError, match="larger than 1 kB"):
            open_slide(server.series_url)

    @pytest.mark.parametrize("chunked", [False, True])
    def test_endless_frames(self, server, chunked):
        with open_slide(server.series_url, device="cpu") as slide:
            server.chunked = chunked
            server.always = respond(multipart([bytes(10 << 20)], "image/jpeg"), FRAMES_TYPE)
            with pytest.raises(UnsupportedSlideError, match="parts larger than"):
                slide.read_region((0, 0), (10, 10))

    def test_too_many_instances(self, server):
        one = server.attributes(next(iter(server.instances.values())))
        body = json.dumps([one] * 300).encode()
        server.always = respond(body, "application/dicom+json", "metadata")
        with pytest.raises(UnsupportedSlideError, match="300 instances"):
            open_slide(server.series_url)

    @pytest.mark.parametrize(
        ("tag", "item"),
        [
            ("00280010", {"vr": "US", "Value": [0]}),
            ("00280010", {"vr": "US", "Value": ["x"]}),
            ("00280010", {"vr": "US", "Value": [65535]}),
            ("00280010", {"vr": "US"}),
            ("00280100", {"vr": "US", "Value": ["8"]}),
            ("00280002", {"vr": "LO", "Value": ["3"]}),
            ("00280008", {"vr": "IS", "Value": [1 << 31]}),
            ("00280008", {"vr": "IS", "Value": [-1]}),
            ("00480006", {"vr": "UL", "Value": [1e9]}),
            ("00480105", {"vr": "SQ", "Value": ["x"]}),
            ("00480105", {"vr": "SQ", "Value": 7}),
            ("52009230", {"vr": "SQ", "Value": {"a": 1}}),
            ("00209311", {"vr": "CS", "Value": ["TILED_SPARSE"]}),
            ("00083002", {"vr": "UI", "Value": [7]}),
            ("00083002", 7),
            ("00080008", {"vr": "CS", "Value": [None]}),
            ("00020010", "x"),
            ("zz", {"vr": "UI"}),
            ("0048021Z", {"vr": "UI"}),
            ("00289110", {"vr": "??", "Value": [{}]}),
        ],
    )
    def test_values_of_the_wrong_kind(self, server, tag, item):
        server.edit = lambda attributes: attributes.update({tag: item})
        try:
            with open_slide(server.series_url, device="cpu") as slide:
                slide.level_array(0, tolerant=True)[...]
        except SlideError as error:
            assert str(error).endswith(".")  # noqa: PT017


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("https://h/studies/1.2/series/3.4", True),
        ("HTTP://user:pw@h:80/a/dicomWeb/studies/1.2/series/3.4/?token=1", True),
        ("https://h/studies/1.2/series/3.4/instances/5", False),
        ("https://h/studies/1.2/series/", False),
        ("https://h/studies/1.2/series/a", False),
        ("https://h/x?/studies/1.2/series/3.4", False),
        ("s3://b/studies/1.2/series/3.4", False),
        ("/studies/1.2/series/3.4", False),
    ],
)
def test_urls(url, found):
    assert is_dicomweb(url) == found


def test_sizes_of_tiles_are_not_shown(server):
    with open_slide(server.series_url, device="cpu") as slide:
        assert [row.bytes for row in level_facts(slide)] == ["", "", ""]
        assert levels_in_short(slide) == "3 stored levels"


def test_it_is_converted_like_its_files(server, folder, tmp_path):
    for source, name in ((server.series_url, "a.tif"), (folder, "b.tif")):
        convert(source, tmp_path / name)
    with open_slide(tmp_path / "a.tif") as one, open_slide(tmp_path / "b.tif") as two:
        same_pixels(one, two)
    assert describe(server.series_url).vendor == "dicom"
