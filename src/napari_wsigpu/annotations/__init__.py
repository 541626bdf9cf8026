"""Objects that people and programs draw on slides: the data model, files, measurements."""

from napari_wsigpu.annotations.annotation import Annotation
from napari_wsigpu.annotations.dicom_annotations import read_dicom_annotations
from napari_wsigpu.annotations.dicom_report import read_dicom_report
from napari_wsigpu.annotations.dicom_segmentation import read_dicom_segmentation
from napari_wsigpu.annotations.dicom_writer import write_dicom_annotations
from napari_wsigpu.annotations.geojson import read_geojson, write_geojson
from napari_wsigpu.annotations.masks import label_image
from napari_wsigpu.annotations.measuring import Measurement, measure
from napari_wsigpu.annotations.overlays import Overlay, overlay, read_patches

__all__ = [
    "Annotation",
    "Measurement",
    "Overlay",
    "label_image",
    "measure",
    "overlay",
    "read_dicom_annotations",
    "read_dicom_report",
    "read_dicom_segmentation",
    "read_geojson",
    "read_patches",
    "write_dicom_annotations",
    "write_geojson",
]
