"""Regions in DICOM structured reports (PS3.16, TID 1500; PS3.3, C.18.6 and C.18.9)."""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.annotations.annotation import Annotation
from napari_wsigpu.annotations.dicom_annotations import (
    damage_errors,
    ellipse_vertices,
    read_data_set,
    transform_of,
    unlocated_error,
    with_unit,
)
from napari_wsigpu.annotations.geojson import DEEPEST, LEAST, MAX_COORDINATE, check_counts
from napari_wsigpu.annotations.rings import without_repeated_end
from napari_wsigpu.model.errors import AnnotationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pydicom import Dataset

    from napari_wsigpu.annotations.annotation import Kind
    from napari_wsigpu.annotations.dicom_annotations import Image, PixelTransform
    from napari_wsigpu.annotations.rings import Ring

# Enhanced, Comprehensive and Comprehensive 3D SR. Other report classes are not supported.
REPORTS = tuple(f"1.2.840.10008.5.1.4.1.1.88.{number}" for number in (22, 33, 34))
FINDING, TRACKING = "121071", "112039"  # codes of the scheme DCM
AXES = np.array([[-1, 0], [1, 0], [0, -1], [0, 1]])


def read_dicom_report(path: str | os.PathLike[str], image: Image | None = None) -> list[Annotation]:
    """Read the regions in a DICOM structured report.

    Parameters
    ----------
    path : str or PathLike
        The file.
    image : str or PathLike or Mapping, optional
        DICOM file of the slide's level 0, or ``slide.metadata["dicom"]``. Needed only for regions
        in millimeters on the glass (SCOORD3D).

    Returns
    -------
    list of Annotation
        Coordinates are in pixels of the referenced image, usually level 0; coordinates on the glass
        are converted to pixels of `image`. The finding of a measurement group is the class of its
        regions, and the tracking identifier is their name. Circles and ellipses become polygons.

    Raises
    ------
    AnnotationError
        If the file is not valid, or pydicom is not installed.
    SlideError
        If a file cannot be read.

    Examples
    --------
    >>> regions = read_dicom_report("report.dcm")  # doctest: +SKIP
    """
    name = os.fspath(path)
    dataset = read_data_set(name)
    if dataset.get("SOPClassUID") not in REPORTS:
        raise AnnotationError(
            f"'{name}' is a DICOM file, but not a report with regions; choose another file."
        )

    @cache
    def transform() -> PixelTransform:
        if image is None:
            raise unlocated_error(name)
        return transform_of(image)

    found: list[Annotation] = []
    points = 0
    with damage_errors(f"The report in '{name}' is damaged"):
        for annotation in _regions(dataset, Annotation("polygon", ()), transform, DEEPEST):
            points += sum(map(len, annotation.rings))
            check_counts(name, len(found) + 1, points)
            found.append(annotation)
    return found


def _regions(
    container: Dataset, known: Annotation, transform: Callable[[], PixelTransform], depth: int
) -> Iterator[Annotation]:
    """Yield a content item's regions; they inherit the name, class and measurements of `known`."""
    items = container.get("ContentSequence") or ()
    if not depth:
        raise ValueError("its items are nested too deeply")
    known = _inherited(items, known)
    for item in items:
        if item.get("ValueType") in ("SCOORD", "SCOORD3D"):
            kind, ring = _shape(item, transform)
            if len(ring) >= LEAST[kind]:
                yield Annotation(
                    kind,
                    (ring,),
                    name=known.name,
                    classification=known.classification,
                    measurements=known.measurements,
                )
        yield from _regions(item, known, transform, depth - 1)


def _inherited(items: Sequence[Dataset], known: Annotation) -> Annotation:
    """Return `known` updated with the name, class and measurements given in a container."""
    name, finding = known.name, known.classification
    measurements: dict[str, float] = {}
    for item in items:
        concept = next(iter(item.get("ConceptNameCodeSequence") or ()), None)
        kind = item.get("ValueType")
        if concept is None:
            continue
        if kind == "CODE" and concept.get("CodeValue") == FINDING:
            finding = str(item.ConceptCodeSequence[0].CodeMeaning)
        elif kind == "TEXT" and concept.get("CodeValue") == TRACKING:
            name = str(item.TextValue)
        elif kind == "NUM":
            for value in item.get("MeasuredValueSequence") or ():
                units = value.get("MeasurementUnitsCodeSequence")
                title = with_unit(str(concept.CodeMeaning), units)
                measurements[title] = float(value.NumericValue)
    measured = measurements or known.measurements
    return Annotation("polygon", (), name, finding, measurements=measured)


def _shape(item: Dataset, transform: Callable[[], PixelTransform]) -> tuple[Kind, Ring]:
    """Return the kind and the vertices of a region."""
    on_glass = item.ValueType == "SCOORD3D"
    points = np.array(item.GraphicData, np.float64).reshape(-1, 3 if on_glass else 2)
    if not (np.abs(points) <= MAX_COORDINATE).all():
        raise ValueError("a coordinate is not finite or is too large for a slide")
    if on_glass:
        points = transform()(points)
    elif item.get("PixelOriginInterpretation", "VOLUME") != "VOLUME":
        raise ValueError("its regions are relative to individual frames, which is not supported")
    graphic = item.GraphicType
    if graphic in ("POINT", "MULTIPOINT"):
        return "points", points
    if graphic == "CIRCLE":
        center, rim = points
        return "polygon", ellipse_vertices(center + AXES * np.hypot(*(rim - center)))
    if graphic == "ELLIPSE":
        return "polygon", ellipse_vertices(points)
    if graphic not in ("POLYLINE", "POLYGON"):
        raise ValueError(f"regions of type {graphic!r} are not supported")
    # A closed outline repeats its first vertex (C.18.6.1.2).
    ring = without_repeated_end(points)
    is_polygon = graphic == "POLYGON" or len(ring) < len(points)
    return ("polygon" if is_polygon else "line"), ring
