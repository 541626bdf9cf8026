"""Decoded tiles in device memory: one cache a device, of places that are used again."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from napari_wsigpu.gpu.device.device import Slots

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from napari_wsigpu.gpu.device.cuda import CudaDevice
    from napari_wsigpu.gpu.device.device import TileFormat

SLAB_BYTES, SLAB_TILES = 128 << 20, 4096
NOBODY = -1


class Reserved(NamedTuple):
    """Places in a shelf that nobody else gets until they are unpinned."""

    shelf: Shelf
    places: NDArray[np.int64]

    @property
    def slots(self) -> Slots:
        """The places as a decoder wants them."""
        shelf = self.shelf
        return Slots(shelf.tile, shelf.addresses[self.places])


class Shelf:
    """Places for tiles of one format, in a few large allocations."""

    def __init__(self, tile: TileFormat, tile_bytes: int) -> None:
        self.tile = tile
        self.tile_bytes = tile_bytes
        self.slabs: list[Any] = []
        self.addresses = np.zeros(0, np.int64)
        self.owners = np.zeros((0, 4), np.int64)
        self.pins = np.zeros(0, np.int32)
        self.used = np.zeros(0, np.int64)

    @property
    def size(self) -> int:
        """Bytes of device memory that it takes."""
        return len(self.addresses) * self.tile_bytes

    @property
    def free(self) -> NDArray[np.int64]:
        """Places that hold no tile and are not pinned."""
        return np.flatnonzero((self.owners[:, 0] == NOBODY) & (self.pins == 0))

    @property
    def evictable(self) -> NDArray[np.int64]:
        """Places that hold a tile and are not pinned."""
        return np.flatnonzero((self.owners[:, 0] != NOBODY) & (self.pins == 0))

    def add(self, address: int, slab: Any, count: int) -> None:
        """Add an allocation of `count` places."""
        self.slabs.append(slab)
        places = address + self.tile_bytes * np.arange(count, dtype=np.int64)
        self.addresses = np.append(self.addresses, places)
        owners = np.append(self.owners, np.full((count, 4), NOBODY, np.int64), axis=0)
        self.owners = np.asfortranarray(owners)  # its first column is looked through for each batch
        self.pins = np.append(self.pins, np.zeros(count, np.int32))
        self.used = np.append(self.used, np.zeros(count, np.int64))


class LevelPlaces(NamedTuple):
    """Where the tiles of one level are: a table of places in a shelf, -1 for none."""

    shelf: Shelf
    table: NDArray[np.int32]


class DeviceTiles:
    """Tiles on one device within a budget of bytes, the least recently used given up first.

    Safe under many threads. Tiles that are being decoded or copied are pinned: their place is
    not given to others.

    Parameters
    ----------
    device : CudaDevice
        Whose memory it is.
    budget : int
        Bytes of device memory to take at most.
    slab_bytes : int
        Bytes to allocate at a time, as far as the budget has them.

    Attributes
    ----------
    device : CudaDevice
        Whose memory it is.
    """

    def __init__(self, device: CudaDevice, budget: int, slab_bytes: int = SLAB_BYTES) -> None:
        self.device = device
        self._budget = budget
        self._slab_bytes = slab_bytes
        self._lock = threading.Lock()
        self._shelves: dict[TileFormat, Shelf] = {}
        self._levels: dict[tuple[int, int], LevelPlaces] = {}
        self._clock = 0

    @property
    def budget(self) -> int:
        """Bytes of device memory to take at most; setting it gives up what nobody uses now."""
        return self._budget

    @budget.setter
    def budget(self, budget: int) -> None:
        self._budget = budget
        self.clear()

    @property
    def used(self) -> int:
        """Bytes of device memory that are taken now."""
        with self._lock:
            return self._taken()

    def find(
        self, slide: int, level: int, tiles: NDArray[np.int64]
    ) -> tuple[Reserved | None, NDArray[np.bool_]]:
        """Pin those of many tiles that are here.

        Parameters
        ----------
        slide, level : int
            As in a tile's key.
        tiles : ndarray of int64, shape (tiles, 2)
            Row and column of each, none twice.

        Returns
        -------
        Reserved or None
            The tiles' places, in their order.
        ndarray of bool, shape (tiles,)
            Which of the tiles these are.
        """
        with self._lock:
            if (slide, level) not in self._levels:
                return None, np.zeros(len(tiles), np.bool_)
            shelf, table = self._levels[slide, level]
            found = table[tiles[:, 0], tiles[:, 1]]
            here = found != NOBODY
            places = found[here].astype(np.int64)
            if not len(places):
                return None, here
            shelf.pins[places] += 1
            self._clock += 1
            shelf.used[places] = self._clock
            return Reserved(shelf, places), here

    def reserve(self, tile: TileFormat, tile_bytes: int, count: int) -> Reserved:
        """Pin up to `count` places for new tiles.

        Returns
        -------
        Reserved
            Fewer places where memory is short.

        Raises
        ------
        MemoryError
            If there is not one.
        """
        with self._lock:
            shelf = self._shelves.setdefault(tile, Shelf(tile, tile_bytes))
            free = shelf.free
            if len(free) < count:
                self._grow(shelf, count - len(free))
                free = shelf.free
            places = free[:count]
            if len(free) < count:
                owned = shelf.evictable
                oldest = owned[_lowest(shelf.used[owned], count - len(free))]
                self._evict(shelf, oldest)
                places = np.append(free, oldest)
            if not len(places):
                raise MemoryError(f"no device memory is left for tiles on '{self.device.name}'")
            shelf.pins[places] += 1
            return Reserved(shelf, places)

    def keep(
        self,
        reserved: Reserved,
        slide: int,
        level: int,
        grid: tuple[int, int],
        tiles: NDArray[np.int64],
    ) -> None:
        """Make decoded tiles findable.

        Parameters
        ----------
        reserved : Reserved
            Their places.
        slide, level : int
            As in a tile's key.
        grid : tuple of int
            (rows, columns) of the level's whole grid of tiles.
        tiles : ndarray of int64, shape (places, 2)
            (row, column) of each.
        """
        shelf = reserved.shelf
        with self._lock:
            level_places = self._levels.get((slide, level))
            if level_places is None or level_places.shelf is not shelf:
                level_places = LevelPlaces(shelf, np.full(grid, NOBODY, np.int32))
                self._levels[slide, level] = level_places
            table = level_places.table
            places, (rows, columns) = reserved.places, tiles.T
            before = table[rows, columns]
            shelf.owners[before[before != NOBODY], 0] = NOBODY
            table[rows, columns] = places
            owners = np.empty((len(tiles), 4), np.int64)
            owners[:, 0], owners[:, 1], owners[:, 2:] = slide, level, tiles
            shelf.owners[places] = owners
            self._clock += 1
            shelf.used[places] = self._clock

    def unpin(self, reserved: Reserved) -> None:
        """Let the places be given to others."""
        with self._lock:
            reserved.shelf.pins[reserved.places] -= 1

    def drop(self, slide: int, level: int, tiles: NDArray[np.int64]) -> None:
        """Drop those of many tiles of one level that are here; see `find`."""
        with self._lock:
            if (slide, level) in self._levels:
                shelf, table = self._levels[slide, level]
                places = table[tiles[:, 0], tiles[:, 1]]
                self._evict(shelf, places[places != NOBODY].astype(np.int64))

    def forget(self, slide: int) -> None:
        """Drop all tiles of one slide."""
        with self._lock:
            for key in [key for key in self._levels if key[0] == slide]:
                del self._levels[key]
            for shelf in self._shelves.values():
                shelf.owners[shelf.owners[:, 0] == slide, 0] = NOBODY

    def clear(self) -> None:
        """Drop all tiles, and free the memory that nobody uses now."""
        with self._lock:
            self._levels.clear()
            for shelf in self._shelves.values():
                shelf.owners[:, 0] = NOBODY
        self.trim()

    def trim(self) -> None:
        """Free memory that holds no tile."""
        with self._lock:
            for tile, shelf in list(self._shelves.items()):
                if not shelf.pins.any() and (shelf.owners[:, 0] == NOBODY).all():
                    self._drop(tile)

    def _evict(self, shelf: Shelf, places: NDArray[np.int64]) -> None:
        owners = shelf.owners[places]
        for slide, level in {*map(tuple, owners[:, :2].tolist())}:
            rows, columns = owners[(owners[:, 0] == slide) & (owners[:, 1] == level), 2:].T
            self._levels[slide, level].table[rows, columns] = NOBODY
        shelf.owners[places, 0] = NOBODY

    def _grow(self, shelf: Shelf, missing: int) -> None:
        """Take more memory, as far as budget and device have it: half and half again."""
        while self._taken() + missing * shelf.tile_bytes > self._budget:
            if not self._give_up_another(shelf, missing):
                break
        room = (self._budget - self._taken()) // shelf.tile_bytes
        wanted = max(missing, min(SLAB_TILES, self._slab_bytes // shelf.tile_bytes))
        count = min(wanted, max(room, 0 if shelf.size else 1))
        while count > 0:
            try:
                address, slab = self.device.allocate(count * shelf.tile_bytes)
            except MemoryError:
                if count > missing:
                    count = missing
                elif not self._give_up_another(shelf, missing):
                    count //= 2
                continue
            shelf.add(address, slab, count)
            return

    def _taken(self) -> int:
        return sum(shelf.size for shelf in self._shelves.values())

    def _give_up_another(self, shelf: Shelf, missing: int) -> bool:
        """Free the memory of another format that nobody uses now, if there is one.

        It stays if it was used since those of the shelf's own tiles were that can go instead.
        """
        own = shelf.used[shelf.evictable]
        since = own[_lowest(own, missing)].max() if len(own) >= missing > 0 else None
        for tile, other in self._shelves.items():
            used = other.used[other.owners[:, 0] != NOBODY].max(initial=0)
            stays = since is not None and used > since
            if other is not shelf and not other.pins.any() and not stays:
                self._drop(tile)
                return True
        return False

    def _drop(self, tile: TileFormat) -> None:
        shelf = self._shelves.pop(tile)
        for key in [key for key, places in self._levels.items() if places.shelf is shelf]:
            del self._levels[key]


def _lowest(values: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return the indices of the lowest values."""
    if count >= len(values):
        return np.arange(len(values))
    return np.argpartition(values, count)[:count]
