"""`Offload`: the choice of what decodes a slide's tiles, and reading by a GPU where it is one."""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from napari_wsigpu.gpu.device.devices import cuda_index, device_index
from napari_wsigpu.gpu.device.verify import Verifier
from napari_wsigpu.gpu.jpeg.codestream import recipe
from napari_wsigpu.gpu.jpeg.nvimagecodec import NvImageCodecDecoder
from napari_wsigpu.model.errors import DeviceError
from napari_wsigpu.reading.device import DeviceBackend
from napari_wsigpu.reading.halving import Halving
from napari_wsigpu.reading.on_device import TilesOnDevice
from napari_wsigpu.reading.throughput import tile_kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.gpu.device.devices import Devices
    from napari_wsigpu.gpu.device.worker import DecodeWorker
    from napari_wsigpu.gpu.jpeg.codestream import Recipe
    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.reading.on_device import ReadTiles
    from napari_wsigpu.reading.parts import SlideParts
    from napari_wsigpu.reading.plan import ReadOptions, ReadPlan, Regions
    from napari_wsigpu.reading.throughput import Throughput

# Displays draw on devices whose tiles are sure to hold a view, and what is around it.
LEAST_BUDGET = 256 << 20

CPU = "CPU"
# By what is decoded, and the path that nvImageCodec decodes it on.
ENGINES = {
    ("jpeg", "hardware"): "hardware JPEG engine",
    ("jpeg", "hybrid"): "JPEG without a hardware engine",
    ("jpeg", "GPU"): "JPEG without a hardware engine",
    ("jpeg2000", "GPU"): "JPEG 2000",
    ("jpeg2000", "JPEG 2000"): "JPEG 2000, in batches",
}

logger = logging.getLogger(__name__)


class Offload:
    """Reads one slide by a GPU where that is chosen, or proves to be faster than the CPU.

    Parameters
    ----------
    parts, devices, throughput, device
        As in `RegionReader`.
    """

    def __init__(
        self,
        parts: SlideParts,
        devices: Devices,
        throughput: Throughput,
        device: str,
    ) -> None:
        self._parts = parts
        self._path = parts.layout.path
        self._images = parts.images
        self._halved = {
            level.number: parts.finer[level.number] for level in parts.pyramid if level.inserted
        }
        self._devices = devices
        self._throughput = throughput
        self._choice = device, device_index(device)
        self._lock = threading.Lock()
        self._backends: dict[int, DeviceBackend] = {}
        self._on_device: TilesOnDevice | None = None
        self._verifier = Verifier(parts.layout.path)
        self._gpu_failure: str | None = None
        if self._choice[1] is not None:
            devices.worker(self._choice[1])

    @property
    def device(self) -> str:
        """What shall decode; from the next read on, if it is set.

        A GPU that failed is tried again then.

        Raises
        ------
        DeviceError
            If it can't be used; nothing has changed then.
        """
        return self._choice[0]

    @device.setter
    def device(self, device: str) -> None:
        index = device_index(device)
        if index is not None:
            self._devices.worker(index)
        self._choice, self._gpu_failure = (device, index), None

    @property
    def index(self) -> int | None:
        """Number of the GPU that was chosen, if one was."""
        return self._choice[1]

    @property
    def decoder(self) -> tuple[str, str]:
        """What decodes level 0 now, and why it is this or how it decodes; starts nothing."""
        image, (device, index) = self._images[0].stored[0], self._choice
        against = self._verifier.reason or self._gpu_failure
        how = recipe(image)
        if image.library is not None:
            return image.library.name, str(how)
        if device == "cpu":
            return CPU, "chosen"
        if isinstance(how, str):
            return CPU, how
        if against is not None:
            return CPU, against
        if index is not None:
            return self._on_gpu(index, how)
        waiting = self._devices.background.waiting(how.kind)
        if waiting is not None:
            return CPU, waiting
        gpu, engine = self._on_gpu(0, how)
        key = tile_kind(image)
        if not self._throughput.settled(key):
            return f"{gpu} and {CPU}", "which of them is faster is being measured"
        way = self._throughput.choose(key)
        if way == "both":
            return f"{gpu} and {CPU}", f"{engine}; together they are faster"
        return (gpu, engine) if way == "gpu" else (CPU, "measured faster than the GPU")

    def _on_gpu(self, index: int, how: Recipe) -> tuple[str, str]:
        """Return a GPU that decodes, and how it does; else the CPU, and why."""
        worker = self._devices.started(index)
        if worker is None:
            return f"GPU {index}", "it is starting"
        name = f"GPU {index} ({worker.device.model})"
        nothing = CPU, f"{name} has no decoder for it"
        if not how.by_library and worker.jpeg2000.works is False:
            return nothing
        if not worker.has_tried(how.kind):
            return name, "its decoder starts with the first tiles"
        engine = worker.made_engine(how.kind)
        return nothing if engine is None else (name, ENGINES[how.kind, engine])

    def worker(self, device: str) -> DecodeWorker:
        """Return what reads to a device, named as in `read_to_device`.

        Raises
        ------
        DeviceError
            If the device can't be used.
        """
        own = self._choice[1]
        return self._devices.worker(
            own if device == "cuda" and own is not None else cuda_index(device)
        )

    def read(
        self, number: int, plans: Sequence[ReadPlan], regions: Regions, options: ReadOptions
    ) -> NDArray[Any] | None:
        """Read regions to the host by the GPU if it is there, ready and the fastest.

        Returns
        -------
        ndarray, shape (pixels, channels), or (pixels,) for one channel, or None
            Region after region; None if the CPU is to read them.

        Raises
        ------
        TileError
            If tiles can't be decoded, with their names.
        DeviceError
            If the device that was chosen fails.
        SlideError
            If the file can't be read.
        """
        finer, halvings = self._stored(number)
        level = self._images[finer]
        image = level.stored[0]
        device, index = self._choice
        if device == "cpu" or number < 0 or level.computed or self._gpu_failure is not None:
            return None
        how = recipe(image)
        if isinstance(how, str) or self._verifier.reason is not None:
            return None

        def read(worker: DecodeWorker, share: float) -> NDArray[Any] | None:
            backend = self.backend(worker)
            if halvings:
                return Halving(backend, finer, halvings).read(regions, options, share)
            return backend.read(number, plans, regions.offsets, options, to_host=True, share=share)

        if index is not None:
            return read(self._devices.worker(index), 1.0)
        worker = self._devices.background.worker(how.kind)
        way = "cpu" if worker is None else self._throughput.choose(tile_kind(image))
        if worker is None or way == "cpu":
            return None
        try:
            return read(worker, self._share(image, way))
        except DeviceError as error:
            with self._lock:
                first = self._gpu_failure is None
                self._gpu_failure = str(error).removesuffix(".")
            if first:
                logger.warning("'%s' is decoded on the CPU from now on: %s", self._path, error)
            return None

    def tiles_on_device(self, read: ReadTiles) -> TilesOnDevice | None:
        """Return the slide's tiles on the device that decodes them now; None if the CPU does.

        Parameters
        ----------
        read : callable
            As `RegionReader.read_tiles`.
        """
        how, (_, index) = recipe(self._images[0].stored[0]), self._choice
        worker = None
        if not isinstance(how, str) and self.decoder[0] != CPU:
            worker = self._devices.started(index or 0)
        if worker is None or self._devices.tiles(worker.device).budget < LEAST_BUDGET:
            return None
        backend, found = self.backend(worker), self._on_device
        if found is None or found.backend is not backend:
            found = TilesOnDevice(backend, read, partial(self._average, backend))
            self._on_device = found
        return found

    def share_on(self, image: LevelLayout) -> float:
        """Return the part of an image's tiles that a device decodes for itself."""
        wanted, own = self._choice
        way = "gpu" if own is not None else "cpu"
        if wanted == "auto" and not isinstance(recipe(image), str):
            way = self._throughput.choose(tile_kind(image))
        return self._share(image, way)

    def _average(
        self,
        backend: DeviceBackend,
        number: int,
        regions: Regions,
        options: ReadOptions,
        share: float,
    ) -> Any | None:
        """Average regions of a level on a device, where they stay.

        Returns
        -------
        device array, shape (pixels, channels), or None
            None if the level is not one of those that are averaged there, or memory is short.
        """
        finer, halvings = self._stored(number)
        if not halvings or self._images[finer].computed:
            return None
        halving = Halving(backend, finer, halvings)
        return halving.read(regions, options, share, to_host=False)

    def _stored(self, number: int) -> tuple[int, int]:
        """Return the level that another is averaged from, and how often it is halved."""
        halvings = 0
        while number in self._halved:
            number, halvings = self._halved[number], halvings + 1
        return number, halvings

    def release(self) -> None:
        """Let go of streams, tiles and memory on devices."""
        with self._lock:
            backends, self._backends = self._backends, {}
            self._on_device = None
        for backend in backends.values():
            backend.release()

    def started(self) -> list[DeviceBackend]:
        """Return the slide's backends on devices."""
        with self._lock:
            return list(self._backends.values())

    def backend(self, worker: DecodeWorker) -> DeviceBackend:
        """Return the slide's backend on a worker's device."""
        with self._lock:
            backend = self._backends.get(id(worker))
            if backend is None:
                decoder = NvImageCodecDecoder(worker, self._parts.decoder, self._verifier)
                tiles = self._devices.tiles(worker.device)
                backend = DeviceBackend(self._parts, decoder, tiles, self._note)
                self._backends[id(worker)] = backend
            return backend

    def _note(self, image: LevelLayout, tiles: int, seconds: float, share: float) -> None:
        self._throughput.note(tile_kind(image), "gpu" if share == 1 else "both", tiles, seconds)

    def _share(self, image: LevelLayout, way: str) -> float:
        """Return the part of the tiles that the device decodes."""
        return self._throughput.share(tile_kind(image)) if way == "both" else float(way == "gpu")
