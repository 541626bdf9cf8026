"""A CUDA device through CuPy: memory, streams, kernels, and its nvImageCodec decoders."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from contextlib import suppress
from functools import cached_property
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.codecs.raw import is_swapped
from napari_wsigpu.gpu.device.compiled import CompiledKernels
from napari_wsigpu.gpu.device.device import AVERAGED_TYPES
from napari_wsigpu.gpu.device.driver import import_cuda
from napari_wsigpu.gpu.device.interop import SharedBuffer
from napari_wsigpu.gpu.device.tables import declarations
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
from napari_wsigpu.gpu.jpeg.library_handles import LibraryImages, LibraryStreams
from napari_wsigpu.gpu.transfer.pinned import PinnedMemory
from napari_wsigpu.model.errors import DeviceError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from numpy.typing import DTypeLike, NDArray

    from napari_wsigpu.codecs.color import ColorTable
    from napari_wsigpu.gpu.device.device import Event, Stream, TileFormat
    from napari_wsigpu.gpu.jpeg.library import LibraryDecoder
    from napari_wsigpu.model.layout import LevelLayout

THREADS = 256
MOST_UPLOADED = 64 << 10
# Bytes that a thread copies at once, and how often: fewer blocks take less time to start.
CHUNK, CHUNKS_A_THREAD = 16, 4
# How many rows of a tile one block of threads copies: fewer blocks take less time to start.
ROWS_A_BLOCK, MOST_BLOCKS = 8, 0xFFFF
TO_DEVICE, TO_HOST, WITHIN_DEVICE = 1, 2, 3
KERNELS = (
    "paste",
    "paste_colors",
    "paste_scaled",
    "lay_out",
    "ycbcr_to_rgb",
    "merge_planes",
    *(f"average_area_{dtype}" for dtype in AVERAGED_TYPES),
)


class _ForeignStream:
    """A handle, as the CUDA stream protocol wants it."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


class CudaDevice:
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
        self._cupy, self._index = import_cuda("cupy", self.name), index
        self._runtime = self._cupy.cuda.runtime
        self._colors: weakref.WeakKeyDictionary[ColorTable, Any] = weakref.WeakKeyDictionary()
        self._colors_lock, self._compiling = threading.Lock(), threading.Lock()
        self._modules: dict[tuple[str, ...], CompiledKernels] = {}
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

    def active(self) -> AbstractContextManager[Any]:
        """Make the device the calling thread's current one."""
        device: AbstractContextManager[Any] = self._cupy.cuda.Device(self._index)
        return device

    def new_stream(self) -> Stream:
        """Make a stream that does not wait for others."""
        with self.active():
            stream: Stream = self._cupy.cuda.Stream(non_blocking=True)
        return stream

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
        return LibraryStreams(self._library)

    def images(self) -> LibraryImages:
        """Make room for descriptions of memory that nvImageCodec decodes a batch to."""
        return LibraryImages(self._library, on_device=True)

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

    def upload(self, address: int, pixels: NDArray[Any], stream: Stream) -> None:
        """Copy host pixels to device memory; keep them until the stream is synchronised."""
        self._runtime.memcpyAsync(address, pixels.ctypes.data, pixels.nbytes, TO_DEVICE, stream.ptr)

    def copy(self, address: int, pixels: Any, stream: Stream) -> None:
        """Copy a device array to other device memory."""
        source = int(pixels.data.ptr)
        self._runtime.memcpyAsync(address, source, pixels.nbytes, WITHIN_DEVICE, stream.ptr)

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

    # Kernels, compiled when the first of them is started

    def table(self, table: NDArray[Any], stream: Stream) -> Any:
        """Copy a table to the device, as bytes."""
        with stream:
            copied = self._cupy.empty(table.nbytes, np.uint8)
        data, address = np.ascontiguousarray(table).view(np.uint8), int(copied.data.ptr)
        # For more at once, CUDA would wait until the stream has done all before.
        for first in range(0, len(data), MOST_UPLOADED):
            self.upload(address + first, data[first : first + MOST_UPLOADED], stream)
        return copied

    def paste(
        self,
        pastes: NDArray[np.void],
        tile: TileFormat,
        pixels: Any,
        stream: Stream,
        *,
        channel: int | None = None,
        step: tuple[int, int] = (1, 1),
    ) -> None:
        """Copy parts of tiles to their places in `pixels`.

        Parameters
        ----------
        pastes : ndarray of `gpu.device.tables.PASTE`
            The parts.
        tile : TileFormat
            What the tiles are.
        pixels : device array
            Of all channels, or of the one.
        stream : Stream
            Which does it.
        channel : int, optional
            One channel instead of all.
        step : tuple of (int, int)
            Every how many rows and columns of a tile one is copied.
        """
        if not len(pastes):
            return
        sample = np.dtype(tile.dtype).itemsize
        pixel = sample if channel is not None else sample * tile.channels
        sizes = tile.width, sample * tile.channels, sample * (channel or 0), pixel, *step
        chunks = tile.height * (tile.width * pixel // CHUNK + 2)
        grid = len(pastes), min(-(-chunks // (THREADS * CHUNKS_A_THREAD)), MOST_BLOCKS)
        table = self.table(pastes, stream)
        self._launch("paste", grid, (table, *map(np.int32, sizes), pixels), stream)

    def compile(self, *texts: str) -> CompiledKernels:
        """Compile kernels, once for the same texts; floats are rounded after each operation.

        Raises
        ------
        DeviceError
            If they can't be compiled.
        """
        with self._compiling:
            if texts not in self._modules:
                self._modules[texts] = CompiledKernels(self._cupy, texts, self._index)
            return self._modules[texts]

    def colors(self, table: ColorTable) -> Any:
        """Return a table's colours in device memory, copied once while the table lives.

        Raises
        ------
        MemoryError
            If there is not enough.
        """
        with self._colors_lock:
            colors = self._colors.get(table)
            if colors is None:
                with self.active(), self.new_stream() as stream:
                    colors = self._cupy.asarray(table.colors)
                    stream.synchronize()
                self._colors[table] = colors
        return colors

    def paste_colors(
        self,
        pastes: NDArray[np.void],
        tile: TileFormat,
        pixels: Any,
        colors: Any,
        stream: Stream,
        *,
        step: tuple[int, int] = (1, 1),
    ) -> None:
        """Do as `paste` with all channels of 8-bit RGB or RGBA, and look each colour up."""
        if not len(pastes):
            return
        grid = len(pastes), _row_blocks(tile.height), -(-tile.width // THREADS)
        numbers = map(np.int32, (tile.width, tile.channels, *step))
        table = self.table(pastes, stream)
        self._launch("paste_colors", grid, (table, *numbers, colors, pixels), stream)

    def paste_scaled(
        self,
        parts: NDArray[np.void],
        tile: TileFormat,
        pixels: Any,
        stream: Stream,
        *,
        channel: int | None = None,
        colors: Any = None,
    ) -> None:
        """Draw parts of tiles, larger or smaller than they are, in `pixels`.

        Pixels of 8 bits that become more than four times as large are interpolated within their
        tile, others are the nearest ones.

        Parameters
        ----------
        parts : ndarray of `gpu.device.tables.SCALED`
            The parts.
        tile : TileFormat
            What the tiles are.
        pixels : device array
            Of the channel; RGBA of 8 bits for all channels, which are RGB or RGBA then.
        stream : Stream
            Which does it.
        channel : int, optional
            One channel instead of all.
        colors : device array, optional
            By `colors`: what RGB becomes.
        """
        if not len(parts):
            return
        sample = np.dtype(tile.dtype).itemsize
        high, wide = int(parts["height"].max()), int(parts["width"].max())
        grid = len(parts), _row_blocks(high), -(-wide // THREADS)
        sizes = tile.width, tile.channels, sample, -1 if channel is None else channel
        table = self.table(parts, stream)
        found = np.uint64(0) if colors is None else colors
        self._launch("paste_scaled", grid, (table, *map(np.int32, sizes), found, pixels), stream)

    def lay_out(
        self, segments: NDArray[np.void], level: LevelLayout, background: float, stream: Stream
    ) -> None:
        """Put the samples of raw segments to their places in tiles.

        Parameters
        ----------
        segments : ndarray of `gpu.device.tables.SEGMENT`
            The segments.
        level : LevelLayout
            Theirs.
        background : int or float
            The sample that is put where the file has no segment.
        stream : Stream
            Which does it.
        """
        if not len(segments):
            return
        grid, samples = level.grid, level.encoding.samples
        sizes = grid.tile_width, samples, level.channels, level.dtype.itemsize, is_swapped(level)
        blank = int.from_bytes(np.array(background, level.dtype).tobytes(), sys.byteorder)
        across = -(-grid.tile_width * samples // THREADS)
        blocks = len(segments), _row_blocks(grid.tile_height), across
        arguments = (self.table(segments, stream), *map(np.int32, sizes), np.uint64(blank))
        self._launch("lay_out", blocks, arguments, stream)

    def average_area(
        self,
        finer: Any,
        pixels: Any,
        scale: tuple[float, float],
        first: tuple[int, int],
        stream: Stream,
    ) -> None:
        """Average finer pictures to smaller ones; see `reading.average.resample_area`.

        Parameters
        ----------
        finer, pixels : device array, shape (pictures, height, width, channels)
            Of one of `AVERAGED_TYPES`. `pixels` of one picture may be a part of a larger one.
        scale : tuple of (float, float)
            How many finer pixels one spans, down and across.
        first : tuple of (int, int)
            Row and column of the first pixel; `finer` begins with what lies under that.
        stream : Stream
            Which does it.
        """
        _, height, width, channels = pixels.shape
        pitch = pixels.strides[1] // pixels.itemsize
        sizes = finer.shape[1:3], (pitch, height, width, channels)
        before, after = (tuple(map(np.int32, size)) for size in sizes)
        place = *map(np.float64, scale), *map(np.int64, first)
        arguments = (finer, *before, pixels, *after, *place, np.int64(pixels.size))
        kernel = f"average_area_{pixels.dtype.name}"
        self._launch(kernel, (-(-pixels.size // THREADS),), arguments, stream)

    def ycbcr_to_rgb(self, addresses: NDArray[np.int64], tile: TileFormat, stream: Stream) -> None:
        """Convert full-range YCbCr tiles to RGB in place, rounded as libjpeg does."""
        pixels = tile.height * tile.width
        grid = (-(-pixels // THREADS), len(addresses))
        arguments = self.table(addresses, stream), np.int32(pixels)
        self._launch("ycbcr_to_rgb", grid, arguments, stream)

    def merge_planes(
        self,
        tiles: NDArray[np.void],
        tile: TileFormat,
        sampling: tuple[int, int],
        doubts: NDArray[np.int32],
        stream: Stream,
        *,
        to_rgb: bool,
    ) -> None:
        """Put the planes of JPEG tiles together to pixels, as libjpeg does.

        Parameters
        ----------
        tiles : ndarray of `gpu.device.tables.JPEG_TILE`
            Of each its address, its planes, the strip below it, and its scan, by `shared`.
        tile : TileFormat
            The tiles.
        sampling : tuple of (int, int)
            Luma samples for one of chroma, across and down.
        doubts : ndarray of int32
            By `shared`: is set for tiles whose strip is not there, whose scan has a marker, or
            whose first block is of another brightness than the scan's first code says.
        stream : Stream
            Which does it.
        to_rgb : bool
            Convert from YCbCr.
        """
        size = (tile.height, tile.width, tile.channels, *sampling, int(to_rgb))
        table = self.table(tiles, stream)
        arguments = (table, *map(np.int32, size), np.uint64(doubts.ctypes.data))
        grid = (-(-tile.height * tile.width // THREADS), len(tiles))
        self._launch("merge_planes", grid, arguments, stream)

    @cached_property
    def _kernels(self) -> dict[str, Any]:
        code = resources.files("napari_wsigpu.gpu.device").joinpath("kernels.cu").read_text("utf-8")
        module = self._cupy.RawModule(code=declarations() + code)
        return {name: module.get_function(name) for name in KERNELS}

    def _launch(
        self, kernel: str, grid: tuple[int, ...], arguments: tuple[Any, ...], stream: Stream
    ) -> None:
        if 0 not in grid:
            with stream:
                self._kernels[kernel](grid, (THREADS,), arguments)


def _row_blocks(height: int) -> int:
    return min(-(-height // ROWS_A_BLOCK), MOST_BLOCKS)
