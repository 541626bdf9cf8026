"""Many regions at once, where the caller wants them."""

from types import SimpleNamespace

import numpy as np
import pytest

from napari_wsigpu import open_slide
from napari_wsigpu.model.errors import LevelError, RegionError, TileError
from tests.writers import slides

PLACES = [(0, 0), (-20, 7), (133, 101), (5000, 0), (133, 101)]


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    if request.param == "cuda":
        request.getfixturevalue("host_gpu")
    return request.param


@pytest.fixture
def slide(tmp_path, device):
    path = tmp_path / "slide.svs"
    slides.write_aperio(path, slides.picture(300, 400))
    with open_slide(path) as slide:
        yield slide


@pytest.mark.parametrize("options", [{}, {"level": 1}, {"mpp": 0.998}, {"mpp": 1.3}])
@pytest.mark.parametrize("given", [False, True])
def test_pixels_are_those_of_single_regions(slide, device, options, given):
    whole = slide.empty((7, 40, 60, 3), np.dtype(np.uint8), device)
    whole[...] = 9
    out = whole[1:6] if given else None
    pixels = slide.read_batch(PLACES, (60, 40), device=device, out=out, **options)
    if given:
        assert np.shares_memory(pixels, whole)
        assert (whole[[0, 6]] == 9).all()
    for picture, place in zip(pixels, PLACES, strict=True):
        np.testing.assert_array_equal(picture, slide.read_region(place, (60, 40), **options))


def test_none(slide, device):
    assert slide.read_batch([], (60, 40), device=device).shape == (0, 40, 60, 3)


@pytest.mark.parametrize("shape", [(4, 40, 60, 3), (5, 60, 40, 3), (5, 40, 60)])
def test_an_array_of_another_shape(slide, device, shape):
    with pytest.raises(RegionError, match=r"out must be .*\(5, 40, 60, 3\) and type uint8"):
        slide.read_batch(PLACES, (60, 40), device=device, out=np.empty(shape, np.uint8))


def test_memory_that_must_not_be_written(slide, device):
    data = bytes(5 * 40 * 60 * 3)
    given = np.frombuffer(data, np.uint8).reshape(5, 40, 60, 3)
    with pytest.raises(RegionError, match="out must be a writable"):
        slide.read_batch(PLACES, (60, 40), device=device, out=given)
    assert not any(data)


def test_an_array_of_another_kind(slide):
    with pytest.raises(RegionError, match="NumPy array"):
        slide.read_batch(PLACES, (60, 40), out=given_by_others((5, 40, 60, 3)))


def given_by_others(shape):
    """Return what looks like an array, and is in the memory of a device."""
    flags = SimpleNamespace(c_contiguous=True)
    return SimpleNamespace(flags=flags, shape=shape, dtype=np.dtype(np.uint8))


def test_what_can_not_be(slide):
    with pytest.raises(LevelError):
        slide.read_batch(PLACES, (60, 40), 9)
    with pytest.raises(RegionError, match="whole numbers"):
        slide.read_batch([(1.5, 2)], (60, 40))
    with pytest.raises(RegionError, match="not a list of locations"):
        slide.read_batch(5, (60, 40))


def test_locations_may_be_any_iterable(slide):
    expected = slide.read_batch(PLACES, (60, 40))
    np.testing.assert_array_equal(slide.read_batch(iter(PLACES), (60, 40)), expected)


def test_damage_is_located(tmp_path):
    path = tmp_path / "damaged.svs"
    slides.write_aperio(path, slides.picture(60, 60), (), encode=lambda tile: b"damaged")
    with open_slide(path) as slide, pytest.raises(TileError) as caught:
        slide.read_batch([(100, 0), (3, 4)], (20, 20))
    assert caught.value.locations == ((3, 4),)
