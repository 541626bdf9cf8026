import logging
import threading
import time

import pytest

from napari_wsigpu import open_slide
from napari_wsigpu.gpu.device.devices import Devices, device_index
from napari_wsigpu.model.errors import DeviceError
from tests.fakes.host_device import HostDevice
from tests.writers import slides, tiffbytes


def write(tmp_path, **options):
    item = tiffbytes.page(slides.picture(40, 50), bytes, **options)
    return tiffbytes.write(tmp_path / "slide.tif", [item])


@pytest.mark.parametrize("device", ["", "gpu", "cpu:0", "cuda:", "cuda:x", "CPU"])
def test_unknown_devices_are_refused(tmp_path, device):
    with pytest.raises(DeviceError, match="is not a device"):
        open_slide(write(tmp_path), device=device)


@pytest.mark.parametrize(
    ("device", "index"),
    [("auto", None), ("cpu", None), ("cuda", 0), ("cuda:0", 0), ("cuda:1", 1), ("cuda:12", 12)],
)
def test_device_index(device, index):
    assert device_index(device) == index


@pytest.mark.parametrize("device", ["cuda: 1", "cuda:-1", "cuda:1 ", "xcuda:1", 0, None])
def test_no_device_index(device):
    with pytest.raises(DeviceError, match="is not a device"):
        device_index(device)


class Decoder:
    def close(self):
        pass


class FakeGpu(HostDevice):
    """A device whose start and decoders a test controls."""

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
def gpu():
    """The only device of a machine with a driver; it has not been started."""
    device, made = FakeGpu(), []

    def opened(index):
        made.append(index)
        assert device.go.wait(20)
        device.start()
        return device

    device.made, device.driver = made, True
    device.devices = Devices(opened, lambda: device.driver)
    yield device
    device.go.set()
    device.devices.close()


def soon(condition):
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.002)
    return False


def starting():
    return [thread for thread in threading.enumerate() if thread.name == "wsigpu-start"]


class TestWorkers:
    def test_each_device_has_its_own_cache(self, gpu):
        assert gpu.devices.worker(0) is gpu.devices.worker(0)
        assert gpu.devices.worker(1) is not gpu.devices.worker(0)
        assert gpu.made == [0, 1]

    def test_threads_get_the_same(self, gpu):
        gpu.go.clear()
        found = []
        threads = [
            threading.Thread(target=lambda: found.append(gpu.devices.worker(0))) for _ in range(4)
        ]
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
            gpu.devices.worker(0)
        gpu.start = lambda: None
        assert gpu.devices.worker(0).device is gpu


class TestBackgroundStart:
    def test_the_cpu_decodes_until_it_is_ready(self, gpu):
        gpu.go.clear()
        start = gpu.devices.background
        for _ in range(5):
            assert start.worker("jpeg") is None
            time.sleep(0.005)
        gpu.go.set()
        assert soon(lambda: start.worker("jpeg") is not None)
        assert start.worker("jpeg") is gpu.devices.worker(0)
        assert gpu.made == [0]
        assert gpu.kinds == ["jpeg"]
        assert soon(lambda: not starting())

    def test_each_format_starts_on_first_use(self, gpu):
        start = gpu.devices.background
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

    def test_no_driver_no_thread(self, gpu):
        gpu.driver = False
        before = set(threading.enumerate())
        start = gpu.devices.background
        for _ in range(3):
            assert start.worker("jpeg") is None
        assert set(threading.enumerate()) <= before
        assert gpu.made == []

    def test_failed_start_does_not_warn(self, gpu, caplog):
        def fail():
            raise DeviceError("CUDA can't be initialized")

        gpu.start = fail
        caplog.set_level(logging.INFO)
        start = gpu.devices.background
        assert start.worker("jpeg") is None
        assert soon(lambda: caplog.records and not starting())
        assert [record.levelname for record in caplog.records] == ["INFO"]
        assert "CUDA can't be initialized" in caplog.text
        for _ in range(3):
            assert start.worker("jpeg") is None
        assert gpu.made == [0]

    def test_a_kind_without_engine_is_never_ready(self, gpu):
        def decoder(kind):
            gpu.kinds.append(kind)
            raise DeviceError("no engine")

        gpu.decoder = decoder
        start = gpu.devices.background
        assert start.worker("jpeg") is None
        assert soon(lambda: gpu.kinds)
        gpu.devices.worker(0).close()
        assert start.worker("jpeg") is None

    @pytest.mark.parametrize("broken", ["start", "decoder"])
    def test_any_failed_start_does_not_warn(self, gpu, broken, monkeypatch):
        ended = []
        monkeypatch.setattr(threading, "excepthook", lambda given: ended.append(given.thread.name))

        def fail(*_):
            gpu.kinds.append("tried")
            raise RuntimeError("cudaErrorDevicesUnavailable")

        setattr(gpu, broken, fail)
        start = gpu.devices.background
        start.worker("jpeg")
        assert soon(lambda: gpu.kinds and not starting())
        gpu.devices.close()
        assert start.worker("jpeg") is None
        assert ended == []
