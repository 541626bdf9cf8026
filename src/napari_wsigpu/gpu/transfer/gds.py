"""Reads of local files into device memory, by GPUDirect Storage or through page-locked memory.

If kvikio is installed, it reads the files: by GPUDirect Storage where that works, else in its
compatibility mode, which goes through host memory and is at least as fast as our own threads.
Without kvikio, or after kvikio has failed, our threads read.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.model.errors import SlideChangedError, SlideError
from napari_wsigpu.storage.file_reads import PAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from concurrent.futures import Future
    from types import ModuleType

    from kvikio.cufile import IOFuture

    from napari_wsigpu.gpu.device.cuda import CudaDevice
    from napari_wsigpu.gpu.device.interfaces import Stream
    from napari_wsigpu.model.arrays import Array, DeviceArray
    from napari_wsigpu.storage.file_reads import FileReads, Readable

# Limits of a read in bytes. Larger page-locked buffers, one pair per thread, would not stay in the
# CPU's cache.
SMALLEST_READ, LARGEST_READ = 1 << 20, 4 << 20
# Our threads compete for the GIL; kvikio's do not.
MOST_THREADS, MOST_KVIKIO_THREADS = 8, 16
GDS = "WSIGPU_GDS"
THREADS, COMPATIBILITY = "KVIKIO_NTHREADS", "KVIKIO_COMPAT_MODE"
UDEV = "/run/udev"

logger = logging.getLogger(__name__)


class GdsState(NamedTuple):
    """State of kvikio: its version, whether it uses GPUDirect Storage, and if not, why."""

    version: str
    direct: bool
    reason: str = ""


def gds_state() -> GdsState:
    """Return the state of kvikio: whether it reads straight into device memory.

    Raises
    ------
    ImportError, OSError, RuntimeError
        If kvikio is not installed or does not work.
    """
    kvikio, defaults = import_module("kvikio"), import_module("kvikio.defaults")
    is_compatible = getattr(defaults, "is_compat_mode_preferred", None) or defaults.compat_mode
    version: str = kvikio.__version__
    if is_compatible():
        reason = f"kvikio is in compatibility mode, {_compatibility_reason()}"
        return GdsState(version, direct=False, reason=reason)
    if not import_module("kvikio.cufile_driver").get("is_gds_available"):
        return GdsState(version, direct=False, reason="cuFile does not find its driver, nvidia-fs")
    return GdsState(version, direct=True)


def _compatibility_reason() -> str:
    mode = os.environ.get(COMPATIBILITY, "auto")
    if mode.lower() not in ("auto", "off", "false", "no", "0"):
        return f"because {COMPATIBILITY} is set"
    readable = os.access(UDEV, os.R_OK)
    return "because cuFile can't be used here" if readable else f"because {UDEV} can't be read"


class DirectReads:
    """The module kvikio, which this process uses until it fails."""

    def __init__(self) -> None:
        # Protects the attributes below; held during the import, so that it happens once.
        self._lock = threading.Lock()
        self._module: ModuleType | None = None
        self._loaded = False

    def module(self) -> ModuleType | None:
        """Return kvikio; None if it is not installed, is switched off or has failed."""
        with self._lock:
            if not self._loaded:
                self._loaded = True
                self._module = self._load()
            return self._module

    def give_up(self, error: Exception) -> None:
        """Read without kvikio from now on; warn the first time."""
        with self._lock:
            first, self._module = self._module is not None, None
        if first:
            logger.warning("Files are read without kvikio from now on: %s", error)

    def _load(self) -> ModuleType | None:
        if os.environ.get(GDS) == "off":
            return None
        try:
            module = import_module("kvikio")
            if THREADS not in os.environ:
                import_module("kvikio.defaults").set(
                    {"num_threads": threads_per_file(MOST_KVIKIO_THREADS)}
                )
            return module
        except Exception as error:  # whatever is wrong with kvikio, files are read without it
            logger.info("Files are read without kvikio: %s", error)
            return None


direct_reads = DirectReads()


def threads_per_file(most: int = MOST_THREADS) -> int:
    """Return how many threads read one file: one for each core, but not more than `most`."""
    return min(most, os.cpu_count() or 1)


class _FileRange(NamedTuple):
    """A range of a file, and the device address to which it is read."""

    source: Readable
    offset: int
    address: int
    size: int


class _PendingBuffer(NamedTuple):
    """A device buffer that is being filled, by kvikio or by several threads.

    Attributes
    ----------
    batch : FileReads
        The reads that fill the buffer.
    buffer : device array of uint8
        The buffer, which must not be freed while `helpers` or `submitted` are unfinished.
    ranges : deque of _FileRange
        Ranges that no thread has started to read. Threads take them without a lock, because
        `deque.popleft` is atomic.
    helpers : list of Future
        Tasks of the loader's threads, which read ranges.
    submitted : list of (future, int, str)
        Reads of kvikio, with their size in bytes and the path of the file.
    files : ExitStack
        Open files of kvikio.
    """

    batch: FileReads
    buffer: DeviceArray
    ranges: deque[_FileRange]
    helpers: list[Future[None]]
    submitted: list[tuple[IOFuture, int, str]]
    files: ExitStack


class _Buffers:
    """Two page-locked buffers of one thread: one is filled while the other is uploaded."""

    def __init__(self, device: CudaDevice, size: int) -> None:
        self._device = device
        self._both: list[tuple[Array, Stream]] = [
            (device.staging((size,), np.dtype(np.uint8)), device.new_stream()) for _ in range(2)
        ]

    def follow(self, stream: Stream) -> None:
        """Make uploads wait for the work that `stream` holds now."""
        with stream:
            for _, own in self._both:
                self._device.follow(own)

    def move(self, read: Callable[[memoryview, int], None], part: _FileRange) -> None:
        """Read a range into the older buffer and upload it, without waiting for the upload."""
        buffer, stream = self._both[0]
        stream.synchronize()  # the last upload may still read the buffer
        read(buffer.data[: part.size], part.offset)
        self._device.upload(part.address, buffer[: part.size], stream)
        self._both.reverse()

    def wait(self) -> None:
        """Block until all uploads are done."""
        for _, stream in self._both:
            stream.synchronize()


class Loader:
    """Threads and page-locked memory that read files into device memory; one for each device.

    Threads start with the first read. They are kept, because a thread's first use of CUDA takes
    longer than reading a few tiles.

    Parameters
    ----------
    device : CudaDevice
        Device to read to.

    Attributes
    ----------
    device : CudaDevice
        The parameter.
    threads : int
        Number of threads.
    largest : int
        Maximum size of a read in bytes.
    """

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self.threads = threads_per_file()
        self.largest = LARGEST_READ
        # Protects `_pool`. `_idle` needs no lock: `deque.pop` and `append` are atomic.
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._idle: deque[_Buffers] = deque(maxlen=self.threads)

    def submit(self, ranges: deque[_FileRange], stream: Stream) -> Future[None]:
        """Run `move` in a thread of the pool."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.threads, "wsigpu-read")
            return self._pool.submit(self.move, ranges, stream)

    def move(self, ranges: deque[_FileRange], stream: Stream) -> None:
        """Read and upload ranges until none are left; the uploads are done on return.

        Any number of threads may work on the same ranges. Uploads wait for the work that `stream`
        holds now, which may still use the target.
        """
        if not ranges:
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
                    try:
                        part = ranges.popleft()
                    except IndexError:  # no range is left
                        break
                    if part.source is not source:
                        opened.close()
                        source = part.source
                        read = opened.enter_context(source.open_reader())
                    buffers.move(read, part)
            except BaseException:
                ranges.clear()  # the other threads stop too
                raise
            finally:
                buffers.wait()
                self._idle.append(buffers)

    def close(self) -> None:
        """Stop the threads, and free the page-locked memory."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
        self._idle.clear()


class Transfer:
    """Reads ranges of files into device memory; used by one thread.

    Parameters
    ----------
    loader : Loader
        Loader of the device, which must be the thread's current device.
    stream : Stream
        Stream from whose pool buffers are allocated, and on which they are used.
    """

    def __init__(self, loader: Loader, stream: Stream) -> None:
        self._loader = loader
        self._device = loader.device
        self._stream = stream

    def buffers(self, batches: Iterable[FileReads]) -> Generator[DeviceArray, None, None]:
        """Read batches into device memory, each while the caller uses the one before it.

        Yields
        ------
        device array of uint8
            The bytes of one batch, for work on the stream.

        Raises
        ------
        MemoryError
            If the device does not have enough memory for a batch.
        SlideError
            If a file cannot be read.
        """
        ahead: deque[_PendingBuffer] = deque()
        try:
            for batch in batches:
                ahead.append(self._start(batch))
                if len(ahead) > 1:
                    yield self._finish(ahead.popleft())
            while ahead:
                yield self._finish(ahead.popleft())
        finally:
            for pending in ahead:
                self._abandon(pending)

    def _start(self, batch: FileReads) -> _PendingBuffer:
        with self._stream:
            buffer = self._device.empty((batch.size,), np.uint8)
        pending = _PendingBuffer(batch, buffer, deque(), [], [], ExitStack())
        module = direct_reads.module()
        if module is None:
            self._by_threads(pending)
            return pending
        try:
            # The stream's pool may have returned memory that earlier work on the stream still uses.
            # kvikio does not order its writes after that work, so wait for it here.
            self._stream.synchronize()
            self._by_kvikio(module, pending)
        except SlideError:
            self._wait_for_kvikio(pending)
            raise
        except Exception as error:  # kvikio's errors have no common base class
            self._retry(pending, error)
        return pending

    def _by_kvikio(self, module: ModuleType, pending: _PendingBuffer) -> None:
        for source, runs in pending.batch.reads:
            path = source.checked_path()
            file = pending.files.enter_context(module.CuFile(path, "r"))
            for offset, start, size in runs:
                part = pending.buffer[start : start + size]
                pending.submitted.append((file.pread(part, size, offset), size, path))

    def _by_threads(self, pending: _PendingBuffer) -> None:
        """Start threads that read; the thread that waits for the buffer joins them in `_finish`."""
        first, total = self._device.address(pending.buffer), pending.batch.size
        share = -(-total // self._loader.threads // PAGE) * PAGE
        most = max(SMALLEST_READ, min(share, self._loader.largest))
        for source, runs in pending.batch.reads:
            for offset, start, size in runs:
                for done in range(0, size, most):
                    target = first + start + done
                    part = _FileRange(source, offset + done, target, min(most, size - done))
                    pending.ranges.append(part)
        for _ in range(min(self._loader.threads, len(pending.ranges)) - 1):
            helper = self._loader.submit(pending.ranges, self._stream)
            pending.helpers.append(helper)

    def _finish(self, pending: _PendingBuffer) -> DeviceArray:
        """Return the buffer once it is filled."""
        try:
            error = self._wait_for_kvikio(pending)
            if isinstance(error, SlideError):
                raise error
            if error is not None:
                self._retry(pending, error)
            self._loader.move(pending.ranges, self._stream)
            for helper in pending.helpers:
                helper.result()
        except BaseException:
            self._abandon(pending)
            raise
        return pending.buffer

    def _abandon(self, pending: _PendingBuffer) -> None:
        """Block until nothing writes to the buffer, so that it can be freed."""
        self._wait_for_kvikio(pending)
        pending.ranges.clear()
        for helper in pending.helpers:
            if not helper.cancel():
                helper.exception()

    def _wait_for_kvikio(self, pending: _PendingBuffer) -> Exception | None:
        """Block until kvikio no longer writes to the buffer; return its first error."""
        failure: Exception | None = None
        for future, size, path in pending.submitted:
            try:
                if future.get() != size and failure is None:
                    failure = SlideChangedError(f"'{path}' was truncated; open the slide again.")
            except Exception as error:  # kvikio's errors have no common base class
                failure = failure or error
        pending.submitted.clear()
        pending.files.close()
        return failure

    def _retry(self, pending: _PendingBuffer, error: Exception) -> None:
        """Give up kvikio, and let threads read the whole batch."""
        self._wait_for_kvikio(pending)
        direct_reads.give_up(error)
        self._by_threads(pending)
