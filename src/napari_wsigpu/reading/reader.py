"""`RegionReader`: read pixels of one slide on the CPU or a GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from napari_wsigpu.model.errors import RegionError, TileError, too_large
from napari_wsigpu.reading.cache import TileKey
from napari_wsigpu.reading.coverage import find_held
from napari_wsigpu.reading.host import HostBackend
from napari_wsigpu.reading.offload import Offload
from napari_wsigpu.reading.plan import NEVER, ReadOptions, Regions
from napari_wsigpu.reading.planning import plan_regions
from napari_wsigpu.storage.buffers import RegionMemory, copy_into

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from napari_wsigpu.codecs.color import ColorTable
    from napari_wsigpu.gpu.device.devices import Devices
    from napari_wsigpu.model.arrays import AnyArray, Array, DeviceArray, Integers, Mask
    from napari_wsigpu.model.geometry import Rect
    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.reading.cache import TileCache
    from napari_wsigpu.reading.device import AnyStream, DeviceBackend
    from napari_wsigpu.reading.parts import SlideParts
    from napari_wsigpu.reading.plan import Cancellation, Keep, ReadPlan

    Result = TypeVar("Result")

DEFAULT_OPTIONS = ReadOptions()
# Limits of the tiles that a check decodes at once.
CHECKED_TILES, CHECKED_BYTES = 1024, 128 << 20
# Size in bytes of the virtual address space of a process on x86-64.
ADDRESSABLE = 1 << 47


class RegionReader:
    """Reads regions of one slide's levels and associated images, to the host or a device.

    Parameters
    ----------
    parts : SlideParts
        The slide.
    tiles : TileCache
        Cache of decoded tiles on the host.
    devices : Devices
        The GPUs and their caches of tiles.
    device : str
        The device that decodes: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
    keeps_whole : bool
        Whether to cache tiles that a region covers completely.

    Attributes
    ----------
    offload : Offload
        Chooses the CPU or a GPU for each read.
    """

    def __init__(
        self,
        parts: SlideParts,
        tiles: TileCache,
        devices: Devices,
        device: str,
        *,
        keeps_whole: bool = True,
    ) -> None:
        self._parts = parts
        self._slide = parts.number
        self._images = parts.images
        self._log = parts.log
        self._tiles = tiles
        self._keeps_whole = keeps_whole
        self._memory = RegionMemory()
        self.offload = Offload(parts, devices, device)
        self._host = HostBackend(parts, tiles)

    def read(
        self,
        number: int,
        regions: Regions,
        options: ReadOptions = DEFAULT_OPTIONS,
        out: Array | None = None,
    ) -> Array:
        """Read regions of one size from an image to the host.

        Parameters
        ----------
        number : int
            Number of the image.
        regions : Regions
            The regions.
        options : ReadOptions
            How to read; a channel and a color table are mutually exclusive.
        out : ndarray, optional
            Receives the pixels.

        Returns
        -------
        ndarray, shape (regions, height, width, channels), or without channels for one channel
            `out`, or a new array.

        Raises
        ------
        RegionError
            If the regions don't fit into memory.
        TileError
            If tiles fail to decode; the error names them.
        DeviceError
            If the chosen device fails.
        SlideError
            If the file can't be read.
        """
        options = self._effective(options)
        _check_size(regions)
        plans = plan_regions(number, self._images, regions)
        samples = () if options.channel is not None else (self._images[number].channels,)
        shape = len(regions), *regions.shapes[0], *samples
        # Planning needs no lock.
        with options.lock:
            pixels = self.offload.read(number, plans, regions, options)
            if pixels is None:
                try:
                    dtype = self._images[number].dtype
                    pixels = self._memory.empty(shape, dtype) if out is None else out
                except (MemoryError, ValueError):
                    raise _too_large(regions) from None
                self._host.read(number, plans, pixels, options)
            self._drop_done(plans, options)
        return pixels if pixels is out else copy_into(out, pixels.reshape(shape))

    def read_small(self, number: int, region: Rect, pixels: Array) -> Keep | None:
        """Read a small region on the CPU without a plan; see `HostBackend.read_small`.

        If a GPU is chosen, it is never bypassed. With ``"auto"``, the CPU decodes so few tiles in
        less time than a GPU.
        """
        if self.offload.index is not None:
            return "recurring"
        return self._host.read_small(number, region, pixels)

    def send_small(
        self,
        number: int,
        region: Rect,
        device: str,
        out: DeviceArray = None,
        stream: AnyStream = None,
    ) -> AnyArray | None:
        """Read a small region as `read_small` does, and copy it to a device.

        Parameters
        ----------
        number, region, device, out, stream
            As in `read_to_device`.

        Returns
        -------
        cupy.ndarray, shape (height, width, channels), or None
            None if the region needs a plan.
        """
        backend, image = self.backend(device), self._images[number]
        shape = region.height, region.width, image.channels
        try:
            buffer = backend.worker.acquire_buffer(math.prod(shape) * image.dtype.itemsize)
        except MemoryError:
            return None
        pixels = np.frombuffer(buffer, image.dtype, math.prod(shape)).reshape(shape)
        sent = None
        if self._host.read_small(number, region, pixels) is None:
            sent = backend.send(pixels, out, stream)
        backend.worker.release_buffer(buffer)
        return sent

    def held(self, number: int, regions: Regions) -> Mask:
        """Return the mask of the pixels that the file holds; see `find_held`.

        Raises
        ------
        RegionError
            If the regions don't fit into memory.
        """
        _check_size(regions)
        return find_held(number, self._images, self._parts.finer, regions)

    def read_tiles(
        self,
        number: int,
        tiles: Collection[tuple[int, int]],
        table: ColorTable | None = None,
        cancellation: Cancellation = NEVER,
    ) -> dict[tuple[int, int], Array]:
        """Read whole tiles for a display; tiles that fail show the background.

        Parameters
        ----------
        number : int
            Number of the image.
        tiles : collection of (int, int)
            Row and column of each tile.
        table : ColorTable, optional
            Converts the pixels to sRGB.
        cancellation : Cancellation
            Stops the read, which then raises a `CancelledError`.

        Returns
        -------
        dict of (int, int) to ndarray, shape (height, width, channels)
            The tiles, cropped to the image. All except failed ones are cached on the host.

        Raises
        ------
        DeviceError
            If the chosen device fails.
        SlideError
            If the tiles can't be read from the file or server, or the slide is closed.
        """
        image, places = self._images[number], list(tiles)
        options = ReadOptions(tolerant=True, table=table, cancellation=cancellation)
        regions = Regions.of(image.tile_rect(*place) for place in places)
        plans = plan_regions(number, self._images, regions)
        pixels = self.offload.read(number, plans, regions, options)
        if pixels is None and not image.parts:
            return self._whole_tiles(number, places, plans[0], options)
        if pixels is None:
            size = int(regions.offsets[-1])
            pixels = self._memory.empty((size, image.channels), image.dtype)
            self._host.read(number, plans, _views(pixels, regions), options)
        # All tiles share one buffer, so the cache evicts them together.
        found = dict(zip(places, _views(pixels, regions), strict=True))
        keep = {
            TileKey(self._slide, number, *place, options.color): part
            for place, part in found.items()
            if not self._log.has_failed(
                None if image.computed else TileKey(self._slide, number, *place)
            )
        }
        self._tiles.put_all(keep, pixels.nbytes)
        return found

    def each(self, numbers: Sequence[int], read: Callable[[int], Result]) -> list[Result]:
        """Read several images concurrently, each by calling ``read(number)``."""
        return self._parts.decoder.run_all([partial(read, number) for number in numbers])

    def cached_tiles(
        self, number: int, tiles: Collection[tuple[int, int]]
    ) -> dict[tuple[int, int], Array]:
        """Return the tiles of an image that are cached on the host, with colors as stored."""
        places = np.array([*tiles], np.int64).reshape(-1, 2)
        found = zip(tiles, self._tiles.get_all(self._slide, number, places), strict=True)
        return {tile: pixels for tile, pixels in found if pixels is not None}

    def check_tiles(
        self, number: int, progress: Callable[[int], None], cancellation: Cancellation
    ) -> list[tuple[str, str]]:
        """Decode all stored tiles of an image completely, and drop their pixels.

        Parameters
        ----------
        number : int
            Number of an image that is not a mosaic.
        progress : callable
            Called after each batch with the number of tiles in it.
        cancellation : Cancellation
            Stops the check, which then raises a `CancelledError`.

        Returns
        -------
        list of (str, str)
            Name and reason of each tile that failed.
        """
        image = self._images[number]
        options = ReadOptions(keep="none", cancellation=cancellation)
        failures: list[tuple[str, str]] = []
        places = stored_tiles(image)
        step = max(1, min(CHECKED_TILES, CHECKED_BYTES // image.tile_bytes))
        for first in range(0, len(places), step):
            some = places[first : first + step]
            regions = Regions.of(image.tile_rect(*place) for place in some.tolist())
            plans = plan_regions(number, self._images, regions)
            try:
                if self.offload.read(number, plans, regions, options) is None:
                    self._host.check_tiles(plans[0], options)
            except TileError as error:
                failures += error.failures
            progress(len(some))
        return failures

    def _whole_tiles(
        self, number: int, places: list[tuple[int, int]], plan: ReadPlan, options: ReadOptions
    ) -> dict[tuple[int, int], Array]:
        image = self._images[number]
        found = self._host.read_tiles(plan, options)
        blank = self._host.blank(number, options.table)
        for place in places:
            if place not in found:
                shape = (*image.tile_rect(*place)[2:], image.channels)
                found[place] = np.broadcast_to(np.asarray(blank, image.dtype), shape)
        return found

    def read_to_device(
        self,
        number: int,
        regions: Regions,
        device: str,
        out: DeviceArray = None,
        stream: AnyStream = None,
        options: ReadOptions = DEFAULT_OPTIONS,
    ) -> AnyArray:
        """Read regions of one size from an image to a device.

        Parameters
        ----------
        number : int
            Number of the image.
        regions : Regions
            The regions.
        device : str
            ``"cuda:N"``, or ``"cuda"`` for the GPU chosen for the slide, or else the first GPU.
        out : cupy.ndarray, optional
            Receives the pixels; must have the right number of bytes.
        stream : int or object with ``ptr``, optional
            The caller's CUDA stream, on which all work is ordered.
        options : ReadOptions
            How to read; a channel and a color table are mutually exclusive.

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
        backend, image = self.backend(device), self._images[number]
        options = self._effective(options)
        _check_size(regions)
        samples = () if options.channel is not None else (image.channels,)
        shape = len(regions), *regions.shapes[0], *samples
        pixels: AnyArray | None = None
        if self.offload.decodes(image.stored[0]):
            with backend.worker.turn.taken():
                plans = plan_regions(number, self._images, regions)
                if not self.offload.is_slower(image.stored[0], plans):
                    pixels = backend.read(
                        number,
                        plans,
                        regions.offsets,
                        options,
                        to_host=False,
                        out=out,
                        stream=stream,
                    )
                if pixels is not None:
                    self._drop_done(plans, options)
        if pixels is None:
            target = None if out is None else out.reshape(shape)
            host = self._read_staged(number, regions, backend, shape, options)
            return backend.send(host, target, stream)
        return pixels.reshape(shape)

    def _read_staged(
        self,
        number: int,
        regions: Regions,
        backend: DeviceBackend,
        shape: tuple[int, ...],
        options: ReadOptions,
    ) -> Array:
        """Read regions to host memory that a device copies at full speed."""
        try:
            staging = backend.device.staging(shape, self._images[number].dtype)
        except (MemoryError, ValueError):
            raise _too_large(regions) from None
        return self.read(number, regions, options, staging)

    def release(self) -> None:
        """Release threads, buffers and tiles; the next read acquires them again."""
        self._parts.decoder.release()
        self._host.release()
        self._memory.clear()
        self.offload.release()

    def clear_cache(self) -> None:
        """Drop the slide's decoded tiles on the host and on devices."""
        self._host.clear_cache()
        for backend in self.offload.started():
            backend.forget_tiles()

    def backend(self, device: str) -> DeviceBackend:
        """Return the backend of a device, named as in `read_to_device`."""
        return self.offload.backend(self.offload.worker(device))

    def _drop_done(self, plans: Sequence[ReadPlan], options: ReadOptions) -> None:
        """Drop cached tiles that no later region needs."""
        if options.later is None:
            return
        for plan in plans:
            done = plan.tiles[~options.later(options.regions_done, plan.tiles)]
            self._tiles.drop(self._slide, plan.image, done, options.color)
            for backend in self.offload.started():
                backend.drop_tiles(plan.image, done)

    def _effective(self, options: ReadOptions) -> ReadOptions:
        """Restrict caching to partly covered tiles unless `keeps_whole` is set."""
        if self._keeps_whole or options.keep == "none":
            return options
        return replace(options, keep="partly")


def stored_tiles(image: LevelLayout) -> Integers:
    """Return the row and column of each tile that the file holds, with shape (tiles, 2)."""
    return np.argwhere(image.grid.byte_counts.any(axis=0))


def _views(pixels: Array, regions: Regions) -> list[Array]:
    """Return a view of the pixels of each region in one buffer of all regions."""
    offsets = regions.offsets.tolist()
    return [
        pixels[start:stop].reshape(*shape, *pixels.shape[1:])
        for start, stop, shape in zip(offsets[:-1], offsets[1:], regions.shapes, strict=True)
    ]


def _check_size(regions: Regions) -> None:
    """Raise a `RegionError` before planning if no memory could hold the pixels."""
    shape = regions.shapes[0]
    if max(*shape, len(regions) * math.prod(shape)) > ADDRESSABLE:
        raise _too_large(regions)


def _too_large(regions: Regions) -> RegionError:
    height, width = regions.shapes[0]
    if len(regions) == 1:
        return too_large(width, height)
    return RegionError(
        f"A batch of {len(regions)} regions of {width} x {height} pixels doesn't fit into memory; "
        "use a smaller batch_size."
    )
