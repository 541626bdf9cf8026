"""Ranges of local files to device memory: by GPUDirect Storage, or through page-locked memory.

kvikio reads if it is installed: by GPUDirect Storage where that works, else in its compatibility
mode, which is through host memory and as fast as the threads that read here without it, or faster.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from napari_wsigpu.model.errors import SlideChangedError, SlideError
from napari_wsigpu.storage.batch import PAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from concurrent.futures import Future

    from napari_wsigpu.gpu.device.cuda import CudaDevice
    from napari_wsigpu.gpu.device.device import Stream
    from napari_wsigpu.storage.batch import Batch, Readable

# Buffers of more than this in all would not stay in the processor's cache.
SMALLEST_PIECE, LARGEST_PIECE = 1 << 20, 4 << 20
# Our threads wait for each other's turn in the interpreter; those of kvikio don't.
MOST_THREADS, MOST_KVIKIO_THREADS = 8, 16
GDS = "WSIGPU_GDS"
THREADS, COMPATIBILITY = "KVIKIO_NTHREADS", "KVIKIO_COMPAT_MODE"
UDEV = "/run/udev"

logger = logging.getLogger(__name__)


class GdsState(NamedTuple):
    """What kvikio does here: its version, whether it is GPUDirect Storage, and why not."""

    version: str
    direct: bool
    reason: str = ""


def gds_state() -> GdsState:
    """Ask kvikio whether it reads straight into device memory.

    Raises
    ------
    ImportError, OSError, RuntimeError
        If kvikio is not there or does not work.
    """
    kvikio, defaults = import_module("kvikio"), import_module("kvikio.defaults")
    is_compatible = getattr(defaults, "is_compat_mode_preferred", None) or defaults.compat_mode
    version: str = kvikio.__version__
    if is_compatible():
        return GdsState(version, direct=False, reason=f"kvikio is in compatibility mode, {_why()}")
    if not import_module("kvikio.cufile_driver").get("is_gds_available"):
        return GdsState(version, direct=False, reason="cuFile finds no driver for it, nvidia-fs")
    return GdsState(version, direct=True)


def _why() -> str:
    asked = os.environ.get(COMPATIBILITY, "auto")
    if asked.lower() not in ("auto", "off", "false", "no", "0"):
        return f"as {COMPATIBILITY} says"
    return (
        "because cuFile can't be used here"
        if os.access(UDEV, os.R_OK)
        else f"because {UDEV} can't be read"
    )


class DirectReads:
    """kvikio in this process, if files are read by it; found out by using it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._module: Any = None
        self._asked = False

    def module(self) -> Any:
        """Return the module, None if it is not there or has failed."""
        with self._lock:
            if not self._asked:
                self._asked = True
                self._module = self._load()
            return self._module

    def give_up(self, error: Exception) -> None:
        """Read by threads from now on."""
        with self._lock:
            first, self._module = self._module is not None, None
        if first:
            logger.warning("Files are read without kvikio from now on: %s", error)

    def _load(self) -> Any:
        if os.environ.get(GDS) == "off":
            return None
        try:
            module = import_module("kvikio")
            if THREADS not in os.environ:
                import_module("kvikio.defaults").set(
                    {"num_threads": reading_threads(MOST_KVIKIO_THREADS)}
                )
            return module
        except Exception as error:  # whatever is wrong with it, files are read without it
            logger.info("Files are read without kvikio: %s", error)
            return None


direct_reads = DirectReads()


def reading_threads(most: int = MOST_THREADS) -> int:
    """Return how many threads read one file."""
    return min(most, os.cpu_count() or 1)


class _Piece(NamedTuple):
    """A part of a file, and the address in device memory that it goes to."""

    source: Readable
    offset: int
    address: int
    size: int


class _Filling(NamedTuple):
    """A buffer that is being filled: by several threads, or by kvikio."""

    batch: Batch
    buffer: Any
    pieces: deque[_Piece]
    helpers: list[Future[None]]
    submitted: list[tuple[Any, int, str]]
    files: ExitStack


class _Buffers:
    """Page-locked memory for one thread: one buffer is filled while the other one is uploaded."""

    def __init__(self, device: CudaDevice, size: int) -> None:
        self._device = device
        self._both: list[tuple[Any, Stream]] = [
            (device.staging(1, size)[0], device.new_stream()) for _ in range(2)
        ]

    def follow(self, stream: Stream) -> None:
        """Have uploads wait for what a stream holds now."""
        with stream:
            for _, own in self._both:
                self._device.follow(own)

    def move(self, read: Callable[[memoryview, int], None], piece: _Piece) -> None:
        """Read a piece and upload it."""
        buffer, stream = self._both[0]
        stream.synchronize()
        read(memoryview(buffer)[: piece.size], piece.offset)
        self._device.upload(piece.address, buffer[: piece.size], stream)
        self._both.reverse()

    def wait(self) -> None:
        """Return when all is uploaded."""
        for _, stream in self._both:
            stream.synchronize()


class Loader:
    """Threads and page-locked memory that bring files to a device.

    One a device: threads that are new to CUDA take longer to start than to read a few tiles. They
    start with the first read.

    Parameters
    ----------
    device : CudaDevice
        The device.

    Attributes
    ----------
    device : CudaDevice
        The same.
    threads : int
        How many there are.
    largest : int
        Bytes that are read at once at most.
    """

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self.threads = reading_threads()
        self.largest = LARGEST_PIECE
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._idle: deque[_Buffers] = deque(maxlen=self.threads)

    def submit(self, task: Callable[..., None], *given: Any) -> Future[None]:
        """Have a thread do something."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.threads, "wsigpu-read")
            return self._pool.submit(task, *given)

    def move(self, pieces: deque[_Piece], stream: Stream) -> None:
        """Read pieces and upload them, after what the stream holds now, until none is left."""
        if not pieces:
            return
        source: Readable | None = None
        with self.device.active(), ExitStack() as opened:
            try:
                buffers = self._idle.pop()
            except IndexError:
                buffers = _Buffers(self.device, self.largest)
            buffers.follow(stream)
            try:
                while True:
                    piece = pieces.popleft()
                    if piece.source is not source:
                        opened.close()
                        source = piece.source
                        read = opened.enter_context(source.reading())
                    buffers.move(read, piece)
            except IndexError:  # none is left
                pass
            except BaseException:
                pieces.clear()
                raise
            finally:
                buffers.wait()
                self._idle.append(buffers)

    def close(self) -> None:
        """End the threads, and give the memory back."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
        self._idle.clear()


class Transfer:
    """Reads ranges of files into device memory, for one thread.

    Parameters
    ----------
    loader : Loader
        Of the device, which has to be the thread's current one.
    stream : Stream
        The order of work in which buffers are filled and used.
    """

    def __init__(self, loader: Loader, stream: Stream) -> None:
        self._loader = loader
        self._device = loader.device
        self._stream = stream

    def buffers(self, batches: Iterable[Batch]) -> Generator[Any, None, None]:
        """Read batches, each while the one before it is used.

        Yields
        ------
        device array of uint8
            One a batch, for work on the stream.

        Raises
        ------
        MemoryError
            If the device has no memory for a batch.
        SlideError
            If a file can't be read.
        """
        ahead: deque[_Filling] = deque()
        try:
            for batch in batches:
                ahead.append(self._begin(batch))
                if len(ahead) > 1:
                    yield self._finish(ahead.popleft())
            while ahead:
                yield self._finish(ahead.popleft())
        finally:
            for filling in ahead:
                self._drop(filling)

    def _begin(self, batch: Batch) -> _Filling:
        with self._stream:
            buffer = self._device.empty((batch.size,), np.uint8)
        filling = _Filling(batch, buffer, deque(), [], [], ExitStack())
        module = direct_reads.module()
        if module is None:
            self._by_threads(filling)
            return filling
        try:
            # Work before this may still use the memory, of which kvikio knows nothing.
            self._stream.synchronize()
            self._by_kvikio(module, filling)
        except SlideError:
            self._await(filling)
            raise
        except Exception as error:  # kvikio's have no common base
            self._again(filling, error)
        return filling

    def _by_kvikio(self, module: Any, filling: _Filling) -> None:
        for source, runs in filling.batch.reads:
            path = source.checked_path()
            file = filling.files.enter_context(module.CuFile(path, "r"))
            for offset, place, size in runs:
                part = filling.buffer[place : place + size]
                filling.submitted.append((file.pread(part, size, offset), size, path))

    def _by_threads(self, filling: _Filling) -> None:
        """Have helpers begin; who waits for the buffer helps them."""
        first, total = self._device.address(filling.buffer), filling.batch.size
        share = -(-total // self._loader.threads // PAGE) * PAGE
        most = max(SMALLEST_PIECE, min(share, self._loader.largest))
        for source, runs in filling.batch.reads:
            for offset, place, size in runs:
                for done in range(0, size, most):
                    target = first + place + done
                    piece = _Piece(source, offset + done, target, min(most, size - done))
                    filling.pieces.append(piece)
        for _ in range(min(self._loader.threads, len(filling.pieces)) - 1):
            helper = self._loader.submit(self._loader.move, filling.pieces, self._stream)
            filling.helpers.append(helper)

    def _finish(self, filling: _Filling) -> Any:
        """Return the buffer, filled."""
        try:
            error = self._await(filling)
            if isinstance(error, SlideError):
                raise error
            if error is not None:
                self._again(filling, error)
            self._loader.move(filling.pieces, self._stream)
            for helper in filling.helpers:
                helper.result()
        except BaseException:
            self._drop(filling)
            raise
        return filling.buffer

    def _drop(self, filling: _Filling) -> None:
        """Return when nobody writes to the buffer any more."""
        self._await(filling)
        filling.pieces.clear()
        for helper in filling.helpers:
            if not helper.cancel():
                helper.exception()

    def _await(self, filling: _Filling) -> Exception | None:
        """Return when nothing more is written by kvikio, with what went wrong."""
        failure: Exception | None = None
        for future, size, path in filling.submitted:
            try:
                if future.get() != size and failure is None:
                    failure = SlideChangedError(f"'{path}' was cut short; open the slide again.")
            except Exception as error:  # kvikio's have no common base
                failure = failure or error
        filling.submitted.clear()
        filling.files.close()
        return failure

    def _again(self, filling: _Filling, error: Exception) -> None:
        """Have threads read what kvikio could not."""
        self._await(filling)
        direct_reads.give_up(error)
        self._by_threads(filling)
