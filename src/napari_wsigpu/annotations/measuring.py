"""Lengths and areas on the glass."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.annotations.rings import areas, polygons

if TYPE_CHECKING:
    from napari_wsigpu.annotations.annotation import Annotation


class Measurement(NamedTuple):
    """How large an object is; None for what it has not.

    Attributes
    ----------
    length : float or None
        Of a line, in micrometres.
    perimeter : float or None
        Of a polygon or ellipse in micrometres, around its holes too.
    area : float or None
        Of a polygon or ellipse in square micrometres, without its holes.
    """

    length: float | None = None
    perimeter: float | None = None
    area: float | None = None


def measure(annotation: Annotation, mpp: tuple[float, float]) -> Measurement:
    """Measure an object.

    Parameters
    ----------
    annotation : Annotation
        Parts of an outline that crosses itself count as they lie to its left or right.
    mpp : tuple of float
        Micrometres a pixel of level 0, (x, y), as `Slide.mpp`; (1, 1) measures in pixels.

    Returns
    -------
    Measurement
    """
    scaled = [ring * mpp for ring in annotation.rings]
    if annotation.kind == "points":
        return Measurement()
    if annotation.kind == "line":
        steps = [np.diff(ring, axis=0) for ring in scaled]
        return Measurement(length=sum(float(np.hypot(*step.T).sum()) for step in steps))
    around = [ring - np.roll(ring, 1, axis=0) for ring in scaled]
    area = 0.0
    for outer, *holes in polygons(scaled):
        [size] = areas([outer])
        area += size - sum(areas(holes))
    return Measurement(perimeter=sum(float(np.hypot(*step.T).sum()) for step in around), area=area)
