"""A level's stored bytes alone, to the device: how fast a disk and a bus are without any library.

Several threads read pieces into page-locked memory, each while its last piece is copied.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.bench.readers import Reader
from napari_wsigpu.bench.timing import Absent

if TYPE_CHECKING:
    from contextlib import ExitStack

    from numpy.typing import NDArray

    from napari_wsigpu.bench.reference import Region
    from napari_wsigpu.bench.target import Target

PIECE_BYTES = 4 << 20
MOST_THREADS = 8
ROOMS = 2


def plain_copy(target: Target, stack: ExitStack) -> Reader | Absent:
    """Return the reader of a whole level's bytes; pixels are made of them only to be checked."""
    name, grid = "pread, pinned copy: bytes alone", target.image.grid
    if target.no_gpu:
        return Absent(name, target.no_gpu)
    if not target.raw or grid.planes > 1 or not grid.byte_counts.all():
        return Absent(name, "the level's tiles are not plain pixels")
    if not hasattr(os, "preadv"):
        return Absent(name, "this system has no preadv")
    cupy, cupyx = import_module("cupy"), import_module("cupyx")
    start = int(grid.offsets.min())
    size = int((grid.offsets + grid.byte_counts).max()) - start
    threads = min(MOST_THREADS, os.cpu_count() or 1)
    pool = stack.enter_context(ThreadPoolExecutor(threads, "wsigpu-bench"))
    handle = os.open(target.path, os.O_RDONLY)
    stack.callback(os.close, handle)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(threads)]
    rooms = [
        [(cupyx.empty_pinned(PIECE_BYTES, np.uint8), cupy.cuda.Event()) for _ in range(ROOMS)]
        for _ in range(threads)
    ]

    def copy(number: int, buffer: Any) -> None:
        stream = streams[number]
        for turn, begin in enumerate(range(number * PIECE_BYTES, size, threads * PIECE_BYTES)):
            room, copied = rooms[number][turn % ROOMS]
            copied.synchronize()
            part = room[: min(PIECE_BYTES, size - begin)]
            read_fully(handle, memoryview(part), start + begin)
            buffer[begin : begin + part.size].set(part, stream=stream)
            copied.record(stream)
        stream.synchronize()

    def read(region: Region) -> Any:
        buffer = cupy.empty(size, np.uint8)
        list(pool.map(lambda number: copy(number, buffer), range(threads)))
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
