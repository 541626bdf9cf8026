"""`TilesOnDevice`: whole tiles of one slide in device memory, for displays that draw there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from napari_wsigpu.gpu.device.device import TileFormat
from napari_wsigpu.reading.cache import TileKey
from napari_wsigpu.reading.device import fill_channels, tile_format
from napari_wsigpu.reading.plan import ReadOptions, Regions, tile_rect
from napari_wsigpu.reading.planning import plan_regions

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.color import ColorTable
    from napari_wsigpu.gpu.device.cuda import CudaDevice
    from napari_wsigpu.gpu.device.device import Stream
    from napari_wsigpu.gpu.transfer.tiles import Reserved
    from napari_wsigpu.reading.device import DeviceBackend
    from napari_wsigpu.reading.parts import SlideParts

    Tile = tuple[int, int]
    ReadTiles = Callable[[int, Collection[Tile]], dict[Tile, NDArray[Any]]]
    Put = Callable[[int, Any, Stream], None]
    Average = Callable[[int, Regions, ReadOptions, float], Any | None]

WHOLE = ReadOptions(tolerant=True)


class Drawn(NamedTuple):
    """What to draw of one level.

    Attributes
    ----------
    number : int
        Number of the level.
    tiles : ndarray of int64, shape (parts, 2)
        Row and column of each part's tile.
    parts : ndarray of `gpu.tables.SCALED`
        The parts; `source` is filled in.
    """

    number: int
    tiles: NDArray[np.int64]
    parts: NDArray[np.void]


@dataclass(frozen=True, eq=False)
class TilesOnDevice:
    """One slide's tiles on the device that decodes them, in stored colours.

    Parameters
    ----------
    backend : DeviceBackend
        What decodes, and works on the device; kept as an attribute.
    read : callable
        As `RegionReader.read_tiles`: what the device can't decode for itself.
    average : callable
        Averages regions of a level that the file lacks, where they stay; None if it can't.
    """

    backend: DeviceBackend
    _read_to_host: ReadTiles
    _average: Average

    @property
    def _parts(self) -> SlideParts:
        return self.backend.parts

    @property
    def device(self) -> CudaDevice:
        """Where they are."""
        return self.backend.device

    def here(self, number: int, tiles: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of some tiles of a level, by row and column, are decoded now."""
        reserved, here = self.backend.tiles.find(self._parts.number, number, tiles)
        if reserved is not None:
            self.backend.tiles.unpin(reserved)
        return here

    def read(self, number: int, places: Sequence[Tile], share: float) -> set[Tile]:
        """Decode tiles of one level to the device.

        Parameters
        ----------
        number : int
            Number of the level.
        places : sequence of (int, int)
            Row and column of each.
        share : float
            Part of the tiles that the device decodes.

        Returns
        -------
        set of (int, int)
            Those that failed, and show the background.

        Raises
        ------
        DeviceError
            If the device fails.
        SlideError
            If the file or its server doesn't give their bytes.
        """
        image = self._parts.images[number]
        if image.computed:
            self._halve(number, self._absent(number, places), share)
        elif not image.parts:
            regions = Regions.of(tile_rect(image, *place) for place in places)
            plans = plan_regions(number, self._parts.images, regions)
            self.backend.read(number, plans, regions.offsets, WHOLE, to_host=False, share=share)
        absent = self._absent(number, places)
        absent -= self._failed(number, absent)
        if absent:
            self._send(number, self._read_to_host(number, sorted(absent)))
        return self._failed(number, self._absent(number, places))

    def draw(
        self,
        drawn: Sequence[Drawn],
        shape: tuple[int, int],
        channel: int | None,
        table: ColorTable | None,
        of_overview: NDArray[np.void] | None,
        overview: Any,
        blank: Any,
        *,
        holes: bool,
    ) -> tuple[Any, set[tuple[int, int, int]]]:
        """Draw tiles that are here in a new device array.

        Parameters
        ----------
        drawn : sequence of Drawn
            What; tiles that are not here any more show what lies below, or the background.
        shape : tuple of int
            Height and width.
        channel : int or None
            The channel; None for RGBA.
        table : ColorTable or None
            The colours that pixels get.
        of_overview : ndarray of `gpu.tables.SCALED` or None
            Parts of the coarsest level.
        overview : device array
            That level.
        blank : number or ndarray
            The background in these colours.
        holes : bool
            Whether it is seen anywhere, even if all tiles are here.

        Returns
        -------
        pixels : device array, shape (height, width, 4), or (height, width) for a channel
            What is drawn.
        gone : set of (int, int, int)
            Level's number, row and column of each tile that is not here any more.
        """
        image, found = self._parts.images[0], []
        work: list[tuple[NDArray[np.void], TileFormat, Any]] = []
        device = self.device
        gone: set[tuple[int, int, int]] = set()
        try:
            with device.active():
                colors = None if table is None else device.colors(table)
                size = (*shape, 4) if channel is None else shape
                pixels = self.backend.empty(size, image.dtype)
            for number, tiles, parts in drawn:
                unique, which = np.unique(tiles, axis=0, return_inverse=True)
                reserved, here = self.backend.tiles.find(self._parts.number, number, unique)
                gone.update((number, row, column) for row, column in unique[~here].tolist())
                if reserved is None:
                    continue
                found.append(reserved)
                addresses = np.zeros(len(unique), np.int64)
                addresses[here] = reserved.slots.addresses
                parts["source"] = addresses[which.reshape(-1)]
                seen = parts[parts["source"] > 0]
                work.append((seen, tile_format(self._parts.images[number]), colors))
            if of_overview is not None:
                height, width, *samples = overview.shape
                tile = TileFormat(height, width, math.prod(samples), image.dtype.name)
                of_overview["source"] = device.address(overview)
                work.insert(0, (of_overview, tile, None))

            def task(stream: Stream) -> None:
                if holes or gone:
                    self._fill(pixels, blank, stream)
                for parts, tile, used in work:
                    of_tile = channel if tile.channels > 1 or channel is None else 0
                    device.paste_scaled(parts, tile, pixels, stream, channel=of_tile, colors=used)

            self.backend.work(task)
        finally:
            for reserved in found:
                self.backend.tiles.unpin(reserved)
        return pixels, gone

    def _fill(self, pixels: Any, blank: Any, stream: Stream) -> None:
        if pixels.ndim == 2:
            self.device.fill(pixels, blank, stream)
            return
        values = [*np.broadcast_to(blank, (3,)).tolist(), 255]
        fill_channels(self.device, pixels, values, stream)

    def _absent(self, number: int, places: Collection[Tile]) -> set[Tile]:
        tiles = np.array(list(places), np.int64).reshape(-1, 2)
        here = self.here(number, tiles)
        return {(row, column) for row, column in tiles[~here].tolist()}

    def _failed(self, number: int, places: Collection[Tile]) -> set[Tile]:
        if not self._parts.log.has_failed():
            return set()
        computed = self._parts.images[number].computed
        keys = {place: TileKey(self._parts.number, number, *place) for place in places}
        return {
            place
            for place, key in keys.items()
            if self._parts.log.has_failed(None if computed else key)
        }

    def _halve(self, number: int, places: Collection[Tile], share: float) -> None:
        """Average tiles where they stay; those at the image's edges are left to the host."""
        image = self._parts.images[number]
        height, width = size = image.grid.tile_height, image.grid.tile_width
        whole = [place for place in sorted(places) if tile_rect(image, *place)[2:] == size]
        if not whole:
            return
        regions = Regions.of(tile_rect(image, *place) for place in whole)
        found = self._average(number, regions, WHOLE, share)
        if found is not None:
            tiles = found.reshape(len(whole), height, width, -1)
            self._keep(number, whole, tiles, self.device.copy)

    def _send(self, number: int, found: Mapping[Tile, NDArray[Any]]) -> None:
        """Put tiles to the device that the host has read."""
        image = self._parts.images[number]
        tile = tile_format(image)
        whole = np.zeros((len(found), tile.height, tile.width, tile.channels), image.dtype)
        for pixels, part in zip(whole, found.values(), strict=True):
            pixels[: part.shape[0], : part.shape[1]] = part.reshape(*part.shape[:2], -1)
        self._keep(number, list(found), whole, self.device.upload)

    def _keep(self, number: int, places: Sequence[Tile], whole: Any, put: Put) -> None:
        """Copy whole tiles to slots, and make them findable."""
        image = self._parts.images[number]
        grid, tile = image.grid, tile_format(image)
        size = -(-image.height // grid.tile_height), -(-image.width // grid.tile_width)
        begin = 0
        while begin < len(whole):
            reserved: Reserved = self.backend.tiles.reserve(
                tile, image.tile_bytes, len(whole) - begin
            )
            end = begin + len(reserved.places)
            try:
                runs = _side_by_side(reserved.slots.addresses, image.tile_bytes)

                def task(
                    stream: Stream,
                    runs: list[tuple[int, slice]] = runs,
                    parts: Any = whole[begin:end],
                ) -> None:
                    for address, run in runs:
                        put(address, parts[run], stream)

                self.backend.work(task)
                tiles = np.array(places[begin:end], np.int64)
                self.backend.tiles.keep(reserved, self._parts.number, number, size, tiles)
            finally:
                self.backend.tiles.unpin(reserved)
            begin = end


def _side_by_side(addresses: NDArray[np.int64], size: int) -> list[tuple[int, slice]]:
    """Return where slots of a size begin that lie side by side, and which they are.

    To fill them one by one would ask for the interpreter as often, while another thread draws.
    """
    apart = np.flatnonzero(np.diff(addresses) != size) + 1
    bounds = [0, *apart.tolist(), len(addresses)]
    return [(int(addresses[first]), slice(first, last)) for first, last in pairwise(bounds)]
