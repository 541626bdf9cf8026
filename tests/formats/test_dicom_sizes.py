"""Sizes of pixels and levels of DICOM slides, from all places that may say them."""

import numpy as np
import pytest
from wsidicom import WsiDicom

from napari_wsigpu import open_slide
from tests.writers import dicomslides, slides
from tests.writers.dicomslides import item

PIXELS = slides.picture(300, 500)
SPACING = (0.0005, 0.00025)


def save(folder, name, pixels, **options):
    folder.mkdir(exist_ok=True)
    return dicomslides.save(folder / name, dicomslides.instance(pixels, "raw", **options))


def measures(spacing):
    return [item(PixelMeasuresSequence=[item(PixelSpacing=list(spacing))])]


def read(path):
    with open_slide(path, "cpu") as slide:
        return slide.mpp, slide.layout.problems


def test_shared_groups(tmp_path):
    path = save(tmp_path, "a.dcm", PIXELS, spacing=SPACING)
    mpp, problems = read(path)
    with WsiDicom.open(path) as oracle:
        assert mpp == pytest.approx((oracle.mpp.width, oracle.mpp.height))
    assert problems == ()


@pytest.mark.parametrize("shared", [None, [item(PixelMeasuresSequence=[])], []])
def test_groups_of_frames(tmp_path, shared):
    own = {"SharedFunctionalGroupsSequence": shared} if shared is not None else {}
    dataset = dicomslides.instance(PIXELS, "raw", sparse=True, **own)
    if shared is None:
        del dataset.SharedFunctionalGroupsSequence
    for frame in dataset.PerFrameFunctionalGroupsSequence:
        frame.PixelMeasuresSequence = [item(PixelSpacing=[0.003, 0.002])]
    dataset.ImagedVolumeWidth, dataset.ImagedVolumeHeight = 500 * 0.002, 300 * 0.003
    mpp, problems = read(dicomslides.save(tmp_path / "a.dcm", dataset))
    assert mpp == pytest.approx((2, 3))
    assert problems == ()


def test_the_size_of_the_whole_image(tmp_path):
    path = save(
        *(tmp_path, "a.dcm", PIXELS),
        SharedFunctionalGroupsSequence=[],
        **{"ImagedVolumeWidth": 1.0, "ImagedVolumeHeight": 1.5},
    )
    assert read(path) == (pytest.approx((2, 5)), ())


def test_none_at_all(tmp_path):
    nothing = dict.fromkeys(
        ["SharedFunctionalGroupsSequence", "ImagedVolumeWidth", "ImagedVolumeHeight"]
    )
    assert read(save(tmp_path, "a.dcm", PIXELS, **nothing)) == (None, ())


def test_contradiction_is_reported(tmp_path):
    path = save(tmp_path, "a.dcm", PIXELS, ImagedVolumeWidth=9.0)
    mpp, [problem] = read(path)
    assert mpp == pytest.approx((0.25, 0.5))
    assert "contradicts its pixel spacing; the spacing is used" in problem


def padded(pixels, side):
    """Fill up the last tiles with black, as if they belonged to the picture."""
    beyond = [(0, -length % side) for length in pixels.shape[:2]]
    return np.pad(pixels, (*beyond, (0, 0)))


@pytest.mark.parametrize("shape", [(300, 500), (700, 260), (400, 400), (129, 1025)])
@pytest.mark.parametrize("pads_first", [False, True])
def test_padded_levels_are_cropped(tmp_path, shape, pads_first):
    base = slides.picture(*shape)
    base = padded(base, 64) if pads_first else base
    levels, folder = [base], tmp_path / "slide"
    for _ in range(3):
        levels.append(slides.average(levels[-1], 2))
    for number, level in enumerate(levels):
        stored = level if number == 0 else padded(level, 64)
        scaled = tuple(size * 2**number for size in SPACING)
        save(folder, f"{9 - number}.dcm", stored, spacing=scaled)
    with open_slide(folder, "cpu") as slide:
        assert slide.level_dimensions == tuple(level.shape[1::-1] for level in levels)
        np.testing.assert_allclose(slide.level_downsamples, [1, 2, 4, 8], rtol=0.02)
        for number, level in enumerate(levels):
            np.testing.assert_array_equal(slide.levels[number][...], level)
        assert slide.layout.problems == ()


def test_levels_that_are_rounded_stay_as_they_are(tmp_path):
    levels = [slides.picture(301, 503), slides.picture(75, 125), slides.picture(19, 32)]
    for number, level in enumerate(levels):
        scaled = tuple(size * 503 / level.shape[1] for size in SPACING)
        save(tmp_path / "slide", f"{number}.dcm", level, spacing=scaled)
    with open_slide(tmp_path / "slide", "cpu") as slide:
        assert slide.level_dimensions == tuple(level.shape[1::-1] for level in levels)
