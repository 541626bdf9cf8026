"""Default colours and contrast limits of channels."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from napari_wsigpu.model.appearance import (
    BLUE,
    COLORS,
    GREEN,
    MAGENTA,
    ORANGE,
    RED,
    channel_colors,
    contrast_limits,
    dye_color,
)
from napari_wsigpu.model.layout import Channel


@pytest.mark.parametrize(
    ("name", "color"),
    [
        ("DAPI", BLUE),
        ("Hoechst 33342", BLUE),
        ("405 - DAPI (c1)", BLUE),
        ("AF405", BLUE),
        ("FITC", GREEN),
        ("eGFP", GREEN),
        ("Alexa Fluor 488", GREEN),
        ("Opal 520", GREEN),
        ("TRITC", ORANGE),
        ("Cy3", ORANGE),
        ("CD3-AF555", ORANGE),
        ("Texas Red", RED),
        ("mCherry", RED),
        ("Cy3.5", RED),
        ("Alexa 594", RED),
        ("Cy5", MAGENTA),
        ("AF647", MAGENTA),
        ("CD8", None),
        ("AF", None),
        ("CY30", None),
        ("apclone", None),
        ("", None),
    ],
)
def test_dyes_have_their_usual_colors(name, color):
    assert dye_color(name) == color


def test_file_color_has_precedence_and_colors_are_unique():
    channels = [Channel("DAPI", "#123456"), Channel("CD8"), Channel("Cy5"), Channel("PanCK")]
    assert channel_colors(channels) == ["#123456", COLORS[0], MAGENTA, COLORS[2]]


def test_a_single_channel_has_a_color_only_if_it_is_known():
    assert channel_colors([Channel("channel 0")]) == [None]
    assert channel_colors([Channel("DAPI")]) == [BLUE]


@given(st.lists(st.builds(Channel, st.text(max_size=12)), min_size=2, max_size=20))
def test_each_of_several_channels_has_a_color(channels):
    assert all(color and len(color) == 7 for color in channel_colors(channels))


def test_a_bright_speck_does_not_hide_the_signal():
    rng = np.random.default_rng(0)
    pixels = rng.integers(100, 900, (500, 500)).astype(np.uint16)
    pixels[:5, :10] = 65535  # 0.02 %
    low, high = contrast_limits(pixels)
    assert 100 <= low < 120
    assert 850 < high < 900


def test_sparse_signal_is_shown_between_the_extremes():
    pixels = np.zeros((100, 100), np.uint16)
    pixels[0, 0] = 700
    assert contrast_limits(pixels) == (0, 700)


@given(st.lists(st.floats(width=32), max_size=50))
def test_limits_are_finite_and_in_order(values):
    low, high = contrast_limits(np.array(values, np.float32))
    assert np.isfinite([low, high]).all()
    assert low < high
