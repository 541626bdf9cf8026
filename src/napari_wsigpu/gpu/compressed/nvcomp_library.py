"""`Nvcomp`: nvCOMP's C library, called once for a whole batch.

Its Python module creates an object for each tile, which takes longer than decoding the tile.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char, c_int, c_size_t, c_void_p
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from napari_wsigpu.model.errors import DeviceError

if TYPE_CHECKING:
    from napari_wsigpu.gpu.device.interfaces import Stream

# Versions with these signatures, in the folders of NVIDIA's packages.
NAMES = [
    f"*/{name}"
    for version in (6, 5)
    for name in (f"lib64/libnvcomp.so.{version}", f"bin/nvcomp64_{version}.dll")
]
SUCCESS = 0
# All algorithms accept input, output and temporary memory with this alignment.
ALIGNMENT = 8


class Options(ctypes.Structure):
    """``nvcompBatchedDeflateDecompressOpts_t`` and its equals; zeros are the defaults."""

    _fields_ = (("backend", c_int), ("reserved", c_char * 60))


def nvcomp_path() -> Path | None:
    """Return the path of the library, None if it is not installed."""
    package = find_spec("nvidia")
    folders = package.submodule_search_locations if package is not None else None
    paths = (path for name in NAMES for folder in folders or () for path in Path(folder).glob(name))
    return next(paths, None)


class Nvcomp:
    """The loaded library.

    Raises
    ------
    DeviceError
        If it is not installed, or can't be loaded.
    """

    def __init__(self) -> None:
        path = nvcomp_path()
        if path is None:
            raise DeviceError(
                "nvCOMP is not installed; install napari-wsigpu[cuda12] or napari-wsigpu[cuda13]."
            )
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise DeviceError(f"nvCOMP cannot be loaded ({error}); install it again.") from error

    def room(self, algorithm: str, count: int, size: int) -> int:
        """Return the bytes of temporary device memory for a batch.

        Parameters
        ----------
        algorithm : {"Deflate", "Zstd"}
            Compression.
        count, size : int
            Number of tiles, and of decoded bytes in each.

        Raises
        ------
        RuntimeError
            If nvCOMP refuses such a batch.
        """
        name = f"nvcompBatched{algorithm}DecompressGetTempSize"
        # Version 6 has a stream as last argument, which version 5 does not read.
        function = getattr(self._library, name, None) or getattr(self._library, f"{name}Async")
        function.argtypes = [c_size_t, c_size_t, Options, c_void_p, c_size_t, c_void_p]
        found = c_size_t()
        status = function(count, size, Options(), ctypes.byref(found), count * size, None)
        if status != SUCCESS:
            raise RuntimeError(f"nvCOMP refuses a batch (status {status})")
        return found.value

    def decode(
        self,
        algorithm: str,
        count: int,
        inputs: tuple[int, int],
        outputs: tuple[int, int, int, int],
        room: tuple[int, int],
        stream: Stream,
    ) -> None:
        """Submit the decoding of a batch to a stream.

        Parameters
        ----------
        algorithm : {"Deflate", "Zstd"}
            Compression.
        count : int
            Number of tiles.
        inputs : tuple of int
            Device addresses of the addresses of the streams, and of their lengths (uint64).
        outputs : tuple of int
            Device addresses of the tiles' addresses, of their capacities, of the decoded sizes
            (uint64) and of the statuses (int32); nvCOMP writes the last two.
        room : tuple of (int, int)
            Device address and size of temporary memory.
        stream : Stream
            The stream.

        Raises
        ------
        RuntimeError
            If nvCOMP refuses the batch.
        """
        function = getattr(self._library, f"nvcompBatched{algorithm}DecompressAsync")
        addresses = [c_void_p] * 4
        function.argtypes = [
            *addresses, c_size_t, c_void_p, c_size_t, c_void_p, Options, c_void_p, c_void_p,
        ]  # fmt: skip
        targets, capacities, sizes, statuses = outputs
        status = function(
            *(*inputs, capacities, sizes, count, *room, targets, Options(), statuses, stream.ptr)
        )
        if status != SUCCESS:
            raise RuntimeError(f"nvCOMP refuses a batch (status {status})")
