import pickle
import sys
import threading
import time
from types import SimpleNamespace

import imagecodecs
import numpy as np
import pytest
import tifffile

from napari_wsigpu import native, open_slide
from napari_wsigpu.gpu.device import driver
from napari_wsigpu.gpu.device.devices import BackgroundStart
from napari_wsigpu.model.errors import (
    DeviceError,
    SlideChangedError,
    SlideClosedError,
    SlideReadError,
)
from napari_wsigpu.reading.cache import TileKey
from napari_wsigpu.reading.device import DeviceBackend
from napari_wsigpu.slide import runtime
from tests.conftest import pinned_places
from tests.writers import slides, tiffbytes

HEIGHT, WIDTH = 131, 203
TILE = 16
TILES = 117


def jpeg_2000(tile):
    return imagecodecs.jpeg2k_encode(tile, level=0, codecformat="J2K", mct=False)


KINDS = {
    "jpeg": {"compression": 7, "photometric": 6, "encode": slides.jpeg_ycbcr},
    "raw": {"compression": 1, "encode": bytes},
    "33003": {"compression": 33003, "photometric": 6, "encode": jpeg_2000},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A slide of each kind, and its pixels as the CPU decodes them."""
    folder = tmp_path_factory.mktemp("slides")
    found = {}
    for kind, options in KINDS.items():
        page = tiffbytes.page(slides.picture(HEIGHT, WIDTH), tile=(TILE, TILE), **options)
        path = tiffbytes.write(folder / f"{kind}.tif", [page])
        with open_slide(path, device="cpu") as slide:
            found[kind] = path, slide.levels[0][...]
    return found


def wait_for(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def read_cold(slide):
    slide.clear_cache()
    return slide.levels[0][...]


def decoded(slide):
    """(tiles by the CPU, tiles by the device)."""
    found = dict(slide.stats()["decoded"])
    return found.pop("cpu"), found.pop("nvimagecodec", 0), *found


def gpu_threads():
    return [thread for thread in threading.enumerate() if thread.name == "wsigpu-gpu"]


@pytest.fixture
def ready(host_runtime):
    """Return once the device was started in the background."""

    def start(kind="jpeg"):
        wait_for(lambda: host_runtime.devices.background.worker(kind))

    return start


class TestAuto:
    def test_the_cpu_decodes_until_the_device_is_ready(
        self, files, host_gpu, host_runtime, monkeypatch
    ):
        path, pixels = files["jpeg"]
        allowed = threading.Event()
        decoder = host_gpu.decoder

        def slow(kind):
            assert allowed.wait(20)
            return decoder(kind)

        monkeypatch.setattr(host_gpu, "decoder", slow)
        with open_slide(path) as slide:
            for count in (1, 2):
                np.testing.assert_array_equal(read_cold(slide), pixels)
                assert decoded(slide) == (count * TILES, 0)
            allowed.set()
            wait_for(lambda: host_runtime.devices.background.worker("jpeg"))
            assert host_gpu.prepared
            np.testing.assert_array_equal(read_cold(slide), pixels)
            assert decoded(slide) == (2 * TILES, TILES)

    def test_without_a_driver_nothing_is_started(self, files, host_machine, host_runtime):
        host_machine.driver, host_machine.open = False, None
        with open_slide(files["jpeg"][0]) as slide:
            for count in (1, 2, 3):
                read_cold(slide)
                assert decoded(slide) == (count * TILES, 0)
        assert host_runtime.devices.background.worker("jpeg") is None

    def test_with_a_device_that_cannot_be_used(self, files, host_machine, host_gpu, caplog):
        asked = []

        def broken(index):
            asked.append(index)
            raise DeviceError("no CuPy")

        host_machine.open = broken
        path, pixels = files["jpeg"]
        with open_slide(path) as slide:
            read_cold(slide)
            wait_for(lambda: asked)
            for _ in range(2):
                np.testing.assert_array_equal(read_cold(slide), pixels)
            assert decoded(slide) == (3 * TILES, 0)
        assert asked == [0]
        assert caplog.records == []  # nobody asked for it

    def test_with_a_device_that_lacks_the_decoder(self, files, host_gpu, monkeypatch):
        tried = threading.Event()

        def broken(kind):
            tried.set()
            raise DeviceError("no nvJPEG")

        monkeypatch.setattr(host_gpu, "decoder", broken)
        path, pixels = files["jpeg"]
        with open_slide(path) as slide:
            read_cold(slide)
            assert tried.wait(20)
            np.testing.assert_array_equal(read_cold(slide), pixels)
            assert decoded(slide) == (2 * TILES, 0)

    def test_pixels_by_the_device_once_it_is_ready(self, files, ready, host_runtime):
        path, pixels = files["jpeg"]
        ready()
        with open_slide(path) as slide:
            np.testing.assert_array_equal(read_cold(slide), pixels)
            assert decoded(slide) == (0, TILES)
            slide.clear_cache()
            [found] = slide.read_regions([(0, 0)], slide.dimensions, device="cuda")
            np.testing.assert_array_equal(found, pixels)
            assert decoded(slide) == (0, 2 * TILES)

    def test_pixels_for_the_device_by_the_cpu_if_it_is_chosen(self, files, host_gpu):
        path, pixels = files["jpeg"]
        with open_slide(path, device="cpu") as slide:
            [found] = slide.read_regions([(0, 0)], slide.dimensions, device="cuda")
            np.testing.assert_array_equal(found, pixels)
            assert decoded(slide) == (TILES, 0)

    def test_what_the_device_cannot_decode_does_not_start_it(self, files, host_runtime):
        path, pixels = files["raw"]
        with open_slide(path) as slide:
            np.testing.assert_array_equal(read_cold(slide), pixels)
        assert host_runtime.devices.started(0) is None

    def test_computed_levels_and_associated_images_are_the_cpus(self, tmp_path, ready):
        ready()
        path = tmp_path / "slide.svs"
        slides.write_aperio(path, slides.picture(1100, 400), ())
        with open_slide(path, device="cpu") as slide:
            expected = slide.level_array(1)[...]
            label = slide.associated_images["label"].read()
        with open_slide(path) as slide:
            np.testing.assert_array_equal(slide.level_array(1)[...], expected)
            np.testing.assert_array_equal(slide.associated_images["label"].read(), label)


@pytest.mark.skipif(not native.available, reason="needs the core")
def test_tiles_that_recur_after_clearing_the_cache_are_not_kept(files):
    with open_slide(files["jpeg"][0], device="cpu") as slide:
        for clears in (True, False):
            for _ in range(40):
                if clears:
                    slide.clear_cache()
                before = slide.stats()["cache_hits"]
                slide.read_region((5, 5), (20, 20))
            slide.read_region((5, 5), (20, 20))
            assert (slide.stats()["cache_hits"] > before) == (not clears)


@pytest.mark.parametrize(("compression", "few"), [("zlib", 15), ("lzw", 15), ("zstd", 95)])
def test_few_lossless_tiles_are_left_to_the_cpu(
    tmp_path, host_gpu, host_runtime, monkeypatch, compression, few
):
    asked, read = [], []
    worker = host_runtime.devices.worker(0)
    monkeypatch.setattr(BackgroundStart, "worker", lambda _, kind: asked.append(kind) or worker)
    monkeypatch.setattr(DeviceBackend, "read", lambda *_, **__: read.append(1))
    pixels = np.tile(slides.picture(16, 160), (1, 10, 1))
    tifffile.imwrite(tmp_path / "a.tif", pixels, tile=(16, 16), compression=compression)
    with open_slide(tmp_path / "a.tif") as slide:
        for tiles in (few, few + 1):
            shown = slide.read_region((0, 0), (16 * tiles, 16))
            np.testing.assert_array_equal(shown, pixels[:, : 16 * tiles])
            assert len(read) == tiles - few
    kinds = {"zlib": "deflate", "lzw": "LZW", "zstd": "zstd"}
    assert asked == [kinds[compression]] * 2  # it starts before it is needed


@pytest.mark.parametrize(("device", "by_gpu"), [("auto", False), ("cuda", True)])
def test_few_lossless_tiles_are_sent_to_a_device(tmp_path, host_gpu, monkeypatch, device, by_gpu):
    pixels, asked, read = slides.picture(272, 272), [], DeviceBackend.read
    monkeypatch.setattr(DeviceBackend, "read", lambda *a, **k: asked.append(1) or read(*a, **k))
    tifffile.imwrite(tmp_path / "a.tif", pixels, tile=(16, 16), compression="zlib")
    with open_slide(tmp_path / "a.tif", device=device) as slide:
        few = slide.read_region((0, 0), (48, 80), device="cuda")
        np.testing.assert_array_equal(few, pixels[:80, :48])
        assert bool(asked) == by_gpu
        np.testing.assert_array_equal(slide.read_region((0, 0), (272, 272), device="cuda"), pixels)
        assert asked


class TestFailures:
    @pytest.fixture
    def failing(self, files, ready, host_gpu, host_runtime, monkeypatch):
        """A slide by "auto" whose device fails at the first batch."""
        ready()
        calls = []

        def fail(*args, **options):
            calls.append(args)
            raise RuntimeError("an illegal memory access")

        monkeypatch.setattr(host_gpu, "paste", fail)
        with open_slide(files["jpeg"][0]) as slide:
            yield slide, files["jpeg"][1], calls

    def test_auto_goes_on_with_the_cpu_and_says_so_once(self, failing, caplog):
        slide, pixels, calls = failing
        for count in (1, 2, 3):
            np.testing.assert_array_equal(read_cold(slide), pixels)
            assert decoded(slide) == (count * TILES, 0)
        assert len(calls) == 1
        (message,) = (record.getMessage() for record in caplog.records)
        assert "jpeg.tif" in message
        assert "illegal memory access" in message
        assert pinned_places() == 0

    def test_many_threads_say_so_once(self, failing, caplog):
        slide, pixels, _ = failing
        barrier = threading.Barrier(4)
        wrong = []

        def work():
            barrier.wait()
            if not np.array_equal(slide.levels[0][...], pixels):
                wrong.append("pixels")

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert len(caplog.records) == 1
        assert pinned_places() == 0

    def test_pixels_that_were_asked_for_on_the_device(self, failing):
        slide, pixels, _ = failing
        with pytest.raises(DeviceError, match=r"cuda:0.*illegal"):
            next(slide.read_regions([(0, 0)], slide.dimensions, device="cuda"))
        np.testing.assert_array_equal(slide.read_region((0, 0), slide.dimensions), pixels)

    def test_tiles_that_are_there_already(
        self, files, ready, host_gpu, host_runtime, monkeypatch, caplog
    ):
        ready()
        path, pixels = files["jpeg"]

        def fail(*args, **options):
            raise RuntimeError("an illegal memory access")

        with open_slide(path) as slide:
            slide.levels[0][...]
            monkeypatch.setattr(host_gpu, "paste", fail)
            np.testing.assert_array_equal(slide.levels[0][...], pixels)
        assert len(caplog.records) == 1

    def test_a_slide_by_cuda_fails(self, files, host_gpu, monkeypatch):
        def fail(*args, **options):
            raise RuntimeError("an illegal memory access")

        monkeypatch.setattr(host_gpu, "paste", fail)
        with open_slide(files["jpeg"][0], device="cuda") as slide:
            for _ in range(2):
                with pytest.raises(DeviceError, match=r"cuda:0.*illegal"):
                    slide.levels[0][...]


class TestVerification:
    @pytest.fixture
    def wrong(self, host_gpu, monkeypatch):
        """A device that leaves YCbCr as it is."""
        monkeypatch.setattr(host_gpu, "ycbcr_to_rgb", lambda *args: None)

    @pytest.mark.parametrize("device", ["auto", "cuda"])
    def test_wrong_pixels_are_never_shown(
        self, files, ready, wrong, host_gpu, host_runtime, caplog, device
    ):
        ready("jpeg2000")
        path, pixels = files["33003"]
        with open_slide(path, device=device) as slide:
            np.testing.assert_array_equal(read_cold(slide), pixels)
            assert decoded(slide) == (TILES, 0)
            (record,) = caplog.records
            assert "33003.tif" in record.getMessage()
            slide.clear_cache()
            live = host_gpu.live
            np.testing.assert_array_equal(read_cold(slide), pixels)
            assert host_gpu.live == live  # these are the CPU's altogether
            found = slide.read_region((0, 0), slide.dimensions, device="cuda")
            np.testing.assert_array_equal(found, pixels)
            assert decoded(slide) == (3 * TILES, 0)
        assert len(caplog.records) == 1

    def test_of_one_slide_only(self, files, wrong, host_gpu):
        path, pixels = files["jpeg"]
        with open_slide(files["33003"][0], device="cuda") as slide:
            slide.levels[0][...]
        with open_slide(path, device="cuda") as slide:
            np.testing.assert_array_equal(read_cold(slide), pixels)
            assert decoded(slide) == (0, TILES)


class TestDevices:
    def test_host_reads_of_what_it_cannot_decode_never_touch_it(self, files, host_gpu):
        path, pixels = files["raw"]
        with open_slide(path, device="cuda") as slide:
            np.testing.assert_array_equal(slide.levels[0][...], pixels)
            np.testing.assert_array_equal(slide.read_region((0, 0), slide.dimensions), pixels)
            assert host_gpu.live == host_gpu.synchronised == 0
            assert slide.stats()["decoded"] == {"cpu": 2 * TILES}

    def test_pixels_on_the_device_of_a_slide_by_the_cpu(self, files, host_gpu):
        path, pixels = files["jpeg"]
        with open_slide(path, device="cpu") as slide:
            np.testing.assert_array_equal(slide.levels[0][...], pixels)
            assert host_gpu.live == 0
            for _ in range(2):
                found = slide.read_region((0, 0), slide.dimensions, device="cuda")
                np.testing.assert_array_equal(found, pixels)
            assert decoded(slide) == (2 * TILES, 0)
            assert slide.stats()["cache_hits"] == TILES

    @pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", "auto"])
    def test_a_pickled_slide_keeps_its_own(self, files, host_machine, host_gpu, device):
        host_machine.driver = False  # "auto" starts nothing
        path, pixels = files["jpeg"]
        with open_slide(path, device=device) as slide:
            level = pickle.dumps(slide.levels[0])
            with pickle.loads(pickle.dumps(slide)) as other:
                assert other.device == device
                np.testing.assert_array_equal(other.levels[0][...], pixels)
                by_device = device.startswith("cuda")
                assert decoded(other) == ((0, TILES) if by_device else (TILES, 0))
        copy = pickle.loads(level)
        np.testing.assert_array_equal(copy[...], pixels)
        copy.slide.close()

    def test_no_such_device(self, files, host_gpu):
        with pytest.raises(DeviceError, match="no device 'cuda:1'"):
            open_slide(files["jpeg"][0], device="cuda:1")
        with open_slide(files["jpeg"][0], device="cuda") as slide:
            with pytest.raises(DeviceError, match="no device 'cuda:1'"):
                slide.read_region((0, 0), (5, 5), device="cuda:1")
            with pytest.raises(DeviceError, match="device 'auto'; use"):
                slide.read_region((0, 0), (5, 5), device="auto")

    def test_cuda_is_the_slides_own(self, files, host_runtime, monkeypatch):
        asked = []
        worker = host_runtime.devices.worker
        monkeypatch.setattr(
            host_runtime.devices, "worker", lambda index: asked.append(index) or worker(0)
        )
        with open_slide(files["jpeg"][0], device="cuda:3") as slide:
            slide.read_region((0, 0), (5, 5), device="cuda")
            slide.levels[0][0, 0]
            assert set(asked) == {3}
            slide.read_region((0, 0), (5, 5), device="cuda:0")
            assert asked[-1] == 0

    def test_slides_share_one_worker(self, files, host_runtime):
        workers = set()
        for _ in range(3):
            with open_slide(files["jpeg"][0], device="cuda") as slide:
                slide.levels[0][...]
                workers.add(host_runtime.devices.worker(0))
        assert len(workers) == 1
        assert len(gpu_threads()) <= 1


class TestWithoutCuda:
    @pytest.fixture(params=["driver", "CuPy", "nvImageCodec"])
    def lacking(self, request, monkeypatch, fresh_runtime):
        """A machine without one of these; gives what an error has to say."""
        monkeypatch.setattr(driver, "driver_available", lambda: request.param != "driver")
        if request.param == "driver":
            return "'cuda:[01]' can't be used.*no NVIDIA driver.*device='cpu'"
        if request.param == "CuPy":
            monkeypatch.setitem(sys.modules, "cupy", None)
            return r"'cuda:[01]' can't be used.*cupy.*napari-wsigpu\[cuda12\].*device='cpu'"
        monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=0)))
        monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", None)
        return r"nvImageCodec.*napari-wsigpu\[cuda12\]"

    @pytest.mark.parametrize("device", ["cuda", "cuda:1"])
    def test_at_open(self, files, lacking, device):
        for _ in range(2):
            with pytest.raises(DeviceError, match=lacking) as info:
                open_slide(files["jpeg"][0], device=device)
            assert "\n" not in str(info.value)

    def test_at_a_read(self, files, lacking):
        path, pixels = files["jpeg"]
        with open_slide(path, device="cpu") as slide:
            with pytest.raises(DeviceError, match=lacking):
                slide.read_region((0, 0), (5, 5), device="cuda")
            with pytest.raises(DeviceError, match=lacking):
                next(slide.read_regions([(0, 0)], (5, 5), device="cuda"))
            np.testing.assert_array_equal(slide.levels[0][...], pixels)
            assert decoded(slide) == (TILES, 0)

    def test_an_empty_region_too(self, files, lacking):
        with (
            open_slide(files["jpeg"][0], device="cpu") as slide,
            pytest.raises(DeviceError, match=lacking),
        ):
            slide.read_region((0, 0), (0, 0), device="cuda")


class TestTilesOfDisplays:
    """`read_tiles` is held against the levels' own pixels."""

    @staticmethod
    def keys(slide, level=0, *, srgb=False):
        image = slide.levels[level].layout
        color = "srgb" if srgb else "stored"
        rows, columns = -(-image.height // TILE), -(-image.width // TILE)
        return [
            TileKey(slide._number, level, row, column, color)
            for row in range(rows)
            for column in range(columns)
        ]

    @staticmethod
    def check(found, pixels):
        for key, tile in found.items():
            top, left = key.row * TILE, key.column * TILE
            np.testing.assert_array_equal(tile, pixels[top : top + TILE, left : left + TILE])

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_all_and_some_tiles(self, files, host_gpu, device, kind):
        path, pixels = files[kind]
        with open_slide(path, device=device) as slide:
            keys = self.keys(slide)
            for some in (keys[7:8], keys[::3], keys):
                found = slide.displayed.read_tiles(some)
                assert list(found) == some
                self.check(found, pixels)
            by_cpu, by_device = decoded(slide)[:2]
            assert (by_cpu, by_device) == (
                (TILES, 0) if device == "cpu" or kind == "raw" else (0, TILES)
            )

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_tiles_are_in_the_hosts_cache_then(self, files, host_gpu, device):
        path, pixels = files["jpeg"]
        with open_slide(path, device=device) as slide:
            keys = self.keys(slide)
            slide.displayed.read_tiles(keys)
            for key in keys:
                part = pixels[key.row * TILE :, key.column * TILE :][:TILE, :TILE]
                kept = runtime.default().tiles.get(key)  # at an edge it may be whole
                np.testing.assert_array_equal(kept[: part.shape[0], : part.shape[1]], part)
            slide.clear_cache()
            assert all(runtime.default().tiles.get(key) is None for key in keys)

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_failed_tile_is_hatched_and_not_kept(self, tmp_path, host_gpu, device):
        numbers = iter(range(TILES))

        def encode(tile):
            data = slides.jpeg_ycbcr(tile)
            return data[: len(data) // 2] if next(numbers) == 7 else data

        page = tiffbytes.page(
            slides.picture(HEIGHT, WIDTH), encode, tile=(TILE, TILE), compression=7, photometric=6
        )
        path = tiffbytes.write(tmp_path / "damaged.tif", [page])
        with open_slide(path, device=device) as slide:
            exact = slide.level_array(0, tolerant=True)[...]
            slide.clear_cache()
            keys = self.keys(slide)
            for _ in range(2):
                found = slide.displayed.read_tiles(keys)
                damaged = found.pop(keys[7])
                self.check(found, exact)
                assert runtime.default().tiles.get(keys[7]) is None
                assert {*damaged.ravel().tolist()} == {0, 255}
            assert runtime.default().tiles.get(keys[8]) is not None
            assert slide.stats()["failed"] == 1

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_levels_between_stored_ones(self, tmp_path, host_gpu, device, monkeypatch):
        monkeypatch.setattr("napari_wsigpu.slide.slide.LARGEST_OVERVIEW", 60)
        pixels = slides.picture(HEIGHT, WIDTH)
        pages = [
            tiffbytes.page(np.ascontiguousarray(level), tile=(32, 48), **KINDS["jpeg"])
            for level in (pixels, pixels[::4, ::4])
        ]
        path = tiffbytes.write(tmp_path / "slide.tif", pages)
        with open_slide(path, device=device) as slide:
            [number] = [level.number for level in slide.pyramid if level.inserted]
            exact = slides.average(slide.levels[0][...], 2)
            [key] = [TileKey(slide._number, number, 0, 0)]
            tile = slide.displayed.read_tiles([key])[key]
            np.testing.assert_array_equal(tile, exact[: tile.shape[0], : tile.shape[1]])

    @pytest.mark.parametrize(("factor", "parts"), [(4, 4), (8, 4)])
    def test_computed_tiles_are_made_of_so_many_stored_ones(self, tmp_path, factor, parts):
        pixels = slides.picture(512, 512, 3)
        pages = [
            tiffbytes.page(np.ascontiguousarray(level), tile=(32, 32), **KINDS["jpeg"])
            for level in (pixels, pixels[::factor, ::factor])
        ]
        path = tiffbytes.write(tmp_path / "slide.tif", pages)
        with open_slide(path, device="cpu") as slide:
            assert slide.displayed.parts_of(0) == 1
            inserted = [level.number for level in slide.pyramid if level.inserted]
            for power, number in enumerate(inserted):
                slide.clear_cache()
                before = slide.stats()["decoded"]["cpu"]
                slide.displayed.read_tiles([TileKey(slide._number, number, 1, 1)])
                made_of = slide.stats()["decoded"]["cpu"] - before
                assert slide.displayed.parts_of(number) == made_of == parts * 4**power

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    @pytest.mark.parametrize("error", [SlideReadError, SlideChangedError])
    def test_a_file_that_can_not_be_read_now_is_no_background(
        self, files, host_gpu, device, error, monkeypatch
    ):
        path, pixels = files["jpeg"]
        with open_slide(path, device=device) as slide:
            keys = self.keys(slide)

            def fail(*given):
                raise error("The file is gone; try again.")

            with monkeypatch.context() as patch:
                patch.setattr(slide._source, "read", fail)
                patch.setattr(slide._source, "read_joined", fail)
                patch.setattr(slide._source, "descriptor", fail)
                with pytest.raises(error, match="gone"):
                    slide.displayed.read_tiles(keys)
            assert slide.stats()["failed"] == 0
            self.check(slide.displayed.read_tiles(keys), pixels)

    def test_a_closed_slide_says_so(self, files):
        with open_slide(files["raw"][0]) as slide:
            keys = self.keys(slide)
        with pytest.raises(SlideClosedError):
            slide.displayed.read_tiles(keys)
