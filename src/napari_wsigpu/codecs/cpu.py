"""A pool of threads that decode tiles on the CPU."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from napari_wsigpu.codecs.tile import decode_tile, load_for, refusal, whole_tiles
from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.model.limits import limits
from napari_wsigpu.storage.buffers import TileMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from napari_wsigpu.codecs.decoder import Deliver, EncodedBatch
    from napari_wsigpu.model.layout import LevelLayout

Result = TypeVar("Result")

FEW_CORES = 4
# More threads than these decode no more small JPEGs a second: they wait for the interpreter.
MOST_FOR_QUICK, QUICK_PIXELS = 11, 1 << 17


@cache
def threads_at_work() -> int:
    """Return how many threads decode one batch: those of the pool and the one that waits."""
    cores = os.cpu_count() or 1
    return cores if cores > FEW_CORES else cores + 1


class HostSlots:
    """Where a batch's tiles are decoded to on the host.

    Parameters
    ----------
    memory : sequence of (ndarray of uint8 or None)
        As many bytes for each tile as a full one has; None for one whose pixels are used only while
        it is delivered: the thread that decodes it has a buffer for these.

    Attributes
    ----------
    memory
        As given.
    pixels : list of (ndarray or None)
        Each tile as it was decoded, while it is delivered: shape (height, width, channels). Tiles
        at the lower and right edge may be cut to their level.
    """

    def __init__(self, memory: Sequence[NDArray[np.uint8] | None]) -> None:
        self.memory = memory
        self.pixels: list[Any] = [None] * len(memory)


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
        self._active = 0
        self._memory = TileMemory()

    @property
    def threads(self) -> int:
        """How many threads decode one batch, the one that waits included."""
        return self._workers + 1

    def refusal(self, level: LevelLayout) -> str | None:
        """Say why it can't decode tiles of a level; None if it can."""
        return refusal(level.encoding)

    def schedule(self, batch: EncodedBatch, slots: HostSlots, deliver: Deliver) -> CpuBatch:
        """Begin to decode a batch and return at once; see `Decoder.schedule`."""
        load_for(batch.level.encoding)
        pending = CpuBatch(batch, slots, deliver, self._memory, self._finished)
        if not self._workers:
            return pending
        with self._lock:
            # Batches share the threads, and who waits for one works, too.
            self._active += 1
            workers = min(self._workers, MOST_FOR_QUICK) if pending.quick else self._workers
            threads = min(workers + 1, limits.decoding_bytes // batch.level.tile_bytes)
            helpers = min(threads // self._active - 1, len(batch) - 1)
            with suppress(RuntimeError):  # the interpreter ends: who waits decodes alone
                for _ in range(helpers):
                    pending.helpers.append(self._threads().submit(pending.work))
        return pending

    def submit(self, task: Callable[[], Result]) -> Future[Result]:
        """Call a task on one of the threads; in this one if there are no others."""
        done: Future[Result] = Future()
        with self._lock, suppress(RuntimeError):  # the interpreter ends
            if self._workers:
                return self._threads().submit(task)
        done.set_result(task())
        return done

    def release(self) -> None:
        """Join the threads and give back kept memory; the next batch takes new ones."""
        self._memory.clear()
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)

    def _threads(self) -> ThreadPoolExecutor:
        """Return the pool; the caller holds the lock."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._workers, "wsigpu-decode")
        return self._pool

    def _finished(self) -> None:
        with self._lock:
            self._active -= 1


class CpuBatch:
    """Tiles that any number of threads take in turn."""

    def __init__(
        self,
        batch: EncodedBatch,
        slots: HostSlots,
        deliver: Deliver,
        memory: TileMemory,
        finished: Callable[[], None],
    ) -> None:
        level = batch.level
        self._batch: EncodedBatch | None = batch
        self._slots = slots
        self._deliver = deliver
        self._memory = memory
        self._finished = finished
        self._size, self._dtype = level.tile_bytes, level.dtype
        self._shape = level.grid.tile_height, level.grid.tile_width, level.channels
        self._whole = whole_tiles(batch)
        # One iterator for all threads: to take the next number needs no lock.
        self._numbers = iter(range(len(batch)))
        self._ended = False
        self._failures: dict[int, str] = {}
        self._error: SlideError | None = None
        self.helpers: list[Future[None]] = []

    @property
    def quick(self) -> bool:
        """Whether tiles take so little time that threads wait for each other in the interpreter."""
        return self._whole is not None and self._shape[0] * self._shape[1] <= QUICK_PIXELS

    def work(self) -> None:
        """Decode tiles until none is left."""
        # Thousands of times a second here threads wait for each other in the interpreter.
        batch, deliver = self._batch, self._deliver
        decode, fetch = self._whole or (None, None)
        memories, pixels = self._slots.memory, self._slots.pixels
        shape, dtype = self._shape, self._dtype
        own: tuple[NDArray[np.uint8], NDArray[Any]] | None = None
        for number in self._numbers:
            if self._ended or batch is None:
                return
            memory = memories[number]
            if memory is not None:
                out = memory.view(dtype).reshape(shape)
            else:
                if own is None:
                    # Used again for the next tile, it stays in the core's cache.
                    memory = self._memory.take(self._size)
                    own = memory, memory.view(dtype).reshape(shape)
                memory, out = own
            try:
                encoded = None if fetch is None else fetch(number)
                if encoded is None or decode is None or _refuses(decode, encoded, out):
                    out = decode_tile(batch[number], memory)
            except SlideError as error:
                self._error = error
                self._ended = True
            except (RuntimeError, ValueError, TypeError, MemoryError) as error:
                self._failures[number] = str(error) or type(error).__name__
            else:
                pixels[number] = out
                deliver((number,))
                pixels[number] = None

    def wait(self) -> dict[int, str]:
        """Help decoding, and return when every tile was delivered or failed."""
        try:
            self.work()
        finally:
            self.cancel()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # which its own traceback leads to, and so to the pixels
        return self._failures

    def cancel(self) -> None:
        """Drop tiles that are not begun and return when no more will be delivered."""
        self._ended = True
        for helper in self.helpers:
            if not helper.cancel():
                helper.result()
        if self._batch is not None:
            self._batch.release()
            self._finished()
        # Who delivers may hold this batch: nothing is to live on for a circle's sake.
        self.helpers, self._batch, self._whole = [], None, None
        self._slots, self._deliver = HostSlots([]), lambda indices: None


def _refuses(decode: Callable[[Any, NDArray[Any]], Any], data: Any, out: NDArray[Any]) -> bool:
    try:
        decode(data, out)
    except (RuntimeError, ValueError):
        return True
    return False
