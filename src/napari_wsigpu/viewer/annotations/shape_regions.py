"""Individual shapes as regions of a slide, with their outlines."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.model.errors import RegionError
from napari_wsigpu.viewer.annotations.annotation_layers import (
    CENTER,
    placement,
    shape_annotations,
    to_pixels,
)
from napari_wsigpu.viewer.view.region import region_around, selection

if TYPE_CHECKING:
    from napari import Viewer
    from napari.layers import Layer, Shapes
    from numpy.typing import NDArray

    from napari_wsigpu.slide.slide import Slide
    from napari_wsigpu.viewer.view.region import Region


class ShapeRegion(NamedTuple):
    """The region and the outline of one shape.

    Attributes
    ----------
    number : int
        Index of the shape in its layer, counted from 1.
    region : Region
        Bounding box on the slide.
    outline : tuple of ndarray, shape (vertices, 2)
        Rings of the shape, (x, y) in pixels of level 0.
    """

    number: int
    region: Region
    outline: tuple[NDArray[np.float64], ...]


def shape_regions(viewer: Viewer, shapes: Shapes, layer: Layer, slide: Slide) -> list[ShapeRegion]:
    """Return the regions of a layer's selected shapes, or of all shapes if none are selected.

    Lines and paths are skipped.

    Parameters
    ----------
    viewer, shapes, layer, slide
        See `napari_wsigpu.viewer.view.region.drawn`.

    Raises
    ------
    RegionError
        If no shape has an area, or one of them contains no pixel of the slide.
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
    result, notes = [], selection(shapes)
    for index, annotation in zip(chosen, found, strict=True):
        pixels = np.concatenate(annotation.rings)[:, ::-1] - CENTER
        try:
            region = region_around(pixels, slide, *notes)
        except RegionError as error:
            raise RegionError(f"Shape {index + 1} can't be exported. {error}") from error
        result.append(ShapeRegion(index + 1, region, annotation.rings))
    return result
