"""JPEG 2000 tiles, whose code streams are checked before they are decoded."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import imagecodecs
import numpy as np

from napari_wsigpu.model.tags import PHOTOMETRIC

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from napari_wsigpu.model.layout import Encoding

CODESTREAM, CODESTREAM_HEAD = b"\xff\x4f\xff\x51", 48
BOXES = b"\0\0\0\x0cjP  "
CODING, TILE_PART, DATA, TILE_PART_LENGTH = 0xFF52, 0xFF90, 0xFF93, 12
LONGEST_MAIN_HEADER = 1 << 16


def decode_jpeg2000(data: Any, encoding: Encoding, plane: int, out: NDArray[Any]) -> None:
    """Decode a JPEG 2000 code stream; see `codecs.table.Decode`."""
    if out.dtype.kind == "f":
        raise ValueError("JPEG 2000 holds no floating point numbers")
    start = _start(data)
    subsampled = _check_codestream(data[start : start + CODESTREAM_HEAD], out.shape)
    imagecodecs.jpeg2k_decode(data, out=out)
    if may_be_ycbcr(encoding) and not subsampled and not is_transformed(data[start:]):
        ycbcr_to_rgb(out, bits=(data[start + 42] & 127) + 1)


def may_be_ycbcr(encoding: Encoding) -> bool:
    """Whether decoded components are YCbCr unless a code stream `is_transformed`.

    The formats decide what a file's tags are worth: `photometric` of an encoding is that of the
    samples. CPU and GPU convert by this function and that one, and by nothing else.
    """
    return encoding.photometric == PHOTOMETRIC.YCBCR and encoding.samples == 3


def is_transformed(stream: Any) -> bool:
    """Whether a code stream has a component transform, so that it decodes to RGB.

    That is the last parameter of SGcod in the COD segment (ISO/IEC 15444-1, A.6.1), of which a
    tile part may have one that overrides that of the main header. Files contradict it: a DICOM
    instance of YBR_ICT may hold plain YCbCr, and one of RGB a transform.
    """
    head = bytes(stream[:LONGEST_MAIN_HEADER])
    at, found = 2, False
    while at + 12 <= len(head):
        marker, length = struct.unpack_from(">HH", head, at)
        if marker == DATA:
            break
        if marker == CODING:
            found = head[at + 8] == 1
        at += TILE_PART_LENGTH if marker == TILE_PART else 2 + length
    return found


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
    head = bytes(data)
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


def ycbcr_to_rgb(pixels: NDArray[Any], bits: int = 8) -> None:
    """Convert full-range BT.601 YCbCr of that many bits to RGB in place, rounded as by libjpeg."""
    middle = 1 << (bits - 1)
    number: type[np.signedinteger[Any]] = np.int32 if bits == 8 else np.int64
    y = pixels[..., 0].astype(number)
    cb = pixels[..., 1].astype(number) - middle
    cr = pixels[..., 2].astype(number) - middle
    half = 1 << 15
    red = y + ((91881 * cr + half) >> 16)
    green = y + ((-22554 * cb - 46802 * cr + half) >> 16)
    blue = y + ((116130 * cb + half) >> 16)
    for channel, values in enumerate((red, green, blue)):
        pixels[..., channel] = np.clip(values, 0, 2 * middle - 1)
