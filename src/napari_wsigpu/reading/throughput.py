"""`Throughput`: measure which decoder is fastest on this machine."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

    from napari_wsigpu.model.layout import LevelLayout

TRIALS = 3
# A GPU takes about a millisecond whatever the number of tiles, so few tiles say little about many.
MIN_TILES = 64
MODES = ("gpu", "cpu", "both")


def tile_kind(image: LevelLayout) -> Hashable:
    """Return a key for tiles that take equally long to decode: same size, type and compression."""
    grid, encoding = image.grid, image.encoding
    return (grid.tile_height, grid.tile_width, image.channels, encoding.compression, encoding.dtype)


class Throughput:
    """Measures whether the GPU, the CPU, or both together decode tiles fastest.

    Each mode is tried a few times; then the fastest is used, and measured further.
    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards `_seconds`, whose lookups insert missing keys
        self._seconds: defaultdict[tuple[Hashable, str], deque[float]] = defaultdict(
            # Seconds per tile of the latest reads, by kind of tile and mode.
            lambda: deque(maxlen=2 * TRIALS - 1)
        )

    def choose(self, key: Hashable, tiles: int) -> str:
        """Return the mode for a read of some tiles of a kind: "gpu", "cpu" or "both"."""
        with self._lock:
            tried = [mode for mode in MODES if len(self._seconds[key, mode]) >= TRIALS]
            # Only reads that are recorded try another mode: few tiles would try it forever.
            if len(tried) < len(MODES) and tiles >= MIN_TILES:
                return next(mode for mode in MODES if mode not in tried)
            if not tried:
                return MODES[0]
            return min(tried, key=lambda mode: median(self._seconds[key, mode]))

    def is_measured(self, key: Hashable) -> bool:
        """Return whether every mode has been tried often enough."""
        with self._lock:
            return all(len(self._seconds[key, mode]) >= TRIALS for mode in MODES)

    def share(self, key: Hashable) -> float:
        """Return the share of a batch that the GPU decodes in mode "both"."""
        with self._lock:
            gpu, cpu = (median(self._seconds[key, mode] or [1.0]) for mode in ("gpu", "cpu"))
        return cpu / (gpu + cpu)

    def record(self, key: Hashable, mode: str, tiles: int, seconds: float) -> None:
        """Record the duration of a read; reads of few tiles are ignored as too noisy."""
        if tiles >= MIN_TILES:
            with self._lock:
                self._seconds[key, mode].append(seconds / tiles)
