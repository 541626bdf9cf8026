"""Reads of what the system holds in memory, without letting other threads have the interpreter.

`os.pread` lets go of it. That is right for a disk, but where the bytes are in memory already and
all cores are busy, to get it back takes far longer than to read.
"""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import c_int, c_int64, c_ssize_t, c_void_p
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

IOVEC_BYTES = 16


def _preadv2() -> Any:
    """Return the system's call, which keeps the interpreter; None where it has none."""
    if sys.platform != "linux" or sys.maxsize < 1 << 32:
        return None
    function = getattr(ctypes.PyDLL(None), "preadv2", None)
    if function is not None:
        function.argtypes = [c_int, c_void_p, c_int, c_int64, c_int]
        function.restype = c_ssize_t
    return function


PREADV2 = _preadv2()


def read_rows(
    file: int, offsets: Sequence[int], lengths: Sequence[int], rows: NDArray[np.uint8]
) -> list[int]:
    """Read ranges of a file that are in the system's memory, each to the beginning of a row.

    Parameters
    ----------
    file : int
        Descriptor of an open file.
    offsets, lengths : sequence of int
        The ranges.
    rows : ndarray of uint8, shape (ranges, bytes)
        Where they go; no row is shorter than its range.

    Returns
    -------
    list of int
        The indices of those that have to be read in another way.
    """
    if PREADV2 is None:
        return list(range(len(offsets)))
    vectors = np.empty((len(offsets), 2), np.uint64)
    vectors[:, 0] = int(rows.ctypes.data) + rows.strides[0] * np.arange(len(offsets))
    vectors[:, 1] = lengths
    first = int(vectors.ctypes.data)
    places = range(first, first + IOVEC_BYTES * len(offsets), IOVEC_BYTES)
    # A loop in C: it is the call that takes the time.
    read = map(PREADV2, repeat(file), places, repeat(1), offsets, repeat(os.RWF_NOWAIT))
    return np.flatnonzero(np.fromiter(read, np.int64, len(offsets)) != lengths).tolist()
