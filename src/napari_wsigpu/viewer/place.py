"""Where a slide lies in a viewer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from napari_wsigpu.formats.wsigpu import first_pixel, region_of

if TYPE_CHECKING:
    from napari_wsigpu.slide.slide import Slide


class Place(NamedTuple):
    """What takes a slide's pixels to a viewer's coordinates.

    Attributes
    ----------
    scale : tuple of float
        Size of a pixel of level 0, (x, y).
    first : tuple of float
        Where the centre of the first pixel lies, (x, y).
    known : bool
        Whether these are micrometres; else they are pixels.
    """

    scale: tuple[float, float]
    first: tuple[float, float]
    known: bool

    def attributes(
        self, step: tuple[float, float] = (1, 1), offset: tuple[float, float] = (0, 0)
    ) -> dict[str, Any]:
        """Return a layer's attributes for a picture on the slide.

        Parameters
        ----------
        step : tuple of float
            How many pixels of level 0 one of its pixels spans, (x, y).
        offset : tuple of float
            Where its upper left corner lies, (x, y) in pixels of level 0.
        """
        # napari counts from the centre of the first pixel.
        shift = [at + (length - 1) / 2 for at, length in zip(offset, step, strict=True)]
        scale = tuple(size * length for size, length in zip(self.scale, step, strict=True))
        translate = tuple(
            first + size * at for first, size, at in zip(self.first, self.scale, shift, strict=True)
        )
        found: dict[str, Any] = {
            "scale": scale[::-1],
            "translate": translate[::-1],
            "axis_labels": ("y", "x"),
        }
        if self.known:
            found["units"] = ("micrometer", "micrometer")
        return found


def place_of(slide: Slide) -> Place:
    """Return where a slide lies, as its file says; a region, where it was cut from its slide."""
    region = region_of(slide.metadata)
    if region is None:
        return Place(slide.mpp or (1.0, 1.0), slide.layout.first, slide.mpp is not None)
    return Place(*first_pixel(region, slide.dimensions, slide.mpp), slide.mpp is not None)
