"""A CUDA device through CuPy: memory, streams, kernels, and its nvImageCodec decoders."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.gpu.device.driver import import_cuda
from napari_wsigpu.gpu.device.interop import SharedBuffer
from napari_wsigpu.gpu.device.launching import Kernels
from napari_wsigpu.gpu.jpeg.jpeg_engine import (
    ALL_ON_GPU,
    JPEG_ENGINE,
    JPEG_ENGINES,
    ROUNDS,
    STACK,
    STACKS,
    decodes,
)
from napari_wsigpu.gpu.jpeg.library import GPU_ONLY, Library
from napari_wsigpu.gpu.transfer.pinned import PinnedMemory
from napari_wsigpu.model.errors import DeviceError

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from napari_wsigpu.gpu.device.device import Event, Stream, TileFormat
    from napari_wsigpu.gpu.jpeg.library import LibraryDecoder
    from napari_wsigpu.gpu.jpeg.library_handles import LibraryImages, LibraryStreams


TO_HOST = 2


class _ForeignStream:
    """A handle, as the CUDA stream protocol wants it."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


class CudaDevice(Kernels):
    """One CUDA device.

    Parameters
    ----------
    index : int
        Number of the device.

    Attributes
    ----------
    name : str
        As users name it.
    jpeg_engine : JpegEngine
        How it decodes JPEG.

    Raises
    ------
    DeviceError
        If CUDA, CuPy, nvImageCodec or the device is not there.
    """

    def __init__(self, index: int) -> None:
        self.name = f"cuda:{index}"
        self.jpeg_engine = JPEG_ENGINES["hardware"]
        super().__init__(import_cuda("cupy", self.name), index)
        self._library = Library()
        try:
            count = self._runtime.getDeviceCount()
        except self._runtime.CUDARuntimeError as error:
            raise DeviceError(
                f"'{self.name}' can't be used, because CUDA does not start ({error}); "
                "use device='cpu'."
            ) from error
        if index >= count:
            others = ", ".join(f"'cuda:{number}'" for number in range(count)) or "'cpu'"
            raise DeviceError(f"There is no device '{self.name}' here; use one of {others}.")
        self.pinned = PinnedMemory(self._cupy)
        self._local = threading.local()

    @cached_property
    def model(self) -> str:
        """As its maker names it."""
        name: bytes = self._runtime.getDeviceProperties(self._index)["name"]
        return name.decode()

    @property
    def memory(self) -> tuple[int, int]:
        """Bytes of device memory that are free, and that there are."""
        with self.active():
            free, total = self._runtime.memGetInfo()
        return free, total

    def as_stream(self, stream: Any) -> Stream:
        """Wrap a caller's stream: an integer handle or an object with ``ptr``."""
        if not isinstance(stream, int) and not hasattr(stream, "ptr"):
            raise DeviceError(
                f"{stream!r} is no CUDA stream; give a CuPy stream or a handle, a whole number."
            )
        if hasattr(stream, "ptr"):
            wrapped: Stream = stream
        elif hasattr(self._cupy.cuda.Stream, "from_external"):
            wrapped = self._cupy.cuda.Stream.from_external(_ForeignStream(int(stream)))
        else:
            wrapped = self._cupy.cuda.ExternalStream(int(stream))
        return wrapped

    # Decoders

    def decoder(self, kind: str) -> tuple[LibraryDecoder, str]:
        """Make an nvImageCodec decoder for "jpeg" or "jpeg2000"; return it and its path's name.

        Its first decode, done here for JPEG, takes about a second.
        """
        if kind == "jpeg2000":
            return self._library.decoder(self._index, GPU_ONLY), "GPU"
        for name, engine in JPEG_ENGINES.items():
            if os.environ.get(JPEG_ENGINE, name) == name:
                decoder = self._library.decoder(
                    self._index, engine.backend, ALL_ON_GPU, engine.threads
                )
                if decodes(self, decoder, 1, (64, 64)):
                    self.jpeg_engine = engine
                    with suppress(MemoryError):  # then the first large batches take longer
                        for _ in range(ROUNDS):
                            decodes(self, decoder, STACKS, STACK)
                    return decoder, name
        raise DeviceError(f"nvImageCodec can't decode JPEG on '{self.name}'; is nvJPEG installed?")

    def code_streams(self) -> LibraryStreams:
        """Make room for the code streams of a batch."""
        return self._library.streams()

    def images(self) -> LibraryImages:
        """Make room for descriptions of memory that nvImageCodec decodes a batch to."""
        return self._library.images(on_device=True)

    # Memory

    def allocate(self, size: int) -> tuple[int, Any]:
        """Take memory outside of CuPy's pool: its address, and what frees it when it is dropped.

        Raises
        ------
        MemoryError
            If there is not enough.
        """
        with self.active():
            try:
                memory = self._cupy.cuda.Memory(size)
            except (self._runtime.CUDARuntimeError, self._cupy.cuda.memory.OutOfMemoryError):
                raise MemoryError(f"no {size >> 20} MiB are free on '{self.name}'") from None
        return int(memory.ptr), memory

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """Return a new CuPy array."""
        with self.active():
            return self._cupy.empty(shape, dtype)

    def address(self, pixels: Any) -> int:
        """Return where a CuPy array begins."""
        return int(pixels.data.ptr)

    def is_own(self, pixels: Any) -> bool:
        """Whether this is a CuPy array on this device."""
        return isinstance(pixels, self._cupy.ndarray) and pixels.device.id == self._index

    def staging(self, count: int, size: int) -> NDArray[Any]:
        """Return host memory of shape (count, size) in bytes, fast to upload."""
        return self.pinned.take((count, size), np.dtype(np.uint8))

    # Work on a stream

    def send(self, pixels: NDArray[Any], target: Any, stream: Stream) -> None:
        """Copy host pixels to a CuPy array; keep them until the stream is synchronised."""
        self.upload(int(target.data.ptr), np.ascontiguousarray(pixels), stream)

    def download(self, pixels: Any, stream: Stream) -> NDArray[Any]:
        """Copy a device array to the host; valid once the stream is synchronised."""
        host = self.pinned.take(pixels.shape, pixels.dtype)
        self._download(host, int(pixels.data.ptr), stream)
        return host

    def download_tile(self, address: int, tile: TileFormat, stream: Stream) -> NDArray[Any]:
        """Copy one tile to the host; valid once the stream is synchronised."""
        shape = (tile.height, tile.width, tile.channels)
        host = self.pinned.take(shape, np.dtype(tile.dtype))
        self._download(host, address, stream)
        return host

    def _download(self, host: NDArray[Any], address: int, stream: Stream) -> None:
        if host.nbytes:
            self._runtime.memcpyAsync(host.ctypes.data, address, host.nbytes, TO_HOST, stream.ptr)

    def follow(self, stream: Stream) -> None:
        """Have a stream wait for what the thread's current stream holds.

        New arrays may lie in memory that the current stream still uses.
        """
        current = self._cupy.cuda.get_current_stream()
        if current.ptr != stream.ptr:
            self._runtime.eventRecord(self._event.ptr, current.ptr)
            self._runtime.streamWaitEvent(stream.ptr, self._event.ptr)

    def record(self, stream: Stream) -> Event:
        """Return the place up to which a stream holds work now."""
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        recorded: Event = event
        return recorded

    @property
    def _event(self) -> Any:
        if not hasattr(self._local, "event"):
            self._local.event = self._cupy.cuda.Event(disable_timing=True)
        return self._local.event

    def fill(self, pixels: Any, value: float, stream: Stream) -> None:
        """Set all of a CuPy array to one value."""
        with stream:
            pixels.fill(value)

    def shared(self, count: int, dtype: DTypeLike) -> NDArray[Any]:
        """Return host memory that the device can read and set.

        Raises
        ------
        MemoryError
            If there is not enough.
        """
        return self.pinned.take((count,), np.dtype(dtype), surely=True)

    def share_buffer(self, buffer: int, size: int) -> SharedBuffer:
        """Let the device write into a buffer of the thread's current OpenGL context.

        Raises
        ------
        DeviceError
            If OpenGL draws on another GPU, or its buffers can't be shared.
        """
        return SharedBuffer(self.name, self._index, self.active, buffer, size)
