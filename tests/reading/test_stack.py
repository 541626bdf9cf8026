"""Levels of all planes as arrays, compared with numpy's indexing."""

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from napari_wsigpu import open_slide
from napari_wsigpu.viewer.layers.stack_axes import stacked
from tests.writers.stacks import stack, write_ome

SHAPE = (2, 5, 96, 160, 2)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    path = tmp_path_factory.mktemp("stack") / "a.ome.tif"
    pixels = stack()
    write_ome(path, pixels)
    with open_slide(path) as slide:
        yield slide, np.moveaxis(pixels, 2, -1)


def stack_of(slide, channel=None):
    return stacked(slide, [slide.level_array(0, channel, tolerant=True)])[0]


def indices(length):
    steps = st.sampled_from([1, 1, 1, 2, -1])
    edges = st.none() | st.integers(-length - 2, length + 2)
    return st.integers(-length, length - 1) | st.builds(slice, edges, edges, steps)


@settings(max_examples=40)
@given(keys=st.tuples(*map(indices, SHAPE)), count=st.integers(0, 5), dots=st.booleans())
def test_any_index_is_as_numpy_has_it(opened, keys, count, dots):
    slide, pixels = opened
    key = (..., *keys[5 - count :]) if dots else keys[:count]
    expected = pixels[key]
    found = stack_of(slide)[key]
    assert found.shape == expected.shape
    np.testing.assert_array_equal(np.asarray(found), expected)


def test_a_part_is_cut_before_a_plane_is_chosen(opened):
    slide, pixels = opened
    level = stack_of(slide, 1)
    assert (level.shape, level.ndim, level.size) == (SHAPE[:4], 4, pixels[..., 1].size)
    assert len(level) == 2
    assert len(level.chunks) == 4
    part = level[:, :, 10:50, 20:30]
    assert not isinstance(part, np.ndarray)
    assert part.shape == (2, 5, 40, 10)
    pixel = part[1, 3]
    assert isinstance(pixel, np.ndarray)
    np.testing.assert_array_equal(pixel, pixels[1, 3, 10:50, 20:30, 1])


def test_one_channel_of_a_viewers_stack_stays_a_stack(opened):
    slide, pixels = opened
    split = stack_of(slide)[..., 1]
    assert (split.shape, split.channel) == (SHAPE[:4], 1)
    assert copy.deepcopy(split) is split
    np.testing.assert_array_equal(split[1, 4], pixels[1, 4, ..., 1])


@pytest.mark.parametrize("key", [2, (0, 5), (0, 0, 96), (0,) * 6, (..., ...), True, 1.5, [0]])
def test_wrong_indices(opened, key):
    with pytest.raises(IndexError):
        stack_of(opened[0])[key]
