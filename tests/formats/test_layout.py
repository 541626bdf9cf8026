import dataclasses

import numpy as np
import pytest

from napari_wsigpu.formats.layout import Encoding, LevelLayout, Part, SlideLayout, TileGrid


def level(width, height, counts=None):
    counts = np.ones((1, 2, 3), np.int64) if counts is None else counts
    grid = TileGrid(64, 32, np.arange(counts.size).reshape(counts.shape), counts)
    encoding = Encoding(1, 2, 1, 1, "<", "uint8", 3)
    return LevelLayout(width, height, 3, encoding, grid)


def slide(*levels):
    return SlideLayout("slide.tif", 1, 1, "generic-tiff", levels)


def test_the_grid_knows_its_segments():
    counts = np.array([[[5, 0], [0, 7]], [[6, 0], [3, 8]]], np.int64)
    grid = level(60, 100, counts).grid
    assert (grid.planes, grid.rows, grid.columns) == (2, 2, 2)
    assert grid.segments([1, 0], [0, 1]) == [[(2, 0), (6, 3)], [(1, 0), (5, 0)]]
    assert grid.segments([], []) == []


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


def test_downsamples_are_what_the_file_says_if_it_does():
    said = [dataclasses.replace(level(96, 128), reduction=value) for value in (1.0, 4.5)]
    assert slide(*said).downsamples == (1, 4.5)
    assert slide(level(96, 128), said[1]).downsamples == (1, 1)


def test_a_canvas_holds_each_picture_once():
    one, other = level(60, 40), level(60, 50)
    parts = [Part.at(5, 5, one), Part.at(90, 5, other), Part.at(200, 9, one)]
    canvas = LevelLayout.canvas(300, 200, parts)
    assert canvas.stored == (one, other)
    assert one.stored == (one,)
    assert (canvas.channels, canvas.dtype, canvas.grid) == (3, np.uint8, one.grid)
    (computed,) = slide(canvas).computed_levels(150)
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
    computed = slide(level(9999, 9999), level(*size)).computed_levels(1024)
    assert [(item.width, item.height) for item in computed] == expected
    for item in computed:
        assert item.computed
        assert item.missing == "finer"
        assert (item.channels, item.dtype) == (3, np.uint8)
        assert item.grid.rows * item.grid.tile_height >= item.height
        assert item.grid.columns * item.grid.tile_width >= item.width
        assert not item.grid.byte_counts.any()
