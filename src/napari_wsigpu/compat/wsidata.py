"""`SlideReader` for wsidata and LazySlide: ``open_wsi(path, reader="napari-wsigpu")``.

Importing this module registers the reader.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from PIL import Image
from wsidata.reader._reader_registry import register
from wsidata.reader.base import AssociatedImages, ReaderBase

from napari_wsigpu.compat.openslide.properties import openslide_properties
from napari_wsigpu.slide.slide import Slide, clear_missing, open_slide

if TYPE_CHECKING:
    import os

    from numpy.typing import NDArray

    from napari_wsigpu.model.arrays import Array

NAME = "napari-wsigpu"


@register(name=NAME)
class SlideReader(ReaderBase):  # type: ignore[misc]
    """Reads a slide for wsidata.

    Parameters
    ----------
    file : str or PathLike
        Path of the slide.
    """

    name = NAME
    pkg_namespaces = "napari_wsigpu"
    _associated_images: AssociatedImages | None = None

    def __init__(self, file: str | os.PathLike[str], **options: object) -> None:
        self.file = str(file)
        self.create_reader()
        self.set_properties(openslide_properties(self._slide))

    @property
    def _slide(self) -> Slide:
        slide: Slide = self.reader
        return slide

    def get_region(
        self, x: float, y: float, width: int, height: int, level: int = 0, **options: object
    ) -> NDArray[np.uint8]:
        """Read a region: (x, y) in pixels of level 0, width and height in pixels of the level."""
        location, size = (int(x), int(y)), (int(width), int(height))
        level = int(self.translate_level(level))
        pixels = self._slide.read_region(location, size, level)
        clear_missing(pixels, self._slide, location, level)  # as in wsidata's OpenSlide reader
        return _as_rgb(pixels)

    def get_thumbnail(self, size: int, **options: object) -> NDArray[np.uint8]:
        """Return the whole slide, reduced so that its longer side has at most `size` pixels."""
        pyramid = self._slide.pyramid
        large = (item for item in reversed(pyramid) if item.layout.longer_side >= size)
        level = next(large, pyramid[0])
        image = Image.fromarray(_as_rgb(self._slide.level_array(level.number)[...]))
        image.thumbnail((size, size), Image.Resampling.LANCZOS)
        return np.asarray(image)

    @property
    def associated_images(self) -> AssociatedImages:
        """Associated images by name."""
        if self._associated_images is None:
            pictures = self._slide.associated_images.items()
            self._associated_images = AssociatedImages(
                {name: Image.fromarray(_as_rgb(picture.read())) for name, picture in pictures}
            )
        return self._associated_images

    def create_reader(self) -> None:
        """Open the slide."""
        self.set_reader(open_slide(self.file))

    def detach_reader(self) -> None:
        """Close the slide; wsidata reopens it on the next access."""
        slide = self._reader
        if slide is not None:
            self.set_reader(None)
            slide.close()


def _as_rgb(pixels: Array) -> NDArray[np.uint8]:
    """Return 8-bit RGB pixels: the upper 8 bits of 16-bit samples."""
    if pixels.dtype == np.uint16:
        pixels = (pixels >> 8).astype(np.uint8)
    found: NDArray[np.uint8] = pixels[..., :3] if pixels.shape[2] > 2 else pixels[..., [0, 0, 0]]
    return np.ascontiguousarray(found)
