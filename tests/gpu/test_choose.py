import logging
import threading
import time

import pytest

from napari_wsigpu import open_slide
from napari_wsigpu.errors import DeviceError, UnsupportedSlideError
from napari_wsigpu.gpu import choose
from napari_wsigpu.gpu.choose import (
    FEWEST_TILES,
    SHARES,
    TRIALS,
    BackgroundStart,
    Pace,
    device_index,
    gpu_worker,
)
from tests import slides, tiffbytes
from tests.host_device import HostDevice
from tests.tiffbytes import SHORT


def write(tmp_path, **options):
    item = tiffbytes.page(slides.picture(40, 50), bytes, **options)
    return tiffbytes.write(tmp_path / "slide.tif", [item])


@pytest.mark.parametrize("device", ["", "gpu", "cpu:0", "cuda:", "cuda:x", "CPU"])
def test_unknown_devices_are_refused(tmp_path, device):
    with pytest.raises(DeviceError, match="is no device"):
        open_slide(write(tmp_path), device=device)


@pytest.mark.parametrize(
    ("compression", "name"),
    [(2, "CCITTRLE"), (6, "OJPEG"), (34661, "JBIG"), (12345, "12345")],
)
def test_unsupported_compression_is_named(tmp_path, compression, name):
    path = write(tmp_path, compression=compression)
    with pytest.raises(UnsupportedSlideError, match=rf"slide\.tif.* \(?{name}\b"):
        open_slide(path)


def test_unsupported_predictor_is_named(tmp_path):
    path = write(tmp_path, compression=8, more={317: (SHORT, 34892)})
    with pytest.raises(UnsupportedSlideError, match=r"slide\.tif.*predictor.* 34892\b"):
        open_slide(path)


def test_a_level_that_cannot_be_decoded_is_noticed_at_open(tmp_path):
    pixels = slides.picture(100, 100)
    pages = [
        tiffbytes.page(pixels, bytes),
        tiffbytes.page(pixels[::2, ::2], bytes, compression=34661, subfile_type=1),
    ]
    path = tiffbytes.write(tmp_path / "slide.tif", pages)
    with pytest.raises(UnsupportedSlideError, match="JBIG"):
        open_slide(path)


@pytest.mark.parametrize(
    ("device", "index"),
    [("auto", None), ("cpu", None), ("cuda", 0), ("cuda:0", 0), ("cuda:1", 1), ("cuda:12", 12)],
)
def test_device_index(device, index):
    assert device_index(device) == index


@pytest.mark.parametrize("device", ["cuda: 1", "cuda:-1", "cuda:1 ", "xcuda:1", 0, None])
def test_no_device_index(device):
    with pytest.raises(DeviceError, match="is no device"):
        device_index(device)


class TestPace:
    def learn(self, pace, seconds, tiles=100, key="jpeg"):
        """Have `choose` followed until all is settled; return what was chosen."""
        chosen = []
        while not pace.settled(key):
            way = pace.choose(key)
            chosen.append(way)
            pace.note(key, way, tiles, tiles * seconds[way])
        return chosen

    @pytest.mark.parametrize("fastest", SHARES)
    def test_the_fastest_is_used_once_each_was_tried(self, fastest):
        pace = Pace()
        chosen = self.learn(pace, {way: 1 if way == fastest else 2 for way in SHARES})
        assert {way: chosen.count(way) for way in SHARES} == dict.fromkeys(SHARES, TRIALS)
        assert pace.choose("jpeg") == fastest

    def test_one_slow_read_changes_nothing(self):
        pace = Pace()
        self.learn(pace, {"gpu": 1, "cpu": 2, "both": 3})
        pace.note("jpeg", "gpu", 100, 10_000)
        assert pace.choose("jpeg") == "gpu"

    def test_one_fast_read_proves_nothing(self):
        pace = Pace()
        self.learn(pace, {"gpu": 3, "cpu": 2, "both": 4})
        pace.note("jpeg", "gpu", 100, 1)
        assert pace.choose("jpeg") == "cpu"

    def test_what_becomes_slow_is_left(self):
        pace = Pace()
        self.learn(pace, {"gpu": 1, "cpu": 2, "both": 3})
        for _ in range(50):
            pace.note("jpeg", "gpu", 100, 100)
        reads = 0
        while pace.choose("jpeg") == "gpu":
            pace.note("jpeg", "gpu", 100, 1000)
            reads += 1
            assert reads < 10
        assert pace.choose("jpeg") == "cpu"

    def test_the_time_is_that_of_a_tile(self):
        pace = Pace()
        for _ in range(TRIALS):
            pace.note("jpeg", "gpu", 1000, 2)
            pace.note("jpeg", "cpu", 20, 1)
            pace.note("jpeg", "both", 20, 1)
        assert pace.choose("jpeg") == "gpu"

    def test_small_reads_teach_nothing(self):
        pace = Pace()
        for _ in range(10 * TRIALS):
            for way in SHARES:
                pace.note("jpeg", way, FEWEST_TILES - 1, 1)
        assert not pace.settled("jpeg")
        assert pace.choose("jpeg") == SHARES[0]
        for _ in range(TRIALS):
            pace.note("jpeg", SHARES[0], FEWEST_TILES, 1)
        assert pace.choose("jpeg") != SHARES[0]

    def test_kinds_of_tiles_are_apart(self):
        pace = Pace()
        self.learn(pace, {"gpu": 1, "cpu": 2, "both": 3}, key="jpeg")
        self.learn(pace, {"gpu": 3, "cpu": 2, "both": 1}, key="jpeg2000")
        assert pace.choose("jpeg") == "gpu"
        assert pace.choose("jpeg2000") == "both"
        assert not pace.settled("other")

    def test_both_finish_together(self):
        pace = Pace()
        assert pace.share("jpeg") == 0.5
        self.learn(pace, {"gpu": 1, "cpu": 3, "both": 1})
        share = pace.share("jpeg")
        assert share * 1 == pytest.approx((1 - share) * 3)


class Decoder:
    def close(self):
        pass


class FakeGpu(HostDevice):
    """A device whose start and decoders a test takes into its own hands."""

    def __init__(self):
        super().__init__()
        self.start = lambda: None
        self.go = threading.Event()
        self.go.set()
        self.kinds = []

    def decoder(self, kind):
        self.kinds.append(kind)
        return Decoder(), "GPU"


@pytest.fixture
def gpu(monkeypatch):
    """The only device of a machine with a driver, not started yet."""
    device, made, workers = FakeGpu(), [], {}

    def cuda_device(index):
        made.append(index)
        assert device.go.wait(20)
        device.start()
        return device

    device.made = made
    monkeypatch.setattr(choose, "driver_is_there", lambda: True)
    monkeypatch.setattr(choose, "CudaDevice", cuda_device)
    monkeypatch.setattr(choose, "_workers", workers)
    yield device
    device.go.set()
    for worker in workers.values():
        worker.close()


def soon(condition):
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.002)
    return False


def starting():
    return [thread for thread in threading.enumerate() if thread.name == "wsigpu-start"]


class TestGpuWorker:
    def test_each_device_has_one(self, gpu):
        assert gpu_worker(0) is gpu_worker(0)
        assert gpu_worker(1) is not gpu_worker(0)
        assert gpu.made == [0, 1]

    def test_threads_get_the_same(self, gpu):
        gpu.go.clear()
        found = []
        threads = [threading.Thread(target=lambda: found.append(gpu_worker(0))) for _ in range(4)]
        for thread in threads:
            thread.start()
        gpu.go.set()
        for thread in threads:
            thread.join(20)
        assert len(found) == 4
        assert len(set(map(id, found))) == 1
        assert gpu.made == [0]

    def test_a_device_that_failed_is_tried_again(self, gpu):
        def fail():
            raise DeviceError("no device")

        gpu.start = fail
        with pytest.raises(DeviceError):
            gpu_worker(0)
        gpu.start = lambda: None
        assert gpu_worker(0).device is gpu


class TestBackgroundStart:
    def test_the_cpu_decodes_until_it_is_ready(self, gpu):
        gpu.go.clear()
        start = BackgroundStart()
        for _ in range(5):
            assert start.worker("jpeg") is None
            time.sleep(0.005)
        gpu.go.set()
        assert soon(lambda: start.worker("jpeg") is not None)
        assert start.worker("jpeg") is gpu_worker(0)
        assert gpu.made == [0]
        assert gpu.kinds == ["jpeg"]
        assert soon(lambda: not starting())

    def test_each_kind_is_started_when_it_is_wanted(self, gpu):
        start = BackgroundStart()
        start.worker("jpeg")
        assert soon(lambda: start.worker("jpeg") is not None)
        assert gpu.kinds == ["jpeg"]
        go, real = threading.Event(), gpu.decoder
        gpu.decoder = lambda kind: go.wait(20) and real(kind)
        for _ in range(3):
            assert start.worker("jpeg2000") is None
            assert start.worker("jpeg") is not None
        go.set()
        assert soon(lambda: start.worker("jpeg2000") is start.worker("jpeg"))
        assert gpu.kinds == ["jpeg", "jpeg2000"]

    def test_no_driver_no_thread(self, gpu, monkeypatch):
        monkeypatch.setattr(choose, "driver_is_there", lambda: False)
        before = set(threading.enumerate())
        start = BackgroundStart()
        for _ in range(3):
            assert start.worker("jpeg") is None
        assert set(threading.enumerate()) <= before
        assert gpu.made == []

    def test_a_broken_start_is_silent(self, gpu, caplog):
        def fail():
            raise DeviceError("CUDA does not start")

        gpu.start = fail
        caplog.set_level(logging.INFO)
        start = BackgroundStart()
        assert start.worker("jpeg") is None
        assert soon(lambda: caplog.records and not starting())
        assert [record.levelname for record in caplog.records] == ["INFO"]
        assert "CUDA does not start" in caplog.text
        for _ in range(3):
            assert start.worker("jpeg") is None
        assert gpu.made == [0]

    def test_a_kind_without_engine_is_never_ready(self, gpu):
        def decoder(kind):
            gpu.kinds.append(kind)
            raise DeviceError("no engine")

        gpu.decoder = decoder
        start = BackgroundStart()
        assert start.worker("jpeg") is None
        assert soon(lambda: gpu.kinds)
        gpu_worker(0).close()
        assert start.worker("jpeg") is None

    @pytest.mark.parametrize("broken", ["start", "new_stream", "decoder"])
    def test_any_broken_start_is_silent(self, gpu, broken, monkeypatch):
        ended = []
        monkeypatch.setattr(threading, "excepthook", lambda given: ended.append(given.thread.name))

        def fail(*_):
            gpu.kinds.append("tried")
            raise RuntimeError("cudaErrorDevicesUnavailable")

        setattr(gpu, broken, fail)
        start = BackgroundStart()
        start.worker("jpeg")
        assert soon(lambda: gpu.kinds and not starting())
        for worker in choose._workers.values():
            worker.close()
        assert start.worker("jpeg") is None
        assert ended == []
