"""LZW by libtiff.

imagecodecs' own LZW decoder ends the whole process on some damaged streams (a code that is no
literal after a clear code reads memory at random). libtiff checks every code, and is faster.
"""

from __future__ import annotations

import struct
from typing import Any

import imagecodecs

HEADER = struct.Struct("<4sI")
TAG = struct.Struct("<HHII")
LONG = 4


def lzw_decode(data: Any, out: int) -> bytes:
    """Decode one LZW segment.

    Parameters
    ----------
    data : buffer
        The segment.
    out : int
        Number of bytes that it decodes to.

    Raises
    ------
    RuntimeError
        If the segment is damaged or holds fewer bytes.
    """
    tags = {
        256: out,  # ImageWidth
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
