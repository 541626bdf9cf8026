"""Regions as PNG files: one level, all pixels exact, with their scale and colour profile."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Any

import imagecodecs
import numpy as np

from napari_wsigpu.codecs.color import LARGEST_PROFILE, profile_size
from napari_wsigpu.errors import RegionError, UnsupportedSlideError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from napari_wsigpu.codecs.color import Color
    from napari_wsigpu.slide import Slide

MOST_PIXELS = 1 << 27
LONGEST_SIDE = 1_000_000  # of what libpng reads
TYPES = (np.uint8, np.uint16)
WHITE_IS_ZERO = 0
HEADER = 33  # bytes: signature and IHDR
LARGEST_NUMBER = (1 << 31) - 1
METRE = 1
RELATIVE_COLORIMETRIC = 1


def check_png(slide: Slide, size: tuple[int, int]) -> None:
    """Check that a PNG file can hold a region of a slide.

    Parameters
    ----------
    slide : Slide
        The slide.
    size : tuple of int
        (width, height) of the region in pixels of its level.

    Raises
    ------
    UnsupportedSlideError
        If it can't hold such pixels.
    RegionError
        If the region is too large for programs that read PNG.
    """
    image = slide.layout.levels[0]
    if image.channels > 1 and not slide.layout.rgb:
        raise UnsupportedSlideError(
            f"A PNG file holds RGB or one channel, and '{slide.path}' has {image.channels} "
            "channels; choose OME-TIFF or OME-Zarr."
        )
    if image.dtype not in TYPES:
        raise UnsupportedSlideError(
            f"A PNG file can't hold pixels of type {image.dtype}, as '{slide.path}' has; choose "
            "OME-TIFF or OME-Zarr."
        )
    width, height = size
    if width * height > MOST_PIXELS or max(size) > LONGEST_SIDE:
        raise RegionError(
            f"A PNG file of {width:,} x {height:,} pixels is more than most programs open; choose "
            "a coarser level or a smaller region, or OME-TIFF or OME-Zarr."
        )


def encode_png(
    slide: Slide, pixels: NDArray[Any], mpp: tuple[float, float] | None, color: Color
) -> bytes:
    """Encode pixels of a slide, with their resolution and what their colours mean.

    Parameters
    ----------
    slide : Slide
        The slide, that `check_png` has accepted.
    pixels : ndarray, shape (height, width, channels)
        Pixels of a level; where zero is white in the file they are inverted, as PNG has it.
    mpp : tuple of float or None
        Their size (x, y) in micrometres.
    color : {"stored", "srgb"}
        What colours they are in.
    """
    if slide.layout.levels[0].encoding.photometric == WHITE_IS_ZERO:
        pixels = np.iinfo(pixels.dtype).max - pixels
    chunks = _resolution(mpp) + _colors(slide, color)
    data: bytes = imagecodecs.png_encode(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    return data[:HEADER] + chunks + data[HEADER:]


def _resolution(mpp: tuple[float, float] | None) -> bytes:
    if mpp is None:
        return b""
    a_metre = [min(round(1e6 / size), LARGEST_NUMBER) for size in mpp]
    return _chunk(b"pHYs", struct.pack(">2IB", *a_metre, METRE))


def _colors(slide: Slide, color: Color) -> bytes:
    if color == "srgb":
        return _chunk(b"sRGB", bytes([RELATIVE_COLORIMETRIC]))
    place = slide.layout.icc
    if place is None or profile_size(place) > LARGEST_PROFILE:
        return b""
    profile = slide.icc_profile or b""
    if profile[16:20] != (b"RGB " if slide.layout.rgb else b"GRAY"):
        return b""
    return _chunk(b"iCCP", b"ICC profile\0\0" + zlib.compress(profile))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
