"""Behavior that only a CUDA device shows: memory, streams, and nvImageCodec's pixels.

Skipped where there is no NVIDIA driver, CuPy or nvImageCodec.
"""

import gc
import importlib
import itertools
import json
import logging
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import imagecodecs
import numpy as np
import pytest
import tifffile

from napari_wsigpu import open_slide
from napari_wsigpu.codecs.jpeg import header_length
from napari_wsigpu.gpu.device.cuda import CudaDevice, PinnedMemory
from napari_wsigpu.gpu.device.devices import Devices
from napari_wsigpu.gpu.device.verify import TOLERANCES
from napari_wsigpu.model.errors import DeviceError, RegionError, SlideReadError
from napari_wsigpu.reading import device as device_module
from napari_wsigpu.reading.cache import TileKey
from napari_wsigpu.reading.device import LIMITS
from napari_wsigpu.slide import runtime
from napari_wsigpu.slide import slide as opened
from napari_wsigpu.slide.runtime import Runtime
from tests.conftest import pinned_places
from tests.fakes.host_device import WrappedDecoder
from tests.test_display_color import in_srgb, with_profile
from tests.writers import slides, tiffbytes
from tests.writers.tiffbytes import UNDEFINED

pytestmark = pytest.mark.gpu

MIB = 1 << 20
PINNED = 1  # cudaMemoryTypeHost
HEIGHT, WIDTH = 700, 900
TILE = (128, 128)

LATE_COPY = r"""
extern "C" __global__ void late_copy(const unsigned char *from, unsigned char *to, int size,
                                     long long ticks) {
    const long long begin = clock64();
    while (clock64() - begin < ticks) {}
    for (int i = threadIdx.x; i < size; i += blockDim.x) to[i] = from[i];
}
"""
TICKS = 400_000_000  # about a quarter of a second

JPEG_SCRIPT = """
import json, sys
import cupy
import numpy as np
from napari_wsigpu import open_slide, runtime
from napari_wsigpu.gpu.device.cuda import PinnedMemory

worker = runtime.default().devices.worker(0)
device = worker.device

if len(sys.argv) > 2:
    device.pinned = PinnedMemory(cupy, int(sys.argv[2]))
with open_slide(sys.argv[1], device="cpu") as slide:
    expected = slide.levels[0][...].astype(int)
with open_slide(sys.argv[1], device="cuda") as slide:
    found = slide.levels[0][...].astype(int)
    decoded = slide.stats()["decoded"]
path = worker.active_engine("jpeg")
print(json.dumps([path, int(abs(found - expected).max()), decoded.get("nvimagecodec", 0)]))
"""


@pytest.fixture(scope="module", autouse=True)
def device():
    try:
        found = runtime.default().devices.worker(0).device
    except DeviceError as error:
        pytest.skip(str(error))
    return found


@pytest.fixture(scope="module")
def cupy(device):
    return pytest.importorskip("cupy")


@pytest.fixture(scope="module")
def jpeg_path(device):
    """Name of the engine that decodes JPEG here."""
    return device.decoder("jpeg")[1]


@pytest.fixture
def stream(device):
    return device.new_stream()


# Slides


def jpeg_2000(tile):
    return imagecodecs.jpeg2k_encode(tile.squeeze(), level=0, codecformat="J2K", mct=False)


YCBCR = {"compression": 7, "photometric": 6}


def ycbcr(subsampling):
    return YCBCR | {"encode": lambda tile: slides.jpeg_ycbcr(tile, subsampling)}


KINDS = {
    "4:2:0": ycbcr("420"),
    "4:2:2": ycbcr("422"),
    "4:4:4": ycbcr("444"),
    "gray": {"channels": 1, "compression": 7, "photometric": 1, "encode": slides.jpeg},
    "stored RGB": {"compression": 7, "encode": slides.jpeg},
    "JPEG 2000": {"compression": 34712, "encode": jpeg_2000},
    "JPEG 2000 YCbCr": {"compression": 33003, "photometric": 6, "encode": jpeg_2000},
    "JPEG 2000 16 bit": {
        **{"channels": 1, "dtype": "uint16", "photometric": 1},
        **{"compression": 34712, "encode": jpeg_2000},
    },
    "uncompressed": {"compression": 1, "encode": bytes},
}
WITH_TABLES = [*itertools.product(["4:2:0", "4:4:4", "gray", "stored RGB"], [True])]


def saturated(height, width):
    """Blocks of pure colors, black and white, with steep edges."""
    rng = np.random.default_rng(7)
    shape = (-(-height // 20), -(-width // 20), 3)
    blocks = rng.choice(np.array([0, 255], np.uint8), shape)
    return blocks.repeat(20, 0).repeat(20, 1)[:height, :width]


def write(path, kind, *, tables=False, pixels=None):
    options = dict(KINDS[kind])
    channels, dtype = options.pop("channels", 3), options.pop("dtype", "uint8")
    encode = options.pop("encode")
    if pixels is None:
        pixels = slides.picture(HEIGHT, WIDTH, channels, dtype)
    if tables:
        whole = encode
        shared = slides.split_tables(whole(np.ascontiguousarray(pixels[:128, :128])))[0]
        options["more"] = {347: (UNDEFINED, shared)}

        def encode(tile):
            return slides.split_tables(whole(tile))[1]

    page = tiffbytes.page(pixels, encode, tile=TILE, **options)
    tiffbytes.write(path, [page])
    with open_slide(path, device="cpu") as slide:
        return slide.levels[0][...]


def tolerance_of(kind, jpeg_path):
    if kind == "uncompressed":
        return 0
    return TOLERANCES["GPU" if kind.startswith("JPEG 2000") else jpeg_path]


def difference(found, expected):
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    return int(abs(found.astype(np.int64) - expected).max(initial=0))


def window_of(pixels, x, y, width, height, background):
    region = np.full((height, width, pixels.shape[2]), background, pixels.dtype)
    rows, columns = np.mgrid[y : y + height, x : x + width]
    inside = (rows >= 0) & (rows < pixels.shape[0]) & (columns >= 0) & (columns < pixels.shape[1])
    region[inside] = pixels[rows[inside], columns[inside]]
    return region


@pytest.fixture
def jpeg(tmp_path, device):
    """A JPEG slide on the device, and its pixels as decoded by the CPU."""
    path = tmp_path / "slide.tif"
    pixels = write(path, "4:2:0")
    with open_slide(path, device="cuda") as slide:
        yield slide, pixels


class TestPixels:
    @pytest.mark.parametrize(("kind", "tables"), [*((kind, False) for kind in KINDS), *WITH_TABLES])
    def test_pixels_match_the_cpu(self, tmp_path, jpeg_path, caplog, kind, tables):
        path = tmp_path / "slide.tif"
        pixels = write(path, kind, tables=tables)
        most = tolerance_of(kind, jpeg_path)
        rng = np.random.default_rng(1)
        with open_slide(path, device="cuda") as slide:
            found = slide.read_region((0, 0), (WIDTH, HEIGHT), device="cuda")
            assert difference(found.get(), pixels) <= most
            by_device = slide.stats()["decoded"].get("nvimagecodec", 0)
            assert (by_device > 0) == (kind != "uncompressed")
            for number in range(30):
                if number % 10 == 0:
                    slide.clear_cache()
                x, y = rng.integers(-100, 900, 2).tolist()
                size = rng.integers(1, 400, 2).tolist()
                expected = window_of(pixels, x, y, *size, slide.layout.background)
                to_device = slide.read_region((x, y), size, device="cuda")
                assert difference(to_device.get(), expected) <= most
                assert difference(slide.read_region((x, y), size), expected) <= most
            channel = slide.level_array(0, pixels.shape[2] - 1)[3:-5, 7:]
            assert difference(channel, pixels[3:-5, 7:, -1]) <= most
        assert "is decoded on the CPU" not in caplog.text

    @pytest.mark.parametrize("kind", ["4:2:0", "4:4:4", "stored RGB", "JPEG 2000"])
    def test_saturated_colors(self, tmp_path, jpeg_path, kind):
        path = tmp_path / "slide.tif"
        pixels = write(path, kind, pixels=saturated(HEIGHT, WIDTH))
        with open_slide(path, device="cuda") as slide:
            found = slide.levels[0][...]
        assert difference(found, pixels) <= tolerance_of(kind, jpeg_path)

    def test_noisy_tissue(self, tmp_path, jpeg_path):
        """The RGB conversion of a JPEG engine would differ from libjpeg's here."""
        path = tmp_path / "slide.tif"
        noise = np.random.default_rng(0).normal((150, 60, 120), 30, (HEIGHT, WIDTH, 3))
        pixels = write(path, "4:2:0", pixels=np.clip(noise, 0, 255).astype(np.uint8))
        with open_slide(path, device="cuda") as slide:
            assert difference(slide.levels[0][...], pixels) <= TOLERANCES[jpeg_path]

    @pytest.mark.parametrize("side", [64, 256, 512])
    def test_flags_for_all_tiles_of_a_batch(self, tmp_path, jpeg_path, side):
        path = tmp_path / "slide.tif"
        wide = slides.picture(16 * 64, 20 * 64)
        pixels = np.tile(wide, (side // 64, side // 64, 1))
        page = tiffbytes.page(pixels, slides.jpeg_ycbcr, tile=(side, side), **YCBCR)
        tiffbytes.write(path, [page])
        with open_slide(path, device="cpu") as cpu, open_slide(path, device="cuda") as slide:
            found = slide.levels[0][...]
            assert difference(found, cpu.levels[0][...]) <= TOLERANCES[jpeg_path]
            assert slide.stats()["decoded"] == {"cpu": 0, "nvimagecodec": 320}

    @pytest.mark.parametrize("kind", ["4:2:0", "JPEG 2000", "uncompressed"])
    def test_in_srgb(self, tmp_path, kind):
        """On the device and on the host, the result of LittleCMS for the stored pixels."""
        path = tmp_path / "slide.tif"
        write(path, kind)
        with with_profile(path, device="cuda") as slide:
            for place in ((0, 0), (-30, -40), (WIDTH - 200, HEIGHT - 100)):
                stored = slide.read_region(place, (300, 400))
                for color, expected in (("srgb", in_srgb(stored)), ("stored", stored)):
                    for _ in ("cold", "warm"):
                        found = slide.read_region(place, (300, 400), device="cuda", color=color)
                        np.testing.assert_array_equal(found.get(), expected)
                        found = slide.read_region(place, (300, 400), color=color)
                        np.testing.assert_array_equal(found, expected)
                slide.clear_cache()

    @pytest.mark.parametrize("kind", ["4:2:0", "gray", "JPEG 2000", "JPEG 2000 16 bit"])
    def test_inserted_levels(self, tmp_path, jpeg_path, monkeypatch, kind):
        """A pyramid with steps of 8, averaged on the device, twice from the same pixels."""
        monkeypatch.setattr(opened, "LARGEST_OVERVIEW", 100)
        options = {"channels": 3, "dtype": "uint8"} | KINDS[kind]
        pixels = slides.picture(
            HEIGHT - 1, WIDTH - 1, options.pop("channels"), options.pop("dtype")
        )
        pages = [
            tiffbytes.page(level, tile=TILE, subfile_type=number, **options)
            for number, level in enumerate((pixels, pixels[::8, ::8]))
        ]
        path = tiffbytes.write(tmp_path / "slide.tif", pages)
        most = tolerance_of(kind, jpeg_path)
        with open_slide(path, device="cpu") as cpu, open_slide(path, device="cuda") as slide:
            inserted = [level.number for level in slide.pyramid if level.inserted]
            assert len(inserted) == 2
            for number in inserted:
                expected = cpu.level_array(number)[...]
                for _ in ("cold", "warm"):
                    assert difference(slide.level_array(number)[...], expected) <= most
                part = slide.level_array(number)[33:, 21:-1]
                assert difference(part, expected[33:, 21:-1]) <= most
                channel = slide.level_array(number, 0)[...]
                assert difference(channel, expected[..., 0]) <= most
                assert slide.level_array(number)[5:5].size == 0
                # Equal to NumPy's average of the pixels that the device decoded.
                finer = slides.average(slide.levels[0][...], 2)
                finer = finer if number == inserted[0] else slides.average(finer, 2)
                np.testing.assert_array_equal(slide.level_array(number)[...], finer)
                slide.clear_cache()
            assert slide.stats()["decoded"]["cpu"] == 0
            assert pinned_places() == 0

    @pytest.mark.parametrize("kind", ["4:2:0", "gray", "JPEG 2000", "uncompressed"])
    def test_tiles_of_displays(self, tmp_path, jpeg_path, kind):
        """Viewers fetch whole tiles that the device decodes to the host."""
        path = tmp_path / "slide.tif"
        write(path, kind)
        most = tolerance_of(kind, jpeg_path)
        with open_slide(path, device="cpu") as cpu, open_slide(path, device="cuda") as slide:
            grid = slide.layout.levels[0].grid
            places = [(row, column) for row in range(grid.rows) for column in range(grid.columns)]
            expected = cpu.levels[0][...]
            for some in (places[3:4], places[::2], places):
                found = slide.displayed.read_tiles(
                    [TileKey(slide.displayed.slide, 0, *at) for at in some]
                )
                assert len(found) == len(some)
                for key, tile in found.items():
                    top, left = key.row * grid.tile_height, key.column * grid.tile_width
                    part = expected[top : top + grid.tile_height, left : left + grid.tile_width]
                    assert difference(tile, part) <= most
            assert pinned_places() == 0

    def test_empty_and_far_regions(self, jpeg):
        slide, _ = jpeg
        for size in ((0, 0), (0, 5), (5, 0)):
            found = slide.read_region((3, 3), size, device="cuda")
            assert found.shape == (size[1], size[0], 3)
        far = slide.read_region((2**40, -(2**40)), (8, 9), device="cuda")
        assert (far.get() == slide.layout.background).all()

    def test_dask_chunks_are_cupys(self, jpeg, cupy):
        dask = pytest.importorskip("dask", reason="dask is not installed")
        slide, _ = jpeg
        array = slide.levels[0].to_dask(2, device="cuda")
        assert type(array._meta) is cupy.ndarray
        with dask.config.set(scheduler="synchronous"):
            found = array.compute()
            assert type(found) is cupy.ndarray
            assert (found == slide.read_region((0, 0), slide.dimensions, device="cuda")).all()
            part = array[::-3, 5:77, 1].sum()
            assert int(part.compute()) == int(found[::-3, 5:77, 1].sum())

    def test_dask_chunks_in_another_process(self, jpeg, cupy):
        pytest.importorskip("dask", reason="dask is not installed")
        slide, _ = jpeg
        copy = pickle.loads(pickle.dumps(slide.levels[0].to_dask(device="cuda")))
        try:
            found = copy.compute(scheduler="synchronous")
            assert (found == slide.levels[0].read(..., "cuda")).all()
        finally:
            runtime.default().open_slides.close()

    @pytest.mark.parametrize("at_once", [1, 2 * TILE[0] * WIDTH, MIB])
    def test_recoloring_matches_the_host(self, jpeg, cupy, monkeypatch, at_once):
        monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
        pytest.importorskip("distributed", reason="distributed is not installed")
        example = importlib.import_module("tissue_and_stain")
        pixels = jpeg[0].levels[0][...]
        expected = example.measure_stains(pixels, TILE)
        monkeypatch.setattr(example, "AT_ONCE", at_once)
        found = example.measure_stains(cupy.asarray(pixels), TILE)
        assert type(found) is np.ndarray
        np.testing.assert_allclose(found, expected, atol=1e-6)

    def test_more_tiles_than_a_grid_has_rows(self, tmp_path, device):
        """A grid has at most 65 535 rows; this region has 66 049 tiles."""
        path = tmp_path / "slide.tif"
        pixels = slides.picture(257, 257, 1)[..., 0].repeat(16, 0).repeat(16, 1)
        tifffile.imwrite(path, pixels, tile=(16, 16))
        with open_slide(path, device="cuda") as slide:
            for _ in ("cold", "warm"):
                found = slide.read_region((0, 0), slide.dimensions, device="cuda")
                np.testing.assert_array_equal(found.get()[..., 0], pixels)

    def test_batches_of_regions(self, jpeg, cupy, jpeg_path):
        slide, pixels = jpeg
        where = [(x, y) for y in range(0, 400, 90) for x in range(0, 600, 90)]
        options = {"device": "cuda", "num_workers": 3}
        batches = list(slide.read_regions(where, (200, 150), 0, 8, **options))
        assert all(isinstance(batch, cupy.ndarray) for batch in batches)
        regions = [region for batch in batches for region in batch.get()]
        for (x, y), region in zip(where, regions, strict=True):
            expected = pixels[y : y + 150, x : x + 200]
            assert difference(region, expected) <= TOLERANCES[jpeg_path]

    def test_yielded_batch_is_complete(self, jpeg, cupy, jpeg_path):
        """Whichever stream the caller works on."""
        slide, pixels = jpeg
        side = cupy.cuda.Stream(non_blocking=True)
        where = [(0, 0)] * 64
        options = {"device": "cuda", "num_workers": 1, "prefetch_factor": 0}
        for _ in range(5):
            batch = next(slide.read_regions(where, (600, 600), 0, 64, **options))
            found = batch.get(stream=side)
            assert difference(found[-1], pixels[:600, :600]) <= TOLERANCES[jpeg_path]
            del batch


def spoil(rng, jpeg):
    """Damage the scan of a JPEG at random, but not its end."""
    start = header_length(jpeg)
    scan = bytearray(jpeg[start:-2])
    place, other = sorted(rng.integers(0, len(scan), 2).tolist())
    noise = rng.integers(0, 256, rng.integers(1, 2000), np.uint8).tobytes()
    kind = rng.integers(8)
    if kind == 0:
        for at in rng.integers(0, len(scan), rng.integers(1, 40)).tolist():
            scan[at] = int(rng.integers(256))
    elif kind == 1:
        scan = scan[:place]
    elif kind == 2:
        scan[place:other] = bytes(other - place)
    elif kind == 3:
        scan[place:place] = noise
    elif kind == 4:
        del scan[place:other]
    elif kind == 5:
        scan += bytes(scan)
    elif kind == 6:
        scan = bytearray(noise)
    else:
        scan[place:place] = bytes((0xFF, 0xD0 + int(rng.integers(8))))
    return jpeg[:start] + bytes(scan) + jpeg[-2:]


@pytest.mark.parametrize("subsampling", ["420", "422", "444"])
@pytest.mark.parametrize("seed", range(20))
def test_damaged_tiles_do_not_spoil_others(tmp_path, jpeg_path, subsampling, seed):
    """They are decoded in one stack, and a JPEG engine does not report lost positions."""
    rng = np.random.default_rng(seed)
    path = tmp_path / "slide.tif"
    pixels = slides.picture(7 * 128, 9 * 128)
    pixels[300:600] = 243  # tiles that all look the same
    damaged = set(rng.integers(0, 63, 3).tolist())
    count = itertools.count()

    def encode(tile):
        jpeg = slides.jpeg_ycbcr(tile, subsampling)
        return spoil(rng, jpeg) if next(count) in damaged else jpeg

    tiffbytes.write(path, [tiffbytes.page(pixels, encode, tile=TILE, **YCBCR)])
    with open_slide(path, device="cpu") as cpu, open_slide(path, device="cuda") as slide:
        slide._reader.offload._verifier._left["jpeg"] = (
            0  # a damaged tile could switch the slide to the CPU
        )
        found, expected = (each.level_array(0, tolerant=True)[...] for each in (slide, cpu))
    for tile in set(range(63)) - damaged:
        y, x = (128 * place for place in divmod(tile, 9))
        at = np.s_[y : y + 128, x : x + 128]
        assert difference(found[at], expected[at]) <= TOLERANCES[jpeg_path], tile


class TestStreams:
    @pytest.mark.parametrize("given", ["CuPy's", "integer", "null", "zero"])
    def test_of_the_caller(self, jpeg, cupy, jpeg_path, given):
        slide, pixels = jpeg
        own = cupy.cuda.Stream(non_blocking=True)
        stream = {
            "CuPy's": own,
            "integer": own.ptr,
            "null": cupy.cuda.Stream.null,
            "zero": 0,
        }[given]
        for _ in ("cold", "warm"):
            found = slide.read_region((50, 60), (500, 400), device="cuda", stream=stream)
            # All work is done, so another stream sees the result.
            other = cupy.cuda.Stream(non_blocking=True)
            expected = pixels[60:460, 50:550]
            assert difference(found.get(stream=other), expected) <= TOLERANCES[jpeg_path]

    def test_read_inside_the_callers_stream(self, jpeg, cupy, jpeg_path):
        slide, pixels = jpeg
        with cupy.cuda.Stream(non_blocking=True):
            found = slide.read_region((50, 60), (500, 400), device="cuda")
            expected = pixels[60:460, 50:550]
            assert difference(found.get(), expected) <= TOLERANCES[jpeg_path]

    @pytest.mark.parametrize("warm", [False, True])
    def test_memory_that_the_caller_still_reads_is_not_written_to(self, jpeg, cupy, warm):
        """CuPy reuses freed memory while earlier kernels still use it."""
        slide, _ = jpeg
        size = (70, 60)
        if warm:
            slide.read_region((0, 0), size, device="cuda")
        kernel = cupy.RawKernel(LATE_COPY, "late_copy")
        count = 60 * 70 * 3
        kept = cupy.zeros(count, cupy.uint8)
        kernel((1,), (256,), (kept, kept, np.int32(count), np.int64(1)))  # compiles the kernel
        first = cupy.full((60, 70, 3), 5, cupy.uint8)
        kernel((1,), (256,), (first, kept, np.int32(count), np.int64(TICKS)))
        del first
        slide.read_region((0, 0), size, device="cuda")
        assert (kept.get() == 5).all()


class TestCallersArray:
    def test_callers_array_is_filled_and_returned(self, jpeg, cupy, jpeg_path):
        slide, pixels = jpeg
        for _ in ("cold", "warm"):
            out = cupy.full((300, 400, 3), 9, cupy.uint8)
            found = slide.read_region((600, 500), (400, 300), device="cuda", out=out)
            assert found is out
            expected = window_of(pixels, 600, 500, 400, 300, slide.layout.background)
            assert difference(out.get(), expected) <= TOLERANCES[jpeg_path]

    def test_mismatched_streams_are_refused(self, jpeg, cupy):
        slide, _ = jpeg
        for out in (
            cupy.zeros((300, 401, 3), cupy.uint8),
            cupy.zeros((300, 400, 3), cupy.uint16),
            cupy.zeros((300, 800, 3), cupy.uint8)[:, ::2],
        ):
            with pytest.raises(RegionError, match="out must be"):
                slide.read_region((0, 0), (400, 300), device="cuda", out=out)

    def test_host_memory_is_refused(self, jpeg):
        slide, _ = jpeg
        out = np.zeros((300, 400, 3), np.uint8)
        with pytest.raises(RegionError, match="memory of 'cuda:0'"):
            slide.read_region((0, 0), (400, 300), device="cuda", out=out)


# Memory


class TestPinnedMemory:
    def test_array_within_the_budget(self, cupy):
        memory = PinnedMemory(cupy, 10 * MIB)
        pixels = memory.empty((1024, 1024, 4), np.dtype(np.uint8))
        pixels[...] = 7
        assert pixels.shape == (1024, 1024, 4)
        attributes = cupy.cuda.runtime.pointerGetAttributes(pixels.ctypes.data)
        assert attributes.type == PINNED

    def test_memory_beyond_the_budget_is_ordinary(self, cupy):
        memory = PinnedMemory(cupy, 10 * MIB)
        kept = [memory.empty((4 * MIB,), np.dtype(np.uint8)) for _ in range(3)]
        for pixels in kept:
            pixels[...] = 7
        ordinary = cupy.cuda.runtime.pointerGetAttributes(kept[2].ctypes.data)
        assert ordinary.type != PINNED
        assert memory.empty((0, 3), np.dtype(np.uint16)).shape == (0, 3)

    def test_memory_is_freed_with_the_last_view(self, cupy):
        memory = PinnedMemory(cupy, 4 * MIB)
        for _ in range(20):
            view = memory.empty((2 * MIB,), np.dtype(np.uint16))[5:9]
            attributes = cupy.cuda.runtime.pointerGetAttributes(view.ctypes.data)
            assert attributes.type == PINNED
            view[...] = 3
            del view
            gc.collect()

    def test_copies_are_right(self, device, stream):
        pixels = slides.picture(300, 400, 3, "uint16")
        on_device = device.empty(pixels.shape, pixels.dtype)
        device.send(pixels[:, ::-1], on_device, stream)
        found = device.download(on_device, stream)
        stream.synchronize()
        np.testing.assert_array_equal(found, pixels[:, ::-1])


def free_memory(cupy):
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    cupy.cuda.runtime.deviceSynchronize()
    return cupy.cuda.runtime.memGetInfo()[0]


def test_more_than_the_device_has_is_a_memory_error(device, cupy):
    before = free_memory(cupy)
    with pytest.raises(MemoryError, match="cuda:0"):
        device.allocate(1 << 50)
    address, memory = device.allocate(256 * MIB)
    assert address == memory.ptr
    assert free_memory(cupy) <= before - 240 * MIB
    del memory
    assert free_memory(cupy) >= before - 2 * MIB


def test_close_frees_device_memory(tmp_path, cupy):
    path = tmp_path / "slide.tif"
    write(path, "4:2:0")
    live = []
    for _ in range(4):
        with open_slide(path, device="cuda") as slide:
            slide.read_region((0, 0), slide.dimensions, device="cuda")
        live.append(free_memory(cupy))
    assert live[-1] >= live[0] - MIB


class TestLoad:
    """Thousands of failures and cancellations."""

    @pytest.fixture
    def flaky(self, device, monkeypatch):
        """A separate device whose decoder fails one time in ten; yields the number of calls."""
        calls = itertools.count()
        made = []

        def decode(decoder, *args, **options):
            number = made[0].calls = next(calls)
            if number % 20 == 3:
                raise RuntimeError("injected")
            found = decoder.decode(*args, **options)
            return [False] * len(found) if number % 20 == 13 else found

        class Flaky(CudaDevice):
            calls = 0

            def __init__(self, index):
                super().__init__(index)
                made.append(self)

            def decoder(self, kind):
                decoder, path = super().decoder(kind)
                return WrappedDecoder(decoder, decode), path

        monkeypatch.setattr(device_module, "LIMITS", LIMITS._replace(tiles=20))
        with runtime.using(Runtime(Devices(Flaky))) as shared:
            yield shared.devices.worker(0).device
        shared.close()

    def test_no_leaks_and_no_wrong_pixels(
        self, tmp_path, flaky, cupy, jpeg_path, monkeypatch, caplog
    ):
        caplog.set_level(logging.ERROR)
        path = tmp_path / "slide.tif"
        pixels = write(path, "4:2:0")
        most = TOLERANCES[jpeg_path]
        wrong = []

        def work(slide, seed, until):
            rng = np.random.default_rng(seed)
            while flaky.calls < until:
                if rng.random() < 0.2:
                    slide.clear_cache()
                x, y = rng.integers(-100, 800, 2).tolist()
                size = rng.integers(1, 600, 2).tolist()
                how = rng.integers(3)
                try:
                    if how == 0:
                        regions = slide.read_regions([(x, y)] * 6, size, device="cuda")
                        found = next(regions).get()
                        regions.close()
                    elif how == 1:
                        found = slide.read_region((x, y), size, device="cuda").get()
                    else:
                        found = slide.read_region((x, y), size)
                except SlideReadError:
                    continue  # an expected failure, which cancels the read's other batches
                except BaseException as error:
                    wrong.append(error)
                    return
                expected = window_of(pixels, x, y, *size, slide.layout.background)
                if difference(found, expected) > most:
                    wrong.append((x, y, size))

        def go_on(until):
            """Read with four threads until the decoder has been called `until` times."""
            with open_slide(path, device="cuda") as slide:
                source, reads = slide._source, itertools.count()
                read = source.read_joined

                def sometimes(*ranges):
                    if next(reads) % 15 == 7:
                        raise SlideReadError("injected")
                    return read(*ranges)

                monkeypatch.setattr(source, "read_joined", sometimes)
                threads = [
                    threading.Thread(target=work, args=(slide, seed, until)) for seed in range(4)
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()

        go_on(100)
        before = free_memory(cupy)
        go_on(1100)
        assert wrong == []
        assert free_memory(cupy) >= before - 32 * MIB


def test_eight_threads(jpeg, jpeg_path):
    slide, pixels = jpeg
    wrong = []

    def work(seed):
        rng = np.random.default_rng(seed)
        try:
            for _ in range(60):
                x, y = rng.integers(-100, 800, 2).tolist()
                size = rng.integers(1, 400, 2).tolist()
                expected = window_of(pixels, x, y, *size, slide.layout.background)
                to_host = rng.random() < 0.5
                found = slide.read_region((x, y), size, device="cpu" if to_host else "cuda")
                found = found if to_host else found.get()
                if difference(found, expected) > TOLERANCES[jpeg_path]:
                    wrong.append((x, y, size))
                if rng.random() < 0.1:
                    slide.clear_cache()
                if rng.random() < 0.03:
                    slide.release()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def run_script(path, *arguments, **variables):
    """Engine, largest difference, and number of tiles on the device, in another process."""
    done = subprocess.run(
        [sys.executable, "-c", JPEG_SCRIPT, path, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | variables,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("engine", ["hardware", "JPEG kernels"])
def test_the_jpeg_engine_can_be_chosen(tmp_path, jpeg_path, engine):
    if engine == "hardware" and jpeg_path != "hardware":
        pytest.skip("this device has no JPEG engine")
    path = tmp_path / "slide.tif"
    write(path, "4:2:0")
    used, most, by_device = run_script(path, WSIGPU_JPEG_ENGINE=engine)
    assert used == engine
    assert most <= TOLERANCES[engine]
    assert by_device > 0


def test_without_page_locked_memory(tmp_path, jpeg_path):
    """The caller's regions use up the budget; batches still get flags and pixels."""
    path = tmp_path / "slide.tif"
    write(path, "4:4:4")
    used, most, by_device = run_script(path, "0")
    assert used == jpeg_path
    assert most <= TOLERANCES[jpeg_path]
    assert by_device > 0
