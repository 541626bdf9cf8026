"""What people and programs draw on slides: as objects, as GeoJSON, and measured."""

from napari_wsigpu.annotations.annotation import Annotation
from napari_wsigpu.annotations.geojson import read_geojson, write_geojson
from napari_wsigpu.annotations.masks import label_image
from napari_wsigpu.annotations.measuring import Measurement, measure

__all__ = ["Annotation", "Measurement", "label_image", "measure", "read_geojson", "write_geojson"]
