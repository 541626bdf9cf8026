"""Regions written as PNG, read with Pillow and imagecodecs."""

import io
import math
from dataclasses import replace

import imagecodecs
import numpy as np
import pytest
from PIL import Image

from napari_wsigpu import convert, open_slide
from napari_wsigpu.conversion import png
from napari_wsigpu.display.composite_source import CompositeView
from napari_wsigpu.model.errors import (
    ConversionError,
    RegionError,
    SlideError,
    TileError,
    UnsupportedSlideError,
)
from napari_wsigpu.viewer.contributions.sample_slide import sample_path
from tests.writers import icc, slides

REGION = (300, 200, 700, 500)


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a TIFF with a single level."""

    def write_slide(pixels, **options):
        path = tmp_path / "slide.tif"
        gray = pixels.ndim == 3 and pixels.shape[2] == 1
        slides.write_pyramid(path, pixels[..., 0] if gray else pixels, (2,), **options)
        return path

    return write_slide


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_pixels_and_resolution_of_a_level(tmp_path, level):
    target = tmp_path / "roi.png"
    with open_slide(sample_path(), "cpu") as slide:
        convert(slide, target, region=REGION, level=level)
        pyramid = {item.number: item.layout for item in slide.pyramid}
        down = pyramid[level].downsample(pyramid[0])
        left, top, width, height = (math.floor(value / down + 0.5) for value in REGION)
        expected = slide.level_array(level)[top : top + height, left : left + width]
        mpp = [size * down for size in slide.mpp]
    with Image.open(target) as image:
        np.testing.assert_array_equal(image, expected)
        assert image.info["dpi"] == pytest.approx([25400 / size for size in mpp], rel=1e-3)


@pytest.mark.parametrize(
    ("shape", "dtype", "photometric"),
    [
        ((200, 300, 1), "uint8", "minisblack"),
        ((200, 300, 1), "uint16", "minisblack"),
        ((200, 300, 3), "uint16", "rgb"),
        ((200, 300, 4), "uint8", "rgb"),
    ],
)
def test_gray_and_rgb_of_8_and_16_bits(write, tmp_path, shape, dtype, photometric):
    pixels = slides.picture(*shape, dtype)
    options = {"extrasamples": ["unassalpha"]} if shape[2] == 4 else {}
    path = write(pixels, photometric=photometric, **options)
    convert(path, tmp_path / "roi.png")
    found = imagecodecs.png_decode((tmp_path / "roi.png").read_bytes())
    np.testing.assert_array_equal(found, pixels.squeeze())
    with Image.open(tmp_path / "roi.png") as image:
        assert "dpi" not in image.info


def test_zero_is_black(write, tmp_path):
    pixels = slides.picture(200, 300, 1)
    convert(write(pixels, photometric="miniswhite"), tmp_path / "roi.png")
    with Image.open(tmp_path / "roi.png") as image:
        np.testing.assert_array_equal(image, 255 - pixels[..., 0])


@pytest.mark.usefixtures("scanner_colours")
def test_icc_profile_is_kept_or_applied(write, tmp_path):
    profile = icc.table_profile(icc.stain)
    path = write(slides.picture(200, 300), photometric="rgb", iccprofile=profile)
    convert(path, tmp_path / "stored.png")
    convert(path, tmp_path / "srgb.png", color="srgb")
    with open_slide(path, "cpu") as slide:
        expected = slide.read_region((0, 0), (300, 200), color="srgb")
    with Image.open(tmp_path / "stored.png") as image:
        assert image.info["icc_profile"] == profile
        np.testing.assert_array_equal(image, slides.picture(200, 300))
    with Image.open(tmp_path / "srgb.png") as image:
        assert image.info["srgb"] == 1
        assert "icc_profile" not in image.info
        np.testing.assert_array_equal(image, expected)


@pytest.mark.parametrize("dtype", ["float32", "int16", "uint32"])
def test_unsupported_sample_types_raise(write, tmp_path, dtype):
    path = write(slides.picture(200, 300, 1, dtype), photometric="minisblack")
    with pytest.raises(UnsupportedSlideError, match=f"the pixel type {dtype}"):
        convert(path, tmp_path / "roi.png")


def test_several_channels_raise(write, tmp_path):
    path = write(
        slides.picture(200, 300, 2).transpose(2, 0, 1),
        metadata={"axes": "CYX"},
        photometric="minisblack",
    )
    with pytest.raises(UnsupportedSlideError, match="has 2 channels that are not RGB; choose"):
        convert(path, tmp_path / "roi.png")


@pytest.mark.parametrize("inverted", [False, True])
def test_composite_of_channels(write, tmp_path, inverted):
    pixels = slides.picture(1100, 1200, 6, "uint16").transpose(2, 0, 1)
    path = write(pixels, metadata={"axes": "CYX"}, photometric="minisblack")
    target, region = tmp_path / "roi.png", (20, 10, 100, 80)
    with open_slide(path, "cpu") as slide:
        settings = replace(slide.composite([0, 2, 5]), inverted=inverted)
        shown = CompositeView(settings)
        for number in (level.number for level in slide.pyramid):
            convert(slide, target, level=number, composite=settings, overwrite=True)
            with Image.open(target) as image:
                np.testing.assert_array_equal(image, slide.composite_level(number, shown)[...])
        convert(slide, target, region=region, composite=settings, overwrite=True)
        with Image.open(target) as image:
            expected = slide.read_region(region[:2], region[2:], composite=settings)
            np.testing.assert_array_equal(image, expected)
            assert "srgb" in image.info
        outline = [[(20, 10), (120, 10), (120, 90)]]
        convert(slide, target, region=region, outline=outline, composite=settings, overwrite=True)
        with Image.open(target) as image:
            assert {*np.asarray(image)[-1, 0].tolist()} == {255 * inverted}
        with pytest.raises(ConversionError, match="Only PNG files hold a composite"):
            convert(slide, tmp_path / "roi.tif", composite=settings)


def test_composite_of_a_damaged_slide_raises(write, tmp_path):
    pixels = slides.picture(200, 300, 6, "uint16").transpose(2, 0, 1)
    path = write(pixels, metadata={"axes": "CYX"}, photometric="minisblack", compression="zlib")
    with open_slide(path, "cpu") as slide:
        settings = slide.composite([0, 2])
        place = int(slide.layout.levels[0].grid.offsets.reshape(-1)[0])
    data = bytearray(path.read_bytes())
    data[place : place + 40] = bytes(40)
    path.write_bytes(data)
    with pytest.raises(TileError, match="level 0"):
        convert(path, tmp_path / "roi.png", composite=settings)
    assert not (tmp_path / "roi.png").exists()


def test_too_large_region_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(png, "MOST_PIXELS", 1000)
    with pytest.raises(RegionError, match="700 x 500 pixels is too large"):
        convert(sample_path(), tmp_path / "roi.png", region=REGION)
    assert list(tmp_path.iterdir()) == []


def test_existing_file_needs_overwrite(tmp_path):
    target = tmp_path / "roi.png"
    target.write_bytes(b"mine")
    with pytest.raises(SlideError, match="exists"):
        convert(sample_path(), target, region=REGION)
    assert target.read_bytes() == b"mine"
    convert(sample_path(), target, region=REGION, overwrite=True)
    with Image.open(io.BytesIO(target.read_bytes())) as image:
        assert image.size == (700, 500)
    assert list(tmp_path.iterdir()) == [target]
