"""What decodes JPEG 2000 on one device: a decoder for each form, and the memory they work in."""

from __future__ import annotations

import logging
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from napari_wsigpu.gpu.jpeg2000.decoder import Form, Jpeg2000, form_of, programs
from napari_wsigpu.gpu.jpeg2000.header import in_brief, read_header
from napari_wsigpu.model.errors import DeviceError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from napari_wsigpu.gpu.device.cuda import CudaDevice
    from napari_wsigpu.gpu.device.device import Event, Stream

LONGEST_HEADER = 4096
MOST_DECODERS = 16
# As `gpu.device.verify.TOLERANCES` names them.
KERNELS, EXACT = "JPEG 2000", "lossless JPEG 2000"
# Of device memory, for what lies between encoded bytes and pixels: at most this, or that part of
# it all. More tiles at once are decoded one part after the other.
MOST_MEMORY, PART_OF_DEVICE = 2 << 30, 16

logger = logging.getLogger(__name__)


class _Scratch(NamedTuple):
    """Device memory, and the last work that uses it."""

    address: int
    size: int
    memory: Any
    stream: Stream
    done: Event


class Jpeg2000Engine:
    """Decodes JPEG 2000 on a device, by one thread at a time.

    Parameters
    ----------
    device : CudaDevice
        The device.

    Attributes
    ----------
    works : bool or None
        Whether the device runs the kernels; None until that was tried.
    """

    def __init__(self, device: CudaDevice) -> None:
        self.works: bool | None = None
        self._device = device
        self._decoders: dict[Form, Jpeg2000] = {}
        self._scratch: _Scratch | None = None
        self._lock = threading.Lock()

    def ready(self) -> bool:
        """Whether the device runs the kernels; they are compiled the first time."""
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
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        targets: NDArray[np.int64],
        pixel_bytes: int,
        status: NDArray[np.int32],
        stream: Stream,
    ) -> None:
        """Give a stream all that decodes tiles of one form.

        Parameters
        ----------
        form : Form
            Theirs.
        encoded : ndarray of uint8
            Host memory that holds their code streams, kept until the stream is done.
        starts, lengths : ndarray of int64, shape (tiles,)
            Where in it.
        targets : ndarray of int64, shape (tiles,)
            Addresses of their first pixels in device memory.
        pixel_bytes : int
            How far apart pixels lie there.
        status : ndarray of int32, shape (tiles,)
            Memory that the device shares: will be 0 for each tile that was decoded.
        stream : Stream
            Which does it.

        Raises
        ------
        MemoryError
            If the device has too little.
        """
        decoder = self._decoder(form)
        first, last = int(starts.min()), int((starts + lengths).max())
        some = min(len(starts), 64)
        budget = min(MOST_MEMORY, self._device.memory[1] // PART_OF_DEVICE)
        at_once = min(len(starts), max(1, budget * some // decoder.layout(some)["size"]))
        room = -(-(last - first) // 256) * 256
        scratch = self._room(room + decoder.layout(at_once)["size"], stream)
        self._device.upload(scratch.address, encoded[first:last], stream)
        for begin in range(0, len(starts), at_once):
            part = slice(begin, begin + at_once)
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
        """Free the memory between batches; what is in use is freed when its work is done."""
        with self._lock:
            scratch, self._scratch = self._scratch, None
        if scratch is not None:
            scratch.done.synchronize()

    def _decoder(self, form: Form) -> Jpeg2000:
        found = self._decoders.pop(form, None) or Jpeg2000(self._device, form)
        while len(self._decoders) >= MOST_DECODERS:
            del self._decoders[next(iter(self._decoders))]
        self._decoders[form] = found
        return found

    def _room(self, size: int, stream: Stream) -> _Scratch:
        with self._lock:
            scratch, self._scratch = self._scratch, None
        if scratch is not None and scratch.size >= size:
            if scratch.stream is not stream:
                stream.wait_event(scratch.done)
            return scratch
        if scratch is not None:
            scratch.done.synchronize()
            del scratch
        address, memory = self._device.allocate(size)
        return _Scratch(address, size, memory, stream, self._device.record(stream))


def form_of_stream(stream: memoryview) -> Form | str:
    """Return the form of a code stream, or why it can't be decoded here."""
    return _known(in_brief(bytes(stream[:LONGEST_HEADER])))


@lru_cache(maxsize=256)
def _known(head: bytes) -> Form | str:
    header = read_header(head)
    return header if isinstance(header, str) else form_of(header)
