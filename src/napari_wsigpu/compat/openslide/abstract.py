"""`AbstractSlide`: what slides and flat images have in common, and `ImageSlide`."""

from __future__ import annotations

import os
from abc import abstractmethod
from io import BytesIO
from typing import TYPE_CHECKING, Any, Literal

from PIL import Image, ImageCms

from napari_wsigpu.compat.openslide.lowlevel import OpenSlideArgumentError, OpenSlideError
from napari_wsigpu.compat.shared import OpenedSlide
from napari_wsigpu.model.errors import SlideClosedError
from napari_wsigpu.slide.runtime import default

if TYPE_CHECKING:
    from collections.abc import Mapping

    Filename = str | bytes | os.PathLike[Any]

PROPERTY_NAME_BACKGROUND_COLOR = "openslide.background-color"


class OpenSlideCache:
    """Room for decoded tiles.

    All slides of a process share one cache here (`napari_wsigpu.runtime.default`): to set one makes
    it at least so large.

    Parameters
    ----------
    capacity : int
        In bytes.

    Raises
    ------
    OpenSlideArgumentError
        If that is no whole number of at least 0.
    """

    def __init__(self, capacity: int) -> None:
        if not isinstance(capacity, int) or capacity < 0:
            raise OpenSlideArgumentError(
                f"A cache can't hold {capacity!r} bytes; give a whole number >= 0."
            )
        self._capacity = capacity

    def enlarge(self) -> None:
        """Give the process's cache at least this capacity."""
        tiles = default().tiles
        tiles.budget = max(tiles.budget, self._capacity)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._capacity!r})"


class AbstractSlide(OpenedSlide):
    """A slide by OpenSlide's names."""

    _profile: bytes | None = None

    @classmethod
    @abstractmethod
    def detect_format(cls, filename: Filename) -> str | None:
        """Return the format of a file; None if it is none of these."""

    @property
    @abstractmethod
    def level_count(self) -> int:
        """Number of levels."""

    @property
    @abstractmethod
    def properties(self) -> Mapping[str, str]:
        """All metadata by OpenSlide's names."""

    @property
    @abstractmethod
    def associated_images(self) -> Mapping[str, Image.Image]:
        """The pictures beside the slide by name."""

    @property
    def color_profile(self) -> ImageCms.ImageCmsProfile | None:
        """The ICC profile of the pixels; None where there is none."""
        return None if self._profile is None else ImageCms.getOpenProfile(BytesIO(self._profile))

    @abstractmethod
    def read_region(
        self, location: tuple[int, int], level: int, size: tuple[int, int]
    ) -> Image.Image:
        """Read a rectangle as an RGBA image.

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
            Transparent where there are no pixels.
        """

    def set_cache(self, cache: OpenSlideCache) -> None:
        """Use a cache; a flat image has no tiles to keep."""

    def get_thumbnail(self, size: tuple[int, int]) -> Image.Image:
        """Return the whole slide as an RGB image that fits into (width, height)."""
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
    """A flat image as a slide of one level.

    Parameters
    ----------
    file : str, bytes, PathLike or PIL.Image.Image
        The image; one that is given stays open when the slide is closed.

    Raises
    ------
    OSError
        If Pillow can't open the file.
    """

    def __init__(self, file: Filename | Image.Image) -> None:
        self._given = file
        self._own = not isinstance(file, Image.Image)
        opened = file if isinstance(file, Image.Image) else Image.open(os.fsdecode(file))
        self._image: Image.Image | None = opened
        self._profile = opened.info.get("icc_profile")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._given!r})"

    @classmethod
    def detect_format(cls, filename: Filename) -> str | None:
        """Return Pillow's name of the format of a file; None if it is no image."""
        try:
            with Image.open(os.fsdecode(filename)) as image:
                return image.format
        except OSError:
            return None

    def close(self) -> None:
        """Let go of the image; may be called twice."""
        if self._own and self._image is not None:
            self._image.close()
        self._image = None

    def _open_image(self) -> Image.Image:
        if self._image is None:
            raise SlideClosedError(f"{self!r} was closed; open the image again.")
        return self._image

    @property
    def level_count(self) -> Literal[1]:
        """Number of levels."""
        return 1

    @property
    def level_dimensions(self) -> tuple[tuple[int, int]]:
        """(width, height) of the image."""
        return (self._open_image().size,)

    @property
    def level_downsamples(self) -> tuple[float]:
        """How many pixels of level 0 one of each level spans."""
        return (1.0,)

    @property
    def properties(self) -> Mapping[str, str]:
        """Empty."""
        return {}

    @property
    def associated_images(self) -> Mapping[str, Image.Image]:
        """Empty."""
        return {}

    def read_region(
        self, location: tuple[int, int], level: int, size: tuple[int, int]
    ) -> Image.Image:
        """Read a rectangle as an RGBA image; see `AbstractSlide.read_region`.

        Raises
        ------
        SlideClosedError
            If the image was closed.
        OpenSlideError
            If the level or size can't be.
        """
        image = self._open_image()
        if level != 0:
            raise OpenSlideError(f"An image has no level {level!r}; its only level is 0.")
        if min(size) < 0:
            raise OpenSlideError(f"A region can't be {size[0]} x {size[1]} pixels; use sizes >= 0.")
        region = Image.new("RGBA", size)
        left, top = (max(0, begin) for begin in location)
        right, bottom = (
            min(whole, begin + length)
            for whole, begin, length in zip(image.size, location, size, strict=True)
        )
        if left < right and top < bottom:
            part = image.crop((left, top, right, bottom))
            region.paste(part, (left - location[0], top - location[1]))
        return self._with_profile(region)
