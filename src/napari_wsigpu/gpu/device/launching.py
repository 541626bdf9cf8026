"""What starts the kernels of `kernels.cu` on a CUDA device."""

from __future__ import annotations

import sys
import threading
import weakref
from functools import cached_property
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.codecs.raw import is_swapped
from napari_wsigpu.gpu.device.compiled import CompiledKernels
from napari_wsigpu.gpu.device.device import AVERAGED_TYPES
from napari_wsigpu.gpu.device.tables import declarations

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.color import ColorTable
    from napari_wsigpu.gpu.device.device import Stream, TileFormat
    from napari_wsigpu.model.layout import LevelLayout

THREADS = 256
MOST_UPLOADED = 64 << 10
# Bytes that a thread copies at once, and how often: fewer blocks take less time to start.
CHUNK, CHUNKS_A_THREAD = 16, 4
# How many rows of a tile one block of threads copies: fewer blocks take less time to start.
ROWS_A_BLOCK, MOST_BLOCKS = 8, 0xFFFF
TO_DEVICE, WITHIN_DEVICE = 1, 3
KERNELS = (
    "paste",
    "paste_colors",
    "paste_scaled",
    "lay_out",
    "ycbcr_to_rgb",
    "merge_planes",
    *(f"average_area_{dtype}" for dtype in AVERAGED_TYPES),
)


class Kernels:
    """Kernels of one device, compiled when the first of them is started.

    Parameters
    ----------
    cupy : module
        CuPy.
    index : int
        Number of the device.
    """

    def __init__(self, cupy: Any, index: int) -> None:
        self._cupy = cupy
        self._index = index
        self._runtime = cupy.cuda.runtime
        self._colors: weakref.WeakKeyDictionary[ColorTable, Any] = weakref.WeakKeyDictionary()
        self._colors_lock, self._compiling = threading.Lock(), threading.Lock()
        self._modules: dict[tuple[str, ...], CompiledKernels] = {}

    def active(self) -> AbstractContextManager[Any]:
        """Make the device the calling thread's current one."""
        device: AbstractContextManager[Any] = self._cupy.cuda.Device(self._index)
        return device

    def new_stream(self) -> Stream:
        """Make a stream that does not wait for others."""
        with self.active():
            stream: Stream = self._cupy.cuda.Stream(non_blocking=True)
        return stream

    def upload(self, address: int, pixels: NDArray[Any], stream: Stream) -> None:
        """Copy host pixels to device memory; keep them until the stream is synchronised."""
        self._runtime.memcpyAsync(address, pixels.ctypes.data, pixels.nbytes, TO_DEVICE, stream.ptr)

    def copy(self, address: int, pixels: Any, stream: Stream) -> None:
        """Copy a device array to other device memory."""
        source = int(pixels.data.ptr)
        self._runtime.memcpyAsync(address, source, pixels.nbytes, WITHIN_DEVICE, stream.ptr)

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
