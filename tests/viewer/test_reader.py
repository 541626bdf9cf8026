"""Which paths the reader takes, and what it says of those that it can't open."""

import importlib
import os
import time

import npe2
import numpy as np
import psutil
import pytest
import tifffile

from napari_wsigpu.model.errors import (
    CorruptSlideError,
    NotASlideError,
    SlideError,
    UnsupportedSlideError,
)
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from napari_wsigpu.viewer.contributions.slide_reader import get_reader, read_slides
from napari_wsigpu.viewer.window.settings import Settings
from tests.formats.test_slide_list import DYES, ndpi_set
from tests.writers import slides, stacks
from tests.writers.icc import ADOBE

SAMPLE = str(sample_path())


def close(layers):
    for levels, *_ in layers:
        levels[0].slide.close()


def open_files():
    return {file.path for file in psutil.Process().open_files()}


def test_takes_a_slide():
    layers = get_reader(SAMPLE)(SAMPLE)
    assert len(layers) == 1
    close(layers)


def test_takes_a_list_of_slides(write_channels):
    paths = [SAMPLE, str(write_channels(2)[0])]
    layers = get_reader(paths)(paths)
    assert [attributes["name"] for _, attributes, _ in layers] == [
        "he_phantom",
        "channels2 DAPI",
        "channels2 CD3",
    ]
    close(layers)


def test_takes_a_small_flat_picture_that_is_named(tmp_path):
    path = tmp_path / "flat.tif"
    pixels = slides.picture(300, 200)
    tifffile.imwrite(path, pixels, photometric="rgb", rowsperstrip=300, compression="zlib")
    layers = get_reader(str(path))(str(path))
    np.testing.assert_array_equal(np.asarray(layers[0][0][0]), pixels)
    close(layers)


def test_leaves_a_small_flat_picture_in_a_folder_out(tmp_path):
    tifffile.imwrite(tmp_path / "flat.tif", np.zeros((300, 200), np.uint8))
    (tmp_path / "slide.svs").write_bytes(sample_path().read_bytes())
    layers = get_reader(str(tmp_path))(str(tmp_path))
    assert [attributes["name"] for _, attributes, _ in layers] == ["slide"]
    close(layers)


@pytest.mark.parametrize("companion", [None, "set.companion.ome"])
def test_shows_a_slide_of_several_files_in_a_folder_once(tmp_path, companion):
    stacks.write_ome_files(tmp_path, stacks.stack(), companion)
    layers = get_reader(str(tmp_path))(str(tmp_path))
    name = "set.companion" if companion else "t0c0"
    names = [f"{name} stain 0", f"{name} stain 1"]
    assert [attributes["name"] for _, attributes, _ in layers] == names
    close(layers)


def test_shows_listed_slides_in_a_folder_only_as_channels(tmp_path):
    ndpi_set(tmp_path)
    layers = get_reader(str(tmp_path))(str(tmp_path))
    assert {attributes["name"].split()[0] for _, attributes, _ in layers} == {"x"}
    assert len(layers) == len(DYES)
    close(layers)


def test_error_for_a_plain_stack_names_a_suitable_reader(tmp_path):
    path = tmp_path / "stack.tif"
    tifffile.imwrite(path, np.zeros((7, 64, 4200), np.uint8), photometric="minisblack")
    with pytest.raises(UnsupportedSlideError, match=r"stack\.tif' is a stack of 7 .*'napari'\."):
        get_reader(str(path))(str(path))


def test_takes_a_plain_stack_whose_axes_are_known(tmp_path):
    path = tmp_path / "stack.tif"
    stack = np.arange(7 * 64 * 42, dtype=np.uint16).reshape(7, 64, 42)
    tifffile.imwrite(path, stack, photometric="minisblack", metadata={"axes": "ZYX"})
    [layer] = read = get_reader(str(path))(str(path))
    np.testing.assert_array_equal(np.asarray(layer[0][0]), stack)
    close(read)


def test_takes_a_small_stack_whose_axes_are_known(tmp_path):
    path = tmp_path / "stack.ome.tif"
    stack = np.zeros((7, 40, 60), np.uint8)
    tifffile.imwrite(path, stack, photometric="minisblack", metadata={"axes": "ZYX"})
    [layer] = read = get_reader(str(path))(str(path))
    assert layer[0][0].shape == stack.shape
    close(read)


def test_takes_a_large_flat_picture(tmp_path):
    path = tmp_path / "large.tif"
    tifffile.imwrite(path, np.zeros((64, 4200), np.uint8), tile=(64, 64))
    assert get_reader(str(path)) is read_slides


@pytest.mark.parametrize("name", ["text.svs", "text.NDPI", "text.scn"])
def test_ignores_other_files_unless_named_like_slides(tmp_path, name):
    for path in (tmp_path / "text.tif", tmp_path / name):
        path.write_text("no slide")
    assert get_reader(str(tmp_path / "text.tif")) is None
    reader = get_reader(str(tmp_path / name))
    with pytest.raises(NotASlideError, match=f"{name}' is not a TIFF or DICOM slide"):
        reader(str(tmp_path / name))


def test_reports_a_truncated_slide(tmp_path):
    path = tmp_path / "cut.svs"
    path.write_bytes(sample_path().read_bytes()[:1000])
    reader = get_reader(str(path))
    with pytest.raises(CorruptSlideError, match=r"cut\.svs"):
        reader(str(path))


def test_decides_quickly(tmp_path):
    path = tmp_path / "flat.tif"
    tifffile.imwrite(path, np.zeros((2000, 2000, 3), np.uint8), photometric="rgb")
    get_reader(str(path))
    start = time.process_time()
    for _ in range(10):
        assert get_reader(str(path)) is read_slides
    assert (time.process_time() - start) / 10 < 0.1


def test_a_failure_closes_the_slides_before_it(tmp_path):
    bad = tmp_path / "bad.svs"
    bad.write_bytes(b"II*\0" + bytes(100))
    with pytest.raises(SlideError):
        read_slides([SAMPLE, str(bad)])
    assert os.path.realpath(SAMPLE) not in {os.path.realpath(path) for path in open_files()}


class TestDicom:
    WSI = bytes(128) + b"DICM" + b"\x02\0\x02\0UI\x1e\x001.2.840.10008.5.1.4.1.1.77.1.6" + bytes(9)
    CT = bytes(128) + b"DICM" + b"\x02\0\x02\0UI\x1a\x001.2.840.10008.5.1.4.1.1.2\0" + bytes(9)

    def test_takes_a_slide_and_its_folder(self, tmp_path):
        pytest.importorskip("wsidicom", reason='pip install "napari-wsigpu[dicom]"')
        dicomslides = importlib.import_module("tests.writers.dicomslides")
        dicomslides.write_slide(tmp_path, slides.picture(300, 500))
        for path in (str(tmp_path / "8.dcm"), str(tmp_path)):
            layers = get_reader(path)(path)
            levels, attributes, _ = layers[0]
            assert [level.shape[:2] for level in levels] == [(300, 500), (150, 250), (75, 125)]
            assert attributes["scale"] == (0.5, 0.25)
            close(layers)

    def test_reports_a_damaged_slide(self, tmp_path):
        path = tmp_path / "a.dcm"
        path.write_bytes(self.WSI)
        with pytest.raises(SlideError, match=r"a\.dcm"):
            get_reader(str(path))(str(path))

    def test_leaves_other_kinds_to_others(self, tmp_path):
        (tmp_path / "ct.dcm").write_bytes(self.CT)
        assert get_reader(str(tmp_path / "ct.dcm")) is None
        with pytest.raises(SlideError, match=r"holds no slide: it holds 1 \.dcm"):
            get_reader(str(tmp_path))(str(tmp_path))

    def test_leaves_other_folders_soon(self, tmp_path):
        for index in range(1000):
            (tmp_path / f"{index}.dcm").write_bytes(self.CT)
        start = time.process_time()
        assert get_reader(str(tmp_path)) is not read_slides
        assert time.process_time() - start < 1

    def test_the_manifest_names_them(self):
        manifest = npe2.PluginManifest.from_distribution("napari-wsigpu")
        reader = manifest.contributions.readers[0]
        assert {"*.dcm", "*.DCM"} <= set(reader.filename_patterns)
        assert reader.accepts_directories  # they are also those of OME-Zarr


class TestColors:
    @pytest.fixture
    def in_srgb(self, monkeypatch):
        chosen = Settings(open_inspector=False, apply_icc=True)
        monkeypatch.setattr(
            "napari_wsigpu.viewer.contributions.slide_reader.settings", lambda: chosen
        )

    def path(self, tmp_path, profile):
        path = tmp_path / "slide.tif"
        pixels = slides.picture(200, 300)
        slides.write_pyramid(path, pixels, (2,), photometric="rgb", iccprofile=profile)
        return str(path)

    @pytest.mark.parametrize("profile", [ADOBE, None], ids=["adobe", "none"])
    def test_a_profile_is_applied_if_the_user_wants_it(self, tmp_path, in_srgb, profile):
        layers = read_slides(self.path(tmp_path, profile))
        slide = layers[0][0][0].slide
        assert slide.display_color == ("stored" if profile is None else "srgb")
        close(layers)

    def test_a_broken_profile_is_said_and_left_out(self, tmp_path, in_srgb, monkeypatch):
        said = []
        monkeypatch.setattr(
            "napari_wsigpu.viewer.contributions.slide_reader.show_warning", said.append
        )
        layers = read_slides(self.path(tmp_path, bytes(200)))
        assert layers[0][0][0].slide.display_color == "stored"
        [sentence] = said
        assert "slide.tif" in sentence
        close(layers)
