"""What can be said of a CUDA device where there is none."""

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
from napari_wsigpu.gpu.jpeg import jpeg_engine, library
from napari_wsigpu.model.errors import DeviceError

VARIABLES = (driver.CONNECTIONS, "PYNVIMGCODEC_VERBOSITY")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    """Both are removed again, whoever sets them."""
    for name in (*VARIABLES, jpeg_engine.JPEG_ENGINE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def with_driver(monkeypatch):
    monkeypatch.setattr(driver, "driver_is_there", lambda: True)


def variables():
    return [os.environ.get(name) for name in VARIABLES]


class FakeError(RuntimeError):
    pass


class Buffer(bytearray):
    """No array, as CuPy's page-locked memory is none."""


class Pool:
    """Hands out memory, and knows what is in use."""

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
    """Pretend that CuPy and nvImageCodec are there, and so many devices."""

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
        assert not driver.driver_is_there()
        with pytest.raises(
            DeviceError, match=r"^'cuda:0' can't be used, because .*driver"
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

    def test_what_is_set_already_stays(self, with_devices, monkeypatch):
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
    def test_a_device_that_is_not_there(self, with_devices, index, count):
        with_devices(count)
        with pytest.raises(DeviceError, match=f"'cuda:{index}'.*'cuda:{count - 1}'"):
            CudaDevice(index)
        assert CudaDevice(count - 1).name == f"cuda:{count - 1}"

    def test_a_device_has_its_makers_name(self, with_devices):
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

    def test_the_engine_is_preferred(self, device, works):
        works(library.HARDWARE, library.HYBRID)
        assert device.decoder("jpeg") == (
            (0, library.HARDWARE, jpeg_engine.ALL_ON_GPU, 4),
            "hardware",
        )

    def test_without_an_engine(self, device, works):
        works(library.HYBRID)
        assert device.decoder("jpeg") == ((0, library.HYBRID, jpeg_engine.ALL_ON_GPU, 0), "hybrid")

    def test_the_engine_is_not_wanted(self, device, works, monkeypatch):
        monkeypatch.setenv(jpeg_engine.JPEG_ENGINE, "hybrid")
        works(library.HARDWARE, library.HYBRID)
        assert device.decoder("jpeg") == ((0, library.HYBRID, jpeg_engine.ALL_ON_GPU, 0), "hybrid")

    def test_nothing_decodes(self, device, works):
        works()
        with pytest.raises(DeviceError, match="can't decode JPEG on 'cuda:0'"):
            device.decoder("jpeg")

    def test_jpeg_2000(self, device):
        assert device.decoder("jpeg2000") == ((0, cuda.GPU_ONLY), "GPU")


def test_flags_are_zeros_of_which_the_device_has_to_have_the_page(with_devices, monkeypatch):
    with_devices(1)
    device = CudaDevice(0)
    flags = device.shared(320, np.int32)
    assert (flags.dtype, flags.tolist()) == (np.int32, [0] * 320)
    device.pinned._pool.full = True
    with pytest.raises(MemoryError):
        device.shared(320, np.int32)


def test_a_callers_stream_object_stays_itself(with_devices):
    with_devices(1)
    stream = SimpleNamespace(ptr=5)
    assert CudaDevice(0).as_stream(stream) is stream


def test_a_stream_is_made_on_its_device(with_devices):
    """Else it would be one of the thread's current device."""
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
            pixels = memory.take(shape, np.dtype(dtype))
            assert pixels.shape == shape
            assert pixels.dtype == dtype
            pixels[...] = 1

    def test_memory_is_given_back_with_the_last_view(self, cupy):
        memory = PinnedMemory(cupy, budget=1_000_000)
        pixels = memory.take((1000, 1000), np.dtype(np.uint8))
        assert cupy.pools[0].live == 1_000_000
        views = [pixels[2:4], pixels.reshape(-1)[::2], pixels.view(np.uint16)]
        del pixels
        while views:
            assert cupy.pools[0].live == 1_000_000
            assert memory.take((500_000,), np.dtype(np.uint8)).size == 500_000
            views.pop()
        assert cupy.pools[0].live == 0
        again = memory.take((1_000_000,), np.dtype(np.uint8))
        assert cupy.pools[0].live == again.nbytes

    def test_ordinary_memory_beyond_the_budget(self, cupy):
        memory = PinnedMemory(cupy, budget=1_000_000)
        kept = [memory.take((300_000,), np.dtype(np.uint8)) for _ in range(5)]
        assert cupy.pools[0].live == 900_000
        assert all(pixels.shape == (300_000,) for pixels in kept)
        del kept[4], kept[3]  # ordinary ones: nothing of the budget is won
        kept.append(memory.take((300_000,), np.dtype(np.uint8)))
        assert cupy.pools[0].live == 900_000
        del kept[0]
        kept.append(memory.take((300_000,), np.dtype(np.uint8)))
        assert cupy.pools[0].live == 900_000

    def test_more_than_the_budget_at_once(self, cupy):
        memory = PinnedMemory(cupy, budget=1_000_000)
        assert memory.take((250_001,), np.dtype(np.int32)).nbytes == 1_000_004
        assert cupy.pools[0].live == 0
        assert memory.take((250_000,), np.dtype(np.int32)).nbytes == 1_000_000

    def test_nothing(self, cupy):
        assert PinnedMemory(cupy).take((0, 7), np.dtype(np.uint8)).shape == (0, 7)

    def test_the_system_has_no_more(self, cupy):
        memory = PinnedMemory(cupy, budget=1_000_000)
        cupy.pools[0].full = True
        assert memory.take((600_000,), np.dtype(np.uint8)).shape == (600_000,)
        cupy.pools[0].full = False
        pixels = memory.take((600_000,), np.dtype(np.uint8))
        assert cupy.pools[0].live == pixels.nbytes

    def test_what_has_to_be_page_locked(self, cupy):
        """The budget is for what callers keep."""
        memory = PinnedMemory(cupy, budget=1_000_000)
        whole = memory.take((1_000_000,), np.dtype(np.uint8))
        more = memory.take((250_001,), np.dtype(np.int32), surely=True)
        assert cupy.pools[0].live == whole.nbytes + more.nbytes
        cupy.pools[0].full = True
        with pytest.raises(MemoryError, match="page-locked"):
            memory.take((300,), np.dtype(np.int32), surely=True)
        cupy.pools[0].full = False
        del more
        assert cupy.pools[0].live == whole.nbytes

    def test_many_threads(self, cupy):
        memory = PinnedMemory(cupy, budget=1_000_000)

        def work():
            for _ in range(300):
                memory.take((100_000,), np.dtype(np.uint8))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        gc.collect()
        whole = memory.take((1_000_000,), np.dtype(np.uint8))
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


def test_to_import_the_package_loads_nothing_and_says_nothing():
    command = [sys.executable, "-W", "error", "-c", QUIET]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
