"""`Annotation`: one object on a slide, in pixels of level 0."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from napari_wsigpu.annotations.rings import Ring

    Kind = Literal["polygon", "ellipse", "line", "points"]
    Color = tuple[int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Annotation:
    """One object on a slide.

    Attributes
    ----------
    kind : {"polygon", "ellipse", "line", "points"}
        Meaning of the vertices.
    rings : tuple of ndarray of float, shape (vertices, 2)
        (x, y) in pixels of level 0, measured from the upper left corner of its first pixel, whose
        center is (0.5, 0.5). For a polygon: its rings, not closed; a point is inside if an odd
        number of rings surround it, so holes and several parts are possible. For an ellipse: its
        outline; its axes are parallel to the slide's. For a line: each of its parts. For points:
        their positions.
    name : str
        Name that a user chose; may be empty.
    classification : str
        Class, such as ``"Tumor"`` or ``"Tumor: Positive"``; may be empty.
    color : tuple of int, optional
        Red, green and blue from 0 to 255; the class's color if the object has a class.
    object_type : str
        QuPath's type: ``"annotation"``, ``"detection"``, ``"cell"``, ``"tile"``, ...
    locked : bool
        Whether the object is protected from moving and editing.
    measurements : Mapping of str to float
        Measured values by name.
    id : str
        A UUID, or empty.
    nucleus : tuple of ndarray of float, shape (vertices, 2)
        For a cell, the rings of its nucleus, if it has one.
    extra : Mapping of str
        The geometry's ``plane`` and unknown properties of the GeoJSON feature, which are written
        back unchanged. ``extra["dicom"]`` holds the codes of the object's group in a DICOM file.
    """

    kind: Kind
    rings: tuple[Ring, ...]
    name: str = ""
    classification: str = ""
    color: Color | None = None
    object_type: str = "annotation"
    locked: bool = False
    measurements: Mapping[str, float] = field(default_factory=dict)
    id: str = ""
    nucleus: tuple[Ring, ...] = ()
    extra: Mapping[str, object] = field(default_factory=dict)
