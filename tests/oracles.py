"""What independent readers say of a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import openslide
import tifffile

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray


def openslide_level(path: Path, level: int = 0) -> NDArray[Any]:
    """Decode a level with OpenSlide, shape (height, width, 3)."""
    with openslide.OpenSlide(path) as slide:
        image = slide.read_region((0, 0), level, slide.level_dimensions[level])
    return np.asarray(image)[..., :3]


def opaque(rgba: Any, background: int = 255) -> NDArray[Any]:
    """Return OpenSlide's pixels in RGB: transparent ones have the background's value."""
    pixels = np.asarray(rgba)
    return np.where(pixels[..., 3:] > 0, pixels[..., :3], np.uint8(background))


def openslide_properties(path: Path) -> Mapping[str, str]:
    with openslide.OpenSlide(path) as slide:
        return dict(slide.properties)


def openslide_tiff_tags(path: Path) -> dict[str, str]:
    """Properties that OpenSlide takes from the TIFF tags."""
    prefix = "tiff."
    return {
        name.removeprefix(prefix): value
        for name, value in openslide_properties(path).items()
        if name.startswith(prefix)
    }


def as_property(value: Any) -> str:
    """Write a value as OpenSlide does."""
    return f"{value:.17g}" if isinstance(value, float) else str(value)


def openslide_shape(path: Path) -> tuple[Any, Any]:
    """(level_dimensions, level_downsamples)."""
    with openslide.OpenSlide(path) as slide:
        return slide.level_dimensions, slide.level_downsamples


def openslide_reads(path: Path) -> bool:
    return openslide.OpenSlide.detect_format(path) is not None


def tifffile_page(path: Path, index: int = 0) -> NDArray[Any]:
    """Decode a page with tifffile, shape (height, width, samples)."""
    with tifffile.TiffFile(path) as file:
        page = file.pages[index].aspage()
        pixels = page.asarray()
    if page.planarconfig == 2 and page.samplesperpixel > 1:
        return np.moveaxis(pixels, 0, -1)
    return pixels.reshape(page.imagelength, page.imagewidth, page.samplesperpixel)
