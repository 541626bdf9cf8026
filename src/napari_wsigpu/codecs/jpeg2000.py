"""JPEG 2000 tiles, whose code streams are checked before they are decoded."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import imagecodecs
import numpy as np

from napari_wsigpu.model.tags import COMPRESSION

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from napari_wsigpu.model.layout import Encoding

CODESTREAM, CODESTREAM_HEAD = b"\xff\x4f\xff\x51", 48
BOXES = b"\0\0\0\x0cjP  "


def decode_jpeg2000(data: Any, encoding: Encoding, plane: int, out: NDArray[Any]) -> None:
    """Decode a JPEG 2000 code stream; see `codecs.table.Decode`."""
    if out.dtype.kind == "f":
        raise ValueError("JPEG 2000 holds no floating point numbers")
    subsampled = _check_codestream(data, out.shape)
    imagecodecs.jpeg2k_decode(data, out=out)
    ycbcr = encoding.compression == COMPRESSION.APERIO_JP2000_YCBC and out.shape[2] == 3
    if ycbcr and not subsampled:
        ycbcr_to_rgb(out)


def _check_codestream(data: memoryview, shape: tuple[int, ...]) -> bool:
    """Compare a JPEG 2000 code stream's own sizes with those wanted, before it is decoded.

    OpenJPEG would decode the whole of a stream that claims to be huge.

    Returns
    -------
    bool
        Whether the second component is subsampled; OpenJPEG then makes RGB of YCbCr itself.

    Raises
    ------
    ValueError
        If the stream is damaged or of another size.
    """
    start = _start(data)
    head = bytes(data[start : start + CODESTREAM_HEAD])
    if not head.startswith(CODESTREAM) or len(head) < CODESTREAM_HEAD:
        raise ValueError("it is no JPEG 2000 code stream")
    right, lower, left, upper = struct.unpack_from(">4I", head, 8)
    (components,) = struct.unpack_from(">H", head, 40)
    found = (lower - upper, right - left, components)
    if found != shape:
        raise ValueError(f"its code stream says {found} pixels instead of {shape}")
    return components > 1 and head[46:48] != b"\x01\x01"


def _start(data: memoryview) -> int:
    """Return where the code stream lies that is decoded: the first one in a box of its kind."""
    offset = 0
    if bytes(data[: len(BOXES)]) != BOXES:
        return offset
    while (head := bytes(data[offset : offset + 16]))[4:8] != b"jp2c":
        length = int.from_bytes(head[:4], "big")
        if length == 1:
            length = int.from_bytes(head[8:], "big")
        if length < 8 or len(head) < 8:
            raise ValueError("it is no JPEG 2000 code stream")
        offset += length
    return offset + (16 if head[:4] == b"\0\0\0\1" else 8)


def ycbcr_to_rgb(pixels: NDArray[Any]) -> None:
    """Convert full-range BT.601 YCbCr to RGB in place, rounded as libjpeg does."""
    y = pixels[..., 0].astype(np.int32)
    cb = pixels[..., 1].astype(np.int32) - 128
    cr = pixels[..., 2].astype(np.int32) - 128
    half = 1 << 15
    red = y + ((91881 * cr + half) >> 16)
    green = y + ((-22554 * cb - 46802 * cr + half) >> 16)
    blue = y + ((116130 * cb + half) >> 16)
    for channel, values in enumerate((red, green, blue)):
        pixels[..., channel] = np.clip(values, 0, 255)
