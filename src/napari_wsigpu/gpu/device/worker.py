"""The worker of a device: nvImageCodec's decoders, a thread, and memory for batches."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.codecs.tile import decode_tile
from napari_wsigpu.gpu.device.workspace import Workspace
from napari_wsigpu.gpu.jpeg2000.engine import KERNELS, Jpeg2000Engine
from napari_wsigpu.gpu.transfer.gds import Loader
from napari_wsigpu.model.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.decoder import EncodedTile
    from napari_wsigpu.gpu.device.cuda import CudaDevice
    from napari_wsigpu.gpu.device.device import Stream
    from napari_wsigpu.gpu.jpeg.library import LibraryDecoder

    Job = Callable[["DecodeWorker"], None]

JPEG2000 = "jpeg2000"
MOST_IDLE = 4
# To make it page-locked takes longer than to fill it: one for a thousand tiles serves fewer, too.
SMALLEST_BUFFER = 16 << 20

logger = logging.getLogger(__name__)


class DecodeWorker:
    """Decoders of each kind, and a thread that decodes while others prepare batches.

    The thread starts with the first job.

    Parameters
    ----------
    device : CudaDevice
        What it decodes on.

    Attributes
    ----------
    decoding : RLock
        Held while a decoder works: two threads in one decoder end the process. Batches have
        streams of their own, so that the device pastes one while it decodes the next.
    loader : Loader
        Brings to the device what needs no decoding.
    jpeg2000 : Jpeg2000Engine
        Decodes JPEG 2000 without nvImageCodec.
    """

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.decoding = threading.RLock()
        self._thread: threading.Thread | None = None
        self._decoders: dict[str, tuple[LibraryDecoder, str] | None] = {}
        self._workspaces: deque[Workspace] = deque(maxlen=MOST_IDLE)
        self._buffers: deque[memoryview] = deque(maxlen=2 * MOST_IDLE)
        self._streams: deque[Stream] = deque()
        self._reference: ThreadPoolExecutor | None = None
        self.loader = Loader(device)
        self.jpeg2000 = Jpeg2000Engine(device)
        self._warned: set[str] = set()

    def submit(self, job: Job) -> None:
        """Have a job called with the worker, after those before it."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="wsigpu-gpu", daemon=True)
                self._thread.start()
            self._queue.put(job)

    def close(self) -> None:
        """End the thread after the jobs that were submitted, and let go of its decoders."""
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

    def take_stream(self) -> Stream:
        """Give out a stream for other work than decoding, to come back by `give_stream`.

        Streams are used again, by all slides: CuPy keeps the memory that was used on each.
        """
        try:
            return self._streams.pop()
        except IndexError:
            return self.device.new_stream()

    def give_stream(self, stream: Stream) -> None:
        """Take a stream back."""
        self._streams.append(stream)

    def take_workspace(self) -> Workspace:
        """Give out a workspace, which comes back by `give_workspace`."""
        try:
            return self._workspaces.pop()
        except IndexError:
            return Workspace(self.device)

    def give_workspace(self, workspace: Workspace) -> None:
        """Take a workspace back."""
        workspace.clear()
        self._workspaces.append(workspace)

    def take_buffer(self, size: int) -> memoryview:
        """Give out page-locked memory for encoded bytes, to come back by `give_buffer`.

        It is used again, since new memory costs more than to read, and for all slides.

        Raises
        ------
        MemoryError
            If there is not enough.
        """
        for _ in range(len(self._buffers)):
            try:
                buffer = self._buffers.pop()
            except IndexError:
                break
            if len(buffer) >= size:
                return buffer
        return self.device.shared(max(SMALLEST_BUFFER, size + size // 4), np.uint8).data

    def give_buffer(self, buffer: memoryview) -> None:
        """Take page-locked memory back."""
        self._buffers.append(buffer)

    def trim(self) -> None:
        """Free the memory of workspaces and buffers that nobody uses now."""
        self._workspaces.clear()
        self._buffers.clear()
        self.jpeg2000.trim()

    def decode_reference(self, tile: EncodedTile) -> Future[NDArray[Any]]:
        """Have a tile decoded on the CPU, to be compared; by a thread that is there already.

        To start one would take as long as to decode the tile.
        """
        with self._lock:
            if self._reference is None:
                self._reference = ThreadPoolExecutor(1, "wsigpu-reference")
            return self._reference.submit(
                decode_tile, tile, np.empty(tile.level.tile_bytes, np.uint8)
            )

    def start(self, kind: str) -> bool:
        """Create the decoder of a kind unless it exists; return whether there is one."""
        with self.decoding:
            own = kind == JPEG2000 and self.jpeg2000.ready()
            return self.engine(kind) is not None or own

    def engine(self, kind: str) -> str | None:
        """Return the name of the path that decodes a kind, None if there is none.

        The first time, the decoder is created. The caller holds `decoding`.
        """
        if kind not in self._decoders:
            try:
                self._decoders[kind] = self.device.decoder(kind)
            except DeviceError as error:
                self._decoders[kind] = None
                self._warn(kind, error)
        made = self._decoders[kind]
        return None if made is None else made[1]

    def has_tried(self, kind: str) -> bool:
        """Whether a decoder of a kind was made, or could not be."""
        own = kind == JPEG2000 and bool(self.jpeg2000.works)
        return own or kind in self._decoders

    def made_engine(self, kind: str) -> str | None:
        """Return what decodes a kind first, from any thread and without making a decoder."""
        if kind == JPEG2000 and self.jpeg2000.works:
            return KERNELS
        made = self._decoders.get(kind)
        return None if made is None else made[1]

    def decode(
        self, kind: str, streams: NDArray[np.uint64], images: NDArray[np.uint64]
    ) -> list[bool]:
        """Decode code streams into images; return which of them worked.

        If nothing works, as when memory runs out or one stream spoils the batch, smaller parts
        are tried. The caller holds `decoding`.
        """
        made = self._decoders[kind] if len(streams) and self.engine(kind) else None
        if made is None:
            return [False] * len(streams)
        try:
            decoded = made[0].decode(streams, images)
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
            logger.warning(
                "What '%s' can't decode is decoded on the CPU: %s", self.device.name, error
            )

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                job(self)
            except Exception:  # or no later job would ever run
                logger.exception("A job on '%s' failed", self.device.name)
            del job
