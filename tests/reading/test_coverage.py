"""What the file holds of a region is what doesn't change with the colour of the background."""

from dataclasses import replace

import numpy as np
import pytest

from napari_wsigpu import open_slide
from napari_wsigpu.model.errors import LevelError, RegionError, SlideClosedError
from napari_wsigpu.slide.slide import Slide
from tests.writers import leica, mirax, slides


def write_sparse(path):
    missing = [(0, 5, 6, 7, 30), (0, 1, 2), ()]
    slides.write_aperio(path, slides.picture(500, 700), missing=missing)


def write_mosaic(path):
    mirax.write(path, mirax.Mirax(photos={0, 1, 5, 6, 10, 15}))


def write_areas(path):
    pixels = slides.picture(96, 160)
    scans = [leica.scan(pixels, 1000, 2000), leica.scan(pixels[:50, :70], 60_000, 40_000)]
    leica.write(path, scans, (100_000, 75_000))


KINDS = {"svs": write_sparse, "mrxs": write_mosaic, "scn": write_areas}


@pytest.fixture(params=KINDS)
def slide(request, tmp_path):
    path = tmp_path / f"slide.{request.param}"
    KINDS[request.param](path)
    with open_slide(path) as slide:
        yield slide


def unchanged(slide, *region, **options):
    """Pixels that are not those of the background, whatever that is."""
    blank = True
    for value in (0, 255):
        with Slide(replace(slide.layout, background=value)) as other:
            blank &= (other.read_region(*region, **options) == value).all(axis=2)
    return ~blank


@pytest.mark.parametrize("size", [(150, 100), (1000, 800)])
@pytest.mark.parametrize("location", [(0, 0), (-37, -21), (130, 97), (100_000, 0)])
def test_mask_of_every_level(slide, location, size):
    for level in range(slide.level_count):
        mask = slide.read_mask(location, size, level)
        assert mask.dtype == np.bool_
        np.testing.assert_array_equal(mask, unchanged(slide, location, size, level))


@pytest.mark.parametrize("factor", [1.0, 1.7, 2.0, 9.0])
def test_mask_at_a_resolution(slide, factor):
    options = {"mpp": max(slide.mpp) * factor}
    mask = slide.read_mask((-37, -21), (90, 70), **options)
    assert mask.any()
    np.testing.assert_array_equal(mask, unchanged(slide, (-37, -21), (90, 70), **options))


def test_nothing_is_read(slide):
    slide.read_mask((0, 0), (500, 500))
    assert slide.stats()["bytes_read"] == 0


def test_no_such_level(slide):
    with pytest.raises(LevelError, match="has no level 9"):
        slide.read_mask((0, 0), (5, 5), 9)


@pytest.mark.parametrize("options", [{}, {"mpp": 1.0}])
@pytest.mark.parametrize("side", [10**9, 2**40, 2**62])
def test_a_mask_larger_than_memory_is_refused(slide, side, options):
    with pytest.raises(RegionError, match=r"memory|reach over"):
        slide.read_mask((0, 0), (side, side), **options)


def test_mask_of_a_closed_slide(slide):
    slide.close()
    for options in {}, {"mpp": 1.0}:
        with pytest.raises(SlideClosedError, match="was closed"):
            slide.read_mask((0, 0), (2, 2), **options)
