import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from napari_wsigpu.reading.average import area_average, resample_area
from tests.writers import slides

FACTORS = st.integers(1, 5)


@given(
    pixels=st.sampled_from(["uint8", "int8", "uint16", "int16", "uint32", "int32"]).flatmap(
        lambda dtype: hnp.arrays(dtype, st.tuples(*[st.integers(1, 12)] * 2, st.integers(1, 4)))
    ),
    factor=FACTORS,
)
def test_integers_are_means_rounded_half_up(pixels, factor):
    found = area_average(pixels, factor, factor)
    assert found.dtype == pixels.dtype
    np.testing.assert_array_equal(found, slides.average(pixels, factor))


@given(
    shape=st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(1, 4)),
    factor_y=FACTORS,
    factor_x=FACTORS,
)
def test_blocks_may_be_oblong(shape, factor_y, factor_x):
    pixels = slides.picture(*shape)
    found = area_average(pixels, factor_y, factor_x)
    assert found.shape == (-(-shape[0] // factor_y), -(-shape[1] // factor_x), shape[2])
    for y, x in np.ndindex(*found.shape[:2]):
        block = pixels[y * factor_y :, x * factor_x :][:factor_y, :factor_x]
        expected = np.floor(block.mean((0, 1), dtype=np.float64) + 0.5)
        np.testing.assert_array_equal(found[y, x], expected)


@pytest.mark.parametrize("factor", [2, 3])
def test_floats_are_means(factor):
    pixels = slides.picture(20, 31, 2, "float32")
    found = area_average(pixels, factor, factor)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, slides.average(pixels, factor))


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "int32", "float32"])
@pytest.mark.parametrize("factor", [2, 4])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_whole_blocks_of_pictures_are_means_too(dtype, factor, channels):
    stored = slides.picture(9 * factor, 14 * factor, channels, dtype)
    # One of them lies in rows with others between them.
    for pixels in (np.stack([stored, stored[::-1]]), stored[None, :, : 10 * factor]):
        size = tuple(length // factor for length in pixels.shape[1:3])
        out = np.empty((len(pixels), *size, channels), dtype)
        assert resample_area(pixels, size, (float(factor),) * 2, out=out) is out
        for found, picture in zip(out, pixels, strict=True):
            np.testing.assert_array_equal(found, slides.average(picture, factor))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int8", "int16", "int32"])
@pytest.mark.parametrize("factor", [2, 16, 17, 40])
def test_extreme_values_do_not_overflow(dtype, factor):
    for value in (np.iinfo(dtype).min, np.iinfo(dtype).max):
        pixels = np.full((50, 50, 1), value, dtype)
        assert (area_average(pixels, factor, factor) == value).all()


@pytest.mark.parametrize("dtype", ["uint32", "int32", "uint64", "int64"])
def test_extreme_values_of_large_types_keep_their_size(dtype):
    """As exactly as floats of 64 bits can say."""
    for value in (np.iinfo(dtype).min, np.iinfo(dtype).max):
        pixels = np.full((1, 50, 50, 1), value, dtype)
        for found in (
            area_average(pixels[0], 3, 2),
            resample_area(pixels, (20, 20), (2.5, 2.5)),
            resample_area(pixels, (25, 25), (2.0, 2.0)),
        ):
            assert found.dtype == dtype
            np.testing.assert_allclose(found.astype(float), float(value), rtol=1e-12)


def test_extreme_floats_do_not_overflow():
    pixels = np.full((4, 4, 1), np.finfo("float32").max, np.float32)
    assert (area_average(pixels, 2, 2) == pixels[:2, :2]).all()
