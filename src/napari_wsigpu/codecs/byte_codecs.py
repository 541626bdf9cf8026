"""Decompression of samples that are compressed as bytes, to no more than the size of a tile."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, TypeAlias

import imagecodecs
import numpy as np

from napari_wsigpu.model.tags import COMPRESSION, DATATYPE, PHOTOMETRIC, Tag

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Bytes = bytes | bytearray | memoryview
    # `Bytes` for imagecodecs, which accepts memoryviews although its stubs exclude them.
    Data: TypeAlias = Any


MAX_EXCESS = 64 << 10  # bytes that may follow the pixels in a segment
TIFF_HEADER = struct.Struct("<4sI")
TIFF_ENTRY = struct.Struct("<HHII")


def unpack_none(data: Bytes, sizes: Sequence[int]) -> Bytes:
    """Return uncompressed bytes, cut after the pixels; see `codecs.compressions.Unpack`."""
    return memoryview(data)[: sizes[0]]


def unpack_with(name: str) -> Callable[[Bytes, Sequence[int]], Bytes]:
    """Return a function that decompresses bytes with a function of imagecodecs."""

    def unpack(data: Bytes, sizes: Sequence[int]) -> Bytes:
        decode: Callable[..., bytes] = getattr(imagecodecs, name)  # loads the library
        try:
            return decode(data, out=sizes[0])
        except RuntimeError:
            # Most codecs fail if the output is too small, as it is for segments with excess bytes.
            return memoryview(decode(data, out=sizes[0] + MAX_EXCESS))[: sizes[0]]

    return unpack


def unpack_lzw(data: Bytes, sizes: Sequence[int]) -> bytes:
    """Decode one LZW segment with libtiff.

    imagecodecs' own LZW decoder crashes on some damaged streams: if a code after a clear code is
    not a literal, it reads out of bounds. libtiff checks every code, and is faster.

    Parameters
    ----------
    data : buffer
        The segment.
    sizes : sequence of int
        Possible sizes of the decoded bytes, the largest first. Bytes beyond the largest are
        dropped.

    Returns
    -------
    bytes
        The decoded bytes, in one of these sizes. If the segment's size is between two of them, the
        result is one byte longer than the smaller size, which indicates excess bytes.

    Raises
    ------
    RuntimeError
        If the segment is damaged, or shorter than the smallest size.
    """
    first_error: RuntimeError | None = None
    for size in sizes:
        try:
            segment = _lzw_row(data, size)
        except RuntimeError as error:
            first_error = first_error or error
            continue
        if size == sizes[0]:
            return segment
        try:
            return _lzw_row(data, size + 1)
        except RuntimeError:
            return segment
    assert first_error is not None
    try:
        raise first_error
    finally:
        del first_error  # its traceback refers to this frame: the cycle would keep the bytes alive


def _lzw_row(data: Bytes, size: int) -> bytes:
    """Decode the first `size` bytes of a segment, wrapped as an in-memory TIFF of a single row."""
    tags = {
        Tag.IMAGE_WIDTH: size,
        Tag.IMAGE_LENGTH: 1,
        Tag.BITS_PER_SAMPLE: 8,
        Tag.COMPRESSION: COMPRESSION.LZW,
        Tag.PHOTOMETRIC: PHOTOMETRIC.MINISBLACK,
        Tag.STRIP_OFFSETS: TIFF_HEADER.size,
        Tag.SAMPLES_PER_PIXEL: 1,
        Tag.ROWS_PER_STRIP: 1,
        Tag.STRIP_BYTE_COUNTS: len(data),
    }
    entries = b"".join(TIFF_ENTRY.pack(tag, DATATYPE.LONG, 1, value) for tag, value in tags.items())
    header = TIFF_HEADER.pack(b"II*\0", TIFF_HEADER.size + len(data))
    count = struct.pack("<H", len(tags))
    file = b"".join((header, data, count, entries, bytes(4)))
    return imagecodecs.tiff_decode(file).tobytes()


def unpack_czi_zstd(data: Bytes, sizes: Sequence[int]) -> Bytes:
    """Decode Zeiss's zstd1: a header, which states whether samples are split into bytes, and zstd.

    The header starts with its length. If the length is 3, a chunk of type 1 with a flag follows: if
    it is set, the low bytes of all 16-bit samples precede the high bytes.
    """
    view = memoryview(data)
    length = view[0] if len(view) else 0
    if length not in (1, 3) or (length == 3 and view[1] != 1):
        raise ValueError("its zstd1 header is not supported")
    decoded = imagecodecs.zstd_decode(bytes(view[length:]), out=sizes[0])
    if length == 1 or not view[2] & 1:
        return decoded
    halves = np.frombuffer(decoded, np.uint8)
    if halves.size % 2:
        raise ValueError("its last sample is incomplete")
    return np.ascontiguousarray(halves.reshape(2, -1).T).data.cast("B")
