"""Whole tiles of one slide in device memory, for displays that draw there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.gpu.device.interfaces import TileFormat
from napari_wsigpu.reading.cache import TileKey
from napari_wsigpu.reading.device import fill_channels, tile_format
from napari_wsigpu.reading.plan import ReadOptions, Regions

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from napari_wsigpu.codecs.color import Color, ColorTable
    from napari_wsigpu.gpu.device.cuda import CudaDevice
    from napari_wsigpu.gpu.device.interfaces import Stream
    from napari_wsigpu.gpu.transfer.device_tiles import Reserved
    from napari_wsigpu.model.arrays import AnyArray, Array, DeviceArray, Integers, Mask, Records
    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.reading.device import DeviceBackend
    from napari_wsigpu.reading.parts import SlideParts

    Tile = tuple[int, int]
    ReadTiles = Callable[[int, Collection[Tile]], dict[Tile, Array]]
    Put = Callable[[int, AnyArray, Stream], None]
    Write = Callable[[Integers, slice, Stream], None]
    Average = Callable[[int, Regions, ReadOptions], DeviceArray | None]

WHOLE = ReadOptions(tolerant=True)


class LevelTiles(NamedTuple):
    """Tiles of one level to draw.

    Attributes
    ----------
    number : int
        Number of the level.
    tiles : ndarray of int64, shape (parts, 2)
        Row and column of the tile of each part.
    parts : ndarray of `gpu.device.kernel_tables.SCALED`
        The parts; `TilesOnDevice.draw` fills in `source`.
    """

    number: int
    tiles: Integers
    parts: Records


@dataclass(frozen=True, eq=False)
class DrawableTiles:
    """Whole tiles of one slide in device memory, which displays can draw.

    Parameters
    ----------
    backend : DeviceBackend
        Decodes on the device; kept as an attribute.
    color : str
        Color in the keys of the tiles; kept as an attribute.
    """

    backend: DeviceBackend
    color: Color

    @property
    def _parts(self) -> SlideParts:
        return self.backend.parts

    @property
    def device(self) -> CudaDevice:
        """The device that holds the tiles."""
        return self.backend.device

    def _image(self, number: int) -> LevelLayout:
        """Return the image with a number, as its tiles are in device memory."""
        return self._parts.images[number]

    def _key(self, number: int) -> int:
        """Return the number of an image in the cache of the device."""
        return number

    def decoded(self, number: int, tiles: Integers) -> Mask:
        """Return the mask of the tiles of a level that are in device memory now."""
        return self.backend.tiles.holds(self._parts.number, self._key(number), tiles)

    def ready(self, number: int, tiles: Integers) -> Mask:
        """Return the mask of the tiles of a level that can be drawn now."""
        return self.decoded(number, tiles)

    def draw(
        self,
        drawn: Sequence[LevelTiles],
        shape: tuple[int, int],
        channel: int | None,
        table: ColorTable | None,
        pictures: Sequence[tuple[DeviceArray, Records]],
        blank: float | Array,
        *,
        holes: bool,
    ) -> tuple[DeviceArray, set[tuple[int, int, int]]]:
        """Draw tiles that are in device memory into a new device array.

        Parameters
        ----------
        drawn : sequence of LevelTiles
            The tiles to draw, bottom to top. In place of an evicted tile, the tiles below it or the
            background show.
        shape : tuple of int
            Height and width.
        channel : int or None
            The channel to draw; None for RGBA.
        table : ColorTable or None
            Converts pixels to sRGB.
        pictures : sequence of (device array, ndarray of `gpu.device.kernel_tables.SCALED`)
            Arrays in the colors to show, and their parts, which are drawn first.
        blank : number or ndarray
            The background in the colors to show.
        holes : bool
            Whether the background shows anywhere even with all tiles available.

        Returns
        -------
        pixels : device array, shape (height, width, 4), or (height, width) for a channel
            The drawing.
        gone : set of (int, int, int)
            Number of the level, row and column of each tile that was evicted.
        """
        found: list[Reserved] = []
        work: list[tuple[Records, TileFormat, DeviceArray | None]] = []
        device, dtype = self.device, self._image(0).dtype
        gone: set[tuple[int, int, int]] = set()
        try:
            with device.active():
                colors = None if table is None else device.colors(table)
                size = (*shape, 4) if channel is None else shape
                pixels = self.backend.empty(size, dtype)
            for number, tiles, parts in drawn:
                # `DeviceTiles.find` accepts each tile once, but several parts may show one tile.
                unique, which = np.unique(tiles, axis=0, return_inverse=True)
                key = self._key(number)
                reserved, here = self.backend.tiles.find(self._parts.number, key, unique)
                gone.update((number, row, column) for row, column in unique[~here].tolist())
                if reserved is None:
                    continue
                found.append(reserved)
                addresses = np.zeros(len(unique), np.int64)
                addresses[here] = reserved.slots.addresses
                parts["source"] = addresses[which.reshape(-1)]
                seen = parts[parts["source"] > 0]
                work.append((seen, tile_format(self._image(number)), colors))
            for array, parts in reversed(pictures):
                height, width, *samples = array.shape
                tile = TileFormat(height, width, math.prod(samples), dtype.name)
                parts["source"] = device.address(array)
                work.insert(0, (parts, tile, None))

            def task(stream: Stream) -> None:
                if holes or gone:
                    self._fill(pixels, blank, stream)
                for parts, tile, used in work:
                    of_tile = channel if tile.channels > 1 or channel is None else 0
                    device.paste_scaled(parts, tile, pixels, stream, channel=of_tile, colors=used)

            # `work` returns when the kernels are done; until then the slots must stay pinned.
            self.backend.work(task)
        finally:
            for reserved in found:
                self.backend.tiles.unpin(reserved)
        return pixels, gone

    def _fill(self, pixels: DeviceArray, blank: float | Array, stream: Stream) -> None:
        if pixels.ndim == 2:
            self.device.fill(pixels, float(blank), stream)
            return
        values = [*np.broadcast_to(blank, (3,)).tolist(), 255]
        fill_channels(self.device, pixels, values, stream)

    def _keep(self, number: int, tiles: Integers, write: Write) -> None:
        """Let `write` fill slots of the cache with whole tiles, and register them."""
        image, cache = self._image(number), self.backend.tiles
        grid, tile = image.grid, tile_format(image)
        size = -(-image.height // grid.tile_height), -(-image.width // grid.tile_width)
        start = 0
        while start < len(tiles):
            reserved = cache.reserve(tile, image.tile_bytes, len(tiles) - start)
            part = slice(start, start + len(reserved.indices))
            try:
                self.backend.work(partial(write, reserved.slots.addresses, part))
                # Register last: from then on, other threads read the slots.
                cache.keep(reserved, self._parts.number, self._key(number), size, tiles[part])
            finally:
                cache.unpin(reserved)
            start = part.stop


@dataclass(frozen=True, eq=False)
class TilesOnDevice(DrawableTiles):
    """One slide's tiles on the device that decodes them, with colors as stored.

    Parameters
    ----------
    backend, color
        As in `DrawableTiles`.
    read : callable
        `RegionReader.read_tiles`, for tiles that the device can't decode.
    average : callable
        Averages regions of a computed level on the device; returns None if it can't.
    """

    _read_to_host: ReadTiles
    _average: Average

    def read(self, number: int, places: Sequence[Tile]) -> set[Tile]:
        """Decode tiles of one level to the device.

        Parameters
        ----------
        number : int
            Number of the level.
        places : sequence of (int, int)
            Row and column of each tile.

        Returns
        -------
        set of (int, int)
            Row and column of each tile that failed and shows the background.

        Raises
        ------
        DeviceError
            If the device fails.
        SlideError
            If the tiles can't be read from the file or server.
        """
        image = self._parts.images[number]
        # The device halves computed levels and decodes stored ones. The host reads and uploads
        # mosaics and tiles that the device can't decode.
        if image.computed:
            self._halve(number, self._absent(number, places))
        else:
            self.decode([number], places)
        absent = self._absent(number, places)
        failed = self._failed(number, absent)
        if absent == failed:
            return failed
        self._send(number, self._read_to_host(number, sorted(absent - failed)))
        return self._failed(number, self._absent(number, places))

    def decode(self, numbers: Sequence[int], places: Sequence[Tile]) -> None:
        """Decode tiles that images with the same grid store, if the device can, in one batch."""
        image = self._parts.images[numbers[0]]
        if not image.computed and not image.parts:
            self.backend.decode(numbers, np.array(places, np.int64).reshape(-1, 2))

    def _absent(self, number: int, places: Collection[Tile]) -> set[Tile]:
        tiles = np.array(list(places), np.int64).reshape(-1, 2)
        here = self.decoded(number, tiles)
        return {(row, column) for row, column in tiles[~here].tolist()}

    def _failed(self, number: int, places: Collection[Tile]) -> set[Tile]:
        log = self._parts.log
        if not log.has_failed():
            return set()
        computed = self._parts.images[number].computed
        keys = {place: TileKey(self._parts.number, number, *place) for place in places}
        return {place for place, key in keys.items() if log.has_failed(None if computed else key)}

    def _halve(self, number: int, places: Collection[Tile]) -> None:
        """Average whole tiles on the device; the host averages those cropped at edges."""
        image = self._parts.images[number]
        height, width = size = image.grid.tile_height, image.grid.tile_width
        whole = [place for place in sorted(places) if image.tile_rect(*place)[2:] == size]
        if not whole:
            return
        regions = Regions.of(image.tile_rect(*place) for place in whole)
        found = self._average(number, regions, WHOLE)
        if found is not None:
            tiles = found.reshape(len(whole), height, width, -1)
            self._copy(number, whole, tiles, self.device.copy)

    def _send(self, number: int, found: Mapping[Tile, Array]) -> None:
        """Upload tiles that the host has read."""
        image = self._parts.images[number]
        tile = tile_format(image)
        # Slots hold full tiles; the area outside the image stays 0.
        whole = np.zeros((len(found), tile.height, tile.width, tile.channels), image.dtype)
        for pixels, part in zip(whole, found.values(), strict=True):
            pixels[: part.shape[0], : part.shape[1]] = part.reshape(*part.shape[:2], -1)
        self._copy(number, list(found), whole, self.device.upload)

    def _copy(self, number: int, places: Sequence[Tile], whole: AnyArray, put: Put) -> None:
        """Copy whole tiles to slots of the cache and register them."""
        size = self._image(number).tile_bytes

        def write(addresses: Integers, part: slice, stream: Stream) -> None:
            for address, run in _adjacent_runs(addresses, size):
                put(address, whole[part][run], stream)

        self._keep(number, np.array(places, np.int64), write)


def _adjacent_runs(addresses: Integers, size: int) -> list[tuple[int, slice]]:
    """Return the runs of adjacent slots: the address of each run and the slice of its slots.

    While another thread draws, one copy per run competes for the GIL less than one per slot.
    """
    apart = np.flatnonzero(np.diff(addresses) != size) + 1
    bounds = [0, *apart.tolist(), len(addresses)]
    return [(int(addresses[first]), slice(first, last)) for first, last in pairwise(bounds)]
