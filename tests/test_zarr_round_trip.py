"""Slides converted to OME-Zarr are the same slides."""

import numpy as np
import pytest
import tifffile

from napari_wsigpu import convert, open_slide
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from tests.conftest import shared_slide
from tests.writers import slides
from tests.writers.icc import ADOBE

SHARED = [
    "CMU-1-Small-Region.svs",
    "openslide-boxes.tiff",
    "minerva-2048_ome6_tiled.ome.tif",
]


def assert_same(path, other, *, private=False):
    with open_slide(path) as slide, open_slide(other) as found:
        assert found.vendor == "ome-zarr"
        assert found.layout.rgb == slide.layout.rgb
        assert found.level_dimensions[: slide.level_count] == slide.level_dimensions
        assert found.level_downsamples[: slide.level_count] == pytest.approx(
            slide.level_downsamples
        )
        assert found.mpp == (slide.mpp and pytest.approx(slide.mpp))
        assert found.objective == slide.objective
        assert found.icc_profile == slide.icc_profile
        assert [channel.name for channel in found.channels] == [
            channel.name for channel in slide.channels
        ]
        for level, expected in zip(found.levels, slide.levels, strict=False):
            assert level.dtype == expected.dtype
            np.testing.assert_array_equal(level[...], expected[...])
        names = set(slide.associated_images)
        assert set(found.associated_images) == (names if private else names - {"label", "macro"})
        for name, image in found.associated_images.items():
            expected = slide.associated_images[name].read()
            np.testing.assert_array_equal(image.read(), expected)


@pytest.fixture
def aperio(tmp_path):
    path = tmp_path / "slide.svs"
    slides.write_aperio(path, slides.picture(900, 1300), tile=(240, 256))
    return path


@pytest.mark.parametrize(
    ("compression", "private"), [("raw", False), ("zstd", True), ("lz4", False)]
)
def test_an_aperio_slide(aperio, tmp_path, compression, private):
    target = tmp_path / "a.zarr"
    convert(aperio, target, compression=compression, private=private)
    assert_same(aperio, target, private=private)


def test_the_sample(tmp_path):
    convert(sample_path(), tmp_path / "a.zarr")
    assert_same(sample_path(), tmp_path / "a.zarr")


def test_a_profile(tmp_path):
    path = tmp_path / "slide.tif"
    pixels = slides.picture(200, 300)
    slides.write_pyramid(path, pixels, (2,), photometric="rgb", iccprofile=ADOBE)
    convert(path, tmp_path / "a.zarr")
    with open_slide(tmp_path / "a.zarr") as slide:
        assert slide.icc_profile == ADOBE


@pytest.mark.parametrize("name", SHARED)
def test_real_slides(tmp_path, name):
    path = shared_slide(name)
    convert(path, tmp_path / "a.zarr")
    assert_same(path, tmp_path / "a.zarr")


def test_back_to_tiff(aperio, tmp_path):
    convert(aperio, tmp_path / "a.zarr")
    convert(tmp_path / "a.zarr", tmp_path / "a.tif", compression="raw")
    with open_slide(aperio) as slide, tifffile.TiffFile(tmp_path / "a.tif") as file:
        pages = [page for page in file.pages if page.is_tiled]
        for page, level in zip(pages, slide.levels, strict=False):
            np.testing.assert_array_equal(page.asarray(), level[...])
