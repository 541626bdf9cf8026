"""Pixels as people see them, and as files."""

import imagecodecs
import numpy as np
import pytest
import tifffile

from napari_wsigpu import open_slide
from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.slide.pictures import overview, read_associated, rgb, save, save_text
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from tests.writers import slides


def test_overview_is_the_coarsest_level():
    with open_slide(sample_path()) as slide, tifffile.TiffFile(sample_path()) as file:
        np.testing.assert_array_equal(overview(slide), file.series[0].levels[-1].asarray())


def test_overview_of_channels_is_in_colour(write_channels):
    path, _, _ = write_channels(3)
    with open_slide(path) as slide:
        picture = overview(slide)
    assert picture.dtype == np.uint8
    assert picture.shape == (600, 750, 3)
    assert picture.std((0, 1)).min() > 10


def test_overview_shows_white_is_zero_upright(tmp_path):
    path = tmp_path / "inverted.tif"
    pixels = np.zeros((64, 900), np.uint8)
    pixels[:, 450:] = 255
    tifffile.imwrite(path, pixels, tile=(64, 64), photometric="miniswhite")
    with open_slide(path) as slide:
        picture = overview(slide)
    assert (picture[:, :450] == 255).all()
    assert (picture[:, 450:] == 0).all()


def test_overview_of_many_channels_reads_the_visible_ones(write_channels):
    path, _, _ = write_channels(5)
    with open_slide(path, "cpu") as slide:
        composite = slide.composite([1, 4])
        decoded = slide.stats()["decoded"]["cpu"]
        found = overview(slide, composite)
        assert slide.stats()["decoded"]["cpu"] == decoded
        shown = slide.read_region((0, 0), slide.level_dimensions[1], 1, composite=composite)
    np.testing.assert_array_equal(found, shown)


@pytest.mark.parametrize(("dtype", "whole"), [("uint8", 255), ("uint16", 65535), ("float32", 1.0)])
def test_rgb_of_any_type_is_bytes(dtype, whole):
    pixels = np.array([[[0, whole, 0, whole]]], dtype)
    assert rgb(pixels).tolist() == [[[0, 255, 0]]]


@pytest.mark.parametrize("value", [np.nan, np.inf, 7])
def test_flat_and_empty_channels_are_black(value):
    assert not rgb(np.full((4, 4, 1), value, np.float32)).any()


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("name", ["x.png", "x.tif", "x.TIFF"])
def test_saved_pictures_are_the_same_pixels(tmp_path, dtype, channels, name):
    pixels = slides.picture(20, 30, channels, dtype)
    path = tmp_path / name
    save(pixels, str(path))
    read = imagecodecs.png_decode if name.endswith("png") else None
    found = read(path.read_bytes()) if read else tifffile.imread(path)
    np.testing.assert_array_equal(found, pixels.squeeze())


def test_what_cannot_be_saved_is_said_in_one_sentence(tmp_path):
    pixels = np.zeros((4, 4, 1), np.float32)
    with pytest.raises(SlideError, match=r"can't hold float32 pixels; save .* as TIFF"):
        save(pixels, str(tmp_path / "x.png"))
    with pytest.raises(SlideError, match=r"ends in \.png or \.tif"):
        save(pixels, str(tmp_path / "x.doc"))
    for write in (lambda path: save(pixels, path), lambda path: save_text("{}", path)):
        with pytest.raises(SlideError, match=r"nowhere.* can't be written"):
            write(str(tmp_path / "nowhere" / "x.tif"))


def test_associated_image_is_the_files():
    with open_slide(sample_path()) as slide, tifffile.TiffFile(sample_path()) as file:
        [page] = [page for page in file.pages if "macro" in page.description]
        np.testing.assert_array_equal(read_associated(slide, "macro"), page.asarray())
