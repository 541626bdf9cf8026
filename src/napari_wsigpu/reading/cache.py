"""Decoded tiles in memory: one least-recently-used cache for the process."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from cachetools import LRUCache

if TYPE_CHECKING:
    from numpy.typing import NDArray

DEFAULT_BUDGET = 512_000_000


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


class TileCache:
    """Least-recently-used tiles within a budget of bytes; safe under many threads.

    Parameters
    ----------
    budget : int
        Bytes of pixels to hold at most.
    """

    def __init__(self, budget: int = DEFAULT_BUDGET) -> None:
        self._lock = threading.Lock()
        self._tiles = self._new(budget)

    @staticmethod
    def _new(budget: int) -> LRUCache[TileKey, NDArray[Any]]:
        return LRUCache(max(0, budget), getsizeof=lambda tile: int(tile.nbytes))

    @property
    def budget(self) -> int:
        """Bytes of pixels to hold at most; setting it evicts what is over."""
        return int(self._tiles.maxsize)

    @budget.setter
    def budget(self, budget: int) -> None:
        with self._lock:
            old, self._tiles = self._tiles, self._new(budget)
            while old:
                key, tile = old.popitem()
                if tile.nbytes <= budget:
                    self._tiles[key] = tile

    @property
    def used(self) -> int:
        """Bytes of pixels held now."""
        return int(self._tiles.currsize)

    def get(self, key: TileKey) -> NDArray[Any] | None:
        """Return a tile, now the most recently used, or None."""
        with self._lock:
            return self._tiles.get(key)

    def put(self, key: TileKey, tile: NDArray[Any]) -> None:
        """Hold a tile, unless it alone is larger than the budget."""
        with self._lock:
            if tile.nbytes <= self._tiles.maxsize:
                self._tiles[key] = tile

    def forget(self, slide: int) -> None:
        """Drop all tiles of one slide."""
        with self._lock:
            for key in [key for key in self._tiles if key.slide in (slide, ~slide)]:
                del self._tiles[key]


tile_cache = TileCache()
