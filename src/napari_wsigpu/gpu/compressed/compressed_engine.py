"""`CompressedEngine`: decodes deflate, LZW, PackBits and zstd on one device."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.gpu.device.kernel_engine import KernelEngine
from napari_wsigpu.gpu.device.kernel_tables import preamble
from napari_wsigpu.native.tables import row_type

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from napari_wsigpu.gpu.device.interfaces import Stream
    from napari_wsigpu.model.arrays import Integers
    from napari_wsigpu.model.layout import LevelLayout

LZW, DEFLATE, PACKBITS, ZSTD = "LZW", "deflate", "PackBits", "zstd"
# Kernel of each, and the threads that decode a tile.
KERNELS = {
    LZW: ("decode_lzw", 32),
    DEFLATE: ("decode_deflate", 32),
    PACKBITS: ("decode_packbits", 32),
    ZSTD: ("decode_zstd", 32),
}
ENGINE = "lossless kernels"  # key of `gpu.device.verify.TOLERANCES`
# A stream. source: address of its first byte; target: address that it is decoded to.
PART = row_type("u8 source, u8 target, i8 length")
# Threads of a block that checks a tile, and of one that restores its samples.
CHECKING, THREADS = 256, 128
# Bytes of the longest row of floating-point samples whose predictor is undone.
MOST_ROW = 1 << 15
# Matches that are decoded before they are copied, and bytes that a thread copies for one.
OF_MATCHES = {"CHUNK": 32, "LONG": 64}
# Tokens of deflate that a thread can keep, and for how many its next span of bits is meant; bits of
# spans; more than the bits of the longest description of a block's codes; words that are loaded in
# addition, as tokens of the last span may end after it.
OF_SPANS = {
    "TOKENS": 48,
    "FEWER_TOKENS": 36,
    "FIRST_SPAN": 512,
    "SHORTEST_SPAN": 32,
    "LONGEST_SPAN": 1024,
    "LONGEST_TABLES": 5000,
    "MORE_WORDS": 4,
}
# Numbers of LZW (TIFF 6.0, section 13) and deflate (RFC 1951).
CONSTANTS = {
    **OF_MATCHES,
    "CODES": 4096,
    "CLEAR": 256,
    "END": 257,
    "FIRST_WIDTH": 9,
    "LAST_WIDTH": 12,
    "ADLER": 65521,
    "LONGEST": 15,
    "THREADS_OF_TILE": KERNELS[DEFLATE][1],
    **OF_SPANS,
    "CHECKING": CHECKING,
    "MOST_ROW": MOST_ROW,
}
# Numbers of zstd (RFC 8878): bytes of the largest block, and bits of the longest Huffman code.
MOST_BLOCK = 1 << 17
OF_ZSTD = {
    **OF_MATCHES,
    "MOST_BLOCK": MOST_BLOCK,
    "LONGEST_CODE": 11,
    "THREADS_OF_FRAME": KERNELS[ZSTD][1],
}
WORD = 16  # bytes


@cache
def programs() -> tuple[str, ...]:
    """Return the sources of the kernels, which are compiled in parallel."""
    folder = resources.files("napari_wsigpu.gpu.compressed")
    sources = {"compressed.cu": CONSTANTS, "zstd.cu": OF_ZSTD}
    return tuple(
        preamble(numbers, {"Part": PART})
        + "".join(folder.joinpath(each).read_text("utf-8") for each in ("matches.cu", name))
        for name, numbers in sources.items()
    )


def room_for(algorithm: str, size: int, tiles: int) -> int:
    """Return the bytes of device memory that decoding needs for streams of `size` bytes."""
    return _for_streams(size) + (tiles * MOST_BLOCK if algorithm == ZSTD else 0)


def _for_streams(size: int) -> int:
    """Return the bytes for streams that are read as whole words; a multiple of `WORD`."""
    return -(-size // WORD) * WORD + WORD


class CompressedEngine(KernelEngine):
    """Decodes tiles compressed with deflate, LZW, PackBits or zstd; see `KernelEngine`."""

    _otherwise = "Deflate, LZW, PackBits and zstd are decoded by the CPU"

    @staticmethod
    def _programs() -> tuple[str, ...]:
        return programs()

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
        address: int,
        stream: Stream,
    ) -> None:
        """Upload streams, and submit their decoding to a CUDA stream.

        Parameters
        ----------
        algorithm : str
            `LZW`, `PACKBITS`, `ZSTD`, or `DEFLATE` without zlib's header and checksum.
        encoded : ndarray of uint8
            Host memory with the streams; the caller keeps it until the stream is synchronized.
        starts, lengths : ndarray of int64, shape (tiles,)
            Offset and length of each stream in `encoded`.
        sums : ndarray of uint64, shape (tiles,), optional
            Adler-32 checksums of the decoded bytes. Only deflate has them.
        targets : ndarray of int64, shape (tiles,)
            Device address of each tile.
        size : int
            Number of decoded bytes of every tile.
        flags : ndarray of int32, shape (tiles,)
            Page-locked memory, in which a kernel sets 0 for each tile that was decoded.
        address : int
            Device memory of the size that `room_for` returns. It is the batch's own, so that
            batches overlap.
        stream : Stream
            Stream to which the work is submitted.
        """
        first, last = int(starts.min()), int((starts + lengths).max())
        self._device.upload(address, encoded[first:last], stream)
        parts = np.empty(len(starts), PART)
        parts["source"], parts["target"] = address + starts - first, targets
        parts["length"] = lengths
        table, doubts = self._device.table(parts, stream), np.uint64(flags.ctypes.data)
        arguments: tuple[object, ...] = table, np.int32(size), doubts
        if algorithm == ZSTD:
            arguments += (np.uint64(address + _for_streams(last - first)),)
        kernel, threads = KERNELS[algorithm]
        self._launch(kernel, len(parts), threads, arguments, stream)
        if sums is not None:
            rows = np.stack([targets.astype(np.uint64), sums])
            table = self._device.table(rows, stream)
            where = self._device.address(table) + np.arange(2) * rows[0].nbytes
            checked = *map(np.uint64, where.tolist()), np.int64(size), doubts
            self._launch("check_sums", len(parts), CHECKING, checked, stream)

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

    def restore_floats(self, addresses: Integers, level: LevelLayout, stream: Stream) -> None:
        """Undo the predictor of floating-point samples in place; parameters as in `restore`.

        A row of a tile has at most `MOST_ROW` bytes.
        """
        grid, samples = level.grid, level.encoding.samples
        sizes = grid.tile_height, grid.tile_width, samples, level.dtype.itemsize
        arguments = self._device.table(addresses, stream), *map(np.int32, sizes)
        blocks = grid.tile_height * len(addresses)
        self._launch("restore_floats", blocks, THREADS, arguments, stream)

    def _launch(
        self,
        name: str,
        blocks: int,
        threads: int,
        arguments: tuple[object, ...],
        stream: Stream,
    ) -> None:
        self._device.compile(*programs()).launch(name, blocks, threads, arguments, stream)
