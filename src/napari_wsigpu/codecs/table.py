"""The compressions of TIFF: their codes, what people call them, and what decodes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from napari_wsigpu.codecs.images import (
    decode_bmp,
    decode_jpegls,
    decode_jpegxl,
    decode_jpegxr,
    decode_lerc,
    decode_png,
    decode_webp,
)
from napari_wsigpu.codecs.jpeg2000 import decode_jpeg2000
from napari_wsigpu.codecs.jpeg_tiles import decode_jpeg
from napari_wsigpu.codecs.packed import (
    unpack_czi_zstd,
    unpack_deflate,
    unpack_lzma,
    unpack_lzw,
    unpack_none,
    unpack_packbits,
    unpack_zstd,
)
from napari_wsigpu.model.tags import (
    BMP,
    COMPRESSION,
    CZI_ZSTD,
    DEFLATE,
    JPEG_2000,
    JPEG_LS,
    JPEG_XL,
    JPEG_XR,
    WEBP,
    ZSTD,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from napari_wsigpu.codecs.packed import Bytes
    from napari_wsigpu.model.layout import Encoding, LevelLayout

# Decodes a picture: its data, its encoding, which plane of the tile it is, and an array, shape
# (height, width, samples), to decode into. It raises RuntimeError or ValueError, before it
# allocates anything, if the data say another size.
Decode = Callable[[Any, "Encoding", int, "NDArray[Any]"], None]
# Decodes bytes to as many as one of some sizes, the largest of which comes first.
Unpack = Callable[["Bytes", Sequence[int]], "Bytes"]


class ImageCompression(NamedTuple):
    """A compression of pictures: its name for people, its codes, and what makes pixels of it.

    `function` is that of imagecodecs by which `decode` does.
    """

    name: str
    codes: tuple[int, ...]
    decode: Decode
    function: str


class ByteCompression(NamedTuple):
    """A compression of the bytes of samples; `unpack` gives them back by a `function`, if any."""

    name: str
    codes: tuple[int, ...]
    unpack: Unpack
    function: str | None


COMPRESSIONS: tuple[ImageCompression | ByteCompression, ...] = (
    ByteCompression("none", (COMPRESSION.NONE,), unpack_none, None),
    ImageCompression("JPEG", (COMPRESSION.JPEG,), decode_jpeg, "jpeg8_decode"),
    *(
        ImageCompression(f"JPEG 2000{kind}", (code,), decode_jpeg2000, "jpeg2k_decode")
        for code, kind in zip(JPEG_2000, ("", " (YCbCr)", " (lossless)", " (RGB)"), strict=True)
    ),
    ByteCompression("LZW", (COMPRESSION.LZW,), unpack_lzw, "tiff_decode"),
    ByteCompression("deflate", DEFLATE, unpack_deflate, "deflate_decode"),
    ByteCompression("zstd", ZSTD, unpack_zstd, "zstd_decode"),
    ByteCompression("zstd1", (CZI_ZSTD,), unpack_czi_zstd, "zstd_decode"),
    ByteCompression("PackBits", (COMPRESSION.PACKBITS,), unpack_packbits, "packbits_decode"),
    ByteCompression("LZMA", (COMPRESSION.LZMA,), unpack_lzma, "lzma_decode"),
    ImageCompression("WebP", WEBP, decode_webp, "webp_decode"),
    ImageCompression("JPEG-LS", (JPEG_LS,), decode_jpegls, "jpegls_decode"),
    ImageCompression("JPEG XL", JPEG_XL, decode_jpegxl, "jpegxl_decode"),
    ImageCompression("JPEG XR", JPEG_XR, decode_jpegxr, "jpegxr_decode"),
    ImageCompression("PNG", (COMPRESSION.PNG,), decode_png, "png_decode"),
    ImageCompression("BMP", (BMP,), decode_bmp, "bmp_decode"),
    ImageCompression("LERC", (COMPRESSION.LERC,), decode_lerc, "lerc_decode"),
)
BY_CODE = {code: entry for entry in COMPRESSIONS for code in entry.codes}


def is_of_images(code: int) -> bool:
    """Whether a compression is one of pictures that is known; these say how many bits they have."""
    return isinstance(BY_CODE.get(code), ImageCompression)


def storage_name(level: LevelLayout) -> str:
    """Return a name for how a level's tiles are stored."""
    if level.array is not None:
        return "Zarr"
    if level.library is not None:
        return level.library.name
    return compression_name(level.encoding.compression)


def compression_name(code: int) -> str:
    """Return a name for the value of the Compression tag."""
    if code in BY_CODE:
        return BY_CODE[code].name
    try:
        return COMPRESSION(code).name
    except ValueError:
        return f"unknown ({code})"
