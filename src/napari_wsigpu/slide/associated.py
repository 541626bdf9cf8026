"""`AssociatedImage`: thumbnail, label or macro of a slide."""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from napari_wsigpu.codecs.color import is_srgb
from napari_wsigpu.model.errors import UnsupportedSlideError
from napari_wsigpu.model.limits import limits
from napari_wsigpu.model.units import byte_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from napari_wsigpu.codecs.color import Color, EmbeddedProfile
    from napari_wsigpu.model.arrays import Array
    from napari_wsigpu.model.layout import AssociatedLayout
    from napari_wsigpu.reading.level import LevelArray


@dataclass(eq=False, repr=False)
class AssociatedImage:
    """An image stored with a slide (thumbnail, label, macro), decoded by `read`.

    Attributes
    ----------
    name : str
        Name of the image.
    size : tuple of int
        (width, height) in pixels.
    """

    _layout: AssociatedLayout
    _array: LevelArray
    _refusal: str | None
    _profile: EmbeddedProfile

    def __post_init__(self) -> None:
        self.name = self._layout.name
        self.size = self._layout.image.width, self._layout.image.height

    def read(self, color: Color = "stored") -> Array:
        """Decode the whole image.

        Parameters
        ----------
        color : {"stored", "srgb"}
            Pixels as stored, or converted to sRGB by the image's own ICC profile.

        Returns
        -------
        ndarray, shape (height, width, channels)

        Raises
        ------
        SlideError
            If the image cannot be read or decoded, or has no usable profile.
        """
        if self._refusal is not None:
            raise UnsupportedSlideError(
                f"The {self.name} image of '{self._array.slide.path}' can't be decoded: "
                f"{self._refusal}; the slide itself can be read."
            )
        # Check the size stated in the file before allocating any memory.
        size = math.prod(self._array.shape) * self._array.dtype.itemsize
        if size > limits.tile_bytes:
            raise UnsupportedSlideError(
                f"The {self.name} image of '{self._array.slide.path}' is too large to decode "
                f"({byte_size(size)}): {limits.advice('tile_bytes')}."
            )
        if not is_srgb(color):
            return self._array[...]
        self._profile.profile()
        return self._profile.converted(self._array[...])

    @property
    def icc_profile(self) -> bytes | None:
        """The image's own ICC profile; None if the file has none.

        Raises
        ------
        SlideError
            If the file cannot be read.
        """
        return self._profile.data()

    def __reduce__(self) -> tuple[Callable[..., AssociatedImage], tuple[object, ...]]:
        return _of_slide, (self._array.slide, self.name)

    def __repr__(self) -> str:
        return f"<AssociatedImage {self.name} {self.size[0]} x {self.size[1]}>"


def _of_slide(slide: object, name: str) -> AssociatedImage:
    images: Mapping[str, AssociatedImage] = attrgetter("associated_images")(slide)
    return images[name]
