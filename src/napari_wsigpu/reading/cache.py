"""`TileCache`: an LRU cache of decoded tiles in host memory."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from itertools import count, repeat
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from napari_wsigpu.codecs.color import Color
    from napari_wsigpu.model.arrays import Array, Integers

    PlainKey = tuple[int, int, int, int, Color]


DEFAULT_BUDGET = 512_000_000
# Tiles are cached if at least the fraction RECURRING of them recurs, or at least the fraction
# RECURRING_NEAR within the last NEAR tiles. Caching costs time, since a tile must be decoded as a
# whole, which takes 1.5 times as long as decoding only the part that a region shows.
RECURRING, RECURRING_NEAR = 0.7, 0.3
NEAR = 64  # tiles
MANY_TILES = 64


class TileKey(NamedTuple):
    """The key of a decoded tile.

    Keys are built and looked up several times per tile. Hot paths build plain tuples of the same
    five items, which hash and compare equal.

    Attributes
    ----------
    slide : int
        Number of the open slide in this process.
    image : int
        Number of the image in `SlideParts.images`.
    row, column : int
        Position in the image's grid of tiles.
    color : str
        ``"stored"``, ``"srgb"``, or the string that identifies the settings of a composite (see
        `CompositeView.state`).
    """

    slide: int
    image: int
    row: int
    column: int
    color: Color = "stored"


class _Held(NamedTuple):
    """A tile and the number of the buffer that contains it."""

    pixels: Array
    buffer: int


class TileCache:
    """Least-recently-used cache of decoded tiles with a budget in bytes; thread-safe.

    Tiles in one buffer are evicted together, because any one of them keeps the whole buffer
    alive.

    Parameters
    ----------
    budget : int
        Largest number of bytes of pixels to hold.
    """

    def __init__(self, budget: int = DEFAULT_BUDGET) -> None:
        self._lock = threading.Lock()  # guards all fields below
        self._budget = max(0, budget)
        self._used = 0
        self._tiles: dict[PlainKey, _Held] = {}
        # Size and tiles of each buffer; the least recently used buffer comes first.
        self._buffers: OrderedDict[int, tuple[int, list[PlainKey]]] = OrderedDict()
        self._numbers = count()

    @property
    def budget(self) -> int:
        """Largest number of bytes of pixels to hold; setting it evicts any excess."""
        return self._budget

    @budget.setter
    def budget(self, budget: int) -> None:
        with self._lock:
            self._budget = max(0, budget)
            self._evict()

    @property
    def used(self) -> int:
        """Number of bytes of pixels in the cache."""
        return self._used

    def get(self, key: TileKey) -> Array | None:
        """Return a tile and mark it as most recently used; None if it is not cached."""
        with self._lock:
            return self._get(key)

    def get_all(
        self, slide: int, image: int, tiles: Integers, color: Color = "stored"
    ) -> list[Array | None]:
        """Return many tiles of one image, with None for each that is not cached; see `get`.

        Parameters
        ----------
        slide, image, color
            As in `TileKey`.
        tiles : ndarray of int64, shape (tiles, 2)
            Row and column of each tile.
        """
        # No lock and no keys are needed while the cache is empty.
        if not self._tiles:
            return [None] * len(tiles)
        keys = zip(repeat(slide), repeat(image), *tiles.T.tolist(), repeat(color))
        with self._lock:
            return [self._get(key) if key in self._tiles else None for key in keys]

    def holds_any(self, slide: int, image: int, rows: range, columns: range) -> bool:
        """Return whether any tile in a rectangle is cached in its stored colors right now."""
        # Without the lock: a stale answer costs only time, since tiles are looked up again.
        tiles = self._tiles
        return bool(tiles) and any(
            (slide, image, row, column, "stored") in tiles for row in rows for column in columns
        )

    def put(self, key: TileKey, tile: Array) -> None:
        """Cache a tile unless it alone exceeds the budget."""
        self.put_all({key: tile}, tile.nbytes)

    def put_all(self, tiles: Mapping[TileKey, Array], size: int) -> None:
        """Cache tiles that share one buffer, unless the buffer exceeds the budget.

        Parameters
        ----------
        tiles : Mapping of TileKey to ndarray
            The tiles.
        size : int
            Size of the buffer in bytes.
        """
        with self._lock:
            # A buffer larger than the budget would evict all others and then itself.
            if size > self._budget or not tiles:
                return
            number = next(self._numbers)
            for key, pixels in tiles.items():
                # Two readers may have decoded the same tile; the newer copy replaces the older one.
                self._drop(key)
                self._tiles[key] = _Held(pixels, number)
            self._buffers[number] = size, [*tiles]
            self._used += size
            self._evict()

    def make_room(self, size: int) -> None:
        """Evict tiles to make room for `size` bytes of new ones, which are not allocated yet."""
        with self._lock:
            self._evict(size)

    def drop(self, slide: int, image: int, tiles: Integers, color: Color = "stored") -> None:
        """Drop any of these tiles that are cached; see `get_all`."""
        if self._tiles:
            with self._lock:
                for row, column in tiles.tolist():
                    self._drop((slide, image, row, column, color))

    def forget(self, slide: int) -> None:
        """Drop all tiles of a slide, in all colors."""
        with self._lock:
            for key in [key for key in self._tiles if key[0] == slide]:
                self._drop(key)

    def _get(self, key: PlainKey) -> Array | None:
        held = self._tiles.get(key)
        if held is None:
            return None
        # Using one tile keeps all tiles of its buffer from being evicted.
        self._buffers.move_to_end(held.buffer)
        return held.pixels

    def _drop(self, key: PlainKey) -> None:
        """Drop a tile if it is cached, and its buffer with the last tile in it."""
        held = self._tiles.pop(key, None)
        if held is not None:
            size, others = self._buffers[held.buffer]
            others.remove(key)
            # Tiles are views of their buffer: its memory is free once the last one is gone.
            if not others:
                del self._buffers[held.buffer]
                self._used -= size

    def _evict(self, room: int = 0) -> None:
        """Drop the least recently used buffers until `room` bytes of the budget are free."""
        while self._buffers and self._used + room > self._budget:
            _, (size, keys) = self._buffers.popitem(last=False)
            self._used -= size
            for key in keys:
                del self._tiles[key]


class Recurrence:
    """Estimates whether tiles recur while a cache would still hold them.

    Tiles at random positions of a large level hardly ever recur. Caching them would take
    half as long again as decoding only the parts that regions show.

    Parameters
    ----------
    cache : TileCache
        The cache.
    """

    def __init__(self, cache: TileCache) -> None:
        self._cache = cache
        self._lock = threading.Lock()
        # For each image: the clock at the last read of each tile that the cache could still hold,
        # and the shares of tiles that recurred at all and within NEAR tiles.
        self._latest: defaultdict[int, OrderedDict[int, int]] = defaultdict(OrderedDict)
        self._rates: defaultdict[int, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        self._clock = 0  # number of tiles read

    def forget(self) -> None:
        """Forget all tiles, which the cache has just dropped."""
        with self._lock:
            self._latest.clear()
            self._rates.clear()

    def record(self, number: int, tiles: Sequence[int], tile_bytes: int) -> bool:
        """Record the tiles of a read; return whether they are worth caching.

        Parameters
        ----------
        number : int
            Number of the image.
        tiles : sequence of int
            Indices of the tiles in the grid, row by row.
        tile_bytes : int
            Size of a decoded tile in bytes.
        """
        capacity = self._cache.budget // tile_bytes
        again = near = 0
        with self._lock:
            latest, now = self._latest[number], self._clock
            self._clock += len(tiles)
            for tile in tiles:
                seen = latest.pop(tile, None)
                latest[tile] = now
                if seen is not None:
                    again += 1
                    near += now - seen <= NEAR
            # The cache would have evicted these tiles by now.
            while len(latest) > capacity:
                latest.popitem(last=False)
            # A batch replaces the estimate; a single region, which has few tiles, only adjusts it.
            count = len(tiles) or 1
            weight = min(1.0, count / MANY_TILES)
            rate, near_rate = self._rates[number]
            rate += (again / count - rate) * weight
            near_rate += (near / count - near_rate) * weight
            self._rates[number] = rate, near_rate
            return rate >= RECURRING or near_rate >= RECURRING_NEAR
