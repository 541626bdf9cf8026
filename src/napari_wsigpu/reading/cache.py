"""Decoded tiles in memory: a least-recently-used cache."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from itertools import count, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray


DEFAULT_BUDGET = 512_000_000
# Shares of tiles that come again from which on tiles are worth keeping: to keep a tile it has to be
# decoded as a whole, half as long again as a part. Neighbours come again at once; of random places
# of a small level, a tile that is kept now may come again only when many others have.
WORTH_KEEPING, NEIGHBOURS = 0.7, 0.3
NEAR = 64  # tiles
MANY_TILES = 64


class TileKey(NamedTuple):
    """The name of a tile.

    Attributes
    ----------
    slide : int
        Number of the open slide in this process; its complement for tiles in sRGB.
    level : int
        Number of the level in the slide's pyramid; associated images count -1, -2, ...
    row, column : int
        Place in the level's grid of tiles.
    """

    slide: int
    level: int
    row: int
    column: int

    def in_srgb(self) -> TileKey:
        """Return the name of the same tile in sRGB."""
        return self._replace(slide=~self.slide)


class _Held(NamedTuple):
    """A tile, and the number of the buffer that it lies in."""

    pixels: NDArray[Any]
    buffer: int


class TileCache:
    """Least-recently-used tiles within a budget of bytes; safe under many threads.

    Tiles that lie in one buffer stay and go together: as long as one of them is held, the memory
    of all is.

    Parameters
    ----------
    budget : int
        Bytes of pixels to hold at most.
    """

    def __init__(self, budget: int = DEFAULT_BUDGET) -> None:
        self._lock = threading.Lock()
        self._budget = max(0, budget)
        self._used = 0
        self._tiles: dict[tuple[int, ...], _Held] = {}
        # Size and tiles of each buffer, the least recently used first.
        self._buffers: OrderedDict[int, tuple[int, list[tuple[int, ...]]]] = OrderedDict()
        self._numbers = count()

    @property
    def budget(self) -> int:
        """Bytes of pixels to hold at most; setting it evicts what is over."""
        return self._budget

    @budget.setter
    def budget(self, budget: int) -> None:
        with self._lock:
            self._budget = max(0, budget)
            self._evict()

    @property
    def used(self) -> int:
        """Bytes of pixels held now."""
        return self._used

    def get(self, key: TileKey) -> NDArray[Any] | None:
        """Return a tile, now the most recently used, or None."""
        with self._lock:
            return self._get(key)

    def get_all(
        self, slide: int, level: int, tiles: NDArray[np.int64]
    ) -> list[NDArray[Any] | None]:
        """Return many tiles of one level at once, as `get` does.

        Parameters
        ----------
        slide, level : int
            As in a tile's key.
        tiles : ndarray of int64, shape (tiles, 2)
            Row and column of each.
        """
        if not self._tiles:
            return [None] * len(tiles)
        keys = zip(repeat(slide), repeat(level), *tiles.T.tolist())
        with self._lock:
            return [self._get(key) if key in self._tiles else None for key in keys]

    def holds_any(self, slide: int, level: int, rows: range, columns: range) -> bool:
        """Whether any tile of a rectangle is held; it may be evicted at once."""
        tiles = self._tiles
        return bool(tiles) and any(
            (slide, level, row, column) in tiles for row in rows for column in columns
        )

    def put(self, key: TileKey, tile: NDArray[Any]) -> None:
        """Hold a tile, unless it alone is larger than the budget."""
        self.put_all({key: tile}, tile.nbytes)

    def put_all(self, tiles: Mapping[TileKey, NDArray[Any]], size: int) -> None:
        """Hold tiles that lie in one buffer of so many bytes, unless it is larger than the budget.

        Parameters
        ----------
        tiles : Mapping of TileKey to ndarray
            The tiles.
        size : int
            Bytes of the buffer.
        """
        with self._lock:
            if size > self._budget or not tiles:
                return
            number = next(self._numbers)
            for key, pixels in tiles.items():
                self._drop(key)
                self._tiles[key] = _Held(pixels, number)
            self._buffers[number] = size, [*tiles]
            self._used += size
            self._evict()

    def make_room(self, size: int) -> None:
        """Evict what has to go for tiles of so many bytes, before these take memory themselves."""
        with self._lock:
            self._evict(size)

    def drop(self, slide: int, level: int, tiles: NDArray[np.int64]) -> None:
        """Drop those of many tiles of one level that are held; see `get_all`."""
        if self._tiles:
            with self._lock:
                for row, column in tiles.tolist():
                    self._drop((slide, level, row, column))

    def forget(self, slide: int) -> None:
        """Drop all tiles of one slide."""
        with self._lock:
            for key in [key for key in self._tiles if key[0] in (slide, ~slide)]:
                self._drop(key)

    def _get(self, key: tuple[int, ...]) -> NDArray[Any] | None:
        held = self._tiles.get(key)
        if held is None:
            return None
        self._buffers.move_to_end(held.buffer)
        return held.pixels

    def _drop(self, key: tuple[int, ...]) -> None:
        """Drop a tile if it is held, and its buffer with the last one of it."""
        held = self._tiles.pop(key, None)
        if held is not None:
            size, others = self._buffers[held.buffer]
            others.remove(key)
            if not others:
                del self._buffers[held.buffer]
                self._used -= size

    def _evict(self, room: int = 0) -> None:
        """Drop the least recently used until the budget holds, with so many bytes left of it."""
        while self._buffers and self._used + room > self._budget:
            _, (size, keys) = self._buffers.popitem(last=False)
            self._used -= size
            for key in keys:
                del self._tiles[key]


class Recurrence:
    """Finds out whether tiles come again while a cache would still hold them.

    Of random places of a large level hardly any do. To keep their tiles would take half as long
    as to decode them, since each needs memory of its own.

    Parameters
    ----------
    cache : TileCache
        The cache.
    """

    def __init__(self, cache: TileCache) -> None:
        self._cache = cache
        self._lock = threading.Lock()
        # The latest tiles of each image, as many as the cache could hold, and the share of tiles
        # that came again.
        self._latest: defaultdict[int, OrderedDict[int, int]] = defaultdict(OrderedDict)
        self._rates: defaultdict[int, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        self._clock = 0

    def note(self, number: int, tiles: Sequence[int], tile_bytes: int) -> bool:
        """Record the tiles that are read now; return whether they are worth keeping.

        Parameters
        ----------
        number : int
            The image.
        tiles : sequence of int
            Its tiles, counted row by row.
        tile_bytes : int
            Bytes of each.
        """
        held = self._cache.budget // tile_bytes
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
            while len(latest) > held:
                latest.popitem(last=False)
            # A batch counts for itself; single regions are too few tiles to judge by one of them.
            count = len(tiles) or 1
            weight = min(1.0, count / MANY_TILES)
            rate, neighbours = self._rates[number]
            rate += (again / count - rate) * weight
            neighbours += (near / count - neighbours) * weight
            self._rates[number] = rate, neighbours
            return rate >= WORTH_KEEPING or neighbours >= NEIGHBOURS
