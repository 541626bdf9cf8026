"""`CudaDevice`: memory, streams, kernels and nvImageCodec decoders of one GPU, through CuPy."""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from functools import cached_property
from importlib import resources
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.gpu.device.compiled_kernels import CompiledKernels
from napari_wsigpu.gpu.device.driver import import_cuda
from napari_wsigpu.gpu.device.interfaces import AVERAGED_TYPES
from napari_wsigpu.gpu.device.interop import SharedBuffer
from napari_wsigpu.gpu.device.kernel_tables import declarations
from napari_wsigpu.gpu.jpeg.jpeg_engine import (
    BY_HARDWARE,
    JPEG_HARDWARE,
    ROUNDS,
    STACK,
    STACKS,
    decodes,
    may_use_engine,
)
from napari_wsigpu.gpu.jpeg.nvimagecodec_handles import LibraryImages, LibraryStreams
from napari_wsigpu.gpu.jpeg.nvimagecodec_library import GPU_ONLY, Library
from napari_wsigpu.gpu.transfer.pinned import PinnedMemory
from napari_wsigpu.model.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from contextlib import AbstractContextManager

    import cupy
    from numpy.typing import DTypeLike, NDArray

    from napari_wsigpu.codecs.color import ColorTable
    from napari_wsigpu.gpu.device.interfaces import Event, Stream, TileFormat
    from napari_wsigpu.gpu.jpeg.nvimagecodec_library import LibraryDecoder
    from napari_wsigpu.model.arrays import Array, DeviceArray, DType, Integers

# Threads in a block, for all kernels in kernels.cu.
THREADS = 256
# cudaMemcpyAsync stages up to 64 KiB of pageable memory without waiting for the stream.
MOST_UPLOADED = 64 << 10
# `paste`: bytes that a thread copies at once, and how often. Fewer blocks start faster.
CHUNK, CHUNKS_A_THREAD = 16, 4
# Rows of a tile that one block copies, and the limit of CUDA for the y dimension of a grid.
ROWS_A_BLOCK, MOST_BLOCKS = 8, 0xFFFF
# cudaMemcpyKind.
TO_DEVICE, TO_HOST, WITHIN_DEVICE = 1, 2, 3
KERNELS = (
    "paste",
    "paste_colors",
    "paste_scaled",
    "compose",
    "ycbcr_to_rgb",
    "merge_planes",
    *(f"average_area_{dtype}" for dtype in AVERAGED_TYPES),
)


class _ForeignStream:
    """A stream handle that implements the CUDA stream protocol (``__cuda_stream__``)."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle  # version of the protocol, cudaStream_t


class CudaDevice:
    """One CUDA device.

    Everything that touches device memory goes through this class. Methods submit copies and kernels
    to their `stream` argument and return before these are done. Host arrays that take part in a
    copy therefore must stay alive, and unchanged, until the stream is synchronized.

    Parameters
    ----------
    index : int
        Number of the device.

    Attributes
    ----------
    name, index : str, int
        Name by which users choose the device, such as ``"cuda:0"``, and the number in it.
    jpeg_engine : JpegEngine
        How to keep nvImageCodec's JPEG decoder busy.
    pinned : PinnedMemory
        Page-locked host memory for copies.

    Raises
    ------
    DeviceError
        If CUDA, CuPy or nvImageCodec does not work here, or there is no such device.
    """

    def __init__(self, index: int) -> None:
        self.name = f"cuda:{index}"
        self.jpeg_engine = JPEG_HARDWARE
        self._cupy, self.index = import_cuda("cupy", self.name), index
        self._runtime = self._cupy.cuda.runtime
        # `ColorTable` compares by identity; a table's copy on the device is freed with the table.
        self._colors: weakref.WeakKeyDictionary[ColorTable, DeviceArray] = (
            weakref.WeakKeyDictionary()
        )
        # `_colors_lock` protects `_colors`, `_compiling` protects `_modules`. Each is held while an
        # entry is created, so that no two threads upload or compile the same thing.
        self._colors_lock, self._compiling = threading.Lock(), threading.Lock()
        self._modules: dict[tuple[str, ...], CompiledKernels] = {}
        self._library = Library()
        try:
            count = self._runtime.getDeviceCount()
        except self._runtime.CUDARuntimeError as error:
            raise DeviceError(
                f"'{self.name}' can't be used because CUDA can't be initialized ({error}); "
                "use device='cpu'."
            ) from error
        if index >= count:
            others = ", ".join(f"'cuda:{number}'" for number in range(count)) or "'cpu'"
            raise DeviceError(f"There is no device '{self.name}' here; use one of {others}.")
        self.pinned = PinnedMemory(self._cupy)
        self._local = threading.local()  # `event`: one event per thread, see `_event`

    @cached_property
    def model(self) -> str:
        """The product name of the device."""
        name: bytes = self._runtime.getDeviceProperties(self.index)["name"]
        return name.decode()

    @property
    def memory(self) -> tuple[int, int]:
        """Free and total device memory, in bytes."""
        with self.active():
            free, total = self._runtime.memGetInfo()
        return free, total

    def active(self) -> AbstractContextManager[object]:
        """Make this the calling thread's current device for the duration of a ``with`` block."""
        device: AbstractContextManager[object] = self._cupy.cuda.Device(self.index)
        return device

    def new_stream(self) -> Stream:
        """Create a stream that does not synchronize with the null stream."""
        with self.active():
            stream: Stream = self._cupy.cuda.Stream(non_blocking=True)
        return stream

    def current_stream(self) -> Stream:
        """Return the thread's current stream, on which CuPy allocates."""
        stream: Stream = self._cupy.cuda.get_current_stream(self.index)
        return stream

    def as_stream(self, stream: int | Stream) -> Stream:
        """Wrap a caller's stream: a ``cudaStream_t`` as an integer, or an object with ``ptr``.

        The caller keeps the stream alive while it is used.

        Raises
        ------
        DeviceError
            If it is neither.
        """
        if isinstance(stream, int):
            external: type[cupy.cuda.Stream] = self._cupy.cuda.Stream
            if hasattr(external, "from_external"):
                wrapped: Stream = external.from_external(_ForeignStream(int(stream)))
            else:  # CuPy 13
                wrapped = self._cupy.cuda.ExternalStream(int(stream))
        elif hasattr(stream, "ptr"):
            wrapped = stream
        else:
            raise DeviceError(
                f"{stream!r} is not a CUDA stream; pass a CuPy stream or an integer handle."
            )
        return wrapped

    # Decoders

    def decoder(self, kind: str) -> tuple[LibraryDecoder, str]:
        """Create an nvImageCodec decoder; return it and its name in `verify.TOLERANCES`.

        A JPEG decoder decodes test images first, which takes about a second. Without this trial,
        the first batch would take longer.

        Parameters
        ----------
        kind : {"jpeg", "jpeg2000"}
            Format to decode.

        Raises
        ------
        DeviceError
            If nvImageCodec has no decoder that works here.
        """
        if kind == "jpeg2000":
            return self._library.decoder(self.index, GPU_ONLY), "GPU"
        if may_use_engine():
            engine = self.jpeg_engine
            decoder = self._library.decoder(self.index, engine.backend, "", engine.threads)
            if decodes(self, decoder, 1, (64, 64)):
                with suppress(MemoryError):  # the first large batches are slower then
                    for _ in range(ROUNDS):
                        decodes(self, decoder, STACKS, STACK)
                return decoder, BY_HARDWARE
        raise DeviceError(f"There is no JPEG engine on '{self.name}'.")

    def code_streams(self) -> LibraryStreams:
        """Return reusable handles for the code streams of a batch."""
        return LibraryStreams(self._library)

    def images(self) -> LibraryImages:
        """Return reusable handles for the device memory that a batch is decoded to."""
        return LibraryImages(self._library, on_device=True)

    # Memory

    def allocate(self, size: int) -> tuple[int, cupy.cuda.Memory]:
        """Allocate `size` bytes outside CuPy's pool; return their address and owner.

        The memory is freed as soon as the owner is dropped, even if a stream still uses it: drop
        the owner only after all streams that use the memory are synchronized.

        Raises
        ------
        MemoryError
            If the device does not have enough memory.
        """
        with self.active():
            try:
                memory = self._cupy.cuda.Memory(size)
            except (self._runtime.CUDARuntimeError, self._cupy.cuda.memory.OutOfMemoryError):
                raise MemoryError(f"no {size >> 20} MiB are free on '{self.name}'") from None
        return int(memory.ptr), memory

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        """Return a new, uninitialized CuPy array, from the current stream's pool."""
        with self.active():
            return self._cupy.empty(shape, dtype)

    def address(self, pixels: DeviceArray) -> int:
        """Return the device address of a CuPy array."""
        return int(pixels.data.ptr)

    def is_own(self, pixels: object) -> bool:
        """Return whether `pixels` is a CuPy array on this device."""
        return isinstance(pixels, self._cupy.ndarray) and pixels.device.id == self.index

    def staging(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """Return uninitialized host memory; page-locked within the budget."""
        return self.pinned.empty(shape, dtype)

    # Copies and fills

    def upload(self, address: int, pixels: Array, stream: Stream) -> None:
        """Copy contiguous host memory to the device.

        The caller keeps `pixels` alive and unchanged until the stream is synchronized.
        """
        self._runtime.memcpyAsync(address, pixels.ctypes.data, pixels.nbytes, TO_DEVICE, stream.ptr)

    def copy(self, address: int, pixels: DeviceArray, stream: Stream) -> None:
        """Copy a contiguous CuPy array to `address` in device memory."""
        source = int(pixels.data.ptr)
        self._runtime.memcpyAsync(address, source, pixels.nbytes, WITHIN_DEVICE, stream.ptr)

    def send(self, pixels: Array, target: DeviceArray, stream: Stream) -> None:
        """Copy host pixels to a contiguous CuPy array of the same shape and type.

        The caller keeps `pixels` alive and unchanged until the stream is synchronized.
        """
        contiguous = np.ascontiguousarray(pixels)
        self.upload(int(target.data.ptr), contiguous, stream)
        if contiguous is not pixels:
            # Only this method holds the copy, which is freed on return.
            stream.synchronize()

    def download(self, pixels: DeviceArray, stream: Stream) -> Array:
        """Copy a contiguous CuPy array to the host; valid once the stream is synchronized."""
        host = self.pinned.empty(pixels.shape, pixels.dtype)
        self._download(host, int(pixels.data.ptr), stream)
        return host

    def download_tile(self, address: int, tile: TileFormat, stream: Stream) -> Array:
        """Copy one tile to the host; valid once the stream is synchronized."""
        shape = (tile.height, tile.width, tile.channels)
        host = self.pinned.empty(shape, np.dtype(tile.dtype))
        self._download(host, address, stream)
        return host

    def _download(self, host: Array, address: int, stream: Stream) -> None:
        if host.nbytes:
            self._runtime.memcpyAsync(host.ctypes.data, address, host.nbytes, TO_HOST, stream.ptr)

    def follow(self, stream: Stream) -> None:
        """Make `stream` wait for the work that the thread's current stream holds now.

        CuPy allocates from the current stream's pool: a new array may be in memory that work on the
        current stream still uses, so `stream` must not write to it before that work is done.
        """
        current = self._cupy.cuda.get_current_stream()
        if current.ptr != stream.ptr:
            self._runtime.eventRecord(self._event.ptr, current.ptr)
            self._runtime.streamWaitEvent(stream.ptr, self._event.ptr)

    def record(self, stream: Stream) -> Event:
        """Return an event that is reached when the work that `stream` holds now is done."""
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        recorded: Event = event
        return recorded

    @property
    def _event(self) -> cupy.cuda.Event:
        """The thread's event for `follow`; one is enough, as later records don't affect a wait."""
        if not hasattr(self._local, "event"):
            self._local.event = self._cupy.cuda.Event(disable_timing=True)
        event: cupy.cuda.Event = self._local.event
        return event

    def fill(self, pixels: DeviceArray, value: float, stream: Stream) -> None:
        """Set every sample of a CuPy array to `value`."""
        with stream:
            pixels.fill(value)

    def pinned_array(self, count: int, dtype: DTypeLike) -> Array:
        """Return page-locked host memory of shape (count,) that kernels can read and write.

        The host sees the results of a kernel once its stream is synchronized.

        Raises
        ------
        MemoryError
            If the system has no more page-locked memory.
        """
        return self.pinned.empty((count,), np.dtype(dtype), required=True)

    def share_buffer(self, buffer: int, size: int) -> SharedBuffer:
        """Register a buffer of the thread's current OpenGL context, so that CUDA can write to it.

        Parameters
        ----------
        buffer : int
            OpenGL name of the buffer.
        size : int
            Its size in bytes.

        Raises
        ------
        DeviceError
            If OpenGL draws on another GPU, or its buffers cannot be shared.
        """
        return SharedBuffer(self, buffer, size)

    # Kernels, which are compiled when the first of them is launched

    def table(self, table: Array, stream: Stream) -> DeviceArray:
        """Copy a table to the device; return its bytes, allocated from the pool of `stream`.

        The table may be changed or dropped at once: on return, CUDA has copied it.
        """
        with stream:
            copied = self._cupy.empty(table.nbytes, np.uint8)
        data, address = np.ascontiguousarray(table).view(np.uint8), int(copied.data.ptr)
        # A larger copy from pageable memory would block until all earlier work is done.
        for first in range(0, len(data), MOST_UPLOADED):
            self.upload(address + first, data[first : first + MOST_UPLOADED], stream)
        return copied

    def paste(
        self,
        pastes: NDArray[np.void],
        tile: TileFormat,
        pixels: DeviceArray,
        stream: Stream,
        *,
        channel: int | None = None,
        step: tuple[int, int] = (1, 1),
    ) -> None:
        """Copy parts of tiles to their positions in `pixels`.

        Parameters
        ----------
        pastes : ndarray of `gpu.device.kernel_tables.PASTE`
            Source, target and size of each part.
        tile : TileFormat
            Format of the tiles.
        pixels : CuPy array
            Target, with all channels of the tiles, or one if `channel` is given.
        stream : Stream
            Stream to which the copy is submitted.
        channel : int, optional
            Copy this channel only.
        step : tuple of (int, int)
            Copy every n-th row and every m-th column of the tiles.
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

    def prepare(self) -> None:
        """Compile the kernels that all reads need, which the first one would wait for."""
        _ = self._kernels

    def compile(self, *texts: str) -> CompiledKernels:
        """Return kernels, compiled once for the same sources.

        Products and sums are rounded separately (no fused multiply-add), as on the host.

        Raises
        ------
        DeviceError
            If the kernels cannot be compiled.
        """
        with self._compiling:
            if texts not in self._modules:
                self._modules[texts] = CompiledKernels(self._cupy, texts, self.index)
            return self._modules[texts]

    def colors(self, table: ColorTable) -> DeviceArray:
        """Return a color table in device memory; it is uploaded once and freed with the table.

        Raises
        ------
        MemoryError
            If the device does not have enough memory.
        """
        with self._colors_lock:
            colors = self._colors.get(table)
            if colors is None:
                with self.active(), self.new_stream() as stream:
                    colors = self._cupy.asarray(table.colors)
                    # Any stream may read the table from now on, without an event to wait for.
                    stream.synchronize()
                self._colors[table] = colors
        return colors

    def paste_colors(
        self,
        pastes: NDArray[np.void],
        tile: TileFormat,
        pixels: DeviceArray,
        colors: DeviceArray,
        stream: Stream,
        *,
        step: tuple[int, int] = (1, 1),
    ) -> None:
        """Copy parts of 8-bit RGB or RGBA tiles as `paste` does, and look each color up.

        `colors` is a color table in device memory, from `CudaDevice.colors`. Alpha is copied.
        """
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
        pixels: DeviceArray,
        stream: Stream,
        *,
        channel: int | None = None,
        colors: DeviceArray | None = None,
    ) -> None:
        """Draw parts of tiles, enlarged or reduced, in `pixels`.

        8-bit pixels that are enlarged more than four times are interpolated within their tile. In
        all other cases the nearest pixel is drawn.

        Parameters
        ----------
        parts : ndarray of `gpu.device.kernel_tables.SCALED`
            Source, target and scale of each part.
        tile : TileFormat
            Format of the tiles.
        pixels : CuPy array
            Target: one channel, or 8-bit RGBA for all channels of RGB or RGBA tiles.
        stream : Stream
            Stream to which the work is submitted.
        channel : int, optional
            Draw this channel only.
        colors : CuPy array, optional
            Color table for RGB, from `colors`.
        """
        if not len(parts):
            return
        sample = np.dtype(tile.dtype).itemsize
        high, wide = int(parts["height"].max()), int(parts["width"].max())
        grid = len(parts), _row_blocks(high), -(-wide // THREADS)
        sizes = tile.width, tile.channels, sample, -1 if channel is None else channel
        table = self.table(parts, stream)
        lookup = np.uint64(0) if colors is None else colors
        self._launch("paste_scaled", grid, (table, *map(np.int32, sizes), lookup, pixels), stream)

    def compose(
        self,
        planes: NDArray[np.void],
        tile: TileFormat,
        shades: DeviceArray,
        targets: Integers,
        stream: Stream,
    ) -> None:
        """Compose tiles of channels to 8-bit RGB, as `display.compose.compose` does.

        Parameters
        ----------
        planes : ndarray of `gpu.device.kernel_tables.PLANE`, shape (tiles, channels)
            Samples and colors of each tile's visible channels.
        tile : TileFormat
            Format of the tiles that contain the channels, of uint8 or uint16.
        shades : CuPy array of uint8
            The sample to write for each sum from 0 to 1, in steps of 1 / `SHADES`.
        targets : ndarray of int64, shape (tiles,)
            Device address of each composed tile, of the size of `tile`.
        stream : Stream
            Stream to which the work is submitted.
        """
        sample, pixels = np.dtype(tile.dtype).itemsize, tile.height * tile.width
        sizes = planes.shape[1], sample, sample * tile.channels, pixels
        # A composite without visible channels has no planes, and CUDA copies no empty table.
        table = self.table(planes.ravel(), stream) if planes.size else np.uint64(0)
        arguments = table, *map(np.int32, sizes), shades, self.table(targets, stream)
        self._launch("compose", (-(-pixels // THREADS), len(targets)), arguments, stream)

    def average_area(
        self,
        finer: DeviceArray,
        pixels: DeviceArray,
        scale: tuple[float, float],
        first: tuple[int, int],
        stream: Stream,
    ) -> None:
        """Average images to smaller ones, as `reading.average.resample_area` does.

        Parameters
        ----------
        finer, pixels : CuPy array, shape (images, height, width, channels)
            Source and target, of one of `AVERAGED_TYPES`. A target of one image may be a view of a
            larger array.
        scale : tuple of (float, float)
            Height and width of a target pixel, in source pixels.
        first : tuple of (int, int)
            Row and column of the first target pixel; `finer` starts with the source pixel under it.
        stream : Stream
            Stream to which the work is submitted.
        """
        _, height, width, channels = pixels.shape
        pitch = pixels.strides[1] // pixels.itemsize
        sizes = finer.shape[1:3], (pitch, height, width, channels)
        before, after = (tuple(map(np.int32, size)) for size in sizes)
        place = *map(np.float64, scale), *map(np.int64, first)
        arguments = (finer, *before, pixels, *after, *place, np.int64(pixels.size))
        kernel = f"average_area_{pixels.dtype.name}"
        self._launch(kernel, (-(-pixels.size // THREADS),), arguments, stream)

    def ycbcr_to_rgb(self, addresses: Integers, tile: TileFormat, stream: Stream) -> None:
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
        """Assemble pixels from the planes of JPEG tiles, upsampling chroma as libjpeg does.

        Parameters
        ----------
        tiles : ndarray of `gpu.device.kernel_tables.JPEG_TILE`
            Addresses of each tile's pixels, planes, strip, and scan in page-locked memory.
        tile : TileFormat
            Format of the tiles.
        sampling : tuple of (int, int)
            Luma samples per chroma sample, across and down.
        doubts : ndarray of int32, shape (tiles,)
            Array from `pinned_array`. The kernel sets the flags of tiles whose strip is wrong,
            whose scan contains a marker, or whose first block does not have the brightness that
            the first code of the scan states.
        stream : Stream
            Stream to which the work is submitted.
        to_rgb : bool
            Convert YCbCr to RGB.
        """
        size = (tile.height, tile.width, tile.channels, *sampling, int(to_rgb))
        table = self.table(tiles, stream)
        arguments = (table, *map(np.int32, size), np.uint64(doubts.ctypes.data))
        grid = (-(-tile.height * tile.width // THREADS), len(tiles))
        self._launch("merge_planes", grid, arguments, stream)

    def check_scans(
        self, scans: NDArray[np.void], width: int, doubts: NDArray[np.int32], stream: Stream
    ) -> None:
        """Set the flags of scans that may be wrong, as `merge_planes` does, without merging.

        Parameters
        ----------
        scans : ndarray of `gpu.device.kernel_tables.JPEG_TILE`
            Addresses of each scan and its planes.
        width : int
            Width of the planes in pixels.
        doubts : ndarray of int32, shape (scans,)
            Array from `pinned_array`.
        stream : Stream
            Stream to which the work is submitted.
        """
        for first in range(0, len(scans), MOST_BLOCKS):
            part = scans[first : first + MOST_BLOCKS]
            # No pixel is within a height of 0.
            size = map(np.int32, (0, width, 0, 0, 0, 0))
            flags = np.uint64(doubts[first:].ctypes.data)
            grid = -(-width // THREADS), len(part)
            self._launch("merge_planes", grid, (self.table(part, stream), *size, flags), stream)

    @cached_property
    def _kernels(self) -> Mapping[str, cupy.RawKernel]:
        code = resources.files("napari_wsigpu.gpu.device").joinpath("kernels.cu").read_text("utf-8")
        module = self._cupy.RawModule(code=declarations() + code)
        return {name: module.get_function(name) for name in KERNELS}

    def _launch(
        self, kernel: str, grid: tuple[int, ...], arguments: Iterable[object], stream: Stream
    ) -> None:
        if 0 not in grid:  # CUDA refuses an empty grid
            with stream:
                self._kernels[kernel](grid, (THREADS,), tuple(arguments))


def _row_blocks(height: int) -> int:
    """Return the number of blocks that share the rows of one part."""
    return min(-(-height // ROWS_A_BLOCK), MOST_BLOCKS)
