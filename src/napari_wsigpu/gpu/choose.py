"""Which decoder decodes a slide: what was asked for, what there is, and what proves faster."""

from __future__ import annotations

import logging
import re
import threading
from collections import defaultdict, deque
from contextlib import suppress
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING

from napari_wsigpu.codecs.cpu import CpuDecoder
from napari_wsigpu.errors import DeviceError, UnsupportedSlideError
from napari_wsigpu.gpu.cuda import CudaDevice, driver_is_there
from napari_wsigpu.gpu.worker import DecodeWorker

if TYPE_CHECKING:
    from collections.abc import Hashable

    from napari_wsigpu.layout import SlideLayout

TRIALS = 3
FEWEST_TILES = 16
SHARES = ("gpu", "cpu", "both")
NO_DRIVER = "this machine has no NVIDIA driver"

logger = logging.getLogger(__name__)


def choose_decoder(layout: SlideLayout, threads: int | None = None) -> CpuDecoder:
    """Return a decoder on the CPU for all levels of a slide.

    Raises
    ------
    DeviceError
        If the number of threads is not a whole one of at least 1.
    UnsupportedSlideError
        If no decoder can read the slide's tiles.
    """
    if threads is not None and (not isinstance(threads, int) or threads < 1):
        raise DeviceError(f"threads is {threads!r}; it has to be a whole number >= 1.")
    decoder = CpuDecoder(None if threads is None else threads - 1)
    for image in chain.from_iterable(level.stored for level in layout.levels):
        reason_against = decoder.refusal(image)
        if reason_against is not None:
            raise UnsupportedSlideError(
                f"'{layout.path}' can't be decoded: {reason_against}; "
                "convert it to JPEG, deflate or zstd tiles."
            )
    return decoder


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


_lock = threading.Lock()
_workers: dict[int, DecodeWorker] = {}


def gpu_worker(index: int) -> DecodeWorker:
    """Return the process's worker on a CUDA device.

    Raises
    ------
    DeviceError
        If the device can't be used.
    """
    with _lock:
        if index not in _workers:
            _workers[index] = DecodeWorker(CudaDevice(index))
        return _workers[index]


def started_worker(index: int) -> DecodeWorker | None:
    """Return the process's worker on a CUDA device if it has started, without waiting for it."""
    return _workers.get(index)


class BackgroundStart:
    """Starts CUDA and its decoders, which takes seconds, while the CPU decodes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: set[str] = set()
        self._ready: set[str] = set()
        self._refusals: dict[str, str] = {}

    def worker(self, kind: str) -> DecodeWorker | None:
        """Return the worker of device 0 once it can decode a kind; None until then."""
        with self._lock:
            if kind not in self._begun:
                self._begun.add(kind)
                if driver_is_there():
                    threading.Thread(
                        target=self._start, args=(kind,), name="wsigpu-start", daemon=True
                    ).start()
                else:
                    self._refusals[kind] = NO_DRIVER
            return _workers[0] if kind in self._ready else None

    def waiting(self, kind: str) -> str | None:
        """Return why the CPU decodes a kind so far; None once the GPU can."""
        with self._lock:
            if kind in self._ready:
                return None
            if kind in self._refusals:
                return self._refusals[kind]
            if kind in self._begun:
                return "the GPU is starting"
        return "the GPU starts with the first tiles" if driver_is_there() else NO_DRIVER

    def _start(self, kind: str) -> None:
        def warm(worker: DecodeWorker) -> None:
            with worker.device.active():
                if worker.engine(kind) is not None:
                    self._ready.add(kind)
                else:
                    self._refusals[kind] = "nvImageCodec can't decode such tiles on this GPU"

        try:
            gpu_worker(0).run(warm)
        except Exception as error:  # whatever is wrong with CUDA here, the CPU decodes
            self._refusals[kind] = str(error).removesuffix(".")
            logger.info("Tiles are decoded on the CPU: %s", error)


background_start = BackgroundStart()


class Pace:
    """Learns what decodes tiles fastest: the GPU, the CPU, or both at once.

    Each is tried a few times in turn; from then on the fastest is used, and still measured.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: defaultdict[tuple[Hashable, str], deque[float]] = defaultdict(
            lambda: deque(maxlen=2 * TRIALS - 1)
        )

    def choose(self, key: Hashable) -> str:
        """Return "gpu", "cpu" or "both" for tiles of a kind."""
        with self._lock:
            for way in SHARES:
                if len(self._seconds[key, way]) < TRIALS:
                    return way
            return min(SHARES, key=lambda way: median(self._seconds[key, way]))

    def settled(self, key: Hashable) -> bool:
        """Whether everything was tried."""
        with self._lock:
            return all(len(self._seconds[key, way]) >= TRIALS for way in SHARES)

    def share(self, key: Hashable) -> float:
        """Return the part of a batch that the GPU decodes while the CPU decodes the rest."""
        with self._lock:
            gpu, cpu = (median(self._seconds[key, way] or [1.0]) for way in ("gpu", "cpu"))
        return cpu / (gpu + cpu)

    def note(self, key: Hashable, way: str, tiles: int, seconds: float) -> None:
        """Learn from a read; few tiles teach nothing."""
        if tiles >= FEWEST_TILES:
            with self._lock:
                self._seconds[key, way].append(seconds / tiles)


pace = Pace()
