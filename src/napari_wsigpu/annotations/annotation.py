"""`Annotation`: one object on a slide, in pixels of level 0."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    Kind = Literal["polygon", "ellipse", "line", "points"]
    Color = tuple[int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Annotation:
    """One object on a slide.

    Attributes
    ----------
    kind : {"polygon", "ellipse", "line", "points"}
        What its vertices mean.
    rings : tuple of ndarray of float, shape (vertices, 2)
        (x, y) in pixels of level 0, counted from the upper left corner of its first pixel, whose
        centre is (0.5, 0.5). Of a polygon, its rings, not closed: a point belongs to it if an odd
        number of them go around it, so that there may be holes and several parts. Of an
        ellipse along the slide's axes, an outline. Of a line, each of its pieces.
    name : str
        As a user named it; may be empty.
    classification : str
        Its class, as ``"Tumor"`` or ``"Tumor: Positive"``; empty for none.
    color : tuple of int, optional
        Red, green and blue, of the class if there is one, 0 to 255.
    object_type : str
        As QuPath calls it: ``"annotation"``, ``"detection"``, ``"cell"``, ``"tile"``, ...
    locked : bool
        Whether it shall not be moved.
    measurements : Mapping of str to float
        Numbers by their names.
    id : str
        A UUID, or empty.
    nucleus : tuple of ndarray of float, shape (vertices, 2)
        Of a cell, rings around its nucleus; none where there is none.
    extra : Mapping of str
        What else a GeoJSON feature said of it, to be written again as it is.
    """

    kind: Kind
    rings: tuple[NDArray[np.float64], ...]
    name: str = ""
    classification: str = ""
    color: Color | None = None
    object_type: str = "annotation"
    locked: bool = False
    measurements: Mapping[str, float] = field(default_factory=dict)
    id: str = ""
    nucleus: tuple[NDArray[np.float64], ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
