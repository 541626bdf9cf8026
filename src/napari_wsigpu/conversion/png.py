"""Regions as PNG files: one level, all pixels exact, with their scale and colour profile."""

from __future__ import annotations

import os
import struct
import zlib
from typing import TYPE_CHECKING, Any

import imagecodecs
import numpy as np

from napari_wsigpu.codecs.color import LARGEST_PROFILE, profile_size
from napari_wsigpu.codecs.libraries import load
from napari_wsigpu.conversion.coding import OME_TYPES
from napari_wsigpu.conversion.paths import check_path, work_of
from napari_wsigpu.conversion.pixels import mask_of
from napari_wsigpu.conversion.plan import window_of
from napari_wsigpu.model.errors import ConversionCancelledError, RegionError, UnsupportedSlideError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from threading import Event

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.color import Color
    from napari_wsigpu.conversion.options import Options
    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.slide.slide import Slide

MOST_PIXELS = 1 << 27
LONGEST_SIDE = 1_000_000  # of what libpng reads
ROWS_AT_ONCE = 1024
TYPES = (np.uint8, np.uint16)
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
            "channels that are not RGB; choose OME-TIFF or OME-Zarr."
        )
    if image.dtype not in TYPES:
        raise UnsupportedSlideError(
            f"A PNG file can't hold pixels of type {image.dtype}, as '{slide.path}' has; choose "
            f"{'OME-TIFF' if image.dtype.name in OME_TYPES else 'TIFF'} or OME-Zarr."
        )
    width, height = size
    if width * height > MOST_PIXELS or max(size) > LONGEST_SIDE:
        raise RegionError(
            f"A PNG file of {width:,} x {height:,} pixels is more than most programs open; choose "
            "a coarser level or a smaller region, or OME-TIFF or OME-Zarr."
        )


def write_png(
    slide: Slide,
    path: Path,
    options: Options,
    progress: Callable[[int, int], None] | None,
    cancelled: Event | None,
    *,
    overwrite: bool,
) -> None:
    """Write a region of one level, beside the file first; gray is inverted where 0 is white.

    Parameters
    ----------
    slide : Slide
        The slide.
    path : Path
        The file.
    options : Options
        Which level and region, in which colours.
    progress : callable, optional
        Told how many rows of pixels are read, and of how many.
    cancelled : threading.Event, optional
        Ends it when it is set.
    overwrite : bool
        Whether a file that exists is replaced.

    Raises
    ------
    ConversionCancelledError
        If `cancelled` was set.
    TargetExistsError
        If something is in the way.
    SlideError
        If the region can't be, or can't be read, or PNG can't hold it.
    OSError
        If the file can't be written.
    """
    work = work_of(path)
    array = slide.level_array(options.level, color=options.color)
    level = next(level for level in slide.pyramid if level.number == options.level)
    window = window_of(slide, level, options.region)
    check_png(slide, (window.width, window.height))
    pixels = np.empty((window.height, window.width, array.shape[2]), array.dtype)
    columns = slice(window.left, window.left + window.width)
    for start in range(0, window.height, ROWS_AT_ONCE):
        _go_on(cancelled, progress, start, window.height)
        stop = min(start + ROWS_AT_ONCE, window.height)
        pixels[start:stop] = array[window.top + start : window.top + stop, columns]
    mask = mask_of(slide, level, options.outline)
    if mask is not None:
        pixels = mask(pixels, window.top, window.left)
    _go_on(cancelled, progress, window.height, window.height)
    data = _encoded(slide, pixels, level.layout, options.color)
    _go_on(cancelled)
    try:
        work.unlink(missing_ok=True)
        with work.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        check_path(path, overwrite=overwrite)
        work.replace(path)
    finally:
        work.unlink(missing_ok=True)


def _go_on(
    cancelled: Event | None,
    progress: Callable[[int, int], None] | None = None,
    done: int = 0,
    total: int = 0,
) -> None:
    if progress is not None:
        progress(done, total)
    if cancelled is not None and cancelled.is_set():
        raise ConversionCancelledError


def _encoded(slide: Slide, pixels: NDArray[Any], level: LevelLayout, color: Color) -> bytes:
    if level.encoding.white_is_zero:
        pixels = np.iinfo(pixels.dtype).max - pixels
    downsample = level.downsample(slide.layout.levels[0])
    chunks = _resolution(slide.mpp, downsample) + _colors(slide, color)
    load(["png_encode"])
    data = bytes(imagecodecs.png_encode(pixels[..., 0] if pixels.shape[2] == 1 else pixels))
    return data[:HEADER] + chunks + data[HEADER:]


def _resolution(mpp: tuple[float, float] | None, downsample: float) -> bytes:
    if mpp is None:
        return b""
    a_metre = [min(round(1e6 / (size * downsample)), LARGEST_NUMBER) for size in mpp]
    return _chunk(b"pHYs", struct.pack(">2IB", *a_metre, METRE))


def _colors(slide: Slide, color: Color) -> bytes:
    if color == "srgb":
        return _chunk(b"sRGB", bytes([RELATIVE_COLORIMETRIC]))
    stored = slide.layout.icc
    if stored is None or profile_size(stored) > LARGEST_PROFILE:
        return b""
    profile = slide.icc_profile or b""
    if profile[16:20] != (b"RGB " if slide.layout.rgb else b"GRAY"):
        return b""
    return _chunk(b"iCCP", b"ICC profile\0\0" + zlib.compress(profile))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
