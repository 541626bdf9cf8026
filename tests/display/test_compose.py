"""Composition of channels, compared with the same sums in double precision."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from napari_wsigpu import native
from napari_wsigpu.display.compose import compose
from napari_wsigpu.model.composite import ChannelStyle, Composite
from napari_wsigpu.model.errors import LevelError

TYPES = ("uint8", "uint16", ">u2", "int16", "uint32", "float32")
COLORS = st.from_regex(r"\A#[0-9a-f]{6}\Z")


@pytest.fixture(params=["core", "numpy"])
def core(request, monkeypatch):
    if request.param == "numpy":
        monkeypatch.setattr(native, "core", None)
    elif not native.available:
        pytest.skip("the core is not installed")


def reference(channels, composite):
    """IEC 61966-2-1 in float64, without tables."""
    total = np.zeros((*channels[0].shape, 3))
    for pixels, index in zip(channels, composite.visible, strict=True):
        style = composite.channels[index]
        low, high = style.window
        with np.errstate(invalid="ignore"):
            bright = np.clip((pixels.astype(np.float64) - low) / (high - low), 0, 1) ** style.gamma
        color = np.array([int(style.color[at : at + 2], 16) / 255 for at in (1, 3, 5)])
        encoded = np.nan_to_num(bright, nan=0.0)[..., None] * color
        total += np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    total = np.minimum(total, 1)
    shown = 255 * np.where(total <= 0.0031308, total * 12.92, 1.055 * total ** (1 / 2.4) - 0.055)
    return 255 - shown if composite.inverted else shown


@st.composite
def styles(draw):
    low = draw(st.floats(-100, 300, width=32))
    width = draw(st.floats(1, 70_000, width=32))
    gamma = draw(st.sampled_from([0.4, 1.0, 2.2]))
    return ChannelStyle("", draw(COLORS), (low, low + width), gamma, draw(st.booleans()))


@pytest.mark.parametrize("dtype", TYPES)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(channels=st.lists(styles(), min_size=1, max_size=6), inverted=st.booleans())
def test_composite_equals_the_reference(core, dtype, channels, inverted):
    composite = Composite(tuple(channels), inverted)
    rng = np.random.default_rng(0)
    kind = np.dtype(dtype)
    most = 255 if kind.itemsize == 1 else 30_000
    least = -500 if kind.kind in "if" else 0
    pixels = [rng.integers(least, most, (7, 600)).astype(kind) for _ in composite.visible]
    if kind.kind == "f" and pixels:
        pixels[0][0, :3] = np.nan, np.inf, -np.inf
        low, high = composite.channels[composite.visible[0]].window
        pixels[0][1] = np.geomspace(1e-6, 1, 600) * (high - low) + low
    black = np.full((7, 600, 3), 255 * inverted)
    expected = reference(pixels, composite) if pixels else black
    found = compose(pixels, composite, (7, 600))
    assert found.dtype == np.uint8
    assert np.abs(found - expected).max(initial=0) <= 1


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_changes_are_added_to_kept_sums(core, data):
    rng = np.random.default_rng(2)
    every = [rng.integers(0, 30_000, (7, 600), np.uint16) for _ in range(4)]
    composite, sums = None, np.full((7, 600, 4), np.nan, np.float32)
    for _ in range(4):
        before = composite
        channels = [data.draw(styles()) for _ in every] if before is None else [*before.channels]
        channels[data.draw(st.integers(0, 3))] = data.draw(styles())
        composite = Composite(tuple(channels), data.draw(st.booleans()))
        pixels = [every[index] for index in composite.visible]
        found = compose(pixels, composite, (7, 600), sums, before)
        black = np.full((7, 600, 3), 255 * composite.inverted)
        expected = reference(pixels, composite) if pixels else black
        assert np.abs(found - expected).max() <= 1


def test_kept_sums_are_used(core):
    style = ChannelStyle("", "#ffffff", (0, 255))
    dark, bright = np.zeros((2, 4), np.uint8), np.full((2, 4), 255, np.uint8)
    before, pixels = Composite((style, style, style)), [bright, dark, dark]
    sums = np.empty((2, 4, 4), np.float32)
    compose(pixels, before, dark.shape, sums)
    sums -= 0.5
    # The changed channel is dark, so the sums stay as they are.
    changed = before.styled(1, ChannelStyle("", "#ff0000", (0, 255)))
    assert (compose(pixels, changed, dark.shape, sums, before) == 188).all()


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
@pytest.mark.parametrize("gamma", [1.0, np.nan])  # 0 to the power of NaN is NaN
def test_equal_limits_are_a_step(core, dtype, gamma):
    pixels = np.array([[0, 49, 50, 255]], dtype)
    style = ChannelStyle("", "#ffffff", (50, 50), gamma)
    found = compose([pixels], Composite((style,)), pixels.shape)
    assert found[0, :, 0].tolist() == [0, 0, 255, 255]


def test_a_single_channel_looks_as_it_does_alone(core):
    pixels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    style = ChannelStyle("", "#ffffff", (0, 255))
    found = compose([pixels], Composite((style,)), pixels.shape)
    np.testing.assert_array_equal(found, np.stack([pixels] * 3, -1))


def test_channels_may_be_views_of_interleaved_pixels(core):
    pixels = np.random.default_rng(1).integers(0, 65_535, (40, 50, 5), np.uint16)
    composite = Composite(
        tuple(ChannelStyle("", color, (10, 60_000)) for color in ("#ff0000", "#00ff40", "#3000ff"))
    )
    views = [pixels[5:, ::2, index] for index in range(3)]
    copies = [view.copy() for view in views]
    np.testing.assert_array_equal(
        compose(views, composite, (35, 25)), compose(copies, composite, (35, 25))
    )


def test_channels_are_chosen_by_number():
    composite = Composite(tuple(ChannelStyle(name) for name in "abc"))
    assert composite.showing([2, 0]).visible == (0, 2)
    with pytest.raises(LevelError, match="no channel 3; the channels are 0 to 2"):
        composite.showing([3])
