"""The native core: it reads tiles and decodes parts of them without the interpreter.

The package works without it; tiles are then decoded by imagecodecs on threads, more slowly.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from ctypes import c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.native.tables import (
    FORMAT,
    LEVEL,
    MESSAGE_SIZE,
    PART,
    RANGE,
    SCAN,
    TILE,
    VERSION,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

SUFFIXES = {"win32": ".dll", "darwin": ".dylib"}
FILE = f"wsigpu_core{SUFFIXES.get(sys.platform, '.so')}"
# Set to "off" to decode in Python even if the core is installed.
SWITCH = "WSIGPU_NATIVE"
RECORDS = FORMAT, TILE, PART, RANGE, LEVEL, VERSION, SCAN


class Core:
    """The functions of the library; every call releases the interpreter.

    Parameters
    ----------
    library : ctypes.CDLL
        The library.

    Raises
    ------
    OSError
        If it is of another version than this package.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        sizes, jpeg = (c_int32 * 7)(), c_int32()
        library.wsigpu_layout(sizes, ctypes.byref(jpeg))
        if [*sizes] != [record.itemsize for record in RECORDS]:
            raise OSError("it was built for another version")
        # libjpeg-turbo counts as 2001005 for 2.1.5.
        parts = divmod(jpeg.value, 1_000_000), divmod(jpeg.value % 1_000_000, 1000)
        self.jpeg_version = f"{parts[0][0]}.{parts[1][0]}.{parts[1][1]}"
        self._read_tiles = library.wsigpu_read_tiles
        self._read_tiles.restype = c_int64
        self._read_tiles.argtypes = [
            c_int32, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int32,
        ]  # fmt: skip
        self._read_region = library.wsigpu_read_region
        self._read_region.restype = c_int64
        self._read_region.argtypes = [
            c_int32, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p,
            c_int64, c_void_p,
        ]  # fmt: skip
        self._read_scans = library.wsigpu_read_scans
        self._read_scans.restype = c_int64
        self._read_scans.argtypes = [
            c_int32, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int32,
        ]  # fmt: skip
        self._read_ranges = library.wsigpu_read_ranges
        self._read_ranges.restype = c_int64
        self._read_ranges.argtypes = [c_int32, c_void_p, c_int64, c_void_p, c_int32]

    def read_tiles(
        self,
        form: int,
        tiles: NDArray[Any],
        parts: NDArray[Any],
        *,
        file: int = -1,
        memory: int | None = None,
        cancel: int | None = None,
        threads: int = 1,
    ) -> dict[int, str]:
        """Read tiles, decode what their parts need, and paste it.

        Parameters
        ----------
        form : int
            Address of a `FORMAT` record.
        tiles : ndarray of TILE
            The tiles; sizes and statuses are written to it.
        parts : ndarray of PART
            Which rectangles of them go where.
        file : int
            Descriptor of the file that holds the tiles.
        memory : int, optional
            Address that offsets of tiles count from, instead of a file.
        cancel : int, optional
            Address of an int32; once it is not 0, no further tile is decoded.
        threads : int
            How many threads work, this one included.

        Returns
        -------
        dict of int to str
            The core's message about each tile that is not done, by index.
        """
        messages = np.zeros(len(tiles) * MESSAGE_SIZE, np.uint8)
        failed = self._read_tiles(
            file,
            memory,
            form,
            tiles.ctypes.data,
            len(tiles),
            parts.ctypes.data,
            messages.ctypes.data,
            cancel,
            threads,
        )
        if not failed:
            return {}
        texts = messages.view(f"S{MESSAGE_SIZE}")
        return {
            index: texts[index].decode("utf-8", "replace")
            for index in np.flatnonzero(tiles["status"]).tolist()
        }

    def read_region(
        self,
        file: int,
        version: int | None,
        form: int,
        level: int,
        place: tuple[int, int, int, int],
        target: NDArray[Any],
        tiles: NDArray[Any] | None = None,
    ) -> int:
        """Read a small rectangle of a level in this thread.

        Parameters
        ----------
        file : int
            Descriptor of the file.
        version : int or None
            Address of a `VERSION` record that the file is compared with.
        form, level : int
            Addresses of a `FORMAT` and a `LEVEL` record.
        place : tuple of int
            Left, top, width and height in pixels of the level.
        target : ndarray
            Where its pixels go; rows may lie apart.
        tiles : ndarray of TILE, optional
            Its tiles, row by row: memory that keeps them, or tiles that are HELD.

        Returns
        -------
        int
            How many bytes were read; `UNPLANNED` if the read has to be planned by tiles, and
            `CHANGED` if the file is another one.
        """
        count: int = self._read_region(
            file,
            version,
            form,
            level,
            *place,
            target.ctypes.data,
            target.strides[0],
            None if tiles is None else tiles.ctypes.data,
        )
        return count

    def read_scans(
        self,
        scans: NDArray[Any],
        header: bytes,
        target: int,
        *,
        file: int = -1,
        memory: int | None = None,
        threads: int = 1,
    ) -> bool:
        """Read the scans of JPEG tiles that share a header, without it.

        Parameters
        ----------
        scans : ndarray of SCAN
            The tiles, where their scans go, and the markers that replace EOI.
        header : bytes
            What each tile begins with.
        target : int
            Address that places count from.
        file, memory, threads
            As in `read_tiles`.

        Returns
        -------
        bool
            Whether all tiles begin with the header, end with EOI and could be read.
        """
        data, count = scans.ctypes.data, len(scans)
        size = len(header)
        return not self._read_scans(file, memory, data, count, header, size, target, threads)

    def read_ranges(self, file: int, ranges: NDArray[Any], target: int, threads: int = 1) -> bool:
        """Read ranges of a file into a buffer.

        Parameters
        ----------
        file : int
            Descriptor of the file.
        ranges : ndarray of RANGE
            What goes where.
        target : int
            Address of the buffer.
        threads : int
            How many threads read, this one included.

        Returns
        -------
        bool
            Whether the file gave all bytes.
        """
        data = ranges.ctypes.data
        return not self._read_ranges(file, data, len(ranges), target, threads)


def _is_off() -> bool:
    return os.environ.get(SWITCH, "").lower() in ("off", "0", "false", "no")


def _load() -> tuple[Core | None, str]:
    """Return the core, or None and why it is missing."""
    if _is_off():
        return None, "WSIGPU_NATIVE is off"
    reason = "the package was installed without a C++ compiler or libjpeg-turbo's headers"
    # In an editable install the library lies in site-packages, apart from the sources.
    for folder in __path__:
        path = Path(folder) / FILE
        if path.is_file():
            try:
                core = Core(ctypes.CDLL(str(path)))
            except (OSError, AttributeError) as error:
                reason = f"'{path}' can't be used ({error})"
            else:
                return core, f"libjpeg-turbo {core.jpeg_version}"
    return None, reason


core, reason = _load()
available = core is not None


@cache
def warn_if_missing() -> None:
    """Log a warning, once per process, if the core is missing and was not switched off."""
    if not available and not _is_off():
        logger.warning("Tiles are decoded in Python, more slowly: %s", reason)
