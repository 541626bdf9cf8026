"""Pictures of which imagecodecs decodes all: WebP, JPEG-LS, JPEG XL, JPEG XR, PNG, BMP, LERC.

See `codecs.table.Decode`.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Literal

import imagecodecs

from napari_wsigpu.codecs.jpeg import END_OF_IMAGE, header_length

# By the second of the tag's LERC parameters, names of decoders, each of which is a library.
LERC_WRAPPINGS = {1: "deflate_decode", 2: "zstd_decode"}
LERC_BEGINNINGS = b"Lerc2 ", b"CntZImage "
MOST_JPEGXR_TAGS, JPEGXR_IMAGE = 64, 0xBCC0
# How many bytes a value has, by the number of its type.
JPEGXR_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8}

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from napari_wsigpu.model.layout import Encoding


def decode_of_type(decode: Callable[..., NDArray[Any]], data: Any, out: NDArray[Any]) -> None:
    """Decode a picture that says itself of what type its samples are.

    Into an array, imagecodecs would write floats as if they were whole numbers, and the reverse;
    of larger samples it would write a part, and leave what was in memory in the others.

    Raises
    ------
    ValueError
        If it is of another size, or its samples are of another kind or size.
    """
    found = decode(data, out=out.data.cast("B"))
    if found.shape[:2] != out.shape[:2] or found.size != out.size:
        raise ValueError(f"it is a picture of shape {found.shape}")
    kinds = {found.dtype.kind == "f", out.dtype.kind == "f"}
    if len(kinds) > 1 or found.dtype.itemsize != out.dtype.itemsize:
        raise ValueError(f"it is a picture of {found.dtype}")


def decode_webp(data: Any, encoding: Encoding, plane: int, out: NDArray[Any]) -> None:
    """Decode WebP."""
    imagecodecs.webp_decode(data, hasalpha=out.shape[2] == 4, out=out)


def decode_jpegls(data: Any, encoding: Encoding, plane: int, out: NDArray[Any]) -> None:
    """Decode JPEG-LS."""
    # CharLS would look for more bits for ever. Within a scan no marker has this value, T.87 C.1.
    if bytes(data).find(END_OF_IMAGE, header_length(bytes(data))) < 0:
        raise ValueError("its JPEG-LS data end early")
    imagecodecs.jpegls_decode(data, out=out)


def decode_jpegxl(data: Any, encoding: Encoding, plane: int, out: NDArray[Any]) -> None:
    """Decode JPEG XL."""
    decode_of_type(imagecodecs.jpegxl_decode, data, out)


def decode_jpegxr(data: Any, encoding: Encoding, plane: int, out: NDArray[Any]) -> None:
    """Decode JPEG XR."""
    if not _is_jpegxr(data):
        raise ValueError("its JPEG XR data are damaged")
    decode_of_type(imagecodecs.jpegxr_decode, data, out)


def _is_jpegxr(data: Any) -> bool:
    """Whether all that a file's directory points to lies in it: jxrlib would read what does not."""
    size = len(data)
    if size < 8 or bytes(data[:3]) != b"II\xbc":
        return False
    [begin] = struct.unpack_from("<I", data, 4)
    if not 8 <= begin <= size - 2:
        return False
    [count] = struct.unpack_from("<H", data, begin)
    if not 0 < count <= MOST_JPEGXR_TAGS or begin + 2 + 12 * count > size:
        return False
    for place in range(begin + 2, begin + 2 + 12 * count, 12):
        tag, kind, length, value = struct.unpack_from("<HHII", data, place)
        room = length * JPEGXR_BYTES.get(kind, size + 1)
        if room > 4 and not 0 < value <= size - room:
            return False
        if tag == JPEGXR_IMAGE and not 0 < value < size:
            return False
    return True


def decode_png(data: Any, encoding: Encoding, plane: int, out: NDArray[Any]) -> None:
    """Decode PNG."""
    _check_size(data[16:24], "big", out)
    out[...] = _with_channels(imagecodecs.png_decode(data), out)


def decode_bmp(data: Any, encoding: Encoding, plane: int, out: NDArray[Any]) -> None:
    """Decode BMP."""
    _check_size(data[18:26], "little", out)
    out[...] = _with_channels(imagecodecs.bmp_decode(bytes(data)), out)


def decode_lerc(data: Any, encoding: Encoding, plane: int, out: NDArray[Any]) -> None:
    """Decode LERC, which may be compressed once more."""
    if encoding.lerc_wrapping:
        unwrap = getattr(imagecodecs, LERC_WRAPPINGS[encoding.lerc_wrapping])
        data = unwrap(data, out=2 * out.nbytes + 4096)
    if not bytes(data[:10]).startswith(LERC_BEGINNINGS):
        # imagecodecs would take it for compressed once more, and inflate it to whatever it holds.
        raise ValueError("it is no LERC")
    decode_of_type(imagecodecs.lerc_decode, data, out)


def _check_size(sides: Any, order: Literal["little", "big"], out: NDArray[Any]) -> None:
    """Refuse a header of another width and height before anything is allocated."""
    width, height = (
        int.from_bytes(bytes(side), order, signed=True) for side in (sides[:4], sides[4:])
    )
    if (abs(height), width) != out.shape[:2]:
        raise ValueError(f"it is a picture of {width} x {abs(height)} pixels")


def _with_channels(pixels: NDArray[Any], out: NDArray[Any]) -> NDArray[Any]:
    """Give a gray picture a channel; leave out the opacity."""
    if pixels.dtype != out.dtype:
        raise ValueError(f"it is a picture of {pixels.dtype}")
    if pixels.ndim == 2:
        return pixels[..., None]
    has_alpha = pixels.shape[2] in (2, 4)
    if pixels.shape[2] - has_alpha != out.shape[2] != pixels.shape[2]:
        raise ValueError(f"it is a picture of {pixels.shape[2]} samples a pixel")
    return pixels[..., : out.shape[2]]
