"""Segmentations of DICOM slides that highdicom writes from known arrays."""

from contextlib import suppress
from functools import partial

import imagecodecs
import numpy as np
import pytest

pytest.importorskip("wsidicom")
pytest.importorskip("highdicom")

import highdicom
from pydicom import dcmread
from pydicom.encaps import encapsulate
from pydicom.sr.codedict import codes
from pydicom.uid import (
    DeflatedExplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGLSLossless,
    RLELossless,
)

from napari_wsigpu.annotations import read_dicom_segmentation
from napari_wsigpu.annotations.dicom_annotations import sop_class
from napari_wsigpu.annotations.dicom_segmentation import SEGMENTATION
from napari_wsigpu.model.errors import AnnotationError, SlideError
from napari_wsigpu.model.limits import limits
from tests.annotations.test_dicom_annotations import slide_file

SIZE = 300, 500
COLORS = {1: (10, 200, 30), 2: None, 3: (255, 0, 0)}


def picture(count=3):
    """Return labels from 0 to `count`, with large empty areas."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, count + 1, SIZE).astype(np.uint8)
    labels[:, 150:330] = 0
    return labels


def describe(number):
    color = COLORS[number]
    return highdicom.seg.SegmentDescription(
        segment_number=number,
        segment_label=f"Region {number}",
        segmented_property_category=codes.SCT.Tissue,
        segmented_property_type=codes.SCT.Nucleus if number == 1 else codes.SCT.Neoplasm,
        algorithm_type="MANUAL",
        display_color=None if color is None else highdicom.color.CIELabColor.from_rgb(*color),
    )


def write(folder, pixels, kind="BINARY", *, count=3, source=None, **options):
    """Write a segmentation of the header `source`, or of a new slide, with highdicom."""
    source = source or dcmread(slide_file(folder))
    found = highdicom.seg.Segmentation(
        source_images=[source],
        pixel_array=pixels[None],
        segmentation_type=kind,
        segment_descriptions=[describe(number) for number in range(1, count + 1)],
        series_instance_uid=highdicom.UID(),
        series_number=2,
        sop_instance_uid=highdicom.UID(),
        instance_number=1,
        manufacturer="Acme",
        manufacturer_model_name="Seg 1",
        software_versions="1",
        device_serial_number="1",
        tile_pixel_array=True,
        **options,
    )
    found.save_as(folder / "seg.dcm")
    return folder / "seg.dcm"


@pytest.mark.parametrize("side", [64, 30, 61])  # frames of 30 and 61 pixels start within bytes
@pytest.mark.parametrize("organization", ["TILED_SPARSE", "TILED_FULL"])
def test_binary(tmp_path, organization, side):
    options = {"tile_size": (side, side), "dimension_organization_type": organization}
    if organization == "TILED_FULL":
        options["omit_empty_frames"] = False
    labels = picture()
    path = write(tmp_path, labels, **options)
    assert sop_class(path) == SEGMENTATION
    found = read_dicom_segmentation(path)
    np.testing.assert_array_equal(found.labels, labels)
    by_highdicom = highdicom.seg.segread(path).get_total_pixel_matrix(combine_segments=True)
    np.testing.assert_array_equal(found.labels, by_highdicom)
    assert found.pixel_size == pytest.approx((0.00025, 0.0005))
    assert {number: each.color for number, each in found.segments.items()} == COLORS
    assert found.segments[1].name == "Region 1"
    assert [each.kind for each in found.segments.values()] == ["Nucleus", "Neoplasm", "Neoplasm"]


@pytest.mark.parametrize("most", [255, 100])
def test_fractional(tmp_path, most):
    shares = np.random.default_rng(0).random((*SIZE, 2))
    path = write(tmp_path, shares, "FRACTIONAL", count=2, max_fractional_value=most)
    found = read_dicom_segmentation(path)
    stored = highdicom.seg.segread(path).get_total_pixel_matrix(rescale_fractional=False)
    expected = np.where(
        stored[..., 1] * 2.0 >= most, 2, np.where(stored[..., 0] * 2.0 >= most, 1, 0)
    )
    np.testing.assert_array_equal(found.labels, expected)


SYNTAXES = {
    "RLE": (RLELossless, None),
    "JPEG-LS": (JPEGLSLossless, imagecodecs.jpegls_encode),
    "JPEG 2000": (JPEG2000Lossless, partial(imagecodecs.jpeg2k_encode, codecformat="J2K")),
}


@pytest.mark.parametrize("name", SYNTAXES)
def test_compressed_frames(tmp_path, name):
    """Frames are compressed by pydicom (RLE) and imagecodecs."""
    shares = np.random.default_rng(0).random((*SIZE, 2))
    path = write(tmp_path, shares, "FRACTIONAL", count=2)
    expected = read_dicom_segmentation(path).labels
    dataset = dcmread(path)
    syntax, encode = SYNTAXES[name]
    if encode is None:
        dataset.compress(syntax)
    else:
        frames = np.frombuffer(dataset.PixelData, np.uint8)
        frames = frames.reshape(-1, dataset.Rows, dataset.Columns)
        dataset.PixelData = encapsulate([bytes(encode(frame, level=0)) for frame in frames])
        dataset["PixelData"].is_undefined_length = True
        dataset.file_meta.TransferSyntaxUID = syntax
    dataset.save_as(path)
    assert sop_class(path) == SEGMENTATION
    np.testing.assert_array_equal(read_dicom_segmentation(path).labels, expected)
    whole = path.read_bytes()
    for change in range(len(whole) - 20000, len(whole), 997):
        path.write_bytes(whole[:change] + bytes(40) + whole[change + 40 :])
        with suppress(AnnotationError):
            read_dicom_segmentation(path)
    path.write_bytes(whole[:-9000])
    with pytest.raises(AnnotationError, match=r"damaged|not a readable"):
        read_dicom_segmentation(path)


def test_binary_frames_cannot_be_compressed(tmp_path):
    path = write(tmp_path, picture())
    dataset = dcmread(path)
    dataset.PixelData = encapsulate([dataset.PixelData])
    dataset["PixelData"].is_undefined_length = True
    dataset.file_meta.TransferSyntaxUID = RLELossless
    dataset.save_as(path)
    with pytest.raises(AnnotationError, match=r"seg\.dcm' is damaged"):
        read_dicom_segmentation(path)


def test_deflated(tmp_path, monkeypatch):
    path = write(tmp_path, picture())
    expected = read_dicom_segmentation(path).labels
    dataset = dcmread(path)
    dataset.save_as(path, implicit_vr=False, little_endian=True)
    dataset = dcmread(path)
    dataset.file_meta.TransferSyntaxUID = DeflatedExplicitVRLittleEndian
    dataset.save_as(path)
    np.testing.assert_array_equal(read_dicom_segmentation(path).labels, expected)
    monkeypatch.setattr(limits, "geojson_bytes", path.stat().st_size)
    with pytest.raises(AnnotationError, match=r"is too large: .* the limit 'geojson_bytes'"):
        read_dicom_segmentation(path)


def test_overlapping_segments(tmp_path):
    masks = np.random.default_rng(0).random((*SIZE, 3)) > 0.5
    found = read_dicom_segmentation(write(tmp_path, masks))
    expected = np.where(masks[..., 2], 3, np.where(masks[..., 1], 2, masks[..., 0]))
    np.testing.assert_array_equal(found.labels, expected)


class TestRefused:
    def test_other_files(self, tmp_path):
        with pytest.raises(AnnotationError, match="not a slide segmentation"):
            read_dicom_segmentation(slide_file(tmp_path))
        with pytest.raises(SlideError):
            read_dicom_segmentation(tmp_path / "none.dcm")

    def test_more_pixels_than_the_limit(self, tmp_path):
        path = write(tmp_path, picture())
        dataset = dcmread(path)
        dataset.TotalPixelMatrixRows = dataset.TotalPixelMatrixColumns = 1 << 20
        dataset.save_as(path)
        with pytest.raises(AnnotationError, match="raise the limit 'geojson_bytes'"):
            read_dicom_segmentation(path)
        limited = limits.geojson_bytes
        limits.geojson_bytes = 4096
        try:
            with pytest.raises(AnnotationError, match="geojson_bytes"):
                read_dicom_segmentation(path)
        finally:
            limits.geojson_bytes = limited

    @pytest.mark.parametrize(
        ("keyword", "value"),
        [
            ("NumberOfFrames", 1 << 30),
            ("NumberOfFrames", 1),
            ("Rows", 0),
            ("Columns", 65535),
            ("TotalPixelMatrixColumns", 0),
            ("BitsAllocated", 8),
            ("SegmentSequence", []),
            ("PixelData", b"\0\0"),
            ("PerFrameFunctionalGroupsSequence", []),
            ("SharedFunctionalGroupsSequence", None),
            ("TotalPixelMatrixOriginSequence", []),
            ("ImageOrientationSlide", [1, 0]),
        ],
    )
    def test_damaged_values(self, tmp_path, keyword, value):
        path = write(tmp_path, picture())
        dataset = dcmread(path)
        setattr(dataset, keyword, value)
        dataset.save_as(path)
        with pytest.raises(AnnotationError, match=r"seg\.dcm' is damaged"):
            read_dicom_segmentation(path)

    @pytest.mark.parametrize(
        ("group", "keyword", "value"),
        [
            ("SegmentIdentificationSequence", "ReferencedSegmentNumber", 9),
            ("PlanePositionSlideSequence", "RowPositionInTotalImagePixelMatrix", -70000),
            ("PlanePositionSlideSequence", "ColumnPositionInTotalImagePixelMatrix", None),
        ],
    )
    def test_damaged_positions(self, tmp_path, group, keyword, value):
        path = write(tmp_path, picture())
        dataset = dcmread(path)
        setattr(dataset.PerFrameFunctionalGroupsSequence[2][group][0], keyword, value)
        dataset.save_as(path)
        with pytest.raises(AnnotationError, match=r"seg\.dcm' is damaged"):
            read_dicom_segmentation(path)

    def test_truncated_files(self, tmp_path):
        path = write(tmp_path, picture())
        whole = path.read_bytes()
        for length in (*range(0, 3000, 97), *range(3000, len(whole) - 1, 9973)):
            path.write_bytes(whole[:length])
            with pytest.raises(AnnotationError):
                read_dicom_segmentation(path)
