"""What napari reads from DICOM files besides slides, and writes to them."""

import numpy as np
import pytest

pytest.importorskip("wsidicom")
pytest.importorskip("highdicom")

import highdicom
from napari.layers import Labels, Layer
from pydicom import dcmread
from pydicom.sr.coding import Code

from napari_wsigpu import open_slide
from napari_wsigpu.annotations import read_dicom_annotations, read_dicom_segmentation
from napari_wsigpu.annotations.dicom_segmentation import Segmentation
from napari_wsigpu.model.errors import AnnotationError, SlideError
from napari_wsigpu.viewer.annotations.segmentation_layer import segmentation_layer
from napari_wsigpu.viewer.layers.slide_layers import slide_layers
from tests.annotations import test_dicom_report as reports
from tests.annotations import test_dicom_segmentation as segmentations
from tests.annotations.test_dicom_annotations import (
    ORIGIN,
    SPACING,
    group,
    same,
    save,
    shapes,
    slide_file,
)
from tests.writers import slides


def test_annotations_are_opened_and_saved(viewer, tmp_path):
    outlines = shapes()
    viewer.open(slide_file(tmp_path), plugin="napari-wsigpu")
    source, target = save(tmp_path / "in.dcm", group(outlines)), tmp_path / "out.dcm"
    [layer] = viewer.open(source, plugin="napari-wsigpu")
    assert layer.save(str(target), plugin="napari-wsigpu") == [str(target)]
    same(read_dicom_annotations(target), outlines)
    [saved] = highdicom.ann.annread(target).get_annotation_groups()
    assert saved.label == "Tumor"
    assert saved.annotated_property_type == Code("84640000", "SCT", "Nucleus")
    viewer.layers.clear()
    alone = viewer.add_shapes([np.eye(3, 2)], shape_type="polygon")
    with pytest.raises(SlideError, match="belong to none"):
        alone.save(str(target), plugin="napari-wsigpu")


def test_regions_of_reports_lie_on_the_slide(viewer, tmp_path):
    path = reports.write(tmp_path, reports.ON_GLASS, on_glass=True)
    [layer] = viewer.open(tmp_path / "slide.dcm", plugin="napari-wsigpu")
    drawn, points = viewer.open(path, plugin="napari-wsigpu")
    assert drawn.shape_type == ["path", "polygon", "polygon"]
    assert drawn.features["class"].tolist() == ["Neoplasm"] * 3
    pixels = layer.world_to_data(drawn.data_to_world(drawn.data[1][0]))
    np.testing.assert_allclose(np.array(pixels)[::-1] + 0.5, reports.TRIANGLE[0], atol=0.02)
    assert len(points.data) == 1


def level_of(image):
    """Return the header of a level whose pixels are twice as large as those of the slide."""
    header = dcmread(image, stop_before_pixels=True)
    header.TotalPixelMatrixRows //= 2
    header.TotalPixelMatrixColumns //= 2
    [groups] = header.SharedFunctionalGroupsSequence
    groups.PixelMeasuresSequence[0].PixelSpacing = [2 * each for each in SPACING]
    # Columns run along -y and rows along -x. The center of its first pixel is a corner of four.
    [origin] = header.TotalPixelMatrixOriginSequence
    origin.XOffsetInSlideCoordinateSystem = ORIGIN[0] - SPACING[0] / 2
    origin.YOffsetInSlideCoordinateSystem = ORIGIN[1] - SPACING[1] / 2
    return header


def test_segmentations_lie_on_the_slide(viewer, tmp_path):
    image = slide_file(tmp_path)
    [layer] = viewer.open(image, plugin="napari-wsigpu")
    pixels = segmentations.picture()[::2, ::2]
    path = segmentations.write(tmp_path, pixels, source=level_of(image))
    [labels] = viewer.open(path, plugin="napari-wsigpu")
    assert isinstance(labels, Labels)
    np.testing.assert_array_equal(labels.data, pixels)
    for row, column in ((0, 0), (149, 249)):
        np.testing.assert_allclose(
            labels.data_to_world((row, column)),
            layer.data_to_world((2 * row + 0.5, 2 * column + 0.5)),
            atol=1e-3 * 0.25,
        )
    table = labels.features.set_index("index")
    assert table.name.to_dict() == {1: "Region 1", 2: "Region 2", 3: "Region 3"}
    assert table.loc[1, "class"] == "Nucleus"
    assert table.color.to_dict() == {1: "#0ac81e", 2: "", 3: "#ff0000"}
    np.testing.assert_allclose(labels.get_color(3), (1, 0, 0, 1), atol=0.01)


def test_segmentations_elsewhere(tmp_path):
    image = slide_file(tmp_path)
    header = level_of(image)
    header.ImageOrientationSlide = [0, 1, 0, -1, 0, 0]
    pixels = segmentations.picture()[::2, ::2]
    turned = read_dicom_segmentation(segmentations.write(tmp_path, pixels, source=header))
    _, attributes, kind = segmentation_layer(turned, "a", None)
    assert kind == "labels"
    assert attributes["scale"] == pytest.approx((1, 0.5))
    with open_slide(image, "cpu") as slide:
        layer = Layer.create(*slide_layers(slide)[0])
        with pytest.raises(AnnotationError, match="is rotated relative to the slide"):
            segmentation_layer(turned, "a", layer)
    slides.write_aperio(tmp_path / "a.svs", slides.picture(100, 150))
    with open_slide(tmp_path / "a.svs", "cpu") as slide:
        layer = Layer.create(*slide_layers(slide)[0])
        _, attributes, _ = segmentation_layer(turned, "a", layer)
        np.testing.assert_allclose(attributes["scale"], (1, 0.5))
        assert attributes["name"] == "a segmentation"


def test_large_segmentations_have_levels():
    labels = np.zeros((5000, 9), np.uint8)
    found = Segmentation(labels, {}, (0.001, 0.001), None)
    levels, attributes, _ = segmentation_layer(found, "a", None)
    assert attributes["multiscale"]
    assert [level.shape[0] for level in levels] == [5000, 2500, 1250, 625]
