"""Lengths and areas of annotations, in micrometers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.annotations.rings import area_and_centroid, uncrossed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.annotations.annotation import Annotation


class Measurement(NamedTuple):
    """Size of an object; None for values that do not apply to its kind.

    Attributes
    ----------
    length : float or None
        Length of a line in micrometers.
    perimeter : float or None
        Perimeter of a polygon or ellipse in micrometers, including the edges of holes.
    area : float or None
        Area of a polygon or ellipse in square micrometers, without holes.
    center : tuple of float, optional
        (x, y) of the centroid of a polygon or ellipse, or of the middle of another object's
        bounding box, in micrometers from the slide's upper left corner.
    """

    length: float | None = None
    perimeter: float | None = None
    area: float | None = None
    center: tuple[float, float] | None = None


def measure(annotation: Annotation, mpp: tuple[float, float]) -> Measurement:
    """Measure an object.

    Parameters
    ----------
    annotation : Annotation
        The object. Where a ring crosses itself, its area follows the even-odd rule.
    mpp : tuple of float
        Micrometers per pixel of level 0, (x, y), as in `Slide.mpp`; (1, 1) measures in pixels.

    Returns
    -------
    Measurement
    """
    scaled = [ring * mpp for ring in annotation.rings]
    if not scaled:  # a polygon of which only two vertices are drawn
        return Measurement()
    if annotation.kind in ("points", "line"):
        every = np.concatenate(scaled)
        x, y = ((every.min(axis=0) + every.max(axis=0)) / 2).tolist()
        if annotation.kind == "points":
            return Measurement(center=(x, y))
        steps = [np.diff(ring, axis=0) for ring in scaled]
        return Measurement(_length(steps), center=(x, y))
    around = [ring - np.roll(ring, 1, axis=0) for ring in scaled]
    area, center = area_and_centroid([loop for ring in scaled for loop in uncrossed(ring)])
    perimeter, (x, y) = _length(around), center.tolist()
    if annotation.kind == "ellipse":
        # Its vertices lie on the ellipse, so the polygon is smaller (0.07 % of the area for 96).
        turn = 2 * np.pi / len(scaled[0])
        area, perimeter = area * turn / np.sin(turn), perimeter * turn / 2 / np.sin(turn / 2)
    return Measurement(perimeter=perimeter, area=area, center=(x, y))


def _length(steps: Sequence[NDArray[np.float64]]) -> float:
    return sum(float(np.hypot(*step.T).sum()) for step in steps)
