"""Decoding of JPEG 2000 tiles after their code streams are checked."""

from __future__ import annotations

import struct
import threading
from typing import TYPE_CHECKING

import imagecodecs
import numpy as np

from napari_wsigpu.model.tags import PHOTOMETRIC

if TYPE_CHECKING:
    from napari_wsigpu.codecs.byte_codecs import Data
    from napari_wsigpu.model.arrays import Array
    from napari_wsigpu.model.layout import Encoding

# A code stream starts with the markers SOC and SIZ, and a JP2 file with a signature box.
CODESTREAM, CODESTREAM_HEAD = b"\xff\x4f\xff\x51", 48
SIGNATURE_BOX = b"\0\0\0\x0cjP  "
# The markers COD, SOT and SOD, and the length of a SOT segment with its marker.
CODING, TILE_PART, DATA, TILE_PART_LENGTH = 0xFF52, 0xFF90, 0xFF93, 12
LONGEST_MAIN_HEADER = 1 << 16
LARGE = 1 << 20  # samples: starting threads for fewer would take too long

_local = threading.local()  # `threads`: see `use_threads`


def use_threads(count: int) -> None:
    """Let the calling thread decode large tiles with several threads from now on."""
    _local.threads = count


def decode_jpeg2000(data: Data, encoding: Encoding, plane: int, out: Array) -> None:
    """Decode a JPEG 2000 code stream or JP2 file; see `codecs.compressions.Decode`."""
    if out.dtype.kind == "f":
        raise ValueError("JPEG 2000 does not support floating-point samples")
    start = start_of(data)
    subsampled = _check_codestream(data[start : start + CODESTREAM_HEAD], out.shape)
    threads = getattr(_local, "threads", 1) if out.size >= LARGE else 1
    imagecodecs.jpeg2k_decode(data, numthreads=threads, out=out)
    if may_be_ycbcr(encoding) and not subsampled and not is_transformed(data[start:]):
        ycbcr_to_rgb(out, bits=(data[start + 42] & 127) + 1)


def may_be_ycbcr(encoding: Encoding) -> bool:
    """Whether decoded components are YCbCr unless the code stream `is_transformed`.

    `photometric` describes the actual samples, because the reader of the format has decided whether
    to trust the file's tags. Decoders on the CPU and the GPU must decide on a conversion with this
    function and `is_transformed` only.
    """
    return encoding.photometric == PHOTOMETRIC.YCBCR and encoding.samples == 3


def is_transformed(stream: Data) -> bool:
    """Whether a code stream uses the multiple component transform, so that it decodes to RGB.

    SGcod in the COD segment states this in its last parameter (ISO/IEC 15444-1, A.6.1). The COD
    segment of a tile part overrides the main header's. Metadata is not reliable: a DICOM
    instance with YBR_ICT may contain plain YCbCr, and one with RGB may use the transform.
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
    """Compare the size in a code stream's SIZ segment with the expected shape.

    OpenJPEG would allocate memory for whatever size the stream claims.

    Returns
    -------
    bool
        Whether the second component is subsampled; OpenJPEG then converts YCbCr to RGB itself.

    Raises
    ------
    ValueError
        If the stream is damaged, or has a different size.
    """
    head = bytes(data)
    if not head.startswith(CODESTREAM) or len(head) < CODESTREAM_HEAD:
        raise ValueError("it is not a JPEG 2000 code stream")
    right, lower, left, upper = struct.unpack_from(">4I", head, 8)
    (components,) = struct.unpack_from(">H", head, 40)
    found = (lower - upper, right - left, components)
    if found != shape:
        raise ValueError(f"its code stream has the shape {found} instead of {shape}")
    return components > 1 and head[46:48] != b"\x01\x01"


def start_of(data: memoryview) -> int:
    """Return the offset of the code stream: 0, or where the first ``jp2c`` box's content starts.

    Raises
    ------
    ValueError
        If a JP2 file has no such box.
    """
    offset = 0
    if bytes(data[: len(SIGNATURE_BOX)]) != SIGNATURE_BOX:
        return offset
    while (head := bytes(data[offset : offset + 16]))[4:8] != b"jp2c":
        length = int.from_bytes(head[:4], "big")
        if length == 1:
            length = int.from_bytes(head[8:], "big")
        if length < 8 or len(head) < 8:
            raise ValueError("it is not a JPEG 2000 code stream")
        offset += length
    return offset + (16 if head[:4] == b"\0\0\0\1" else 8)


def ycbcr_to_rgb(pixels: Array, bits: int = 8) -> None:
    """Convert full-range BT.601 YCbCr to RGB in place, with the rounding of libjpeg."""
    middle = 1 << (bits - 1)
    number = np.int32 if bits == 8 else np.int64
    y: Array = pixels[..., 0].astype(number)
    cb: Array = pixels[..., 1].astype(number) - middle
    cr: Array = pixels[..., 2].astype(number) - middle
    half = 1 << 15  # the factors are fixed-point numbers with 16 fractional bits
    red = y + ((91881 * cr + half) >> 16)
    green = y + ((-22554 * cb - 46802 * cr + half) >> 16)
    blue = y + ((116130 * cb + half) >> 16)
    for channel, values in enumerate((red, green, blue)):
        pixels[..., channel] = np.clip(values, 0, 2 * middle - 1)
