"""`PinnedMemory`: page-locked host memory within a budget."""

from __future__ import annotations

import math
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

PINNED_BUDGET = 1 << 30


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

    def take(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], *, surely: bool = False
    ) -> NDArray[Any]:
        """Return an array, page-locked within the budget.

        Raises
        ------
        MemoryError
            If it has to be page-locked `surely`, whatever the budget, and can't be.
        """
        count = math.prod(shape)
        size = count * dtype.itemsize
        with self._lock:
            fits = size > 0 and (surely or size <= self._budget - self._used)
            self._used += size if fits else 0
        try:
            memory = self._pool.malloc(size) if fits else None
        except RuntimeError:  # the system has no more
            memory = None
            self._give_back(size)
        if memory is None and surely:
            raise MemoryError("the system has no more page-locked memory")
        if memory is None:
            return np.empty(shape, dtype)
        pixels = np.frombuffer(memory, dtype, count)
        weakref.finalize(pixels, self._give_back, size).atexit = False
        return pixels.reshape(shape)

    def _give_back(self, size: int) -> None:
        with self._lock:
            self._used -= size
