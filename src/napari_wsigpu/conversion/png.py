"""Write a region of one level as PNG, with exact pixels, pixel size and color profile."""

from __future__ import annotations

import os
import struct
import zlib
from typing import TYPE_CHECKING

import imagecodecs
import numpy as np

from napari_wsigpu.codecs.color import LARGEST_PROFILE, profile_size
from napari_wsigpu.codecs.libraries import load
from napari_wsigpu.conversion.coding import OME_TYPES
from napari_wsigpu.conversion.conversion_plan import window_of
from napari_wsigpu.conversion.paths import check_path, partial_path
from napari_wsigpu.conversion.pixels import outline_mask
from napari_wsigpu.display.composite_source import RGB
from napari_wsigpu.model.errors import ConversionCancelledError, RegionError, UnsupportedSlideError
from napari_wsigpu.model.geometry import Rect
from napari_wsigpu.reading.plan import Regions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from threading import Event

    from napari_wsigpu.codecs.color import Color
    from napari_wsigpu.conversion.options import Options
    from napari_wsigpu.model.arrays import Array
    from napari_wsigpu.model.composite import Composite
    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.slide.slide import Slide

MOST_PIXELS = 1 << 27
LONGEST_SIDE = 1_000_000  # default limit of libpng
ROWS_AT_ONCE = 1024
TYPES = (np.uint8, np.uint16)
HEADER = 33  # bytes of the signature and the IHDR chunk
LARGEST_NUMBER = (1 << 31) - 1
METER = 1
RELATIVE_COLORIMETRIC = 1


def check_png(slide: Slide, size: tuple[int, int], composite: Composite | None = None) -> None:
    """Check that a PNG file can hold a region of a slide.

    Parameters
    ----------
    slide : Slide
        The slide.
    size : tuple of int
        (width, height) of the region in pixels of its level.
    composite : Composite, optional
        Makes channels one RGB image, which PNG can hold.

    Raises
    ------
    UnsupportedSlideError
        If PNG cannot hold the pixels.
    RegionError
        If the region is too large for most programs that read PNG.
    """
    image = slide.layout.levels[0]
    if composite is None and image.channels > 1 and not slide.layout.rgb:
        raise UnsupportedSlideError(
            f"A PNG file holds RGB or one channel, but '{slide.path}' has {image.channels} "
            "channels that are not RGB; choose OME-TIFF or OME-Zarr."
        )
    if composite is None and image.dtype not in TYPES:
        raise UnsupportedSlideError(
            f"PNG does not support the pixel type {image.dtype} of '{slide.path}'; choose "
            f"{'OME-TIFF' if image.dtype.name in OME_TYPES else 'TIFF'} or OME-Zarr."
        )
    width, height = size
    if width * height > MOST_PIXELS or max(size) > LONGEST_SIDE:
        raise RegionError(
            f"A PNG file of {width:,} x {height:,} pixels is too large for most programs; choose a "
            "coarser level or a smaller region, or use OME-TIFF or OME-Zarr."
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
    """Write a region of one level to a temporary file, and rename it when it is complete.

    If 0 means white in grayscale pixels, they are inverted, as PNG requires.

    Parameters
    ----------
    slide : Slide
        The slide.
    path : Path
        The file.
    options : Options
        Level, region, outline, color space and composite.
    progress : callable, optional
        Called with (rows read, total rows).
    cancelled : threading.Event, optional
        Stops the conversion when it is set.
    overwrite : bool
        Whether an existing file is replaced.

    Raises
    ------
    ConversionCancelledError
        If `cancelled` is set.
    TargetExistsError
        If the target exists and `overwrite` is false, or the temporary path is taken.
    SlideError
        If the region is invalid or cannot be read, or PNG cannot hold it.
    OSError
        If the file cannot be written.
    """
    work, composite = partial_path(path), options.composite
    if composite is not None:
        composite = slide.composite(settings=composite)
    # Composites are made for screens, and their channels are not converted.
    color = options.color if composite is None else "srgb"
    array = slide.level_array(options.level, color="stored" if composite else color)
    level = next(level for level in slide.pyramid if level.number == options.level)
    window = window_of(slide, level, options.region)
    check_png(slide, (window.width, window.height), composite)
    samples, dtype = (array.shape[2], array.dtype) if composite is None else (RGB, np.uint8)
    pixels = np.empty((window.height, window.width, samples), dtype)
    columns = slice(window.left, window.left + window.width)
    progress = progress or (lambda done, total: None)
    for start in range(0, window.height, ROWS_AT_ONCE):
        progress(start, window.height)
        _check(cancelled)
        stop = min(start + ROWS_AT_ONCE, window.height)
        if composite is None:
            pixels[start:stop] = array[window.top + start : window.top + stop, columns]
        else:
            band = Rect(window.top + start, window.left, stop - start, window.width)
            region = Regions.one(band)
            pixels[start:stop] = slide.composite_region(options.level, region, composite)
    blank = None if composite is None else 255 * composite.inverted
    mask = outline_mask(slide, level, options.outline, blank)
    if mask is not None:
        pixels = mask(pixels, window.top, window.left)
    progress(window.height, window.height)
    _check(cancelled)
    # Composites are bright where their channels are, whatever 0 means in these.
    if composite is None and level.layout.encoding.white_is_zero:
        pixels = np.iinfo(pixels.dtype).max - pixels
    data = _encoded(slide, pixels, level.layout, color)
    _check(cancelled)
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


def _check(cancelled: Event | None) -> None:
    if cancelled is not None and cancelled.is_set():
        raise ConversionCancelledError


def _encoded(slide: Slide, pixels: Array, level: LevelLayout, color: Color) -> bytes:
    downsample = level.downsample(slide.layout.levels[0])
    chunks = _resolution(slide.mpp, downsample) + _colors(slide, color)
    load(["png_encode"])
    data = bytes(imagecodecs.png_encode(pixels[..., 0] if pixels.shape[2] == 1 else pixels))
    return data[:HEADER] + chunks + data[HEADER:]


def _resolution(mpp: tuple[float, float] | None, downsample: float) -> bytes:
    if mpp is None:
        return b""
    # pHYs counts pixels per meter (PNG, section 11.3.4.3); mpp are micrometers per pixel.
    per_meter = [min(round(1e6 / (size * downsample)), LARGEST_NUMBER) for size in mpp]
    return _chunk(b"pHYs", struct.pack(">2IB", *per_meter, METER))


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
