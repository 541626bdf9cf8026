"""The CUDA devices of a process: their names, start, workers and tile caches."""

from __future__ import annotations

import logging
import re
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from napari_wsigpu.gpu.device.driver import (
    FORKED,
    NO_DRIVER,
    check_process,
    driver_available,
    record_start,
    started_before_fork,
    warn_of_fork,
)
from napari_wsigpu.model.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from napari_wsigpu.gpu.device.cuda import CudaDevice
    from napari_wsigpu.gpu.device.worker import DecodeWorker
    from napari_wsigpu.gpu.transfer.device_tiles import DeviceTiles


# Limits of a tile cache: bytes, and the divisor of the device memory.
LARGEST_BUDGET = 2 << 30
PART_OF_DEVICE = 8

logger = logging.getLogger(__name__)


def _open_device(index: int) -> CudaDevice:
    # Imported when a device starts: processes that only use the CPU start faster without.
    from napari_wsigpu.gpu.device.cuda import CudaDevice

    return CudaDevice(index)


def device_index(device: str) -> int | None:
    """Return the number of a CUDA device; None for ``"cpu"`` and ``"auto"``.

    Raises
    ------
    DeviceError
        If it is not the name of a device.
    """
    if device in ("auto", "cpu"):
        return None
    found = re.fullmatch(r"cuda(?::(\d+))?", str(device))
    if found is None:
        raise DeviceError(
            f"'{device}' is not a device; use device='auto', 'cpu', 'cuda' or 'cuda:1'."
        )
    return int(found[1] or 0)


def cuda_index(device: str) -> int:
    """Return the number of the CUDA device that pixels are returned on.

    Raises
    ------
    DeviceError
        If it is not the name of a CUDA device.
    """
    with suppress(DeviceError):
        index = device_index(device)
        if index is not None:
            return index
    raise DeviceError(
        f"Pixels cannot be returned on device {device!r}; use device='cpu', 'cuda' or 'cuda:1'."
    )


@dataclass(eq=False, repr=False)
class Devices:
    """The workers and tile caches of a process, one for each CUDA device, created on first use.

    All methods are safe to call from any thread.

    Parameters
    ----------
    opened : callable
        Opens the device with the given number, or raises `DeviceError`.
    has_driver : callable
        Returns whether this machine can have CUDA devices; does not initialize CUDA.
    slab_bytes : int
        Bytes of device memory that a tile cache allocates at a time.

    Attributes
    ----------
    has_driver : callable
        The parameter.
    background : BackgroundStart
        Starts the first device while the CPU decodes.
    """

    _opened: Callable[[int], CudaDevice] = _open_device
    has_driver: Callable[[], bool] = driver_available
    _slab_bytes: int | None = None

    def __post_init__(self) -> None:
        # `_starting` protects `_workers` and is held for the seconds that CUDA takes to start, so
        # that only one thread starts it. `_lock` protects `_tiles`, whose users must not wait for
        # that. `started` and `tiles_on` read a single dict entry and take neither.
        self._starting, self._lock = threading.Lock(), threading.Lock()
        self._workers: dict[int, DecodeWorker] = {}
        self._tiles: dict[str, DeviceTiles] = {}
        self.background = BackgroundStart(self)

    def worker(self, index: int) -> DecodeWorker:
        """Return the worker of a CUDA device; start it if it has not started.

        Raises
        ------
        DeviceError
            If the device cannot be used.
        """
        check_process(f"cuda:{index}")
        with self._starting:
            if index not in self._workers:
                from napari_wsigpu.gpu.device.worker import DecodeWorker

                if self.has_driver():
                    # Recorded first: a fork during the start would break CUDA in the child too.
                    record_start()
                self._workers[index] = DecodeWorker(self._opened(index))
            return self._workers[index]

    def started(self, index: int) -> DecodeWorker | None:
        """Return the worker of a CUDA device if it has started; never blocks."""
        return self._workers.get(index)

    def refusal(self) -> str | None:
        """Return why no device can be used here, or None if one may be; starts nothing."""
        if started_before_fork():
            return FORKED
        return None if self.has_driver() else NO_DRIVER

    def renewed(self) -> Devices:
        """Return the same configuration for a forked process, with no device started."""
        return Devices(self._opened, self.has_driver, self._slab_bytes)

    def tiles(self, device: CudaDevice) -> DeviceTiles:
        """Return a device's tile cache, limited to 2 GiB and an eighth of the device's memory."""
        with self._lock:
            if device.name not in self._tiles:
                from napari_wsigpu.gpu.transfer.device_tiles import SLAB_BYTES, DeviceTiles

                budget = min(LARGEST_BUDGET, device.memory[1] // PART_OF_DEVICE)
                self._tiles[device.name] = DeviceTiles(
                    device, budget, self._slab_bytes or SLAB_BYTES
                )
            return self._tiles[device.name]

    def tiles_on(self, name: str) -> DeviceTiles | None:
        """Return a device's tile cache by the device's name; None if nothing was decoded there."""
        return self._tiles.get(name)

    def close(self) -> None:
        """Stop the threads of the workers, and release their decoders."""
        for worker in list(self._workers.values()):
            worker.close()


class BackgroundStart:
    """Starts CUDA and its decoders, which takes seconds, while the CPU decodes.

    Parameters
    ----------
    devices : Devices
        The devices; only the first one is started.
    """

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        # Protects `_started`. The starting thread adds to `_ready` and `_refusals` without it, each
        # time with a single operation on a set or dict.
        self._lock = threading.Lock()
        self._started: set[str] = set()
        self._ready: set[str] = set()
        self._refusals: dict[str, str] = {}

    def worker(self, kind: str) -> DecodeWorker | None:
        """Return the worker of device 0 once it can decode a format; start it on the first call.

        Parameters
        ----------
        kind : {"jpeg", "jpeg2000"}
            Format to decode.

        Returns
        -------
        DecodeWorker or None
            None until the device is ready; always None if it cannot be used.
        """
        with self._lock:
            if kind not in self._started:
                self._started.add(kind)
                refusal = self._devices.refusal()
                if refusal is None:
                    threading.Thread(
                        target=self._start, args=(kind,), name="wsigpu-start", daemon=True
                    ).start()
                else:
                    self._refusals[kind] = refusal
                    if started_before_fork():
                        warn_of_fork()
            return self._devices.started(0) if kind in self._ready else None

    def refuses(self, kind: str) -> bool:
        """Return whether it is known that the device can't decode a format."""
        return kind in self._refusals

    def waiting_reason(self, kind: str) -> str | None:
        """Return why the CPU still decodes a format; None once the GPU can."""
        with self._lock:
            if kind in self._ready:
                return None
            if kind in self._refusals:
                return self._refusals[kind]
            if kind in self._started:
                return "the GPU is starting"
        return self._devices.refusal() or "the GPU starts with the first tiles"

    def _start(self, kind: str) -> None:
        try:
            worker = self._devices.worker(0)
            with worker.device.active():
                if worker.start(kind):
                    worker.device.prepare()
                    self._ready.add(kind)
                else:
                    self._refusals[kind] = "nvImageCodec cannot decode these tiles on this GPU"
        except Exception as error:  # whatever is wrong with CUDA here, the CPU decodes
            self._refusals[kind] = str(error).removesuffix(".")
            logger.info("Tiles are decoded on the CPU: %s", error)
