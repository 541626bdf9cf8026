"""The transform from a slide's pixels to a viewer's world coordinates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from napari_wsigpu.formats.wsigpu import first_pixel, region_of

if TYPE_CHECKING:
    from napari_wsigpu.slide.slide import Slide

    # Keyword arguments for the constructor of a napari layer.
    Attributes = dict[str, Any]


class Placement(NamedTuple):
    """Scale and offset of a slide in world coordinates.

    Attributes
    ----------
    scale : tuple of float
        Size of a pixel of level 0, (x, y).
    first : tuple of float
        Position of the center of the first pixel, (x, y).
    known : bool
        Whether the unit is micrometers; otherwise it is pixels.
    """

    scale: tuple[float, float]
    first: tuple[float, float]
    known: bool

    def attributes(
        self, step: tuple[float, float] = (1, 1), offset: tuple[float, float] = (0, 0)
    ) -> Attributes:
        """Return the layer attributes that place an image on the slide.

        Parameters
        ----------
        step : tuple of float
            Size of a pixel of the image, (x, y) in pixels of level 0.
        offset : tuple of float
            Position of the image's upper left corner, (x, y) in pixels of level 0.
        """
        # The origin of napari's data coordinates is the center of the first pixel.
        shift = [at + (length - 1) / 2 for at, length in zip(offset, step, strict=True)]
        scale = tuple(size * length for size, length in zip(self.scale, step, strict=True))
        translate = tuple(
            first + size * at for first, size, at in zip(self.first, self.scale, shift, strict=True)
        )
        found: Attributes = {
            "scale": scale[::-1],
            "translate": translate[::-1],
            "axis_labels": ("y", "x"),
        }
        if self.known:
            found["units"] = ("micrometer", "micrometer")
        return found


def placement_of(slide: Slide) -> Placement:
    """Return a slide's placement; an exported region is placed where it was cut out."""
    region = region_of(slide.metadata)
    # An OME-Zarr states the region's position itself, including the offset of the original image.
    if region is None or (slide.mpp is not None and any(slide.layout.first)):
        return Placement(slide.mpp or (1.0, 1.0), slide.layout.first, slide.mpp is not None)
    return Placement(*first_pixel(region, slide.dimensions, slide.mpp), slide.mpp is not None)
