"""napari readers and writers for GeoJSON and DICOM annotations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import napari

from napari_wsigpu.annotations.dicom_annotations import (
    BULK_ANNOTATIONS,
    read_dicom_annotations,
    sop_class,
)
from napari_wsigpu.annotations.dicom_report import REPORTS, read_dicom_report
from napari_wsigpu.annotations.dicom_segmentation import SEGMENTATION, read_dicom_segmentation
from napari_wsigpu.annotations.dicom_writer import write_dicom_annotations
from napari_wsigpu.annotations.duplicates import skipped_sentence, without_known
from napari_wsigpu.annotations.geojson import empty_sentence, read_features, write_geojson
from napari_wsigpu.model.errors import AnnotationError, SlideError
from napari_wsigpu.viewer.annotations.annotation_layers import (
    MANY,
    annotation_layers,
    annotations_in,
    annotations_of,
    contents_of,
    slide_layer_for,
    to_pixels,
)
from napari_wsigpu.viewer.annotations.segmentation_layer import segmentation_layer
from napari_wsigpu.viewer.layers.slide_layers import slide_of
from napari_wsigpu.viewer.view.arrangement import hide_like_slide
from napari_wsigpu.viewer.window.notifications import show_info
from napari_wsigpu.viewer.window.settings import settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from napari_wsigpu.annotations.annotation import Annotation
    from napari_wsigpu.slide.slide import Slide
    from napari_wsigpu.viewer.annotations.annotation_layers import LayerData

ENDINGS = (".geojson", ".geojson.gz")
DICOM_ENDING = ".dcm"
DICOM_KINDS = BULK_ANNOTATIONS, SEGMENTATION, *REPORTS


def get_geojson_reader(
    path: str | Sequence[str],
) -> Callable[[str | Sequence[str]], list[LayerData]] | None:
    """Return `read_annotations` if all paths are GeoJSON or DICOM annotations, else None."""
    paths = [path] if isinstance(path, str) else list(path)
    known = all(name.lower().endswith(ENDINGS) or sop_class(name) in DICOM_KINDS for name in paths)
    return read_annotations if paths and known else None


def read_annotations(path: str | Sequence[str]) -> list[LayerData]:
    """Read annotations as shapes, points and labels layers, above the slide with the file's name.

    A file with another name belongs to the active slide.

    Parameters
    ----------
    path : str or sequence of str
        GeoJSON files that `napari_wsigpu.read_geojson` accepts, or DICOM annotations,
        segmentations or reports.

    Raises
    ------
    SlideError
        If a file cannot be read.
    """
    viewer = napari.current_viewer()
    layers: list[LayerData] = []
    for name in [path] if isinstance(path, str) else path:
        title = _stem(name)
        slide_layer = slide_layer_for(viewer, {"name": title}, title)
        slide, kind = slide_of(slide_layer), sop_class(name)
        if kind == SEGMENTATION:
            found = [segmentation_layer(read_dicom_segmentation(name), title, slide_layer)]
        else:
            new = _read(name, kind, slide)
            if viewer is not None and slide is not None:
                new, skipped = without_known(new, annotations_in(contents_of(viewer, slide.path)))
                if skipped:
                    show_info(f"'{Path(name).name}': {skipped_sentence(skipped)}")
            found = annotation_layers(new, title, slide_layer)
            if any(kind == "labels" for *_, kind in found):
                show_info(MANY)
        shown_as = [attributes for _, attributes, _ in found]
        hide_like_slide(viewer, slide_layer, shown_as, Path(name).name)
        layers += found
    return layers or [(None,)]  # type: ignore[list-item]  # tells napari: empty file


def _read(path: str, kind: str, slide: Slide | None) -> list[Annotation]:
    image = slide.metadata["dicom"] if slide is not None and slide.vendor == "dicom" else None
    if kind == BULK_ANNOTATIONS:
        return read_dicom_annotations(path, image)
    if kind in REPORTS:
        return read_dicom_report(path, image)
    found, empty = read_features(path)
    if empty:
        show_info(f"'{Path(path).name}': {empty_sentence(empty)}")
    return found


def _stem(path: str) -> str:
    """Return a file's name without its endings; other parts with dots belong to the name."""
    name = Path(path).name
    for ending in (".gz", ".geojson", DICOM_ENDING):
        name = name.removesuffix(ending)
    return name


def write_annotations(path: str, layers: list[LayerData]) -> list[str]:
    """Write shapes, points and labels layers, in pixels of their slide's level 0.

    Parameters
    ----------
    path : str
        The file: DICOM annotations if it ends in ".dcm", else GeoJSON.
    layers : list of (data, attributes, kind)
        Without an open slide, their data coordinates are written to GeoJSON as they are.

    Returns
    -------
    list of str
        The path.

    Raises
    ------
    SlideError
        If a layer could belong to several slides, or the file cannot be written.
    """
    try:
        _write(path, layers)
    except SlideError as error:
        # napari takes a ValueError to mean "this writer does not apply", and drops its message.
        raise SlideError(str(error)) from error
    return [path]


def _write(path: str, layers: list[LayerData]) -> None:
    viewer = napari.current_viewer()
    found = []
    slides = set()
    for data in layers:
        _, attributes, _ = data
        slide_layer = slide_layer_for(viewer, attributes)
        ndim = len(attributes.get("scale", (1, 1)))
        found += annotations_of(data, to_pixels(viewer, attributes, ndim, slide_layer))
        slides.add(slide_of(slide_layer))
    if path.lower().endswith(DICOM_ENDING):
        [slide, *others] = slides
        if slide is None or others:
            raise AnnotationError(
                f"'{path}' must refer to one DICOM slide, but the layers belong to "
                f"{len(slides) if others else 'none'}; open the slide, and save only its layers."
            )
        write_dicom_annotations(path, found, slide, private=settings().show_private)
    else:
        write_geojson(path, found)
