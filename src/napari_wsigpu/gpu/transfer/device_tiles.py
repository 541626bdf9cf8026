"""`DeviceTiles`: a cache of decoded tiles in device memory."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.gpu.device.interfaces import Slots

if TYPE_CHECKING:
    import cupy
    from numpy.typing import NDArray

    from napari_wsigpu.gpu.device.cuda import CudaDevice
    from napari_wsigpu.gpu.device.interfaces import TileFormat
    from napari_wsigpu.model.arrays import Integers

SLAB_BYTES, SLAB_TILES = 128 << 20, 4096
# Evicting takes long, as it looks at all slots, so at least this part of them is evicted at a time.
PARTS_OF_POOL = 16
# Owner of a slot without a tile, and slot of a tile that is not cached.
NO_TILE = -1


class Reserved(NamedTuple):
    """Slots of a pool that are pinned: no other tile can take them until they are unpinned."""

    pool: SlotPool
    indices: Integers

    @property
    def slots(self) -> Slots:
        """The slots' device addresses, for a decoder."""
        pool = self.pool
        return Slots(pool.tile, pool.addresses[self.indices])


class SlotPool:
    """Slots for tiles of one format, in a few large allocations ("slabs").

    `DeviceTiles` protects it with its lock.

    Attributes
    ----------
    tile : TileFormat
        Format of the tiles.
    tile_bytes : int
        Size of a slot.
    slabs : list of cupy.cuda.Memory
        Owners of the memory.
    addresses : ndarray of int64, shape (slots,)
        Device address of each slot.
    owners : ndarray of int64, shape (slots, 4)
        Slide, level, row and column of the tile in each slot; the slide of an empty slot is -1.
    pins : ndarray of int32, shape (slots,)
        Number of users of each slot; only a slot without users can be given to another tile.
    used : ndarray of int64, shape (slots,)
        Value of the cache's clock when the slot was last used.
    """

    def __init__(self, tile: TileFormat, tile_bytes: int) -> None:
        self.tile = tile
        self.tile_bytes = tile_bytes
        self.slabs: list[cupy.cuda.Memory] = []
        self.addresses = np.zeros(0, np.int64)
        self.owners = np.zeros((0, 4), np.int64)
        self.pins = np.zeros(0, np.int32)
        self.used = np.zeros(0, np.int64)

    @property
    def size(self) -> int:
        """Bytes of device memory in all slabs."""
        return len(self.addresses) * self.tile_bytes

    @property
    def free(self) -> Integers:
        """Indices of slots that hold no tile and are not pinned."""
        return np.flatnonzero((self.owners[:, 0] == NO_TILE) & (self.pins == 0))

    @property
    def evictable(self) -> Integers:
        """Indices of slots that hold a tile and are not pinned."""
        return np.flatnonzero((self.owners[:, 0] != NO_TILE) & (self.pins == 0))

    def add(self, address: int, slab: cupy.cuda.Memory, count: int) -> None:
        """Add a slab of `count` slots."""
        self.slabs.append(slab)
        addresses = address + self.tile_bytes * np.arange(count, dtype=np.int64)
        self.addresses = np.append(self.addresses, addresses)
        owners = np.append(self.owners, np.full((count, 4), NO_TILE, np.int64), axis=0)
        # Column-major, because each batch searches the first column.
        self.owners = np.asfortranarray(owners)
        self.pins = np.append(self.pins, np.zeros(count, np.int32))
        self.used = np.append(self.used, np.zeros(count, np.int64))


class LevelSlots(NamedTuple):
    """The slot of each tile of one level in a pool, -1 for tiles that are not cached."""

    pool: SlotPool
    table: NDArray[np.int32]


class DeviceTiles:
    """Tiles on one device within a budget of bytes; the least recently used are evicted first.

    All methods are safe to call from any thread. Tiles are pinned while they are decoded or copied,
    so that their slots are not given to others. Before a slot is unpinned, the stream that reads
    or writes it must be synchronized, because a new tile may be decoded to it on another stream.

    Parameters
    ----------
    device : CudaDevice
        Device whose memory is used.
    budget : int
        Maximum number of bytes of device memory to use.
    slab_bytes : int
        Bytes to allocate at a time, as far as the budget allows.

    Attributes
    ----------
    device : CudaDevice
        The parameter.
    """

    def __init__(self, device: CudaDevice, budget: int, slab_bytes: int = SLAB_BYTES) -> None:
        self.device = device
        self._budget = budget
        self._slab_bytes = slab_bytes
        # Protects the pools, the tables of levels and the clock.
        self._lock = threading.Lock()
        self._pools: dict[TileFormat, SlotPool] = {}
        self._levels: dict[tuple[int, int], LevelSlots] = {}
        self._clock = 0

    @property
    def budget(self) -> int:
        """Maximum size in bytes; setting it drops all tiles and frees idle memory."""
        return self._budget

    @budget.setter
    def budget(self, budget: int) -> None:
        self._budget = budget
        self.clear()

    @property
    def used(self) -> int:
        """Bytes of device memory that are allocated."""
        with self._lock:
            return self._allocated()

    def find(
        self, slide: int, level: int, tiles: Integers
    ) -> tuple[Reserved | None, NDArray[np.bool_]]:
        """Pin the tiles that are cached.

        Parameters
        ----------
        slide, level : int
            Numbers of the slide and level, as in a tile's key.
        tiles : ndarray of int64, shape (tiles, 2)
            Row and column of each tile, without duplicates.

        Returns
        -------
        Reserved or None
            Slots of the cached tiles, in the order of `tiles`; None if there are none.
        ndarray of bool, shape (tiles,)
            Which of the tiles are cached.
        """
        with self._lock:
            if (slide, level) not in self._levels:
                return None, np.zeros(len(tiles), np.bool_)
            pool, table = self._levels[slide, level]
            found = table[tiles[:, 0], tiles[:, 1]]
            here = found != NO_TILE
            indices = found[here].astype(np.int64)
            if not len(indices):
                return None, here
            pool.pins[indices] += 1
            self._clock += 1
            pool.used[indices] = self._clock
            return Reserved(pool, indices), here

    def holds(self, slide: int, level: int, tiles: Integers) -> NDArray[np.bool_]:
        """Return which tiles are cached now; see `find` for the parameters."""
        reserved, here = self.find(slide, level, tiles)
        if reserved is not None:
            self.unpin(reserved)
        return here

    def reserve(self, tile: TileFormat, tile_bytes: int, count: int) -> Reserved:
        """Pin slots for new tiles; evict other tiles if necessary.

        Parameters
        ----------
        tile : TileFormat
            Format of the tiles.
        tile_bytes : int
            Size of a tile.
        count : int
            Number of slots.

        Returns
        -------
        Reserved
            At least one slot, and at most `count`: fewer if memory is short.

        Raises
        ------
        MemoryError
            If not even one slot is available.
        """
        with self._lock:
            pool = self._pools.setdefault(tile, SlotPool(tile, tile_bytes))
            free = pool.free
            if len(free) < count:
                self._grow(pool, count - len(free))
                free = pool.free
            if len(free) < count:
                owned = pool.evictable
                missing = max(count - len(free), len(owned) // PARTS_OF_POOL)
                oldest = owned[_lowest(pool.used[owned], missing)]
                self._evict(pool, oldest)
                free = np.append(free, oldest)
            indices = free[:count]
            if not len(indices):
                raise MemoryError(f"no device memory is left for tiles on '{self.device.name}'")
            pool.pins[indices] += 1
            return Reserved(pool, indices)

    def keep(
        self, reserved: Reserved, slide: int, level: int, grid: tuple[int, int], tiles: Integers
    ) -> None:
        """Make decoded tiles available to `find`.

        Parameters
        ----------
        reserved : Reserved
            Their slots, which stay pinned.
        slide, level : int
            Numbers of the slide and level, as in a tile's key.
        grid : tuple of int
            (rows, columns) of the level's grid of tiles.
        tiles : ndarray of int64, shape (slots, 2)
            Row and column of each tile.
        """
        pool = reserved.pool
        with self._lock:
            level_slots = self._levels.get((slide, level))
            if level_slots is None or level_slots.pool is not pool:
                level_slots = LevelSlots(pool, np.full(grid, NO_TILE, np.int32))
                self._levels[slide, level] = level_slots
            table = level_slots.table
            indices, (rows, columns) = reserved.indices, tiles.T
            # Another thread may have decoded the same tile; the slot of its copy becomes free.
            before = table[rows, columns]
            pool.owners[before[before != NO_TILE], 0] = NO_TILE
            table[rows, columns] = indices
            owners = np.empty((len(tiles), 4), np.int64)
            owners[:, 0], owners[:, 1], owners[:, 2:] = slide, level, tiles
            pool.owners[indices] = owners
            self._clock += 1
            pool.used[indices] = self._clock

    def unpin(self, reserved: Reserved) -> None:
        """Unpin slots that no stream uses any more."""
        with self._lock:
            reserved.pool.pins[reserved.indices] -= 1

    def drop(self, slide: int, level: int, tiles: Integers) -> None:
        """Drop tiles of one level if they are cached; see `find` for the parameters."""
        with self._lock:
            if (slide, level) in self._levels:
                pool, table = self._levels[slide, level]
                indices = table[tiles[:, 0], tiles[:, 1]]
                self._evict(pool, indices[indices != NO_TILE].astype(np.int64))

    def forget(self, slide: int, level: int | None = None) -> None:
        """Drop all tiles of one slide, or of one of its levels."""
        with self._lock:
            for key in [key for key in self._levels if key[0] == slide]:
                if level in (None, key[1]):
                    del self._levels[key]
            for pool in self._pools.values():
                own = pool.owners[:, 0] == slide
                if level is not None:
                    own &= pool.owners[:, 1] == level
                pool.owners[own, 0] = NO_TILE

    def clear(self) -> None:
        """Drop all tiles, and free the pools that have no pinned slots."""
        with self._lock:
            self._levels.clear()
            for pool in self._pools.values():
                pool.owners[:, 0] = NO_TILE
        self.trim()

    def trim(self) -> None:
        """Free the pools that hold no tiles and have no pinned slots."""
        with self._lock:
            for tile, pool in list(self._pools.items()):
                if not pool.pins.any() and (pool.owners[:, 0] == NO_TILE).all():
                    self._drop(tile)

    def _evict(self, pool: SlotPool, indices: Integers) -> None:
        owners = pool.owners[indices]
        levels = owners[:, :2]
        # Most often, all tiles are of one level.
        alike = len(levels) and (levels == levels[0]).all()
        for slide, level in (levels[:1] if alike else np.unique(levels, axis=0)).tolist():
            rows, columns = owners[(owners[:, 0] == slide) & (owners[:, 1] == level), 2:].T
            self._levels[slide, level].table[rows, columns] = NO_TILE
        pool.owners[indices, 0] = NO_TILE

    def _grow(self, pool: SlotPool, missing: int) -> None:
        """Add a slab to a pool; free idle pools, or make the slab smaller, if it does not fit."""
        while self._allocated() + missing * pool.tile_bytes > self._budget:
            if not self._free_idle_pool(pool, missing):
                break
        room = (self._budget - self._allocated()) // pool.tile_bytes
        size = max(missing, min(SLAB_TILES, self._slab_bytes // pool.tile_bytes))
        # The first slot may exceed the budget, so that a tile larger than it can be decoded.
        count = min(size, max(room, 0 if pool.size else 1))
        while count > 0:
            try:
                address, slab = self.device.allocate(count * pool.tile_bytes)
            except MemoryError:
                if count > missing:
                    count = missing
                elif not self._free_idle_pool(pool, missing):
                    count //= 2
                continue
            pool.add(address, slab, count)
            return

    def _allocated(self) -> int:
        return sum(pool.size for pool in self._pools.values())

    def _free_idle_pool(self, pool: SlotPool, missing: int) -> bool:
        """Free the first other pool that is idle; return whether there was one.

        A pool is kept if it was used more recently than the tiles that `pool` can evict instead.
        """
        own = pool.used[pool.evictable]
        since = own[_lowest(own, missing)].max() if len(own) >= missing > 0 else None
        for tile, other in self._pools.items():
            used = other.used[other.owners[:, 0] != NO_TILE].max(initial=0)
            stays = since is not None and used > since
            if other is not pool and not other.pins.any() and not stays:
                self._drop(tile)
                return True
        return False

    def _drop(self, tile: TileFormat) -> None:
        pool = self._pools.pop(tile)
        for key in [key for key, slots in self._levels.items() if slots.pool is pool]:
            del self._levels[key]


def _lowest(values: Integers, count: int) -> Integers:
    """Return the indices of the `count` lowest values."""
    if count >= len(values):
        return np.arange(len(values))
    return np.argpartition(values, count)[:count]
