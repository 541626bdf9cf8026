"""Real slides against OpenSlide and tifffile."""

import numpy as np
import pytest
import tifffile

from napari_wsigpu import open_slide
from tests import oracles
from tests.conftest import SHARED_SLIDES, shared_slide

APERIO = ["CMU-1-Small-Region.svs", "CMU-1-JP2K-Region.svs"]
PYRAMIDS = [
    "openslide-boxes.tiff",
    "rasterio-cogeo.tif",
    "largeimage-yb10kx5k.zstd.tiff",
    "minerva-2048_ome6_tiled.ome.tif",
    "algart-jpeg_rgb_tiled_sparse_philips_like.tiff",
    "ndpi-test3-DAPI-387.ndpi",
]
SMALL = sorted(f"tiff/{path.name}" for path in (SHARED_SLIDES / "tiff").glob("*.tif"))
MOST_PIXELS = 1 << 24
# JPEG 2000 has a decoder of OpenSlide's own build, which may round otherwise.
TOLERANCE = {"CMU-1-JP2K-Region.svs": 1}


def assert_close(found, expected, tolerance):
    assert found.shape == expected.shape
    assert int(np.abs(found.astype(np.int16) - expected).max()) <= tolerance


@pytest.mark.parametrize("name", APERIO)
def test_aperio_pixels_are_openslides(name):
    path = shared_slide(name)
    with open_slide(path) as slide:
        for index, level in enumerate(slide.levels):
            expected = oracles.openslide_level(path, index)
            assert_close(level[...], expected, TOLERANCE.get(name, 0))


@pytest.mark.parametrize("name", APERIO)
def test_aperio_facts_are_openslides(name):
    path = shared_slide(name)
    properties = oracles.openslide_properties(path)
    with open_slide(path) as slide, oracles.openslide.OpenSlide(path) as other:
        assert slide.vendor == properties["openslide.vendor"]
        assert slide.level_dimensions == other.level_dimensions
        assert slide.level_downsamples == other.level_downsamples
        assert slide.mpp == tuple(float(properties[f"openslide.mpp-{axis}"]) for axis in "xy")
        assert slide.objective == float(properties["openslide.objective-power"])
        fields = dict(slide.metadata["aperio"])
        assert properties["openslide.comment"].startswith(fields.pop("Header"))
        expected = {
            name.removeprefix("aperio."): value
            for name, value in properties.items()
            if name.startswith("aperio.")
        }
        assert fields == expected
        assert set(slide.associated_images) == set(other.associated_images)
        for key, image in other.associated_images.items():
            pixels = slide.associated_images[key].read()
            np.testing.assert_array_equal(pixels, np.asarray(image)[..., :3])


APERIO_FIELDS = [
    "AppMag", "Date", "Filename", "Filtered", "Focus Offset", "ImageID", "Left", "LineAreaXOffset",
    "LineAreaYOffset", "LineCameraSkew", "MPP", "OriginalHeight", "OriginalWidth",
    "Originalheight", "Parmset", "ScanScope ID", "StripeWidth", "Time", "Top", "User",
]  # fmt: skip


@pytest.mark.parametrize("field", APERIO_FIELDS)
@pytest.mark.parametrize("name", APERIO)
def test_an_aperio_field_is_openslides(name, field):
    path = shared_slide(name)
    with open_slide(path) as slide:
        assert (
            slide.metadata["aperio"][field] == oracles.openslide_properties(path)[f"aperio.{field}"]
        )


@pytest.mark.parametrize("name", APERIO)
def test_aperio_facts_that_all_vendors_have(name):
    with open_slide(shared_slide(name)) as slide:
        metadata = slide.metadata
        width, height = slide.dimensions
        problems = " ".join(slide.layout.problems)
    assert metadata["scanner"] == "Aperio ScanScope (CPAPERIOCS)"
    assert metadata["scan_date"] == "2009-12-29T09:59:15"
    assert metadata["barcode"] is None
    # One of them was cut from a larger slide, whose description it has.
    assert (f"the slide has {width} x {height}" in problems) == (name == "CMU-1-JP2K-Region.svs")


@pytest.mark.parametrize("name", PYRAMIDS)
def test_pyramids_are_tifffiles(name):
    path = shared_slide(name)
    with open_slide(path) as slide, tifffile.TiffFile(path) as file:
        series = max(
            (item for item in file.series if not item.keyframe.is_mask),
            key=lambda item: item.sizes["height"] * item.sizes["width"],
        )
        sizes = [(item.sizes["width"], item.sizes["height"]) for item in series.levels]
        assert set(sizes) <= set(slide.level_dimensions)
        for item, size in zip(series.levels, sizes, strict=True):
            expected = item.asarray()
            if item.axes == "IYXS":  # of a stack the first plane is shown
                assert slide.layout.other_planes == len(expected) - 1
                expected = expected[0]
            elif "S" not in item.axes:  # pages are channels
                expected = np.moveaxis(expected.reshape(-1, *expected.shape[-2:]), 0, -1)
            found = slide.levels[slide.level_dimensions.index(size)][...]
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["openslide-boxes.tiff", "CMU-1-Small-Region.svs"])
def test_tiff_tags_are_openslides(name):
    path = shared_slide(name)
    with open_slide(path) as slide:
        found = slide.metadata["tiff"]
    tags = oracles.openslide_tiff_tags(path)
    assert {name: oracles.as_property(value) for name, value in found.items()} == tags


@pytest.mark.parametrize("name", ["openslide-boxes.tiff", "largeimage-yb10kx5k.zstd.tiff"])
def test_pyramids_are_openslides(name):
    path = shared_slide(name)
    properties = oracles.openslide_properties(path)
    with open_slide(path) as slide:
        dimensions, downsamples = oracles.openslide_shape(path)
        assert slide.level_dimensions == dimensions
        assert slide.level_downsamples == pytest.approx(downsamples, rel=1e-12)
        # 72 dpi is what software for screens writes, so no measurement; OpenSlide takes it for one.
        found = [float(properties[f"openslide.mpp-{axis}"]) for axis in "xy"]
        assert found == pytest.approx([25400 / 72] * 2, rel=1e-3)
        assert slide.mpp is None
        for index, (width, height) in enumerate(dimensions):
            if width * height < MOST_PIXELS:
                expected = oracles.openslide_level(path, index)
                np.testing.assert_array_equal(slide.levels[index][...], expected)


def test_masks_are_no_levels():
    """OpenSlide takes the masks of this file for levels, each twice of one size."""
    path = shared_slide("rasterio-cogeo.tif")
    with open_slide(path) as slide:
        dimensions, _ = oracles.openslide_shape(path)
        assert set(slide.level_dimensions) == set(dimensions)
        assert len(set(slide.level_dimensions)) == slide.level_count


@pytest.mark.skipif(not SMALL, reason=f"no small TIFF files in {SHARED_SLIDES}/tiff")
@pytest.mark.parametrize("name", SMALL)
def test_small_files_are_tifffiles(name):
    path = shared_slide(name)
    with open_slide(path) as slide:
        np.testing.assert_array_equal(slide.levels[0][...], oracles.tifffile_page(path))
