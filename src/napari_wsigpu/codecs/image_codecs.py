"""Image formats that imagecodecs decodes: WebP, JPEG-LS, RLE, JPEG XL, JPEG XR, PNG, BMP, LERC.

Each function is a `codecs.compressions.Decode`.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Literal

import imagecodecs
import numpy as np

from napari_wsigpu.codecs.jpeg import END_OF_IMAGE, header_length
from napari_wsigpu.codecs.jpeg2000 import may_be_ycbcr, ycbcr_to_rgb

# Function of imagecodecs for each value of the second number in the LercParameters tag.
LERC_WRAPPINGS = {1: "deflate_decode", 2: "zstd_decode"}
LERC_SIGNATURES = b"Lerc2 ", b"CntZImage "
RLE_HEADER = 64
PNG_SIGNATURE = 8  # bytes
MAX_JPEGXR_TAGS = 64
# Tags of JPEG XR (T.832, annex A.7): offsets and sizes of the image and of its alpha channel.
JPEGXR_OFFSETS, JPEGXR_SIZES = (0xBCC0, 0xBCC2), (0xBCC1, 0xBCC3)
TIFF_SHORT = 3
# Bytes of a value, by the number of its type.
JPEGXR_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8}

if TYPE_CHECKING:
    from collections.abc import Callable

    from napari_wsigpu.codecs.byte_codecs import Data
    from napari_wsigpu.model.arrays import Array
    from napari_wsigpu.model.layout import Encoding


def _decode_checked(decode: Callable[..., Array], data: Data, out: Array) -> None:
    """Decode an image whose header states the type of its samples, and check that type.

    Given an array of another type, imagecodecs would write floats as integers or vice versa, or
    leave a part of the array uninitialized. Given a buffer of bytes, as here, it returns an array
    of the type in the header.

    Raises
    ------
    ValueError
        If the size of the image, or the kind or size of its samples, differs from `out`.
    """
    found = decode(data, out=out.data.cast("B"))
    if found.shape[:2] != out.shape[:2] or found.size != out.size:
        raise ValueError(f"its image has the shape {found.shape}")
    kinds = {found.dtype.kind == "f", out.dtype.kind == "f"}
    if len(kinds) > 1 or found.dtype.itemsize != out.dtype.itemsize:
        raise ValueError(f"its samples are of type {found.dtype}")


def decode_webp(data: Data, encoding: Encoding, plane: int, out: Array) -> None:
    """Decode WebP."""
    imagecodecs.webp_decode(data, hasalpha=out.shape[2] == 4, out=out)


def decode_jpegls(data: Data, encoding: Encoding, plane: int, out: Array) -> None:
    """Decode JPEG-LS."""
    # Without an EOI marker, CharLS would loop forever. The bytes of the marker can't occur in scan
    # data (T.87, annex C.1).
    if bytes(data).find(END_OF_IMAGE, header_length(bytes(data))) < 0:
        raise ValueError("its JPEG-LS data is truncated")
    imagecodecs.jpegls_decode(data, out=out)


def decode_rle(data: Data, encoding: Encoding, plane: int, out: Array) -> None:
    """Decode DICOM's RLE (PS3.5, annex G), which has a segment for each byte of a pixel."""
    segments = int.from_bytes(bytes(data[:4]), "little")
    if len(data) < RLE_HEADER or segments != out.shape[2] * out.itemsize:
        raise ValueError(f"it has {segments} RLE segments")
    found = np.frombuffer(imagecodecs.dicomrle_decode(data, out.dtype, out=out.nbytes), out.dtype)
    height, width, samples = out.shape
    out[...] = found.reshape(samples, height, width).transpose(1, 2, 0)
    if may_be_ycbcr(encoding):
        ycbcr_to_rgb(out, bits=8 * out.itemsize)


def decode_jpegxl(data: Data, encoding: Encoding, plane: int, out: Array) -> None:
    """Decode JPEG XL."""
    _decode_checked(imagecodecs.jpegxl_decode, data, out)


def decode_jpegxr(data: Data, encoding: Encoding, plane: int, out: Array) -> None:
    """Decode JPEG XR."""
    if not _is_jpegxr(data):
        raise ValueError("its JPEG XR data is damaged or truncated")
    _decode_checked(imagecodecs.jpegxr_decode, data, out)


def _is_jpegxr(data: Data) -> bool:
    """Whether all offsets and sizes in a JPEG XR directory are valid, which jxrlib does not check.

    It decodes a truncated image without an error.
    """
    size = len(data)
    if size < 8 or bytes(data[:3]) != b"II\xbc":
        return False
    [directory] = struct.unpack_from("<I", data, 4)
    if not 8 <= directory <= size - 2:
        return False
    [count] = struct.unpack_from("<H", data, directory)
    if not 0 < count <= MAX_JPEGXR_TAGS or directory + 2 + 12 * count > size:
        return False
    values: dict[int, int] = {}
    for entry in range(directory + 2, directory + 2 + 12 * count, 12):
        tag, kind, length, value = struct.unpack_from("<HHII", data, entry)
        value_bytes = length * JPEGXR_BYTES.get(kind, size + 1)
        if value_bytes > 4 and not 0 < value <= size - value_bytes:
            return False
        values[tag] = value & 0xFFFF if kind == TIFF_SHORT else value
    return all(
        0 < values[start] < size and values[start] + values.get(length, 0) <= size
        for start, length in zip(JPEGXR_OFFSETS, JPEGXR_SIZES, strict=True)
        if start in values
    )


def decode_png(data: Data, encoding: Encoding, plane: int, out: Array) -> None:
    """Decode PNG."""
    _check_size(data[16:24], "big", out)
    _check_png(data)
    out[...] = _with_channels(imagecodecs.png_decode(data), out)


def _check_png(data: Data) -> None:
    """Check the chunks of a PNG: if one is damaged, libpng prints a line and leaks memory."""
    at, kind = PNG_SIGNATURE, b""
    while kind != b"IEND":
        size, kind = int.from_bytes(bytes(data[at : at + 4]), "big"), bytes(data[at + 4 : at + 8])
        end = at + 8 + size
        if end + 4 > len(data):
            raise ValueError("its PNG data is truncated")
        if zlib.crc32(data[at + 4 : end]) != int.from_bytes(bytes(data[end : end + 4]), "big"):
            raise ValueError("its PNG data is damaged")
        at = end + 4


def decode_bmp(data: Data, encoding: Encoding, plane: int, out: Array) -> None:
    """Decode BMP."""
    _check_size(data[18:26], "little", out)
    out[...] = _with_channels(imagecodecs.bmp_decode(bytes(data)), out)


def decode_lerc(data: Data, encoding: Encoding, plane: int, out: Array) -> None:
    """Decode LERC, which may be wrapped in deflate or zstd."""
    if encoding.lerc_wrapping:
        unwrap = getattr(imagecodecs, LERC_WRAPPINGS[encoding.lerc_wrapping])
        data = unwrap(data, out=2 * out.nbytes + 4096)
    if not bytes(data[:10]).startswith(LERC_SIGNATURES):
        # imagecodecs would take it for compressed LERC, and unpack it without a size limit.
        raise ValueError("it is not LERC")
    _decode_checked(imagecodecs.lerc_decode, data, out)


def _check_size(sides: Data, order: Literal["little", "big"], out: Array) -> None:
    """Check that a header's width and height match `out`, before memory is allocated."""
    width, height = (
        int.from_bytes(bytes(side), order, signed=True) for side in (sides[:4], sides[4:])
    )
    if (abs(height), width) != out.shape[:2]:
        raise ValueError(f"its image has {width} x {abs(height)} pixels")


def _with_channels(pixels: Array, out: Array) -> Array:
    """Return pixels with a channel axis, and without an alpha channel that `out` lacks."""
    if pixels.dtype != out.dtype:
        raise ValueError(f"its samples are of type {pixels.dtype}")
    if pixels.ndim == 2:
        return pixels[..., None]
    has_alpha = pixels.shape[2] in (2, 4)
    if pixels.shape[2] - has_alpha != out.shape[2] != pixels.shape[2]:
        raise ValueError(f"its image has {pixels.shape[2]} samples per pixel")
    return pixels[..., : out.shape[2]]
