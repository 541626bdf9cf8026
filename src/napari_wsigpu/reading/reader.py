"""`RegionReader`: pixels of one slide, by the way that is asked for or proves fastest."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.model.errors import RegionError
from napari_wsigpu.reading.cache import TileKey
from napari_wsigpu.reading.coverage import find_held
from napari_wsigpu.reading.host import HostBackend
from napari_wsigpu.reading.offload import Offload
from napari_wsigpu.reading.plan import ReadOptions, Regions, tile_rect
from napari_wsigpu.reading.planning import plan_regions
from napari_wsigpu.reading.throughput import tile_kind
from napari_wsigpu.storage.buffers import RegionMemory, into

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.color import ColorTable
    from napari_wsigpu.gpu.device.devices import Devices
    from napari_wsigpu.model.geometry import Rect
    from napari_wsigpu.reading.cache import TileCache
    from napari_wsigpu.reading.device import DeviceBackend
    from napari_wsigpu.reading.parts import SlideParts
    from napari_wsigpu.reading.plan import Keep, ReadPlan
    from napari_wsigpu.reading.throughput import Throughput

DEFAULT_OPTIONS = ReadOptions()
# Bytes that a process can have, on today's processors.
ADDRESSABLE = 1 << 47


class RegionReader:
    """Reads regions of one slide's levels and associated images, to the host or a device.

    Parameters
    ----------
    parts : SlideParts
        The slide.
    tiles, devices, throughput
        Where tiles are kept on the host, what decodes and keeps them on devices, and how fast each
        was so far.
    device : str
        ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``: what shall decode.
    keeps_whole : bool
        Whether tiles stay in caches that a region takes whole.

    Attributes
    ----------
    offload : Offload
        The choice of what decodes.
    """

    def __init__(
        self,
        parts: SlideParts,
        tiles: TileCache,
        devices: Devices,
        throughput: Throughput,
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
        self.offload = Offload(parts, devices, throughput, device)
        self._host = HostBackend(
            parts,
            tiles,
            lambda image, count, seconds: throughput.note(tile_kind(image), "cpu", count, seconds),
        )

    def read(
        self,
        number: int,
        regions: Regions,
        options: ReadOptions = DEFAULT_OPTIONS,
        out: NDArray[Any] | None = None,
    ) -> NDArray[Any]:
        """Read regions of one image that are all of one size, to the host.

        Parameters
        ----------
        number : int
            Number of the image.
        regions : Regions
            What of it.
        options : ReadOptions
            How; no channel with colours.
        out : ndarray, optional
            Where to put the pixels.

        Returns
        -------
        ndarray, shape (regions, height, width, channels), or without channels for one channel
            `out`, or a new array.

        Raises
        ------
        RegionError
            If the regions don't fit into memory.
        TileError
            If tiles can't be decoded, with their names.
        SlideError
            If the file can't be read.
        """
        options = self._meant(options)
        _check_size(regions)
        plans = plan_regions(number, self._images, regions)
        shape = len(regions), *regions.shapes[0], *self._samples(number, options)
        with options.turn:
            pixels = self.offload.read(number, plans, regions, options)
            if pixels is None:
                try:
                    dtype = self._images[number].dtype
                    pixels = self._memory.empty(shape, dtype) if out is None else out
                except (MemoryError, ValueError):
                    raise _too_large(regions) from None
                self._host.read(number, plans, pixels, options)
            self._let_go(plans, options)
        return pixels if pixels is out else into(out, pixels.reshape(shape))

    def read_small(self, number: int, region: Rect, pixels: NDArray[Any]) -> Keep | None:
        """Read a small region on the CPU without a plan; see `HostBackend.read_small`.

        A GPU would take longer to start than the CPU needs to decode a few tiles.
        """
        if self.offload.index is not None:
            return "recurring"
        return self._host.read_small(number, region, pixels)

    def held(self, number: int, regions: Regions) -> NDArray[np.bool_]:
        """Find which pixels of regions the file holds; see `find_held`.

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
        DeviceError
            If the device that was chosen fails.
        SlideError
            If the file or its server doesn't give their bytes, or the slide was closed.
        """
        image, places = self._images[number], list(tiles)
        options = ReadOptions(tolerant=True, table=table)
        regions = Regions.of(tile_rect(image, *place) for place in places)
        plans = plan_regions(number, self._images, regions)
        pixels = self.offload.read(number, plans, regions, options)
        if pixels is None and not image.parts:
            return self._whole_tiles(number, places, plans[0], options)
        if pixels is None:
            size = int(regions.offsets[-1])
            pixels = self._memory.empty((size, image.channels), image.dtype)
            self._host.read(number, plans, _views(pixels, regions), options)
        found = dict(zip(places, _views(pixels, regions), strict=True))
        slide = self._slide if table is None else ~self._slide
        keep = {
            TileKey(slide, number, *place): part
            for place, part in found.items()
            if not self._log.has_failed(
                None if image.computed else TileKey(self._slide, number, *place)
            )
        }
        self._tiles.put_all(keep, pixels.nbytes)
        return found

    def _whole_tiles(
        self, number: int, places: list[tuple[int, int]], plan: ReadPlan, options: ReadOptions
    ) -> dict[tuple[int, int], NDArray[Any]]:
        image = self._images[number]
        found = self._host.read_tiles(plan, options)
        blank = self._host.blank(number, options.table)
        for place in places:
            if place not in found:
                shape = (*tile_rect(image, *place)[2:], image.channels)
                found[place] = np.broadcast_to(np.asarray(blank, image.dtype), shape)
        return found

    def read_to_device(
        self,
        number: int,
        regions: Regions,
        device: str,
        out: Any = None,
        stream: Any = None,
        options: ReadOptions = DEFAULT_OPTIONS,
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
        options : ReadOptions
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
        backend = self.backend(device)
        options = self._meant(options)
        _check_size(regions)
        plans = plan_regions(number, self._images, regions)
        pixels = backend.read(
            number,
            plans,
            regions.offsets,
            options,
            to_host=False,
            share=self.offload.share_on(self._images[number].stored[0]),
            out=out,
            stream=stream,
        )
        shape = len(regions), *regions.shapes[0], *self._samples(number, options)
        if pixels is None:
            target = None if out is None else out.reshape(shape)
            return backend.send(self.read(number, regions, options), target, stream)
        self._let_go(plans, options)
        return pixels.reshape(shape)

    def release(self) -> None:
        """Let go of threads and tiles; the next read takes them again."""
        self._parts.decoder.release()
        self._host.release()
        self._memory.clear()
        self.offload.release()

    def clear_cache(self) -> None:
        """Drop the slide's decoded tiles, on the host and on devices."""
        self._tiles.forget(self._slide)
        for backend in self.offload.started():
            backend.forget_tiles()

    def backend(self, device: str) -> DeviceBackend:
        """Return what works on a device, named as in `read_to_device`."""
        return self.offload.backend(self.offload.worker(device))

    def _let_go(self, plans: Sequence[ReadPlan], options: ReadOptions) -> None:
        """Drop tiles that were kept for regions of which these were the last ones."""
        if options.later is None:
            return
        slide = self._slide if options.table is None else ~self._slide
        for plan in plans:
            done = plan.tiles[~options.later(options.past, plan.tiles)]
            self._tiles.drop(slide, plan.image, done)
            for backend in self.offload.started():
                backend.drop_tiles(plan.image, done)

    def _meant(self, options: ReadOptions) -> ReadOptions:
        """Return options that keep no whole tiles if only one task reads the slide."""
        if self._keeps_whole or options.keep == "none":
            return options
        return replace(options, keep="partly")

    def _samples(self, number: int, options: ReadOptions) -> tuple[int, ...]:
        return () if options.channel is not None else (self._images[number].channels,)


def _views(pixels: NDArray[Any], regions: Regions) -> list[NDArray[Any]]:
    """Cut the pixels of regions that lie one after another."""
    offsets = regions.offsets.tolist()
    return [
        pixels[begin:end].reshape(*shape, *pixels.shape[1:])
        for begin, end, shape in zip(offsets[:-1], offsets[1:], regions.shapes, strict=True)
    ]


def _check_size(regions: Regions) -> None:
    """Raise an error, before any plan is made, if no memory can hold so many pixels."""
    shape = regions.shapes[0]
    if max(*shape, len(regions) * math.prod(shape)) > ADDRESSABLE:
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
