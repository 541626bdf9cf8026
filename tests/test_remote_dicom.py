"""DICOM slides on servers equal those on disk: single files, or series in folders with lists."""

import pickle

import numpy as np
import pytest

pytest.importorskip("pydicom")
pytest.importorskip("wsidicom")
pytest.importorskip("obstore")

from napari_wsigpu import open_slide
from napari_wsigpu.formats.dicom import dicom_instance, dicom_served
from napari_wsigpu.model.errors import (
    NotASlideError,
    SlideChangedError,
    SlideError,
    SlideNotFoundError,
    SlidePermissionError,
    SlideReadError,
    TileError,
    UnsupportedSlideError,
)
from napari_wsigpu.model.limits import limits
from napari_wsigpu.storage.remote import disk_cache
from tests.conftest import shared_slide
from tests.fakes.rangeserver import RangeServer, status
from tests.test_remote_slides import bucket as bucket
from tests.test_remote_slides import folder as folder
from tests.test_remote_slides import quick as quick
from tests.writers import dicomslides, slides

PIXELS = slides.picture(300, 500)
KINDS = {
    "basic": {},
    "extended": {"table": "extended"},
    "none": {"table": "none"},
    "raw": {"kind": "raw"},
    "sparse": {"sparse": True, "missing": (3, 7)},
}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dicom")
    for name, options in KINDS.items():
        dicomslides.save(folder / f"{name}.dcm", dicomslides.instance(PIXELS, **options))
    return folder


@pytest.fixture
def server(served):
    with RangeServer(served) as server:
        yield server


@pytest.fixture
def alone(served, tmp_path):
    """Return a function that serves one file from a separate folder."""

    def alone(name):
        path = tmp_path / name
        path.write_bytes((served / name).read_bytes())
        return path

    return alone


def same_pixels(slide, local):
    assert slide.level_dimensions == local.level_dimensions
    for level, expected in zip(slide.levels, local.levels, strict=True):
        np.testing.assert_array_equal(level[...], expected[...])
    assert set(slide.associated_images) == set(local.associated_images)
    for name, image in slide.associated_images.items():
        np.testing.assert_array_equal(image.read(), local.associated_images[name].read())


@pytest.mark.parametrize("query", ["", "?X-Amz-Signature=SECRET"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_the_same_as_on_disk(server, alone, kind, query):
    url = server.url(f"{kind}.dcm")
    with (
        open_slide(alone(f"{kind}.dcm"), device="cpu") as local,
        open_slide(url + query, device="cpu") as slide,
    ):
        assert slide.path == url
        same_pixels(slide, local)
        assert (slide.vendor, slide.metadata) == ("dicom", local.metadata)
        assert (slide.mpp, slide.objective) == (local.mpp, local.objective)
        assert slide.icc_profile == local.icc_profile is not None
        assert slide.layout.problems == (*local.layout.problems, dicom_served.ALONE)
        with pickle.loads(pickle.dumps(slide)) as again:
            np.testing.assert_array_equal(again.levels[0][...], local.levels[0][...])
        assert "SECRET" not in f"{slide} {slide.layout}"


def test_a_real_file_is_the_same_as_on_disk(tmp_path):
    path = shared_slide("found/sm_image_numbers.dcm")
    with (
        RangeServer(path.parent) as server,
        open_slide(path, device="cpu") as local,
        open_slide(server.url(path.name), device="cpu") as slide,
    ):
        np.testing.assert_array_equal(slide.levels[0][...], local.levels[0][...])
        assert slide.mpp == local.mpp


def test_a_header_takes_few_requests(server):
    with open_slide(server.url("basic.dcm"), device="cpu") as slide:
        assert len(server.requests) <= 4
        assert slide.read_region((0, 0), (64, 64)).any()


@pytest.mark.parametrize(
    ("code", "kind"),
    [(404, SlideNotFoundError), (403, SlidePermissionError), (500, SlideReadError)],
)
def test_a_server_that_fails(quick, server, code, kind):
    server.always = status(code)
    with pytest.raises(kind, match=r"basic\.dcm'"):
        open_slide(server.url("basic.dcm"))


def test_a_server_that_fails_while_tiles_are_read(quick, server):
    with open_slide(server.url("raw.dcm"), device="cpu") as slide:
        slide.release()
        server.always = status(500)
        with pytest.raises(SlideReadError, match="internal error"):
            slide.level_array(0, tolerant=True)[...]


def test_a_file_that_changes_is_noticed(server):
    with open_slide(server.url("basic.dcm"), device="cpu") as slide:
        slide.release()
        disk_cache.disk_cache().clear()
        server.etag = '"two"'
        with pytest.raises(SlideChangedError, match=r"basic\.dcm"):
            slide.levels[0][...]


@pytest.mark.parametrize("kind", ["basic", "extended", "raw"])
def test_truncated_file_raises_the_same_error_as_on_disk(server, served, tmp_path, kind):
    content = (served / f"{kind}.dcm").read_bytes()
    (tmp_path / "cut.dcm").write_bytes(content[: len(content) * 2 // 3])
    server.folder = tmp_path
    said = []
    for path in (tmp_path / "cut.dcm", server.url("cut.dcm")):
        try:
            with open_slide(path, device="cpu") as slide:
                said.append(slide.layout.problems[0])
                with pytest.raises(TileError):
                    slide.levels[0][...]
        except SlideError as error:
            said.append(error.message)
    assert said[0] == said[1]


def test_other_kinds_of_dicom_raise_errors(server, tmp_path):
    (tmp_path / "ct.dcm").write_bytes(bytes(128) + b"DICM" + bytes(99))
    server.folder = tmp_path
    with pytest.raises(NotASlideError, match="not a whole-slide image"):
        open_slide(server.url("ct.dcm"))


def test_a_large_file_without_a_table_of_frames_is_refused(server, monkeypatch):
    monkeypatch.setattr(dicom_instance, "LARGEST_WALK", 1000)
    with pytest.raises(UnsupportedSlideError, match="has no table of frame offsets"):
        open_slide(server.url("none.dcm"))
    open_slide(server.url("basic.dcm")).close()


def test_header_beyond_the_limit_raises_an_error(server, monkeypatch):
    monkeypatch.setattr(limits, "header_bytes", 1000)
    with pytest.raises(SlideError, match="'header_bytes'"):
        open_slide(server.url("basic.dcm"))


@pytest.fixture(scope="module")
def series(bucket, tmp_path_factory):
    """A pyramid with a label, in a folder and in a bucket, among other files."""
    folder = tmp_path_factory.mktemp("series")
    dicomslides.write_slide(folder, PIXELS)
    label = dicomslides.instance(slides.picture(64, 64), flavor="LABEL")
    dicomslides.save(folder / "1.2.840.7", label)
    (folder / "a notes.dcm").write_bytes(bytes(200))
    (folder / "notes.txt").write_bytes(b"none")
    for path in folder.iterdir():
        bucket.upload_file(str(path), "slides", f"a series/{path.name}")
    return folder


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
class TestSeries:
    @pytest.mark.parametrize("name", ["9.dcm", "8.dcm", "", "/"])
    def test_it_is_found_by_each_of_its_files_and_by_its_folder(self, series, name):
        url = f"s3://slides/a series{'/' * (len(name) > 1)}{name}"
        with (
            open_slide(series / name.strip("/"), device="cpu") as local,
            open_slide(url, device="cpu") as slide,
        ):
            assert slide.path == url
            assert slide.level_count == 3
            assert set(slide.associated_images) == {"label"}
            same_pixels(slide, local)
            assert slide.metadata == local.metadata
            assert slide.layout.problems == local.layout.problems == ()
            with pickle.loads(pickle.dumps(slide)) as again:
                np.testing.assert_array_equal(again.levels[2][...], local.levels[2][...])
            slide.release()
            np.testing.assert_array_equal(slide.levels[1][...], local.levels[1][...])

    def test_a_name_may_be_spelled_as_in_a_url(self, series):
        with open_slide("s3://slides/a%20series/9.dcm", device="cpu") as slide:
            assert slide.level_count == 3

    def test_focal_planes_in_several_files(self, bucket, tmp_path):
        for number, depth in enumerate((0.0, 1.0, 2.0)):
            pixels = PIXELS + np.uint8(number)
            position = dicomslides.item(
                XOffsetInSlideCoordinateSystem=0,
                YOffsetInSlideCoordinateSystem=0,
                ZOffsetInSlideCoordinateSystem=depth / 1000,
            )
            instance = dicomslides.instance(
                pixels, "raw", TotalPixelMatrixOriginSequence=[position]
            )
            path = dicomslides.save(tmp_path / f"{number}.dcm", instance)
            bucket.upload_file(str(path), "slides", f"planes/{path.name}")
        with (
            open_slide("s3://slides/planes", device="cpu") as slide,
            open_slide(tmp_path, device="cpu") as local,
        ):
            assert slide.planes == local.planes
            for z in range(local.planes.size_z):
                expected = local.plane(z, 0).levels[0][...]
                np.testing.assert_array_equal(slide.plane(z, 0).levels[0][...], expected)

    def test_a_file_that_changes_is_noticed(self, bucket, series):
        for name in ("9.dcm", "8.dcm"):
            bucket.upload_file(str(series / name), "slides", f"changes/{name}")
        with open_slide("s3://slides/changes/9.dcm", device="cpu") as slide:
            assert slide.level_count == 2
            slide.release()
            disk_cache.disk_cache().clear()
            bucket.upload_file(str(series / "7.dcm"), "slides", "changes/8.dcm")
            with pytest.raises(SlideChangedError):
                slide.levels[1][...]

    def test_names_of_other_files_are_not_shown(self, bucket, series, tmp_path):
        damaged = (series / "8.dcm").read_bytes()[:2000]
        (tmp_path / "DOE_JANE.dcm").write_bytes(damaged)
        bucket.upload_file(str(tmp_path / "DOE_JANE.dcm"), "slides", "told/DOE_JANE.dcm")
        bucket.upload_file(str(series / "9.dcm"), "slides", "told/9.dcm")
        for url in ("s3://slides/told/9.dcm", "s3://slides/told"):
            with open_slide(url, device="cpu") as slide:
                assert len(slide.layout.problems) == 1
                assert "JANE" not in str(slide.layout.problems)

    def test_a_folder_without_any_is_no_slide(self, bucket, series):
        bucket.upload_file(str(series / "notes.txt"), "slides", "other/notes.txt")
        with pytest.raises(SlideNotFoundError, match="s3://slides/other"):
            open_slide("s3://slides/other")
