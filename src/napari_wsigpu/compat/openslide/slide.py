"""`OpenSlide`: OpenSlide's interface on top of `Slide`."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from PIL import Image

from napari_wsigpu.compat.openslide.abstract import AbstractSlide, ImageSlide, OpenSlideCache
from napari_wsigpu.compat.openslide.lowlevel import (
    OpenSlideArgumentError,
    OpenSlideClosedError,
    OpenSlideError,
    OpenSlideUnsupportedFormatError,
)
from napari_wsigpu.compat.openslide.properties import openslide_properties
from napari_wsigpu.compat.shared import LazyMapping
from napari_wsigpu.formats.image_file import VENDOR
from napari_wsigpu.model.errors import (
    LevelError,
    NotASlideError,
    RegionError,
    SlideError,
    SlideNotFoundError,
    UnsupportedSlideError,
)
from napari_wsigpu.slide.slide import open_slide as open_any
from napari_wsigpu.slide.slide import to_rgba

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from napari_wsigpu.compat.openslide.abstract import Filename
    from napari_wsigpu.model.geometry import Pair
    from napari_wsigpu.slide.slide import Slide

Value = TypeVar("Value")


class OpenSlide(AbstractSlide):
    """An open slide.

    As in OpenSlide, an error latches: once a read has failed, every method except `close` raises
    the same `OpenSlideError`.

    Parameters
    ----------
    filename : str, bytes or PathLike
        Path or URL of the slide.

    Attributes
    ----------
    slide : Slide
        The underlying slide.

    Raises
    ------
    OpenSlideUnsupportedFormatError
        If the file is not a slide, does not exist, or its pixels are not 8-bit gray or RGB.
    OpenSlideError
        If the slide cannot be read.
    OpenSlideArgumentError
        If `filename` is not a path.
    """

    def __init__(self, filename: Filename) -> None:
        self._filename = filename
        self._failure: str | None = None
        self._closed = False
        self.slide = _opened(filename)
        # Code written for OpenSlide often never closes its slides.
        self._close = weakref.finalize(self, self.slide.close)
        self._profile = self._guarded(lambda: self.slide.icc_profile)
        self._properties: Mapping[str, str] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._filename!r})"

    @classmethod
    def detect_format(cls, filename: Filename) -> str | None:
        """Return OpenSlide's name of a slide's vendor, or None if the file is not a slide."""
        try:
            with open_any(os.fsdecode(filename)) as slide:
                return None if slide.vendor == VENDOR else slide.vendor
        except SlideError:
            return None

    def close(self) -> None:
        """Close the file.

        Raises
        ------
        OpenSlideClosedError
            If the slide is already closed.
        """
        if self._closed:
            raise OpenSlideClosedError(f"{self!r} is already closed.")
        self._closed = True
        self._close()

    @property
    def level_count(self) -> int:
        """Number of levels."""
        return self._guarded(lambda: self.slide.level_count)

    @property
    def level_dimensions(self) -> tuple[Pair, ...]:
        """(width, height) of each level."""
        return self._guarded(lambda: self.slide.level_dimensions)

    @property
    def level_downsamples(self) -> tuple[float, ...]:
        """Downsample of each level relative to level 0."""
        return self._guarded(lambda: self.slide.level_downsamples)

    @property
    def properties(self) -> Mapping[str, str]:
        """All metadata under OpenSlide's property names."""
        found = self._all_properties
        return self._items("_PropertyMap", found, lambda name: found()[name])

    @property
    def associated_images(self) -> Mapping[str, Image.Image]:
        """Associated images by name, decoded on access."""
        return self._items(
            "_AssociatedImageMap", lambda: self.slide.associated_images, self._associated_image
        )

    def read_region(self, location: Pair, level: int, size: Pair) -> Image.Image:
        """Read a region as an RGBA image; see `AbstractSlide.read_region`.

        As in OpenSlide, a region of a level that does not exist is transparent.

        Raises
        ------
        OpenSlideClosedError
            If the slide is closed.
        OpenSlideError
            If the size is negative, or pixels cannot be read or decoded.
        """
        if not isinstance(level, int | np.integer):
            raise OpenSlideError(f"The level {level!r} is not a whole number.")
        return self._with_profile(self._guarded(lambda: self._region(location, level, size)))

    def set_cache(self, cache: OpenSlideCache) -> None:
        """Enlarge the tile cache of the process to at least the capacity of `cache`.

        Raises
        ------
        TypeError
            If `cache` is not an `OpenSlideCache`.
        """
        if not isinstance(cache, OpenSlideCache):
            raise TypeError(f"{cache!r} is not a cache; pass an OpenSlideCache.")
        self._guarded(cache.enlarge)

    def _region(self, location: Pair, level: int, size: Pair) -> Image.Image:
        if not 0 <= level < self.slide.level_count:
            return Image.new("RGBA", (size[0], size[1]))
        pixels = self.slide.read_rgba(location, size, level)
        return Image.fromarray(pixels) if pixels.size else Image.new("RGBA", (size[0], size[1]))

    def _associated_image(self, name: str) -> Image.Image:
        associated = self.slide.associated_images[name]
        image = Image.fromarray(to_rgba(associated.read()))
        profile = associated.icc_profile
        if profile is not None:
            # Equal profiles share one copy in memory.
            image.info["icc_profile"] = self._profile if profile == self._profile else profile
        return image

    def _all_properties(self) -> Mapping[str, str]:
        if self._properties is None:
            self._properties = openslide_properties(self.slide)
        return self._properties

    def _items(
        self, kind: str, names: Callable[[], Iterable[str]], make: Callable[[str], Value]
    ) -> LazyMapping[Value]:
        return LazyMapping(
            kind,
            lambda: self._guarded(lambda: list(names())),
            lambda name: self._guarded(lambda: make(name)),
        )

    def _guarded(self, read: Callable[[], Value]) -> Value:
        """Return the result of `read`, unless the slide is closed or has failed before."""
        if self._closed:
            raise OpenSlideClosedError(f"{self!r} is closed; open the slide again.")
        if self._failure is not None:
            raise OpenSlideError(self._failure)
        try:
            return read()
        except (RegionError, LevelError) as error:  # invalid arguments do not latch
            raise OpenSlideError(str(error)) from error
        except SlideError as error:
            self._failure = str(error)
            raise OpenSlideError(self._failure) from error


def open_slide(filename: Filename) -> OpenSlide | ImageSlide:
    """Open a slide, or a flat image as a slide with one level.

    Raises
    ------
    OpenSlideError
        If the file is a slide that cannot be read.
    OSError
        If the file is neither a slide nor an image.
    """
    try:
        return OpenSlide(filename)
    except OpenSlideUnsupportedFormatError:
        return ImageSlide(filename)


def _opened(filename: object) -> Slide:
    if not isinstance(filename, str | bytes | os.PathLike):
        raise OpenSlideArgumentError(f"{filename!r} is not a path; pass the path of a slide.")
    try:
        slide = open_any(os.fsdecode(filename))
    except (NotASlideError, SlideNotFoundError, UnsupportedSlideError) as error:
        raise OpenSlideUnsupportedFormatError(str(error)) from error
    except SlideError as error:
        # As in OpenSlide, so that loops over a folder's entries skip folders.
        is_folder = Path(os.fsdecode(filename)).is_dir()
        kind = OpenSlideUnsupportedFormatError if is_folder else OpenSlideError
        raise kind(str(error)) from error
    if slide.vendor == VENDOR:
        slide.close()
        raise OpenSlideUnsupportedFormatError(
            f"'{slide.path}' is an ordinary image, which OpenSlide does not read; use ImageSlide."
        )
    base = slide.layout.levels[0]
    if base.dtype != np.uint8 or base.channels not in (1, 3, 4):
        slide.close()
        raise OpenSlideUnsupportedFormatError(
            f"'{slide.path}' has {base.channels} channels of {base.dtype}, which do not fit in "
            "an RGBA image; use napari_wsigpu.open_slide."
        )
    return slide
