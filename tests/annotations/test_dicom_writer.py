"""Written Microscopy Bulk Simple Annotations, against highdicom, pydicom and wsidicom."""

import time
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("wsidicom")
pytest.importorskip("highdicom")

import highdicom
from pydicom import dcmread
from pydicom.sr.coding import Code

from napari_wsigpu import Annotation, open_slide
from napari_wsigpu.annotations import read_dicom_annotations, write_dicom_annotations
from napari_wsigpu.model.errors import AnnotationError, TargetExistsError, TargetWriteError
from tests.annotations.test_dicom_annotations import by_wsidicom, group, same, save, slide_file
from tests.annotations.test_dicom_annotations import shapes as float32_shapes
from tests.writers import dicomslides, slides


@pytest.fixture
def slide(tmp_path):
    with open_slide(slide_file(tmp_path), "cpu") as opened:
        yield opened


def polygon(outline, name="Tumor", **fields):
    return Annotation("polygon", (np.array(outline, np.float64),), classification=name, **fields)


def written(tmp_path, slide, annotations, **options):
    path = tmp_path / "out.dcm"
    write_dicom_annotations(path, annotations, slide, **options)
    return path


def by_highdicom(path):
    return highdicom.ann.annread(path)


@pytest.mark.parametrize("shift", [0, 1e-9])  # stored as float32, as float64
def test_other_libraries_read_the_same_outlines(tmp_path, slide, shift):
    outlines = [each.astype(np.float64) + shift for each in float32_shapes()]
    path = written(tmp_path, slide, map(polygon, outlines))
    found = by_highdicom(path)
    [group] = found.get_annotation_groups()
    for outline, read, other in zip(
        outlines, group.get_graphic_data("2D"), by_wsidicom(path), strict=True
    ):
        np.testing.assert_array_equal(read, outline)
        np.testing.assert_allclose(other, outline, rtol=1e-6)
    assert ("DoublePointCoordinatesData" in group) == bool(shift)
    assert [each.rings[0].tolist() for each in read_dicom_annotations(path)] == [
        outline.tolist() for outline in outlines
    ]


@pytest.mark.parametrize("private", [False, True])
def test_the_file_refers_to_the_slide(tmp_path, slide, private):
    found = dcmread(written(tmp_path, slide, [polygon(np.eye(3, 2))], private=private))
    source = dcmread(slide.path)
    [image] = found.ReferencedImageSequence
    assert image.ReferencedSOPInstanceUID == source.SOPInstanceUID
    assert found.ReferencedSeriesSequence[0].SeriesInstanceUID == source.SeriesInstanceUID
    assert found.StudyInstanceUID == source.StudyInstanceUID
    for keyword in ("PatientName", "PatientID", "StudyDate"):
        assert found[keyword].value == (source[keyword].value if private else "")
    assert ("ContainerIdentifier" in found) == private
    assert found.SpecificCharacterSet == "ISO_IR 192"
    assert found.PixelOriginInterpretation == "VOLUME"


def test_kinds_and_measurements(tmp_path, slide):
    line, hole = np.array([[1.5, 2], [3, 4], [9, 9]]), np.array([[2, 2], [3, 2], [3, 3.5]])
    square = np.array([[0, 0], [8, 0], [8, 8], [0, 8.0]])
    annotations = [
        Annotation("line", (line, line + 1), classification="Vessel"),
        Annotation("points", (line,), classification="Cell", measurements={"Size": 2, "x": np.nan}),
        Annotation("polygon", (square, hole), measurements={"Area µm": 0.1}),
        Annotation("polygon", (np.concatenate([square, square[:1]]),), measurements={"Big": 1e300}),
        Annotation("ellipse", (square,)),
    ]
    path = written(tmp_path, slide, annotations)
    lines, points, polygons = by_highdicom(path).get_annotation_groups()
    assert [each.graphic_type.value for each in (lines, points, polygons)] == [
        "POLYLINE", "POINT", "POLYGON"
    ]  # fmt: skip
    assert lines.number_of_annotations == 2
    assert points.number_of_annotations == 3
    [name], values, [unit] = polygons.get_measurements()
    assert (name.meaning, unit.value) == ("Area µm", "1")
    np.testing.assert_array_equal(values[:, 0], np.array([0.1, np.nan, np.nan], "f4"))
    *_, pierced, closed, ellipse = found = read_dicom_annotations(path)
    assert [each.kind for each in found] == ["line"] * 2 + ["points"] * 3 + ["polygon"] * 3
    assert found[2].measurements == {"Size": 2}
    assert pierced.measurements == {"Area µm": np.float32(0.1)}
    np.testing.assert_array_equal(closed.rings[0], square)
    np.testing.assert_array_equal(ellipse.rings[0], square)
    np.testing.assert_array_equal(pierced.rings[0][:4], square)


def test_classes(tmp_path, slide):
    long = "Größe, sehr: " * 9
    names = ["Nucleus", "Tumor", "Tumor: Positive", long.strip(), "a\\b\n", ""]
    annotations = [
        polygon(np.eye(3, 2), name, color=(number, 200, 30)) for number, name in enumerate(names)
    ]
    path = written(tmp_path, slide, annotations)
    groups = by_highdicom(path).get_annotation_groups()
    kinds = [each.annotated_property_type for each in groups]
    assert kinds[0] == Code("84640000", "SCT", "Nucleus")
    assert kinds[1] == Code("108369006", "SCT", "Neoplasm")
    assert {each.scheme_designator for each in kinds[2:]} == {"99WSIGPU"}
    assert [each.label for each in groups[:3]] == names[:3]
    found = read_dicom_annotations(path)
    assert [each.classification for each in found] == [*names[:4], "a/b", ""]
    assert [each.color for each in found] == [each.color for each in annotations]


def test_codes_of_a_file_are_written_back(tmp_path, slide):
    outlines = float32_shapes()
    algorithm = highdicom.AlgorithmIdentificationSequence(
        "Finder", highdicom.sr.CodedConcept("123110", "DCM", "Artificial Intelligence"), "1"
    )
    source = save(
        tmp_path / "in.dcm",
        group(
            outlines,
            AnnotationGroupGenerationType="AUTOMATIC",
            AnnotationGroupAlgorithmIdentificationSequence=algorithm,
        ),
    )
    read = read_dicom_annotations(source)
    path = written(tmp_path, slide, [*read, replace(read[0], classification="Other")])
    kept, renamed = by_highdicom(path).get_annotation_groups()
    [before] = dcmread(source).AnnotationGroupSequence
    for keyword in ("AnnotationPropertyTypeCodeSequence", "AnnotationPropertyCategoryCodeSequence"):
        assert kept[keyword].value == before[keyword].value
    assert kept.algorithm_type.value == "AUTOMATIC"
    assert kept.algorithm_identification.name == "Finder"
    assert renamed.annotated_property_type.scheme_designator == "99WSIGPU"
    assert renamed.algorithm_type.value == "MANUAL"
    same(read_dicom_annotations(path)[:-1], outlines)


def test_slides_that_lack_attributes(tmp_path):
    dataset = dicomslides.instance(
        slides.picture(300, 500),
        "raw",
        PatientName="Ada",
        PatientSex="X",
        PatientID=None,
        FrameOfReferenceUID=None,
    )
    with open_slide(dicomslides.save(tmp_path / "slide.dcm", dataset), "cpu") as slide:
        found = dcmread(written(tmp_path, slide, [polygon(np.eye(3, 2))], private=True))
    assert found.PatientName == "Ada^"
    assert not found.PatientID
    assert not found.PatientSex


def test_30_000_outlines_take_seconds(tmp_path, slide):
    corners = np.random.default_rng(0).uniform(0, 1e5, (30_000, 1, 2))
    outlines = corners + np.array([[0, 0], [5, 0], [5, 7], [0, 7]])
    annotations = list(map(polygon, outlines))
    started = time.process_time()
    path = written(tmp_path, slide, annotations)
    assert time.process_time() - started < 5
    np.testing.assert_array_equal(read_dicom_annotations(path)[-1].rings[0], outlines[-1])


class TestRefused:
    def test_slides_of_other_formats(self, tmp_path):
        slides.write_aperio(tmp_path / "a.svs", slides.picture(100, 150))
        with (
            open_slide(tmp_path / "a.svs", "cpu") as slide,
            pytest.raises(AnnotationError, match="not a DICOM slide"),
        ):
            written(tmp_path, slide, [polygon(np.eye(3, 2))])

    @pytest.mark.parametrize(
        ("annotations", "sentence"),
        [
            ([], "no annotations to save"),
            ([polygon(np.eye(2))], "at least three coordinates"),
            ([polygon([[0, 0], [1, np.nan], [2, 2]])], "finite"),
            ([polygon(np.eye(3, 2), "\ud800")], "surrogates"),
        ],
    )
    def test_what_dicom_cannot_express(self, tmp_path, slide, annotations, sentence):
        with pytest.raises(AnnotationError, match=sentence):
            written(tmp_path, slide, annotations)
        assert not (tmp_path / "out.dcm").exists()

    def test_files_that_hold_something_else(self, tmp_path, slide):
        with pytest.raises(TargetExistsError, match="choose another name"):
            write_dicom_annotations(slide.path, [polygon(np.eye(3, 2))], slide)
        with pytest.raises(TargetWriteError):
            written(tmp_path / "none", slide, [polygon(np.eye(3, 2))])
