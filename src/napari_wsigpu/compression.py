"""TIFF compressions by the names that people know."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tifffile import COMPRESSION

if TYPE_CHECKING:
    from napari_wsigpu.layout import LevelLayout

NAMES = {
    1: "none",
    5: "LZW",
    7: "JPEG",
    8: "deflate",
    22610: "JPEG XR",
    32773: "PackBits",
    32946: "deflate",
    33003: "JPEG 2000 (YCbCr)",
    33004: "JPEG 2000 (lossless)",
    33005: "JPEG 2000 (RGB)",
    34712: "JPEG 2000",
    34887: "LERC",
    34925: "LZMA",
    34926: "zstd",
    34927: "WebP",
    34934: "JPEG XR",
    50000: "zstd",
    50001: "WebP",
    50002: "JPEG XL",
    52546: "JPEG XL",
}


def storage_name(level: LevelLayout) -> str:
    """Return a name for how a level's tiles are stored."""
    if level.array is not None:
        return "Zarr"
    return compression_name(level.encoding.compression)


def compression_name(code: int) -> str:
    """Return a name for the value of the Compression tag."""
    if code in NAMES:
        return NAMES[code]
    try:
        return COMPRESSION(code).name
    except ValueError:
        return f"unknown ({code})"
