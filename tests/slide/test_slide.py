import contextlib
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from copy import copy, deepcopy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import napari_wsigpu
from napari_wsigpu import SlideError, open_slide
from napari_wsigpu.model.errors import (
    DeviceError,
    LevelError,
    RegionError,
    SlideChangedError,
    SlideClosedError,
    SlideNotFoundError,
    TileError,
)
from napari_wsigpu.slide import runtime
from napari_wsigpu.slide.facts import TIMES
from tests import oracles
from tests.conftest import decoding_threads
from tests.writers import ndpi, slides, tiffbytes

SOAK_SECONDS = float(os.environ.get("WSIGPU_SOAK_SECONDS", "3"))
WIDTH, HEIGHT = 473, 331


@pytest.fixture
def path(tmp_path):
    return tmp_path / "slide.svs"


@pytest.fixture
def aperio(path):
    """An Aperio slide of 3 levels, losslessly encoded, and its levels."""
    levels = slides.write_aperio(path, slides.picture(HEIGHT, WIDTH), compression=1, encode=bytes)
    with open_slide(path) as slide:
        yield slide, levels


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    path = tmp_path_factory.mktemp("slide") / "slide.svs"
    levels = slides.write_aperio(path, slides.picture(HEIGHT, WIDTH), compression=1, encode=bytes)
    with open_slide(path) as slide:
        yield slide, levels


@pytest.fixture
def opened(shared):
    """The same, shared by tests that only read."""
    yield shared
    shared[0].release()


def test_the_public_face():
    assert set(napari_wsigpu.__all__) == {
        "Annotation",
        "Conversion",
        "convert",
        "Slide",
        "SlideError",
        "__version__",
        "open_slide",
        "label_image",
        "measure",
        "read_geojson",
        "read_zarr_to_gpu",
        "set_request_headers",
        "wait",
        "write_geojson",
    }
    for name in napari_wsigpu.__all__:
        assert getattr(napari_wsigpu, name)


def test_properties_and_repr(opened):
    slide, levels = opened
    assert slide.dimensions == (WIDTH, HEIGHT)
    assert slide.level_count == len(slide.levels) == 3
    assert slide.level_dimensions == tuple((level.shape[1], level.shape[0]) for level in levels)
    assert slide.level_downsamples == oracles.openslide_shape(slide.path)[1]
    assert slide.mpp == (0.499, 0.499)
    assert slide.objective == 20
    assert slide.path in repr(slide)
    assert "473 x 331" in repr(slide)


def test_metadata_is_json_and_the_callers_own(opened):
    slide, _ = opened
    before = json.dumps(slide.metadata)
    slide.metadata["aperio"]["AppMag"] = "changed"
    assert json.dumps(slide.metadata) == before
    assert slide.metadata["vendor"] == "aperio"


def test_missing_keys_list_the_existing_ones(opened):
    slide, _ = opened
    with pytest.raises(KeyError) as error:
        slide.associated_images["labl"]
    names = ", ".join(map(repr, slide.associated_images)) or "none"
    assert str(error.value) == f"There is no associated image 'labl'; available: {names}."
    with pytest.raises(KeyError, match=r"no metadata field 'mmp'; available: 'vendor', 'scanner'"):
        slide.metadata["mmp"]
    with pytest.raises(KeyError, match=r"no label image 'cells'; available: none\.$"):
        slide.labels["cells"]
    with pytest.raises(SlideError):
        slide.labels["cells"]
    assert slide.labels.get("cells") is None
    assert pickle.loads(pickle.dumps(slide.metadata)) == slide.metadata


def test_errors_keep_their_cause(opened, monkeypatch):
    slide, _ = opened
    cause, raised = ValueError("of the driver"), [DeviceError("The device failed.")]

    def fail(*_):
        raise raised[0] from cause

    monkeypatch.setattr(slide._reader, "read", fail)
    with pytest.raises(DeviceError) as info:
        slide.levels[0][::2]
    assert info.value.__cause__ is cause
    raised[0] = RuntimeError("can't start new thread")
    with pytest.raises(SlideError, match="No more threads can be started") as info:
        slide.levels[0][::2]
    assert info.value.__cause__ is raised[0]


def test_levels_out_of_range_say_how_many_there_are(opened):
    slide, _ = opened
    for index in (9, -10):
        with pytest.raises(IndexError, match=rf"no level {index}; it has 3 levels, 0 to 2\.$"):
            slide.levels[index]
    assert slide.levels[-1] is slide.levels[2]
    assert slide.levels[:2] == (slide.levels[0], slide.levels[1])
    copies = pickle.loads(pickle.dumps(slide.levels))
    with pytest.raises(LevelError, match="it has 3 levels"):
        copies[9]
    for each in copies:
        each.slide.close()


def test_dir_shows_no_private_names(opened):
    slide, _ = opened
    names = dir(slide)
    assert {"read_region", "levels", "layout", "__enter__"} <= set(names)
    assert not [name for name in names if name.startswith("_") and not name.startswith("__")]


def test_html_for_notebooks(path):
    path = Path(path).with_name("a & b.svs")
    slides.write_aperio(path, slides.picture(700, 900), tile=(64, 64))
    with open_slide(path) as slide:
        html = slide._repr_html_()
        plain = html.replace("\N{NO-BREAK SPACE}", " ")
        assert plain.startswith("<table><tr><th>Name</th><td>a &amp; b.svs</td></tr>")
        assert f"<td>900 {TIMES} 700 px</td>" in plain
        assert "µm/px" in plain
        assert "<th>Compression</th><td>JPEG" in plain
        private = [text for text in map(str, slide.metadata["aperio"].values()) if len(text) > 5]
        assert not [text for text in private if text in html]


def reference(level, x, y, width, height, background=255):
    """Cut a region out of a decoded level, filled with the background outside."""
    region = np.full((height, width, level.shape[2]), background, level.dtype)
    ys, xs = np.mgrid[y : y + height, x : x + width]
    inside = (ys >= 0) & (ys < level.shape[0]) & (xs >= 0) & (xs < level.shape[1])
    region[inside] = level[ys[inside], xs[inside]]
    return region


PLACE = st.one_of(st.integers(-200, 700), st.integers(-(2**70), 2**70))
LENGTH = st.integers(0, 200)


class TestReadRegion:
    @given(x=PLACE, y=PLACE, width=LENGTH, height=LENGTH)
    @example(x=0, y=0, width=WIDTH, height=HEIGHT)
    @example(x=-10, y=-10, width=WIDTH + 20, height=HEIGHT + 20)
    @example(x=WIDTH, y=0, width=5, height=5)
    @example(x=-5, y=0, width=5, height=5)
    @example(x=3, y=3, width=0, height=9)
    def test_level_0(self, opened, x, y, width, height):
        slide, (level, *_) = opened
        found = slide.read_region((x, y), (width, height))
        if max(abs(x), abs(y)) < 10**6:
            expected = reference(level, x, y, width, height)
        else:
            expected = np.full((height, width, 3), 255, np.uint8)
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(found, expected)

    @given(
        level=st.sampled_from([1, 2]),
        x=st.integers(-100, 200),
        y=st.integers(-100, 200),
        width=LENGTH,
        height=LENGTH,
    )
    def test_lower_levels(self, opened, level, x, y, width, height):
        """Locations count in pixels of level 0, sizes in those of the level."""
        slide, levels = opened
        down = slide.level_downsamples[level]
        location = (round(x * down), round(y * down))
        found = slide.read_region(location, (width, height), level)
        np.testing.assert_array_equal(found, reference(levels[level], x, y, width, height))

    @pytest.mark.parametrize("level", [0, 1, 2])
    def test_openslide_reads_the_same(self, path, level):
        # The sizes are divisible: OpenSlide interpolates if a downsample is not a whole number.
        slides.write_aperio(path, slides.picture(320, 480))
        down = 2**level
        with open_slide(path) as slide, oracles.openslide.OpenSlide(path) as other:
            for x, y in [(0, 0), (4, 8), (40, 30), (480 // down - 50, 320 // down - 40)]:
                image = other.read_region((x * down, y * down), level, (50, 40))
                mine = slide.read_region((x * down, y * down), (50, 40), level)
                np.testing.assert_array_equal(mine, np.asarray(image)[..., :3])

    @pytest.mark.parametrize("far", [10**400, -(10**400)], ids=["far", "negative"])
    def test_location_of_any_size(self, opened, far):
        slide, _ = opened
        assert (slide.read_region((far, 3), (5, 5), 1) == 255).all()
        for region in slide.read_regions([(0, far), (far, 0)], (5, 5), 1):
            assert (region == 255).all()
        with pytest.raises(RegionError, match="A region of"):
            slide.read_region((0, 0), (far, 5))

    @pytest.mark.parametrize("size", [(-1, 5), (5, -1), (-(2**70), 5)])
    def test_no_negative_size(self, opened, size):
        with pytest.raises(RegionError, match="size"):
            opened[0].read_region((0, 0), size)

    @pytest.mark.parametrize("pair", [(0.5, 0), ("1", 2), (1,), (1, 2, 3), None, 7, (None, 1)])
    def test_only_pairs_of_whole_numbers(self, opened, pair):
        slide, _ = opened
        with pytest.raises(RegionError, match=r"The location .*; pass \(x, y\)"):
            slide.read_region(pair, (5, 5))
        with pytest.raises(RegionError, match="size"):
            slide.read_region((5, 5), pair)

    @pytest.mark.parametrize("level", [3, -1, 99])
    def test_no_such_level(self, opened, level):
        with pytest.raises(LevelError, match=r"3 levels, 0 to 2"):
            opened[0].read_region((0, 0), (5, 5), level)

    @pytest.mark.parametrize("device", ["cuda", "gpu", "auto"])
    def test_no_such_device(self, opened, device):
        with pytest.raises(DeviceError, match=device):
            opened[0].read_region((0, 0), (5, 5), device=device)

    def test_numpy_integers(self, opened):
        slide, (level, *_) = opened
        found = slide.read_region(np.array([5, 6]), np.array([7, 8], np.uint8), np.int64(0))
        np.testing.assert_array_equal(found, level[6:14, 5:12])

    def test_a_region_larger_than_memory_is_refused(self, opened):
        with pytest.raises((RegionError, MemoryError)):
            opened[0].read_region((0, 0), (2**40, 2**40))


class TestReadRegions:
    @pytest.mark.parametrize("workers", [1, 3])
    @pytest.mark.parametrize("batch_size", [None, 1, 3, 100])
    @pytest.mark.parametrize("level", [0, 1])
    def test_in_order(self, leaves_nothing, opened, level, batch_size, workers):
        slide, _ = opened
        places = [(x, y) for y in range(-20, 300, 90) for x in range(-20, 400, 90)]
        options = {"batch_size": batch_size, "num_workers": workers}
        found = list(slide.read_regions(iter(places), (40, 30), level, **options))
        assert len(found) == -(-len(places) // (batch_size or 1))
        regions = found if batch_size is None else [one for batch in found for one in batch]
        for place, region in zip(places, regions, strict=True):
            np.testing.assert_array_equal(region, slide.read_region(place, (40, 30), level))

    def test_a_short_last_batch_can_be_left_out(self, opened):
        places = [(0, 0)] * 7
        shapes = [batch.shape for batch in opened[0].read_regions(places, (5, 4), 0, 3)]
        assert shapes == [(3, 4, 5, 3), (3, 4, 5, 3), (1, 4, 5, 3)]
        batches = list(opened[0].read_regions(places, (5, 4), 0, 3, drop_last=True))
        assert [len(batch) for batch in batches] == [3, 3]
        assert len(list(opened[0].read_regions(places, (5, 4), drop_last=True))) == 7

    def test_batch_larger_than_memory_is_refused(self, opened):
        batches = opened[0].read_regions([(0, 0)] * 10**6, (10**5, 10**5), 0, 10**6)
        with pytest.raises(RegionError, match="batch_size"):
            next(batches)

    def test_shuffled_by_a_seed(self, opened):
        slide, levels = opened
        places = [(x, 7) for x in range(40)]

        def order(**options):
            found = slide.read_regions(places, (9, 9), shuffle=True, **options)
            columns = {levels[0][7:16, x : x + 9].tobytes(): x for x in range(40)}
            return [columns[region.tobytes()] for region in found]

        first = order(seed=1)
        assert first == order(seed=1, num_workers=4) != order(seed=2)
        assert sorted(first) == list(range(40)) != first

    def test_no_locations(self, opened):
        assert list(opened[0].read_regions([], (5, 5))) == []

    @pytest.mark.parametrize(
        ("name", "value"),
        [("batch_size", 0), ("batch_size", 1.5), ("num_workers", -1), ("prefetch_factor", -1)],
    )
    def test_invalid_numbers(self, opened, name, value):
        with pytest.raises(RegionError, match=name):
            next(opened[0].read_regions([(0, 0)], (5, 5), **{name: value}))

    def test_it_decodes_no_further_ahead_than_requested(self, opened):
        asked = []

        def places():
            for number in range(50):
                asked.append(number)
                yield number, number

        regions = opened[0].read_regions(places(), (5, 5), num_workers=1, prefetch_factor=3)
        assert asked == []
        next(regions)
        assert 4 <= len(asked) <= 5
        next(regions)
        assert len(asked) <= 6
        regions.close()

    @pytest.mark.parametrize("taken", [0, 1, 7])
    def test_abandoned_early_it_leaves_no_thread(self, opened, taken):
        slide, _ = opened
        slide.release()
        regions = slide.read_regions([(0, 0)] * 1000, (400, 300), prefetch_factor=4)
        for _ in range(taken):
            next(regions)
        regions.close()
        slide.release()
        assert decoding_threads() == []

    def test_dropped_early_it_leaves_no_thread(self, opened):
        slide, _ = opened
        slide.release()
        for _ in slide.read_regions([(0, 0)] * 1000, (40, 30)):
            break
        gc.collect()
        slide.release()
        assert decoding_threads() == []

    def test_errors_are_raised_in_order(self, opened):
        places = [(0, 0), (1, 1), ("x", 0), (2, 2)]
        regions = opened[0].read_regions(places, (5, 5))
        next(regions)
        next(regions)
        with pytest.raises(RegionError):
            next(regions)
        with pytest.raises(StopIteration):
            next(regions)

    def test_failed_tiles_are_raised_in_order(self, path):
        numbers = iter(range(99))
        page = tiffbytes.page(
            slides.picture(64, 200),
            lambda tile: tile.tobytes()[: 9 if next(numbers) == 3 else None],
            tile=(64, 50),
        )
        with open_slide(tiffbytes.write(path, [page])) as slide:
            regions = slide.read_regions([(x, 0) for x in range(0, 200, 50)], (50, 64))
            assert len([next(regions) for _ in range(3)]) == 3
            with pytest.raises(TileError, match="column 3"):
                next(regions)


class TestResources:
    def test_open_reads_no_pixel_and_keeps_no_handle(self, path, aperio, handles_of):
        slide, _ = aperio
        assert handles_of(path) == 0
        assert slide.stats()["bytes_read"] == 0
        assert decoding_threads() == []

    @pytest.mark.usefixtures("without_core")
    @pytest.mark.parametrize("threads", [1, 3])
    def test_threads_argument_limits_decoding_threads(self, path, aperio, threads):
        with open_slide(path, threads=threads) as slide, pickle.loads(pickle.dumps(slide)) as other:
            for number, each in enumerate((slide, other), 1):
                np.testing.assert_array_equal(each.levels[0][...], aperio[1][0])
                assert number * (threads > 1) <= len(decoding_threads()) <= number * (threads - 1)

    @pytest.mark.parametrize("threads", [0, -2, 1.5, "4"])
    def test_invalid_numbers_of_threads(self, path, aperio, threads):
        with pytest.raises(DeviceError, match=f"threads is {threads!r}"):
            open_slide(path, threads=threads)

    @pytest.mark.usefixtures("without_core")
    def test_release_frees_everything_until_the_next_read(self, path, aperio, handles_of):
        slide, levels = aperio
        for _ in range(2):
            np.testing.assert_array_equal(slide.levels[0][...], levels[0])
            assert handles_of(path) == 1
            assert decoding_threads()
            slide.release()
            assert handles_of(path) == 0
            assert decoding_threads() == []
        assert slide.stats()["cache_hits"] == 0

    def test_associated_images_are_no_levels(self, aperio):
        slide, _ = aperio
        numbers = {level.number for level in slide.pyramid}
        assert slide.associated_images
        for number in range(-5, len(numbers) + 8):
            if number not in numbers:
                with pytest.raises(LevelError, match=f"has no level {number}; it has"):
                    slide.level_array(number)

    def test_close_is_for_good(self, path, leaves_nothing):
        slides.write_aperio(path, slides.picture(HEIGHT, WIDTH))
        with open_slide(path) as slide:
            slide.levels[0][...]
            image = slide.associated_images["label"]
            image.read()
        slide.close()
        for read in (
            lambda: slide.read_region((0, 0), (5, 5)),
            lambda: slide.read_region((-50, 0), (5, 5)),
            lambda: slide.levels[1][0, 0],
            lambda: np.asarray(slide.levels[0]),
            lambda: next(slide.read_regions([(0, 0)], (5, 5))),
            image.read,
        ):
            with pytest.raises(SlideClosedError, match=r"slide\.svs"):
                read()
        assert slide.dimensions == (WIDTH, HEIGHT)  # properties stay available
        slide.release()
        slide.clear_cache()

    def test_with_closes_after_an_error(self, path, leaves_nothing):
        slides.write_aperio(path, slides.picture(HEIGHT, WIDTH))
        slide = open_slide(path)
        slide.levels[0][...]
        with pytest.raises(LevelError), slide:
            slide.read_region((0, 0), (5, 5), 17)

    def test_clear_cache_only_drops_pixels(self, path, aperio, handles_of):
        slide, _ = aperio
        slide.levels[2][...]
        slide.clear_cache()
        assert handles_of(path) == 1
        slide.levels[2][...]
        assert slide.stats()["cache_hits"] == 0

    @pytest.mark.usefixtures("without_core")
    @pytest.mark.parametrize("method", ["close", "release"])
    def test_a_read_in_flight_leaves_nothing(self, path, method, monkeypatch, leaves_nothing):
        """The slide is closed after the bytes were read and before they are decoded."""
        slides.write_aperio(path, slides.picture(HEIGHT, WIDTH), encode=bytes, compression=1)
        used = runtime.default().tiles.used
        with open_slide(path) as slide:
            ender = threading.Thread(target=getattr(slide, method))
            read = slide._source.read_joined

            def read_and_end(*ranges):
                found = read(*ranges)
                ender.start()
                ender.join(0.5)
                return found

            monkeypatch.setattr(slide._source, "read_joined", read_and_end)
            with contextlib.suppress(SlideClosedError):
                slide.levels[0][...]
            ender.join(10)
            assert not ender.is_alive()
            if method == "close":
                assert decoding_threads() == []
                assert runtime.default().tiles.used == used

    def test_close_while_others_read(self, path, leaves_nothing):
        """Readers get exact pixels or a `SlideClosedError`."""
        levels = slides.write_aperio(
            path, slides.picture(HEIGHT, WIDTH), encode=bytes, compression=1
        )
        for _ in range(5):
            wrong = []
            with open_slide(path) as slide:

                def work(slide=slide, wrong=wrong):
                    try:
                        while True:
                            slide.clear_cache()
                            found = slide.read_region((60, 40), (300, 200))
                            if not np.array_equal(found, levels[0][40:240, 60:360]):
                                wrong.append("pixels")
                    except SlideClosedError:
                        pass
                    except BaseException as error:
                        wrong.append(error)

                threads = [threading.Thread(target=work) for _ in range(4)]
                for thread in threads:
                    thread.start()
                time.sleep(0.05)
            for thread in threads:
                thread.join(20)
                assert not thread.is_alive()
            assert wrong == []
            assert decoding_threads() == []

    def test_release_while_others_read(self, path, leaves_nothing):
        levels = slides.write_aperio(
            path, slides.picture(HEIGHT, WIDTH), encode=bytes, compression=1
        )
        wrong = []
        done = threading.Event()
        with open_slide(path) as slide:

            def work():
                try:
                    while not done.is_set():
                        found = slide.read_region((60, 40), (300, 200))
                        if not np.array_equal(found, levels[0][40:240, 60:360]):
                            wrong.append("pixels")
                except BaseException as error:
                    wrong.append(error)

            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for _ in range(50):
                slide.release()
            done.set()
            for thread in threads:
                thread.join(20)
        assert wrong == []


class TestChangedFiles:
    def test_replaced_file_is_detected(self, path, aperio):
        slide, _ = aperio
        slide.levels[0][0, 0]
        slide.release()
        with path.open("ab") as file:
            file.write(b"more")
        with pytest.raises(SlideChangedError, match=r"slide\.svs"):
            slide.levels[0][0, 0]

    def test_a_file_deleted_before_the_first_read(self, path, aperio):
        slide, _ = aperio
        path.unlink()
        with pytest.raises(SlideNotFoundError, match=r"slide\.svs"):
            slide.read_region((0, 0), (5, 5))


class TestCopies:
    def test_a_deep_copy_is_the_same(self, aperio):
        assert deepcopy(aperio[0]) is aperio[0]

    def test_a_shallow_copy_is_independent(self, aperio):
        slide, levels = aperio
        with copy(slide) as other:
            assert other is not slide
            slide.close()
            np.testing.assert_array_equal(other.levels[0][...], levels[0])

    def test_a_pickled_slide_reads_the_same(self, aperio):
        slide, levels = aperio
        with pickle.loads(pickle.dumps(slide)) as other:
            assert other is not slide
            assert other.metadata == slide.metadata
            for level, expected in zip(other.levels, levels, strict=True):
                np.testing.assert_array_equal(level[...], expected)
            label = other.associated_images["label"].read()
            np.testing.assert_array_equal(label, slide.associated_images["label"].read())
        assert slide.read_region((0, 0), (5, 5)).shape == (5, 5, 3)  # the original is still open


@pytest.mark.parametrize("encode", ["jpeg", "raw"])
def test_sixteen_threads_read_exact_pixels(path, encode, leaves_nothing):
    options = {"encode": bytes, "compression": 1} if encode == "raw" else {}
    slides.write_aperio(path, slides.picture(700, 900), tile=(64, 64), **options)
    with open_slide(path) as slide:
        pixels = [oracles.tifffile_page(Path(path), page) for page in (0, 2, 3)]
        end = time.monotonic() + SOAK_SECONDS / 2
        wrong = []
        counts = []

        def work(seed):
            rng = np.random.default_rng(seed)
            count = 0
            try:
                while not count or time.monotonic() < end:
                    level = int(rng.integers(3))
                    x, y = (int(v) for v in rng.integers(-50, 1000 >> level, 2))
                    size = tuple(int(v) for v in rng.integers(0, 300, 2))
                    found = slide.read_region((x << level, y << level), size, level)
                    if not np.array_equal(found, reference(pixels[level], x, y, *size)):
                        wrong.append((level, x, y, size))
                    count += 1
                    if rng.random() < 0.05:
                        slide.clear_cache()
                    if rng.random() < 0.02:
                        slide.release()
            except BaseException as error:
                wrong.append(error)
            counts.append(count)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert min(counts) > 0


def test_every_error_is_a_slide_error():
    errors = vars(napari_wsigpu.errors)
    kinds = [
        kind
        for kind in errors.values()
        if isinstance(kind, type) and issubclass(kind, BaseException)
    ]
    assert len(kinds) >= 13
    for kind in kinds:
        assert issubclass(kind, SlideError)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_reads_while_threads_of_its_parent_do(tmp_path):
    pixels = slides.picture(600, 600)
    path = tmp_path / "a.tif"
    made = tiffbytes.page(pixels, tiffbytes.deflate, compression=8, tile=(64, 64))
    tiffbytes.write(path, [made])
    ended, children = threading.Event(), []
    with open_slide(path, "cpu") as slide, ThreadPoolExecutor(3) as threads:

        def read():
            while not ended.is_set():
                slide.read_region((10, 10), (300, 300))

        reads = [threads.submit(read) for _ in range(3)]
        try:
            for _ in range(8):
                child = os.fork()
                if not child:
                    signal.signal(
                        signal.SIGALRM, signal.SIG_DFL
                    )  # pytest's handler would let the process continue
                    signal.alarm(20)
                    whole = slide.levels[0][...]
                    slide.close()
                    os._exit(not np.array_equal(whole, pixels))
                children.append(child)
            found = [os.waitpid(child, 0)[1] for child in children]
        finally:
            ended.set()
        for each in reads:
            each.result()
    assert found == [0] * len(children)


FORK = """
import importlib.abc, os, signal, sys, threading
from napari_wsigpu import convert, open_slide

class Slow(importlib.abc.MetaPathFinder):
    def __init__(self, library):
        self.library, self.begun, self.forked = library, threading.Event(), threading.Event()

    def find_spec(self, name, path, target=None):
        if name == self.library and not self.begun.is_set():
            self.begun.set()
            self.forked.wait(0.3)  # unless a fork waits for this

def work(path, ending, compression):
    with open_slide(path, "cpu") as slide:
        if ending:
            convert(slide, f"{path}.{os.getpid()}.{ending}", compression=compression or None)
        for level in slide.levels:
            level[...]

for words in sys.argv[1:]:
    library, *given = words.split("|")
    assert library not in sys.modules
    slow = Slow(library)
    sys.meta_path.insert(0, slow)
    worker = threading.Thread(target=work, args=given)
    worker.start()
    assert slow.begun.wait(20), library
    child = os.fork()
    if not child:
        signal.alarm(10)
        work(*given)
        os._exit(0)
    slow.forked.set()
    assert os.waitpid(child, 0)[1] == 0, library
    worker.join()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked on this system")
def test_a_process_forked_while_a_codec_is_loaded_works(tmp_path):
    """Each slide in the process needs one more library."""
    pixels = slides.picture(192, 192)
    raw, deflated, jpegs = (tmp_path / f"{name}.tif" for name in ("raw", "deflated", "jpegs"))
    tiffbytes.write(raw, [tiffbytes.page(pixels, bytes, tile=(64, 64))])
    options = {"compression": 8, "tile": (64, 64)}
    tiffbytes.write(deflated, [tiffbytes.page(pixels, tiffbytes.deflate, **options)])
    pixels = slides.picture(192, 384)
    coarse = np.ascontiguousarray(pixels[::4, ::4])
    ndpi.write(jpegs, [ndpi.level(pixels, 6), ndpi.level(coarse, 6)])
    needs = (
        ("imagecodecs._deflate", deflated, "", ""),
        ("imagecodecs._png", raw, "png", ""),
        ("imagecodecs._jpeg8", raw, "tif", "jpeg"),
        ("PIL.JpegImagePlugin", jpegs, "", ""),
    )
    command = [sys.executable, "-c", FORK, *("|".join(map(str, each)) for each in needs)]
    done = subprocess.run(command, capture_output=True, timeout=60)
    assert not done.returncode, done.stderr.decode()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_closed_slide_frees_its_tables(device, tmp_path, host_gpu):
    pixels = slides.picture(200, 300)
    path = tmp_path / "a.tif"
    tiffbytes.write(path, [tiffbytes.page(pixels, tiffbytes.deflate, compression=8, tile=(64, 64))])
    with open_slide(path, device=device) as slide:
        table = weakref.ref(slide.layout.levels[0].grid.offsets)
        assert np.array_equal(slide.levels[0][...], pixels)
        slide.read_region((0, 0), (64, 64))
    del slide
    gc.collect()
    assert table() is None
