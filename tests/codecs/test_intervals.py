import itertools

import imagecodecs
import numpy as np
import pytest

from napari_wsigpu.codecs.jpeg_tiles import join_intervals
from tests.writers import ndpi, slides


def intervals(pixels, blocks):
    """Return the header for a JPEG of one interval, and the intervals."""
    data = ndpi.jpeg(pixels, blocks)
    places = [*ndpi.starts(data), len(data)]
    height = data.index(b"\xff\xc0") + 5
    header = data[:height] + b"\0\x08" + (8 * blocks).to_bytes(2, "big")
    header += data[height + 4 : places[0]]
    pairs = itertools.pairwise(places)
    return header, [memoryview(data)[start:end] for start, end in pairs]


@pytest.mark.parametrize("first", [0, 5, 11])
@pytest.mark.parametrize("count", [1, 2, 8, 9])
def test_joined_intervals_equal_part_of_large_jpeg(first, count):
    pixels = slides.picture(160, 64)
    header, parts = intervals(pixels, 8)
    expected = imagecodecs.jpeg_decode(ndpi.jpeg(pixels, 8))[8 * first : 8 * (first + count)]
    joined = join_intervals(header, parts[first : first + count])
    np.testing.assert_array_equal(imagecodecs.jpeg_decode(joined), expected)


def test_columns_of_intervals():
    pixels = slides.picture(64, 96)
    header, parts = intervals(pixels, 4)
    expected = imagecodecs.jpeg_decode(ndpi.jpeg(pixels, 4))
    for column in range(3):
        joined = imagecodecs.jpeg_decode(join_intervals(header, parts[column::3]))
        np.testing.assert_array_equal(joined, expected[:, 32 * column : 32 * (column + 1)])


def test_zeros_behind_the_end():
    header, parts = intervals(slides.picture(16, 16), 2)
    padded = memoryview(bytes(parts[1]) + bytes(5))
    assert join_intervals(header, [parts[0], padded]) == join_intervals(header, parts)


@pytest.mark.parametrize("cut", [1, 2, 7])
def test_an_interval_without_its_end(cut):
    header, parts = intervals(slides.picture(16, 16), 2)
    with pytest.raises(ValueError, match="is truncated"):
        join_intervals(header, [parts[0], parts[1][:-cut]])


def test_a_header_without_a_frame():
    with pytest.raises(ValueError, match="no frame"):
        join_intervals(b"\xff\xd8\xff\xda\0\2", [memoryview(b"\xff\xd0")])


def test_joined_jpeg_that_would_be_too_tall():
    header, parts = intervals(slides.picture(16, 16), 2)
    header = header.replace(b"\x08\0\x08\0\x10", b"\x08\xff\xff\0\x10")
    with pytest.raises(ValueError, match="131070 pixels"):
        join_intervals(header, parts)
