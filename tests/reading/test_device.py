import contextlib
import gc
import logging
import os
import signal
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import imagecodecs
import numpy as np
import pytest
import tifffile
from hypothesis import example, given, settings
from hypothesis import strategies as st

from napari_wsigpu import open_slide
from napari_wsigpu.gpu.device import workspace
from napari_wsigpu.gpu.device.worker import DecodeWorker
from napari_wsigpu.gpu.device.workspace import Workspace
from napari_wsigpu.gpu.jpeg.gpu_batch import GpuBatch
from napari_wsigpu.gpu.jpeg.nvimagecodec import NvImageCodecDecoder
from napari_wsigpu.gpu.transfer.device_tiles import DeviceTiles
from napari_wsigpu.model.errors import (
    DeviceError,
    RegionError,
    SlideChangedError,
    SlideClosedError,
    SlideError,
    SlideNotFoundError,
    TileError,
)
from napari_wsigpu.model.geometry import Rect
from napari_wsigpu.reading import device as device_module
from napari_wsigpu.reading import halving
from napari_wsigpu.reading.device import LIMITS
from napari_wsigpu.reading.plan import Cancellation, ReadOptions, Regions
from napari_wsigpu.reading.planning import plan_regions
from napari_wsigpu.slide import runtime
from napari_wsigpu.slide import slide as opened
from napari_wsigpu.slide.runtime import Runtime
from tests.conftest import pinned_places
from tests.fakes.host_device import HostStream, WrappedDecoder
from tests.slide.test_slide import reference
from tests.test_display_color import in_srgb, with_profile
from tests.writers import slides, tiffbytes

pytest.importorskip("nvidia.nvimgcodec")

HEIGHT, WIDTH = 131, 203  # no multiple of a tile
TILE = (32, 48)
TILES = 25


def jpeg_2000(tile):
    return imagecodecs.jpeg2k_encode(tile.squeeze(), level=0, codecformat="J2K", mct=False)


def deflate(tile):
    return zlib.compress(tile.tobytes())


YCBCR = {"compression": 7, "photometric": 6}
JPEG = YCBCR | {"encode": slides.jpeg_ycbcr}
KINDS = {
    "JPEG YCbCr": JPEG,
    "JPEG gray": {"channels": 1, "photometric": 1, "compression": 7, "encode": slides.jpeg},
    "JPEG 2000": {"compression": 34712, "encode": jpeg_2000},
    "JPEG 2000 YCbCr": {"compression": 33003, "photometric": 6, "encode": jpeg_2000},
    "JPEG 2000 16 bit": {
        **{"channels": 1, "dtype": "uint16", "photometric": 1},
        **{"compression": 34712, "encode": jpeg_2000},
    },
    "deflate": {"compression": 8, "encode": deflate},
    "separate planes": {"compression": 8, "encode": deflate, "planar": True},
    "channels": {
        **{"channels": 4, "dtype": "uint16", "photometric": 1},
        **{"compression": 8, "encode": deflate},
    },
}


BY_DEVICE = [kind for kind in KINDS if kind.startswith("JPEG")]


def write(path, *, channels=3, dtype="uint8", encode, **options):
    """Write a slide of three levels."""
    pixels = slides.picture(HEIGHT, WIDTH, channels, dtype)
    levels = [pixels, pixels[::2, ::2], pixels[::4, ::4]]
    pages = [
        tiffbytes.page(level, encode, tile=TILE, subfile_type=int(index > 0), **options)
        for index, level in enumerate(levels)
    ]
    return tiffbytes.write(path, pages)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A slide of each kind, and its levels as the CPU decodes them."""
    folder = tmp_path_factory.mktemp("slides")
    found = {}
    for number, (kind, options) in enumerate(KINDS.items()):
        path = write(folder / f"{number}.tif", **options)
        with open_slide(path, device="cpu") as slide:
            found[kind] = path, [level[...] for level in slide.levels]
    return found


@pytest.fixture
def jpeg(files, host_gpu):
    """A JPEG slide by the device, and its levels."""
    path, levels = files["JPEG YCbCr"]
    with open_slide(path, device="cuda") as slide:
        yield slide, levels


@pytest.fixture
def own(tmp_path, host_gpu, files):
    """The same, of a file that a test may harm."""
    path = tmp_path / "slide.tif"
    path.write_bytes(files["JPEG YCbCr"][0].read_bytes())
    with open_slide(path, device="cuda") as slide:
        yield slide, files["JPEG YCbCr"][1]


@pytest.fixture
def damaged(tmp_path, host_gpu):
    """A JPEG slide whose tiles at (1, 2) and (4, 4) end early, and what can be shown of it."""
    numbers = iter(range(TILES))

    def encode(tile):
        return slides.jpeg_ycbcr(tile)[: -40 if next(numbers) in (7, 24) else None]

    pixels = slides.picture(HEIGHT, WIDTH)
    page = tiffbytes.page(pixels, encode, tile=TILE, compression=7, photometric=6)
    path = tiffbytes.write(tmp_path / "damaged.tif", [page])
    with open_slide(path, device="cpu") as slide:
        expected = slide.level_array(0, tolerant=True)[...]
    with open_slide(path, device="cuda") as slide:
        yield slide, expected


def whole(slide, **options):
    return slide.read_region((0, 0), slide.dimensions, device="cuda", **options)


def backend_of(slide):
    """The slide's backend on its device."""
    (backend,) = slide._reader.offload._backends.values()
    return backend


def planned(slide, *rects, number=0, **options):
    """Plans of regions, by default one of all of a level, their offsets, and options."""
    image = slide._images[number]
    regions = Regions.of(rects or [Rect(0, 0, image.height, image.width)])
    return plan_regions(number, slide._images, regions), regions.offsets, ReadOptions(**options)


def decoded(slide):
    return slide.stats()["decoded"]


class Gate:
    """Wraps a decoder: each batch waits until it is let through."""

    def __init__(self, device):
        self.begun = threading.Event()
        self.open = threading.Event()
        self.busy = False
        device.wrap_decoder = lambda decoder: WrappedDecoder(decoder, self.decode)

    def decode(self, decoder, *args, **options):
        self.busy = True
        self.begun.set()
        try:
            assert self.open.wait(30)
            return decoder.decode(*args, **options)
        finally:
            self.busy = False


def in_thread(action):
    """Start an action; returns the thread and a list that will hold what it gives or raises."""
    outcome = []

    def work():
        try:
            outcome.append(action())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, outcome


REGIONS = {
    "level": st.integers(0, 2),
    "x": st.integers(-60, 260),
    "y": st.integers(-60, 180),
    "width": st.integers(0, 270),
    "height": st.integers(0, 190),
    "cold": st.booleans(),
}


class TestPixels:
    @pytest.mark.parametrize("kind", KINDS)
    @settings(max_examples=25)
    @given(**REGIONS)
    @example(level=0, x=0, y=0, width=WIDTH, height=HEIGHT, cold=True)
    @example(level=1, x=-5, y=-5, width=WIDTH, height=HEIGHT, cold=True)
    @example(level=0, x=WIDTH, y=0, width=5, height=5, cold=True)
    @example(level=0, x=-5, y=0, width=5, height=5, cold=True)
    @example(level=0, x=47, y=31, width=1, height=1, cold=True)
    @example(level=0, x=3, y=3, width=0, height=9, cold=True)
    def test_regions_are_those_of_the_cpu(
        self, files, host_gpu, kind, level, x, y, width, height, cold
    ):
        path, levels = files[kind]
        with open_slide(path, device="cuda") if cold else self.warm(path) as slide:
            down = slide.level_downsamples[level]
            location, size = (round(x * down), round(y * down)), (width, height)
            background = slide.layout.background
            expected = reference(levels[level], x, y, width, height, background)
            for device in ("cuda", "cpu"):
                found = slide.read_region(location, size, level, device)
                assert found.dtype == expected.dtype
                np.testing.assert_array_equal(found, expected)
            assert slide.stats()["failed"] == 0
        assert pinned_places() == 0

    @staticmethod
    @contextlib.contextmanager
    def warm(path):
        """A slide of which some tiles were decoded before."""
        with open_slide(path, device="cuda") as slide:
            for level in range(3):
                slide.read_region((0, 0), (100, 50), level, "cuda")
            yield slide

    @pytest.mark.parametrize("kind", KINDS)
    def test_whole_levels_and_their_channels(self, files, host_gpu, kind):
        path, levels = files[kind]
        with open_slide(path, device="cuda") as slide:
            for index, expected in enumerate(levels):
                np.testing.assert_array_equal(slide.levels[index][...], expected)
                for channel in range(expected.shape[2]):
                    found = slide.level_array(index, channel)[3:, 5:-1]
                    np.testing.assert_array_equal(found, expected[3:, 5:-1, channel])

    @pytest.mark.parametrize("kind", BY_DEVICE)
    def test_these_are_decoded_by_the_device(self, files, host_gpu, kind):
        with open_slide(files[kind][0], device="cuda") as slide:
            whole(slide)
            assert decoded(slide) == {"cpu": 0, "nvimagecodec": TILES}

    @pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in BY_DEVICE])
    def test_others_by_the_cpu_for_the_device(self, files, host_gpu, kind):
        with open_slide(files[kind][0], device="cuda") as slide:
            whole(slide)
            assert decoded(slide)["cpu"] == TILES

    @pytest.mark.parametrize("far", [2**40, -(2**40), 2**70, -(2**70)])
    def test_far_away_there_is_background(self, jpeg, far):
        slide, _ = jpeg
        found = slide.read_region((far, 3), (20, 10), device="cuda")
        np.testing.assert_array_equal(found, np.full((10, 20, 3), slide.layout.background))
        assert slide.stats()["bytes_read"] == 0

    def test_steps_are_read_too(self, jpeg):
        slide, (level, *_) = jpeg
        np.testing.assert_array_equal(slide.levels[0][::-3, 5::7], level[::-3, 5::7])

    @pytest.mark.parametrize("tiles", [1, 3, 7])
    def test_batches_of_any_size(self, jpeg, monkeypatch, tiles):
        monkeypatch.setattr(device_module, "LIMITS", LIMITS._replace(tiles=tiles))
        slide, (level, *_) = jpeg
        for device in ("cpu", "cuda"):
            slide.clear_cache()
            found = slide.read_region((0, 0), slide.dimensions, device=device)
            np.testing.assert_array_equal(found, level)
        assert decoded(slide) == {"cpu": 0, "nvimagecodec": 2 * TILES}

    def test_a_region_larger_than_memory_is_refused(self, jpeg):
        for device in ("cpu", "cuda"):
            with pytest.raises((RegionError, MemoryError)):
                jpeg[0].read_region((0, 0), (2**40, 2**40), device=device)


def region_of(slide, level, rect, step=(1, 1)):
    """A rectangle of a level, of which some may lie outside; slow, and obvious."""
    shape = rect.height, rect.width, level.shape[2]
    found = np.full(shape, slide.layout.background, level.dtype)
    for y in range(rect.height):
        for x in range(rect.width):
            row, column = rect.top + y * step[0], rect.left + x * step[1]
            if 0 <= row < level.shape[0] and 0 <= column < level.shape[1]:
                found[y, x] = level[row, column]
    return found


class TestManyRegions:
    RECTS = (
        Rect(-9, 150, 60, 90),
        Rect(0, 0, HEIGHT, WIDTH),
        Rect(33, 50, 0, 7),
        Rect(500, 500, 4, 5),
        Rect(31, 47, 2, 2),
    )

    @pytest.mark.parametrize("tiles", [3, 1000])
    @pytest.mark.parametrize("step", [(1, 1), (3, 7), (40, 60)])
    @pytest.mark.parametrize("channel", [None, 1])
    @pytest.mark.parametrize("to_host", [False, True])
    def test_of_several_sizes(self, jpeg, monkeypatch, tiles, step, channel, to_host):
        monkeypatch.setattr(device_module, "LIMITS", LIMITS._replace(tiles=tiles))
        slide, (level, *_) = jpeg
        whole(slide)
        slide.clear_cache()
        before = decoded(slide)["nvimagecodec"]
        regions = replace(Regions.of(self.RECTS), step=step)
        plans = plan_regions(0, slide._images, regions)
        offsets = regions.offsets
        for _ in ("cold", "warm"):
            found = backend_of(slide).read(
                0, plans, offsets, ReadOptions(channel=channel), to_host=to_host
            )
            assert len(found) == offsets[-1]
            parts = zip(offsets[:-1], offsets[1:], self.RECTS, strict=True)
            for begin, end, rect in parts:
                expected = region_of(slide, level, rect, step)
                expected = expected if channel is None else expected[..., channel]
                np.testing.assert_array_equal(found[begin:end].reshape(expected.shape), expected)
        assert decoded(slide)["nvimagecodec"] - before == len(plans[0].tiles)
        assert pinned_places() == 0

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_those_of_a_batch_share_their_tiles(self, jpeg, device):
        slide, (level, *_) = jpeg
        where = [(x, y) for y in range(0, 70, 9) for x in range(0, 140, 11)]
        options = {"batch_size": len(where), "num_workers": 0, "device": device}
        (found,) = slide.read_regions(where, (60, 50), **options)
        for region, (x, y) in zip(found, where, strict=True):
            np.testing.assert_array_equal(region, level[y : y + 50, x : x + 60])
        assert slide.stats()["tiles_asked"] == 16
        assert decoded(slide) == {"cpu": 0, "nvimagecodec": 16}

    @pytest.mark.parametrize(
        ("keep", "kept"), [("all", 16), ("partly", 12), ("none", 0), ("recurring", 16)]
    )
    def test_which_tiles_stay(self, jpeg, keep, kept):
        slide, (level, *_) = jpeg
        regions = Regions.of([Rect(20, 40, 100, 120)])  # 4 of 16 tiles as a whole
        found = slide._reader.read_to_device(0, regions, "cuda", options=ReadOptions(keep=keep))
        np.testing.assert_array_equal(found[0], level[20:120, 40:160])
        slide._reader.read_to_device(0, regions, "cuda")
        assert slide.stats()["cache_hits"] == kept

    @pytest.mark.usefixtures("without_core")
    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_who_does_not_want_them_any_more_ends_it(self, jpeg, host_gpu, monkeypatch, device):
        monkeypatch.setattr(device_module, "LIMITS", LIMITS._replace(tiles=4))
        slide, (level, *_) = jpeg
        checks = []

        class Checked(Cancellation):
            def check(self):
                checks.append(1)
                if len(checks) == 3:
                    raise KeyboardInterrupt

        regions = Regions.of([Rect(0, 0, HEIGHT, WIDTH)])
        read = slide._reader.read
        if device == "cuda":
            read = partial(slide._reader.read_to_device, device="cuda")
        with pytest.raises(KeyboardInterrupt):
            read(0, regions, options=ReadOptions(cancellation=Checked()))
        assert pinned_places() == 0
        assert decoded(slide).get("nvimagecodec", 0) <= 8
        np.testing.assert_array_equal(whole(slide), level)
        slide.close()
        assert host_gpu.live == 0

    @pytest.mark.usefixtures("scanner_colours")
    def test_in_colours_one_after_another(self, files, host_gpu):
        where = [(0, 0), (50, 60), (-20, 100)]
        options = {"batch_size": 3, "num_workers": 0, "color": "srgb"}
        with with_profile(files["JPEG YCbCr"][0]) as slide:
            (expected,) = slide.read_regions(where, (60, 50), **options)
        with with_profile(files["JPEG YCbCr"][0], device="cuda") as slide:
            (found,) = slide.read_regions(where, (60, 50), device="cuda", **options)
            np.testing.assert_array_equal(found, expected)
            assert decoded(slide)["cpu"] == 0

    def test_none_of_them_is_looked_at_twice_for_its_failed_tiles(self, damaged):
        slide, _ = damaged
        options = {"batch_size": 3, "num_workers": 0, "device": "cuda"}
        regions = slide.read_regions([(90, 30), (100, 40), (0, 0)], (20, 20), **options)
        with pytest.raises(TileError) as info:
            next(regions)
        assert [name for name, _ in info.value.failures] == ["level 0, row 1, column 2"]
        assert slide.stats()["failed"] == 1
        assert pinned_places() == 0


class TestOut:
    def test_it_is_filled_and_returned(self, jpeg):
        slide, (level, *_) = jpeg
        for _ in ("cold", "warm"):
            out = np.full((60, 70, 3), 9, np.uint8)
            found = slide.read_region((-5, 100), (70, 60), device="cuda", out=out)
            assert found is out
            expected = reference(level, -5, 100, 70, 60, slide.layout.background)
            np.testing.assert_array_equal(out, expected)

    def test_where_the_cpu_has_to_help(self, files, host_gpu):
        host_gpu.free = 0
        path, levels = files["JPEG YCbCr"]
        with open_slide(path, device="cuda") as slide:
            out = np.full(levels[0].shape, 9, np.uint8)
            assert whole(slide, out=out) is out
            np.testing.assert_array_equal(out, levels[0])

    @pytest.mark.parametrize(
        "out",
        [
            np.zeros((60, 71, 3), np.uint8),
            np.zeros((60, 70), np.uint8),
            np.zeros((60, 70, 3), np.int8),
            np.zeros((60, 70, 3), np.uint8, order="F"),
            np.zeros((60, 140, 3), np.uint8)[:, ::2],
            bytearray(60 * 70 * 3),
            "out",
        ],
    )
    def test_what_does_not_fit_is_refused(self, jpeg, out):
        with pytest.raises(RegionError, match=r"\(60, 70, 3\) and type uint8"):
            jpeg[0].read_region((0, 0), (70, 60), device="cuda", out=out)

    @pytest.mark.parametrize("option", ["out", "stream"])
    def test_they_are_for_devices(self, jpeg, option):
        value = np.zeros((60, 70, 3), np.uint8)
        with pytest.raises(RegionError, match="device='cuda'"):
            jpeg[0].read_region((0, 0), (70, 60), **{option: value})


class TestStream:
    @pytest.mark.parametrize("stream", [7, 0])
    @pytest.mark.parametrize("kind", ["JPEG YCbCr", "deflate"])
    def test_all_work_is_given_to_the_callers(self, files, host_gpu, monkeypatch, kind, stream):
        path, levels = files[kind]
        used = []
        for name in ("fill", "paste", "upload"):
            work = getattr(host_gpu, name)

            def noted(*args, work=work, **options):
                used.append(next(arg for arg in args if isinstance(arg, HostStream)))
                work(*args, **options)

            monkeypatch.setattr(host_gpu, name, noted)
        with open_slide(path, device="cuda") as slide:
            given = []
            as_stream = host_gpu.as_stream
            monkeypatch.setattr(
                host_gpu, "as_stream", lambda handle: given.append(as_stream(handle)) or given[-1]
            )
            for _ in ("cold", "warm"):
                used.clear()
                synchronised = host_gpu.synchronised
                found = slide.read_region((-9, 0), (90, 50), device="cuda", stream=stream)
                np.testing.assert_array_equal(found[:, 9:], levels[0][:50, :81])
                assert used
                assert set(map(id, used)) == {id(given[-1])}
                assert host_gpu.synchronised > synchronised
        assert host_gpu.given_stream == stream

    def test_one_that_is_none(self, jpeg, host_gpu, monkeypatch):
        slide, _ = jpeg
        whole(slide)
        monkeypatch.setattr(host_gpu, "as_stream", int)
        with pytest.raises(DeviceError, match="literal"):
            whole(slide, stream="x")
        assert pinned_places() == 0

    def test_streams_of_our_own_are_used_again(self, jpeg, host_gpu, monkeypatch):
        slide, _ = jpeg
        made = []
        new_stream = host_gpu.new_stream
        monkeypatch.setattr(host_gpu, "new_stream", lambda: made.append(1) or new_stream())
        for x in range(20):
            slide.read_region((x, 0), (9, 9), device="cuda")
        assert len(made) <= 2  # the worker's and the reader's


class TestMissingTiles:
    @pytest.mark.parametrize("kind", ["JPEG YCbCr", "deflate"])
    @pytest.mark.parametrize("missing", [[0], [24], [0, 7, 24], range(TILES)])
    def test_background(self, tmp_path, host_gpu, kind, missing):
        path = write(tmp_path / "slide.tif", **KINDS[kind], missing=missing)
        with open_slide(path, device="cpu") as slide:
            expected = [level[...] for level in slide.levels]
        with open_slide(path, device="cuda") as slide:
            for _ in ("cold", "warm"):
                np.testing.assert_array_equal(whole(slide), expected[0])
                for index, level in enumerate(slide.levels):
                    np.testing.assert_array_equal(level[...], expected[index])
            assert slide.stats()["failed"] == 0

    def test_they_are_counted_as_such(self, tmp_path, host_gpu):
        path = write(tmp_path / "slide.tif", **JPEG, missing=[0, 7])
        with open_slide(path, device="cuda") as slide:
            for _ in range(2):
                whole(slide)
            stats = slide.stats()
            assert stats["background"] == 4
            assert stats["tiles_asked"] == 2 * TILES
            assert stats["cache_hits"] == TILES - 2

    @pytest.mark.parametrize("missing", [((), [0, 5], ()), ((), range(16), range(8))])
    def test_averages_of_the_finer(self, tmp_path, host_gpu, missing):
        path = tmp_path / "slide.svs"
        slides.write_aperio(
            path,
            slides.picture(150, 230),
            missing=missing,
            compression=33005,
            encode=jpeg_2000,
        )
        with open_slide(path, device="cpu") as slide:
            expected = [level[...] for level in slide.levels]
        with open_slide(path, device="cuda") as slide:
            for index, pixels in enumerate(expected):
                size = slide.level_dimensions[index]
                out = np.zeros_like(pixels)
                found = slide.read_region((0, 0), size, index, "cuda", out=out)
                assert found is out
                np.testing.assert_array_equal(found, pixels)
                np.testing.assert_array_equal(slide.levels[index][...], pixels)

    def test_a_missing_plane(self, tmp_path, host_gpu):
        path = write(tmp_path / "slide.tif", **KINDS["separate planes"], missing=[3, 30, 55])
        with open_slide(path, device="cpu") as slide:
            expected = slide.levels[0][...]
        with open_slide(path, device="cuda") as slide:
            np.testing.assert_array_equal(whole(slide), expected)


class TestDamagedTiles:
    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_the_error_names_them(self, damaged, device):
        slide, _ = damaged
        for _ in range(2):
            with pytest.raises(TileError, match=r"damaged\.tif.*1 more.*is truncated") as info:
                slide.read_region((0, 0), slide.dimensions, device=device)
            assert [name for name, _ in info.value.failures] == [
                "level 0, row 1, column 2",
                "level 0, row 4, column 4",
            ]
        assert pinned_places() == 0

    def test_they_are_not_kept(self, damaged):
        slide, _ = damaged
        with pytest.raises(TileError):
            whole(slide)
        assert decoded(slide) == {"cpu": 0, "nvimagecodec": TILES - 2}
        for _ in range(2):
            with pytest.raises(TileError):
                slide.read_region((100, 40), (5, 5), device="cuda")
        stats = slide.stats()
        assert stats["decoded"] == {"cpu": 0, "nvimagecodec": TILES - 2}
        assert stats["cache_hits"] == 0
        assert stats["failed"] == 2

    def test_the_rest_can_be_read(self, damaged):
        slide, expected = damaged
        for _ in range(2):
            found = slide.read_region((0, 0), (96, HEIGHT), device="cuda")
            np.testing.assert_array_equal(found, expected[:, :96])

    def test_a_tolerant_level_shows_background_and_says_so_once(self, damaged, caplog):
        slide, expected = damaged
        level = slide.level_array(0, tolerant=True)
        with caplog.at_level(logging.WARNING, "napari_wsigpu.engine"):
            for _ in range(3):
                np.testing.assert_array_equal(level[...], expected)
                np.testing.assert_array_equal(level[32:64, 96:144], expected[32:64, 96:144])
        messages = [record.getMessage() for record in caplog.records]
        assert len(messages) == 2
        assert "level 0, row 1, column 2" in messages[0]
        assert "level 0, row 4, column 4" in messages[1]
        assert not expected[32:64, 96:144].any()

    def test_a_listener_is_told_once(self, damaged):
        slide, _ = damaged
        told = []
        slide.on_failed_tile(lambda name, reason: told.append(name))
        with pytest.raises(TileError):
            whole(slide)
        assert told == []
        for _ in range(2):
            slide.level_array(0, tolerant=True)[...]
        assert told == ["level 0, row 1, column 2", "level 0, row 4, column 4"]

    def test_a_channel_of_a_tolerant_level(self, damaged):
        slide, expected = damaged
        np.testing.assert_array_equal(slide.level_array(0, 1, tolerant=True)[...], expected[..., 1])

    def test_what_only_the_decoder_notices(self, tmp_path, host_gpu):
        """The header is sound, so the device tries it first."""
        numbers = iter(range(TILES))

        def encode(tile):
            data = jpeg_2000(tile)
            return data[:120] if next(numbers) == 7 else data

        pixels = slides.picture(HEIGHT, WIDTH)
        page = tiffbytes.page(pixels, encode, tile=TILE, compression=34712)
        path = tiffbytes.write(tmp_path / "slide.tif", [page])
        with open_slide(path, device="cuda") as slide:
            with pytest.raises(TileError, match="level 0, row 1, column 2"):
                whole(slide)
            shown = slide.level_array(0, tolerant=True)[...]
        pixels[32:64, 96:144] = 0
        np.testing.assert_array_equal(shown, pixels)

    def test_an_empty_region_of_a_damaged_tile(self, damaged):
        slide, _ = damaged
        for device in ("cpu", "cuda"):
            assert slide.read_region((100, 40), (0, 9), device=device).shape == (9, 0, 3)
        assert slide.stats()["tiles_asked"] == 0


class TestStats:
    def test_a_scripted_sequence(self, files, host_gpu):
        path, _ = files["JPEG YCbCr"]
        names = ("tiles_asked", "cache_hits", "decoded", "background", "failed")
        with open_slide(path, device="cuda") as slide:
            counts = slide.layout.levels[0].grid.byte_counts[0]

            def stats():
                found = slide.stats()
                return tuple(
                    found[name].get("nvimagecodec", 0) if name == "decoded" else found[name]
                    for name in names
                )

            slide.read_region((0, 0), (96, 64), device="cuda")
            assert stats() == (4, 0, 4, 0, 0)
            assert slide.stats()["bytes_read"] == counts[:2, :2].sum()
            slide.levels[0][:64, :96]  # the host reads from the same cache
            assert stats() == (8, 4, 4, 0, 0)
            slide.levels[0][:64, :97]
            assert stats() == (14, 8, 6, 0, 0)
            assert slide.stats()["bytes_read"] == counts[:2, :3].sum()
            slide.clear_cache()
            slide.levels[0][40:41, 60:61]
            assert stats() == (15, 8, 7, 0, 0)
            slide.read_region((WIDTH + 60, 0), (5, 5), device="cuda")  # outside
            assert stats() == (15, 8, 7, 0, 0)
            assert slide.stats()["decoded"] == {"cpu": 0, "nvimagecodec": 7}

    @pytest.mark.parametrize(
        ("place", "size"),
        [((WIDTH, 0), (5, 5)), ((0, HEIGHT), (5, 5)), ((3, 3), (0, 9)), ((3, 3), (9, 0))],
    )
    def test_no_tile_is_asked_for_no_pixel(self, jpeg, place, size):
        slide, _ = jpeg
        slide.read_region(place, size, device="cuda")
        assert slide.stats()["tiles_asked"] == 0


class TestMemory:
    def test_close_frees_all(self, jpeg, host_gpu):
        slide, _ = jpeg
        whole(slide)
        assert host_gpu.live > 0
        slide.close()
        assert host_gpu.live == 0
        with pytest.raises(SlideClosedError, match=r"0\.tif"):
            whole(slide)

    def test_release_frees_all_until_the_next_read(self, jpeg, host_gpu):
        slide, (level, *_) = jpeg
        for count in (1, 2):
            np.testing.assert_array_equal(whole(slide), level)
            assert host_gpu.live > 0
            assert decoded(slide)["nvimagecodec"] == count * TILES
            slide.release()
            assert host_gpu.live == 0

    def test_clear_cache_drops_this_slides_tiles_only(self, jpeg, files):
        slide, _ = jpeg
        with open_slide(files["JPEG YCbCr"][0], device="cuda") as other:
            whole(slide)
            whole(other)
            slide.clear_cache()
            whole(slide)
            whole(other)
            assert slide.stats()["cache_hits"] == 0
            assert other.stats()["cache_hits"] == TILES

    def test_closing_one_slide_leaves_the_other(self, jpeg, files, host_gpu):
        slide, (level, *_) = jpeg
        with open_slide(files["JPEG YCbCr"][0], device="cuda") as other:
            whole(slide)
            whole(other)
        np.testing.assert_array_equal(whole(slide), level)
        assert slide.stats()["cache_hits"] == TILES
        slide.close()
        assert host_gpu.live == 0

    @pytest.mark.parametrize("tiles", [1, 3, 8])
    @pytest.mark.parametrize("kind", ["JPEG YCbCr", "JPEG 2000 16 bit", "deflate"])
    def test_a_tiny_budget(self, files, host_gpu, kind, tiles):
        path, levels = files[kind]
        with open_slide(path, device="cuda") as slide:
            size = slide.layout.levels[0].tile_bytes
            cache = runtime.default().devices.tiles(host_gpu)
            cache.budget = tiles * size
            for index in (0, 1, 0, 2):
                expected = levels[index]
                shape = expected.shape[1::-1]
                found = slide.read_region((0, 0), shape, index, "cuda")
                np.testing.assert_array_equal(found, expected)
                assert cache.used <= tiles * size
                slide._reader.offload.worker("cuda").trim()
                assert host_gpu.live == cache.used
                np.testing.assert_array_equal(slide.levels[index][...], expected)
            assert (decoded(slide)["nvimagecodec"] > 0) == (kind in BY_DEVICE)
        assert pinned_places() == 0
        assert host_gpu.live == 0

    @pytest.mark.parametrize("places", [1, 5, 24])
    def test_fewer_places_than_were_asked_for(self, jpeg, monkeypatch, places):
        """Others take and let go of places at any time: what comes first is to be pasted first."""
        slide, (level, *_) = jpeg
        reserve, wait = DeviceTiles.reserve, GpuBatch.wait

        def some(cache, tile, size, count):
            return reserve(cache, tile, size, min(count, places))

        def late(batch):
            time.sleep(0.02)
            return wait(batch)

        monkeypatch.setattr(DeviceTiles, "reserve", some)
        monkeypatch.setattr(GpuBatch, "wait", late)
        np.testing.assert_array_equal(slide.levels[0][...], level)
        slide.clear_cache()
        np.testing.assert_array_equal(whole(slide), level)
        assert decoded(slide) == {"cpu": 0, "nvimagecodec": 2 * TILES}
        assert pinned_places() == 0

    def test_no_device_memory_at_all(self, files, host_gpu):
        host_gpu.free = 0
        path, levels = files["JPEG YCbCr"]
        with open_slide(path, device="cuda") as slide:
            for index, expected in enumerate(levels):
                np.testing.assert_array_equal(slide.levels[index][...], expected)
                found = slide.read_region((0, 0), expected.shape[1::-1], index, "cuda")
                np.testing.assert_array_equal(found, expected)
            assert decoded(slide).get("nvimagecodec", 0) == 0
        assert pinned_places() == 0

    def test_memory_that_runs_out_in_mid_read(self, files, host_machine, monkeypatch):
        monkeypatch.setattr(device_module, "LIMITS", LIMITS._replace(tiles=5))
        path, (level, *_) = files["JPEG YCbCr"]
        with (
            runtime.using(Runtime(host_machine.devices(slab_bytes=0))) as shared,
            open_slide(path, device="cuda") as slide,
        ):
            host_machine.device.free = 7 * slide.layout.levels[0].tile_bytes
            np.testing.assert_array_equal(whole(slide), level)
            np.testing.assert_array_equal(slide.levels[0][...], level)
            assert pinned_places() == 0
        shared.close()

    @staticmethod
    def short_of(host_gpu, monkeypatch, most):
        """Let a workspace have no more than so many bytes; return what was asked for."""
        asked = []
        allocate = host_gpu.allocate

        def short(size):
            asked.append(size)
            if size > most:
                raise MemoryError("no memory to work in")
            return allocate(size)

        make_room = Workspace.make_room

        def make_short_room(work, *sizes):
            with monkeypatch.context() as context:
                context.setattr(host_gpu, "allocate", short)
                make_room(work, *sizes)

        monkeypatch.setattr(Workspace, "make_room", make_short_room)
        return asked

    def test_no_room_to_work_in_makes_smaller_batches(self, jpeg, host_gpu, monkeypatch):
        monkeypatch.setattr(workspace, "SMALLEST", 1)
        sizes = []

        def decode(decoder, streams, images):
            sizes.append(len(streams))
            return decoder.decode(streams, images)

        host_gpu.wrap_decoder = lambda decoder: WrappedDecoder(decoder, decode)
        slide, (level, *_) = jpeg
        asked = self.short_of(host_gpu, monkeypatch, 30_000)
        np.testing.assert_array_equal(whole(slide), level)
        assert decoded(slide) == {"cpu": 0, "nvimagecodec": TILES}
        assert max(asked) > 30_000
        # The waiting thread may decode the last batch while a worker still decodes the one before.
        assert sorted(sizes) == [1, 6, 6, 6, 6]
        assert pinned_places() == 0
        np.testing.assert_array_equal(slide.levels[0][...], level)
        assert slide.stats()["cache_hits"] == TILES

    def test_no_room_to_work_in_at_all(self, jpeg, host_gpu, monkeypatch):
        slide, (level, *_) = jpeg
        asked = self.short_of(host_gpu, monkeypatch, 0)
        for _ in range(2):
            np.testing.assert_array_equal(whole(slide), level)
            np.testing.assert_array_equal(slide.levels[0][...], level)
        assert asked
        assert decoded(slide).get("nvimagecodec", 0) == 0
        assert pinned_places() == 0
        assert slide.stats()["failed"] == 0

    def test_room_to_work_in_that_runs_out_in_mid_read(self, jpeg, host_gpu, monkeypatch):
        monkeypatch.setattr(device_module, "LIMITS", LIMITS._replace(tiles=5))
        slide, (level, *_) = jpeg
        make_room, calls = Workspace.make_room, []

        def make_less(work, *sizes):
            calls.append(sizes)
            if len(calls) > 2:
                raise MemoryError("no memory to work in")
            make_room(work, *sizes)

        with monkeypatch.context() as context:
            context.setattr(Workspace, "make_room", make_less)
            np.testing.assert_array_equal(whole(slide), level)
        assert len(calls) > 3
        assert pinned_places() == 0
        slide.clear_cache()
        np.testing.assert_array_equal(whole(slide), level)

    def test_no_room_for_the_region_itself(self, jpeg, host_gpu, monkeypatch):
        """CuPy raises a MemoryError of its own kind."""
        slide, (level, *_) = jpeg

        def empty(shape, dtype):
            raise MemoryError("Out of memory allocating 12 bytes")

        monkeypatch.setattr(host_gpu, "empty", empty)
        np.testing.assert_array_equal(slide.levels[0][...], level)

    def test_no_room_for_the_region_on_the_device(self, jpeg, host_gpu, monkeypatch):
        def empty(shape, dtype):
            raise MemoryError("Out of memory allocating 12 bytes")

        monkeypatch.setattr(host_gpu, "empty", empty)
        with pytest.raises(SlideError):
            whole(jpeg[0])

    def test_released_during_a_read_and_closed_after_it(self, own, host_gpu):
        slide, (level, *_) = own
        gate = Gate(host_gpu)
        thread, outcome = in_thread(lambda: whole(slide))
        assert gate.begun.wait(20)
        releaser, _ = in_thread(slide.release)
        releaser.join(0.2)
        gate.open.set()
        thread.join(20)
        releaser.join(20)
        np.testing.assert_array_equal(outcome[0], level)
        slide.close()
        assert host_gpu.live == 0

    def test_memory_of_a_slide_that_nobody_closed(self, files, host_gpu):
        slide = open_slide(files["JPEG YCbCr"][0], device="cuda")
        whole(slide)
        slide.release()
        del slide
        gc.collect()
        assert host_gpu.live == 0


class TestFailingDevice:
    @pytest.mark.parametrize("work", ["paste", "download", "fill"])
    def test_it_is_named(self, own, host_gpu, monkeypatch, work):
        slide, (level, *_) = own

        def fail(*args, **options):
            raise RuntimeError("an illegal memory access")

        with monkeypatch.context() as context:
            context.setattr(host_gpu, work, fail)
            with pytest.raises(DeviceError, match=r"cuda:0.*illegal"):
                slide.level_array(0, tolerant=work == "fill")[...]
        assert pinned_places() == 0
        np.testing.assert_array_equal(slide.levels[0][...], level)  # only that once

    @pytest.mark.parametrize("work", ["paste", "download"])
    def test_with_tiles_that_are_there(self, own, host_gpu, monkeypatch, work):
        slide, (level, *_) = own
        whole(slide)

        def fail(*args, **options):
            raise RuntimeError("an illegal memory access")

        with monkeypatch.context() as context:
            context.setattr(host_gpu, work, fail)
            with pytest.raises(DeviceError, match=r"cuda:0.*illegal"):
                slide.levels[0][...]
        assert pinned_places() == 0
        np.testing.assert_array_equal(slide.levels[0][...], level)

    def test_later_batches_are_dropped(self, own, host_gpu, monkeypatch):
        monkeypatch.setattr(device_module, "LIMITS", LIMITS._replace(tiles=3))
        slide, (level, *_) = own
        calls = []
        paste = host_gpu.paste

        def fail_once(*args, **options):
            calls.append(args)
            if len(calls) == 2:
                raise RuntimeError("no more")
            paste(*args, **options)

        monkeypatch.setattr(host_gpu, "paste", fail_once)
        with pytest.raises(DeviceError, match="no more"):
            whole(slide)
        assert len(calls) < 9
        assert pinned_places() == 0
        np.testing.assert_array_equal(whole(slide), level)

    def test_a_decoder_that_fails_leaves_it_to_the_cpu(self, own, host_gpu):
        slide, (level, *_) = own

        def broken(*args, **options):
            raise RuntimeError("nvjpeg is broken")

        host_gpu.wrap_decoder = lambda decoder: WrappedDecoder(decoder, broken)
        np.testing.assert_array_equal(whole(slide), level)
        assert decoded(slide) == {"cpu": TILES, "nvimagecodec": 0}

    @pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer's signal")
    def test_an_interrupted_read_ends_before_its_places_are_given_away(
        self, own, host_gpu, monkeypatch
    ):
        """Ctrl-C in a notebook, while the device still writes to the tiles' places."""
        slide, (level, *_) = own
        gate = Gate(host_gpu)

        def interrupt(*args):
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, interrupt)
        opener = threading.Timer(0.4, gate.open.set)
        try:
            opener.start()
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(KeyboardInterrupt):
                whole(slide)
            assert not gate.busy or pinned_places()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            opener.join()
        np.testing.assert_array_equal(whole(slide), level)
        assert pinned_places() == 0


class TestFiles:
    def test_truncated_after_it_was_opened(self, own):
        slide, _ = own
        path = Path(slide.path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        for device in ("cpu", "cuda"):
            with pytest.raises(SlideChangedError, match=r"slide\.tif"):
                slide.read_region((0, 0), slide.dimensions, device=device)
        assert pinned_places() == 0

    def test_replaced_in_mid_read(self, own, monkeypatch):
        monkeypatch.setattr(device_module, "LIMITS", LIMITS._replace(tiles=3))
        slide, _ = own
        calls = []

        def replacing(read):
            def read_and_replace(*ranges):
                if len(calls) == 3:
                    os.utime(slide.path, ns=(1, 1))
                calls.append(ranges)
                return read(*ranges)

            return read_and_replace

        for name in ("read_joined", "read_scans"):
            monkeypatch.setattr(slide._source, name, replacing(getattr(slide._source, name)))
        with pytest.raises(SlideChangedError, match=r"slide\.tif"):
            whole(slide)
        assert len(calls) == 4
        assert pinned_places() == 0

    def test_deleted_before_the_first_read(self, own):
        slide, _ = own
        Path(slide.path).unlink()
        with pytest.raises(SlideNotFoundError, match=r"slide\.tif"):
            whole(slide)
        assert pinned_places() == 0

    def test_what_the_cache_holds_outlives_the_file(self, own):
        slide, (level, *_) = own
        whole(slide)
        slide._source.release()
        Path(slide.path).unlink()
        np.testing.assert_array_equal(whole(slide), level)

    def test_a_lost_file_is_no_background_even_on_the_way_to_the_screen(self, own):
        slide, _ = own
        Path(slide.path).unlink()
        with pytest.raises(SlideNotFoundError, match="There is no file"):
            slide.level_array(0, tolerant=True)[...]
        assert slide.stats()["failed"] == 0

    @pytest.mark.parametrize("to", ["cpu", "cuda"])
    def test_closed_in_mid_read(self, own, host_gpu, monkeypatch, to):
        monkeypatch.setattr(device_module, "LIMITS", LIMITS._replace(tiles=3))
        slide, _ = own
        gate = Gate(host_gpu)
        thread, outcome = in_thread(lambda: slide.read_region((0, 0), slide.dimensions, device=to))
        assert gate.begun.wait(20)
        closer, _ = in_thread(slide.close)
        closer.join(0.1)
        gate.open.set()
        thread.join(20)
        closer.join(20)
        assert not closer.is_alive()
        assert isinstance(outcome.pop(), SlideClosedError)  # its traceback holds the batches
        gc.collect()
        assert pinned_places() == 0
        assert host_gpu.live == 0

    def test_close_waits_for_a_read_in_flight(self, own, host_gpu):
        slide, (level, *_) = own
        gate = Gate(host_gpu)
        thread, outcome = in_thread(lambda: whole(slide))
        assert gate.begun.wait(20)
        closer, _ = in_thread(slide.close)
        closer.join(0.2)
        assert closer.is_alive()
        gate.open.set()
        thread.join(20)
        closer.join(20)
        np.testing.assert_array_equal(outcome[0], level)
        assert host_gpu.live == 0


@pytest.mark.parametrize("tiles", [1, 6, 1000])
def test_eight_threads_read_exact_pixels(files, host_gpu, tiles):
    kinds = ["JPEG YCbCr", "JPEG gray", "JPEG 2000"]
    open_slides = [(open_slide(files[kind][0], device="cuda"), files[kind][1]) for kind in kinds]
    with contextlib.ExitStack() as stack:
        for slide, _ in open_slides:
            stack.enter_context(slide)
        runtime.default().devices.tiles(host_gpu).budget = tiles * 32 * 48 * 3
        end = time.monotonic() + 0.8
        wrong, counts = [], []

        def work(seed):
            rng = np.random.default_rng(seed)
            count = 0
            try:
                while time.monotonic() < end:
                    slide, levels = open_slides[int(rng.integers(3))]
                    index = int(rng.integers(3))
                    down = slide.level_downsamples[index]
                    x, y = (int(v) for v in rng.integers(-50, 200 >> index, 2))
                    size = tuple(int(v) for v in rng.integers(1, 150, 2))
                    to = ("cpu", "cuda")[int(rng.integers(2))]
                    place = (round(x * down), round(y * down))
                    found = slide.read_region(place, size, index, to)
                    background = slide.layout.background
                    if not np.array_equal(found, reference(levels[index], x, y, *size, background)):
                        wrong.append((index, x, y, size))
                    count += 1
                    if rng.random() < 0.05:
                        slide.clear_cache()
                    if rng.random() < 0.02:
                        slide.release()
            except BaseException as error:
                wrong.append(error)
            counts.append(count)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert min(counts) > 0
    assert pinned_places() == 0


def segment(marker, content):
    return bytes((0xFF, marker)) + (len(content) + 2).to_bytes(2, "big") + content


NO_COMPONENTS = b"".join(
    (
        b"\xff\xd8",
        segment(0xC0, bytes((8, 0, TILE[0], 0, TILE[1], 0))),
        segment(0xDA, bytes((0, 0, 63, 0))),
        b"\0\xff\xd9",
    )
)


class TestOneBadTile:
    @pytest.mark.parametrize("bad", [b"\xff", b"\xff\xd9", NO_COMPONENTS], ids=repr)
    @pytest.mark.parametrize("tiles", [1, TILES])
    def test_it_costs_only_itself(self, tmp_path, host_gpu, bad, tiles):
        size = (HEIGHT, WIDTH) if tiles > 1 else TILE
        numbers = iter(range(tiles))

        def encode(tile):
            return bad if next(numbers) == 0 else slides.jpeg_ycbcr(tile)

        page = tiffbytes.page(slides.picture(*size), encode, tile=TILE, **YCBCR)
        path = tiffbytes.write(tmp_path / "slide.tif", [page])
        with open_slide(path, device="cpu") as cpu, open_slide(path, device="cuda") as slide:
            with pytest.raises(TileError, match="level 0, row 0, column 0"):
                _ = slide.levels[0][...]
            found, expected = (each.level_array(0, tolerant=True)[...] for each in (slide, cpu))
            np.testing.assert_array_equal(found, expected)

    def test_one_that_the_file_says_lies_beyond_its_end(self, tmp_path, host_gpu):
        page = tiffbytes.page(slides.picture(HEIGHT, WIDTH), slides.jpeg_ycbcr, tile=TILE, **YCBCR)
        path = tiffbytes.write(tmp_path / "slide.tif", [page])
        with tifffile.TiffFile(path) as file:
            tag = file.pages[0].tags[324]
            place, each = tag.valueoffset, {4: 4, 16: 8}[int(tag.dtype)]
        data = bytearray(path.read_bytes())
        last = place + each * (TILES - 1)
        data[last : last + each] = (len(data) + 1000).to_bytes(each, "little")
        path.write_bytes(data)
        with open_slide(path, device="cuda") as slide, open_slide(path, device="cpu") as cpu:
            found, expected = (each.level_array(0, tolerant=True)[...] for each in (slide, cpu))
            np.testing.assert_array_equal(found, expected)
            with pytest.raises(TileError, match="row 4, column 4"):
                _ = slide.levels[0][...]


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_tiles_corrected_late_are_right_on_the_host(tmp_path, host_gpu, monkeypatch, refused):
    """The last batch of a region may be copied to the host before one before it is put right."""
    calls = []
    decode, wait = DecodeWorker.decode, GpuBatch.wait

    def sometimes(worker, kind, streams, images):
        calls.append(len(streams))
        if len(calls) == refused + 1:
            return [False] * len(streams)
        return decode(worker, kind, streams, images)

    def late(batch):
        time.sleep(0.1)
        return wait(batch)

    monkeypatch.setattr(DecodeWorker, "decode", sometimes)
    monkeypatch.setattr(GpuBatch, "wait", late)
    monkeypatch.setattr(device_module, "LIMITS", LIMITS._replace(tiles=9))
    page = tiffbytes.page(slides.picture(HEIGHT, WIDTH), slides.jpeg_ycbcr, tile=TILE, **YCBCR)
    path = tiffbytes.write(tmp_path / "slide.tif", [page])
    with open_slide(path, device="cpu") as cpu, open_slide(path, device="cuda") as slide:
        np.testing.assert_array_equal(slide.levels[0][...], cpu.levels[0][...])
        assert len(calls) == 3


class TestInsertedLevels:
    """Averaged on the device from what it decodes of the finer level."""

    SIZE = (331, 473)

    @pytest.fixture(autouse=True)
    def small_screen(self, monkeypatch):
        monkeypatch.setattr(opened, "LARGEST_OVERVIEW", 100)

    def write(self, path, kind="JPEG YCbCr", step=8, encode=None, **more):
        options = KINDS[kind] | {"encode": encode or KINDS[kind]["encode"]} | more
        channels, dtype = options.pop("channels", 3), options.pop("dtype", "uint8")
        pixels = slides.picture(*self.SIZE, channels, dtype)
        pages = [
            tiffbytes.page(level, tile=TILE, subfile_type=number, **options)
            for number, level in enumerate((pixels, pixels[::step, ::step]))
        ]
        return tiffbytes.write(path, pages)

    def expected(self, path):
        """What the inserted levels show of the pixels that the CPU decodes."""
        with open_slide(path, device="cpu") as slide:
            finer, found = slide.level_array(0, tolerant=True)[...], []
            for level in slide.pyramid:
                if level.inserted:
                    found.append(slides.average(found[-1] if found else finer, 2))
        assert len(found) == 2
        return found

    def inserted(self, slide, **options):
        return [
            slide.level_array(level.number, **options) for level in slide.pyramid if level.inserted
        ]

    @pytest.mark.parametrize("kind", BY_DEVICE)
    def test_they_are_those_of_the_cpu(self, tmp_path, host_gpu, kind):
        path = self.write(tmp_path / "slide.tif", kind)
        expected = self.expected(path)
        with open_slide(path, device="cuda") as slide:
            for level, pixels in zip(self.inserted(slide), expected, strict=True):
                np.testing.assert_array_equal(level[...], pixels)
                np.testing.assert_array_equal(level[17:80, 3:101], pixels[17:80, 3:101])
                np.testing.assert_array_equal(level[-1:, -1:], pixels[-1:, -1:])
                assert level[5:5].shape == (0, *pixels.shape[1:])
                assert level[:, 5:5].shape == (len(pixels), 0, pixels.shape[2])
            for number in range(expected[0].shape[2]):
                for level, pixels in zip(
                    self.inserted(slide, channel=number), expected, strict=True
                ):
                    np.testing.assert_array_equal(level[9:, 4:], pixels[9:, 4:, number])
            assert decoded(slide)["cpu"] == 0
        assert pinned_places() == 0

    def test_only_averages_are_downloaded(self, tmp_path, host_gpu, monkeypatch):
        path = self.write(tmp_path / "slide.tif")
        sizes = []
        download = host_gpu.download

        def watched(pixels, stream):
            sizes.append(pixels.size)
            return download(pixels, stream)

        with open_slide(path, device="cuda") as slide:
            slide.read_region((0, 0), (5, 5))  # the verifier's, too
            monkeypatch.setattr(host_gpu, "download", watched)
            for level in self.inserted(slide):
                found = level[10:60, 20:90]
                assert sizes == [found.size]
                sizes.clear()

    @pytest.mark.parametrize("room", [1, 40_000, 1 << 30])
    def test_in_pieces(self, tmp_path, host_gpu, monkeypatch, room):
        path = self.write(tmp_path / "slide.tif")
        monkeypatch.setattr(halving, "FINER_BYTES", room)
        with open_slide(path, device="cuda") as slide:
            for level, pixels in zip(self.inserted(slide), self.expected(path), strict=True):
                np.testing.assert_array_equal(level[1:, 1:-1], pixels[1:, 1:-1])
            assert decoded(slide)["cpu"] == 0

    @pytest.mark.parametrize("room", [1, 40_000, 1 << 30])
    @pytest.mark.parametrize("channel", [None, 2])
    def test_many_regions_at_once(self, tmp_path, host_gpu, monkeypatch, room, channel):
        """Some of them at the lower and right edge, where averages are of fewer pixels."""
        path = self.write(tmp_path / "slide.tif")
        monkeypatch.setattr(halving, "FINER_BYTES", room)
        with open_slide(path, device="cuda") as slide:
            numbers = [level.number for level in slide.pyramid if level.inserted]
            for number, pixels in zip(numbers, self.expected(path), strict=True):
                height, width = pixels.shape[:2]
                tops = np.array([0, height - 20, height - 20, 3, 3, 11])
                lefts = np.array([0, 7, 9, 5, 5, width - 30])
                regions = Regions.alike(tops, lefts, 20, 30)
                found = slide._reader.read(number, regions, ReadOptions(channel=channel))
                for region, top, left in zip(found, tops, lefts, strict=True):
                    expected = pixels[top : top + 20, left : left + 30]
                    expected = expected if channel is None else expected[..., channel]
                    np.testing.assert_array_equal(region, expected)
            assert decoded(slide)["cpu"] == 0
        assert pinned_places() == 0

    @pytest.mark.usefixtures("scanner_colours")
    def test_in_srgb(self, tmp_path, host_gpu):
        path = self.write(tmp_path / "slide.tif")
        expected = self.expected(path)
        with with_profile(path, device="cuda") as slide:
            slide.display_color = "srgb"
            for level, pixels in zip(self.inserted(slide, tolerant=True), expected, strict=True):
                np.testing.assert_array_equal(level[...], in_srgb(pixels))
            assert decoded(slide)["cpu"] == 0

    def test_damaged_tiles(self, tmp_path, host_gpu):
        numbers = iter(range(1000))

        def encode(tile):
            return slides.jpeg_ycbcr(tile)[: -40 if next(numbers) in (12, 24) else None]

        path = self.write(tmp_path / "slide.tif", encode=encode)
        expected = self.expected(path)
        told = []
        with open_slide(path, device="cuda") as slide:
            slide.on_failed_tile(lambda name, reason: told.append(name))
            for level, pixels in zip(self.inserted(slide, tolerant=True), expected, strict=True):
                np.testing.assert_array_equal(level[...], pixels)
            assert told == ["level 0, row 1, column 2", "level 0, row 2, column 4"]
            with pytest.raises(TileError, match="level 0, row 1, column 2"):
                self.inserted(slide)[0][...]
            assert decoded(slide)["cpu"] == 0
        assert pinned_places() == 0

    def test_missing_tiles(self, tmp_path, host_gpu):
        path = self.write(tmp_path / "slide.tif", missing=[0, 1, 7])
        with open_slide(path, device="cuda") as slide:
            for level, pixels in zip(self.inserted(slide), self.expected(path), strict=True):
                np.testing.assert_array_equal(level[...], pixels)

    def test_without_device_memory_the_cpu_does_it(self, tmp_path, host_gpu):
        path = self.write(tmp_path / "slide.tif")
        host_gpu.free = 0
        with open_slide(path, device="cuda") as slide:
            for level, pixels in zip(self.inserted(slide), self.expected(path), strict=True):
                np.testing.assert_array_equal(level[...], pixels)
            assert decoded(slide)["cpu"] > 0

    def test_without_memory_for_averages_the_cpu_does_it(self, tmp_path, host_gpu, monkeypatch):
        path = self.write(tmp_path / "slide.tif")
        monkeypatch.setattr(host_gpu, "empty", no_memory)
        with open_slide(path, device="cuda") as slide:
            for level, pixels in zip(self.inserted(slide), self.expected(path), strict=True):
                np.testing.assert_array_equal(level[...], pixels)
            assert decoded(slide).get("nvimagecodec", 0) == 0

    def test_a_device_that_fails_is_named(self, tmp_path, host_gpu, monkeypatch):
        def fail(*args, **options):
            raise RuntimeError("an illegal memory access")

        monkeypatch.setattr(host_gpu, "average_area", fail)
        path = self.write(tmp_path / "slide.tif")
        fails = pytest.raises(DeviceError, match=r"cuda:0.*illegal memory access")
        with open_slide(path, device="cuda") as slide, fails:
            self.inserted(slide)[0][...]

    def test_what_the_device_cannot_decode(self, tmp_path, host_gpu):
        encode = imagecodecs.lzma_encode
        path = self.write(tmp_path / "slide.tif", "deflate", encode=encode, compression=34925)
        with open_slide(path, device="cuda") as slide:
            for level, pixels in zip(self.inserted(slide), self.expected(path), strict=True):
                np.testing.assert_array_equal(level[...], pixels)
            assert "nvimagecodec" not in decoded(slide)


def no_memory(*args):
    raise MemoryError


class TestThreads:
    """Many threads that each read one region at a time."""

    REGIONS = 48

    @pytest.fixture
    def batches(self, monkeypatch):
        """How many tiles each batch of the device has."""
        sizes = []
        schedule = NvImageCodecDecoder.schedule

        def counted(decoder, batch, *given, **options):
            sizes.append(len(batch))
            return schedule(decoder, batch, *given, **options)

        monkeypatch.setattr(NvImageCodecDecoder, "schedule", counted)
        return sizes

    def outcome(self, slide, place, device):
        """Return a region's pixels, or the message of its error."""
        try:
            return np.array(slide.read_region(place, (30, 20), device=device))
        except TileError as error:
            return str(error)

    def read(self, slide):
        """Read regions in 16 threads; return the place and outcome of each."""
        slide.clear_cache()
        places = [(3 * number % 100, 2 * number % 90) for number in range(self.REGIONS)]
        ready = threading.Barrier(16)

        def read(place):
            if place in places[:16]:
                ready.wait(20)
            return self.outcome(slide, place, "cuda")

        with ThreadPoolExecutor(16) as pool:
            return list(zip(places, pool.map(read, places), strict=True))

    def test_regions_that_wait_become_one_batch(self, files, host_gpu, batches):
        path, (pixels, *_) = files["JPEG YCbCr"]
        with open_slide(path, device="cuda") as slide:
            for (x, y), found in self.read(slide):
                np.testing.assert_array_equal(found, pixels[y : y + 20, x : x + 30])
        assert len(batches) < self.REGIONS

    def test_a_failure_is_that_of_its_own_region(self, damaged):
        slide, _ = damaged
        found = self.read(slide)
        with open_slide(slide.path, device="cpu") as other:
            expected = [self.outcome(other, place, "cpu") for place, _ in found]
        failed = [isinstance(each, str) for each in expected]
        assert any(failed)
        assert not all(failed)
        for (_, mine), other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(mine, other)
