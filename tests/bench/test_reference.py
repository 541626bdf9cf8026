"""The right pixels, and how far others are from them."""

from contextlib import ExitStack

import numpy as np
import pytest
import tifffile

from napari_wsigpu import open_slide
from napari_wsigpu.bench.reference import OwnReference, Region, TiffReference, find_pages
from napari_wsigpu.bench.target import Target
from tests import slides

HEIGHT, WIDTH = 150, 200
REGION = Region(30, 50, 100, 90)
LAYOUTS = {
    "tiles": {},
    "strips": {"tile": None, "rowsperstrip": 32},
    "jpeg": {"compression": "jpeg"},
    "big endian": {"byteorder": ">"},
}


@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("level", [0, 1])
def test_the_page_of_a_level(tmp_path, options, level):
    path = tmp_path / "slide.tif"
    slides.write_pyramid(path, slides.picture(HEIGHT, WIDTH), (2,), subifds=True, **options)
    with tifffile.TiffFile(path) as file, open_slide(path) as slide:
        image = slide.layout.levels[level]
        pages = find_pages(file, image)
        expected = file.series[0].levels[level].asarray()
        reference = TiffReference(file, pages, image)
        whole = Region(0, 0, image.width, image.height)
        assert reference.difference(whole, expected) == 0
        assert OwnReference(slide, level).difference(whole, expected) == 0


def test_a_page_for_each_channel(tmp_path):
    path = tmp_path / "slide.ome.tif"
    pixels = np.moveaxis(slides.picture(HEIGHT, WIDTH, 4, "uint16"), -1, 0)
    slides.write_pyramid(path, pixels, (), metadata={"axes": "CYX"}, photometric="minisblack")
    with ExitStack() as stack:
        target = Target(path, 0, stack)
        assert target.facts()["right_pixels_by"] == "tifffile"
        found = np.moveaxis(pixels, 0, -1).copy()
        assert target.difference(target.whole, found) == 0
        found[149, 7, 3] ^= 8
        assert target.difference(target.whole, found) == 8


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "slide.tif"
    slides.write_pyramid(path, slides.picture(HEIGHT, WIDTH), ())
    with ExitStack() as stack:
        yield Target(path, 0, stack)


@pytest.mark.parametrize("place", [(0, 0, 0), (89, 99, 2), (40, 13, 1)])
def test_a_single_wrong_sample_is_found(target, place):
    pixels = tifffile.imread(target.path)[50:140, 30:130].copy()
    assert target.difference(REGION, pixels) == 0
    pixels[place] ^= 4
    assert target.difference(REGION, pixels) == 4


def test_another_shape_is_infinitely_far(target):
    assert target.difference(REGION, np.zeros((90, 99, 3), np.uint8)) == float("inf")


def test_missing_tiles_have_no_right_pixels(tmp_path):
    path = tmp_path / "sparse.tif"
    pixels = slides.picture(128, 128)
    tiles = [pixels[:64, :64], None, None, pixels[64:, 64:]]
    with tifffile.TiffWriter(path) as file:
        file.write(
            iter(tiles), shape=pixels.shape, dtype=np.uint8, tile=(64, 64), photometric="rgb"
        )
    with ExitStack() as stack:
        target = Target(path, 0, stack)
        found = pixels.copy()
        found[:64, 64:] = 1
        assert target.difference(target.whole, found) == 0
        found[70, 70] ^= 2
        assert target.difference(target.whole, found) == 2


def test_where_tifffile_has_no_page_our_cpu_decoder_is_right(tmp_path, monkeypatch):
    path = tmp_path / "slide.tif"
    slides.write_pyramid(path, slides.picture(HEIGHT, WIDTH), ())
    monkeypatch.setattr("napari_wsigpu.bench.target.find_pages", lambda file, image: [])
    with ExitStack() as stack:
        target = Target(path, 0, stack)
        assert target.facts()["right_pixels_by"] == "napari-wsigpu, CPU"
        pixels = tifffile.imread(path)
        assert target.difference(target.whole, pixels) == 0
        pixels[149, 199, 2] ^= 1
        assert target.difference(target.whole, pixels) == 1
