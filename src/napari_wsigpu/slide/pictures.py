"""Pixels of any type as people see them, and as files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import imagecodecs
import numpy as np
import tifffile

from napari_wsigpu.model.appearance import WHITE, channel_colors, shown_limits
from napari_wsigpu.model.errors import SlideError, UnsupportedSlideError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.model.layout import Encoding
    from napari_wsigpu.slide.slide import Slide

PNG_TYPES = (np.uint8, np.uint16)


def overview(slide: Slide) -> NDArray[np.uint8]:
    """Read the coarsest level of a slide, its channels laid over each other.

    Returns
    -------
    ndarray, shape (height, width, 3)
        Tiles that can't be decoded show the background.
    """
    level = slide.pyramid[-1].layout
    pixels = slide.level_array(slide.pyramid[-1].number, tolerant=True)[...]
    if slide.layout.rgb:
        return rgb(pixels)
    if pixels.shape[2] == 1:
        return rgb(upright(pixels, level.encoding))
    colors = [color or WHITE for color in channel_colors(slide.channels)]
    return overlay(pixels, colors)


def aspect_of(slide: Slide) -> float:
    """Return how many times as wide as high a slide's pixels are."""
    return 1.0 if slide.mpp is None else slide.mpp[0] / slide.mpp[1]


def associated(slide: Slide, name: str) -> NDArray[Any]:
    """Decode an associated image in the colours in which the slide is shown.

    Returns
    -------
    ndarray, shape (height, width, channels)
        Zero is black, whatever the file says.

    Raises
    ------
    SlideError
        If it can't be read or decoded.
    """
    layout = next(item for item in slide.layout.associated if item.name == name)
    image = slide.associated_images[name]
    try:
        pixels = image.read("stored" if layout.icc is None else slide.display_color)
    except UnsupportedSlideError:  # perhaps because its profile is of no use
        pixels = image.read()
    return upright(pixels, layout.image.encoding)


def upright(pixels: NDArray[Any], encoding: Encoding) -> NDArray[Any]:
    """Return pixels whose zero is black."""
    if not encoding.white_is_zero or pixels.dtype.kind != "u":
        return pixels
    return np.iinfo(pixels.dtype).max - pixels


def rgb(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    """Return (height, width, 3) bytes of gray or RGB pixels of any type; gray is stretched."""
    if pixels.shape[2] < 3:
        pixels = pixels[..., :1]
        if pixels.dtype != np.uint8:
            pixels = _bytes(_stretched(pixels))
        return np.repeat(pixels, 3, axis=2)
    pixels = pixels[..., :3]
    if pixels.dtype == np.uint8:
        return pixels
    whole = np.iinfo(pixels.dtype).max if pixels.dtype.kind in "iu" else 1
    return _bytes(pixels / whole)


def overlay(pixels: NDArray[Any], colors: Sequence[str]) -> NDArray[np.uint8]:
    """Add up the channels of (height, width, channels), each in its colour "#rrggbb"."""
    total = np.zeros((*pixels.shape[:2], 3))
    for index, color in enumerate(colors):
        tint = np.frombuffer(bytes.fromhex(color[1:7]), np.uint8) / 255
        total += _stretched(pixels[..., index, None]) * tint
    return _bytes(total)


def save(pixels: NDArray[Any], path: str) -> None:
    """Write (height, width, channels) as a PNG or TIFF file, as the path's suffix says.

    Raises
    ------
    SlideError
        If the file can't be written, or can't hold such pixels.
    """
    pixels = pixels[..., 0] if pixels.shape[2] == 1 else pixels
    suffix = Path(path).suffix.lower()
    try:
        if suffix == ".png":
            if pixels.dtype not in PNG_TYPES:
                raise SlideError(
                    f"A PNG file can't hold pixels of type {pixels.dtype}; save '{path}' as TIFF."
                )
            Path(path).write_bytes(imagecodecs.png_encode(pixels))
        elif suffix in (".tif", ".tiff"):
            photometric = "rgb" if pixels.ndim == 3 else "minisblack"
            tifffile.imwrite(path, pixels, photometric=photometric, compression="zlib")
        else:
            raise SlideError(f"'{path}' is no name of a picture; end it with .png or .tif.")
    except OSError as error:
        raise not_written(path, error) from error


def save_text(text: str, path: str) -> None:
    """Write a text file in UTF-8.

    Raises
    ------
    SlideError
        If it can't be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise not_written(path, error) from error


def not_written(path: str, error: OSError) -> SlideError:
    """Say in one sentence that a file can't be written."""
    return SlideError(
        f"'{path}' can't be written ({error.strerror or error}); choose another folder or name."
    )


def _stretched(pixels: NDArray[Any]) -> NDArray[np.float64]:
    values = pixels.astype(np.float64)
    if not np.isfinite(values).any():
        return np.zeros_like(values)
    low, high = shown_limits(values)
    stretched: NDArray[np.float64] = np.nan_to_num(values - low) / (high - low)
    return stretched.clip(0, 1)


def _bytes(values: NDArray[Any]) -> NDArray[np.uint8]:
    scaled: NDArray[np.float64] = np.nan_to_num(values).clip(0, 1) * 255
    return np.rint(scaled).astype(np.uint8)
