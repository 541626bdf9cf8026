"""`JpegKernels`: decodes JPEG on one device without a JPEG engine, exactly as libjpeg does."""

from __future__ import annotations

import os
from functools import cache, lru_cache
from importlib import resources
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.codecs.jpeg import (
    BLOCK,
    CODE_LENGTHS,
    END_OF_IMAGE,
    SEQUENTIAL,
    huffman_tables,
    read_header,
)
from napari_wsigpu.gpu.device.kernel_engine import KernelEngine
from napari_wsigpu.gpu.device.kernel_tables import preamble
from napari_wsigpu.gpu.jpeg.jpeg_engine import BY_HARDWARE, JPEG_ENGINE
from napari_wsigpu.native.tables import row_type

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from napari_wsigpu.gpu.device.interfaces import Stream
    from napari_wsigpu.gpu.jpeg.joining import Joined

ENGINE = "JPEG kernels"  # key of `gpu.device.verify.TOLERANCES`
SAMPLES = BLOCK * BLOCK
# Bits that a table looks up at once.
QUICK = 9
# libjpeg's implementations agree while the sums of a column's coefficients, and of a row's values
# after the first step, are below these. Both exceed what encoded pixels can reach.
LARGEST_COLUMN, LARGEST_ROW = 5000, 32767
MOST_CODES, LARGEST_DC = 256, 15
# In bytes. The kernel counts bits as 32-bit integers.
LONGEST_SCAN = 1 << 27
# Threads of a block, which decodes a scan; the fewest bits that are worth a thread; bytes that a
# thread moves at once; bytes of a word.
THREADS, SHORTEST, CHUNK, WORD = 64, 512, 16, 4

# A scan. source, length: device address of its first byte, and bytes; planes: addresses of its
# components' first samples.
SCAN = row_type("u8 source, i8 length, u8 planes[3]")
# Tables of a header. order: position in a block of each coefficient in zigzag order; steps:
# quantization steps of three components; dc, ac: indices of their Huffman codes; alike: whether all
# have the same ones.
FORM = row_type(f"u1 order[{SAMPLES}], i4 steps[{3 * SAMPLES}], i4 dc[3], i4 ac[3], i4 alike")
# A Huffman code. quick: entry for the next bits, 0 if the code is longer; entries: those of all
# symbols, in the order of their codes; ends: the first 16 bits beyond the codes of each length;
# shifts: index of a length's first symbol minus its code.
CODE = row_type(
    f"u4 quick[{1 << QUICK}], u4 entries[{MOST_CODES}], i4 ends[{CODE_LENGTHS + 1}], "
    f"i4 shifts[{CODE_LENGTHS + 1}]"
)
# An entry, from the lowest bit: the number of bits to skip, 5 bits; END_FLAG for the end of a
# block; the number of zero coefficients before the value; the number of bits of the value that
# follow, or 0 and the value itself.
LENGTH, END_FLAG, RUN, SIZE, VALUE = 31, 1 << 5, 6, 10, 16


def _zigzag() -> NDArray[np.uint8]:
    """Return the position in a block of each coefficient in zigzag order (T.81, figure A.6)."""
    rows, columns = np.divmod(np.arange(SAMPLES), BLOCK)
    diagonals = rows + columns
    order = np.lexsort((np.where(diagonals % 2, rows, columns), diagonals))
    return order.astype(np.uint8)


ORDER = _zigzag()


@cache
def program() -> str:
    """Return the source of the kernel."""
    numbers = {
        "QUICK": QUICK,
        "THREADS": THREADS,
        "SHORTEST": SHORTEST,
        "CHUNK": CHUNK,
        "LONGEST": CODE_LENGTHS,
        "LARGEST_COLUMN": LARGEST_COLUMN,
        "LARGEST_ROW": LARGEST_ROW,
        "LENGTH": LENGTH,
        "END": END_FLAG,
        "RUN": RUN,
        "SIZE": SIZE,
        "VALUE": VALUE,
    }
    start = preamble(numbers, {"Scan": SCAN, "Form": FORM, "Code": CODE})
    folder = resources.files("napari_wsigpu.gpu.jpeg")
    return start + folder.joinpath("jpeg.cu").read_text("utf-8")


class JpegKernels(KernelEngine):
    """Decodes sequential JPEG with 8 bits per sample; see `KernelEngine`."""

    _otherwise = "JPEG is decoded by the CPU if the device has no JPEG engine"

    @staticmethod
    def _programs() -> tuple[str, ...]:
        return (program(),)

    def ready(self) -> bool:
        """Return whether the kernels may decode JPEG, and the device runs them."""
        return os.environ.get(JPEG_ENGINE) != BY_HARDWARE and super().ready()

    @staticmethod
    def accepts(joined: Joined) -> bool:
        """Return whether the kernel can decode scans with the header of these."""
        return _tables(joined) is not None

    def decode(
        self,
        joined: Joined,
        address: int,
        planes: NDArray[np.uint64],
        shape: tuple[int, int],
        sampling: tuple[int, int],
        flags: NDArray[np.int32],
        stream: Stream,
    ) -> bool:
        """Submit the decoding of scans with one header to a CUDA stream.

        Parameters
        ----------
        joined : Joined
            Layout of the scans.
        address : int
            Device address of the buffer with the scans, a multiple of `WORD`. As many bytes may be
            read behind it.
        planes : ndarray of uint64, shape (scans, 3)
            Device addresses of the components of each scan.
        shape, sampling : tuple of (int, int)
            Height and width of a scan in pixels; luma samples per chroma sample, across and down.
        flags : ndarray of int32, shape (scans,)
            Page-locked memory, in which the kernel sets 1 for each scan that may be wrong.
        stream : Stream
            Stream to which the work is submitted.

        Returns
        -------
        bool
            False if the kernel cannot decode scans with this header.
        """
        tables = _tables(joined)
        if tables is None:
            return False
        form, codes, components = tables
        scans = np.empty(len(joined.scans), SCAN)
        scans["source"] = address + joined.scans["place"]
        scans["length"] = joined.scans["length"] - len(joined.header) - len(END_OF_IMAGE)
        scans["planes"] = planes
        rows = (self._device.table(table, stream) for table in (scans, form, codes))
        numbers = map(np.int32, (components, *sampling, *shape))
        arguments = *rows, *numbers, np.uint64(flags.ctypes.data)
        self._device.compile(program()).launch(
            "decode_jpeg", len(scans), THREADS, arguments, stream
        )
        return True


def _tables(joined: Joined) -> tuple[NDArray[np.void], NDArray[np.void], int] | None:
    if joined.scans["length"].max() > LONGEST_SCAN:
        return None
    # Stacks with an end have a restart interval, which their tiles need not have.
    return _tables_of(joined.stacks[0].header, restarts=bool(joined.stacks[0].end))


@lru_cache(maxsize=64)
def _tables_of(
    data: bytes, *, restarts: bool
) -> tuple[NDArray[np.void], NDArray[np.void], int] | None:
    """Return the tables of a header, and the number of its components; None if unusual.

    Parameters
    ----------
    data : bytes
        The header.
    restarts : bool
        Whether its restart interval doesn't matter.
    """
    header = read_header(data)
    if header is None or header.frame not in SEQUENTIAL or (header.restarts and not restarts):
        return None
    form = np.zeros(1, FORM)
    form["order"] = ORDER
    known = huffman_tables(header.huffman)
    codes: dict[tuple[int, int], NDArray[np.void]] = {}
    for component, (quanta, numbers) in enumerate(zip(header.quanta, header.tables, strict=True)):
        if not quanta:
            return None
        form["steps"][0, SAMPLES * component + ORDER] = quanta
        for name, key in zip(("dc", "ac"), enumerate(numbers), strict=True):
            if key not in codes:
                code = _code(*known.get(key, (b"", b"")), is_dc=not key[0])
                if code is None:
                    return None
                codes[key] = code
            form[name][0, component] = [*codes].index(key)
    form["alike"] = len({*header.tables}) == 1
    return form, np.concatenate([*codes.values()]), len(header.ids)


def _code(counts: bytes, symbols: bytes, *, is_dc: bool) -> NDArray[np.void] | None:
    """Return a Huffman code (T.81, annex C); None if it is incomplete or damaged."""
    if not counts or len(symbols) != sum(counts) or not 0 < len(symbols) <= MOST_CODES:
        return None
    if is_dc and max(symbols) > LARGEST_DC:
        return None
    code = np.zeros(1, CODE)
    quick, entries = code["quick"][0], code["entries"][0]
    value = index = 0
    for length, count in enumerate(counts, 1):
        code["shifts"][0, length] = index - value
        for symbol in symbols[index : index + count]:
            run, size = divmod(symbol, 16)
            entry = length | run << RUN | size << SIZE
            if symbol == 0 and not is_dc:
                entry |= END_FLAG
            elif size == 0 and 0 < run < 15:
                entry = 0  # not defined for sequential JPEG
            entries[index] = entry
            if length <= QUICK and entry:
                start = value << (QUICK - length)
                quick[start : start + (1 << (QUICK - length))] = entry
                if 0 < size <= QUICK - length:
                    quick[start : start + (1 << (QUICK - length))] = _with_values(length, run, size)
            value, index = value + 1, index + 1
        if value > 1 << length:
            return None
        code["ends"][0, length] = value << (CODE_LENGTHS - length)
        value <<= 1
    return code


def _with_values(length: int, run: int, size: int) -> NDArray[np.uint32]:
    """Return the entries of a code and all values that may follow it."""
    values = np.arange(1 << size)
    values = np.where(values < 1 << (size - 1), values - (1 << size) + 1, values)
    entries = (values << VALUE) | (length + size) | run << RUN
    return np.repeat(entries & 0xFFFFFFFF, 1 << (QUICK - length - size)).astype(np.uint32)
