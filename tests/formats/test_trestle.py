import numpy as np
import pytest

from napari_wsigpu import open_slide
from napari_wsigpu.errors import UnsupportedSlideError
from tests import oracles, slides, tiffbytes
from tests.tiffbytes import ASCII, RATIONAL

TEXT = "Objective Power = 20;Background Color=E6E6E6; noise ;OverlapsXY={}"


def write(path, overlaps):
    tags = {305: (ASCII, "MedScan 1.2"), 282: (RATIONAL, 0.375), 283: (RATIONAL, 0.25)}
    pixels = slides.picture(300, 400)
    text = TEXT.format(overlaps)
    pages = [
        tiffbytes.page(
            np.ascontiguousarray(pixels[::step, ::step]),
            bytes,
            tile=(64, 64),
            description=text,
            more=tags,
        )
        for step in (1, 2, 4)
    ]
    tiffbytes.write(path, pages)


def test_all_that_openslide_reports(tmp_path):
    path = tmp_path / "slide.tif"
    write(path, "0 0 0 0 0 0")
    properties = oracles.openslide_properties(path)
    with open_slide(path) as slide, oracles.openslide.OpenSlide(path) as other:
        assert slide.vendor == properties["openslide.vendor"] == "trestle"
        assert slide.level_dimensions == other.level_dimensions
        assert slide.level_downsamples == other.level_downsamples
        assert slide.mpp == tuple(float(properties[f"openslide.mpp-{axis}"]) for axis in "xy")
        assert slide.objective == float(properties["openslide.objective-power"])
        for index, level in enumerate(slide.levels):
            np.testing.assert_array_equal(level[...], oracles.openslide_level(path, index))
        expected = {
            name.removeprefix("trestle."): value
            for name, value in properties.items()
            if name.startswith("trestle.")
        }
        assert slide.metadata["trestle"] == expected


def test_tiles_that_overlap_are_refused(tmp_path):
    path = tmp_path / "slide.tif"
    write(path, "0 0 4 3 0 0")
    with pytest.raises(UnsupportedSlideError, match="Trestle slide, whose overlapping tiles"):
        open_slide(path)
