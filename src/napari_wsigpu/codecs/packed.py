"""Samples compressed as mere bytes, of which imagecodecs decodes as many as a tile has."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import imagecodecs
import numpy as np

from napari_wsigpu.model.tags import COMPRESSION, DATATYPE, PHOTOMETRIC, Tag

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Bytes = bytes | bytearray | memoryview


MOST_BEHIND = 64 << 10
TIFF_HEADER = struct.Struct("<4sI")
TIFF_ENTRY = struct.Struct("<HHII")


def unpack_none(data: Bytes, sizes: Sequence[int]) -> Bytes:
    """Return uncompressed bytes without what lies behind the tile's; see `codecs.table.Unpack`."""
    return memoryview(data)[: sizes[0]]


def _unpack_by(name: str) -> Callable[[Bytes, Sequence[int]], Bytes]:
    def unpack(data: Bytes, sizes: Sequence[int]) -> Bytes:
        decode: Callable[..., bytes] = getattr(imagecodecs, name)  # loads a library
        try:
            return decode(data, out=sizes[0])
        except RuntimeError:
            # Most codecs refuse what does not fit; there may be some bytes that are no pixels.
            return memoryview(decode(data, out=sizes[0] + MOST_BEHIND))[: sizes[0]]

    return unpack


unpack_deflate = _unpack_by("deflate_decode")
unpack_lzma = _unpack_by("lzma_decode")
unpack_packbits = _unpack_by("packbits_decode")
unpack_zstd = _unpack_by("zstd_decode")


def unpack_lzw(data: Bytes, sizes: Sequence[int]) -> bytes:
    """Decode one LZW segment by libtiff.

    imagecodecs' own LZW decoder ends the whole process on some damaged streams (a code that is no
    literal after a clear code reads memory at random). libtiff checks every code, and is faster.

    Parameters
    ----------
    data : buffer
        The segment.
    sizes : sequence of int
        Numbers of bytes that it may decode to, the largest first; what lies beyond the
        largest is left out.

    Returns
    -------
    bytes
        As many as one of these sizes, or one more if there are more.

    Raises
    ------
    RuntimeError
        If the segment is damaged or of another size.
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
        del first_error  # an error that its own traceback leads to would keep a batch's pixels


def _lzw_row(data: Bytes, size: int) -> bytes:
    """Decode the first `size` bytes, as the one row of a TIFF picture in memory."""
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
    directory = b"".join(
        TIFF_ENTRY.pack(tag, DATATYPE.LONG, 1, value) for tag, value in tags.items()
    )
    header = TIFF_HEADER.pack(b"II*\0", TIFF_HEADER.size + len(data))
    count = struct.pack("<H", len(tags))
    picture = b"".join((header, data, count, directory, bytes(4)))
    return imagecodecs.tiff_decode(picture).tobytes()


def unpack_czi_zstd(data: Bytes, sizes: Sequence[int]) -> Bytes:
    """Decode what Zeiss calls zstd1: a header, which says whether bytes of samples lie apart."""
    view = memoryview(data)
    length = view[0] if len(view) else 0
    # The header's length, and the number of what precedes a flag.
    if length not in (1, 3) or (length == 3 and view[1] != 1):
        raise ValueError("its header is of a kind that is not known")
    found = imagecodecs.zstd_decode(bytes(view[length:]), out=sizes[0])
    if length == 1 or not view[2] & 1:
        return found
    halves = np.frombuffer(found, np.uint8)
    if halves.size % 2:
        raise ValueError("it holds half a sample")
    return np.ascontiguousarray(halves.reshape(2, -1).T).data.cast("B")
