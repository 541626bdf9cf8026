"""Convert pixels of any type to 8-bit images for display, and save images to files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import imagecodecs
import numpy as np
import tifffile

from napari_wsigpu.display.compose import compose
from napari_wsigpu.model.appearance import contrast_limits
from napari_wsigpu.model.errors import SlideError, UnsupportedSlideError, write_errors

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from napari_wsigpu.model.arrays import Array
    from napari_wsigpu.model.composite import Composite
    from napari_wsigpu.model.layout import Encoding
    from napari_wsigpu.slide.slide import Slide

PNG_TYPES = (np.uint8, np.uint16)


def overview(slide: Slide, composite: Composite | None = None) -> NDArray[np.uint8]:
    """Read the coarsest level of a slide, with its channels in a composite.

    Parameters
    ----------
    slide : Slide
        The slide.
    composite : Composite, optional
        How to show channels; by default as viewers show them first.

    Returns
    -------
    ndarray of uint8, shape (height, width, 3)
        Tiles that cannot be decoded show the background.
    """
    number, level, *_ = slide.pyramid[-1]
    if not slide.layout.rgb and level.channels > 1:
        settings = slide.composite(settings=composite)
        channels = [slide.channel_overview(index) for index in settings.visible]
        return compose(channels, settings, (level.height, level.width))
    pixels = slide.level_array(number, tolerant=True)[...]
    return rgb(pixels if slide.layout.rgb else black_is_zero(pixels, level.encoding))


def pixel_aspect(slide: Slide) -> float:
    """Return the ratio of width to height of a slide's pixels."""
    return 1.0 if slide.mpp is None else slide.mpp[0] / slide.mpp[1]


def read_associated(slide: Slide, name: str) -> Array:
    """Decode an associated image in the slide's display colors.

    Returns
    -------
    ndarray, shape (height, width, channels)
        Zero is black, even if the file stores white as zero.

    Raises
    ------
    SlideError
        If the image cannot be read or decoded.
    """
    layout = next(item for item in slide.layout.associated if item.name == name)
    image = slide.associated_images[name]
    try:
        pixels = image.read("stored" if layout.icc is None else slide.display_color)
    except UnsupportedSlideError:  # its profile may be unusable
        pixels = image.read()
    return black_is_zero(pixels, layout.image.encoding)


def black_is_zero(pixels: Array, encoding: Encoding) -> Array:
    """Invert pixels if the file stores white as zero."""
    if not encoding.white_is_zero or pixels.dtype.kind != "u":
        return pixels
    return np.iinfo(pixels.dtype).max - pixels


def rgb(pixels: Array) -> NDArray[np.uint8]:
    """Convert gray or RGB pixels of any type to uint8, shape (height, width, 3).

    The contrast of gray pixels that are not uint8 is stretched.
    """
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


def save(pixels: Array, path: str) -> None:
    """Write pixels, shape (height, width, channels), to a file: PNG or TIFF, depending on `path`.

    Raises
    ------
    SlideError
        If the file cannot be written, or its format does not support the pixels.
    """
    pixels = pixels[..., 0] if pixels.shape[2] == 1 else pixels
    suffix = Path(path).suffix.lower()
    with write_errors(path):
        if suffix == ".png":
            if pixels.dtype not in PNG_TYPES:
                raise SlideError(f"PNG can't hold {pixels.dtype} pixels; save '{path}' as TIFF.")
            Path(path).write_bytes(imagecodecs.png_encode(pixels))
        elif suffix in (".tif", ".tiff"):
            photometric = "rgb" if pixels.ndim == 3 else "minisblack"
            tifffile.imwrite(path, pixels, photometric=photometric, compression="zlib")
        else:
            raise SlideError(
                f"Images can't be saved as '{path}'; use a name that ends in .png or .tif."
            )


def save_text(text: str, path: str) -> None:
    """Write a text file in UTF-8.

    Raises
    ------
    SlideError
        If the file cannot be written.
    """
    with write_errors(path):
        Path(path).write_text(text, encoding="utf-8")


def _stretched(pixels: Array) -> NDArray[np.float64]:
    values = pixels.astype(np.float64)
    if not np.isfinite(values).any():
        return np.zeros_like(values)
    low, high = contrast_limits(values)
    stretched: NDArray[np.float64] = np.nan_to_num(values - low) / (high - low)
    return stretched.clip(0, 1)


def _bytes(values: Array) -> NDArray[np.uint8]:
    scaled: NDArray[np.float64] = np.nan_to_num(values).clip(0, 1) * 255
    return np.rint(scaled).astype(np.uint8)
