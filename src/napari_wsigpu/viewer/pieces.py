"""Shapes as regions of a slide, each for itself, with its outline."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.model.errors import RegionError
from napari_wsigpu.viewer.annotations import CENTRE, placement, shape_annotations, to_pixels
from napari_wsigpu.viewer.region import region_around

if TYPE_CHECKING:
    from napari import Viewer
    from napari.layers import Layer, Shapes
    from numpy.typing import NDArray

    from napari_wsigpu.slide.slide import Slide
    from napari_wsigpu.viewer.region import Region


class Piece(NamedTuple):
    """One shape.

    Attributes
    ----------
    number : int
        Its row in the table of shapes, counted from 1.
    region : Region
        Its bounding box on the slide.
    outline : tuple of ndarray, shape (vertices, 2)
        Its rings, (x, y) in pixels of level 0.
    """

    number: int
    region: Region
    outline: tuple[NDArray[np.float64], ...]


def pieces(viewer: Viewer, shapes: Shapes, layer: Layer, slide: Slide) -> list[Piece]:
    """Return the selected shapes of a layer, or all if none is; lines are left out.

    Parameters
    ----------
    viewer, shapes, layer, slide
        As of `napari_wsigpu.viewer.region.drawn`.

    Raises
    ------
    RegionError
        If there is none, or one lies outside of the slide or holds no pixel of it.
    """
    outlines, types = shapes.data, [str(each) for each in shapes.shape_type]
    chosen = sorted(shapes.selected_data) or range(len(outlines))
    chosen = [index for index in chosen if types[index] not in ("line", "path")]
    if not chosen:
        raise RegionError(f"The layer '{shapes.name}' has no shape with an area; draw one in it.")
    found = shape_annotations(
        [outlines[index] for index in chosen],
        [types[index] for index in chosen],
        to_pixels(viewer, placement(shapes), shapes.ndim, layer),
    )
    result = []
    for index, annotation in zip(chosen, found, strict=True):
        pixels = np.concatenate(annotation.rings)[:, ::-1] - CENTRE
        try:
            region = region_around(pixels, slide)
        except RegionError as error:
            raise RegionError(f"Shape {index + 1} can't be exported. {error}") from error
        result.append(Piece(index + 1, region, annotation.rings))
    return result
