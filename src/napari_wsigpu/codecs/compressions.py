"""The supported values of the Compression tag, with their names and decoders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from napari_wsigpu.codecs import image_codecs
from napari_wsigpu.codecs.byte_codecs import unpack_czi_zstd, unpack_lzw, unpack_none, unpack_with
from napari_wsigpu.codecs.jpeg2000 import decode_jpeg2000
from napari_wsigpu.codecs.jpeg_tiles import decode_jpeg
from napari_wsigpu.model import tags
from napari_wsigpu.model.tags import COMPRESSION, JPEG_2000

if TYPE_CHECKING:
    from napari_wsigpu.codecs.byte_codecs import Bytes, Data
    from napari_wsigpu.model.arrays import Array
    from napari_wsigpu.model.layout import Encoding, LevelLayout

# Function that decodes an image, given its data, its encoding, the index of its plane, and an array
# of shape (height, width, samples) for the pixels. If the image has a different size, the function
# raises RuntimeError or ValueError before it allocates memory.
Decode = Callable[["Data", "Encoding", int, "Array"], None]
# Function that decompresses bytes, given the possible sizes of the result, the largest first.
Unpack = Callable[["Bytes", Sequence[int]], "Bytes"]


class ImageCompression(NamedTuple):
    """A compression that encodes whole images: its name, tag values and decoder.

    `function` is the name of the imagecodecs function that `decode` uses.
    """

    name: str
    codes: tuple[int, ...]
    decode: Decode
    function: str


class ByteCompression(NamedTuple):
    """A compression of the samples' bytes; `unpack` uses imagecodecs' `function`, if any.

    If `in_place`, the function alone can decompress into given memory.
    """

    name: str
    codes: tuple[int, ...]
    unpack: Unpack
    function: str | None
    in_place: bool = False


def _unpacked_by(name: str, codes: tuple[int, ...], function: str) -> ByteCompression:
    return ByteCompression(name, codes, unpack_with(function), function, in_place=True)


COMPRESSIONS: tuple[ImageCompression | ByteCompression, ...] = (
    ByteCompression("none", (COMPRESSION.NONE,), unpack_none, None),
    ImageCompression("JPEG", (COMPRESSION.JPEG,), decode_jpeg, "jpeg8_decode"),
    *(
        ImageCompression(f"JPEG 2000{kind}", (code,), decode_jpeg2000, "jpeg2k_decode")
        for code, kind in zip(JPEG_2000, ("", " (YCbCr)", " (lossy)", " (RGB)"), strict=True)
    ),
    ImageCompression("HTJ2K", (tags.HTJ2K,), decode_jpeg2000, "jpeg2k_decode"),
    ByteCompression("LZW", (COMPRESSION.LZW,), unpack_lzw, "tiff_decode"),
    _unpacked_by("deflate", tags.DEFLATE, "deflate_decode"),
    _unpacked_by("zstd", tags.ZSTD, "zstd_decode"),
    ByteCompression("zstd1", (tags.CZI_ZSTD,), unpack_czi_zstd, "zstd_decode"),
    _unpacked_by("PackBits", (COMPRESSION.PACKBITS,), "packbits_decode"),
    _unpacked_by("LZMA", (COMPRESSION.LZMA,), "lzma_decode"),
    ImageCompression("WebP", tags.WEBP, image_codecs.decode_webp, "webp_decode"),
    ImageCompression("JPEG-LS", (tags.JPEG_LS,), image_codecs.decode_jpegls, "jpegls_decode"),
    ImageCompression("RLE", (tags.DICOM_RLE,), image_codecs.decode_rle, "dicomrle_decode"),
    ImageCompression("JPEG XL", tags.JPEG_XL, image_codecs.decode_jpegxl, "jpegxl_decode"),
    ImageCompression("JPEG XR", tags.JPEG_XR, image_codecs.decode_jpegxr, "jpegxr_decode"),
    ImageCompression("PNG", (COMPRESSION.PNG,), image_codecs.decode_png, "png_decode"),
    ImageCompression("BMP", (tags.BMP,), image_codecs.decode_bmp, "bmp_decode"),
    ImageCompression("LERC", (COMPRESSION.LERC,), image_codecs.decode_lerc, "lerc_decode"),
)
BY_CODE = {code: entry for entry in COMPRESSIONS for code in entry.codes}


def is_of_images(code: int) -> bool:
    """Whether a code is a compression of whole images, which state their bits per sample."""
    return isinstance(BY_CODE.get(code), ImageCompression)


def storage_name(level: LevelLayout) -> str:
    """Return the name of the compression, library or format that stores a level's tiles."""
    if level.array is not None:
        return "Zarr"
    if level.library is not None:
        return level.library.name
    return compression_name(level.encoding.compression)


def compression_name(code: int) -> str:
    """Return a name for a value of the Compression tag."""
    if code in BY_CODE:
        return BY_CODE[code].name
    try:
        return COMPRESSION(code).name
    except ValueError:
        return f"unknown ({code})"
