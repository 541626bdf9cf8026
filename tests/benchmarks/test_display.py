"""What the benchmark of the display takes for exact."""

import numpy as np
import pytest
import tifffile

from benchmarks.displaying import Truth
from benchmarks.walking import Pose
from napari_wsigpu import open_slide

WIDTH, HEIGHT = CANVAS = 640, 400
ROWS = range(HEIGHT)
SOME = [1, 50, 150, 398]


@pytest.fixture(scope="module")
def levels():
    pixels = np.random.default_rng(0).integers(0, 256, (2048, 3072, 3), dtype=np.uint8)
    return [pixels, pixels[::2, ::2], pixels[::4, ::4]]


@pytest.fixture(scope="module")
def truth(levels, tmp_path_factory):
    path = tmp_path_factory.mktemp("display") / "noise.tiff"
    with tifffile.TiffWriter(path) as file:
        for number, pixels in enumerate(levels):
            file.write(pixels, tile=(256, 256), photometric="rgb", subfiletype=int(number > 0))
    with open_slide(path, device="cpu") as slide:
        yield Truth(slide, CANVAS, tolerance=0)


def shown(pixels, top, left):
    return pixels[top : top + HEIGHT, left : left + WIDTH].copy()


def pose_of(top, left, factor=1):
    """Look at a level from this corner on, a quarter of its pixel further."""
    y, x = ((corner + side / 2 - 0.25) * factor for corner, side in ((top, HEIGHT), (left, WIDTH)))
    return Pose(1 / factor, y - 0.5, x - 0.5)


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("rows", [ROWS, SOME])
def test_the_pixels_of_the_level_for_the_view_are_exact(truth, levels, level, rows):
    expected = truth.rows(pose_of(50, 70, 1 << level), rows)
    assert expected[1].all()
    assert truth.agrees(shown(levels[level], 50, 70)[list(rows)], expected)


@pytest.mark.parametrize("step", [(0, 1), (1, 0)])
def test_a_picture_that_is_one_pixel_off_is_not_exact(truth, levels, step):
    expected = truth.rows(pose_of(50, 70), SOME)
    moved = shown(levels[0], 50 + step[0], 70 + step[1])
    assert not truth.agrees(moved[SOME], expected)


def test_one_wrong_sample_is_not_exact(truth, levels):
    picture = shown(levels[0], 50, 70)
    picture[150, 639, 2] ^= 1
    assert not truth.agrees(picture[SOME], truth.rows(pose_of(50, 70), SOME))


def test_a_coarser_level_is_not_exact(truth, levels):
    coarse = levels[1].repeat(2, axis=0).repeat(2, axis=1)
    expected = truth.rows(pose_of(50, 70), ROWS)
    assert not truth.agrees(shown(coarse, 50, 70), expected)


def test_what_lies_outside_the_slide_is_not_looked_at(truth, levels):
    picture = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    picture[100:, 200:] = levels[0][:300, :440]
    expected = truth.rows(pose_of(-100, -200), ROWS)
    assert expected[1].sum() == 300 * 440
    assert truth.agrees(picture, expected)
