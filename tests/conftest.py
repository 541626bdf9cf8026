"""Fixtures of the whole suite; those that need a display live in viewer/conftest.py."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from hypothesis import HealthCheck, settings

from napari_wsigpu.errors import DeviceError
from napari_wsigpu.gpu import choose
from napari_wsigpu.gpu import tiles as device_cache
from napari_wsigpu.reading import in_use, reader
from napari_wsigpu.storage.disk_cache import FOLDER
from tests.host_device import HostDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHARED_SLIDES = Path(
    os.environ.get("WSIGPU_TEST_SLIDES")
    or Path(__file__).resolve().parents[2] / "shared" / "slides"
)

settings.register_profile(
    "slides",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "slides"))


def shared_slide(name: str) -> Path:
    """Return the path of a real slide, or skip the test where it is absent."""
    path = SHARED_SLIDES / name
    if not path.exists():
        pytest.skip(f"the slide {name} is not in {SHARED_SLIDES} (set WSIGPU_TEST_SLIDES)")
    return path


def decoding_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("wsigpu")]


def pinned_places() -> int:
    """How many places of tiles are pinned, on all devices."""
    shelves = [
        shelf for cache in device_cache._caches.values() for shelf in cache._shelves.values()
    ]
    return sum(int(shelf.pins.sum()) for shelf in shelves)


@pytest.fixture
def handles_of() -> Callable[[Path], int]:
    """Count this process's open handles of a file."""
    process = psutil.Process()

    def count(path: Path) -> int:
        return sum(Path(item.path) == path for item in process.open_files())

    return count


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    """Fail the test if it leaves a thread or file handle behind."""
    process = psutil.Process()
    threads = set(threading.enumerate())
    files = {item.path for item in process.open_files()}
    yield
    assert set(threading.enumerate()) <= threads
    assert {item.path for item in process.open_files()} <= files


@pytest.fixture
def host_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostDevice]:
    """A machine whose only CUDA device is host memory, with nothing learned or cached yet."""
    pytest.importorskip("nvidia.nvimgcodec")
    device = HostDevice()
    workers: dict[int, choose.DecodeWorker] = {}

    def cuda_device(index: int) -> HostDevice:
        if index:
            raise DeviceError(f"There is no device 'cuda:{index}'; use 'cuda:0'.")
        return device

    monkeypatch.setattr(choose, "CudaDevice", cuda_device)
    monkeypatch.setattr(choose, "driver_is_there", lambda: True)
    monkeypatch.setattr(choose, "_workers", workers)
    monkeypatch.setattr(device_cache, "_caches", {})
    # Tests' tiles are so small that an allocation of the usual size would hold ten thousands.
    monkeypatch.setattr(device_cache, "SLAB_BYTES", 1 << 18)
    fresh = {"pace": choose.Pace(), "background_start": choose.BackgroundStart()}
    for name, value in fresh.items():
        for module in (choose, in_use, reader):
            monkeypatch.setattr(module, name, value)
    yield device
    for worker in workers.values():
        worker.close()


@pytest.fixture(scope="session", autouse=True)
def own_disk_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what is read of remote slides away from the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(tmp_path_factory.mktemp("blocks")))
        yield
