"""`RegionReader`: pixels of one slide, by the way that is asked for or proves fastest."""

from __future__ import annotations

import logging
import math
import sys
import threading
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.errors import DeviceError, RegionError
from napari_wsigpu.gpu.codestream import recipe
from napari_wsigpu.gpu.devices import cuda_index, device_index
from napari_wsigpu.gpu.nvimagecodec import NvImageCodecDecoder
from napari_wsigpu.gpu.verify import Verifier
from napari_wsigpu.memory import RegionMemory
from napari_wsigpu.reading.cache import TileKey
from napari_wsigpu.reading.device import DeviceExecutor
from napari_wsigpu.reading.halving import Halving
from napari_wsigpu.reading.host import HostExecutor
from napari_wsigpu.reading.in_use import decoder_in_use
from napari_wsigpu.reading.plan import Regions, Wish, plan_regions, tile_rect
from napari_wsigpu.reading.throughput import tile_kind

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.color import ColorTable
    from napari_wsigpu.codecs.cpu import HostSlots
    from napari_wsigpu.codecs.decoder import Decoder
    from napari_wsigpu.gpu.devices import Devices
    from napari_wsigpu.gpu.worker import DecodeWorker
    from napari_wsigpu.layout import LevelLayout, PyramidLevel, SlideLayout
    from napari_wsigpu.reading.cache import TileCache
    from napari_wsigpu.reading.log import TileLog
    from napari_wsigpu.reading.plan import ReadPlan
    from napari_wsigpu.reading.throughput import Throughput
    from napari_wsigpu.storage.source import ByteSource

USUAL = Wish()

logger = logging.getLogger(__name__)


class RegionReader:
    """Reads regions of one slide's levels and associated images, to the host or a device.

    Parameters
    ----------
    slide : int
        Number of the open slide, for the keys of its tiles.
    layout : SlideLayout
        The slide.
    images : Mapping of int to LevelLayout
        Pyramid levels by number from 0 on, then the pictures that lie on those that are
        canvases; associated images by -1, -2, ...
    pyramid : sequence of PyramidLevel
        Which level is averaged from which.
    source, cpu, log
        Where bytes come from, what decodes them on the CPU, and what counts tiles.
    tiles, devices, throughput
        Where tiles are kept on the host, what decodes and keeps them on devices, and how fast each
        was so far.
    device : str
        ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``: what shall decode.
    keeps_whole : bool
        Whether tiles stay in caches that a region takes whole.
    """

    def __init__(
        self,
        slide: int,
        layout: SlideLayout,
        images: Mapping[int, LevelLayout],
        pyramid: Sequence[PyramidLevel],
        source: ByteSource,
        cpu: Decoder[HostSlots],
        log: TileLog,
        tiles: TileCache,
        devices: Devices,
        throughput: Throughput,
        device: str,
        *,
        keeps_whole: bool = True,
    ) -> None:
        self._slide = slide
        self._path = layout.path
        self._background = layout.background
        self._images = images
        self._halved = {
            level.number: level.finer
            for level in pyramid
            if level.inserted and level.finer is not None
        }
        self._source = source
        self._cpu = cpu
        self._log = log
        self._tiles = tiles
        self._devices = devices
        self._throughput = throughput
        self._choice = device, device_index(device)
        self._keeps_whole = keeps_whole
        self._memory = RegionMemory()
        self._lock = threading.Lock()
        self._executors: dict[int, DeviceExecutor] = {}
        self._verifier = Verifier(layout.path)
        self._gpu_failure: str | None = None
        self._host = HostExecutor(
            slide,
            images,
            pyramid,
            layout.background,
            source,
            cpu,
            tiles,
            log,
            lambda image, count, seconds: throughput.note(tile_kind(image), "cpu", count, seconds),
        )
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
    def decoder(self) -> tuple[str, str]:
        """What decodes level 0 now, and why; see `decoder_in_use`."""
        image = self._images[0].stored[0]
        against = self._verifier.reason or self._gpu_failure
        return decoder_in_use(image, *self._choice, against, self._devices, self._throughput)

    def read(self, number: int, regions: Regions, wish: Wish = USUAL) -> NDArray[Any]:
        """Read regions of one image that are all of one size, to the host.

        Parameters
        ----------
        number : int
            Number of the image.
        regions : Regions
            What of it.
        wish : Wish
            How; no channel with colours.

        Returns
        -------
        ndarray, shape (regions, height, width, channels), or without channels for one channel
            A new array.

        Raises
        ------
        RegionError
            If the regions don't fit into memory.
        TileError
            If tiles can't be decoded, with their names.
        SlideError
            If the file can't be read.
        """
        wish = self._meant(wish)
        _check_size(regions)
        plans = plan_regions(number, self._images, regions)
        pixels = self._by_gpu(number, plans, regions, wish)
        shape = len(regions), *regions.shapes[0], *self._samples(number, wish)
        if pixels is not None:
            return pixels.reshape(shape)
        try:
            pixels = self._memory.empty(shape, self._images[number].dtype)
        except (MemoryError, ValueError):
            raise _too_large(regions) from None
        self._host.read(number, plans, pixels, wish)
        return pixels

    def read_tiles(
        self,
        number: int,
        tiles: Collection[tuple[int, int]],
        table: ColorTable | None = None,
    ) -> dict[tuple[int, int], NDArray[Any]]:
        """Read whole tiles, for a display: those that fail show the background.

        Parameters
        ----------
        number : int
            Number of the image.
        tiles : collection of (int, int)
            Row and column of each.
        table : ColorTable, optional
            The colours that the pixels get.

        Returns
        -------
        dict of (int, int) to ndarray, shape (height, width, channels)
            Cut to the image. All but failed ones are in the host's cache now.

        Raises
        ------
        SlideClosedError
            If the slide was closed.
        SlideReadError, SlideChangedError
            If the file can't be read now, or is another one.
        DeviceError
            If the device that was chosen fails.
        """
        image, places = self._images[number], list(tiles)
        wish = Wish(tolerant=True, patient=True, table=table)
        regions = Regions.of(tile_rect(image, *place) for place in places)
        plans = plan_regions(number, self._images, regions)
        pixels = self._by_gpu(number, plans, regions, wish)
        if pixels is None and not image.parts:
            return self._whole_tiles(number, places, plans[0], wish)
        if pixels is None:
            size = int(regions.offsets[-1])
            pixels = self._memory.empty((size, image.channels), image.dtype)
            self._host.read(number, plans, _views(pixels, regions), wish)
        found = dict(zip(places, _views(pixels, regions), strict=True))
        slide = self._slide if table is None else ~self._slide
        keep = {TileKey(slide, number, *place): part for place, part in found.items()}
        if self._log.has_failed():
            of_log = (TileKey(self._slide, number, *place) for place in places)
            spoilt = [
                key for key in of_log if self._log.has_failed(None if image.computed else key)
            ]
            for key in spoilt:
                keep.pop(key._replace(slide=slide))
        self._tiles.put_all(keep, pixels.nbytes)
        return found

    def _whole_tiles(
        self, number: int, places: list[tuple[int, int]], plan: ReadPlan, wish: Wish
    ) -> dict[tuple[int, int], NDArray[Any]]:
        image = self._images[number]
        found = self._host.read_tiles(plan, wish)
        blank = self._host.blank(number, wish.table)
        for place in places:
            if place not in found:
                shape = (*tile_rect(image, *place)[2:], image.channels)
                found[place] = np.broadcast_to(np.asarray(blank, image.dtype), shape)
        return found

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

    def read_to_device(
        self,
        number: int,
        regions: Regions,
        device: str,
        out: Any = None,
        stream: Any = None,
        wish: Wish = USUAL,
    ) -> Any:
        """Read regions of one image that are all of one size, to a device.

        Parameters
        ----------
        number : int
            Number of the image.
        regions : Regions
            What of it.
        device : str
            ``"cuda"``, which is the slide's own device or the first one, or ``"cuda:N"``.
        out : cupy.ndarray, optional
            Where to put the pixels, of as many bytes.
        stream : int or object with ``ptr``, optional
            The CUDA stream to work on.
        wish : Wish
            How; no channel with colours.

        Returns
        -------
        cupy.ndarray, shape (regions, height, width, channels), or without channels for one channel

        Raises
        ------
        DeviceError
            If the device can't be used.
        RegionError, SlideError
            As in `read`.
        """
        executor = self._executor(self.worker(device))
        wish = self._meant(wish)
        wanted, own = self._choice
        _check_size(regions)
        plans = plan_regions(number, self._images, regions)
        image = self._images[number].stored[0]
        way = "gpu" if own is not None else "cpu"
        if wanted == "auto" and not isinstance(recipe(image), str):
            way = self._throughput.choose(tile_kind(image))
        pixels = executor.read(
            number,
            plans,
            regions.offsets,
            wish,
            to_host=False,
            share=self._share(image, way),
            out=out,
            stream=stream,
        )
        shape = len(regions), *regions.shapes[0], *self._samples(number, wish)
        if pixels is None:
            target = None if out is None else out.reshape(shape)
            return executor.send(self.read(number, regions, wish), target, stream)
        return pixels.reshape(shape)

    def send(self, pixels: NDArray[Any], device: str, out: Any = None, stream: Any = None) -> Any:
        """Copy host pixels to a device; see `DeviceExecutor.send`."""
        return self._executor(self.worker(device)).send(pixels, out, stream)

    def fetch(self, pixels: Any, device: str) -> NDArray[Any]:
        """Copy a device array to the host."""
        executor = self._executor(self.worker(device))
        host: NDArray[Any] = executor.work(partial(executor.device.download, pixels))
        return host

    def empty_on(self, device: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return a new array on a device.

        Raises
        ------
        RegionError
            If the device has no memory for it.
        """
        return self._executor(self.worker(device)).empty(shape, dtype)

    def average_on(
        self, device: str, finer: Any, pixels: Any, scale: tuple[float, float], stream: Any
    ) -> None:
        """Average pictures on a device; see `Device.average_area`."""
        executor = self._executor(self.worker(device))
        average = executor.device.average_area
        executor.work(lambda used: average(finer, pixels, scale, used), stream)

    def release(self) -> None:
        """Let go of threads and tiles; the next read takes them again."""
        self._cpu.release()
        self._host.release()
        self._memory.clear()
        with self._lock:
            executors, self._executors = self._executors, {}
        for executor in executors.values():
            executor.release()

    def clear_cache(self) -> None:
        """Drop the slide's decoded tiles, on the host and on devices."""
        self._tiles.forget(self._slide)
        with self._lock:
            executors = list(self._executors.values())
        for executor in executors:
            executor.forget_tiles()

    def _meant(self, wish: Wish) -> Wish:
        """Return a wish, less tiles to keep that a task alone reads."""
        if self._keeps_whole or wish.keep == "none":
            return wish
        return replace(wish, keep="partly")

    def _samples(self, number: int, wish: Wish) -> tuple[int, ...]:
        return () if wish.channel is not None else (self._images[number].channels,)

    def _by_gpu(
        self, number: int, plans: Sequence[ReadPlan], regions: Regions, wish: Wish
    ) -> NDArray[Any] | None:
        """Read by the GPU if it is there, ready and the fastest; else return None.

        Returns
        -------
        ndarray, shape (pixels, channels), or (pixels,) for one channel
            Region after region.
        """
        halvings, finer = 0, number
        while finer in self._halved:
            finer, halvings = self._halved[finer], halvings + 1
        level = self._images[finer]
        image = level.stored[0]
        device, index = self._choice
        if device == "cpu" or number < 0 or level.computed or self._gpu_failure is not None:
            return None
        how = recipe(image)
        if isinstance(how, str) or self._verifier.reason is not None:
            return None

        def read(worker: DecodeWorker, share: float) -> NDArray[Any] | None:
            executor = self._executor(worker)
            if halvings:
                return Halving(executor, self._images, finer, halvings).read(regions, wish, share)
            return executor.read(number, plans, regions.offsets, wish, to_host=True, share=share)

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

    def _executor(self, worker: DecodeWorker) -> DeviceExecutor:
        with self._lock:
            executor = self._executors.get(id(worker))
            if executor is None:
                executor = DeviceExecutor(
                    self._slide,
                    self._images,
                    self._background,
                    self._source,
                    NvImageCodecDecoder(worker, self._cpu, self._verifier),
                    self._devices.tiles(worker.device),
                    self._log,
                    self._note,
                )
                self._executors[id(worker)] = executor
            return executor

    def _note(self, image: LevelLayout, tiles: int, seconds: float, share: float) -> None:
        self._throughput.note(tile_kind(image), "gpu" if share == 1 else "both", tiles, seconds)

    def _share(self, image: LevelLayout, way: str) -> float:
        """Return the part of the tiles that the device decodes."""
        return self._throughput.share(tile_kind(image)) if way == "both" else float(way == "gpu")


def _views(pixels: NDArray[Any], regions: Regions) -> list[NDArray[Any]]:
    """Cut the pixels of regions that lie one after another."""
    offsets = regions.offsets.tolist()
    return [
        pixels[begin:end].reshape(*shape, *pixels.shape[1:])
        for begin, end, shape in zip(offsets[:-1], offsets[1:], regions.shapes, strict=True)
    ]


def _check_size(regions: Regions) -> None:
    """Raise an error if there are more pixels than a number of 64 bits can count."""
    shape = regions.shapes[0]
    if max(*shape, len(regions) * math.prod(shape)) > sys.maxsize:
        raise _too_large(regions)


def _too_large(regions: Regions) -> RegionError:
    height, width = regions.shapes[0]
    if len(regions) == 1:
        return RegionError(
            f"A region of {width} x {height} pixels doesn't fit into memory; read it in parts."
        )
    return RegionError(
        f"A batch of {len(regions)} regions of {width} x {height} pixels doesn't fit into memory; "
        "use a smaller batch_size."
    )
