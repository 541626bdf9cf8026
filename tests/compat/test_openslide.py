"""Comparison with openslide-python: results and errors for the same files."""

from contextlib import suppress
from ctypes import ArgumentError

import numpy as np
import openslide as theirs
import openslide.deepzoom
import pytest
from PIL import Image

from napari_wsigpu import SlideError
from napari_wsigpu.compat import openslide as ours
from napari_wsigpu.slide import runtime
from tests.conftest import shared_slide
from tests.writers import icc, mirax, slides, trestle, ventana

SHARED = [
    "CMU-1-Small-Region.svs",
    "openslide-boxes.tiff",
    "largeimage-yb10kx5k.zstd.tiff",
    "ndpi-test3-DAPI-387.ndpi",
    "found/sm_image_numbers.dcm",
    "tiff/bigtiff-BigTIFFLong8Tiles.tif",
    "tiff/gdal-rgbsmall_LZW_tiled_separate.tif",
]


def write_aperio(path):
    slides.write_aperio(path, slides.picture(500, 700), (), missing=[(0, 5, 6, 7, 30)])


def write_ventana(path):
    area = ventana.Area((3, 2), overlap=(5, 4))
    ventana.write(path, [slides.picture(64, 144)], ventana.stitching([area]))


def write_trestle(path):
    pixels = slides.picture(96, 160)
    trestle.write(path, [pixels, pixels[::2, ::2]], "4 4 2 2")


WRITTEN = {
    "sparse.svs": write_aperio,
    "ventana.bif": write_ventana,
    "trestle.tif": write_trestle,
    "mirax.mrxs": lambda path: mirax.write(path, mirax.Mirax(photos={0, 1, 5, 10})),
}
# Properties that differ: tile sizes, as restart intervals of large JPEGs are joined in another way,
# hashes of other parts of the file, and the areas of a mosaic.
UNLIKE = ("tile-width", "tile-height", "quickhash-1", "region[")
UNLIKE_VENDORS = ("hamamatsu", "mirax", "trestle", "ventana")


@pytest.fixture(params=[*SHARED, *WRITTEN])
def path(request, tmp_path):
    if request.param in SHARED:
        return shared_slide(request.param)
    WRITTEN[request.param](tmp_path / request.param)
    return tmp_path / request.param


@pytest.fixture
def both(path):
    with theirs.OpenSlide(path) as expected, ours.OpenSlide(path) as slide:
        yield expected, slide


@pytest.fixture
def slide(tmp_path):
    path = tmp_path / "slide.svs"
    slides.write_aperio(path, slides.picture(100, 150))
    return ours.OpenSlide(path)


def assert_same(image, expected):
    assert image.mode == expected.mode
    assert image.info.get("icc_profile") == expected.info.get("icc_profile")
    np.testing.assert_array_equal(np.asarray(image), np.asarray(expected))


def test_pixels_and_alpha(both):
    expected, slide = both
    assert slide.level_dimensions == expected.level_dimensions
    assert slide.level_downsamples == pytest.approx(expected.level_downsamples)
    for level, (width, height) in enumerate(expected.level_dimensions):
        step = expected.level_downsamples[level]
        # OpenSlide interpolates between pixels; this package reads the nearest ones.
        corners = [(0, 0)]
        if step.is_integer():
            last = [max(0, length - 100) for length in (width, height)]
            corners += [(int(x * step), int(y * step)) for x, y in ((-16, -9), last)]
        for corner in corners:
            wanted = corner, level, (200, 180)
            assert_same(slide.read_region(*wanted), expected.read_region(*wanted))


def test_best_levels(both):
    expected, slide = both
    for downsample in (0.5, 1, 1.5, *expected.level_downsamples, 3, 1000):
        level = expected.get_best_level_for_downsample(downsample)
        assert slide.get_best_level_for_downsample(downsample) == level


def test_properties(both):
    expected, slide = both
    vendor = expected.properties["openslide.vendor"]
    for name, value in expected.properties.items():
        if name.startswith(("openslide.", "tiff.")):
            unlike = vendor in UNLIKE_VENDORS and any(part in name for part in UNLIKE)
            assert unlike or slide.properties.get(name) == value, name
    assert len(slide.properties) == len(list(slide.properties))


def test_associated_images(both):
    expected, slide = both
    assert set(slide.associated_images) == set(expected.associated_images)
    for name, image in expected.associated_images.items():
        assert_same(slide.associated_images[name], image)
    assert_same(slide.get_thumbnail((120, 90)), expected.get_thumbnail((120, 90)))
    assert (slide.color_profile is None) == (expected.color_profile is None)


@pytest.mark.parametrize("limit_bounds", [False, True])
def test_deep_zoom(both, limit_bounds):
    if max(both[0].dimensions) > 2000 and both[0].level_count == 1:
        pytest.skip("OpenSlide takes seconds to average that much")
    expected, slide = (
        kind(each, 62, 1, limit_bounds)
        for kind, each in zip(
            (openslide.deepzoom.DeepZoomGenerator, ours.DeepZoomGenerator), both, strict=True
        )
    )
    for name in ("level_count", "level_tiles", "level_dimensions", "tile_count"):
        assert getattr(slide, name) == getattr(expected, name)
    assert slide.get_dzi("png") == expected.get_dzi("png").replace("'", '"')
    for level, counts in enumerate(expected.level_tiles):
        for address in {(0, 0), (counts[0] - 1, counts[1] - 1)}:
            wanted = expected.get_tile_coordinates(level, address)
            assert slide.get_tile_coordinates(level, address) == wanted
            if max(address) < 128:
                small = np.uint8(level), (np.int8(address[0]), np.int8(address[1]))
                assert slide.get_tile_coordinates(*small) == wanted
            tile = slide.get_tile(level, address)
            assert slide.get_tile_dimensions(level, address) == expected.get_tile_dimensions(
                level, address
            )
            step = both[0].level_downsamples[wanted[1]]
            if all((place / step).is_integer() for place in wanted[0]):
                assert_same(tile, expected.get_tile(level, address))
    with pytest.raises(ValueError, match="no Deep Zoom level 99"):
        slide.get_tile(99, (0, 0))
    with pytest.raises(ValueError, match=r"no tile \(9, 0\)"):
        slide.get_tile(0, (9, 0))


@pytest.mark.parametrize("as_path", [str, lambda path: path, lambda path: str(path).encode()])
def test_formats_of_files(tmp_path, as_path):
    path, image, text = (tmp_path / name for name in ("😐.svs", "picture.png", "text"))
    slides.write_aperio(path, slides.picture(100, 150))
    Image.fromarray(slides.picture(20, 30)).save(image)
    text.write_text("no slide")
    assert ours.OpenSlide.detect_format(as_path(path)) == "aperio"
    assert ours.ImageSlide.detect_format(as_path(image)) == "PNG"
    folder = tmp_path / "text folder"
    folder.mkdir()
    for other in (text, tmp_path / "none", folder):
        assert ours.OpenSlide.detect_format(as_path(other)) is None
        assert ours.ImageSlide.detect_format(as_path(other)) is None
        with pytest.raises(ours.OpenSlideUnsupportedFormatError):
            ours.OpenSlide(as_path(other))
        with pytest.raises(OSError, match=r"text|none"):
            ours.open_slide(as_path(other))
    with ours.open_slide(as_path(path)) as slide:
        assert isinstance(slide, ours.OpenSlide)
    with ours.open_slide(as_path(image)) as slide:
        assert isinstance(slide, ours.ImageSlide)
    with pytest.raises(ArgumentError, match="3 is not a path"):
        ours.OpenSlide(3)


def test_pixels_that_do_not_fit_in_rgba_raise(tmp_path):
    path = tmp_path / "slide.tif"
    slides.write_pyramid(path, slides.picture(300, 400, dtype="uint16"), (2,))
    with pytest.raises(ours.OpenSlideUnsupportedFormatError, match="3 channels of uint16"):
        ours.OpenSlide(path)


def test_levels_in_subifds(tmp_path):
    """OpenSlide leaves these levels out."""
    path = tmp_path / "slide.tif"
    levels = slides.write_pyramid(path, slides.picture(256, 300), subifds=True, photometric="rgb")
    with theirs.OpenSlide(path) as expected, ours.OpenSlide(path) as slide:
        assert expected.level_count == 1
        assert slide.level_count == 3
        assert slide.properties["openslide.level[2].width"] == "75"
        assert_same(
            slide.read_region((0, 0), 0, (300, 256)), expected.read_region((0, 0), 0, (300, 256))
        )
        coarse = np.asarray(slide.read_region((0, 0), 2, (75, 64)))
        np.testing.assert_array_equal(coarse[..., :3], levels[2])


def test_flat_images(tmp_path):
    path = tmp_path / "picture.png"
    image = Image.fromarray(slides.picture(60, 80))
    image.save(path, icc_profile=icc.table_profile(icc.stain))
    with theirs.ImageSlide(path) as expected, ours.ImageSlide(path) as slide:
        for name in ("dimensions", "level_count", "level_downsamples", "properties"):
            assert getattr(slide, name) == getattr(expected, name)
        assert slide.get_best_level_for_downsample(5) == 0
        assert_same(slide.get_thumbnail((33, 44)), expected.get_thumbnail((33, 44)))
        for corner in ((0, 0), (-10, -20), (75, 50), (500, 0), (0, -90)):
            wanted = corner, 0, (40, 30)
            assert_same(slide.read_region(*wanted), expected.read_region(*wanted))
        for wanted in (((0, 0), 1, (5, 5)), ((0, 0), 0, (5, -5))):
            with pytest.raises(ours.OpenSlideError):
                slide.read_region(*wanted)
    with pytest.raises(ValueError, match="closed"):
        slide.read_region((0, 0), 0, (5, 5))
    with image, ours.ImageSlide(image):
        pass
    assert image.getpixel((0, 0)) is not None


def test_errors_latch(tmp_path):
    path = tmp_path / "slide.svs"
    slides.write_aperio(path, slides.picture(100, 150), encode=lambda tile: b"damaged")
    with ours.OpenSlide(path) as slide:
        assert slide.properties["openslide.vendor"] == "aperio"
        with pytest.raises(ours.OpenSlideError, match="could not be decoded") as caught:
            slide.read_region((0, 0), 0, (10, 10))
        for again in (
            lambda: slide.level_count,
            lambda: slide.properties["openslide.vendor"],
            lambda: slide.associated_images["label"],
            lambda: slide.get_thumbnail((10, 10)),
        ):
            with pytest.raises(ours.OpenSlideError) as other:
                again()
            assert str(other.value) == str(caught.value)
    assert isinstance(caught.value, SlideError)


def test_a_closed_slide(slide):
    properties, pictures = slide.properties, slide.associated_images
    slide.close()
    for read in (
        slide.close,
        lambda: slide.dimensions,
        lambda: slide.read_region((0, 0), 0, (5, 5)),
        lambda: properties["openslide.vendor"],
        lambda: pictures["label"],
    ):
        with pytest.raises(ArgumentError, match="closed"):
            read()


def test_unusual_regions(slide):
    assert slide.read_region((0, 0), 9, (30, 20)).getextrema() == ((0, 0),) * 4
    assert slide.read_region((0, 0), 1, (30, 0)).size == (30, 0)
    with pytest.raises(KeyError):
        slide.properties["none"]
    with pytest.raises(KeyError):
        slide.associated_images["none"]
    for location, size, said in (((0, 0), (30, -5), "-5"), ((0.5, 0), (5, 5), "0.5")):
        with pytest.raises(ours.OpenSlideError, match=said):
            slide.read_region(location, 0, size)
    assert slide.read_region((0, 0), 0, (30, 20)).size == (30, 20)  # the slide still works


@pytest.mark.usefixtures("fresh_runtime")
def test_caches(tmp_path):
    path = tmp_path / "slide.svs"
    slides.write_aperio(path, slides.picture(100, 150))
    with ours.OpenSlide(path) as slide:
        before = runtime.default().tiles.budget
        slide.set_cache(ours.OpenSlideCache(5))
        assert runtime.default().tiles.budget == before
        slide.set_cache(ours.OpenSlideCache(before + 1))
        assert runtime.default().tiles.budget == before + 1
        with pytest.raises(TypeError, match="not a cache"):
            slide.set_cache(3)
    for capacity in (-1, 1.5):
        with pytest.raises(ArgumentError, match="cannot hold"):
            ours.OpenSlideCache(capacity)


def test_other_packages_import_errors_from_the_low_level_module():
    assert ours.lowlevel.OpenSlideError is ours.OpenSlideError
    assert {*ours.lowlevel.__all__} <= {*dir(theirs.lowlevel)}


@pytest.mark.parametrize("level", ["0", None, 0.0])
def test_level_that_is_no_whole_number(level, tmp_path):
    slides.write_aperio(tmp_path / "slide.svs", slides.picture(200, 300))
    with (
        ours.OpenSlide(tmp_path / "slide.svs") as slide,
        pytest.raises(ours.OpenSlideError, match="is not a whole number"),
    ):
        slide.read_region((0, 0), level, (8, 8))


@pytest.mark.parametrize("level", [1.5, 99])
def test_invalid_level_does_not_latch(level, tmp_path):
    slides.write_aperio(tmp_path / "slide.svs", slides.picture(200, 300))
    with ours.OpenSlide(tmp_path / "slide.svs") as slide:
        with suppress(ours.OpenSlideError):
            slide.read_region((0, 0), level, (8, 8))
        assert slide.read_region((0, 0), 0, (8, 8)).size == (8, 8)
