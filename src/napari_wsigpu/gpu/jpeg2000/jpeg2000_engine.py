"""`Jpeg2000Engine`: decoders for JPEG 2000 on one device, and the memory that they share."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from napari_wsigpu.gpu.device.kernel_engine import KernelEngine
from napari_wsigpu.gpu.device.scratch import Scratch
from napari_wsigpu.gpu.jpeg2000.form_decoder import Form, FormDecoder, form_of, programs
from napari_wsigpu.gpu.jpeg2000.jpeg2000_header import in_brief, read_header

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from napari_wsigpu.gpu.device.cuda import CudaDevice
    from napari_wsigpu.gpu.device.interfaces import Stream
    from napari_wsigpu.model.arrays import Integers

LONGEST_HEADER = 4096  # bytes at the start of a code stream that are searched for headers
MOST_DECODERS = 16
# Keys of `gpu.device.verify.TOLERANCES`.
KERNELS, EXACT = "JPEG 2000", "lossless JPEG 2000"


class Jpeg2000Engine(KernelEngine):
    """Decodes JPEG 2000; see `KernelEngine`."""

    _otherwise = "JPEG 2000 is decoded by nvJPEG2000 and the CPU"

    def __init__(self, device: CudaDevice) -> None:
        super().__init__(device)
        self._scratch = Scratch(device)
        self._decoders: dict[Form, FormDecoder] = {}

    @staticmethod
    def _programs() -> tuple[str, ...]:
        return tuple(programs())

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
        most = self._scratch.budget * some // decoder.layout(some)["size"]
        parts = -(-len(starts) // max(1, most))
        at_once = -(-len(starts) // parts)
        streams = -(-(last - first) // 256) * 256
        room = self._scratch.borrow(streams + decoder.layout(at_once)["size"], stream)
        self._device.upload(room.address, encoded[first:last], stream)
        for index in range(0, len(starts), at_once):
            part = slice(index, index + at_once)
            decoder.decode(
                room.address,
                starts[part] - first,
                lengths[part],
                targets[part],
                pixel_bytes,
                room.address + streams,
                status[part],
                stream,
            )
        self._scratch.give_back(room, stream)

    def trim(self) -> None:
        """Free the memory for intermediate results, after waiting for its last use."""
        self._scratch.trim()

    def _decoder(self, form: Form) -> FormDecoder:
        """Return the decoder for a form; keep the `MOST_DECODERS` that were used last."""
        found = self._decoders.pop(form, None) or FormDecoder(self._device, form)
        # Freeing a decoder's tables (cudaFree) waits until no kernel uses them.
        while len(self._decoders) >= MOST_DECODERS:
            del self._decoders[next(iter(self._decoders))]
        self._decoders[form] = found
        return found


def form_of_stream(stream: memoryview) -> Form | str:
    """Return the form of a code stream, or the reason why our kernels cannot decode it."""
    return _known(in_brief(bytes(stream[:LONGEST_HEADER])))


@lru_cache(maxsize=256)
def _known(head: bytes) -> Form | str:
    header = read_header(head)
    return header if isinstance(header, str) else form_of(header)
