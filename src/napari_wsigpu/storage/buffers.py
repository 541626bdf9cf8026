"""Memory for pixels, used again once the last view of them is gone."""

from __future__ import annotations

import math
import mmap
import sys
import weakref
from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

KEPT_BYTES = 64 << 20
CACHE_LINE = 64
SMALLEST_MAPPED = 128 << 10
HUGE_PAGE = 2 << 20

SMALLEST_REGION, LARGEST_REGION = 1 << 20, 64 << 20
KEPT_REGIONS = 3
KEPT_PICTURES = 3
LARGEST_PREPARED = 32 << 20

Room = NDArray[np.uint8]


def new_room(size: int) -> Room:
    """Return memory that goes back to the system as soon as it is dropped.

    The C library keeps what is freed of its own in heaps, one a thread; there, tiles that come
    and go for minutes leave gaps of several times their size.
    """
    if size < SMALLEST_MAPPED:
        return np.empty(size, np.uint8)
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if sys.platform != "win32" else {}
    room = mmap.mmap(-1, size, **private)
    if size >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        # As NumPy does: to touch it page by page for the first time takes longer than to fill it.
        with suppress(OSError):  # the system has no huge pages
            room.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(room, np.uint8)


class TileMemory:
    """Hands out memory and takes it back by itself.

    The system's allocator returns the memory of dropped tiles to the operating system, and
    to get it back page by page costs as much time as to decode the tiles. At most 64 MiB of
    each size are kept here. Safe under many threads.
    """

    def __init__(self) -> None:
        self._free: dict[int, deque[Room]] = {}

    def take(self, size: int) -> NDArray[np.uint8]:
        """Return `size` bytes that begin 8 bytes after a cache line does.

        libjpeg-turbo decodes a tile 20 % faster into rows that are not aligned to 32 bytes.
        """
        free = self._free.setdefault(size, deque(maxlen=max(1, KEPT_BYTES // max(1, size))))
        try:
            room = free.pop()
        except IndexError:
            room = new_room(size + CACHE_LINE)
        start = (8 - room.ctypes.data) % CACHE_LINE
        # All views of an array over a foreign buffer keep that array, and only it, alive.
        memory = np.frombuffer(room.data, np.uint8, size, start)
        weakref.finalize(memory, free.append, room).atexit = False
        return memory

    def copy(self, tile: NDArray[Any]) -> NDArray[Any]:
        """Return a copy of a tile that was not decoded into such memory."""
        copied = self.take(tile.nbytes).view(tile.dtype).reshape(tile.shape)
        copied[...] = tile
        return copied

    def clear(self) -> None:
        """Give back what is kept; memory in use is taken back no more."""
        self._free.clear()


class RegionMemory:
    """Does for regions, whose sizes differ, what `TileMemory` does for tiles.

    At most 3 of at most 64 MiB each are kept. Safe under many threads.
    """

    def __init__(self) -> None:
        self._free: deque[Room] = deque(maxlen=KEPT_REGIONS)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an array whose values are undefined.

        Raises
        ------
        MemoryError
            If there is not enough memory.
        """
        count = math.prod(shape)
        size = count * dtype.itemsize
        if not SMALLEST_REGION <= size <= LARGEST_REGION:
            return np.empty(shape, dtype)
        room = self._take(size)
        if room is None:
            room = new_room(size)
        pixels = np.frombuffer(room.data, dtype, count)
        weakref.finalize(pixels, self._free.append, room).atexit = False
        return pixels.reshape(shape)

    def _take(self, size: int) -> Room | None:
        """Return kept memory of about this size."""
        for _ in range(len(self._free)):
            try:
                room = self._free.popleft()
            except IndexError:
                return None
            if size <= room.size <= 2 * size:
                return room
            self._free.append(room)
        return None

    def clear(self) -> None:
        """Give back what is kept."""
        self._free.clear()


class PictureMemory:
    """Memory for the pictures of displays, all rooms as large as the largest one needed.

    To touch new memory for the first time can take longer than a display may wait, so `prepare`
    does it before. At most `KEPT_PICTURES` rooms that are not in use are kept. Safe under many
    threads.
    """

    def __init__(self) -> None:
        self._free: deque[Room] = deque(maxlen=KEPT_PICTURES)
        self._size = 0

    def prepare(self, size: int) -> None:
        """Make room for pictures of `size` bytes: the one drawn, the one shown, the next one.

        Larger pictures than `LARGEST_PREPARED` are made room for when they are needed.
        """
        size = min(size, LARGEST_PREPARED)
        if size > self._size:
            self._size = size
            rooms = [new_room(size) for _ in range(KEPT_PICTURES)]
            for room in rooms:
                room[:] = 1
            if self._size == size:  # nothing larger was needed meanwhile, and nothing cleared
                self._free.extend(rooms)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an array whose values are undefined."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        self._size = max(self._size, size)
        room = self._take(size)
        pixels = np.frombuffer(room.data, dtype, count)
        weakref.finalize(pixels, self._give_back, room).atexit = False
        return pixels.reshape(shape)

    def clear(self) -> None:
        """Give back what is not in use; pictures in use are given back when they end."""
        self._free.clear()
        self._size = 0

    def _take(self, size: int) -> Room:
        while self._free:
            try:
                room = self._free.popleft()
            except IndexError:
                break
            if room.size >= size:
                return room
        return new_room(max(size, self._size))

    def _give_back(self, room: Room) -> None:
        if room.size >= self._size > 0:
            self._free.append(room)


def into(out: NDArray[Any] | None, pixels: NDArray[Any]) -> NDArray[Any]:
    """Return pixels, in an array if one is given."""
    if out is None:
        return pixels
    out[...] = pixels
    return out
