"""Codes of TIFF tags and of their values: tifffile's enums, synonyms, and tags it does not name."""

from __future__ import annotations

from enum import IntEnum

from tifffile import COMPRESSION as COMPRESSION
from tifffile import DATATYPE as DATATYPE
from tifffile import FILETYPE as FILETYPE
from tifffile import FILLORDER as FILLORDER
from tifffile import PHOTOMETRIC as PHOTOMETRIC
from tifffile import PLANARCONFIG as PLANARCONFIG
from tifffile import PREDICTOR as PREDICTOR
from tifffile import RESUNIT as RESUNIT

# First bytes of a file: TIFF and BigTIFF, little-endian and big-endian.
TIFF_MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
# Private codes beyond TIFF's 16 bits, for tiles of other file formats.
BMP = 0x10001
CZI_ZSTD = 0x10002
JPEG_LS = 0x10003
DICOM_RLE = 0x10004
HTJ2K = 0x10005
# Codes with the same meaning. Writers use the first one.
DEFLATE = COMPRESSION.ADOBE_DEFLATE, COMPRESSION.DEFLATE
JPEG_2000 = (
    COMPRESSION.JPEG2000,
    COMPRESSION.APERIO_JP2000_YCBC,
    COMPRESSION.JPEG_2000_LOSSY,
    COMPRESSION.APERIO_JP2000_RGB,
)
# All whose code streams are JPEG 2000's.
WAVELET = (*JPEG_2000, HTJ2K)
JPEG_XL = COMPRESSION.JPEGXL, COMPRESSION.JPEGXL_DNG
JPEG_XR = COMPRESSION.JPEGXR, COMPRESSION.JPEGXR_NDPI
WEBP = COMPRESSION.WEBP, COMPRESSION.WEBP_DEPRECATED
ZSTD = COMPRESSION.ZSTD, COMPRESSION.ZSTD_DEPRECATED


class Tag(IntEnum):
    """Codes of the baseline and common tags. Vendors' own tags are defined in their modules."""

    IMAGE_WIDTH = 256
    IMAGE_LENGTH = 257
    BITS_PER_SAMPLE = 258
    COMPRESSION = 259
    PHOTOMETRIC = 262
    DOCUMENT_NAME = 269
    DESCRIPTION = 270
    MAKE = 271
    MODEL = 272
    STRIP_OFFSETS = 273
    ORIENTATION = 274
    SAMPLES_PER_PIXEL = 277
    ROWS_PER_STRIP = 278
    STRIP_BYTE_COUNTS = 279
    X_RESOLUTION = 282
    Y_RESOLUTION = 283
    PAGE_NAME = 285
    X_POSITION = 286
    Y_POSITION = 287
    RESOLUTION_UNIT = 296
    SOFTWARE = 305
    DATE_TIME = 306
    ARTIST = 315
    HOST_COMPUTER = 316
    TILE_OFFSETS = 324
    TILE_BYTE_COUNTS = 325
    SUB_IFDS = 330
    XML_PACKET = 700
    COPYRIGHT = 33432
    ICC_PROFILE = 34675
    NO_DATA = 42113
    LERC_PARAMETERS = 50674
