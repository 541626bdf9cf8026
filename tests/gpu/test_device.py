"""Behavior of `CudaDevice` that can be tested without a GPU."""

import gc
import os
import subprocess
import sys
import threading
import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from napari_wsigpu.gpu.device import cuda, driver
from napari_wsigpu.gpu.device.cuda import CudaDevice, PinnedMemory
from napari_wsigpu.gpu.jpeg import jpeg_engine, nvimagecodec_library
from napari_wsigpu.model.errors import DeviceError

VARIABLES = (driver.CONNECTIONS, "PYNVIMGCODEC_VERBOSITY")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    """Both variables are removed again, whatever sets them."""
    for name in (*VARIABLES, jpeg_engine.JPEG_ENGINE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def with_driver(monkeypatch):
    monkeypatch.setattr(driver, "driver_available", lambda: True)


def variables():
    return [os.environ.get(name) for name in VARIABLES]


class FakeError(RuntimeError):
    pass


class Buffer(bytearray):
    """Like CuPy's page-locked memory, this is not an array."""


class Pool:
    """Returns memory, and counts the bytes in use."""

    def __init__(self):
        self.live = 0
        self.full = False

    def malloc(self, size):
        if self.full:
            raise FakeError("cudaErrorMemoryAllocation")
        memory = Buffer(-(-size // 512) * 512)
        self.live += size
        weakref.finalize(memory, self.free, size)
        return memory

    def free(self, size):
        self.live -= size


def fake_cupy(count=1):
    def device_count():
        if isinstance(count, Exception):
            raise count
        return count

    pools = []
    runtime = SimpleNamespace(
        getDeviceCount=device_count,
        getDeviceProperties=lambda index: {"name": b"NVIDIA H200", "pciBusID": index},
        CUDARuntimeError=FakeError,
    )
    return SimpleNamespace(
        pools=pools,
        cuda=SimpleNamespace(
            runtime=runtime,
            PinnedMemoryPool=lambda: pools.append(Pool()) or pools[-1],
            Device=lambda index: nullcontext(index),
        ),
    )


@pytest.fixture
def with_devices(with_driver, monkeypatch):
    """Simulate CuPy, nvImageCodec and a number of devices."""

    def make(count):
        monkeypatch.setattr(driver, "import_module", lambda name: fake_cupy(count))
        monkeypatch.setattr(cuda, "Library", SimpleNamespace)

    return make


class TestStart:
    @pytest.fixture
    def no_driver(self, monkeypatch):
        def missing(name):
            raise OSError(f"{name}: cannot open shared object file")

        monkeypatch.setattr(driver.ctypes, "CDLL", missing)

    def test_without_a_driver(self, no_driver):
        assert not driver.driver_available()
        with pytest.raises(
            DeviceError, match=r"^'cuda:0' can't be used because .*driver"
        ) as caught:
            CudaDevice(0)
        message = str(caught.value)
        assert "device='cpu'" in message
        assert message.count(".") == 1
        assert message.endswith(".")
        assert variables() == [None, None]

    def test_without_cupy(self, with_driver, monkeypatch):
        def missing(name):
            raise ModuleNotFoundError(f"No module named '{name}'")

        monkeypatch.setattr(driver, "import_module", missing)
        with pytest.raises(DeviceError, match=r"^'cuda:2' .*No module named 'cupy'.*\[cuda12\]"):
            CudaDevice(2)
        assert variables() == ["32", "0"]

    @pytest.mark.parametrize("error", [ImportError, OSError, RuntimeError])
    def test_with_a_broken_cupy(self, with_driver, monkeypatch, error):
        def broken(name):
            raise error("libnvrtc.so.12")

        monkeypatch.setattr(driver, "import_module", broken)
        with pytest.raises(DeviceError, match=r"cupy .*libnvrtc\.so\.12") as caught:
            CudaDevice(0)
        assert isinstance(caught.value.__cause__, error)

    def test_without_nvimagecodec(self, with_devices, monkeypatch):
        def missing():
            raise DeviceError("nvImageCodec is not installed")

        with_devices(1)
        monkeypatch.setattr(cuda, "Library", missing)
        with pytest.raises(DeviceError, match="nvImageCodec"):
            CudaDevice(0)

    def test_unchanged_images_are_not_set_again(self, with_devices, monkeypatch):
        for name in VARIABLES:
            monkeypatch.setenv(name, "7")
        with_devices(1)
        CudaDevice(0)
        assert variables() == ["7", "7"]

    def test_cuda_does_not_start(self, with_devices):
        with_devices(FakeError("cudaErrorInsufficientDriver"))
        with pytest.raises(DeviceError, match=r"cudaErrorInsufficientDriver.*device='cpu'"):
            CudaDevice(0)

    @pytest.mark.parametrize(("index", "count"), [(1, 1), (4, 4), (9, 4)])
    def test_device_that_does_not_exist(self, with_devices, index, count):
        with_devices(count)
        with pytest.raises(DeviceError, match=f"'cuda:{index}'.*'cuda:{count - 1}'"):
            CudaDevice(index)
        assert CudaDevice(count - 1).name == f"cuda:{count - 1}"

    def test_device_model(self, with_devices):
        with_devices(2)
        assert CudaDevice(1).model == "NVIDIA H200"

    def test_no_device_at_all(self, with_devices):
        with_devices(0)
        with pytest.raises(DeviceError) as caught:
            CudaDevice(0)
        assert "cuda:-1" not in str(caught.value)


class TestEngines:
    @pytest.fixture
    def device(self, with_devices):
        with_devices(1)
        device = CudaDevice(0)
        device._library.decoder = lambda *arguments: arguments
        return device

    @pytest.fixture
    def works(self, monkeypatch):
        def these(*backends):
            monkeypatch.setattr(cuda, "decodes", lambda device, decoder, *_: decoder[1] in backends)

        return these

    def test_hardware_engine(self, device, works):
        works(nvimagecodec_library.HARDWARE)
        assert device.decoder("jpeg") == ((0, nvimagecodec_library.HARDWARE, "", 4), "hardware")

    def test_without_an_engine(self, device, works):
        works()
        with pytest.raises(DeviceError, match="no JPEG engine on 'cuda:0'"):
            device.decoder("jpeg")

    def test_engine_can_be_disabled(self, device, works, monkeypatch):
        monkeypatch.setenv(jpeg_engine.JPEG_ENGINE, "kernels")
        works(nvimagecodec_library.HARDWARE)
        with pytest.raises(DeviceError):
            device.decoder("jpeg")

    def test_jpeg_2000(self, device):
        assert device.decoder("jpeg2000") == ((0, cuda.GPU_ONLY), "GPU")


def test_flags_are_page_locked(with_devices, monkeypatch):
    with_devices(1)
    device = CudaDevice(0)
    flags = device.pinned_array(320, np.int32)
    assert (flags.dtype, flags.tolist()) == (np.int32, [0] * 320)
    device.pinned._pool.full = True
    with pytest.raises(MemoryError):
        device.pinned_array(320, np.int32)


def test_stream_object_is_returned_unchanged(with_devices):
    with_devices(1)
    stream = SimpleNamespace(ptr=5)
    assert CudaDevice(0).as_stream(stream) is stream


def test_a_stream_is_made_on_its_device(with_devices):
    """Otherwise it would belong to the thread's current device."""
    with_devices(2)
    device, current, made = CudaDevice(1), [], []

    @contextmanager
    def activate(index):
        current.append(index)
        yield
        current.pop()

    device._cupy.cuda.Device = activate
    device._cupy.cuda.Stream = lambda **_: made.append(list(current))
    device.new_stream()
    assert made == [[1]]
    assert current == []


class TestPinnedMemory:
    @pytest.fixture
    def cupy(self):
        return fake_cupy()

    def test_arrays(self, cupy):
        memory = PinnedMemory(cupy)
        for shape, dtype in [((3, 5), "uint8"), ((4, 5, 3), "uint16"), ((7,), "int32")]:
            pixels = memory.empty(shape, np.dtype(dtype))
            assert pixels.shape == shape
            assert pixels.dtype == dtype
            pixels[...] = 1

    def test_memory_is_released_with_the_last_view(self, cupy):
        memory = PinnedMemory(cupy, budget=1_000_000)
        pixels = memory.empty((1000, 1000), np.dtype(np.uint8))
        assert cupy.pools[0].live == 1_000_000
        views = [pixels[2:4], pixels.reshape(-1)[::2], pixels.view(np.uint16)]
        del pixels
        while views:
            assert cupy.pools[0].live == 1_000_000
            assert memory.empty((500_000,), np.dtype(np.uint8)).size == 500_000
            views.pop()
        assert cupy.pools[0].live == 0
        again = memory.empty((1_000_000,), np.dtype(np.uint8))
        assert cupy.pools[0].live == again.nbytes

    def test_ordinary_memory_beyond_the_budget(self, cupy):
        memory = PinnedMemory(cupy, budget=1_000_000)
        kept = [memory.empty((300_000,), np.dtype(np.uint8)) for _ in range(5)]
        assert cupy.pools[0].live == 900_000
        assert all(pixels.shape == (300_000,) for pixels in kept)
        del kept[4], kept[3]  # ordinary memory: the budget does not change
        kept.append(memory.empty((300_000,), np.dtype(np.uint8)))
        assert cupy.pools[0].live == 900_000
        del kept[0]
        kept.append(memory.empty((300_000,), np.dtype(np.uint8)))
        assert cupy.pools[0].live == 900_000

    def test_array_larger_than_the_budget(self, cupy):
        memory = PinnedMemory(cupy, budget=1_000_000)
        assert memory.empty((250_001,), np.dtype(np.int32)).nbytes == 1_000_004
        assert cupy.pools[0].live == 0
        assert memory.empty((250_000,), np.dtype(np.int32)).nbytes == 1_000_000

    def test_nothing(self, cupy):
        assert PinnedMemory(cupy).empty((0, 7), np.dtype(np.uint8)).shape == (0, 7)

    def test_the_system_has_no_more(self, cupy):
        memory = PinnedMemory(cupy, budget=1_000_000)
        cupy.pools[0].full = True
        assert memory.empty((600_000,), np.dtype(np.uint8)).shape == (600_000,)
        cupy.pools[0].full = False
        pixels = memory.empty((600_000,), np.dtype(np.uint8))
        assert cupy.pools[0].live == pixels.nbytes

    def test_required_page_locked_memory(self, cupy):
        """The budget limits only what callers keep."""
        memory = PinnedMemory(cupy, budget=1_000_000)
        whole = memory.empty((1_000_000,), np.dtype(np.uint8))
        more = memory.empty((250_001,), np.dtype(np.int32), required=True)
        assert cupy.pools[0].live == whole.nbytes + more.nbytes
        cupy.pools[0].full = True
        with pytest.raises(MemoryError, match="page-locked"):
            memory.empty((300,), np.dtype(np.int32), required=True)
        cupy.pools[0].full = False
        del more
        assert cupy.pools[0].live == whole.nbytes

    def test_collection_under_the_lock_does_not_deadlock(self, cupy):
        memory = PinnedMemory(cupy, budget=1_000_000)
        arrays = [memory.empty((1_000_000,), np.dtype(np.uint8))]

        def collect():
            with memory._lock:
                arrays.clear()

        thread = threading.Thread(target=collect, daemon=True)
        thread.start()
        thread.join(5)
        assert not thread.is_alive()
        assert memory.empty((1_000_000,), np.dtype(np.uint8)).nbytes == cupy.pools[0].live

    def test_many_threads(self, cupy):
        memory = PinnedMemory(cupy, budget=1_000_000)

        def work():
            for _ in range(300):
                memory.empty((100_000,), np.dtype(np.uint8))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        gc.collect()
        whole = memory.empty((1_000_000,), np.dtype(np.uint8))
        assert cupy.pools[0].live == whole.nbytes


QUIET = """
import os, sys
import napari_wsigpu
import napari_wsigpu.gpu.device.cuda, napari_wsigpu.gpu.jpeg.nvimagecodec
import napari_wsigpu.reading.reader
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & {"cupy", "nvidia"}, loaded
assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ
"""


def test_import_loads_no_cuda_and_prints_nothing():
    command = [sys.executable, "-W", "error", "-c", QUIET]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
