"""`DecodeWorker`: decoders of one device, a thread for them, and memory that batches reuse."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.codecs.jpeg2000 import use_threads
from napari_wsigpu.codecs.tile import decode_tile
from napari_wsigpu.gpu.compressed.compressed_engine import ENGINE, CompressedEngine
from napari_wsigpu.gpu.compressed.compressed_engine import KERNELS as COMPRESSED
from napari_wsigpu.gpu.device.switching import Turn
from napari_wsigpu.gpu.device.workspace import Workspace
from napari_wsigpu.gpu.jpeg.jpeg_kernels import ENGINE as JPEG_KERNELS
from napari_wsigpu.gpu.jpeg.jpeg_kernels import JpegKernels
from napari_wsigpu.gpu.jpeg2000.jpeg2000_engine import KERNELS, Jpeg2000Engine
from napari_wsigpu.gpu.transfer.gds import Loader
from napari_wsigpu.model.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.decoder import EncodedTile
    from napari_wsigpu.gpu.device.cuda import CudaDevice
    from napari_wsigpu.gpu.device.interfaces import Stream
    from napari_wsigpu.gpu.jpeg.nvimagecodec_library import LibraryDecoder
    from napari_wsigpu.model.arrays import Array

    Job = Callable[["DecodeWorker"], None]

JPEG, JPEG2000 = "jpeg", "jpeg2000"
# Maximum number of idle workspaces that are kept; twice as many idle buffers are kept.
MOST_IDLE = 4
# Page-locking memory takes longer than filling it, so buffers are large enough for a thousand tiles
# and smaller batches reuse them.
SMALLEST_BUFFER = 16 << 20
MOST_THREADS = 8  # that decode a reference

logger = logging.getLogger(__name__)


class DecodeWorker:
    """Decoders of one device, shared by all slides, and a thread that runs them.

    The thread starts with the first job. Streams, workspaces and buffers belong to one batch at a
    time, which releases them when the device is done with them. They are kept in deques without a
    lock, as `deque.pop` and `append` are atomic.

    Parameters
    ----------
    device : CudaDevice
        Device to decode on.

    Attributes
    ----------
    device : CudaDevice
        The parameter.
    decoding : RLock
        Held while a decoder works: two threads in one decoder of nvImageCodec crash the process.
        It is not held while the batch's stream finishes, so the device can paste one batch while
        it decodes the next.
    turn : Turn
        Taken by threads that prepare batches.
    loader : Loader
        Reads uncompressed tiles and Zarr chunks into device memory.
    jpeg : JpegKernels
        Decodes JPEG with our own kernels: large batches, or all if there is no JPEG engine.
    jpeg2000 : Jpeg2000Engine
        Decodes JPEG 2000 with our own kernels.
    compressed : CompressedEngine
        Decodes deflate, LZW, PackBits and zstd with our own kernels.
    """

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        # Protects `_thread` and `_reference`; no job is queued after the None that ends a thread.
        self._lock = threading.Lock()
        self.decoding = threading.RLock()
        self.turn = Turn()
        self._thread: threading.Thread | None = None
        self._decoders: dict[str, tuple[LibraryDecoder, str] | None] = {}
        self._workspaces: deque[Workspace] = deque(maxlen=MOST_IDLE)
        self._buffers: deque[memoryview] = deque(maxlen=2 * MOST_IDLE)
        self._streams: deque[Stream] = deque()
        self._reference: ThreadPoolExecutor | None = None
        self.loader = Loader(device)
        self.jpeg = JpegKernels(device)
        self.jpeg2000 = Jpeg2000Engine(device)
        self.compressed = CompressedEngine(device)
        self._warned: set[str] = set()

    def submit(self, job: Job) -> None:
        """Queue a job, which the thread will call with this worker."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="wsigpu-gpu", daemon=True)
                self._thread.start()
            self._queue.put(job)

    def close(self) -> None:
        """Finish the submitted jobs, end the threads, and release decoders and memory."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._queue.put(None)
        if thread is not None:
            thread.join()
        with self.decoding:
            for made in self._decoders.values():
                if made is not None:
                    made[0].close()
            self._decoders.clear()
        with self._lock:
            reference, self._reference = self._reference, None
        if reference is not None:
            reference.shutdown()
        self.loader.close()
        self.trim()

    def acquire_stream(self) -> Stream:
        """Return a stream for copies and pasting; release it with `release_stream`.

        All slides reuse the same streams, because CuPy keeps a pool of memory for each.
        """
        try:
            return self._streams.pop()
        except IndexError:
            return self.device.new_stream()

    def release_stream(self, stream: Stream) -> None:
        """Take back a stream, which may still have work: the next user's work follows it."""
        self._streams.append(stream)

    def acquire_workspace(self) -> Workspace:
        """Return a workspace for one batch; release it with `release_workspace`."""
        try:
            return self._workspaces.pop()
        except IndexError:
            return Workspace(self.device)

    def release_workspace(self, workspace: Workspace) -> None:
        """Take back a workspace that the device no longer uses."""
        workspace.clear()
        self._workspaces.append(workspace)

    def acquire_buffer(self, size: int) -> memoryview:
        """Return page-locked memory for encoded bytes; release it with `release_buffer`.

        All slides reuse the same buffers, because page-locking costs more than reading.

        Parameters
        ----------
        size : int
            Minimum number of bytes.

        Raises
        ------
        MemoryError
            If the system has no more page-locked memory.
        """
        for _ in range(len(self._buffers)):
            try:
                buffer = self._buffers.pop()
            except IndexError:
                break
            if len(buffer) >= size:
                return buffer
        return self.device.pinned_array(max(SMALLEST_BUFFER, size + size // 4), np.uint8).data

    def release_buffer(self, buffer: memoryview) -> None:
        """Take back a buffer that neither the device nor a decoder reads any more."""
        self._buffers.append(buffer)

    def trim(self) -> None:
        """Free idle workspaces and buffers."""
        self._workspaces.clear()
        self._buffers.clear()
        self.jpeg2000.trim()

    def decode_reference(self, tile: EncodedTile) -> Future[Array]:
        """Decode a tile on the CPU for the `Verifier`.

        The thread is kept for the next tile, because starting one takes as long as decoding. The
        first read of a slide waits for it, so several threads decode a large tile.
        """
        with self._lock:
            if self._reference is None:
                threads = min(os.cpu_count() or 1, MOST_THREADS)
                self._reference = ThreadPoolExecutor(1, "wsigpu-reference", use_threads, (threads,))
            return self._reference.submit(
                decode_tile, tile, np.empty(tile.level.tile_bytes, np.uint8)
            )

    def start(self, kind: str) -> bool:
        """Return whether the device can decode a format; create the decoder on the first call."""
        with self.decoding:
            if kind in COMPRESSED:
                return self.compressed.ready()
            if kind == JPEG2000:
                by_kernels = self.jpeg2000.ready()
                return self.engine(kind) is not None or by_kernels
            return self.engine(kind) is not None or self.jpeg.ready()

    @property
    def has_jpeg_engine(self) -> bool:
        """Whether nvImageCodec decodes JPEG here; final once `start` was called."""
        return self._decoders.get(JPEG) is not None

    def engine(self, kind: str) -> str | None:
        """Return the name of nvImageCodec's backend for a format; None if it has none.

        The decoder is created on the first call. The caller holds `decoding`.
        """
        if kind not in self._decoders:
            try:
                self._decoders[kind] = self.device.decoder(kind)
            except DeviceError as error:
                self._decoders[kind] = None
                if kind != JPEG or not self.jpeg.ready():
                    self._warn(kind, error)
        entry = self._decoders[kind]
        return None if entry is None else entry[1]

    def has_tried(self, kind: str) -> bool:
        """Return whether the decoder for a format was created, or could not be."""
        by_kernels = kind == JPEG2000 and bool(self.jpeg2000.works)
        compiled = kind in COMPRESSED and self.compressed.works is not None
        return by_kernels or compiled or kind in self._decoders

    def active_engine(self, kind: str) -> str | None:
        """Return the name of the decoder tried first, None until it is created; never blocks."""
        if kind == JPEG2000 and self.jpeg2000.works:
            return KERNELS
        if kind in COMPRESSED:
            return ENGINE if self.compressed.works else None
        entry = self._decoders.get(kind)
        if entry is None:
            return JPEG_KERNELS if kind == JPEG and self.jpeg.works else None
        return entry[1]

    def decode(
        self, kind: str, streams: NDArray[np.uint64], images: NDArray[np.uint64]
    ) -> list[bool]:
        """Decode code streams to images; return whether each was decoded.

        nvImageCodec can fail for a whole batch because memory is short or one stream is broken. The
        halves of the batch are then tried separately, and so on. The caller holds `decoding`.

        Parameters
        ----------
        kind : {"jpeg", "jpeg2000"}
            Format of the streams.
        streams, images : ndarray of uint64, shape (streams,)
            Handles of nvImageCodec.
        """
        entry = self._decoders[kind] if len(streams) and self.engine(kind) else None
        if entry is None:
            return [False] * len(streams)
        try:
            decoded = entry[0].decode(streams, images)
        except RuntimeError as error:
            decoded = [False] * len(streams)
            if len(streams) == 1:
                self._warn(kind, error)
        if len(streams) > 1 and not any(decoded):
            half = len(streams) // 2
            return [
                *self.decode(kind, streams[:half], images[:half]),
                *self.decode(kind, streams[half:], images[half:]),
            ]
        return decoded

    def _warn(self, kind: str, error: Exception) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            sentence = "Tiles that '%s' cannot decode are decoded on the CPU: %s"
            logger.warning(sentence, self.device.name, error)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                job(self)
            except Exception:  # the thread must survive, or no later job would run
                logger.exception("A job on '%s' failed", self.device.name)
            del job
