import dataclasses

import numpy as np
import pytest

from napari_wsigpu.model.layout import Encoding, LevelLayout, Part, SlideLayout, TileGrid


def level(width, height, counts=None):
    counts = np.ones((1, 2, 3), np.int64) if counts is None else counts
    grid = TileGrid(64, 32, np.arange(counts.size).reshape(counts.shape), counts)
    encoding = Encoding(1, 2, 1, 1, "<", "uint8", 3)
    return LevelLayout(width, height, 3, encoding, grid)


def slide(*levels):
    return SlideLayout("slide.tif", "generic-tiff", levels)


def test_the_grid_knows_its_segments():
    counts = np.array([[[5, 0], [0, 7]], [[6, 0], [3, 8]]], np.int64)
    grid = level(60, 100, counts).grid
    assert (grid.planes, grid.rows, grid.columns) == (2, 2, 2)
    assert grid.segments([1, 0], [0, 1]) == [[(2, 0), (6, 3)], [(1, 0), (5, 0)]]
    assert grid.segments([], []) == []
    offsets, byte_counts = grid.ranges(np.array([1, 0]), np.array([0, 1]))
    np.testing.assert_array_equal(offsets, [[2, 1], [6, 5]])
    np.testing.assert_array_equal(byte_counts, [[0, 0], [3, 0]])


def test_layouts_can_not_be_changed():
    layout = slide(level(96, 128))
    for item, name in [
        (layout, "path"),
        (layout.levels[0], "width"),
        (layout.levels[0].grid, "rows"),
    ]:
        with pytest.raises((dataclasses.FrozenInstanceError, AttributeError, TypeError)):
            setattr(item, name, 1)


def test_downsamples_are_the_mean_of_both_ratios():
    layout = slide(level(1000, 600), level(333, 300), level(125, 75))
    assert layout.downsamples == (1.0, (1000 / 333 + 2) / 2, 8.0)


def test_stated_downsamples_are_used():
    said = [dataclasses.replace(level(96, 128), reduction=value) for value in (1.0, 4.5)]
    assert slide(*said).downsamples == (1, 4.5)
    assert slide(level(96, 128), said[1]).downsamples == (1, 1)


def test_a_mosaic_holds_each_picture_once():
    one, other = level(60, 40), level(60, 50)
    parts = [Part.at(5, 5, one), Part.at(90, 5, other), Part.at(200, 9, one)]
    mosaic = LevelLayout.mosaic(300, 200, parts)
    assert mosaic.stored == (one, other)
    assert one.stored == (one,)
    assert (mosaic.channels, mosaic.dtype, mosaic.grid) == (3, np.uint8, one.grid)
    computed = slide(mosaic).pyramid(150)[1].layout
    assert computed.parts == ()
    assert computed.stored == (computed,)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((1024, 1024), []),
        ((1025, 3), [(513, 2)]),
        ((5001, 2000), [(2501, 1000), (1251, 500), (626, 250)]),
        ((1, 4096), [(1, 2048), (1, 1024)]),
    ],
)
def test_computed_levels_halve_until_one_fits_a_screen(size, expected):
    pyramid = slide(level(*size)).pyramid(1024)
    assert [(item.layout.width, item.layout.height) for item in pyramid[1:]] == expected
    assert [item[::2] for item in pyramid] == [
        (0, None),
        *((i, i - 1) for i in range(1, len(pyramid))),
    ]
    for _, item, _, inserted in pyramid[1:]:
        assert item.computed
        assert not inserted
        assert item.missing == "finer"
        assert (item.channels, item.dtype) == (3, np.uint8)
        assert item.grid.rows * item.grid.tile_height >= item.height
        assert item.grid.columns * item.grid.tile_width >= item.width
        assert not item.grid.byte_counts.any()


@pytest.mark.parametrize(
    ("sides", "expected"),
    [
        # (number, longer side, finer) of what is computed
        ((4096, 2048, 1024), []),
        ((4096, 1025), [(2, 2048, 0), (3, 513, 1)]),
        ((4096, 1024), [(2, 2048, 0)]),
        ((9000, 1125), [(2, 4500, 0), (3, 2250, 2), (4, 563, 1)]),
        ((40001, 2500, 900), [(3, 20001, 0), (4, 10001, 3), (5, 5001, 4), (6, 1250, 1)]),
        ((9000, 3000), [(2, 4500, 0), (3, 1500, 1), (4, 750, 3)]),
        ((4200, 2000, 1000), []),
        ((4201, 2000), [(2, 2101, 0), (3, 1000, 1)]),
        ((1024, 10), []),
        ((5000, 10), [(2, 2500, 0), (3, 1250, 2), (4, 625, 3)]),
    ],
)
def test_levels_are_inserted_where_steps_are_large(sides, expected):
    layout = slide(*(level(side, side // 3) for side in sides))
    pyramid = layout.pyramid(1024)
    computed = [item for item in pyramid if item.layout.computed]
    found = [(item.number, item.layout.width, item.finer) for item in computed]
    assert found == sorted(expected, key=lambda item: -item[1])
    own = [item for item in pyramid if not item.layout.computed]
    assert [item.number for item in own] == list(range(len(sides)))
    assert [item.finer for item in own] == [None, *range(len(sides) - 1)]
    assert tuple(item.layout for item in own) == layout.levels
    assert sorted(item.number for item in pyramid) == list(range(len(pyramid)))
    widths = [item.layout.width for item in pyramid]
    assert widths == sorted(widths, reverse=True)
    for item in computed:
        finer = next(other.layout for other in pyramid if other.number == item.finer)
        assert item.inserted == (item.layout.width > sides[-1])
        assert item.layout.height == -(-finer.height // 2)


@pytest.mark.parametrize(
    ("tile", "expected"),
    [
        ((256, 240), (256, 240)),
        ((2048, 700), (1024, 350)),
        ((8, 4096), (256, 2048)),
        ((8192, 1023), (256, 256)),  # too large, and no even number
    ],
)
def test_computed_tiles_cover_whole_tiles_of_the_finer_level(tile, expected):
    grid = TileGrid(*tile, np.zeros((1, 9, 9), np.int64), np.zeros((1, 9, 9), np.int64))
    (_, item, *_) = slide(dataclasses.replace(level(9000, 8000), grid=grid)).pyramid(1024)
    found = item.layout.grid
    assert (found.tile_height, found.tile_width) == expected
    assert (found.rows, found.columns) == (-(-4000 // expected[0]), -(-4500 // expected[1]))
