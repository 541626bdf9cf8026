"""`Offload`: choose the CPU or a GPU to decode a slide's tiles, and read with the GPU."""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import TYPE_CHECKING

from napari_wsigpu.gpu.device.devices import cuda_index, device_index
from napari_wsigpu.gpu.device.verify import Verifier
from napari_wsigpu.gpu.jpeg.codestream import recipe_for
from napari_wsigpu.model.errors import DeviceError
from napari_wsigpu.reading.halving import Halving

if TYPE_CHECKING:
    from collections.abc import Sequence

    from napari_wsigpu.gpu.device.devices import Devices
    from napari_wsigpu.gpu.device.worker import DecodeWorker
    from napari_wsigpu.gpu.jpeg.codestream import Recipe
    from napari_wsigpu.model.arrays import AnyArray, Array
    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.reading.device import DeviceBackend
    from napari_wsigpu.reading.on_device import ReadTiles, TilesOnDevice
    from napari_wsigpu.reading.parts import SlideParts
    from napari_wsigpu.reading.plan import ReadOptions, ReadPlan, Regions

# In bytes. Displays draw on a device only if its cache can hold a view and its surroundings.
LEAST_BUDGET = 256 << 20
# Fewest tiles that a GPU decodes as fast as 16 cores do. One tile of 192 KiB takes our kernels as
# long as a thousand: 3 to 5 ms, and 20 ms with zstd, of which a single thread decodes most.
LEAST_LOSSLESS = {"deflate": 16, "LZW": 16, "PackBits": 16, "zstd": 96}

CPU = "CPU"
# Keys: codec, and the backend of nvImageCodec or of this package that decodes it.
ENGINES = {
    ("jpeg", "hardware"): "hardware JPEG engine",
    ("jpeg", "JPEG kernels"): "JPEG without a hardware engine",
    ("jpeg2000", "GPU"): "JPEG 2000",
    ("jpeg2000", "JPEG 2000"): "JPEG 2000, in batches",
    ("deflate", "lossless kernels"): "deflate, in batches",
    ("LZW", "lossless kernels"): "LZW, in batches",
    ("PackBits", "lossless kernels"): "PackBits, in batches",
    ("zstd", "lossless kernels"): "zstd, in batches",
}

logger = logging.getLogger(__name__)


class Offload:
    """Reads one slide with a GPU if one is chosen, or is ready and can decode the slide's tiles.

    Parameters
    ----------
    parts, devices, device
        As in `RegionReader`.
    """

    def __init__(self, parts: SlideParts, devices: Devices, device: str) -> None:
        self._parts = parts
        self._path = parts.layout.path
        self._images = parts.images
        self._halved = {
            level.number: parts.finer[level.number] for level in parts.pyramid if level.inserted
        }
        self._devices = devices
        self._choice = device, device_index(device)
        self._lock = threading.Lock()  # guards `_backends`, and the first report of `_gpu_failure`
        self._backends: dict[int, DeviceBackend] = {}
        self._on_device: TilesOnDevice | None = None
        self._verifier = Verifier(parts.layout.path)
        self._gpu_failure: str | None = None
        if self._choice[1] is not None:
            devices.worker(self._choice[1])

    @property
    def device(self) -> str:
        """The device that decodes, from the next read on, or ``"auto"``.

        Setting it also allows a GPU that has failed to be used again.

        Raises
        ------
        DeviceError
            If the device can't be used; the previous choice remains.
        """
        return self._choice[0]

    @device.setter
    def device(self, device: str) -> None:
        index = device_index(device)
        if index is not None:
            self._devices.worker(index)
        # One tuple: readers take no lock, and must not combine a device with the index of another.
        self._choice, self._gpu_failure = (device, index), None

    @property
    def index(self) -> int | None:
        """Number of the chosen GPU; None for ``"auto"`` and ``"cpu"``."""
        return self._choice[1]

    def uses_gpu(self, number: int = 0) -> bool:
        """Return whether a GPU decodes an image now; a library that decodes slides is none."""
        how = recipe_for(self._images[number].stored[0])
        return not isinstance(how, str) and self.decoder(number)[0] != CPU

    def decoder(self, number: int = 0) -> tuple[str, str]:
        """Return an image's decoder, and why it was chosen or how it decodes; starts no GPU."""
        image, (device, index) = self._images[number].stored[0], self._choice
        against = self._verifier.reason or self._gpu_failure
        how = recipe_for(image)
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
        waiting = self._devices.background.waiting_reason(how.kind)
        if waiting is not None:
            return CPU, waiting
        return self._on_gpu(0, how)

    def _on_gpu(self, index: int, how: Recipe) -> tuple[str, str]:
        """Return the name of a GPU and how it decodes, or the CPU and why the GPU does not."""
        worker = self._devices.started(index)
        if worker is None:
            return f"GPU {index}", "starting up"
        name = f"GPU {index} ({worker.device.model})"
        unsupported = CPU, f"{name} has no decoder for this compression"
        if how.kind == "jpeg2000" and not how.by_library and worker.jpeg2000.works is False:
            return unsupported
        if not worker.has_tried(how.kind):
            return name, "the decoder starts when the first tiles are decoded"
        engine = worker.active_engine(how.kind)
        return unsupported if engine is None else (name, ENGINES[how.kind, engine])

    def worker(self, device: str) -> DecodeWorker:
        """Return the worker of a device, named as in `RegionReader.read_to_device`.

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
    ) -> Array | None:
        """Read regions to the host with a GPU if one is chosen, or is ready.

        Returns
        -------
        ndarray, shape (pixels, channels), or (pixels,) for one channel, or None
            Pixels of one region after another; None if the CPU should read them.

        Raises
        ------
        TileError
            If tiles fail to decode; the error names them.
        DeviceError
            If the chosen device fails.
        SlideError
            If the file can't be read.
        """
        finer, halvings = self._stored(number)
        level = self._images[finer]
        image = level.stored[0]
        device, index = self._choice
        if device == "cpu" or level.computed or self._gpu_failure is not None:
            return None
        if number in self._parts.associated:
            return None
        how = recipe_for(image)
        # `recipe_for` returns a reason instead of a recipe if a GPU can't decode the image.
        if isinstance(how, str) or self._verifier.reason is not None:
            return None

        def read(worker: DecodeWorker) -> Array | None:
            backend = self.backend(worker)
            if halvings:
                return Halving(backend, finer, halvings).read(regions, options)
            return backend.read(number, plans, regions.offsets, options, to_host=True)

        if index is not None:
            return read(self._devices.worker(index))
        worker = self._devices.background.worker(how.kind)
        if worker is None or (not halvings and self.is_slower(image, plans)):
            return None
        try:
            return read(worker)
        except DeviceError as error:
            with self._lock:
                first = self._gpu_failure is None
                self._gpu_failure = str(error).removesuffix(".")
            if first:  # if several threads fail, only one reports it
                logger.warning("'%s' is decoded on the CPU from now on: %s", self._path, error)
            return None

    def tiles_on_device(self, read: ReadTiles, number: int) -> TilesOnDevice | None:
        """Return the slide's tiles on the device that decodes an image.

        Parameters
        ----------
        read : callable
            `RegionReader.read_tiles`.
        number : int
            Number of the image.

        Returns
        -------
        TilesOnDevice or None
            None if the CPU decodes, or the device's cache is too small for a view.
        """
        worker = self._devices.started(self.index or 0) if self.uses_gpu(number) else None
        if worker is None or self._devices.tiles(worker.device).budget < LEAST_BUDGET:
            return None
        backend, found = self.backend(worker), self._on_device
        if found is None or found.backend is not backend:
            from napari_wsigpu.reading.on_device import TilesOnDevice

            found = TilesOnDevice(backend, "stored", read, partial(self._average, backend))
            self._on_device = found
        return found

    def decodes(self, image: LevelLayout) -> bool:
        """Return whether a device can decode an image's tiles that are read to it."""
        return self._choice[0] != "cpu" and not isinstance(recipe_for(image), str)

    def is_slower(self, image: LevelLayout, plans: Sequence[ReadPlan]) -> bool:
        """Return whether a GPU needs longer for plans than the CPU, and was not chosen."""
        how = recipe_for(image)
        least = 0 if isinstance(how, str) else LEAST_LOSSLESS.get(how.kind, 0)
        return self.index is None and sum(len(plan.tiles) for plan in plans) < least

    def is_refused(self, image: LevelLayout) -> bool:
        """Return whether it is known that the CPU decodes an image's tiles, now and later."""
        device, index = self._choice
        how = recipe_for(image)
        if device == "cpu" or isinstance(how, str):
            return True
        return index is None and self._devices.background.refuses(how.kind)

    def _average(
        self,
        backend: DeviceBackend,
        number: int,
        regions: Regions,
        options: ReadOptions,
    ) -> AnyArray | None:
        """Average regions of a level on a device and leave them there.

        Returns
        -------
        device array, shape (pixels, channels), or None
            None if the level is not averaged on devices, or memory is short.
        """
        finer, halvings = self._stored(number)
        if not halvings or self._images[finer].computed:
            return None
        halving = Halving(backend, finer, halvings)
        return halving.read(regions, options, to_host=False)

    def _stored(self, number: int) -> tuple[int, int]:
        """Return the stored level that a level is averaged from, and the number of halvings."""
        halvings = 0
        while number in self._halved:
            number, halvings = self._halved[number], halvings + 1
        return number, halvings

    def release(self) -> None:
        """Release streams, tiles and memory on devices."""
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
        # Created under the lock, so that all threads share one backend, which `release` finds.
        with self._lock:
            backend = self._backends.get(id(worker))
            if backend is None:
                from napari_wsigpu.gpu.jpeg.nvimagecodec import NvImageCodecDecoder
                from napari_wsigpu.reading.device import DeviceBackend

                decoder = NvImageCodecDecoder(worker, self._parts.decoder, self._verifier)
                tiles = self._devices.tiles(worker.device)
                backend = DeviceBackend(self._parts, decoder, tiles)
                self._backends[id(worker)] = backend
            return backend
