"""LZW by libtiff.

imagecodecs' own LZW decoder ends the whole process on some damaged streams (a code that is no
literal after a clear code reads memory at random). libtiff checks every code, and is faster.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import imagecodecs

if TYPE_CHECKING:
    from collections.abc import Sequence

HEADER = struct.Struct("<4sI")
TAG = struct.Struct("<HHII")
LONG = 4


def lzw_decode(data: Any, sizes: Sequence[int]) -> bytes:
    """Decode one LZW segment.

    Parameters
    ----------
    data : buffer
        The segment.
    sizes : sequence of int
        Numbers of bytes that it may decode to, the largest first; what lies beyond the
        largest is left out.

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
        if size == sizes[0] or not _holds(data, size + 1):
            return segment
    assert first_error is not None
    raise first_error


def _holds(data: Any, size: int) -> bool:
    try:
        _decode(data, size)
    except RuntimeError:
        return False
    return True


def _decode(data: Any, size: int) -> bytes:
    """Decode the first `size` bytes, as the one row of a TIFF picture in memory."""
    tags = {
        256: size,  # ImageWidth
        257: 1,  # ImageLength
        258: 8,  # BitsPerSample
        259: 5,  # Compression: LZW
        262: 1,  # PhotometricInterpretation: as it is
        273: HEADER.size,  # StripOffsets
        277: 1,  # SamplesPerPixel
        278: 1,  # RowsPerStrip
        279: len(data),  # StripByteCounts
    }
    directory = b"".join(TAG.pack(tag, LONG, 1, value) for tag, value in tags.items())
    header = HEADER.pack(b"II*\0", HEADER.size + len(data))
    count = struct.pack("<H", len(tags))
    picture = b"".join((header, data, count, directory, bytes(4)))
    return imagecodecs.tiff_decode(picture).tobytes()
