"""A CUDA device through CuPy: memory, streams, kernels, and its nvImageCodec decoders."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import weakref
from functools import cached_property
from importlib import import_module, resources
from typing import TYPE_CHECKING, Any

import imagecodecs
import numpy as np

from napari_wsigpu.codecs.rounding import correction_table, differing_pairs
from napari_wsigpu.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import DTypeLike, NDArray

    from napari_wsigpu.codecs.device import Stream, TileFormat, Window

DRIVERS = {"win32": "nvcuda.dll"}
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
JPEG_ENGINE = "WSIGPU_JPEG_ENGINE"
PINNED_BUDGET = 1 << 30
THREADS = 256
TO_DEVICE, TO_HOST = 1, 2


def driver_is_there() -> bool:
    """Whether an NVIDIA driver can be loaded; nothing is initialised."""
    try:
        ctypes.CDLL(DRIVERS.get(sys.platform, "libcuda.so.1"))
    except OSError:
        return False
    return True


def import_cuda(package: str, device: str) -> Any:
    """Import a package of the CUDA extras, for the use of a device.

    Raises
    ------
    DeviceError
        If there is no driver, or the package is not installed or broken.
    """
    if not driver_is_there():
        raise DeviceError(
            f"'{device}' can't be used, because this machine has no NVIDIA driver; "
            "use device='auto' or device='cpu'."
        )
    # Both are read when CUDA or nvImageCodec starts. JPEG 2000 tiles are decoded side by side
    # by up to 32 queues instead of 8; what can't be decoded is said by our own errors.
    os.environ.setdefault(CONNECTIONS, "32")
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")
    try:
        return import_module(package)
    except (ImportError, OSError, RuntimeError) as error:
        raise DeviceError(
            f"'{device}' can't be used, because {package} can't be loaded ({error}); install "
            "napari-wsigpu[cuda12] or napari-wsigpu[cuda13], as your driver's CUDA version is, "
            "or use device='cpu'."
        ) from error


class _ForeignStream:
    """A handle, as the CUDA stream protocol wants it."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


class _View:
    """Device memory as nvImageCodec takes it."""

    def __init__(self, address: int, shape: tuple[int, ...], typestr: str) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (address, False),
            "version": 3,
        }


class PinnedMemory:
    """Page-locked host memory: a device copies to it at full speed, without the processor.

    Arrays give their memory back by themselves. What is kept by callers beyond the budget is
    ordinary memory, because page-locked memory is taken from all other programs.
    """

    def __init__(self, cupy: Any, budget: int = PINNED_BUDGET) -> None:
        self._pool = cupy.cuda.PinnedMemoryPool()
        self._budget = budget
        self._lock = threading.Lock()
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an array, page-locked within the budget."""
        count = int(np.prod(shape))
        size = count * dtype.itemsize
        with self._lock:
            fits = 0 < size <= self._budget - self._used
            self._used += size if fits else 0
        if not fits:
            return np.empty(shape, dtype)
        memory = self._pool.malloc(size)
        pixels = np.frombuffer(memory, dtype, count)
        weakref.finalize(pixels, self._give_back, size).atexit = False
        return pixels.reshape(shape)

    def _give_back(self, size: int) -> None:
        with self._lock:
            self._used -= size


class CudaDevice:
    """One CUDA device.

    Parameters
    ----------
    index : int
        Number of the device.

    Raises
    ------
    DeviceError
        If CUDA, CuPy, nvImageCodec or the device is not there.
    """

    def __init__(self, index: int) -> None:
        self.name = f"cuda:{index}"
        self._index = index
        self._cupy = import_cuda("cupy", self.name)
        self._nvimgcodec = import_cuda("nvidia.nvimgcodec", self.name)
        self._runtime = self._cupy.cuda.runtime
        try:
            count = self._runtime.getDeviceCount()
        except self._runtime.CUDARuntimeError as error:
            raise DeviceError(
                f"'{self.name}' can't be used, because CUDA does not start ({error}); "
                "use device='cpu'."
            ) from error
        if index >= count:
            raise DeviceError(
                f"There is no device '{self.name}'; use 'cuda:0' to 'cuda:{count - 1}'."
            )
        self.pinned = PinnedMemory(self._cupy)

    def active(self) -> AbstractContextManager[Any]:
        """Make the device the calling thread's current one."""
        device: AbstractContextManager[Any] = self._cupy.cuda.Device(self._index)
        return device

    @property
    def memory(self) -> tuple[int, int]:
        """Bytes of device memory that are free, and that there are."""
        with self.active():
            free, total = self._runtime.memGetInfo()
        return free, total

    def new_stream(self) -> Stream:
        """Make a stream that does not wait for others."""
        stream: Stream = self._cupy.cuda.Stream(non_blocking=True)
        return stream

    def as_stream(self, stream: Any) -> Stream:
        """Wrap a caller's stream: an integer handle or an object with ``ptr``."""
        if hasattr(stream, "ptr"):
            wrapped: Stream = stream
        elif hasattr(self._cupy.cuda.Stream, "from_external"):
            wrapped = self._cupy.cuda.Stream.from_external(_ForeignStream(int(stream)))
        else:
            wrapped = self._cupy.cuda.ExternalStream(int(stream))
        return wrapped

    # Decoders

    def decoder(self, kind: str) -> tuple[Any, str]:
        """Make an nvImageCodec decoder for "jpeg" or "jpeg2000"; return it and its path's name.

        Its first decode, done here, takes about a second.
        """
        kinds = self._nvimgcodec.BackendKind
        if kind == "jpeg2000":
            return self._new_decoder(kinds.GPU_ONLY), "GPU"
        if os.environ.get(JPEG_ENGINE) != "hybrid":
            decoder = self._new_decoder(kinds.HW_GPU_ONLY)
            if self._decodes(decoder):
                return decoder, "hardware"
        decoder = self._new_decoder(kinds.HYBRID_CPU_GPU)
        if self._decodes(decoder):
            return decoder, "hybrid"
        raise DeviceError(f"nvImageCodec can't decode JPEG on '{self.name}'; is nvJPEG installed?")

    def _new_decoder(self, backend: Any) -> Any:
        nvimgcodec = self._nvimgcodec
        return nvimgcodec.Decoder(device_id=self._index, backends=[nvimgcodec.Backend(backend)])

    def _decodes(self, decoder: Any) -> bool:
        picture = imagecodecs.jpeg8_encode(np.zeros((64, 64, 3), np.uint8))
        return decoder.decode([self._nvimgcodec.CodeStream(bytes(picture))])[0] is not None

    # Memory

    def allocate(self, size: int) -> tuple[int, Any]:
        """Take memory outside of CuPy's pool, so that dropping it frees it.

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

    def views(self, addresses: Sequence[int], tile: TileFormat) -> list[Any]:
        """Return an array-like over each tile, for nvImageCodec to wrap."""
        shape, typestr = (tile.height, tile.width, tile.channels), np.dtype(tile.dtype).str
        return [_View(address, shape, typestr) for address in addresses]

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """Return a new CuPy array."""
        with self.active():
            return self._cupy.empty(shape, dtype)

    def staging(self, count: int, size: int) -> NDArray[Any]:
        """Return host memory of shape (count, size) in bytes, fast to upload."""
        return self.pinned.take((count, size), np.dtype(np.uint8))

    # Work on a stream

    def upload(self, address: int, pixels: NDArray[Any], stream: Stream) -> None:
        """Copy host pixels to device memory; keep them until the stream is synchronised."""
        self._runtime.memcpyAsync(address, pixels.ctypes.data, pixels.nbytes, TO_DEVICE, stream.ptr)

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

    def fill(self, pixels: Any, value: float, stream: Stream) -> None:
        """Set all of a CuPy array to one value."""
        with stream:
            pixels.fill(value)

    def paste(
        self,
        tiles: NDArray[Any],
        tile: TileFormat,
        level: tuple[int, int],
        pixels: Any,
        window: Window,
        stream: Stream,
    ) -> None:
        """Copy the parts of tiles that lie in a window to their place in `pixels`."""
        sample = np.dtype(tile.dtype).itemsize
        pixel = sample if window.channel is not None else sample * tile.channels
        arguments = (
            np.int32(tile.height),
            np.int32(tile.width),
            np.int32(sample * tile.channels),
            np.int32(sample * (window.channel or 0)),
            np.int32(pixel),
            np.int64(window.top),
            np.int64(window.left),
            np.int64(window.height),
            np.int64(window.width),
            np.int64(level[0]),
            np.int64(level[1]),
            pixels,
        )
        across = -(-tile.width * pixel // THREADS)
        self._launch("paste", (across, tile.height, len(tiles)), tiles, arguments, stream)

    def ycbcr_to_rgb(self, tiles: NDArray[Any], tile: TileFormat, stream: Stream) -> None:
        """Convert full-range YCbCr tiles to RGB in place, rounded as libjpeg does."""
        pixels = tile.height * tile.width
        grid = (-(-pixels // THREADS), len(tiles))
        self._launch("ycbcr_to_rgb", grid, tiles, (np.int32(pixels),), stream)

    def round_as_libjpeg(self, tiles: NDArray[Any], tile: TileFormat, stream: Stream) -> Any:
        """Give RGB that a JPEG engine made of YCbCr the rounding of libjpeg, in place.

        Returns
        -------
        cupy.ndarray of int32
            One flag a tile: not 0 where a clipped pixel hides how it has to be rounded.
        """
        pairs, table = self._rounding
        with stream:
            unclear = self._cupy.zeros(len(tiles), np.int32)
        pixels = tile.height * tile.width
        arguments = (np.int32(pixels), pairs, np.int32(len(pairs)), table, unclear)
        grid = (-(-pixels // THREADS), len(tiles))
        self._launch("round_as_libjpeg", grid, tiles, arguments, stream)
        return unclear

    @cached_property
    def _rounding(self) -> tuple[Any, Any]:
        with self.active():
            return self._cupy.asarray(differing_pairs()), self._cupy.asarray(correction_table())

    @cached_property
    def _kernels(self) -> Any:
        code = resources.files("napari_wsigpu.codecs").joinpath("kernels.cu").read_text("utf-8")
        return self._cupy.RawModule(code=code)

    def _launch(
        self,
        kernel: str,
        grid: tuple[int, ...],
        tiles: NDArray[Any],
        arguments: tuple[Any, ...],
        stream: Stream,
    ) -> None:
        if 0 in grid:
            return
        with stream:
            # Freed to CuPy's pool at once, which gives it out again in this stream's order.
            rows = self._cupy.empty(tiles.shape, np.int64)
            self.upload(int(rows.data.ptr), np.ascontiguousarray(tiles, np.int64), stream)
            self._kernels.get_function(kernel)(grid, (THREADS,), (rows, *arguments))
