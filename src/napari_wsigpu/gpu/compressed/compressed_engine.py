"""`CompressedEngine`: decodes bytes that are compressed with deflate, LZW or zstd on one device."""

from __future__ import annotations

import logging
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.gpu.compressed.nvcomp_library import ALIGNMENT, Nvcomp
from napari_wsigpu.gpu.device.kernel_tables import row_type, structure
from napari_wsigpu.gpu.device.scratch import Scratch
from napari_wsigpu.model.errors import DeviceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from napari_wsigpu.gpu.device.cuda import CudaDevice
    from napari_wsigpu.gpu.device.interfaces import Stream
    from napari_wsigpu.model.arrays import Integers
    from napari_wsigpu.model.layout import LevelLayout

LZW, DEFLATE, ZSTD = "LZW", "Deflate", "Zstd"
# Keys of `gpu.device.verify.TOLERANCES`.
ENGINES = {LZW: "LZW kernel", DEFLATE: "nvCOMP", ZSTD: "nvCOMP"}
# A stream. source: address of its first byte; target: address that it is decoded or copied to.
PART = row_type("u8 source, u8 target, i8 length")
# Threads of a block that checks a tile, and of one that restores its samples.
CHECKING, THREADS = 256, 128
# LZW (TIFF 6.0, section 13) and Adler-32 (RFC 1950).
CONSTANTS = {
    "CODES": 4096,
    "CLEAR": 256,
    "END": 257,
    "FIRST_WIDTH": 9,
    "LAST_WIDTH": 12,
    "ADLER": 65521,
    "CHECKING": CHECKING,
}
PAGE = 256  # bytes to which parts of the memory are aligned

logger = logging.getLogger(__name__)


@cache
def program() -> str:
    """Return the source of the kernels."""
    folder = resources.files("napari_wsigpu.gpu.compressed")
    constants = "".join(f"#define {name} {value}\n" for name, value in CONSTANTS.items())
    text = folder.joinpath("compressed.cu").read_text("utf-8")
    return constants + structure("Part", PART) + text


class CompressedEngine:
    """Decodes tiles on a device: LZW with our kernel, deflate and zstd with nvCOMP.

    Only one thread may call `decode` at a time (it holds `DecodeWorker.decoding`); the other
    methods may be called from any thread.

    Parameters
    ----------
    device : CudaDevice
        Device to decode on.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._scratch = Scratch(device)
        self._nvcomp: Nvcomp | None = None
        # Whether each algorithm works here. Two threads that set an entry would store the same.
        self._works: dict[str, bool] = {}

    def ready(self, algorithm: str) -> bool:
        """Return whether the device decodes an algorithm; the first call compiles the kernels."""
        if algorithm not in self._works:
            try:
                if algorithm != LZW and self._nvcomp is None:
                    self._nvcomp = Nvcomp()
                self._device.compile(program())
                self._works[algorithm] = True
            except DeviceError as error:
                self._works[algorithm] = False
                logger.info("%s is decoded by the CPU: %s", algorithm, error)
        return self._works[algorithm]

    def works(self, algorithm: str) -> bool | None:
        """Return the result of `ready`, or None before the first call; never blocks."""
        return self._works.get(algorithm)

    def decode(
        self,
        algorithm: str,
        encoded: NDArray[np.uint8],
        starts: Integers,
        lengths: Integers,
        sums: NDArray[np.uint64] | None,
        targets: Integers,
        size: int,
        flags: NDArray[np.int32],
        stream: Stream,
    ) -> None:
        """Submit the decoding of streams to a CUDA stream.

        Parameters
        ----------
        algorithm : str
            `LZW`, `DEFLATE` (without zlib's header and checksum) or `ZSTD`.
        encoded : ndarray of uint8
            Host memory with the streams; the caller keeps it until the stream is synchronized.
        starts, lengths : ndarray of int64, shape (tiles,)
            Offset and length of each stream in `encoded`.
        sums : ndarray of uint64, shape (tiles,), optional
            Adler-32 checksums of the decoded bytes. LZW has none.
        targets : ndarray of int64, shape (tiles,)
            Device address of each tile.
        size : int
            Number of decoded bytes of every tile.
        flags : ndarray of int32, shape (tiles,)
            Page-locked memory, in which a kernel sets 0 for each tile that was decoded.
        stream : Stream
            Stream to which the work is submitted.

        Raises
        ------
        MemoryError
            If the device does not have enough memory.
        """
        first, last = int(starts.min()), int((starts + lengths).max())
        uploaded = _aligned(last - first + ALIGNMENT, PAGE)
        if algorithm == LZW:
            room = self._scratch.borrow(uploaded, stream)
            self._device.upload(room.address, encoded[first:last], stream)
            parts = _parts(room.address + starts - first, targets, lengths)
            table = self._device.table(parts, stream)
            address = np.uint64(flags.ctypes.data)
            self._launch("decode_lzw", len(parts), 1, (table, np.int32(size), address), stream)
        else:
            assert self._nvcomp is not None
            # Temporary memory grows linearly with the number of tiles.
            each = max(1, self._nvcomp.room(algorithm, 64, size) // 64)
            at_once = max(1, min(len(starts), self._scratch.budget // each))
            copies = np.cumsum([0, *(-(-lengths // ALIGNMENT) * ALIGNMENT).tolist()])
            used = _aligned(int(copies[-1]), PAGE)
            temporary = self._nvcomp.room(algorithm, at_once, size)
            room = self._scratch.borrow(uploaded + used + temporary, stream)
            self._device.upload(room.address, encoded[first:last], stream)
            aligned = room.address + uploaded + copies[:-1]
            parts = _parts(room.address + starts - first, aligned, lengths)
            table = self._device.table(parts, stream)
            self._launch("align_streams", len(parts), CHECKING, (table,), stream)
            scratch = room.address + uploaded + used, temporary
            for index in range(0, len(starts), at_once):
                part = slice(index, index + at_once)
                self._decode_part(
                    algorithm,
                    (aligned[part], lengths[part]),
                    None if sums is None else sums[part],
                    targets[part],
                    size,
                    flags[part],
                    scratch,
                    stream,
                )
        self._scratch.give_back(room, stream)

    def _decode_part(
        self,
        algorithm: str,
        streams: tuple[Integers, Integers],
        sums: NDArray[np.uint64] | None,
        targets: Integers,
        size: int,
        flags: NDArray[np.int32],
        room: tuple[int, int],
        stream: Stream,
    ) -> None:
        """Decode aligned streams with nvCOMP, and check the results."""
        assert self._nvcomp is not None
        count = len(targets)
        # Rows: addresses and lengths of the streams, targets, capacities, checksums, and room for
        # the decoded sizes and the statuses.
        rows = np.zeros((7, count), np.uint64)
        rows[0], rows[1], rows[2], rows[3] = *streams, targets, size
        if sums is not None:
            rows[4] = sums
        table = self._device.table(rows, stream)
        base = self._device.address(table)
        where = [base + row * 8 * count for row in range(7)]
        self._nvcomp.decode(
            algorithm,
            count,
            (where[0], where[1]),
            (where[2], where[3], where[5], where[6]),
            room,
            stream,
        )
        checksums = where[4] if sums is not None else 0
        arguments = [*(where[row] for row in (2, 5, 6)), checksums]
        last = np.int64(size), np.uint64(flags.ctypes.data)
        self._launch("check_decoded", count, CHECKING, (*map(np.uint64, arguments), *last), stream)

    def restore(
        self, addresses: Integers, level: LevelLayout, *, swap: bool, sum_up: bool, stream: Stream
    ) -> None:
        """Undo byte order and horizontal differencing of decoded tiles in place.

        Parameters
        ----------
        addresses : ndarray of int64
            Device addresses of the tiles.
        level : LevelLayout
            Level of the tiles.
        swap, sum_up : bool
            Whether to swap the bytes of samples, and to add up the samples of each row.
        stream : Stream
            Stream to which the work is submitted.
        """
        grid, samples = level.grid, level.encoding.samples
        blocks = -(-grid.tile_height * samples // THREADS)
        sizes = grid.tile_height, grid.tile_width, samples, level.dtype.itemsize
        numbers = map(np.int32, (blocks, *sizes, swap, sum_up))
        table = self._device.table(addresses, stream)
        arguments = table, *numbers
        self._launch("restore_samples", blocks * len(addresses), THREADS, arguments, stream)

    def trim(self) -> None:
        """Free the memory for intermediate results."""
        self._scratch.trim()

    def _launch(
        self,
        name: str,
        blocks: int,
        threads: int,
        arguments: tuple[object, ...],
        stream: Stream,
    ) -> None:
        self._device.compile(program()).launch(name, blocks, threads, arguments, stream)


def _aligned(size: int, step: int) -> int:
    return -(-size // step) * step


def _parts(sources: Integers, targets: Integers, lengths: Integers) -> NDArray[np.void]:
    parts = np.empty(len(sources), PART)
    parts["source"], parts["target"], parts["length"] = sources, targets, lengths
    return parts
