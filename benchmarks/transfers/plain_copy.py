"""A level's stored bytes alone, to the device: how fast a disk and a bus are without any library.

Several threads read pieces into page-locked memory, each while its last piece is copied.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.transfers.readers import Reader
from benchmarks.transfers.timing import Absent

if TYPE_CHECKING:
    from contextlib import ExitStack

    from numpy.typing import NDArray

    from benchmarks.transfers.reference import Region
    from benchmarks.transfers.target import Target

PIECE_BYTES = 4 << 20
MOST_THREADS = 8
ROOMS = 2


class PlainCopy:
    """Copies one part of a file to device memory.

    Parameters
    ----------
    path : str
        The file.
    offset, size : int
        Where the part begins, and its bytes.
    threads : int
        How many threads read.
    piece : int
        Bytes that each of them reads at a time.
    stack : ExitStack
        Closes the file and ends the threads.
    """

    def __init__(
        self, path: str, offset: int, size: int, threads: int, piece: int, stack: ExitStack
    ) -> None:
        cuda = import_module("cupy").cuda
        self._runtime = cuda.runtime
        self._offset, self._size, self._threads, self._piece = offset, size, threads, piece
        self._file = os.open(path, os.O_RDONLY)
        stack.callback(os.close, self._file)
        self._pool = stack.enter_context(ThreadPoolExecutor(threads, "wsigpu-bench"))
        memory = [cuda.alloc_pinned_memory(piece) for _ in range(ROOMS * threads)]
        self._rooms: list[Any] = [np.frombuffer(each, np.uint8, piece) for each in memory]
        self._streams = [cuda.Stream(non_blocking=True) for _ in memory]

    def __call__(self, buffer: Any) -> None:
        """Fill a device array of uint8 with the part; return when it is there."""
        list(self._pool.map(self._copy, range(self._threads), repeat(int(buffer.data.ptr))))

    def _copy(self, thread: int, address: int) -> None:
        mine = slice(thread * ROOMS, (thread + 1) * ROOMS)
        rooms, streams = self._rooms[mine], self._streams[mine]
        starts = range(thread * self._piece, self._size, self._threads * self._piece)
        for turn, start in enumerate(starts):
            room, stream = rooms[turn % ROOMS], streams[turn % ROOMS]
            stream.synchronize()
            part = room[: min(self._piece, self._size - start)]
            read_fully(self._file, memoryview(part), self._offset + start)
            self._runtime.memcpyAsync(
                address + start,
                part.ctypes.data,
                part.size,
                self._runtime.memcpyHostToDevice,
                stream.ptr,
            )
        for stream in streams:
            stream.synchronize()


def plain_copy(target: Target, stack: ExitStack) -> Reader | Absent:
    """Return the reader of a whole level's bytes; pixels are made of them only to be checked."""
    name, grid = "pread, pinned copy: bytes alone", target.image.grid
    if target.no_gpu:
        return Absent(name, target.no_gpu)
    if not target.raw or grid.planes > 1 or not grid.byte_counts.all():
        return Absent(name, "the level's tiles are not plain pixels")
    if not hasattr(os, "preadv"):
        return Absent(name, "this system has no preadv")
    start = int(grid.offsets.min())
    size = int((grid.offsets + grid.byte_counts).max()) - start
    threads = min(MOST_THREADS, os.cpu_count() or 1)
    copy = PlainCopy(target.path, start, size, threads, PIECE_BYTES, stack)
    cupy = import_module("cupy")

    def read(region: Region) -> Any:
        buffer = cupy.empty(size, np.uint8)
        copy(buffer)
        return buffer

    def host(buffer: Any) -> NDArray[Any]:
        return laid_out(target, cupy.asnumpy(buffer), start)

    return Reader(name, read, target.forget, host)


def read_fully(handle: int, view: memoryview, offset: int) -> None:
    """Fill a view with a file's bytes from a position on."""
    while view:
        count = os.preadv(handle, [view], offset)
        if not count:
            raise EOFError("the file was cut short")
        view, offset = view[count:], offset + count


def laid_out(target: Target, stored: NDArray[np.uint8], start: int) -> NDArray[Any]:
    """Make a level of the bytes of its tiles, which begin at `start` in the file."""
    image, grid = target.image, target.image.grid
    stored_type = image.dtype.newbyteorder(image.encoding.byte_order)
    pixels = np.empty((image.height, image.width, image.channels), image.dtype)
    for row, column in np.ndindex(grid.rows, grid.columns):
        place = int(grid.offsets[0, row, column]) - start
        data = stored[place : place + int(grid.byte_counts[0, row, column])].view(stored_type)
        tile = data.reshape(-1, grid.tile_width, image.channels)
        top, left = row * grid.tile_height, column * grid.tile_width
        part = pixels[top : top + grid.tile_height, left : left + grid.tile_width]
        part[...] = tile[: part.shape[0], : part.shape[1]]
    return pixels
