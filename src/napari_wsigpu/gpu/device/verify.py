"""`Verifier`: compares the first tiles that a GPU decodes with the CPU's pixels."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from napari_wsigpu.model.arrays import Array

# Largest accepted difference of a sample, for each backend of nvImageCodec and for our own kernels.
TOLERANCES = {
    "hardware": 0,
    "JPEG kernels": 0,
    "GPU": 1,
    "JPEG 2000": 1,
    "lossless JPEG 2000": 0,
    "lossless kernels": 0,
}
TILES_A_BATCH = 1
# The reader waits while the CPU decodes a tile, so the budget of a slide is less for larger tiles.
TILES_A_SLIDE, USUAL_PIXELS = 8, 256 * 256
BATCHES_IN_DOUBT = 3

logger = logging.getLogger(__name__)


class Verifier:
    """Compares a few tiles of one slide; safe to call from any thread.

    Parameters
    ----------
    path : str
        Path of the slide, for the warning.

    Attributes
    ----------
    reason : str or None
        Why the slide must be decoded on the CPU from now on; None while all tiles agree.
    """

    def __init__(self, path: str) -> None:
        self.reason: str | None = None
        self._path = path
        # Protects the counters and `reason`, which only changes once.
        self._lock = threading.Lock()
        # Tiles of the usual size that may still be compared, by format; the last one may be larger.
        self._left: dict[str, int] = {}
        self._in_doubt = 0

    def samples(self, kind: str, candidates: Sequence[int], pixels: int) -> list[int]:
        """Choose the tiles of a batch that the CPU decodes as well.

        Parameters
        ----------
        kind : str
            Format of the tiles (`Recipe.kind`); each has its own budget of `TILES_A_SLIDE`.
        candidates : sequence of int
            Indices of the tiles that the GPU decodes.
        pixels : int
            Number of pixels in each tile.
        """
        with self._lock:
            left = self._left.get(kind, TILES_A_SLIDE)
            chosen = list(candidates[:TILES_A_BATCH]) if left > 0 else []
            self._left[kind] = left - len(chosen) * _cost(pixels)
        return chosen

    def return_samples(self, kind: str, count: int, pixels: int) -> None:
        """Credit the budget with tiles that were chosen but not compared."""
        with self._lock:
            self._left[kind] = self._left.get(kind, TILES_A_SLIDE) + count * _cost(pixels)

    def agree(self, engine: str, pixels: Array, expected: Array) -> bool:
        """Return whether both results agree; log the first difference beyond the tolerance.

        Parameters
        ----------
        engine : str
            Name of the GPU decoder: a key of `TOLERANCES`.
        pixels, expected : ndarray, shape (height, width, channels)
            The tile as decoded by the GPU and by the CPU. The latter may be cropped to its level.
        """
        pixels = pixels[: expected.shape[0], : expected.shape[1]]
        if np.array_equal(pixels, expected):
            return True
        difference = int(np.abs(pixels.astype(np.int64) - expected).max())
        if difference <= TOLERANCES[engine]:
            return True
        self._give_up(f"the {engine} decoder's pixels differ by {difference} from the CPU's")
        return False

    def record_doubts(self, engine: str, *, everywhere: bool) -> None:
        """Record whether all tiles of a batch are doubtful; give up the GPU after several in a row.

        A damaged tile can cause one such batch; several mean that the decoder can't handle stacks.
        """
        with self._lock:
            self._in_doubt = self._in_doubt + 1 if everywhere else 0
            enough = self._in_doubt == BATCHES_IN_DOUBT
        if enough:
            self._give_up(f"the {engine} decoder does not keep tiles apart")

    def _give_up(self, reason: str) -> None:
        with self._lock:
            first, self.reason = self.reason is None, reason
        if first:
            logger.warning("'%s' is decoded on the CPU from now on because %s", self._path, reason)


def _cost(pixels: int) -> int:
    """Return how many tiles of the usual size a tile counts for."""
    return max(1, pixels // USUAL_PIXELS)
