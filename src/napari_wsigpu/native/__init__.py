"""The native core, which reads tiles and decodes parts of them without holding the GIL.

Without the core, imagecodecs decodes tiles in Python threads, which is slower.
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

from napari_wsigpu.native.tables import MESSAGE_SIZE, PICTURE, RECORDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

SUFFIXES = {"win32": ".dll", "darwin": ".dylib"}
FILE = f"wsigpu_core{SUFFIXES.get(sys.platform, '.so')}"
# Set to "off" to decode in Python even if the core is installed.
SWITCH = "WSIGPU_NATIVE"


class Core:
    """The functions of the library; every call releases the GIL.

    Parameters
    ----------
    library : ctypes.CDLL
        The loaded core.

    Raises
    ------
    OSError
        If the library was built for another version of this package.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        sizes, jpeg = (c_int32 * 9)(), c_int32()
        library.wsigpu_layout(sizes, ctypes.byref(jpeg))
        if [*sizes] != [record.itemsize for record in RECORDS]:
            raise OSError("it was built for another version of this package")
        # LIBJPEG_TURBO_VERSION_NUMBER is 2001005 for version 2.1.5.
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
            c_int64, c_void_p, c_int32,
        ]  # fmt: skip
        self._read_scans = library.wsigpu_read_scans
        self._read_scans.restype = c_int64
        self._read_scans.argtypes = [
            c_int32, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int32,
        ]  # fmt: skip
        self._read_ranges = library.wsigpu_read_ranges
        self._read_ranges.restype = c_int64
        self._read_ranges.argtypes = [c_int32, c_void_p, c_int64, c_void_p, c_int32]
        self._halve = library.wsigpu_halve
        self._halve.restype = None
        self._halve.argtypes = [c_void_p, c_int64, c_int32]
        self._compose = library.wsigpu_compose
        self._compose.restype = None
        self._compose.argtypes = [
            c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int32,
        ]  # fmt: skip

    def read_tiles(
        self,
        tile_format: int,
        tiles: NDArray[Any],
        parts: NDArray[Any],
        *,
        file: int = -1,
        memory: int | None = None,
        cancel: int | None = None,
        threads: int = 1,
    ) -> dict[int, str]:
        """Read tiles, decode the area that their parts need, and paste the parts.

        Parameters
        ----------
        tile_format : int
            Address of a `FORMAT` record.
        tiles : ndarray of TILE
            The tiles; receives their sizes and statuses.
        parts : ndarray of PART
            The rectangles of the tiles and their targets.
        file : int
            Descriptor of the file with the tiles.
        memory : int, optional
            Address that the tiles' offsets are relative to, if the tiles are in memory and not in
            `file`.
        cancel : int, optional
            Address of an int32; once it is nonzero, no further tile is decoded.
        threads : int
            Number of threads, including this one.

        Returns
        -------
        dict of int to str
            The core's message for each tile whose status is not DONE, by the tile's index.
        """
        messages = np.zeros(len(tiles) * MESSAGE_SIZE, np.uint8)
        failed = self._read_tiles(
            file,
            memory,
            tile_format,
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
        tile_format: int,
        level: int,
        area: tuple[int, int, int, int],
        target: NDArray[Any],
        tiles: NDArray[Any] | None = None,
        threads: int = 1,
    ) -> int:
        """Read a small rectangle of a level.

        Parameters
        ----------
        file : int
            Descriptor of the file.
        version : int or None
            Address of a `VERSION` record to compare with the file.
        tile_format, level : int
            Addresses of a `FORMAT` and a `LEVEL` record.
        area : tuple of int
            Left, top, width and height in pixels of the level.
        target : ndarray
            Receives the pixels; its rows need not be contiguous.
        tiles : ndarray of TILE, optional
            A record for each tile that the rectangle touches, row by row. The caller sets `keep`
            in each record, and also the status and size of HELD tiles.
        threads : int
            Number of threads, including this one.

        Returns
        -------
        int
            Total encoded size of the tiles read; `NEEDS_PLAN` if the caller must plan the read, or
            `CHANGED` if the file no longer matches `version`.
        """
        count: int = self._read_region(
            file,
            version,
            tile_format,
            level,
            *area,
            target.ctypes.data,
            target.strides[0],
            None if tiles is None else tiles.ctypes.data,
            threads,
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
        """Read the scans of JPEG tiles that share a header.

        Parameters
        ----------
        scans : ndarray of SCAN
            The tiles, the positions of their scans, and the markers that replace EOI.
        header : bytes
            The first bytes of every tile.
        target : int
            Address of the buffer that the scans' positions refer to.
        file, memory, threads
            As in `read_tiles`.

        Returns
        -------
        bool
            Whether all tiles were read, start with the header and end with EOI.
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
            The ranges and their positions in the buffer.
        target : int
            Address of the buffer.
        threads : int
            Number of threads, including this one.

        Returns
        -------
        bool
            Whether all bytes were read.
        """
        data = ranges.ctypes.data
        return not self._read_ranges(file, data, len(ranges), target, threads)

    def halve(
        self, pixels: Sequence[NDArray[Any]], targets: Sequence[NDArray[Any]], threads: int = 1
    ) -> None:
        """Average blocks of 2 x 2 pixels of several pictures, rounded half up.

        Parameters
        ----------
        pixels, targets : sequence of ndarray of uint8 or uint16, shape (height, width, channels)
            Each of the `pixels` is twice as high and wide as its target. Rows are contiguous.
        threads : int
            Number of threads, including this one.
        """
        pictures = np.array(
            [
                (
                    *(one.ctypes.data, target.ctypes.data, one.strides[0], target.strides[0]),
                    *(*target.shape, target.itemsize),
                )
                for one, target in zip(pixels, targets, strict=True)
            ],
            PICTURE,
        )
        self._halve(pictures.ctypes.data, len(pictures), threads)

    def compose(
        self,
        planes: NDArray[Any],
        shades: NDArray[Any],
        target: NDArray[Any],
        threads: int = 1,
        sums: NDArray[np.float32] | None = None,
    ) -> None:
        """Add up the colors of channels, and write RGB pixels.

        Parameters
        ----------
        planes : ndarray of PLANE
            The channels; all have the size of the target.
        shades : ndarray of uint8, shape (SHADES + 1,)
            The sample to write for each sum.
        target : ndarray of uint8, shape (height, width, 3)
            Receives the pixels; C-contiguous.
        threads : int
            Number of threads, including this one.
        sums : ndarray of float32, shape (height, width, 4), optional
            The colors are added to these sums; C-contiguous.
        """
        data, size = planes.ctypes.data, target.shape[:2]
        start = None if sums is None else sums.ctypes.data
        self._compose(
            data, len(planes), *size, shades.ctypes.data, start, target.ctypes.data, threads
        )


def _is_off() -> bool:
    return os.environ.get(SWITCH, "").lower() in ("off", "0", "false", "no")


def _load() -> tuple[Core | None, str]:
    """Return the core and its libjpeg-turbo version; if it can't be loaded, None and the reason."""
    if _is_off():
        return None, "WSIGPU_NATIVE is off"
    reason = "the package was installed without a C++ compiler or the libjpeg-turbo headers"
    # Some editable installs put the library in another folder of `__path__` than the sources.
    for folder in __path__:
        path = Path(folder) / FILE
        if path.is_file():
            try:
                core = Core(ctypes.CDLL(str(path)))
            except (OSError, AttributeError) as error:
                reason = f"'{path}' can't be loaded ({error})"
            else:
                return core, f"libjpeg-turbo {core.jpeg_version}"
    return None, reason


core, reason = _load()
available = core is not None


@cache
def warn_if_missing() -> None:
    """Log a warning, once per process, if the core is missing although it is not switched off."""
    if not available and not _is_off():
        logger.warning(
            "imagecodecs decodes tiles in Python threads, which is slower, because %s.", reason
        )
