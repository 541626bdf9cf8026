"""`Jpeg2000Engine`: decoders for JPEG 2000 on one device, and the memory that they share."""

from __future__ import annotations

import logging
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from napari_wsigpu.gpu.jpeg2000.form_decoder import Form, FormDecoder, form_of, programs
from napari_wsigpu.gpu.jpeg2000.jpeg2000_header import in_brief, read_header
from napari_wsigpu.model.errors import DeviceError

if TYPE_CHECKING:
    import cupy
    import numpy as np
    from numpy.typing import NDArray

    from napari_wsigpu.gpu.device.cuda import CudaDevice
    from napari_wsigpu.gpu.device.interfaces import Event, Stream
    from napari_wsigpu.model.arrays import Integers

LONGEST_HEADER = 4096  # bytes at the start of a code stream that are searched for headers
MOST_DECODERS = 16
# Keys of `gpu.device.verify.TOLERANCES`.
KERNELS, EXACT = "JPEG 2000", "lossless JPEG 2000"
# Limits of the memory for intermediate results: bytes, and the divisor of device memory. Batches
# that need more are decoded in parts, one after another.
MOST_MEMORY, PART_OF_DEVICE = 2 << 30, 16

logger = logging.getLogger(__name__)


class _Scratch(NamedTuple):
    """Device memory that batches use one after another.

    Attributes
    ----------
    address, size : int
        Device address and bytes.
    memory : cupy.cuda.Memory
        Owner of the memory.
    stream : Stream
        Stream that used it last.
    done : Event
        Reached when that use is done.
    """

    address: int
    size: int
    memory: cupy.cuda.Memory
    stream: Stream
    done: Event


class Jpeg2000Engine:
    """Decodes JPEG 2000 on a device with our kernels.

    Only one thread may call `decode` at a time (it holds `DecodeWorker.decoding`); `trim` and
    `ready` may be called from any thread.

    Parameters
    ----------
    device : CudaDevice
        Device to decode on.

    Attributes
    ----------
    works : bool or None
        Whether the kernels can be compiled for the device; None before `ready` was called.
    """

    def __init__(self, device: CudaDevice) -> None:
        self.works: bool | None = None
        self._device = device
        self._decoders: dict[Form, FormDecoder] = {}
        self._scratch: _Scratch | None = None
        # Protects `_scratch`. `decode` takes the memory out while it submits work, so that `trim`
        # cannot free it.
        self._lock = threading.Lock()

    def ready(self) -> bool:
        """Return whether the device runs the kernels, which are compiled on the first call."""
        if self.works is None:
            try:
                self._device.compile(*programs())
                self.works = True
            except DeviceError as error:
                self.works = False
                logger.info("JPEG 2000 is decoded by nvJPEG2000 and the CPU: %s", error)
        return self.works

    def decode(
        self,
        form: Form,
        encoded: NDArray[np.uint8],
        starts: Integers,
        lengths: Integers,
        targets: Integers,
        pixel_bytes: int,
        status: NDArray[np.int32],
        stream: Stream,
    ) -> None:
        """Submit the decoding of code streams of one form to a stream.

        Parameters
        ----------
        form : Form
            Form of the code streams.
        encoded : ndarray of uint8
            Host memory with the code streams; the caller keeps it until the stream is synchronized.
        starts, lengths : ndarray of int64, shape (tiles,)
            Offset and length of each code stream in `encoded`, in bytes.
        targets : ndarray of int64, shape (tiles,)
            Device address of each tile's first sample.
        pixel_bytes : int
            Bytes from one pixel to the next.
        status : ndarray of int32, shape (tiles,)
            Page-locked memory, in which a kernel sets 0 for each tile that was decoded.
        stream : Stream
            Stream to which the work is submitted.

        Raises
        ------
        MemoryError
            If the device does not have enough memory.
        """
        decoder = self._decoder(form)
        first, last = int(starts.min()), int((starts + lengths).max())
        # Memory grows nearly linearly with the number of tiles, so 64 of them predict it.
        some = min(len(starts), 64)
        budget = min(MOST_MEMORY, self._device.memory[1] // PART_OF_DEVICE)
        at_once = min(len(starts), max(1, budget * some // decoder.layout(some)["size"]))
        room = -(-(last - first) // 256) * 256
        scratch = self._room(room + decoder.layout(at_once)["size"], stream)
        self._device.upload(scratch.address, encoded[first:last], stream)
        for index in range(0, len(starts), at_once):
            part = slice(index, index + at_once)
            decoder.decode(
                scratch.address,
                starts[part] - first,
                lengths[part],
                targets[part],
                pixel_bytes,
                scratch.address + room,
                status[part],
                stream,
            )
        with self._lock:
            self._scratch = scratch._replace(stream=stream, done=self._device.record(stream))

    def trim(self) -> None:
        """Free the memory for intermediate results, after waiting for its last use."""
        with self._lock:
            scratch, self._scratch = self._scratch, None
        if scratch is not None:
            scratch.done.synchronize()

    def _decoder(self, form: Form) -> FormDecoder:
        """Return the decoder for a form; keep the `MOST_DECODERS` that were used last."""
        found = self._decoders.pop(form, None) or FormDecoder(self._device, form)
        # Freeing a decoder's tables (cudaFree) waits until no kernel uses them.
        while len(self._decoders) >= MOST_DECODERS:
            del self._decoders[next(iter(self._decoders))]
        self._decoders[form] = found
        return found

    def _room(self, size: int, stream: Stream) -> _Scratch:
        """Return memory of at least `size` bytes; work on `stream` will wait for its last use."""
        with self._lock:
            scratch, self._scratch = self._scratch, None
        if scratch is not None and scratch.size >= size:
            if scratch.stream is not stream:
                stream.wait_event(scratch.done)
            return scratch
        if scratch is not None:
            # Free it first: the device may not have enough for both.
            scratch.done.synchronize()
            del scratch
        address, memory = self._device.allocate(size)
        return _Scratch(address, size, memory, stream, self._device.record(stream))


def form_of_stream(stream: memoryview) -> Form | str:
    """Return the form of a code stream, or the reason why our kernels cannot decode it."""
    return _known(in_brief(bytes(stream[:LONGEST_HEADER])))


@lru_cache(maxsize=256)
def _known(head: bytes) -> Form | str:
    header = read_header(head)
    return header if isinstance(header, str) else form_of(header)
