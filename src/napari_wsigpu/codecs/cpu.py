"""A pool of threads that decode tiles on the CPU."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from napari_wsigpu.codecs.tile import decode_tile, load_for, refusal, whole_tile_decoder
from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.model.limits import limits
from napari_wsigpu.model.reasons import codec_reason
from napari_wsigpu.storage.buffers import TileMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from napari_wsigpu.codecs.byte_codecs import Data
    from napari_wsigpu.codecs.decoder import Deliver, EncodedBatch
    from napari_wsigpu.model.arrays import Array, ByteArray
    from napari_wsigpu.model.layout import LevelLayout

Result = TypeVar("Result")

FEW_CORES = 4
# More threads than this, of all batches together, decode tiles of up to SMALL_PIXELS pixels more
# slowly: they wait for the GIL.
MOST_FOR_SMALL, SMALL_PIXELS = 13, 1 << 17
# Tiles that Python unpacks in steps take the GIL more often. Threads that change to the only batch
# that is left would delay those that prepare the next one, so batches in flight share the threads.
FEWEST_FOR_STEPS = 3


@cache
def default_threads() -> int:
    """Return the number of threads that decode a batch: the pool and the waiting thread."""
    cores = os.cpu_count() or 1
    return cores if cores > FEW_CORES else cores + 1


class HostSlots:
    """Host memory into which the tiles of a batch are decoded.

    Parameters
    ----------
    memory : sequence of (ndarray of uint8 or None)
        Memory for each tile, as large as a full tile. None for a tile whose pixels are used only
        during its delivery: the decoding thread then uses its own buffer.

    Attributes
    ----------
    memory
        The parameter.
    pixels : dict of int to ndarray
        Decoded pixels of each tile that is being delivered, shape (height, width, channels), by the
        tile's index. Tiles at the bottom and right edges may be cropped to their level.
    """

    def __init__(self, memory: Sequence[ByteArray | None]) -> None:
        self.memory = memory
        self.pixels: dict[int, Array] = {}


class CpuDecoder:
    """A pool of threads that decode tiles.

    Parameters
    ----------
    workers : int, optional
        Number of threads in the pool. The thread that waits for a batch also decodes; with 0, it
        decodes alone. By default the number of cores, or one fewer on machines with more than
        `FEW_CORES` cores, where one thread too many would slow down all of them by a fifth.
    """

    name = "cpu"

    def __init__(self, workers: int | None = None) -> None:
        self._workers = default_threads() - 1 if workers is None else workers
        # Guards all that follows, and `threads` of batches; notified when a thread leaves a batch.
        self._lock = threading.Condition()
        self._pool: ThreadPoolExecutor | None = None
        self._helping = 0  # threads of the pool that are reserved for batches
        self._batches: list[PendingCpuBatch] = []  # with tiles that no thread has taken
        self._active = 0  # number of batches that nobody has finished waiting for
        self._memory = TileMemory()

    @property
    def threads(self) -> int:
        """Number of threads that decode one batch, including the waiting thread."""
        return self._workers + 1

    def refusal(self, level: LevelLayout) -> str | None:
        """Return why tiles of a level can't be decoded; None if they can."""
        return refusal(level.encoding)

    def schedule(self, batch: EncodedBatch, slots: HostSlots, deliver: Deliver) -> PendingCpuBatch:
        """Start decoding a batch, and return immediately.

        Parameters
        ----------
        batch : EncodedBatch
            The tiles; the decoder releases the batch when it is done.
        slots : HostSlots
            Memory for the decoded tiles.
        deliver : callable
            Called from any thread, one or more times, with indices of tiles in `batch` whose pixels
            are in their slots. If it raises an exception, no further tiles are decoded, and
            `wait` raises it.
        """
        load_for(batch.level.encoding)
        pending = PendingCpuBatch(batch, slots, deliver, self._memory, self)
        with self._lock:
            self._batches.append(pending)
            self._active += 1
            if pending.in_steps:
                pending.most = max(FEWEST_FOR_STEPS, self.threads // self._active)
            wanted = min(self._workers, len(batch) - 1, pending.most_together - 1)
            for _ in range(self._helping, wanted):
                self._start_helper(self._threads())
        return pending

    def _start_helper(self, pool: ThreadPoolExecutor) -> None:
        """Let another thread help; the caller must hold the lock."""
        # A pool that shuts down accepts no tasks; then only threads that wait for batches decode.
        with suppress(RuntimeError):
            pool.submit(self._help, pool)
            self._helping += 1

    def _help(self, pool: ThreadPoolExecutor) -> None:
        """Decode tiles of the batch that the fewest threads decode, until none is left."""
        with self._lock:
            busy = sum(each.threads for each in self._batches)
            pending = min(
                (each for each in self._batches if each.needs_help(busy)),
                key=lambda each: each.threads,
                default=None,
            )
            if pending is None:
                self._helping -= 1
                return
            pending.threads += 1
        try:
            pending.work()
        except BaseException as error:
            pending.stop(error)
        with self._lock:
            self._leave(pending)
            self._helping -= 1
            if self._batches:
                # Other tasks of the pool take their turn before the next batch.
                self._start_helper(pool)

    def _leave(self, pending: PendingCpuBatch) -> None:
        """Note that a thread has found no more tiles; the caller must hold the lock."""
        pending.threads -= 1
        if pending in self._batches:
            self._batches.remove(pending)
        self._lock.notify_all()

    def help_with(self, pending: PendingCpuBatch) -> None:
        """Decode tiles of a batch in this thread until none is left."""
        with self._lock:
            pending.threads += 1
        try:
            pending.work()
        finally:
            with self._lock:
                self._leave(pending)

    def withdraw(self, pending: PendingCpuBatch) -> None:
        """Return once no thread decodes a batch, and none will; called once for each."""
        pending.cancelled = True
        with self._lock:
            if pending in self._batches:
                self._batches.remove(pending)
            while pending.threads:
                self._lock.wait()
            self._active -= 1

    def submit(self, task: Callable[[], Result]) -> Future[Result]:
        """Run a task in the pool, or in this thread if the pool has no threads."""
        done: Future[Result] = Future()
        with self._lock, suppress(RuntimeError):  # the interpreter is shutting down
            if self._workers:
                return self._threads().submit(task)
        done.set_result(task())
        return done

    def run_all(self, tasks: Sequence[Callable[[], Result]]) -> list[Result]:
        """Run tasks in the pool and in this thread; return their results in order.

        If a task fails, its error is raised once no other task is running.
        """
        waiting = [(task, self.submit(task)) for task in tasks[1:]]
        try:
            found = [task() for task in tasks[:1]]
            # Tasks that no thread has started are run here, so tasks may wait for the pool too.
            found += [task() if done.cancel() else done.result() for task, done in waiting]
        finally:
            for _, done in waiting:
                if not done.cancel():
                    done.exception()
        return found

    def release(self) -> None:
        """Join the threads and free unused memory; the next batch starts new threads."""
        self._memory.clear()
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)

    def _threads(self) -> ThreadPoolExecutor:
        """Return the pool; the caller must hold the lock."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._workers, "wsigpu-decode")
        return self._pool


class PendingCpuBatch:
    """A batch that any number of threads decode, one tile at a time each; see `PendingBatch`."""

    def __init__(
        self,
        batch: EncodedBatch,
        slots: HostSlots,
        deliver: Deliver,
        memory: TileMemory,
        decoder: CpuDecoder,
    ) -> None:
        level = batch.level
        self._batch: EncodedBatch | None = batch
        self._slots = slots
        self._deliver = deliver
        self._memory = memory
        self._decoder = decoder
        self._size, self._dtype = level.tile_bytes, level.dtype
        self._shape = level.grid.tile_height, level.grid.tile_width, level.channels
        self._whole = whole_tile_decoder(batch)
        # All threads share this iterator; `next` of a range iterator is atomic under the GIL.
        self._numbers = iter(range(len(batch)))
        self.cancelled = False
        self._failures: dict[int, str] = {}
        self._error: BaseException | None = None
        self.threads, self.most = 0, len(batch)
        # Tiles that decode so quickly that many threads would mostly wait for the GIL.
        is_small = self._whole is not None and self._shape[0] * self._shape[1] <= SMALL_PIXELS
        self.in_steps = self._whole is None
        most = MOST_FOR_SMALL if is_small else sys.maxsize
        self.most_together = min(most, limits.decoding_bytes // self._size)

    def needs_help(self, busy: int) -> bool:
        """Return whether another thread may help, if so many decode all batches."""
        return self.threads < self.most and busy < self.most_together

    def work(self) -> None:
        """Decode tiles until none are left; each thread that decodes runs this."""
        # This loop takes the GIL thousands of times a second: local names save attribute lookups.
        batch, deliver = self._batch, self._deliver
        decode, fetch = self._whole or (None, None)
        memories, pixels = self._slots.memory, self._slots.pixels
        shape, dtype = self._shape, self._dtype
        own: tuple[ByteArray, Array] | None = None
        for number in self._numbers:
            if self.cancelled or batch is None:
                return
            memory = memories[number]
            if memory is not None:
                out = memory.view(dtype).reshape(shape)
            else:
                if own is None:
                    # The thread reuses this buffer, so it stays in the cache of the CPU.
                    memory = self._memory.allocate(self._size)
                    own = memory, memory.view(dtype).reshape(shape)
                memory, out = own
            try:
                encoded = None if fetch is None else fetch(number)
                if encoded is None or decode is None or _fails(decode, encoded, out):
                    out = decode_tile(batch[number], memory)
            except SlideError as error:
                self.stop(error)
            except (RuntimeError, ValueError, TypeError, MemoryError) as error:
                self._failures[number] = codec_reason(error)
            else:
                pixels[number] = out
                deliver((number,))
                del pixels[number]

    def stop(self, error: BaseException) -> None:
        """Drop the tiles that no thread has started to decode; `wait` raises the error."""
        self._error = error
        self.cancelled = True

    def wait(self) -> dict[int, str]:
        """Decode in this thread too, and return once every tile was delivered or failed."""
        try:
            self._decoder.help_with(self)
        finally:
            self.cancel()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame: break the cycle
        return self._failures

    def cancel(self) -> None:
        """Drop the tiles that no thread has started to decode, and wait for the others."""
        if self._batch is not None:
            self._decoder.withdraw(self)
            self._batch.release()
        # `deliver` may refer to this batch; break the cycle, which would keep the pixels alive.
        self._batch, self._whole = None, None
        self._slots, self._deliver = HostSlots([]), lambda indices: None


def _fails(decode: Callable[[Data, Array], None], data: Data, out: Array) -> bool:
    """Decode a tile; return whether that failed."""
    try:
        decode(data, out)
    except (RuntimeError, ValueError):
        return True
    return False
