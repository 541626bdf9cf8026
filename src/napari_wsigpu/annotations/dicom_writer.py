"""Write annotations as DICOM Microscopy Bulk Simple Annotations (PS3.3, C.37)."""

from __future__ import annotations

import io
from collections import defaultdict
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from napari_wsigpu.annotations.dicom_annotations import (
    DICOM,
    SCHEME,
    UNCLASSIFIED,
    damage_errors,
    data_set,
    is_dicom_annotations,
)
from napari_wsigpu.annotations.geojson import replace_file
from napari_wsigpu.annotations.rings import joined, without_repeated_end
from napari_wsigpu.model.errors import AnnotationError, TargetExistsError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from highdicom.ann import AnnotationGroup
    from numpy.typing import NDArray
    from pydicom import Dataset

    from napari_wsigpu.annotations.annotation import Annotation
    from napari_wsigpu.annotations.rings import Ring

    Code = tuple[str, str, str]

PACKAGE = "napari-wsigpu"
GRAPHICS = {"points": "POINT", "line": "POLYLINE", "polygon": "POLYGON", "ellipse": "POLYGON"}
# Property categories as (code value, scheme, meaning) (PS3.16, CID 7150). `CODES` maps some classes
# to a category and a type; other classes get a code from a local scheme (PS3.16, 8.2).
STRUCTURE, ABNORMAL, PLACE = (
    ("91723000", "SCT", "Anatomical Structure"),
    ("49755003", "SCT", "Morphologically Abnormal Structure"),
    ("309825002", "SCT", "Spatial and Relational Concept"),
)
CODES: dict[str, tuple[Code, Code]] = {
    "cell": (STRUCTURE, ("4421005", "SCT", "Cell")),
    "nucleus": (STRUCTURE, ("84640000", "SCT", "Nucleus")),
    "tumor": (ABNORMAL, ("108369006", "SCT", "Neoplasm")),
    "necrosis": (ABNORMAL, ("6574001", "SCT", "Necrosis")),
}
LONGEST = 64  # characters of a label or meaning (PS3.5, section 6.2: LO)
SEXES = "M", "F", "O"
# Attributes that every DICOM instance in a study must have, but that slides may lack.
OFTEN_MISSING = (
    "PatientName", "PatientID", "PatientBirthDate", "PatientSex", "AccessionNumber", "StudyID",
    "StudyDate", "StudyTime", "ReferringPhysicianName", "FrameOfReferenceUID",
)  # fmt: skip
REFERENCES = (
    "SOPClassUID", "SOPInstanceUID", "StudyInstanceUID", "SeriesInstanceUID", "FrameOfReferenceUID",
    "Modality",
)  # fmt: skip


class DicomSlide(Protocol):
    """The parts of a slide that the writer needs."""

    @property
    def path(self) -> str:
        """Path of the slide."""

    @property
    def vendor(self) -> str:
        """``"dicom"`` for a DICOM slide."""

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata; the attributes of level 0 are under "dicom"."""


def write_dicom_annotations(
    path: str | os.PathLike[str],
    annotations: Iterable[Annotation],
    slide: DicomSlide,
    *,
    private: bool = False,
) -> None:
    """Write objects as Microscopy Bulk Simple Annotations of a DICOM slide.

    Parameters
    ----------
    path : str or PathLike
        The file; an existing file is replaced if it holds DICOM annotations.
    annotations : iterable of Annotation
        Objects in pixels of level 0. Coordinates, classes, colors and float32 measurements are
        written; names, ids and nuclei are not. A polygon of several rings becomes one outline that
        encloses the same area by the even-odd rule. Each part of a line and each point becomes a
        separate object. Objects read from DICOM keep the codes of their group, unless their class
        has changed; all others are recorded as drawn by hand.
    slide : Slide
        The slide that the file will refer to.
    private : bool
        Whether to copy the slide's patient, study and specimen attributes.

    Raises
    ------
    AnnotationError
        If the slide is not DICOM, the annotations cannot be expressed in DICOM, or highdicom is not
        installed.
    TargetExistsError
        If the file exists and holds something else.
    TargetWriteError
        If the file cannot be written; an existing file is then unchanged.

    Examples
    --------
    >>> write_dicom_annotations("nuclei.dcm", annotations, slide)  # doctest: +SKIP
    """
    target = Path(path)
    if slide.vendor != "dicom":
        raise AnnotationError(
            f"'{slide.path}' is not a DICOM slide, so its annotations can't be saved as DICOM; "
            "save them as GeoJSON."
        )
    if target.exists() and not is_dicom_annotations(target):  # it may belong to the slide
        raise TargetExistsError(
            f"'{target}' exists but is not a DICOM annotation file; choose another name."
        )
    try:
        from highdicom import UID
        from highdicom.ann import MicroscopyBulkSimpleAnnotations
        from highdicom.coding_schemes import CodingSchemeIdentificationItem
    except ImportError as error:
        raise AnnotationError(
            f"Writing '{target}' requires optional packages ({error}); "
            'run pip install "napari-wsigpu[dicom]" and restart.'
        ) from error
    problem = f"The annotations can't be written to '{target}'"
    with damage_errors(problem, "correct them, or save them as GeoJSON"):
        groups = list(_groups(annotations))
        if not groups:
            raise AnnotationError(
                f"There are no annotations to save as '{target}', and DICOM does not allow an "
                "empty list; draw some first."
            )
        found = MicroscopyBulkSimpleAnnotations(
            source_images=[_header(slide.metadata[DICOM], private=private)],
            annotation_coordinate_type="2D",
            annotation_groups=groups,
            series_instance_uid=UID(),
            series_number=1,
            sop_instance_uid=UID(),
            instance_number=1,
            manufacturer=PACKAGE,
            manufacturer_model_name=PACKAGE,
            software_versions=version(PACKAGE),
            device_serial_number="0",
            specific_character_set="ISO_IR 192",  # UTF-8
            coding_schemes=[CodingSchemeIdentificationItem(SCHEME, f"Classes of {PACKAGE}")],
        )
        stream = io.BytesIO()
        found.save_as(stream, enforce_file_format=True)
    # Not `getbuffer`: a failed write would keep the view in its traceback, and Python 3.12 crashes
    # when it collects a buffer with a view as garbage.
    replace_file(target, stream.getvalue())


def _header(attributes: Mapping[str, Any], *, private: bool) -> Dataset:
    """Return the attributes of a slide's level 0 that are copied into the annotation file."""
    if not private:
        attributes = {name: attributes[name] for name in REFERENCES if name in attributes}
    found = data_set(dict.fromkeys(OFTEN_MISSING) | dict(attributes))
    if found.PatientSex not in SEXES:
        found.PatientSex = None
    if found.PatientName and "^" not in found.PatientName:
        found.PatientName = f"{found.PatientName}^"  # only a family name (PS3.5, section 6.2: PN)
    return found


def _groups(annotations: Iterable[Annotation]) -> Iterator[AnnotationGroup]:
    """Yield groups of objects that share their class, graphic type and codes."""
    from highdicom import UID
    from highdicom.ann import AnnotationGroup
    from highdicom.color import CIELabColor
    from highdicom.sr import CodedConcept
    from pydicom import Dataset

    members: dict[object, list[tuple[Annotation, Ring]]] = defaultdict(list)
    for annotation in annotations:
        kept = annotation.extra.get(DICOM)
        key = GRAPHICS[annotation.kind], annotation.classification, id(kept)
        members[key] += [(annotation, part) for part in _parts(annotation)]
    for number, group in enumerate(filter(None, members.values()), 1):
        first = group[0][0]
        name = " ".join(first.classification.replace("\\", "/").split())
        name.encode()  # raise on a lone surrogate: pydicom would write "?"
        local = name or UNCLASSIFIED, SCHEME, (name or "Unclassified")[:LONGEST]
        category, kind = CODES.get(name.lower(), (PLACE, local))
        found = AnnotationGroup(
            number=number,
            uid=UID(),
            label=local[2],
            annotated_property_category=CodedConcept(*category),
            annotated_property_type=CodedConcept(*kind),
            graphic_type=GRAPHICS[first.kind],
            graphic_data=_compact([part for _, part in group]),
            algorithm_type="MANUAL",
            measurements=_measurements([each.measurements for each, _ in group]),
            display_color=None if first.color is None else CIELabColor.from_rgb(*first.color),
        )
        kept = first.extra.get(DICOM)
        if isinstance(kept, Dataset) and kept.get("AnnotationGroupLabel") == found.label:
            found.update(kept)
        yield found


def _parts(annotation: Annotation) -> list[Ring]:
    """Return the vertices of each DICOM object that an annotation becomes."""
    if annotation.kind == "points":
        return [point[None] for ring in annotation.rings for point in ring]
    if annotation.kind == "line":
        return list(annotation.rings)
    # A polygon's first vertex is not repeated (C.37.1.2).
    return [without_repeated_end(joined(annotation.rings))]


def _compact(parts: Sequence[Ring]) -> list[NDArray[np.floating]]:
    """Return coordinates as float32 if that loses nothing, else as float64."""
    whole = np.concatenate(parts, dtype=np.float64)
    small = whole.astype(np.float32)
    points: NDArray[np.floating] = small if (small == whole).all() else whole
    ends = np.cumsum([0, *map(len, parts)]).tolist()
    return [points[a:b] for a, b in pairwise(ends)]


def _measurements(measured: Sequence[Mapping[str, float]]) -> list[Dataset] | None:
    """Return the measured values of a group by name, without units."""
    from highdicom.ann import Measurements
    from highdicom.sr import CodedConcept

    unit = CodedConcept("1", "UCUM", "no units")
    found = []
    for name in dict.fromkeys(name for each in measured for name in each):
        text = " ".join(name.replace("\\", "/").split())
        values = np.array([each.get(name, np.nan) for each in measured], np.float64)
        values[np.abs(values) > np.finfo(np.float32).max] = np.nan
        if text and not np.isnan(values).all():
            concept = CodedConcept(text, SCHEME, text[:LONGEST])
            found.append(Measurements(concept, values, unit))
    return found or None
