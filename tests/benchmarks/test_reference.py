"""The right pixels, and how far others are from them."""

from contextlib import ExitStack

import numpy as np
import pytest
import tifffile

from benchmarks.transfers.reference import (
    ReaderReference,
    Region,
    TiffReference,
    find_pages,
)
from benchmarks.transfers.target import Target
from napari_wsigpu import open_slide
from tests.writers import slides

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


@pytest.mark.parametrize("axes", ["cyx", "yxc", "yx", "tzcyx", "xyc"])
def test_a_level_as_zarr_has_it(tmp_path, axes):
    zarrs = pytest.importorskip("tests.writers.zarrs", exc_type=ImportError)
    lengths = {"t": 2, "z": 5, "c": 3, "y": HEIGHT, "x": WIDTH}
    shape = [lengths[letter] for letter in axes]
    whole = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    rendered = {"omero": {"rdefs": {"defaultZ": 2}}}
    zarrs.write_image(tmp_path / "s.zarr", zarrs.halved(whole, axes, 1), axes, more=rendered)
    with ExitStack() as stack:
        target = Target(tmp_path / "s.zarr", 1, stack)
        assert target.facts()["right_pixels_by"] == "zarr-python"
        plane = whole[tuple({"t": 0, "z": 2}.get(letter, slice(None)) for letter in axes)]
        order = [letter for letter in axes if letter in "cyx"]
        plane = plane.transpose([order.index(letter) for letter in "yxc" if letter in order])
        found = plane.reshape(HEIGHT, WIDTH, -1)[::2, ::2].copy()
        part = found[20:60, 30:95].copy()
        assert target.difference(target.whole, found) == 0
        assert target.difference(Region(30, 20, 65, 40), part) == 0
        assert target.by_zarr is not None
        np.testing.assert_array_equal(target.by_zarr(Region(30, 20, 65, 40)), part)
        found[70, 9, -1] ^= 4
        assert target.difference(target.whole, found) == 4


def test_another_readers_differences_are_found_in_bands(monkeypatch):
    monkeypatch.setattr("benchmarks.transfers.reference.BAND", 7)
    pixels = np.random.default_rng(0).integers(0, 200, (HEIGHT, WIDTH, 3)).astype(np.uint8)

    def read(region):
        left, top, width, height = region
        return pixels[top : top + height, left : left + width]

    reference = ReaderReference("this", read)
    found = read(REGION).copy()
    assert reference.difference(REGION, found) == 0
    found[-1, -1, -1] += 9
    assert reference.difference(REGION, found) == 9


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
    monkeypatch.setattr("benchmarks.transfers.target.find_pages", lambda file, image: [])
    with ExitStack() as stack:
        target = Target(path, 0, stack)
        assert target.facts()["right_pixels_by"] == "napari-wsigpu, CPU"
        pixels = tifffile.imread(path)
        assert target.difference(target.whole, pixels) == 0
        pixels[149, 199, 2] ^= 1
        assert target.difference(target.whole, pixels) == 1
