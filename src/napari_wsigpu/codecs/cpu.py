"""A pool of threads that decode tiles on the CPU."""

from __future__ import annotations

import os
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.codecs.tile import decode_tile, refusal
from napari_wsigpu.errors import SlideError
from napari_wsigpu.memory import TileMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.decoder import Deliver, EncodedTile
    from napari_wsigpu.layout import Encoding

FEW_CORES = 4


def threads_at_work() -> int:
    """Return how many threads decode one batch: those of the pool and the one that waits."""
    cores = os.cpu_count() or 1
    return cores if cores > FEW_CORES else cores + 1


class CpuDecoder:
    """A pool of threads that decode tiles.

    Parameters
    ----------
    workers : int, optional
        Number of threads beside the one that waits for a batch, which works too. By default one
        a core, and one fewer where there are many: a thread more than cores slows all by a
        fifth; with 0, who waits decodes alone.
    """

    name = "cpu"

    def __init__(self, workers: int | None = None) -> None:
        self._workers = threads_at_work() - 1 if workers is None else workers
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._memory = TileMemory()

    def refusal(self, encoding: Encoding) -> str | None:
        """Say why tiles of this encoding can't be decoded; None if they can."""
        return refusal(encoding)

    def schedule(
        self,
        batch: Sequence[EncodedTile],
        deliver: Deliver,
        memory: Sequence[NDArray[np.uint8]] | None = None,
    ) -> CpuBatch:
        """Begin to decode a batch and return at once.

        `memory` is what each tile is decoded into, by default memory of the decoder's own.
        """
        if memory is None and not self._workers:
            # What nobody keeps is used again for the next tile, and stays in the core's cache.
            return CpuBatch(batch, deliver, lambda i: self._memory.take(batch[i].level.tile_bytes))
        if memory is None:
            # Taken in one thread: a pool's threads would scatter it over as many heaps.
            memory = [self._memory.take(tile.level.tile_bytes) for tile in batch]
        pending = CpuBatch(batch, deliver, memory.__getitem__)
        if not self._workers:
            return pending
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._workers, "wsigpu-decode")
            with suppress(RuntimeError):  # the interpreter ends: who waits decodes alone
                for _ in range(min(self._workers, len(batch))):
                    pending.helpers.append(self._pool.submit(pending.work))
        return pending

    def release(self) -> None:
        """Join the threads and give back kept memory; the next batch takes new ones."""
        self._memory.clear()
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)


class CpuBatch:
    """Tiles that any number of threads take from one queue."""

    def __init__(
        self,
        batch: Sequence[EncodedTile],
        deliver: Deliver,
        memory: Callable[[int], NDArray[np.uint8]],
    ) -> None:
        self._batch = batch
        self._memory = memory
        self._deliver = deliver
        self._queue = deque(range(len(batch)))
        self._failures: dict[int, str] = {}
        self._error: SlideError | None = None
        self.helpers: list[Future[None]] = []

    def work(self) -> None:
        """Decode tiles until none is left."""
        while self._queue:
            try:
                index = self._queue.popleft()
            except IndexError:
                return
            try:
                pixels = decode_tile(self._batch[index], self._memory(index))
            except SlideError as error:
                self._error = error
                self._queue.clear()
            except (RuntimeError, ValueError, TypeError, MemoryError) as error:
                self._failures[index] = str(error) or type(error).__name__
            else:
                self._deliver(index, pixels)

    def wait(self) -> dict[int, str]:
        """Help decoding, and return when every tile was delivered or failed."""
        try:
            self.work()
        finally:
            self.cancel()
        if self._error is not None:
            raise self._error
        return self._failures

    def cancel(self) -> None:
        """Drop tiles that are not begun and return when no more will be delivered."""
        self._queue.clear()
        for helper in self.helpers:
            if not helper.cancel():
                helper.result()
        # Who delivers may hold this batch: nothing is to live on for a circle's sake.
        self.helpers, self._batch = [], ()
        self._memory, self._deliver = _nothing, _ignore


def _nothing(index: int) -> NDArray[np.uint8]:
    """Take the place of memory for tiles."""
    return np.empty(0, np.uint8)


def _ignore(index: int, pixels: NDArray[Any]) -> None:
    """Take the place of who wanted tiles."""
