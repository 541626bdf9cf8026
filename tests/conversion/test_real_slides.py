"""Conversions of real slides, and back, keep their pixels and metadata."""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import openslide
import pytest

from napari_wsigpu import SlideError, convert, open_slide
from tests import oracles
from tests.conftest import SHARED_SLIDES
from tests.conversion.test_convert import (
    assert_equal_levels,
    pyramid_of,
    tifffile_levels,
    zarr_levels,
)

NAMES = sorted(
    path.relative_to(SHARED_SLIDES).as_posix()
    for path in [*SHARED_SLIDES.glob("*.*"), *SHARED_SLIDES.glob("tiff/*.tif")]
    if path.suffix != ".md"
)
BAD_SLIDES = sorted((SHARED_SLIDES / "bad").glob("*.tif"))
# Bytes of pixels above which a slide is converted only once, and not at all.
LARGE, TOO_LARGE = 30 << 20, 120 << 20
WRITTEN_ONCE = "large slides are written once: those of Hamamatsu as OME-Zarr, others as TIFF"


class Source(NamedTuple):
    path: Path
    pyramid: list[np.ndarray]

    @property
    def is_large(self):
        return sum(pixels.nbytes for pixels in self.pyramid) > LARGE


@pytest.fixture(scope="module", params=NAMES)
def source(request):
    path = SHARED_SLIDES / request.param
    with open_slide(path, "cpu") as slide:
        if sum(math.prod(level.shape) * level.dtype.itemsize for level in slide.levels) > TOO_LARGE:
            pytest.skip("its tiles are as those of other slides, but very many")
    return Source(path, pyramid_of(path))


def assert_same_slide(path, source):
    """Compare everything that this package reads from two files."""
    with open_slide(source.path, "cpu") as slide, open_slide(path, "cpu") as found:
        assert_equal_levels([level[...] for level in found.levels], source.pyramid)
        assert found.layout.problems == ()
        assert found.layout.rgb == slide.layout.rgb
        assert found.level_downsamples[: slide.level_count] == pytest.approx(
            slide.level_downsamples, rel=1e-3
        )
        assert found.mpp == (slide.mpp and pytest.approx(slide.mpp))
        assert found.objective == slide.objective
        assert found.icc_profile == slide.icc_profile
        assert [channel.name for channel in found.channels] == [
            channel.name for channel in slide.channels
        ]
        assert set(found.associated_images) == set(slide.associated_images)
        for name, image in slide.associated_images.items():
            np.testing.assert_array_equal(found.associated_images[name].read(), image.read())
        if not path.name.endswith(".ome.tif"):
            assert found.metadata.get(slide.vendor) == slide.metadata.get(slide.vendor)
            assert found.layout.background == slide.layout.background


def assert_openslide_agrees(path, expected, background):
    """Compare what OpenSlide can read: 8-bit RGB."""
    with open_slide(path, "cpu") as slide, openslide.OpenSlide(path) as other:
        assert other.level_dimensions == slide.level_dimensions
        if slide.mpp is not None:
            found = [float(other.properties[f"openslide.mpp-{axis}"]) for axis in "xy"]
            assert found == pytest.approx(slide.mpp)
        for index, pixels in enumerate(expected):
            image = other.read_region((0, 0), index, other.level_dimensions[index])
            np.testing.assert_array_equal(oracles.opaque(image, background), pixels)


def assert_tiff(path, source):
    assert_equal_levels(tifffile_levels(path), source.pyramid)
    assert_same_slide(path, source)


def test_raw_tiff(tmp_path, source):
    if source.is_large and source.path.suffix == ".ndpi":
        pytest.skip(WRITTEN_ONCE)
    target = tmp_path / "out.tif"
    convert(source.path, target, compression="raw", private=True)
    assert_tiff(target, source)
    with open_slide(source.path, "cpu") as slide:
        rgb, background = slide.layout.rgb, slide.layout.background
    first = source.pyramid[0]
    if rgb and first.dtype == np.uint8 and first.shape[2] == 3:
        assert_openslide_agrees(target, source.pyramid, background)


def test_raw_ome_tiff(tmp_path, source):
    if source.is_large:
        pytest.skip("differs from other raw TIFF files by its tags only")
    convert(source.path, tmp_path / "out.ome.tif", compression="raw", private=True)
    assert_tiff(tmp_path / "out.ome.tif", source)


@pytest.mark.parametrize("compression", ["raw", "zstd"])
def test_ome_zarr_and_back(tmp_path, source, compression):
    pytest.importorskip("zarr")
    if source.is_large and (compression == "raw" or source.path.suffix != ".ndpi"):
        pytest.skip(WRITTEN_ONCE)
    target, back = tmp_path / "out.zarr", tmp_path / "back.tif"
    convert(source.path, target, compression=compression, private=True)
    assert_equal_levels(zarr_levels(target), source.pyramid)
    assert_same_slide(target, source)
    if source.is_large or compression == "raw":
        return  # converting back takes as long again and is covered by the other slides
    convert(target, back, compression=compression, private=True)
    assert_tiff(back, source)


@pytest.mark.skipif(not BAD_SLIDES, reason=f"no damaged slides in {SHARED_SLIDES}/bad")
@pytest.mark.parametrize("end", ["tif", "zarr"])
@pytest.mark.parametrize("path", BAD_SLIDES, ids=lambda path: path.stem)
def test_damaged_slides(tmp_path, path, end):
    """Each one raises a one-sentence error, or is converted with identical pixels."""
    target = tmp_path / f"out.{end}"
    refusal = ""
    try:
        convert(path, target, compression="raw", levels=1)
    except SlideError as error:
        refusal = str(error)
    if refusal:
        assert path.name in refusal
        assert "\n" not in refusal
        assert list(tmp_path.iterdir()) == []
        return
    with open_slide(path, "cpu") as slide, open_slide(target, "cpu") as found:
        np.testing.assert_array_equal(found.levels[0][...], slide.levels[0][...])
