"""`PinnedMemory`: page-locked host memory within a budget."""

from __future__ import annotations

import math
import threading
import weakref
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.model.limits import machine_memory

if TYPE_CHECKING:
    from types import ModuleType

    from napari_wsigpu.model.arrays import Array, DType

# By default, arrays may hold this part of the machine's memory, but at least 1 GiB. A batch of
# 1,024 patches of 512 x 512 takes 0.8 GB, and up to three are in flight.
PART_OF_MEMORY, LEAST_BUDGET = 32, 1 << 30


class PinnedMemory:
    """Page-locked host memory, which a device copies at full speed without using the CPU.

    An array returns its memory when it is garbage-collected. Beyond the budget, callers get
    ordinary memory, because page-locked memory is not available to any other program.

    Parameters
    ----------
    cupy : module
        CuPy.
    budget : int, optional
        Maximum number of page-locked bytes in all live arrays.
    """

    def __init__(self, cupy: ModuleType, budget: int | None = None) -> None:
        self._pool = cupy.cuda.PinnedMemoryPool()
        usual = max(LEAST_BUDGET, machine_memory() // PART_OF_MEMORY)
        self._budget = usual if budget is None else budget
        # Protects `_used`. Reentrant, because the garbage collector may finalize an array in the
        # thread that holds the lock.
        self._lock = threading.RLock()
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: DType, *, required: bool = False) -> Array:
        """Return an uninitialized array, page-locked within the budget.

        Parameters
        ----------
        shape : tuple of int
            Shape of the array.
        dtype : dtype
            Type of the elements.
        required : bool
            Page-lock the array even beyond the budget.

        Raises
        ------
        MemoryError
            If `required` is true and the system has no more page-locked memory.
        """
        count = math.prod(shape)
        size = count * dtype.itemsize
        with self._lock:
            fits = size > 0 and (required or size <= self._budget - self._used)
            self._used += size if fits else 0
        try:
            memory = self._pool.malloc(size) if fits else None
        except RuntimeError:  # the system has no more page-locked memory
            memory = None
            self._release(size)
        if memory is None and required:
            raise MemoryError("the system has no more page-locked memory")
        if memory is None:
            return np.empty(shape, dtype)
        pixels = np.frombuffer(memory, dtype, count)
        # Every view of the array references `pixels`, so the memory outlives them all.
        weakref.finalize(pixels, self._release, size).atexit = False
        return pixels.reshape(shape)

    def _release(self, size: int) -> None:
        with self._lock:
            self._used -= size
