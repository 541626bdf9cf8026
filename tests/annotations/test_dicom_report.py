"""Regions in structured reports that highdicom writes from known coordinates."""

import numpy as np
import pytest

pytest.importorskip("wsidicom")
pytest.importorskip("highdicom")

from highdicom import UID, sr
from highdicom.spatial import ImageToReferenceTransformer
from pydicom import dcmread
from pydicom.sr.codedict import codes

from napari_wsigpu import open_slide
from napari_wsigpu.annotations import read_dicom_report
from napari_wsigpu.annotations.dicom_annotations import sop_class
from napari_wsigpu.annotations.dicom_report import REPORTS
from napari_wsigpu.model.errors import AnnotationError, SlideError
from napari_wsigpu.model.limits import limits
from tests.annotations.test_dicom_annotations import slide_file

TRIANGLE = np.array([[10, 20], [50.5, 20], [50, 40], [10, 20]])
LINE = np.array([[1, 2], [3, 4], [5.25, 6]])
ELLIPSE = np.array([[10, 50], [90, 50], [50, 30], [50, 70]])
FLAT = [
    ("POINT", LINE[:1]),
    ("POLYLINE", LINE),
    ("POLYLINE", TRIANGLE),
    ("CIRCLE", np.array([[50, 50], [50, 70]])),
    ("ELLIPSE", ELLIPSE),
]
ON_GLASS = [("POINT", LINE[:1]), ("POLYLINE", LINE), ("POLYGON", TRIANGLE), ("ELLIPSE", ELLIPSE)]


def region(source, graphic, points, *, on_glass):
    if on_glass:
        transform = ImageToReferenceTransformer.for_image(source, for_total_pixel_matrix=True)
        return sr.ImageRegion3D(graphic, transform(points), source.FrameOfReferenceUID)
    image = sr.SourceImageForRegion(source.SOPClassUID, source.SOPInstanceUID)
    return sr.ImageRegion(graphic, points, image)


def write(folder, regions, *, on_glass=False):
    """Write a report of measurements (TID 1500) about a new slide."""
    source = dcmread(slide_file(folder))
    observer = sr.ObserverContext(
        codes.DCM.Person, sr.PersonObserverIdentifyingAttributes("Roe^Jo")
    )
    groups = [
        sr.PlanarROIMeasurementsAndQualitativeEvaluations(
            sr.TrackingIdentifier(uid=UID(), identifier=f"Region {number}"),
            referenced_region=region(source, graphic, points, on_glass=on_glass),
            finding_type=codes.SCT.Neoplasm,
            measurements=[
                sr.Measurement(codes.SCT.Area, 1.5 + number, codes.UCUM.SquareMillimeter)
            ],
        )
        for number, (graphic, points) in enumerate(regions)
    ]
    content = sr.MeasurementReport(
        sr.ObservationContext(observer),
        sr.CodedConcept("126000", "DCM", "Imaging Measurement Report"),
        groups,
    )
    report = (sr.Comprehensive3DSR if on_glass else sr.ComprehensiveSR)(
        evidence=[source],
        content=content,
        series_instance_uid=UID(),
        series_number=2,
        sop_instance_uid=UID(),
        instance_number=1,
        manufacturer="Acme",
    )
    report.save_as(folder / "report.dcm")
    return folder / "report.dcm"


def check_outlines(found, atol=1e-5):
    """Compare with FLAT or, as float32 millimeters on the glass are less exact, ON_GLASS."""
    point, line, triangle, *ovals = found
    assert [each.kind for each in found[:3]] == ["points", "line", "polygon"]
    for annotation, expected in ((point, LINE[:1]), (line, LINE), (triangle, TRIANGLE[:-1])):
        np.testing.assert_allclose(annotation.rings[0], expected, atol=atol)
    *circles, ellipse = (each.rings[0] for each in ovals)
    for circle in circles:
        np.testing.assert_allclose(np.hypot(*(circle - 50).T), 20)
    np.testing.assert_allclose(
        ((ellipse - 50) / [40, 20]) ** 2 @ [1, 1], 1, atol=max(1e-3, atol / 10)
    )


def test_regions_in_pixels(tmp_path):
    path = write(tmp_path, FLAT)
    assert sop_class(path) in REPORTS
    found = read_dicom_report(path)
    check_outlines(found)
    assert [each.name for each in found] == [f"Region {number}" for number in range(5)]
    assert {each.classification for each in found} == {"Neoplasm"}
    assert [each.measurements for each in found[:2]] == [{"Area mm2": 1.5}, {"Area mm2": 2.5}]


def test_regions_on_the_glass(tmp_path):
    path = write(tmp_path, ON_GLASS, on_glass=True)
    check_outlines(read_dicom_report(path, tmp_path / "slide.dcm"), atol=0.02)
    with open_slide(tmp_path / "slide.dcm", "cpu") as slide:
        check_outlines(read_dicom_report(path, slide.metadata["dicom"]), atol=0.02)
    with pytest.raises(AnnotationError, match="open their DICOM slide first"):
        read_dicom_report(path)
    with pytest.raises(SlideError):
        read_dicom_report(path, tmp_path / "none.dcm")


def shapes_of(dataset):
    """Return the content items with coordinates."""
    items = dataset.get("ContentSequence") or ()
    own = [item for item in items if item.ValueType.startswith("SCOORD")]
    return own + [found for item in items for found in shapes_of(item)]


class TestRefused:
    def test_other_files(self, tmp_path):
        with pytest.raises(AnnotationError, match="not a report with regions"):
            read_dicom_report(slide_file(tmp_path))
        with pytest.raises(SlideError):
            read_dicom_report(tmp_path / "none.dcm")

    @pytest.mark.parametrize(
        ("keyword", "value"),
        [
            ("GraphicType", "SPIRAL"),
            ("GraphicType", None),
            ("GraphicData", [1.0, 2.0, 3.0]),
            ("GraphicData", [float("nan"), 2.0]),
            ("GraphicData", None),
            ("PixelOriginInterpretation", "FRAME"),
        ],
    )
    def test_damaged_values(self, tmp_path, keyword, value):
        path = write(tmp_path, FLAT)
        dataset = dcmread(path)
        setattr(shapes_of(dataset)[1], keyword, value)
        dataset.save_as(path)
        with pytest.raises(AnnotationError, match=r"report\.dcm' is damaged"):
            read_dicom_report(path)

    def test_items_nested_too_deep(self, tmp_path):
        path = write(tmp_path, FLAT[:1])
        dataset = dcmread(path)
        item = dataset
        while item.get("ContentSequence"):
            item = item.ContentSequence[-1]
        for _ in range(70):
            item.ContentSequence = [type(item)()]
            [item] = item.ContentSequence
        dataset.save_as(path)
        with pytest.raises(AnnotationError, match="nested too deeply"):
            read_dicom_report(path)

    def test_more_than_the_limits(self, tmp_path, monkeypatch):
        path = write(tmp_path, FLAT)
        for name in ("objects", "points"):
            with monkeypatch.context() as patch:
                patch.setattr(limits, name, 3)
                with pytest.raises(AnnotationError, match=name):
                    read_dicom_report(path)

    def test_truncated_files(self, tmp_path):
        path = write(tmp_path, FLAT)
        whole = path.read_bytes()
        for length in range(0, len(whole) - 1, 97):
            path.write_bytes(whole[:length])
            try:
                read_dicom_report(path)
            except AnnotationError:
                continue
