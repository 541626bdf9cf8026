"""The levels that viewers show: the slide's own, and computed ones between them."""

import logging
import pickle

import numpy as np
import pytest
import tifffile
from hypothesis import given
from hypothesis import strategies as st

from napari_wsigpu import open_slide
from napari_wsigpu.model.errors import LevelError, TileError
from napari_wsigpu.slide import runtime
from napari_wsigpu.slide import slide as opened
from tests import oracles
from tests.test_display_color import in_srgb
from tests.writers import leica, slides, tiffbytes
from tests.writers.icc import PROFILES
from tests.writers.leica import SPACING

HEIGHT, WIDTH = 331, 473
TILE = (32, 48)
KINDS = {
    "RGB": {"photometric": "rgb"},
    "gray": {"channels": 1, "photometric": "minisblack"},
    "16 bit": {"channels": 1, "dtype": "uint16", "photometric": "minisblack"},
    "channels": {"channels": 4, "dtype": "uint16", "photometric": "minisblack"},
    "signed": {"channels": 2, "dtype": "int16", "photometric": "minisblack"},
    "float": {"channels": 2, "dtype": "float32", "photometric": "minisblack"},
}


@pytest.fixture(scope="module", autouse=True)
def small_screen():
    """Lower the size limit, so that levels are computed for small slides."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opened, "LARGEST_OVERVIEW", 100)
        yield


def write(path, steps, *, channels=3, dtype="uint8", size=(HEIGHT, WIDTH), **options):
    """Write levels that subsample the finer ones, so that averages differ from them."""
    pixels = slides.picture(*size, channels, dtype)
    pixels = pixels[..., 0] if channels == 1 else pixels
    shape = {"planarconfig": "contig"} if channels in (2, 4) else {}
    slides.write_pyramid(path, pixels, steps, tile=TILE, **shape, **options)
    return path


def stored_levels(path):
    """The file's levels by tifffile, each (height, width, channels)."""
    with tifffile.TiffFile(path) as file:
        levels = [page.asarray() for page in file.pages]
    return [level.reshape(*level.shape[:2], -1) for level in levels]


def shown_levels(path):
    """Return the expected levels of the pyramid, finest first."""
    stored = stored_levels(path)
    found = [stored[0]]
    for level in stored[1:]:
        while max(found[-1].shape[:2]) > max(100, 2.1 * max(level.shape[:2])):
            found.append(slides.average(found[-1], 2))
        found.append(level)
    while max(found[-1].shape[:2]) > 100:
        found.append(slides.average(found[-1], 2))
    return found


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A slide whose inserted levels have several tiles, and its expected levels."""
    path = tmp_path_factory.mktemp("slide") / "slide.tif"
    write(path, (8,), size=(1130, 2219), photometric="rgb")
    with open_slide(path, device="cpu") as slide:
        yield slide, shown_levels(path)


class TestPixels:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(("steps", "inserted"), [((4,), 1), ((3,), 1), ((8,), 2), ((3, 2), 1)])
    def test_they_are_averages_of_the_finer_level(self, tmp_path, kind, steps, inserted):
        path = write(tmp_path / "slide.tif", steps, **KINDS[kind])
        expected = shown_levels(path)
        with open_slide(path, device="cpu") as slide:
            assert sum(level.inserted for level in slide.pyramid) == inserted
            for level, pixels in zip(slide.pyramid, expected, strict=True):
                array = slide.level_array(level.number)
                assert array.number == level.number
                assert array.computed == (level.number >= slide.level_count)
                assert array.dtype == pixels.dtype
                np.testing.assert_array_equal(array[...], pixels)
                np.testing.assert_array_equal(array[5::-2, 7::5], pixels[5::-2, 7::5])
                last = pixels.shape[2] - 1
                channel = slide.level_array(level.number, last, tolerant=True)
                np.testing.assert_array_equal(channel[3:, 2:], pixels[3:, 2:, last])

    @pytest.mark.parametrize("size", [(9, 1201), (1203, 3), (802, 801), (640, 959)])
    def test_odd_sizes(self, tmp_path, size):
        path = write(tmp_path / "slide.tif", (4,), size=size, photometric="rgb")
        with open_slide(path, device="cpu") as slide:
            for level, pixels in zip(slide.pyramid, shown_levels(path), strict=True):
                np.testing.assert_array_equal(slide.level_array(level.number)[...], pixels)

    @given(
        index=st.integers(1, 2),
        rows=st.tuples(st.integers(0, 565), st.integers(0, 565)).map(sorted),
        columns=st.tuples(st.integers(0, 1110), st.integers(0, 1110)).map(sorted),
        cold=st.booleans(),
    )
    def test_any_region(self, shown, index, rows, columns, cold):
        slide, expected = shown
        level = slide.pyramid[index]
        assert level.inserted
        if cold:
            slide.clear_cache()
        place = slice(*rows), slice(*columns)
        found = slide.level_array(level.number)[place]
        np.testing.assert_array_equal(found, expected[index][place])

    def test_no_level_is_inserted_between_steps_of_2(self, tmp_path):
        path = write(tmp_path / "slide.tif", (2, 2, 2), photometric="rgb")
        with open_slide(path) as slide:
            assert [level.number for level in slide.pyramid] == [0, 1, 2, 3]

    @pytest.mark.usefixtures("scanner_colours")
    def test_in_srgb(self, tmp_path):
        profile = PROFILES["table"]
        path = write(tmp_path / "slide.tif", (4,), photometric="rgb", iccprofile=profile)
        expected = shown_levels(path)[1]
        with open_slide(path, device="cpu") as slide:
            level = slide.level_array(slide.pyramid[1].number, tolerant=True)
            slide.display_color = "srgb"
            for _ in ("cold", "warm"):
                np.testing.assert_array_equal(level[...], in_srgb(expected))
            slide.display_color = "stored"
            np.testing.assert_array_equal(level[...], expected)

    def test_canvases(self, tmp_path):
        scans = [
            leica.scan(slides.picture(140, 100), 4 * SPACING, 10 * SPACING, (4,)),
            leica.scan(slides.picture(68, 120), 174 * SPACING, 121 * SPACING, (4,)),
        ]
        path = leica.write(tmp_path / "slide.scn", scans, (301 * SPACING, 220 * SPACING))
        with open_slide(path, device="cpu") as slide:
            fine, between, coarse = (
                slide.level_array(level.number)[...] for level in slide.pyramid
            )
            assert [bool(level.layout.parts) for level in slide.pyramid] == [True, False, True]
            np.testing.assert_array_equal(between, slides.average(fine, 2))
            for level, pixels in zip(slide.levels, (fine, coarse), strict=True):
                np.testing.assert_array_equal(level[...], pixels)
            np.testing.assert_array_equal(slide.level_array(slide.pyramid[1].number)[...], between)
            assert slide.stats()["cache_hits"]


class TestMissingTiles:
    def test_background_is_averaged_too(self, tmp_path):
        pixels = slides.picture(160, 240)
        levels = pixels, pixels[::4, ::4]
        pages = [
            tiffbytes.page(level, bytes, tile=TILE, missing=missing, subfile_type=number)
            for number, (level, missing) in enumerate(
                zip(levels, ([0, 1, 5, 6, 13], []), strict=True)
            )
        ]
        path = tiffbytes.write(tmp_path / "slide.tif", pages)
        fine = stored_levels(path)[0]
        assert not fine[:32, :96].any()
        assert fine[:32, 96:].any()
        with open_slide(path, device="cpu") as slide:
            between = slide.level_array(slide.pyramid[1].number)
            assert between.computed
            np.testing.assert_array_equal(between[...], slides.average(fine, 2))

    def test_stored_levels_are_filled_from_stored_ones(self, tmp_path):
        """They are 4 x 4 averages of stored pixels, not averages of inserted levels."""
        path = tmp_path / "slide.svs"
        written = slides.write_aperio(
            path,
            slides.picture(HEIGHT, WIDTH),
            (4,),
            missing=([2, 3], [0, 3]),
            tile=TILE,
            compression=1,
            encode=bytes,
        )
        fine = written[0].copy()
        fine[:32, 96:192] = 255
        coarse, means = written[1].copy(), slides.average(fine, 4)
        coarse[:32, :48], coarse[32:64, :48] = means[:32, :48], means[32:64, :48]
        with open_slide(path, device="cpu") as slide:
            assert [level.inserted for level in slide.pyramid][:3] == [False, True, False]
            np.testing.assert_array_equal(slide.levels[1][...], coarse)
            shown = [slide.level_array(level.number)[...] for level in slide.pyramid]
            np.testing.assert_array_equal(shown[1], slides.average(fine, 2))
            np.testing.assert_array_equal(shown[2], coarse)
            np.testing.assert_array_equal(shown[3], slides.average(coarse, 2))


class TestDamagedTiles:
    @pytest.fixture
    def damaged(self, tmp_path):
        """A slide whose tile (1, 2) of level 0 is truncated, and its expected pixels."""
        pixels = slides.picture(320, 480)
        numbers = iter(range(1000))

        def encode(tile):
            return tile.tobytes()[: 99 if next(numbers) == 12 else None]

        pages = [
            tiffbytes.page(level, encode, tile=TILE, subfile_type=number)
            for number, level in enumerate((pixels, pixels[::4, ::4]))
        ]
        shown = pixels.copy()
        shown[32:64, 96:144] = 0
        with open_slide(tiffbytes.write(tmp_path / "damaged.tif", pages), device="cpu") as slide:
            yield slide, slides.average(shown, 2)

    def test_exact_read_names_the_finer_tile(self, damaged):
        slide, shown = damaged
        level = slide.level_array(slide.pyramid[1].number)
        for _ in range(2):
            with pytest.raises(TileError) as info:
                level[...]
            assert [name for name, _ in info.value.failures] == ["level 0, row 1, column 2"]
        assert level.shape == shown.shape

    def test_tolerant_read_shows_background_and_reports_once(self, damaged, caplog):
        slide, shown = damaged
        told = []
        slide.on_failed_tile(lambda name, reason: told.append(name))
        level = slide.level_array(slide.pyramid[1].number, tolerant=True)
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                np.testing.assert_array_equal(level[...], shown)
                slide.level_array(0, tolerant=True)[...]
        assert told == ["level 0, row 1, column 2"]
        assert len(caplog.records) == 1
        assert slide.stats()["failed"] == 1


class TestNumbers:
    def test_stored_levels_are_numbered_like_openslides(self, tmp_path):
        path = tmp_path / "slide.svs"
        slides.write_aperio(path, slides.picture(1100, 1300), (4, 2))
        with open_slide(path, device="cpu") as slide:
            assert any(level.inserted for level in slide.pyramid)
            dimensions, downsamples = oracles.openslide_shape(path)
            assert slide.level_dimensions == dimensions
            assert slide.level_downsamples == downsamples
            for number, level in enumerate(slide.levels):
                expected = oracles.openslide_level(path, number)
                region = slide.read_region((0, 0), slide.level_dimensions[number], number)
                for found in (level[...], slide.level_array(number)[...], region):
                    np.testing.assert_array_equal(found, expected)
                assert level.number == number
            with pytest.raises(LevelError, match="3 levels, 0 to 2"):
                slide.read_region((0, 0), (5, 5), 3)

    def test_each_number_names_one_level(self, tmp_path):
        path = tmp_path / "slide.svs"
        slides.write_aperio(path, slides.picture(1100, 1300), (4, 2))
        with open_slide(path, device="cpu") as slide:
            numbers = [level.number for level in slide.pyramid]
            assert numbers == [0, 3, 1, 2, 4]
            for level in slide.pyramid:
                shape = slide.level_array(level.number).shape
                assert shape == (level.layout.height, level.layout.width, 3)
            with pytest.raises(LevelError, match=r"has no level 5; it has 5 levels, 0 to 4\.$"):
                slide.level_array(5)

    def test_arrays_can_be_pickled(self, tmp_path):
        path = write(tmp_path / "slide.tif", (8,), photometric="rgb")
        expected = shown_levels(path)
        with open_slide(path, device="cpu") as slide:
            data = pickle.dumps([slide.level_array(level.number) for level in slide.pyramid])
        arrays = pickle.loads(data)
        with arrays[0].slide:
            for array, pixels in zip(arrays, expected, strict=True):
                np.testing.assert_array_equal(array[...], pixels)


class TestCache:
    @pytest.fixture
    def slide(self, tmp_path):
        path = write(tmp_path / "slide.tif", (8,), size=(1024, 1024), photometric="rgb")
        with open_slide(path, device="cpu") as slide:
            yield slide

    def kept_of(self, slide, number):
        """Return the number of tiles of a level that need not be decoded."""
        before = slide.stats()["cache_hits"]
        slide.level_array(number)[...]
        return slide.stats()["cache_hits"] - before

    def test_only_the_tiles_of_an_inserted_level_are_kept(self, slide):
        finest, inserted, *_ = slide.pyramid
        assert inserted.finer == finest.number
        slide.level_array(inserted.number)[...]
        assert self.kept_of(slide, 0) == 0
        assert self.kept_of(slide, inserted.number) == inserted.layout.grid.byte_counts.size

    def test_tiles_two_levels_below_are_not_kept(self, slide):
        _, finer, inserted, *_ = slide.pyramid
        assert inserted.finer == finer.number
        assert finer.layout.computed
        slide.level_array(inserted.number)[...]
        assert self.kept_of(slide, 0) == 0
        assert self.kept_of(slide, finer.number) == finer.layout.grid.byte_counts.size

    def test_tiles_below_an_overview_are_not_kept(self, slide):
        stored, overview = slide.pyramid[-2:]
        assert overview.finer == stored.number == 1
        slide.level_array(overview.number)[...]
        assert self.kept_of(slide, stored.number) == 0

    def test_nothing_is_decoded_twice_for_neighbours(self, slide, monkeypatch):
        """Computed tiles cover whole tiles, so that it also works without a cache."""
        monkeypatch.setattr(runtime.default().tiles, "get", lambda key: None)
        slide.level_array(slide.pyramid[1].number)[...]
        assert slide.stats()["decoded"]["cpu"] == slide.layout.levels[0].grid.byte_counts.size
