import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from napari_wsigpu import open_slide
from napari_wsigpu.slide import runtime
from tests.writers import slides

SHAPE = (83, 131, 4)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A slide with 4 channels, and its pixels."""
    path = tmp_path_factory.mktemp("slide") / "slide.tif"
    pixels = slides.picture(*SHAPE, "uint16")
    options = {"tile": (32, 48), "photometric": "minisblack", "planarconfig": "contig"}
    slides.write_pyramid(path, pixels, (2,), **options)
    with open_slide(path) as slide:
        yield slide, pixels


class TestIndexing:
    @given(index=hnp.basic_indices(SHAPE, allow_newaxis=False))
    @example(index=(-1, -131, -4))
    @example(index=(slice(None, None, -1), slice(None, None, -7), slice(3, None, -2)))
    @example(index=(..., 2))
    @example(index=(Ellipsis,))
    @example(index=())
    @example(index=(slice(5, 5), slice(200, 300)))
    @example(index=(slice(-500, 500, 33),))
    def test_as_numpy_does(self, opened, index):
        slide, pixels = opened
        found, expected = slide.levels[0][index], pixels[index]
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        np.testing.assert_array_equal(found, expected)

    @given(index=hnp.basic_indices(SHAPE[:2], allow_newaxis=False), channel=st.integers(0, 3))
    def test_one_channel_as_numpy_does(self, opened, index, channel):
        slide, pixels = opened
        found, expected = slide.level_array(0, channel)[index], pixels[..., channel][index]
        assert found.shape == expected.shape
        np.testing.assert_array_equal(found, expected)

    @given(
        index=st.tuples(
            *[
                st.one_of(
                    st.integers(-2 * n, 2 * n),
                    st.builds(slice, *[st.none() | st.integers(-2 * n, 2 * n)] * 2),
                )
                for n in SHAPE
            ]
        )
    )
    def test_out_of_bounds_as_numpy_does(self, opened, index):
        slide, pixels = opened
        try:
            expected = pixels[index]
        except IndexError:
            with pytest.raises(IndexError):
                slide.levels[0][index]
        else:
            np.testing.assert_array_equal(slide.levels[0][index], expected)

    @pytest.mark.parametrize(
        "index",
        [
            (0, 0, 0, 0),
            (..., ...),
            (0, ..., 0, 0, 0),
            (slice(None),) * 4,
            83,
            -84,
            (0, 131),
            (0, 0, 4),
            1.0,
            "0",
            None,
            True,
            np.True_,
            [0, 1],
            np.array([0, 1]),
        ],
    )
    def test_refused(self, opened, index):
        with pytest.raises(IndexError):
            opened[0].levels[0][index]

    @pytest.mark.parametrize("index", [slice(None, None, 0), slice("a"), slice(1.5, 2)])
    def test_refused_as_numpy_does(self, opened, index):
        slide, pixels = opened
        with pytest.raises((TypeError, ValueError)) as expected:
            pixels[index]
        with pytest.raises(expected.type):
            slide.levels[0][index]

    @pytest.mark.parametrize("kind", [np.int64, np.uint8, np.int16])
    def test_numpy_integers(self, opened, kind):
        slide, pixels = opened
        np.testing.assert_array_equal(slide.levels[0][kind(3), kind(5) : kind(9)], pixels[3, 5:9])

    def test_results_are_the_callers_own(self, opened):
        slide, pixels = opened
        found = slide.levels[0][:40, :40]
        found[...] = 0
        np.testing.assert_array_equal(slide.levels[0][:40, :40], pixels[:40, :40])


class TestArrayLike:
    def test_attributes(self, opened):
        slide, pixels = opened
        for index, expected in enumerate([pixels, pixels[::2, ::2]]):
            level = slide.levels[index]
            assert level.shape == expected.shape
            assert level.dtype == expected.dtype
            assert level.ndim == 3
            assert level.size == expected.size
            assert len(level) == len(expected)
            assert level.chunks == (min(32, expected.shape[0]), min(48, expected.shape[1]), 4)
            assert "uint16" in repr(level)

    def test_attributes_of_one_channel(self, opened):
        level = opened[0].level_array(0, 1)
        assert (level.shape, level.ndim, level.chunks) == ((83, 131), 2, (32, 48))
        assert level.size == 83 * 131

    def test_chunks_are_not_larger_than_the_level(self, tmp_path):
        slides.write_pyramid(tmp_path / "slide.tif", slides.picture(20, 30), ())
        with open_slide(tmp_path / "slide.tif") as slide:
            assert slide.levels[0].chunks == (20, 30, 3)

    def test_asarray(self, opened):
        slide, pixels = opened
        np.testing.assert_array_equal(np.asarray(slide.levels[0]), pixels)
        np.testing.assert_array_equal(np.array(slide.levels[0], copy=True), pixels)

    @pytest.mark.parametrize("dtype", ["float64", "uint8", "int32"])
    def test_asarray_of_a_type(self, opened, dtype):
        slide, pixels = opened
        found = np.asarray(slide.levels[0], dtype=dtype)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, pixels.astype(dtype))

    def test_there_is_nothing_without_a_copy(self, opened):
        with pytest.raises(ValueError, match="copy"):
            opened[0].levels[0].__array__(copy=False)

    def test_a_deep_copy_is_the_same(self, opened):
        slide, _ = opened
        assert copy.deepcopy(slide.levels[0]) is slide.levels[0]
        assert copy.deepcopy(list(slide.levels)) == list(slide.levels)

    @pytest.mark.parametrize("tiles", [1, 2, 100])
    def test_dask(self, opened, tiles):
        dask_array = pytest.importorskip("dask.array", reason="dask is not installed")
        slide, pixels = opened
        array = slide.levels[0].to_dask(tiles)
        assert isinstance(array, dask_array.Array)
        assert (array.shape, array.dtype) == (pixels.shape, pixels.dtype)
        assert array.chunksize[0] == min(32 * tiles, 83)
        np.testing.assert_array_equal(array.compute(scheduler="threads"), pixels)
        assert array[10:70, ::3].sum().compute() == pixels[10:70, ::3].sum()
        channel = slide.level_array(0, 2).to_dask()
        np.testing.assert_array_equal(channel.compute(scheduler="sync"), pixels[..., 2])

    def test_without_dask(self, opened, monkeypatch):
        monkeypatch.setitem(sys.modules, "dask", None)
        monkeypatch.setitem(sys.modules, "dask.array", None)
        slide, _ = opened
        with pytest.raises(ModuleNotFoundError, match="to_dask requires Dask"):
            slide.levels[0].to_dask()

    def test_reading_decodes_only_what_is_asked(self, opened):
        slide, _ = opened
        slide.clear_cache()
        before = slide.stats()["tiles_asked"]
        slide.levels[0][31:33, 47:49]
        assert slide.stats()["tiles_asked"] - before == 4
        slide.levels[0][0:83:64, 0]  # rows 0 and 64 only
        assert slide.stats()["tiles_asked"] - before == 6


class TestComputedLevels:
    def test_an_overview_is_kept_though_all_tiles_are_more_than_the_cache_holds(self, tmp_path):
        path = tmp_path / "slide.tif"
        pixels = slides.picture(515, 975).repeat(4, 0).repeat(4, 1)
        slides.write_pyramid(path, pixels, (), tile=(128, 128))
        before = runtime.default().tiles.budget
        try:
            runtime.default().tiles.budget = 5 << 20
            with open_slide(path, device="cpu") as slide:
                top = len(slide.pyramid) - 1
                overview = slide.level_array(top)[...]
                decoded = slide.stats()["decoded"]["cpu"]
                assert decoded * 128 * 128 * 3 > runtime.default().tiles.budget
                np.testing.assert_array_equal(slide.level_array(top)[...], overview)
                assert slide.stats()["decoded"]["cpu"] == decoded
        finally:
            runtime.default().tiles.budget = before

    def test_they_are_area_averages(self, tmp_path):
        path = tmp_path / "slide.tif"
        pixels = slides.picture(203, 1300, 3).repeat(4, 1)
        slides.write_pyramid(path, pixels, (), tile=(128, 128))
        with open_slide(path) as slide:
            assert slide.level_count == 1
            assert [(level.layout.width, level.layout.height) for level in slide.pyramid] == [
                (5200, 203),
                (2600, 102),
                (1300, 51),
                (650, 26),
            ]
            expected = pixels
            for index in (1, 2, 3):
                level = slide.level_array(index)
                expected = slides.average(expected, 2)
                assert level.computed
                np.testing.assert_array_equal(level[...], expected)
                np.testing.assert_array_equal(level[::-2, 3], expected[::-2, 3])


class TestPickling:
    def test_in_this_process(self, opened):
        slide, pixels = opened
        level, channel, tolerant = pickle.loads(
            pickle.dumps(
                [slide.levels[1], slide.level_array(0, 3), slide.level_array(0, tolerant=True)]
            )
        )
        try:
            np.testing.assert_array_equal(level[...], pixels[::2, ::2])
            np.testing.assert_array_equal(channel[...], pixels[..., 3])
            np.testing.assert_array_equal(tolerant[...], pixels)
            assert level.slide is channel.slide is tolerant.slide
        finally:
            level.slide.close()

    def test_in_another_process(self, opened, tmp_path):
        slide, pixels = opened
        (tmp_path / "level.pickle").write_bytes(pickle.dumps((slide, slide.levels[0])))
        code = (
            "import pickle, sys, pathlib, numpy\n"
            "path = pathlib.Path(sys.argv[1])\n"
            "slide, level = pickle.loads((path / 'level.pickle').read_bytes())\n"
            "with slide:\n"
            "    numpy.save(path / 'level.npy', level[...])\n"
            "    numpy.save(path / 'region.npy', slide.read_region((0, 0), (30, 20)))\n"
        )
        subprocess.run([sys.executable, "-W", "error", "-c", code, tmp_path], check=True)
        np.testing.assert_array_equal(np.load(tmp_path / "level.npy"), pixels)
        np.testing.assert_array_equal(np.load(tmp_path / "region.npy"), pixels[:20, :30])
