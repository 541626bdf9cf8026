"""`Throughput`: what decodes tiles fastest here, learnt from reads."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

    from napari_wsigpu.model.layout import LevelLayout

TRIALS = 3
FEWEST_TILES = 16
SHARES = ("gpu", "cpu", "both")


def tile_kind(image: LevelLayout) -> Hashable:
    """Name what takes equally long to decode: tiles of one size, type and compression."""
    grid, encoding = image.grid, image.encoding
    return (grid.tile_height, grid.tile_width, image.channels, encoding.compression, encoding.dtype)


class Throughput:
    """Learns what decodes tiles fastest: the GPU, the CPU, or both at once.

    Each is tried a few times in turn; from then on the fastest is used, and still measured.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: defaultdict[tuple[Hashable, str], deque[float]] = defaultdict(
            lambda: deque(maxlen=2 * TRIALS - 1)
        )

    def choose(self, key: Hashable) -> str:
        """Return "gpu", "cpu" or "both" for tiles of a kind."""
        with self._lock:
            for way in SHARES:
                if len(self._seconds[key, way]) < TRIALS:
                    return way
            return min(SHARES, key=lambda way: median(self._seconds[key, way]))

    def settled(self, key: Hashable) -> bool:
        """Whether everything was tried."""
        with self._lock:
            return all(len(self._seconds[key, way]) >= TRIALS for way in SHARES)

    def share(self, key: Hashable) -> float:
        """Return the part of a batch that the GPU decodes while the CPU decodes the rest."""
        with self._lock:
            gpu, cpu = (median(self._seconds[key, way] or [1.0]) for way in ("gpu", "cpu"))
        return cpu / (gpu + cpu)

    def note(self, key: Hashable, way: str, tiles: int, seconds: float) -> None:
        """Learn from a read; few tiles teach nothing."""
        if tiles >= FEWEST_TILES:
            with self._lock:
                self._seconds[key, way].append(seconds / tiles)
