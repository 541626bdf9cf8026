"""Slides in sRGB: regions, levels, associated images, and what is kept of them."""

import gc
import pickle
import weakref
from copy import deepcopy
from dataclasses import replace

import imagecodecs
import numpy as np
import pytest
import tifffile

from napari_wsigpu import open_slide
from napari_wsigpu.formats.describe import describe
from napari_wsigpu.model.errors import (
    RegionError,
    SlideClosedError,
    SlideError,
    TileError,
    UnsupportedSlideError,
)
from napari_wsigpu.model.layout import LevelLayout, Part
from napari_wsigpu.reading.cache import TileKey
from napari_wsigpu.slide import runtime
from napari_wsigpu.slide.slide import Slide
from tests.writers import slides, tiffbytes
from tests.writers.icc import ADOBE, GAMMA, PROFILES, SRGB

HEIGHT, WIDTH = 331, 473
PROFILE = PROFILES["table"]
ICC_PROFILE = 34675
CIELAB = 8
BACKGROUND = 200  # black and white stay what they are in sRGB


def in_srgb(pixels, profile=PROFILE):
    """Whole pictures by LittleCMS; alpha stays."""
    colors = imagecodecs.cms_transform(
        np.ascontiguousarray(pixels[..., :3]), profile, SRGB, colorspace="rgb", outcolorspace="rgb"
    )
    return np.concatenate([colors, pixels[..., 3:]], -1)


def write(path, pixels=None, **options):
    """Write a pyramid whose levels have edge tiles, and computed levels below them."""
    pixels = slides.picture(HEIGHT, WIDTH) if pixels is None else pixels
    slides.write_pyramid(path, pixels, (2,), photometric="rgb", **options)
    return path


def on_gray(path, device="cpu"):
    """Open a slide whose background is gray."""
    return Slide(replace(describe(path), background=BACKGROUND), device)


def with_profile(path, profile=PROFILE, device="cpu"):
    """Open a slide that has no profile with one, on gray."""
    with path.open("ab") as file:
        place = (file.tell(), len(profile))
        file.write(profile)
    return Slide(replace(describe(path), icc=place, background=BACKGROUND), device)


pytestmark = pytest.mark.usefixtures("scanner_colours")


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "slide.tif", iccprofile=PROFILE)


@pytest.fixture
def slide(path):
    with on_gray(path) as slide:
        yield slide


class TestReadRegion:
    def test_what_lies_outside_has_its_colour_too(self, slide):
        gray = np.full((1, 1, 3), BACKGROUND, np.uint8)
        assert (in_srgb(gray) != gray).any()
        outside = slide.read_region((-50, -50), (9, 8), color="srgb")
        np.testing.assert_array_equal(outside, np.broadcast_to(in_srgb(gray), (8, 9, 3)))

    @pytest.mark.parametrize("level", [0, 1])
    @pytest.mark.parametrize(
        ("place", "size"),
        [
            ((0, 0), (WIDTH, HEIGHT)),
            ((-20, -9), (90, 80)),
            ((400, 300), (120, 90)),
            ((5, 6), (1, 1)),
        ],
    )
    def test_it_is_the_stored_one_in_srgb(self, slide, level, place, size):
        stored = slide.read_region(place, size, level)
        found = slide.read_region(place, size, level, color="srgb")
        np.testing.assert_array_equal(found, in_srgb(stored))
        assert (found != stored).any()
        np.testing.assert_array_equal(slide.read_region(place, size, level), stored)

    @pytest.mark.parametrize("options", [{}, {"planarconfig": "separate"}])
    def test_alpha_stays(self, tmp_path, options):
        pixels = slides.picture(HEIGHT, WIDTH, 4)
        planar = options.get("planarconfig") == "separate"
        path = tmp_path / "rgba.tif"
        tifffile.imwrite(
            path,
            np.moveaxis(pixels, -1, 0) if planar else pixels,
            photometric="rgb",
            extrasamples=["unassalpha"],
            tile=(64, 64),
            iccprofile=PROFILE,
            **options,
        )
        with open_slide(path, device="cpu") as slide:
            for area in (((0, 0), (WIDTH, HEIGHT)), ((WIDTH - 9, 3), (30, 20))):
                stored = slide.read_region(*area)
                found = slide.read_region(*area, color="srgb")
                np.testing.assert_array_equal(found, in_srgb(stored))
                np.testing.assert_array_equal(found[..., 3], stored[..., 3])

    def test_tiles_that_the_file_lacks(self, tmp_path):
        """They are averages of stored pixels, or background, and get their colours after that."""
        path = tmp_path / "slide.svs"
        pixels = slides.picture(HEIGHT, WIDTH)
        missing = ((3, 7), (1, 5), ())
        slides.write_aperio(path, pixels, missing=missing, compression=1, encode=bytes)
        with with_profile(path) as slide:
            for level, size in enumerate(slide.level_dimensions):
                found = slide.read_region((0, 0), size, level, color="srgb")
                stored = slide.read_region((0, 0), size, level)
                np.testing.assert_array_equal(found, in_srgb(stored))

    def test_a_tile_that_can_not_be_decoded(self, tmp_path):
        pixels = slides.picture(HEIGHT, WIDTH)
        numbers = iter(range(999))

        def encode(tile):
            return slides.jpeg(tile)[: -40 if next(numbers) == 4 else None]

        page = tiffbytes.page(pixels, encode, tile=(64, 64), compression=7)
        page.tags[ICC_PROFILE] = (tiffbytes.UNDEFINED, PROFILE)
        path = tiffbytes.write(tmp_path / "slide.tif", [page])
        with on_gray(path) as slide:
            with pytest.raises(TileError):
                slide.read_region((0, 0), slide.dimensions, color="srgb")
            level = slide.level_array(0, tolerant=True)
            stored = level[...]
            slide.display_color = "srgb"
            np.testing.assert_array_equal(level[...], in_srgb(stored))

    def test_read_regions(self, slide):
        places = [(0, 0), (100, 50), (-10, 300)]
        for batch_size in (None, 2):
            found = list(slide.read_regions(places, (60, 50), batch_size=batch_size, color="srgb"))
            found = found if batch_size is None else np.concatenate(found)
            for place, pixels in zip(places, found, strict=True):
                np.testing.assert_array_equal(pixels, in_srgb(slide.read_region(place, (60, 50))))

    def test_no_such_colour(self, slide):
        with pytest.raises(RegionError, match="'p3'"):
            slide.read_region((0, 0), (5, 5), color="p3")
        with pytest.raises(RegionError, match="'p3'"):
            slide.display_color = "p3"
        assert slide.display_color == "stored"


class TestDisplayColor:
    def test_levels_for_viewers_follow_it(self, slide):
        shown = [slide.level_array(i, tolerant=True) for i in range(len(slide.pyramid))]
        exact = slide.levels
        stored = [level[...] for level in shown]
        assert slide.display_color == "stored"
        slide.display_color = "srgb"
        for level, pixels in zip(shown, stored, strict=True):
            np.testing.assert_array_equal(level[...], in_srgb(pixels))
        for level, pixels in zip(exact, stored, strict=False):
            np.testing.assert_array_equal(level[...], pixels)
        slide.display_color = "stored"
        for level, pixels in zip(shown, stored, strict=True):
            np.testing.assert_array_equal(level[...], pixels)

    def test_computed_levels(self, tmp_path):
        path = write(tmp_path / "wide.tif", slides.picture(40, 5000), iccprofile=PROFILE)
        with open_slide(path, device="cpu") as slide:
            level = slide.level_array(slide.pyramid[-1].number, tolerant=True)
            assert level.computed
            slide.display_color = "srgb"
            found = level[...]
            slide.display_color = "stored"
            np.testing.assert_array_equal(found, in_srgb(level[...]))

    @pytest.mark.parametrize("index", [np.s_[..., 1], np.s_[10:200:7, ::-3, 2], np.s_[5, 6]])
    def test_any_index(self, slide, index):
        slide.display_color = "srgb"
        expected = in_srgb(slide.levels[0][...])[index]
        np.testing.assert_array_equal(slide.level_array(0, tolerant=True)[index], expected)

    def test_one_channel(self, slide):
        slide.display_color = "srgb"
        expected = in_srgb(slide.levels[0][...])[..., 2]
        np.testing.assert_array_equal(slide.level_array(0, 2, tolerant=True)[...], expected)

    def test_it_travels(self, slide):
        slide.display_color = "srgb"
        level = slide.level_array(0, tolerant=True)
        with pickle.loads(pickle.dumps(slide)) as other:
            assert other.display_color == "srgb"
        copied = pickle.loads(pickle.dumps(level))
        with copied.slide:
            np.testing.assert_array_equal(copied[...], level[...])
        assert deepcopy(slide).display_color == "srgb"

    def test_no_profile(self, tmp_path):
        with open_slide(write(tmp_path / "plain.tif")) as slide:
            with pytest.raises(UnsupportedSlideError, match=r"plain\.tif'.*no ICC profile"):
                slide.display_color = "srgb"
            with pytest.raises(UnsupportedSlideError, match="no ICC profile"):
                slide.read_region((0, 0), (9, 9), color="srgb")
            assert slide.display_color == "stored"
            assert slide.read_region((0, 0), (9, 9)).shape == (9, 9, 3)

    @pytest.mark.parametrize(
        ("pixels", "photometric"),
        [
            (slides.picture(90, 80, 3, "uint16"), "rgb"),
            (slides.picture(90, 80, 1)[..., 0], "minisblack"),
        ],
    )
    def test_other_pixels(self, tmp_path, pixels, photometric):
        path = tmp_path / "slide.tif"
        tifffile.imwrite(path, pixels, photometric=photometric, tile=(64, 64), iccprofile=PROFILE)
        with (
            open_slide(path) as slide,
            pytest.raises(UnsupportedSlideError, match="not 8-bit RGB"),
        ):
            slide.display_color = "srgb"

    def test_a_profile_that_the_file_ends_before(self, path):
        size = path.stat().st_size
        with (
            Slide(replace(describe(path), icc=(size - 500, len(PROFILE)))) as slide,
            pytest.raises(UnsupportedSlideError, match="damaged"),
        ):
            slide.display_color = "srgb"


class TestWhatIsKept:
    def test_tiles_in_srgb_are_kept(self, slide):
        area = (0, 0), slide.dimensions
        first = slide.read_region(*area, color="srgb")
        decoded = slide.stats()["decoded"]
        np.testing.assert_array_equal(slide.read_region(*area, color="srgb"), first)
        assert slide.stats()["decoded"] == decoded

    def test_clear_cache(self, slide):
        used = runtime.default().tiles.used
        for color in ("stored", "srgb"):
            slide.read_region((0, 0), slide.dimensions, color=color)
        assert runtime.default().tiles.used > used
        slide.clear_cache()
        assert runtime.default().tiles.used == used

    @pytest.fixture
    def other(self, tmp_path):
        """A slide whose table nobody else keeps."""
        with open_slide(write(tmp_path / "other.tif", iccprofile=GAMMA), device="cpu") as slide:
            yield slide

    def test_release(self, other):
        expected = other.read_region((0, 0), (200, 100), color="srgb")
        table = weakref.ref(other._profile.table("srgb"))
        other.release()
        gc.collect()
        assert table() is None
        found = other.read_region((0, 0), (200, 100), color="srgb")
        np.testing.assert_array_equal(found, expected)

    def test_close(self, other, leaves_nothing):
        other.read_region((0, 0), (200, 100), color="srgb")
        table = weakref.ref(other._profile.table("srgb"))
        other.close()
        gc.collect()
        assert table() is None
        with pytest.raises(SlideClosedError):
            other.read_region((0, 0), (200, 100), color="srgb")


class TestAssociatedImage:
    @pytest.fixture
    def slide(self, tmp_path):
        path = tmp_path / "slide.svs"
        slides.write_aperio(path, slides.picture(HEIGHT, WIDTH), compression=1, encode=bytes)
        with path.open("ab") as file:
            place = (file.tell(), len(ADOBE))
            file.write(ADOBE)
        layout = describe(path)
        label, macro = (
            next(item for item in layout.associated if item.name == name)
            for name in ("label", "macro")
        )
        encoding = replace(macro.image.encoding, photometric=CIELAB)
        lab = replace(macro, name="lab", icc=place, image=replace(macro.image, encoding=encoding))
        associated = (label, replace(macro, icc=place), lab)
        with Slide(replace(layout, associated=associated)) as slide:
            yield slide

    def test_it_has_its_own_profile(self, slide):
        image = slide.associated_images["macro"]
        stored = image.read()
        np.testing.assert_array_equal(image.read(color="srgb"), in_srgb(stored, ADOBE))
        np.testing.assert_array_equal(image.read("stored"), stored)

    def test_other_pixels(self, slide):
        with pytest.raises(UnsupportedSlideError, match="not 8-bit RGB"):
            slide.associated_images["lab"].read(color="srgb")

    def test_no_profile(self, slide):
        with pytest.raises(UnsupportedSlideError, match=r"The label image of .* no ICC profile"):
            slide.associated_images["label"].read(color="srgb")

    def test_no_such_colour(self, slide):
        with pytest.raises(SlideError, match="'p3'"):
            slide.associated_images["label"].read(color="p3")


class TestDevice:
    """Regions by a device: its tiles stay as stored, and pixels get their colours on the way."""

    @pytest.fixture
    def slide(self, tmp_path, host_gpu):
        pixels = slides.picture(HEIGHT, WIDTH)
        page = tiffbytes.page(
            pixels, slides.jpeg_ycbcr, tile=(64, 64), compression=7, photometric=6, missing={5}
        )
        page.tags[ICC_PROFILE] = (tiffbytes.UNDEFINED, PROFILE)
        path = tiffbytes.write(tmp_path / "slide.tif", [page])
        with on_gray(path, "cuda") as slide:
            yield slide

    @pytest.mark.parametrize(
        ("place", "size"),
        [((0, 0), (WIDTH, HEIGHT)), ((-20, -9), (90, 80)), ((400, 300), (99, 90))],
    )
    def test_regions(self, slide, place, size):
        for color in ("srgb", "stored", "srgb"):
            for device in ("cuda", "cpu"):
                found = slide.read_region(place, size, device=device, color=color)
                with on_gray(slide.path) as other:
                    expected = other.read_region(place, size, color=color)
                np.testing.assert_array_equal(found, expected)
        assert slide.stats()["decoded"].get("nvimagecodec")

    def test_it_does_not_touch_the_host(self, slide, host_gpu, monkeypatch):
        slide.read_region((0, 0), (200, 200), device="cuda", color="srgb")
        for name in ("download", "download_tile", "send", "upload"):
            monkeypatch.setattr(host_gpu, name, None)
        slide.read_region((0, 0), (200, 200), device="cuda", color="srgb")

    def test_levels_for_viewers(self, slide):
        level = slide.level_array(0, tolerant=True)
        stored = level[...]
        slide.display_color = "srgb"
        np.testing.assert_array_equal(level[...], in_srgb(stored))
        np.testing.assert_array_equal(level[..., 2], in_srgb(stored)[..., 2])
        np.testing.assert_array_equal(slide.levels[0][...], stored)

    def test_into_given_memory(self, slide):
        out = np.zeros((50, 60, 3), np.uint8)
        found = slide.read_region((3, 4), (60, 50), device="cuda", out=out, color="srgb")
        assert found is out
        np.testing.assert_array_equal(out, in_srgb(slide.levels[0][4:54, 3:63]))

    def test_no_memory_for_the_table(self, slide, host_gpu, monkeypatch):
        def full(table):
            raise MemoryError

        monkeypatch.setattr(host_gpu, "colors", full)
        found = slide.read_region((3, 4), (60, 50), color="srgb")
        np.testing.assert_array_equal(found, in_srgb(slide.levels[0][4:54, 3:63]))


def test_whole_tiles_of_a_mosaic_show_the_background_in_its_colour(path):
    """Where a picture covers a part of a tile, as where none lies at all."""
    with path.open("ab") as file:
        place = (file.tell(), len(PROFILE))
        file.write(PROFILE)
    layout = describe(path)
    image = layout.levels[0]
    mosaic = LevelLayout.mosaic(image.width + 50, image.height + 50, [Part.at(50, 50, image)])
    layout = replace(layout, levels=(mosaic,), icc=place, background=BACKGROUND)
    with Slide(layout, "cpu") as slide:
        slide.display_color = "srgb"
        key = TileKey(slide.displayed.slide, 0, 0, 0, "srgb")
        tile = slide.displayed.read_tiles([key])[key]
        np.testing.assert_array_equal(tile[0, 0], slide.displayed.background(slide.display_color))
        exact = slide.level_array(0, tolerant=True)[: tile.shape[0], : tile.shape[1]]
        np.testing.assert_array_equal(tile, exact)
