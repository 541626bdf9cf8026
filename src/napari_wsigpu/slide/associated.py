"""`AssociatedImage`: thumbnail, label or macro of a slide."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from napari_wsigpu.codecs.color import wants_srgb
from napari_wsigpu.model.errors import UnsupportedSlideError
from napari_wsigpu.model.limits import limits
from napari_wsigpu.model.units import byte_size

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from napari_wsigpu.codecs.color import Color, EmbeddedProfile
    from napari_wsigpu.model.layout import AssociatedLayout
    from napari_wsigpu.reading.level import LevelArray


@dataclass(eq=False, repr=False)
class AssociatedImage:
    """A picture that travels with a slide (thumbnail, label, macro), decoded when read.

    Attributes
    ----------
    name : str
        Name of the picture.
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

    def read(self, color: Color = "stored") -> NDArray[Any]:
        """Decode the whole picture.

        Parameters
        ----------
        color : {"stored", "srgb"}
            Pixels as they are, or in sRGB by the picture's own ICC profile.

        Returns
        -------
        ndarray, shape (height, width, channels)

        Raises
        ------
        SlideError
            If it can't be read or decoded, or has no profile that can be applied.
        """
        if self._refusal is not None:
            raise UnsupportedSlideError(
                f"The {self.name} image of '{self._array.slide.path}' can't be decoded: "
                f"{self._refusal}; the slide itself can."
            )
        size = math.prod(self._array.shape) * self._array.dtype.itemsize
        if size > limits.tile_bytes:
            raise UnsupportedSlideError(
                f"The {self.name} image of '{self._array.slide.path}' claims {byte_size(size)}, "
                f"too much to decode: {limits.advice('tile_bytes')}."
            )
        if not wants_srgb(color):
            return self._array[...]
        self._profile.profile()
        return self._profile.converted(self._array[...])

    @property
    def icc_profile(self) -> bytes | None:
        """The picture's own ICC profile; None where the file has none.

        Raises
        ------
        SlideError
            If the file can't be read.
        """
        return self._profile.data()

    def __repr__(self) -> str:
        return f"<AssociatedImage {self.name} {self.size[0]} x {self.size[1]}>"
