"""The CUDA devices of a process: their names, workers and caches, and how they are started."""

from __future__ import annotations

import logging
import re
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from napari_wsigpu.gpu.device.cuda import CudaDevice
from napari_wsigpu.gpu.device.driver import (
    FORKED,
    NO_DRIVER,
    check_process,
    driver_is_there,
    note_start,
    started_before_fork,
    warn_of_fork,
)
from napari_wsigpu.gpu.device.worker import DecodeWorker
from napari_wsigpu.gpu.transfer.tiles import SLAB_BYTES, DeviceTiles
from napari_wsigpu.model.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable


LARGEST_BUDGET = 2 << 30
PART_OF_DEVICE = 8

logger = logging.getLogger(__name__)


def device_index(device: str) -> int | None:
    """Return the number of a CUDA device, None for ``"cpu"`` and ``"auto"``.

    Raises
    ------
    DeviceError
        If it is no device's name.
    """
    if device in ("auto", "cpu"):
        return None
    found = re.fullmatch(r"cuda(?::(\d+))?", str(device))
    if found is None:
        raise DeviceError(f"'{device}' is no device; use device='auto', 'cpu', 'cuda' or 'cuda:1'.")
    return int(found[1] or 0)


def cuda_index(device: str) -> int:
    """Return the number of the CUDA device that pixels shall be put on.

    Raises
    ------
    DeviceError
        If it is no CUDA device's name.
    """
    with suppress(DeviceError):
        index = device_index(device)
        if index is not None:
            return index
    raise DeviceError(
        f"Pixels can't be put on device {device!r}; use device='cpu', 'cuda' or 'cuda:1'."
    )


@dataclass(eq=False, repr=False)
class Devices:
    """The workers of a process on CUDA devices, and the caches there; made when first used.

    Safe under many threads.

    Parameters
    ----------
    opened : callable
        Returns the device of a number, or raises a `DeviceError`.
    has_driver : callable
        Whether this machine can have devices at all; asked before anything is started.
    slab_bytes : int
        How much memory a cache takes at a time.

    Attributes
    ----------
    has_driver : callable
        As given.
    background : BackgroundStart
        Starts the first device while the CPU decodes.
    """

    _opened: Callable[[int], CudaDevice] = CudaDevice
    has_driver: Callable[[], bool] = driver_is_there
    _slab_bytes: int = SLAB_BYTES

    def __post_init__(self) -> None:
        self._starting, self._lock = threading.Lock(), threading.Lock()
        self._workers: dict[int, DecodeWorker] = {}
        self._tiles: dict[str, DeviceTiles] = {}
        self.background = BackgroundStart(self)

    def worker(self, index: int) -> DecodeWorker:
        """Return the worker on a CUDA device.

        Raises
        ------
        DeviceError
            If the device can't be used.
        """
        check_process(f"cuda:{index}")
        with self._starting:
            if index not in self._workers:
                if self.has_driver():
                    note_start()
                self._workers[index] = DecodeWorker(self._opened(index))
            return self._workers[index]

    def started(self, index: int) -> DecodeWorker | None:
        """Return the worker on a CUDA device if it has started, without waiting for it."""
        return self._workers.get(index)

    def refusal(self) -> str | None:
        """Return why no device can be used here; None if one may be. Nothing is started."""
        if started_before_fork():
            return FORKED
        return None if self.has_driver() else NO_DRIVER

    def renewed(self) -> Devices:
        """Return such devices for a forked process, of which none has started."""
        return Devices(self._opened, self.has_driver, self._slab_bytes)

    def tiles(self, device: CudaDevice) -> DeviceTiles:
        """Return the cache on a device: at most 2 GiB and an eighth of its memory."""
        with self._lock:
            if device.name not in self._tiles:
                budget = min(LARGEST_BUDGET, device.memory[1] // PART_OF_DEVICE)
                self._tiles[device.name] = DeviceTiles(device, budget, self._slab_bytes)
            return self._tiles[device.name]

    def tiles_on(self, name: str) -> DeviceTiles | None:
        """Return the cache on a device by its name; None if nothing was decoded there."""
        return self._tiles.get(name)

    def close(self) -> None:
        """End the threads of the workers, and release their decoders."""
        for worker in list(self._workers.values()):
            worker.close()


class BackgroundStart:
    """Starts CUDA and its decoders, which takes seconds, while the CPU decodes.

    Parameters
    ----------
    devices : Devices
        Whose first device is started.
    """

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._lock = threading.Lock()
        self._begun: set[str] = set()
        self._ready: set[str] = set()
        self._refusals: dict[str, str] = {}

    def worker(self, kind: str) -> DecodeWorker | None:
        """Return the worker of device 0 once it can decode a kind; None until then."""
        with self._lock:
            if kind not in self._begun:
                self._begun.add(kind)
                against = self._devices.refusal()
                if against is None:
                    threading.Thread(
                        target=self._start, args=(kind,), name="wsigpu-start", daemon=True
                    ).start()
                else:
                    self._refusals[kind] = against
                    if started_before_fork():
                        warn_of_fork()
            return self._devices.started(0) if kind in self._ready else None

    def waiting(self, kind: str) -> str | None:
        """Return why the CPU decodes a kind so far; None once the GPU can."""
        with self._lock:
            if kind in self._ready:
                return None
            if kind in self._refusals:
                return self._refusals[kind]
            if kind in self._begun:
                return "the GPU is starting"
        return self._devices.refusal() or "the GPU starts with the first tiles"

    def _start(self, kind: str) -> None:
        try:
            worker = self._devices.worker(0)
            with worker.device.active():
                if worker.start(kind):
                    self._ready.add(kind)
                else:
                    self._refusals[kind] = "nvImageCodec can't decode such tiles on this GPU"
        except Exception as error:  # whatever is wrong with CUDA here, the CPU decodes
            self._refusals[kind] = str(error).removesuffix(".")
            logger.info("Tiles are decoded on the CPU: %s", error)
