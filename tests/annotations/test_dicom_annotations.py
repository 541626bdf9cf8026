"""Outlines of Microscopy Bulk Simple Annotations, against wsidicom and highdicom."""

import time

import numpy as np
import pytest

pytest.importorskip("pydicom")
pytest.importorskip("wsidicom")

from pydicom import dcmread
from pydicom.dataset import FileMetaDataset
from pydicom.sr.codedict import codes
from pydicom.uid import (
    DeflatedExplicitVRLittleEndian,
    ExplicitVRLittleEndian,
    MicroscopyBulkSimpleAnnotationsStorage,
    generate_uid,
)
from wsidicom.graphical_annotations import AnnotationInstance

from napari_wsigpu.annotations import read_dicom_annotations
from napari_wsigpu.annotations.dicom_annotations import is_dicom_annotations
from napari_wsigpu.model.errors import AnnotationError, SlideError
from napari_wsigpu.model.limits import limits
from napari_wsigpu.viewer.contributions.geojson_files import get_geojson_reader
from tests.writers import dicomslides, slides
from tests.writers.dicomslides import item

SPACING = (0.0005, 0.00025)
ORIGIN = 20.0, 30.0


def code(value, meaning, scheme="SCT"):
    return [item(CodeValue=value, CodingSchemeDesignator=scheme, CodeMeaning=meaning)]


def shapes(count=50, seed=0):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(3, 12, count)
    return [rng.uniform(0, 500, (size, 2)).astype("f4") for size in sizes]


def group(outlines, kind="POLYGON", dtype="<f4", **attributes):
    """Describe a group of outlines, each of shape (points, 2 or 3)."""
    values = np.concatenate(outlines).astype(dtype)
    lengths = np.array([outline.size for outline in outlines])
    found = item(
        AnnotationGroupNumber=1,
        AnnotationGroupUID=generate_uid(),
        AnnotationGroupLabel="Tumor",
        AnnotationPropertyCategoryCodeSequence=code("91723000", "Anatomical Structure"),
        AnnotationPropertyTypeCodeSequence=code("84640000", "Nucleus"),
        NumberOfAnnotations=len(outlines),
        GraphicType=kind,
    )
    name = "PointCoordinatesData" if dtype == "<f4" else "DoublePointCoordinatesData"
    setattr(found, name, values.tobytes())
    if kind in ("POLYGON", "POLYLINE"):
        first = np.cumsum([0, *lengths[:-1]]) + 1
        found.LongPrimitivePointIndexList = first.astype("<u4").tobytes()
    for name, value in attributes.items():
        setattr(found, name, value)
    return found


def save(path, *groups, syntax=ExplicitVRLittleEndian, **attributes):
    dataset = item(
        SOPClassUID=MicroscopyBulkSimpleAnnotationsStorage,
        SOPInstanceUID=generate_uid(),
        StudyInstanceUID=dicomslides.STUDY,
        SeriesInstanceUID=generate_uid(),
        Modality="ANN",
        AnnotationCoordinateType="2D",
        AnnotationGroupSequence=list(groups),
        **attributes,
    )
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = syntax
    dataset.file_meta.MediaStorageSOPClassUID = MicroscopyBulkSimpleAnnotationsStorage
    dataset.file_meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID
    return dicomslides.save(path, dataset)


def by_wsidicom(path):
    [instance] = AnnotationInstance.open([path])
    return [each.geometry.to_coords() for one in instance.groups for each in one.annotations]


def same(found, expected):
    assert len(found) == len(expected)
    for annotation, outline in zip(found, expected, strict=True):
        np.testing.assert_allclose(annotation.rings[0], outline, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["<f4", "<f8"])
@pytest.mark.parametrize(("graphic", "kind"), [("POLYGON", "polygon"), ("POLYLINE", "line")])
def test_outlines(tmp_path, graphic, kind, dtype):
    written = shapes()
    path = save(
        tmp_path / "a.dcm", group(written[:20], graphic, dtype), group(written[20:], graphic)
    )
    found = read_dicom_annotations(path)
    same(found, written)
    same(found, by_wsidicom(path))
    assert {each.kind for each in found} == {kind}
    assert {each.classification for each in found} == {"Tumor"}


def test_points(tmp_path):
    written = [shape[:1] for shape in shapes()]
    path = save(tmp_path / "a.dcm", group(written, "POINT"))
    found = read_dicom_annotations(path)
    same(found, by_wsidicom(path))
    assert {each.kind for each in found} == {"points"}


def test_rectangles_and_ellipses(tmp_path):
    corners = np.array([[10, 20], [50, 20], [50, 40], [10, 40]], "f4")
    axes = np.array([[0, 10], [40, 10], [20, 0], [20, 20]], "f4")
    path = save(
        tmp_path / "a.dcm", group([corners], "RECTANGLE"), group([axes, axes + 100], "ELLIPSE")
    )
    rectangle, first, second = (each.rings[0] for each in read_dicom_annotations(path))
    np.testing.assert_array_equal(rectangle, corners)
    np.testing.assert_allclose(((first - [20, 10]) / [20, 10]) ** 2 @ [1, 1], 1)
    np.testing.assert_allclose(second, first + 100)


def test_measurements(tmp_path):
    areas = item(
        ConceptNameCodeSequence=code("42798000", "Area"),
        MeasurementUnitsCodeSequence=code("um2", "square micrometer", "UCUM"),
        MeasurementValuesSequence=[item(FloatingPointValues=np.arange(50, dtype="<f4").tobytes())],
    )
    some = item(
        ConceptNameCodeSequence=code("1", "Score"),
        MeasurementUnitsCodeSequence=code("1", "no units", "UCUM"),
        MeasurementValuesSequence=[
            item(
                FloatingPointValues=np.array([0.5, 0.25], "<f4").tobytes(),
                AnnotationIndexList=np.array([1, 50], "<u4").tobytes(),
            )
        ],
    )
    path = save(tmp_path / "a.dcm", group(shapes(), MeasurementsSequence=[areas, some]))
    found = [each.measurements for each in read_dicom_annotations(path)]
    assert found[0] == {"Area um2": 0, "Score": 0.5}
    assert found[7] == {"Area um2": 7}
    assert found[49] == {"Area um2": 49, "Score": 0.25}


def slide_file(folder):
    origin = item(
        XOffsetInSlideCoordinateSystem=ORIGIN[0], YOffsetInSlideCoordinateSystem=ORIGIN[1]
    )
    dataset = dicomslides.instance(
        *(slides.picture(300, 500), "raw"),
        spacing=SPACING,
        TotalPixelMatrixOriginSequence=[origin],
        AccessionNumber="",
        StudyID="1",
        StudyDate="20240101",
        StudyTime="",
        PatientBirthDate="",
        PatientSex="",
        ContainerIdentifier="1",
        ReferringPhysicianName="",
    )
    return dicomslides.save(folder / "slide.dcm", dataset)


@pytest.mark.parametrize("shares_depth", [False, True])
def test_millimetres_on_the_glass(tmp_path, shares_depth):
    image = slide_file(tmp_path)
    pixels = [outline.astype("f8") for outline in shapes()]
    # The slide's orientation is (0, -1, 0), (-1, 0, 0): columns run along -y, rows along -x.
    x = [ORIGIN[0] - (outline[:, 1] - 0.5) * SPACING[0] for outline in pixels]
    y = [ORIGIN[1] - (outline[:, 0] - 0.5) * SPACING[1] for outline in pixels]
    z = [] if shares_depth else [np.zeros(len(outline)) for outline in pixels]
    written = [np.stack(each, axis=1) for each in zip(*filter(len, (x, y, z)), strict=True)]
    extra = {"CommonZCoordinateValue": 0.0} if shares_depth else {}
    path = save(tmp_path / "a.dcm", group(written, dtype="<f8", **extra))
    dataset = dcmread(path)
    dataset.AnnotationCoordinateType = "3D"
    dataset.save_as(path)
    found = read_dicom_annotations(path, image)
    for annotation, outline in zip(found, pixels, strict=True):
        np.testing.assert_allclose(annotation.rings[0], outline, atol=1e-6)
    with pytest.raises(AnnotationError, match="pass the DICOM file of its level 0"):
        read_dicom_annotations(path)
    with pytest.raises(SlideError):
        read_dicom_annotations(path, tmp_path / "none.dcm")


@pytest.mark.parametrize("kind", ["2D", "3D"])
@pytest.mark.filterwarnings("ignore")
def test_written_by_highdicom(tmp_path, kind):
    highdicom = pytest.importorskip("highdicom")
    image = slide_file(tmp_path)
    source = dcmread(image)
    pixels = shapes()
    to_slide = highdicom.spatial.ImageToReferenceTransformer.for_image(
        source, for_total_pixel_matrix=True
    )
    data = pixels if kind == "2D" else [to_slide(each).astype("f8") for each in pixels]
    annotations = highdicom.ann.MicroscopyBulkSimpleAnnotations(
        source_images=[source],
        annotation_coordinate_type=kind,
        annotation_groups=[
            highdicom.ann.AnnotationGroup(
                number=1,
                uid=highdicom.UID(),
                label="Nuclei",
                annotated_property_category=codes.SCT.AnatomicalStructure,
                annotated_property_type=codes.SCT.Nucleus,
                graphic_type="POLYGON",
                graphic_data=data,
                algorithm_type="MANUAL",
                measurements=[
                    highdicom.ann.Measurements(
                        codes.SCT.Area, np.arange(50.0), codes.UCUM.SquareMicrometer
                    )
                ],
            )
        ],
        series_instance_uid=highdicom.UID(),
        series_number=2,
        sop_instance_uid=highdicom.UID(),
        instance_number=1,
        manufacturer="Acme",
        manufacturer_model_name="Ann 1",
        software_versions="1",
        device_serial_number="1",
    )
    annotations.save_as(tmp_path / "a.dcm")
    found = read_dicom_annotations(tmp_path / "a.dcm", image if kind == "3D" else None)
    for annotation, outline in zip(found, pixels, strict=True):
        np.testing.assert_allclose(annotation.rings[0], outline, atol=1e-3)
    assert list(found[3].measurements.values()) == [3]


def test_200_000_outlines_take_seconds(tmp_path):
    count, points = 200_000, 16
    rng = np.random.default_rng(0)
    centres = rng.uniform(0, 1e5, (count, 1, 2)).astype("f4")
    outlines = centres + rng.uniform(-9, 9, (1, points, 2)).astype("f4")
    first = 1 + 2 * points * np.arange(count, dtype="<u4")
    attributes = {"NumberOfAnnotations": count, "LongPrimitivePointIndexList": first.tobytes()}
    path = save(tmp_path / "a.dcm", group([outlines.reshape(-1, 2)], **attributes))
    started = time.process_time()
    found = read_dicom_annotations(path)
    assert time.process_time() - started < 5
    assert len(found) == count
    np.testing.assert_array_equal(found[-1].rings[0], outlines[-1])


def test_deflated(tmp_path):
    plain = save(tmp_path / "a.dcm", group(shapes()))
    path = save(tmp_path / "b.dcm", group(shapes()), syntax=DeflatedExplicitVRLittleEndian)
    pairs = zip(read_dicom_annotations(path), read_dicom_annotations(plain), strict=True)
    for found, expected in pairs:
        np.testing.assert_array_equal(found.rings[0], expected.rings[0])
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(AnnotationError, match=r"b\.dcm"):
        read_dicom_annotations(path)


class TestRefused:
    def test_slides_and_other_files(self, tmp_path):
        image = slide_file(tmp_path)
        assert not is_dicom_annotations(image)
        with pytest.raises(AnnotationError, match="no Bulk Simple Annotations"):
            read_dicom_annotations(image)
        (tmp_path / "notes.dcm").write_text("x")
        with pytest.raises(AnnotationError, match="not a readable DICOM file"):
            read_dicom_annotations(tmp_path / "notes.dcm")
        with pytest.raises(SlideError):
            read_dicom_annotations(tmp_path / "none.dcm")

    def test_outlines_relative_to_a_frame(self, tmp_path):
        path = save(tmp_path / "a.dcm", group(shapes()), PixelOriginInterpretation="FRAME")
        with pytest.raises(AnnotationError, match="relative to individual frames"):
            read_dicom_annotations(path)

    def test_compressed(self, tmp_path):
        path = save(tmp_path / "a.dcm", group(shapes()))
        path.write_bytes(
            path.read_bytes().replace(b"1.2.840.10008.1.2.1\0", b"1.2.840.10008.1.2.5\0")
        )
        with pytest.raises(AnnotationError, match="export it uncompressed"):
            read_dicom_annotations(path)

    @pytest.mark.parametrize(
        "attributes",
        [
            {"GraphicType": "CIRCLE"},
            {"NumberOfAnnotations": 49},
            {"PointCoordinatesData": b"\0\0\xc0\x7f" * 8},
            {"PointCoordinatesData": bytes(12)},
            {"LongPrimitivePointIndexList": np.arange(2, 102, 2, dtype="<u4").tobytes()},
            {"LongPrimitivePointIndexList": np.full(50, 1, "<u4").tobytes()},
            {"LongPrimitivePointIndexList": np.arange(1, 1 << 31, 1 << 26, dtype="<u4").tobytes()},
        ],
    )
    def test_damaged_values(self, tmp_path, attributes):
        path = save(tmp_path / "a.dcm", group(shapes(), **attributes))
        with pytest.raises(AnnotationError, match=r"a\.dcm' are damaged"):
            read_dicom_annotations(path)

    def test_more_than_the_limits(self, tmp_path, monkeypatch):
        path = save(tmp_path / "a.dcm", group(shapes()))
        for name in ("objects", "points", "geojson_bytes"):
            with monkeypatch.context() as patch:
                patch.setattr(limits, name, 40)
                with pytest.raises(AnnotationError, match=name):
                    read_dicom_annotations(path)


def test_napari_reads_them(tmp_path):
    path = str(save(tmp_path / "a.dcm", group(shapes())))
    assert is_dicom_annotations(path)
    layers = get_geojson_reader(path)(path)
    assert sum(len(data) for data, _, kind in layers if kind == "shapes") == 50
    assert get_geojson_reader(str(slide_file(tmp_path))) is None
