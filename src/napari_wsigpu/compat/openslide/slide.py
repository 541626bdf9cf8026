"""`OpenSlide`: an open slide by OpenSlide's names, read by `Slide`."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

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
from napari_wsigpu.compat.shared import Items
from napari_wsigpu.model.errors import (
    LevelError,
    NotASlideError,
    RegionError,
    SlideError,
    SlideNotFoundError,
    UnsupportedSlideError,
)
from napari_wsigpu.slide.slide import open_slide as open_any
from napari_wsigpu.slide.slide import rgba_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from napari_wsigpu.compat.openslide.abstract import Filename
    from napari_wsigpu.slide.slide import Slide

Value = TypeVar("Value")


class OpenSlide(AbstractSlide):
    """An open slide.

    Once the file has failed, all but `close` raises the same `OpenSlideError`.

    Parameters
    ----------
    filename : str, bytes or PathLike
        Its path, or its URL.

    Attributes
    ----------
    slide : Slide
        The slide by this package's own names.

    Raises
    ------
    OpenSlideUnsupportedFormatError
        If the file is no slide, is not there, or has pixels that are not 8 bit gray or RGB.
    OpenSlideError
        If it can't be read.
    """

    def __init__(self, filename: Filename) -> None:
        self._filename = filename
        self._failure: str | None = None
        self._closed = False
        self.slide = _opened(filename)
        # Code for OpenSlide seldom closes its slides.
        self._close = weakref.finalize(self, self.slide.close)
        self._profile = self._work(lambda: self.slide.icc_profile)
        self._properties: Mapping[str, str] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._filename!r})"

    @classmethod
    def detect_format(cls, filename: Filename) -> str | None:
        """Return the vendor of a slide as OpenSlide names it; None if the file is no slide."""
        try:
            with open_any(os.fsdecode(filename)) as slide:
                return slide.vendor
        except SlideError:
            return None

    def close(self) -> None:
        """Let go of the file.

        Raises
        ------
        OpenSlideClosedError
            If that was done before.
        """
        if self._closed:
            raise OpenSlideClosedError(f"{self!r} was closed before.")
        self._closed = True
        self._close()

    @property
    def level_count(self) -> int:
        """Number of levels."""
        return self._work(lambda: self.slide.level_count)

    @property
    def level_dimensions(self) -> tuple[tuple[int, int], ...]:
        """(width, height) of each level."""
        return self._work(lambda: self.slide.level_dimensions)

    @property
    def level_downsamples(self) -> tuple[float, ...]:
        """How many pixels of level 0 one of each level spans."""
        return self._work(lambda: self.slide.level_downsamples)

    @property
    def properties(self) -> Mapping[str, str]:
        """All metadata by OpenSlide's names."""
        return self._items("_PropertyMap", self._named, lambda name: self._named()[name])

    @property
    def associated_images(self) -> Mapping[str, Image.Image]:
        """The pictures beside the slide by name, decoded when they are asked for."""
        return self._items(
            "_AssociatedImageMap", lambda: self.slide.associated_images, self._picture
        )

    def read_region(
        self, location: tuple[int, int], level: int, size: tuple[int, int]
    ) -> Image.Image:
        """Read a rectangle as an RGBA image; see `AbstractSlide.read_region`.

        A level that there is not is transparent, as OpenSlide has it.

        Raises
        ------
        OpenSlideClosedError
            If the slide was closed.
        OpenSlideError
            If the size can't be, or pixels can't be read or decoded.
        """
        return self._with_profile(self._work(lambda: self._region(location, level, size)))

    def set_cache(self, cache: OpenSlideCache) -> None:
        """Make the cache of the process at least as large as this one.

        Raises
        ------
        TypeError
            If it is no `OpenSlideCache`.
        """
        if not isinstance(cache, OpenSlideCache):
            raise TypeError(f"{cache!r} is no cache; give an OpenSlideCache.")
        self._work(cache.enlarge)

    def _region(self, location: tuple[int, int], level: int, size: tuple[int, int]) -> Image.Image:
        if not 0 <= level < self.slide.level_count:
            return Image.new("RGBA", (size[0], size[1]))
        pixels = self.slide.read_rgba(location, size, level)
        return Image.fromarray(pixels) if pixels.size else Image.new("RGBA", (size[0], size[1]))

    def _picture(self, name: str) -> Image.Image:
        picture = self.slide.associated_images[name]
        image = Image.fromarray(rgba_of(picture.read()))
        profile = picture.icc_profile
        if profile is not None:
            # One copy for all that have the same.
            image.info["icc_profile"] = self._profile if profile == self._profile else profile
        return image

    def _named(self) -> Mapping[str, str]:
        if self._properties is None:
            self._properties = openslide_properties(self.slide)
        return self._properties

    def _items(
        self, kind: str, names: Callable[[], Iterable[str]], make: Callable[[str], Value]
    ) -> Items[Value]:
        return Items(
            kind,
            lambda: self._work(lambda: list(names())),
            lambda name: self._work(lambda: make(name)),
        )

    def _work(self, read: Callable[[], Value]) -> Value:
        """Read, unless the slide was closed or has failed before."""
        if self._closed:
            raise OpenSlideClosedError(f"{self!r} was closed; open the slide again.")
        if self._failure is not None:
            raise OpenSlideError(self._failure)
        try:
            return read()
        except (RegionError, LevelError) as error:  # what was asked for can't be, but the next may
            raise OpenSlideError(str(error)) from error
        except SlideError as error:
            self._failure = str(error)
            raise OpenSlideError(self._failure) from error


def open_slide(filename: Filename) -> OpenSlide | ImageSlide:
    """Open a slide, or a flat image as a slide of one level.

    Raises
    ------
    OpenSlideError
        If it is a slide that can't be read.
    OSError
        If it is neither.
    """
    try:
        return OpenSlide(filename)
    except OpenSlideUnsupportedFormatError:
        return ImageSlide(filename)


def _opened(filename: Any) -> Slide:
    if not isinstance(filename, str | bytes | os.PathLike):
        raise OpenSlideArgumentError(f"{filename!r} is no path; give the name of a slide's file.")
    try:
        slide = open_any(os.fsdecode(filename))
    except (NotASlideError, SlideNotFoundError, UnsupportedSlideError) as error:
        raise OpenSlideUnsupportedFormatError(str(error)) from error
    except SlideError as error:
        raise OpenSlideError(str(error)) from error
    base = slide.layout.levels[0]
    if base.dtype != np.uint8 or base.channels not in (1, 3, 4):
        slide.close()
        raise OpenSlideUnsupportedFormatError(
            f"'{slide.path}' has {base.channels} channels of {base.dtype}, which no RGBA image "
            "shows; use napari_wsigpu.open_slide."
        )
    return slide
