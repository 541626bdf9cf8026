"""`AbstractSlide`, the base class of slides and flat images, and `ImageSlide`."""

from __future__ import annotations

import os
from abc import abstractmethod
from io import BytesIO
from typing import TYPE_CHECKING, Literal

from PIL import Image, ImageCms

from napari_wsigpu.compat.openslide.lowlevel import OpenSlideArgumentError, OpenSlideError
from napari_wsigpu.compat.shared import OpenedSlide
from napari_wsigpu.model.errors import SlideClosedError
from napari_wsigpu.slide.runtime import default

if TYPE_CHECKING:
    from collections.abc import Mapping

    from napari_wsigpu.model.geometry import Pair

    Filename = str | bytes | os.PathLike[str] | os.PathLike[bytes]

PROPERTY_NAME_BACKGROUND_COLOR = "openslide.background-color"


class OpenSlideCache:
    """A capacity for the tile cache.

    All slides of a process share one cache (`napari_wsigpu.runtime.default`). Passing an
    `OpenSlideCache` to `set_cache` enlarges it to at least this capacity.

    Parameters
    ----------
    capacity : int
        Capacity in bytes.

    Raises
    ------
    OpenSlideArgumentError
        If the capacity is not an integer >= 0.
    """

    def __init__(self, capacity: int) -> None:
        if not isinstance(capacity, int) or capacity < 0:
            raise OpenSlideArgumentError(
                f"A cache cannot hold {capacity!r} bytes; pass an integer >= 0."
            )
        self._capacity = capacity

    def enlarge(self) -> None:
        """Enlarge the cache of the process to at least this capacity."""
        tiles = default().tiles
        tiles.budget = max(tiles.budget, self._capacity)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._capacity!r})"


class AbstractSlide(OpenedSlide):
    """A slide with OpenSlide's interface."""

    _profile: bytes | None = None

    @classmethod
    @abstractmethod
    def detect_format(cls, filename: Filename) -> str | None:
        """Return the format of a file, or None if it is not supported."""

    @property
    @abstractmethod
    def level_count(self) -> int:
        """Number of levels."""

    @property
    @abstractmethod
    def properties(self) -> Mapping[str, str]:
        """All metadata under OpenSlide's property names."""

    @property
    @abstractmethod
    def associated_images(self) -> Mapping[str, Image.Image]:
        """Associated images by name."""

    @property
    def color_profile(self) -> ImageCms.ImageCmsProfile | None:
        """ICC profile of the pixels, or None."""
        return None if self._profile is None else ImageCms.getOpenProfile(BytesIO(self._profile))

    @abstractmethod
    def read_region(self, location: Pair, level: int, size: Pair) -> Image.Image:
        """Read a region as an RGBA image.

        Parameters
        ----------
        location : tuple of int
            (x, y) of the upper left corner in pixels of level 0.
        level : int
            Index of a level.
        size : tuple of int
            (width, height) in pixels of the level.

        Returns
        -------
        PIL.Image.Image
            The region; transparent where the slide has no pixels.
        """

    def set_cache(self, cache: OpenSlideCache) -> None:
        """Set the tile cache; ignored for flat images, which have no tiles."""

    def get_thumbnail(self, size: Pair) -> Image.Image:
        """Return the whole slide as an RGB image of at most `size` (width, height)."""
        factor = max(whole / most for whole, most in zip(self.dimensions, size, strict=True))
        level = self.get_best_level_for_downsample(factor)
        region = self.read_region((0, 0), level, self.level_dimensions[level])
        background = self.properties.get(PROPERTY_NAME_BACKGROUND_COLOR, "ffffff")
        thumbnail = Image.new("RGB", region.size, f"#{background}")
        thumbnail.paste(region, mask=region)
        thumbnail.thumbnail(size, Image.Resampling.LANCZOS)
        return self._with_profile(thumbnail)

    def _with_profile(self, image: Image.Image) -> Image.Image:
        if self._profile is not None:
            image.info["icc_profile"] = self._profile
        return image


class ImageSlide(AbstractSlide):
    """A flat image with the interface of a slide; its only level is 0.

    Parameters
    ----------
    file : str, bytes, PathLike or PIL.Image.Image
        The image or its path. `close` does not close an image that was passed in.

    Raises
    ------
    OSError
        If Pillow cannot open the file.
    """

    def __init__(self, file: Filename | Image.Image) -> None:
        self._source = file
        self._owned = not isinstance(file, Image.Image)
        opened = file if isinstance(file, Image.Image) else Image.open(os.fsdecode(file))
        self._image: Image.Image | None = opened
        self._profile = opened.info.get("icc_profile")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._source!r})"

    @classmethod
    def detect_format(cls, filename: Filename) -> str | None:
        """Return Pillow's name of a file's format, or None if it is not an image."""
        try:
            with Image.open(os.fsdecode(filename)) as image:
                return image.format
        except OSError:
            return None

    def close(self) -> None:
        """Close the image; further calls do nothing."""
        if self._owned and self._image is not None:
            self._image.close()
        self._image = None

    def _open_image(self) -> Image.Image:
        if self._image is None:
            raise SlideClosedError(f"{self!r} is closed; open the image again.")
        return self._image

    @property
    def level_count(self) -> Literal[1]:
        """Number of levels."""
        return 1

    @property
    def level_dimensions(self) -> tuple[Pair]:
        """(width, height) of the image."""
        return (self._open_image().size,)

    @property
    def level_downsamples(self) -> tuple[float]:
        """Downsample of each level relative to level 0."""
        return (1.0,)

    @property
    def properties(self) -> Mapping[str, str]:
        """Empty."""
        return {}

    @property
    def associated_images(self) -> Mapping[str, Image.Image]:
        """Empty."""
        return {}

    def read_region(self, location: Pair, level: int, size: Pair) -> Image.Image:
        """Read a region as an RGBA image; see `AbstractSlide.read_region`.

        Raises
        ------
        SlideClosedError
            If the image is closed.
        OpenSlideError
            If the level does not exist or the size is negative.
        """
        image = self._open_image()
        if level != 0:
            raise OpenSlideError(f"An image has no level {level!r}; its only level is 0.")
        if min(size) < 0:
            raise OpenSlideError(f"The region size {tuple(size)} is negative; use sizes >= 0.")
        region = Image.new("RGBA", size)
        left, top = (max(0, start) for start in location)
        ends = (start + length for start, length in zip(location, size, strict=True))
        right, bottom = map(min, image.size, ends)
        if left < right and top < bottom:
            part = image.crop((left, top, right, bottom))
            region.paste(part, (left - location[0], top - location[1]))
        return self._with_profile(region)
