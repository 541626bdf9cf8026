"""Many reads of a file by one call of the system, which lets go of the interpreter once.

`os.pread` lets go of it for each. Where all cores are busy, to get it back takes far longer than
to read; and other threads of Python wait where it is kept instead.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from ctypes import c_char_p, c_int, c_ssize_t, c_void_p
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

# ``struct aiocb`` of the GNU C library, where pointers have 64 bits.
REQUEST = np.dtype(
    {
        "names": ["file", "buffer", "size", "notify", "offset"],
        "formats": [np.int32, np.uint64, np.uint64, np.int32, np.int64],
        "offsets": [0, 16, 24, 44, 128],
        "itemsize": 168,
    }
)
LIO_WAIT, SIGEV_NONE = 0, 1
# As the C library's ``sigset_t``; those that can't be held back are not.
EVERY_SIGNAL = b"\xff" * 128


class _Calls(NamedTuple):
    """The system's calls.

    Attributes
    ----------
    read_list : callable
        Reads a list of ranges.
    result : callable
        Says how many bytes of one were read.
    hold_signals : callable
        Sets which signals this thread takes, and tells which it took.
    """

    read_list: Callable[..., int]
    result: Callable[[int], int]
    hold_signals: Callable[..., int]


def _calls() -> _Calls | None:
    """Return them; None where the system has none, or others."""
    if sys.platform != "linux" or sys.maxsize < 1 << 32:
        return None
    library, quick = ctypes.CDLL(None), ctypes.PyDLL(None)
    if not all(hasattr(library, name) for name in ("gnu_get_libc_version", "lio_listio")):
        return None
    library.lio_listio.argtypes = [c_int, c_void_p, c_int, c_void_p]
    quick.aio_return.argtypes, quick.aio_return.restype = [c_void_p], c_ssize_t
    quick.pthread_sigmask.argtypes = [c_int, c_char_p, c_char_p]
    return _Calls(library.lio_listio, quick.aio_return, quick.pthread_sigmask)


CALLS = _calls()
_first_used_in: list[int] = []


def read_rows(
    file: int, offsets: Sequence[int], lengths: Sequence[int], rows: NDArray[np.uint8]
) -> list[int]:
    """Read ranges of a file, each to the beginning of a row.

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
    count = len(offsets)
    if CALLS is None or not _is_usable():
        return list(range(count))
    requests = np.zeros(count, REQUEST)
    requests["file"], requests["notify"] = file, SIGEV_NONE
    requests["buffer"] = int(rows.ctypes.data) + rows.strides[0] * np.arange(count)
    requests["size"], requests["offset"] = lengths, offsets
    first = int(requests.ctypes.data)
    places = range(first, first + requests.nbytes, REQUEST.itemsize)
    pointers = np.array(places, np.uint64)
    # A signal would end the call before the reads. Other threads take it, or this one does after.
    before = ctypes.create_string_buffer(len(EVERY_SIGNAL))
    CALLS.hold_signals(signal.SIG_SETMASK, None, before)
    try:
        CALLS.hold_signals(signal.SIG_SETMASK, EVERY_SIGNAL, None)
        CALLS.read_list(LIO_WAIT, pointers.ctypes.data, count, None)
    finally:
        CALLS.hold_signals(signal.SIG_SETMASK, before, None)
    read = np.fromiter(map(CALLS.result, places), np.int64, count)
    return np.flatnonzero(read != lengths).tolist()


def _is_usable() -> bool:
    """Whether the library's threads that read are there: no fork copies them."""
    if not _first_used_in:
        _first_used_in.append(os.getpid())
    return _first_used_in[0] == os.getpid()
