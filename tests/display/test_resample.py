import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.ndimage import map_coordinates

from napari_wsigpu.display.resample import Axis, draw, draw_smoothly, shows_blocks
from tests.writers import slides


def resample(source, down, across, out):
    """Draw a whole picture, as displays do."""
    if shows_blocks(down, across, out):
        draw_smoothly(source, down, across, out)
    else:
        rows = down.under(out.shape[0], source.shape[0])
        draw(source, rows, across.under(out.shape[1], source.shape[1]), out)


@given(st.integers(1, 300), st.integers(1, 300), st.data())
def test_axes_lie_under_the_centres_of_pixels(length, other, data):
    start = data.draw(st.integers(0, other - 1))
    count = data.draw(st.integers(1, other - start))
    ratio = length / other
    found = Axis(start * ratio, ratio).under(count, length)
    exact = [((2 * i + 1) * length) // (2 * other) for i in range(start, start + count)]
    assert np.abs(found - exact).max() <= 1  # a centre that lies on a border may be either's
    assert (np.diff(found) >= 0).all()


@pytest.mark.parametrize("channels", [0, 2, 3])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
@pytest.mark.parametrize("factor", [0.5, 1, 1.7, 2, 4])
def test_small_factors_take_nearest_pixels(channels, dtype, factor):
    source = slides.picture(13, 17, channels or 1, dtype)
    source = source if channels else source[..., 0]
    height, width = int(13 * factor), int(17 * factor)
    down, across = Axis(0, 13 / height), Axis(0, 17 / width)
    canvas = np.zeros((height + 4, width + 6, *source.shape[2:]), dtype)
    resample(source, down, across, canvas[2:-2, 3:-3])
    rows = ((np.arange(height) + 0.5) * 13 / height).astype(int)
    columns = ((np.arange(width) + 0.5) * 17 / width).astype(int)
    np.testing.assert_array_equal(canvas[2:-2, 3:-3], source[np.ix_(rows, columns)])
    assert not canvas[:2].any()
    assert not canvas[:, :3].any()


@pytest.mark.parametrize("channels", [0, 3, 4])
@pytest.mark.parametrize("start", [0, 3.4])
@pytest.mark.parametrize("odd", [0, 3])
def test_large_factors_are_smooth(channels, start, odd):
    source = slides.picture(20, 24, 4)
    source[..., 3] = 255
    source = source[..., :channels] if channels else source[..., 0]
    factor = 16
    height, width = 12 * factor + odd, 14 * factor + odd
    out = np.empty((height, width, *source.shape[2:]), np.uint8)
    resample(source, Axis(start, 1 / factor), Axis(start, 1 / factor), out)
    # Blocks of 4 x 4 pixels have the value at their centre.
    y = start + (np.arange(-(-height // 4)) + 0.5) * 4 / factor - 0.5
    x = start + (np.arange(-(-width // 4)) + 0.5) * 4 / factor - 0.5
    for channel in range(channels or 1):
        plane = source[..., channel] if channels else source
        seen = out[..., channel] if channels else out
        linear = map_coordinates(
            plane.astype(float), np.meshgrid(y, x, indexing="ij"), order=1, mode="nearest"
        )
        np.testing.assert_allclose(seen[::4, ::4], linear, atol=1.5)


def test_channels_of_a_wider_array_can_be_drawn():
    source = slides.picture(9, 11, 4)[..., 1:3]
    out = np.empty((18, 22, 2), np.uint8)
    resample(source, Axis(0, 0.5), Axis(0, 0.5), out)
    np.testing.assert_array_equal(out, source.repeat(2, 0).repeat(2, 1))
