import numpy as np
import pytest

from napari_wsigpu import open_slide
from napari_wsigpu.formats.describe import describe
from napari_wsigpu.formats.fields import iso_date
from tests import oracles
from tests.writers import slides, tiffbytes, trestle
from tests.writers.tiffbytes import ASCII, RATIONAL, SHORT


@pytest.fixture
def path(tmp_path):
    return tmp_path / "slide.tif"


def stored(height=203, width=310):
    pixels = slides.picture(height, width)
    return [pixels, pixels[::2, ::2], pixels[::4, ::4]]


@pytest.mark.parametrize(
    "overlaps",
    [
        None,
        "0 0 0 0 0 0",
        "8 6 4 3 2 1",  # of another number of pixels at each level
        "8 6",  # of level 0 alone
        "0 5 3 0",
        "30 20 15 10 7 5",  # tiles over more than their neighbours
    ],
)
def test_levels_are_openslides(path, overlaps):
    trestle.write(path, stored(), overlaps)
    dimensions, downsamples = oracles.openslide_shape(path)
    with open_slide(path) as slide:
        assert slide.vendor == oracles.openslide_properties(path)["openslide.vendor"] == "trestle"
        assert slide.layout.problems == ()
        assert slide.level_dimensions == dimensions
        assert slide.level_downsamples == pytest.approx(downsamples, rel=1e-12)
        for index, level in enumerate(slide.levels):
            expected = oracles.openslide_level(path, index)
            np.testing.assert_array_equal(level[...], expected)
            part = np.s_[13:150:7, 9:140:5] if index == 0 else np.s_[3:40, 5:45]
            np.testing.assert_array_equal(level[part], expected[part])
            np.testing.assert_array_equal(level[..., 1], expected[..., 1])


def test_a_region_over_tiles_and_the_border(path):
    trestle.write(path, stored(), "8 6 4 3 2 1")
    with open_slide(path) as slide, oracles.openslide.OpenSlide(path) as other:
        rgba = np.asarray(other.read_region((200, 150), 0, (100, 90)))
        expected = np.where(rgba[..., 3:] > 0, rgba[..., :3], 0xE6)
        np.testing.assert_array_equal(slide.read_region((200, 150), (100, 90)), expected)


def test_an_image_smaller_than_a_tile(path):
    trestle.write(path, [slides.picture(20, 30)], "8 6")
    with open_slide(path) as slide:
        np.testing.assert_array_equal(slide.levels[0][...], oracles.openslide_level(path))


def test_properties_are_openslides(path):
    trestle.write(path, stored(), "8 6 4 3 2 1")
    properties = oracles.openslide_properties(path)
    prefix = "trestle."
    expected = {
        key.removeprefix(prefix): value
        for key, value in properties.items()
        if key.startswith(prefix)
    }
    with open_slide(path) as slide:
        assert slide.metadata["trestle"] == expected
        assert len(expected) == 7
        assert slide.mpp == pytest.approx(
            (float(properties["openslide.mpp-x"]), float(properties["openslide.mpp-y"]))
        )
        assert slide.mpp == pytest.approx((0.4, 0.8))
        assert slide.objective == float(properties["openslide.objective-power"])
        background = f"{int(slide.layout.background):02X}" * 3
        assert background == properties["openslide.background-color"]
        assert slide.metadata["scanner"] == properties["tiff.Model"]
        assert slide.metadata["scan_date"] == iso_date(properties["tiff.DateTime"])


def test_another_software_or_an_untiled_page_is_no_trestle_slide(path):
    trestle.write(path, stored(), software="Another")
    assert describe(path).vendor == "generic-tiff"
    trestle.write(path, stored(), tile=None)
    assert describe(path).vendor == "generic-tiff"


@pytest.mark.parametrize("number", [(SHORT, 3), (ASCII, "0.4"), (RATIONAL, 0)])
def test_default_resolution_tags_are_ignored(path, number):
    first, *others = (
        tiffbytes.page(pixels, tiffbytes.deflate, compression=8, description=trestle.TEXT)
        for pixels in stored()
    )
    first.tags |= {282: number, 283: (RATIONAL, 0.4), 305: (ASCII, "MedScan")}
    tiffbytes.write(path, [first, *others])
    with open_slide(path) as slide:
        assert slide.vendor == "trestle"
        assert slide.mpp is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("OverlapsXY=a b", "not a number"),
        ("OverlapsXY=-5 3", "not a number"),
        ("OverlapsXY=1e3 nan", "not a number"),
        ("OverlapsXY=48 0", "larger than the tiles"),
        (f"OverlapsXY={10**30} {10**30}", "larger than the tiles"),
        (f"OverlapsXY={'9' * 5000} 1", None),
        ("OverlapsXY=8", None),
        ("OverlapsXY=" + "1 " * 2000, None),
        ("=;=;;;Objective Power=NaN;Background Color=red", None),
        (b"Objective Power=\xff\xfe;\x80=\x81", None),
        ("Objective Power=-20;Key=" + "x" * (1 << 20), None),
    ],
)
def test_hostile_descriptions(path, text, problem):
    trestle.write(path, stored(), text=text, mpp=None)
    with open_slide(path) as slide:
        assert slide.vendor == "trestle"
        assert slide.objective is slide.mpp is None
        assert len(str(slide.metadata["trestle"])) < 20_000
        assert (problem is None) == (not slide.layout.problems)
        assert problem is None or problem in slide.layout.problems[0]
        for level in slide.levels:
            assert level[...].shape == level.shape
