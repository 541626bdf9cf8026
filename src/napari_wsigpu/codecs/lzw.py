"""LZW by libtiff.

imagecodecs' own LZW decoder ends the whole process on some damaged streams (a code that is no
literal after a clear code reads memory at random). libtiff checks every code, and is faster.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import imagecodecs

from napari_wsigpu.model.tags import COMPRESSION, DATATYPE, PHOTOMETRIC, Tag

if TYPE_CHECKING:
    from collections.abc import Sequence

HEADER = struct.Struct("<4sI")
ENTRY = struct.Struct("<HHII")


def lzw_decode(data: Any, sizes: Sequence[int]) -> bytes:
    """Decode one LZW segment.

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
            segment = _decode(data, size)
        except RuntimeError as error:
            first_error = first_error or error
            continue
        if size == sizes[0]:
            return segment
        try:
            return _decode(data, size + 1)
        except RuntimeError:
            return segment
    assert first_error is not None
    try:
        raise first_error
    finally:
        del first_error  # an error that its own traceback leads to would keep a batch's pixels


def _decode(data: Any, size: int) -> bytes:
    """Decode the first `size` bytes, as the one row of a TIFF picture in memory."""
    tags = {
        Tag.IMAGE_WIDTH: size,
        Tag.IMAGE_LENGTH: 1,
        Tag.BITS_PER_SAMPLE: 8,
        Tag.COMPRESSION: COMPRESSION.LZW,
        Tag.PHOTOMETRIC: PHOTOMETRIC.MINISBLACK,
        Tag.STRIP_OFFSETS: HEADER.size,
        Tag.SAMPLES_PER_PIXEL: 1,
        Tag.ROWS_PER_STRIP: 1,
        Tag.STRIP_BYTE_COUNTS: len(data),
    }
    directory = b"".join(ENTRY.pack(tag, DATATYPE.LONG, 1, value) for tag, value in tags.items())
    header = HEADER.pack(b"II*\0", HEADER.size + len(data))
    count = struct.pack("<H", len(tags))
    picture = b"".join((header, data, count, directory, bytes(4)))
    return imagecodecs.tiff_decode(picture).tobytes()
