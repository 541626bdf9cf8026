"""Fixtures of the whole suite, and what of those of viewer/conftest.py a process has once."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, settings

from napari_wsigpu import native, runtime
from napari_wsigpu.codecs.color import ColorProfile
from napari_wsigpu.runtime import Runtime
from napari_wsigpu.storage.remote.disk_cache import FOLDER
from tests.fakes.host_device import HostDevice, HostMachine
from tests.writers.icc import PROFILES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from napari_wsigpu.codecs.color import ColorTable
    from tests.viewer.shared import SharedViewer

SHARED_SLIDES = Path(
    os.environ.get("WSIGPU_TEST_SLIDES")
    or Path(__file__).resolve().parents[2] / "shared" / "slides"
)

gc.disable()  # until all modules are there
# Several processes of tests keep all cores busy; Mesa would draw in as many threads in each.
os.environ.setdefault("LP_NUM_THREADS", "0")
settings.register_profile(
    "slides",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "slides"))


_tell_apart = np.testing.assert_array_equal


def assert_array_equal(actual: Any, desired: Any, *more: Any, **options: Any) -> None:
    """Compare first, and let NumPy look for NaNs and tell what differs only where that fails.

    What it does at all costs is twenty times as long, and the tests compare many pixels.
    """
    plain = isinstance(actual, np.ndarray) and isinstance(desired, np.ndarray)
    if options or not plain or not np.array_equal(actual, desired):
        _tell_apart(actual, desired, *more, **options)


np.testing.assert_array_equal = assert_array_equal


def shared_slide(name: str) -> Path:
    """Return the path of a real slide, or skip the test where it is absent."""
    path = SHARED_SLIDES / name
    if not path.exists():
        pytest.skip(f"the slide {name} is not in {SHARED_SLIDES} (set WSIGPU_TEST_SLIDES)")
    return path


def has_display() -> bool:
    return not sys.platform.startswith("linux") or bool(os.environ.get("DISPLAY"))


def decoding_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("wsigpu")]


def pinned_places() -> int:
    """How many places of tiles are pinned, on all devices."""
    caches = runtime.default().devices._tiles.values()
    pools = [pool for cache in caches for pool in cache._pools.values()]
    return sum(int(pool.pins.sum()) for pool in pools)


@pytest.fixture
def without_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode tiles without the native core, as if there had been no compiler at installation."""
    monkeypatch.setattr(native, "core", None)


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
def fresh_runtime() -> Iterator[Runtime]:
    """This machine, with nothing started, learned or cached yet."""
    with runtime.using(Runtime()) as shared:
        yield shared
    shared.close()


@pytest.fixture
def host_machine() -> HostMachine:
    """A machine whose only CUDA device is host memory."""
    pytest.importorskip("nvidia.nvimgcodec")
    return HostMachine()


@pytest.fixture
def host_runtime(host_machine: HostMachine) -> Iterator[Runtime]:
    """That machine, with nothing started, learned or cached yet."""
    with runtime.using(Runtime(host_machine.devices())) as shared:
        yield shared
    shared.close()


@pytest.fixture
def host_gpu(host_machine: HostMachine, host_runtime: Runtime) -> HostDevice:
    """The device of that machine."""
    return host_machine.device


@pytest.fixture(scope="session", autouse=True)
def modules_are_no_garbage(pytestconfig: pytest.Config) -> Iterator[None]:
    """Collections look at what tests make, and not at a hundred thousand objects of modules."""
    if pytestconfig.pluginmanager.hasplugin("napari"):
        importlib.import_module("napari._qt.qt_main_window")  # as its fixtures do for each test
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)  # tests that look for what is left collect it themselves
    gc.enable()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def own_disk_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what is read of remote slides, and unsaved annotations, away from the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(tmp_path_factory.mktemp("blocks")))
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def scanner_colours() -> ColorTable:
    """What a scanner's colours are in sRGB: kept, as it takes a second to make."""
    return ColorProfile(PROFILES["table"], "slide").table()


@pytest.fixture(scope="session")
def settings_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where napari's settings and those of its plugins are."""
    from napari import settings

    folder = tmp_path_factory.mktemp("settings")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "_CFG_PATH", str(folder / "settings.yaml"))
        patch.setattr(settings, "_PLUGIN_SETTINGS", {})
        patch.setattr(settings, "_SETTINGS", None)
        found = settings.get_settings(folder / "settings.yaml")
        found._save_on_change = False  # each dock that comes or goes would write them all
        yield folder


@pytest.fixture(scope="session")
def shared(settings_folder: Path) -> Iterator[SharedViewer]:
    """The viewer that tests share, where there is a display."""
    if not has_display():
        pytest.skip("there is no X display (install Xvfb)")
    from tests.viewer.shared import SharedViewer

    made = SharedViewer()
    yield made
    made.close()
