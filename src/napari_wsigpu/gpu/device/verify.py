"""Proof that a GPU decodes a slide as the CPU does: its first tiles are decoded by both."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

# What the samples of a tile may differ by, for each path that nvImageCodec decodes on, and for
# our own kernels.
TOLERANCES = {
    "hardware": 0,
    "hybrid": 3,
    "GPU": 1,
    "JPEG 2000": 1,
    "lossless JPEG 2000": 0,
}
TILES_A_BATCH = 1
TILES_A_SLIDE = 8
BATCHES_IN_DOUBT = 3

logger = logging.getLogger(__name__)


class Verifier:
    """Compares a few tiles of a slide; safe under many threads.

    Parameters
    ----------
    path : str
        The slide's path, for the warning.

    Attributes
    ----------
    reason : str or None
        Why the slide has to be decoded on the CPU; None as long as all was right.
    """

    def __init__(self, path: str) -> None:
        self.reason: str | None = None
        self._path = path
        self._lock = threading.Lock()
        self._left: dict[str, int] = {}
        self._in_doubt = 0

    def samples(self, kind: str, candidates: Sequence[int]) -> list[int]:
        """Choose the tiles of a batch that shall be decoded by both."""
        with self._lock:
            left = self._left.get(kind, TILES_A_SLIDE)
            chosen = list(candidates[: min(left, TILES_A_BATCH)])
            self._left[kind] = left - len(chosen)
        return chosen

    def give_back(self, kind: str, count: int) -> None:
        """Say that this many of the chosen tiles were not compared after all."""
        with self._lock:
            self._left[kind] = self._left.get(kind, TILES_A_SLIDE) + count

    def agree(self, engine: str, pixels: NDArray[Any], expected: NDArray[Any]) -> bool:
        """Compare one tile, and warn the first time that it is beyond the tolerance.

        Parameters
        ----------
        engine : str
            The path that decoded it: a key of `TOLERANCES`.
        pixels, expected : ndarray, shape (height, width, channels)
            The tile by the GPU and by the CPU; the latter may be cut to its level.
        """
        pixels = pixels[: expected.shape[0], : expected.shape[1]]
        if np.array_equal(pixels, expected):
            return True
        difference = int(np.abs(pixels.astype(np.int64) - expected).max())
        if difference <= TOLERANCES[engine]:
            return True
        self._give_up(f"the {engine} decoder's pixels differ by {difference} from the CPU's")
        return False

    def note_doubts(self, engine: str, *, everywhere: bool) -> None:
        """Warn if one batch after the other is in doubt as a whole: it is not the slide's fault."""
        with self._lock:
            self._in_doubt = self._in_doubt + 1 if everywhere else 0
            enough = self._in_doubt == BATCHES_IN_DOUBT
        if enough:
            self._give_up(f"the {engine} decoder does not keep tiles apart")

    def _give_up(self, reason: str) -> None:
        with self._lock:
            first, self.reason = self.reason is None, reason
        if first:
            logger.warning("'%s' is decoded on the CPU from now on, because %s", self._path, reason)
