"""Pixels in device memory that look like an array of NumPy."""

import numpy as np
import pytest

from napari_wsigpu.display.device_pixels import DevicePixels


class Fetched:
    """Makes device pixels of an array, and counts the bytes that are copied."""

    def __init__(self):
        self.bytes = 0

    def __call__(self, pixels, channels=3):
        def fetch(part):
            self.bytes += part.nbytes
            return np.array(part)

        return DevicePixels(pixels, channels, fetch, 0)


@pytest.fixture
def fetched():
    return Fetched()


@pytest.fixture
def rgba():
    return np.random.default_rng(0).integers(0, 255, (5, 7, 4), np.uint8)


def test_what_is_asked_of_its_form_is_known_without_a_copy(fetched, rgba):
    pixels = fetched(rgba)
    assert (pixels.shape, pixels.ndim, pixels.size, pixels.nbytes) == ((5, 7, 3), 3, 105, 105)
    assert (len(pixels), pixels.dtype) == (5, np.uint8)
    assert not hasattr(pixels, "__cuda_array_interface__")
    assert fetched.bytes == 0


def test_one_pixel_is_copied_alone(fetched, rgba):
    np.testing.assert_array_equal(fetched(rgba)[np.int64(2), 3], rgba[2, 3, :3])
    assert fetched.bytes == 4
    gray = fetched(rgba[..., 0].astype(np.uint16))[-1, 0]
    assert (gray, gray.dtype, gray.ndim) == (rgba[-1, 0, 0], np.uint16, 0)
    with pytest.raises(IndexError):
        fetched(rgba)[9, 0]


def test_whoever_uses_it_as_an_array_gets_one(fetched, rgba):
    pixels, expected = fetched(rgba), rgba[..., :3]
    for found, wanted in [
        (np.asarray(pixels), expected),
        (np.array(pixels, float), expected.astype(float)),
        (pixels[1:3, ::2], expected[1:3, ::2]),
        (pixels + 1, expected + 1),
        (2.0 * pixels, 2.0 * expected),
        (np.maximum(expected, pixels), expected),
        (pixels.mean(), expected.mean()),
        (pixels.T, expected.T),
        (np.concatenate([pixels, expected]), np.concatenate([expected, expected])),
        (pixels[2, 3], expected[2, 3]),
    ]:
        np.testing.assert_array_equal(found, wanted)
    assert fetched.bytes == rgba.nbytes


def test_no_array_without_a_copy(fetched, rgba):
    with pytest.raises(ValueError, match="is not supported"):
        np.asarray(fetched(rgba), copy=False)
