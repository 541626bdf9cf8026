"""Pools of pixel memory; a buffer returns to its pool when the last view of it is gone."""

from __future__ import annotations

import math
import mmap
import sys
import weakref
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from napari_wsigpu.model.arrays import Array, DType

KEPT_BYTES = 64 << 20
CACHE_LINE = 64
SMALLEST_MAPPED = 128 << 10
HUGE_PAGE = 2 << 20

SMALLEST_REGION, LARGEST_REGION = 1 << 20, 64 << 20
KEPT_REGIONS = 3
KEPT_PICTURES = 3
LARGEST_PREPARED = 32 << 20

Block = NDArray[np.uint8]


def allocate(size: int) -> Block:
    """Return memory; a large block goes back to the operating system as soon as it is dropped.

    `malloc` would keep blocks in one heap per thread. Within minutes, fragmentation makes these
    heaps several times as large as the tiles in them.
    """
    if size < SMALLEST_MAPPED:
        return np.empty(size, np.uint8)
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if sys.platform != "win32" else {}
    try:
        block = mmap.mmap(-1, size, **private)
    except OSError as error:  # unlike `np.empty`
        raise MemoryError(str(error)) from None
    if size >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        # As in NumPy: page faults of small pages take longer than filling the memory.
        with suppress(OSError):  # the system has no huge pages
            block.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(block, np.uint8)


class TileMemory:
    """Memory for tiles of equal sizes, recycled when the last view of a tile is gone.

    `allocate` alone would return the memory of dropped tiles to the operating system, and the page
    faults of new memory take as long as decoding the tiles. The pool keeps at most 64 MiB of each
    size. All methods are thread-safe.
    """

    def __init__(self) -> None:
        # No lock: `pop` and `append` of a deque are atomic, even in finalizers.
        self._free: dict[int, deque[Block]] = {}

    def allocate(self, size: int) -> NDArray[np.uint8]:
        """Return `size` bytes that start 8 bytes after a multiple of the cache line.

        libjpeg-turbo decodes a tile 20 % faster into rows that are not aligned to 32 bytes.
        """
        free = self._free.setdefault(size, deque(maxlen=max(1, KEPT_BYTES // max(1, size))))
        try:
            block = free.pop()
        except IndexError:
            block = allocate(size + CACHE_LINE)
        start = (8 - block.ctypes.data) % CACHE_LINE
        # NumPy lets views of this array reference the array, never the block that it wraps. So the
        # finalizer, which holds the block, runs when the last view is gone.
        memory = np.frombuffer(block.data, np.uint8, size, start)
        weakref.finalize(memory, free.append, block).atexit = False
        return memory

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """Return an uninitialized array."""
        return self.allocate(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)

    def copy(self, tile: Array) -> Array:
        """Return a copy, in memory of this pool, of a tile that was decoded elsewhere."""
        copied = self.empty(tile.shape, tile.dtype)
        copied[...] = tile
        return copied

    def clear(self) -> None:
        """Free the unused memory; memory still in use will not return to the pool."""
        self._free.clear()


class RegionMemory:
    """Memory for regions of various sizes, recycled as in `TileMemory`.

    The pool keeps at most 3 blocks of at most 64 MiB each. All methods are thread-safe.
    """

    def __init__(self) -> None:
        self._free: deque[Block] = deque(maxlen=KEPT_REGIONS)

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """Return an uninitialized array.

        Raises
        ------
        MemoryError
            If there is not enough memory.
        """
        count = math.prod(shape)
        size = count * dtype.itemsize
        if not SMALLEST_REGION <= size <= LARGEST_REGION:
            return np.empty(shape, dtype)
        block = self._pop(size)
        if block is None:
            block = allocate(size)
        pixels = np.frombuffer(block.data, dtype, count)
        weakref.finalize(pixels, self._free.append, block).atexit = False
        return pixels.reshape(shape)

    def _pop(self, size: int) -> Block | None:
        """Remove and return an unused block of about this size; None if there is none."""
        for _ in range(len(self._free)):
            try:
                block = self._free.popleft()
            except IndexError:  # another thread has emptied the pool
                return None
            if size <= block.size <= 2 * size:
                return block
            self._free.append(block)
        return None

    def clear(self) -> None:
        """Free the unused memory."""
        self._free.clear()


class PictureMemory:
    """Memory for the images that displays draw, in blocks of the largest size so far.

    Page faults in new memory can take longer than a display may wait, so `prepare` triggers them in
    advance. The pool keeps at most `KEPT_PICTURES` unused blocks. All methods are thread-safe.
    """

    def __init__(self) -> None:
        self._free: deque[Block] = deque(maxlen=KEPT_PICTURES)
        self._size = 0

    def prepare(self, size: int) -> None:
        """Allocate memory for three pictures of `size` bytes: one shown, one being drawn, one free.

        Pictures larger than `LARGEST_PREPARED` bytes are allocated only when they are drawn.
        """
        size = min(size, LARGEST_PREPARED)
        if size > self._size:
            self._size = size
            blocks = [allocate(size) for _ in range(KEPT_PICTURES)]
            for block in blocks:
                block[:] = 1
            # Another thread may have needed a larger picture, or cleared the pool.
            if self._size == size:
                self._free.extend(blocks)

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """Return an uninitialized array."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        self._size = max(self._size, size)
        block = self._pop(size)
        pixels = np.frombuffer(block.data, dtype, count)
        weakref.finalize(pixels, self._recycle, block).atexit = False
        return pixels.reshape(shape)

    def clear(self) -> None:
        """Free the unused memory; the memory of pictures in use is freed with the pictures."""
        self._free.clear()
        self._size = 0

    def _pop(self, size: int) -> Block:
        while self._free:
            try:
                block = self._free.popleft()
            except IndexError:  # another thread has emptied the pool
                break
            if block.size >= size:
                return block
        return allocate(max(size, self._size))

    def _recycle(self, block: Block) -> None:
        # Blocks that have become too small, or were allocated before `clear`, are freed instead.
        if block.size >= self._size > 0:
            self._free.append(block)


def copy_into(out: Array | None, pixels: Array) -> Array:
    """Copy pixels to `out` and return it; return the pixels themselves if `out` is None."""
    if out is None:
        return pixels
    out[...] = pixels
    return out
