"""Read DICOM Microscopy Bulk Simple Annotations (PS3.3, C.37) as outlines."""

from __future__ import annotations

import io
import math
import os
import zlib
from collections.abc import Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.annotations.annotation import Annotation
from napari_wsigpu.annotations.geojson import (
    LEAST,
    MAX_COORDINATE,
    check_bytes,
    check_counts,
    read_limited,
)
from napari_wsigpu.model.errors import AnnotationError, SlideError, file_error
from napari_wsigpu.model.limits import limits
from napari_wsigpu.model.reasons import parser_reason

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from numpy.typing import NDArray
    from pydicom import Dataset

    from napari_wsigpu.annotations.annotation import Color, Kind

    Image = str | os.PathLike[str] | Mapping[str, Any]
    Points = NDArray[np.float64]

HEAD, PREAMBLE, MAGIC = 1024, 128, b"DICM"
BULK_ANNOTATIONS = "1.2.840.10008.5.1.4.1.1.91.1"
# Tag and VR of MediaStorageSOPClassUID, encoded in Explicit VR Little Endian (PS3.10, 7.1).
CLASS_TAG = b"\x02\0\x02\0UI"
META_GROUP = 2
CENTER = 0.5  # of the first pixel, in pixels
NATIVE, DEFLATED = ("1.2.840.10008.1.2", "1.2.840.10008.1.2.1"), "1.2.840.10008.1.2.1.99"
# Kind of object and number of points per object (None: it varies) by GraphicType.
GRAPHICS: dict[str, tuple[Kind, int | None]] = {
    "POINT": ("points", 1),
    "POLYLINE": ("line", None),
    "POLYGON": ("polygon", None),
    "ELLIPSE": ("polygon", 4),
    "RECTANGLE": ("polygon", 4),
}
ELLIPSE_VERTICES = 64
# Coding scheme of classes without a standard code; "99" marks local schemes (PS3.16, 8.2).
SCHEME, UNCLASSIFIED = "99WSIGPU", "-"
DICOM = "dicom"  # key of `Annotation.extra` for the attributes `KEPT` of a group
KEPT = (
    "AnnotationGroupLabel", "AnnotationPropertyCategoryCodeSequence",
    "AnnotationPropertyTypeCodeSequence", "AnnotationGroupGenerationType",
    "AnnotationGroupAlgorithmIdentificationSequence", "AnatomicRegionSequence",
    "PrimaryAnatomicStructureSequence",
)  # fmt: skip


def is_dicom_annotations(path: str | os.PathLike[str]) -> bool:
    """Whether a file holds Microscopy Bulk Simple Annotations; False if it can't be read."""
    return sop_class(path) == BULK_ANNOTATIONS


def sop_class(path: str | os.PathLike[str]) -> str:
    """Return the SOP Class UID of a DICOM file; an empty string for any other file."""
    try:
        with Path(path).open("rb") as file:
            head = file.read(HEAD)
    except (OSError, ValueError):
        return ""
    _, found, value = head[PREAMBLE:].partition(CLASS_TAG)
    if not (found and head[PREAMBLE:].startswith(MAGIC)):
        return ""
    length = int.from_bytes(value[:2], "little")
    return value[2 : 2 + length].rstrip(b"\0").decode("ascii", "replace")


def read_dicom_annotations(
    path: str | os.PathLike[str], image: Image | None = None
) -> list[Annotation]:
    """Read the objects in a DICOM Microscopy Bulk Simple Annotations file.

    Parameters
    ----------
    path : str or PathLike
        The file.
    image : str or PathLike or Mapping, optional
        DICOM file of the slide's level 0, or ``slide.metadata["dicom"]``. Needed only if
        coordinates are in millimeters on the glass (AnnotationCoordinateType 3D).

    Returns
    -------
    list of Annotation
        Coordinates are in pixels of the referenced image, usually level 0; coordinates on the glass
        are converted to pixels of `image`. The label of a group is the class of its objects.
        Ellipses and rectangles become polygons. ``extra["dicom"]`` holds the codes of the object's
        group.

    Raises
    ------
    AnnotationError
        If the file is not valid, or pydicom is not installed.
    SlideError
        If a file cannot be read.

    Examples
    --------
    >>> nuclei = read_dicom_annotations("nuclei.dcm")  # doctest: +SKIP
    """
    name = os.fspath(path)
    dataset = read_data_set(name)
    if dataset.get("SOPClassUID") != BULK_ANNOTATIONS:
        raise AnnotationError(
            f"'{name}' is a DICOM file but has no Bulk Simple Annotations; choose another file."
        )
    if dataset.get("PixelOriginInterpretation", "VOLUME") != "VOLUME":
        raise AnnotationError(
            f"The outlines in '{name}' are relative to individual frames, which is not supported; "
            "export them relative to the whole image."
        )
    on_glass = dataset.get("AnnotationCoordinateType") == "3D"
    if on_glass and image is None:
        raise unlocated_error(name)
    with damage_errors(f"The annotations in '{name}' are damaged"):
        to_pixels = None if image is None or not on_glass else transform_of(image)
        found: list[Annotation] = []
        points = 0
        for group in dataset.get("AnnotationGroupSequence") or ():
            kind, rings = _rings(group, to_pixels)
            points += sum(map(len, rings))
            check_counts(name, len(found) + len(rings), points)
            label, color, kept = _class_name(group), display_color(group), _kept(group)
            found += [
                Annotation(
                    kind,
                    (ring,),
                    classification=label,
                    color=color,
                    measurements=measurements,
                    extra=kept,
                )
                for ring, measurements in zip(rings, _measurements(group, len(rings)), strict=True)
                if len(ring) >= LEAST[kind]
            ]
    return found


@contextmanager
def damage_errors(problem: str, advice: str = "export the file again") -> Iterator[None]:
    """Turn every error but a `SlideError` into an `AnnotationError`.

    pydicom and highdicom raise many kinds of errors on invalid values.
    """
    try:
        yield
    except SlideError:
        raise
    except Exception as error:
        raise AnnotationError(f"{problem} ({parser_reason(error)}); {advice}.") from error


def read_data_set(name: str, encapsulated: Collection[str] = ()) -> Dataset:
    """Read a DICOM file of at most `limits.geojson_bytes`, both as stored and after inflation.

    Parameters
    ----------
    name : str
        The file.
    encapsulated : collection of str
        Accepted transfer syntaxes with compressed frames.

    Raises
    ------
    AnnotationError
        If the file is damaged, has an unsupported transfer syntax or exceeds the limit, or if
        pydicom is not installed.
    SlideError
        If it cannot be read.
    """
    # Parse from memory: from a file, pydicom would allocate any size that a damaged element claims.
    stream = io.BytesIO(read_limited(name))
    try:
        from pydicom import dcmread
        from pydicom.filereader import read_dataset, read_preamble
    except ImportError as error:
        raise AnnotationError(
            f"Reading the DICOM file '{name}' requires optional packages ({error}); "
            'run pip install "napari-wsigpu[dicom]" and restart.'
        ) from error
    with damage_errors(f"'{name}' is not a readable DICOM file"):
        read_preamble(stream, force=False)
        is_body = lambda tag, *_: tag.group != META_GROUP  # noqa: E731
        meta = read_dataset(stream, False, True, stop_when=is_body)
        syntax = meta.get("TransferSyntaxUID")
        if syntax == DEFLATED:  # PS3.5, A.5; pydicom would inflate it to any size
            inflater = zlib.decompressobj(-zlib.MAX_WBITS)
            content = inflater.decompress(stream.read(), limits.geojson_bytes + 1)
            check_bytes(name, content)
            if not inflater.eof:
                raise ValueError("it is truncated")
            found = read_dataset(io.BytesIO(content), False, True)
            found.file_meta = meta
            return found
        if syntax not in (*NATIVE, *encapsulated):
            raise AnnotationError(
                f"'{name}' uses transfer syntax {syntax}, which is not supported; export it "
                "uncompressed."
            )
        stream.seek(0)
        return dcmread(stream)


def data_set(attributes: Mapping[str, Any]) -> Dataset:
    """Build a data set from a slide's metadata, which maps keywords to values."""
    from pydicom import Dataset
    from pydicom.datadict import tag_for_keyword

    found = Dataset()
    for keyword, value in attributes.items():
        tag = tag_for_keyword(keyword)
        if tag is None or tag >> 16 == META_GROUP:
            continue
        is_sequence = isinstance(value, list) and value and isinstance(value[0], dict)
        setattr(found, keyword, list(map(data_set, value)) if is_sequence else value)
    return found


class PixelTransform:
    """Conversion between the slide coordinate system and pixels of an image (PS3.3, C.8.12.2.1).

    The slide coordinate system is in millimeters; messages call it "on the glass".

    Parameters
    ----------
    header : Dataset
        The image's attributes.
    """

    def __init__(self, header: Dataset) -> None:
        [origin] = header.TotalPixelMatrixOriginSequence
        self._origin = np.array(
            [
                float(origin.XOffsetInSlideCoordinateSystem),
                float(origin.YOffsetInSlideCoordinateSystem),
            ]
        )
        self._directions = np.array(header.ImageOrientationSlide, np.float64).reshape(2, 3)[:, :2]
        self._sizes = np.array(pixel_size(header))

    def __call__(self, points: Points) -> Points:
        """Convert points on the glass to pixels; the first pixel's center is (0.5, 0.5)."""
        steps = self._directions / self._sizes[:, None]
        found: Points = (points[:, :2] - self._origin) @ steps.T + CENTER
        return found

    def on_glass(self, points: Points) -> Points:
        """Convert points in pixels to (x, y) in millimeters on the glass."""
        found: Points = (points - CENTER) * self._sizes @ self._directions + self._origin
        return found


def pixel_size(header: Dataset) -> tuple[float, float]:
    """Return the width and height of an image's pixels in millimeters."""
    [groups] = header.SharedFunctionalGroupsSequence
    row, column = map(float, groups.PixelMeasuresSequence[0].PixelSpacing)
    return column, row


def transform_of(image: Image) -> PixelTransform:
    """Return an image's `PixelTransform`, read from its file or from a slide's metadata.

    Raises
    ------
    SlideError
        If the file cannot be read.
    """
    from pydicom import dcmread

    if isinstance(image, Mapping):
        return PixelTransform(data_set(image))
    name = os.fspath(image)
    try:
        return PixelTransform(dcmread(name, stop_before_pixels=True, defer_size=HEAD))
    except OSError as error:
        raise file_error(name, error) from error


def unlocated_error(name: str) -> AnnotationError:
    """Return the error for a file whose outlines cannot be located without its slide."""
    return AnnotationError(
        f"The outlines in '{name}' are in millimeters on the glass: in napari, open their DICOM "
        "slide first; in a script, pass the DICOM file of its level 0 as `image`."
    )


def _rings(group: Dataset, to_pixels: PixelTransform | None) -> tuple[Kind, list[Points]]:
    """Return the kind of a group's objects, and the vertices of each."""
    kind, fixed = GRAPHICS[str(group.GraphicType)]
    single = "PointCoordinatesData" in group
    stored = group.PointCoordinatesData if single else group.DoublePointCoordinatesData
    values = np.frombuffer(stored, "<f4" if single else "<f8")
    # A z coordinate that all points share is stored once (C.37.1.2).
    is_flat = to_pixels is None or "CommonZCoordinateValue" in group
    per_point = 2 if is_flat else 3
    points = values.reshape(-1, per_point).astype(np.float64)
    if not (np.abs(points) <= MAX_COORDINATE).all():
        raise ValueError("a coordinate is not finite or is too large for a slide")
    points = points if to_pixels is None else to_pixels(points)
    count = int(group.NumberOfAnnotations)
    if fixed is None:
        # Position of each object's first coordinate in `values`, counted from 1 (C.37.1.2).
        first = np.frombuffer(group.LongPrimitivePointIndexList, "<u4").astype(np.int64) - 1
        starts, rest = np.divmod(first, per_point)
        if rest.any():
            raise ValueError("an index points into the middle of a point")
    else:
        starts = np.arange(0, fixed * count, fixed)
    bounds = np.append(starts, len(points))
    if len(starts) != count or (np.diff(bounds) < 1).any() or (bounds[0] != 0 and count):
        raise ValueError(f"the points don't match the number of objects, {count}")
    if group.GraphicType == "ELLIPSE":
        points, bounds = ellipse_vertices(points), np.arange(count + 1) * ELLIPSE_VERTICES
    ends = bounds.tolist()
    return kind, [points[a:b] for a, b in pairwise(ends)]


def _class_name(group: Dataset) -> str:
    [kind] = group.get("AnnotationPropertyTypeCodeSequence") or [None]
    if kind is not None and kind.get("CodingSchemeDesignator") == SCHEME:
        value = _local_name(kind)
        return "" if value == UNCLASSIFIED else value
    return str(group.get("AnnotationGroupLabel", ""))


def _local_name(code: Dataset) -> str:
    return str(code.get("CodeValue") or code.LongCodeValue)


def display_color(group: Dataset) -> Color | None:
    """Return the color of a group or segment, converted from CIELab (PS3.3, C.10.7.1.1)."""
    stated = group.get("RecommendedDisplayCIELabValue")
    if stated is None:
        return None
    from highdicom.color import CIELabColor

    red, green, blue = CIELabColor.from_dicom_value(stated).to_rgb(clip=True)
    return red, green, blue


def _kept(group: Dataset) -> dict[str, object]:
    from pydicom import Dataset

    return {DICOM: Dataset({group[name].tag: group[name] for name in KEPT if name in group})}


def ellipse_vertices(points: Points) -> Points:
    """Return vertices of ellipses, given the ends of their major and minor axes."""
    ends = points.reshape(-1, 2, 2, 2)  # ellipse, axis, end, coordinate
    centers, axes = ends[:, 0].mean(1), (ends[:, :, 1] - ends[:, :, 0]) / 2
    angles = np.arange(ELLIPSE_VERTICES) * (2 * math.pi / ELLIPSE_VERTICES)
    circle = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    vertices: Points = centers[:, None] + circle @ axes
    return vertices.reshape(-1, 2)


def _measurements(group: Dataset, count: int) -> list[dict[str, float]]:
    """Return the measured values of each object of a group (C.37.1.3)."""
    found: list[dict[str, float]] = [{} for _ in range(count)]
    for item in group.get("MeasurementsSequence") or ():
        [name] = item.ConceptNameCodeSequence
        local = name.get("CodingSchemeDesignator") == SCHEME
        concept = _local_name(name) if local else str(name.CodeMeaning)
        title = with_unit(concept, item.get("MeasurementUnitsCodeSequence"))
        stated = item.MeasurementValuesSequence[0]
        values = np.frombuffer(stated.FloatingPointValues, "<f4").tolist()
        indices = stated.get("AnnotationIndexList")
        chosen = range(count)
        if indices is not None:
            chosen = (np.frombuffer(indices, "<u4").astype(np.int64) - 1).tolist()
        for index, value in zip(chosen, values, strict=True):
            found[index][title] = value
    return found


def with_unit(concept: str, units: Sequence[Dataset] | None) -> str:
    """Append the UCUM unit to the name of a measurement, unless it has no unit."""
    value = units[0].CodeValue if units else "1"
    return concept if value == "1" else f"{concept} {value}"
