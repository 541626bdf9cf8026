"""napari's reader and writer of GeoJSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import napari

from napari_wsigpu.annotations.geojson import read_geojson, write_geojson
from napari_wsigpu.viewer.annotations import (
    MANY,
    annotation_layers,
    annotations_of,
    slide_layer_for,
    to_pixels,
)
from napari_wsigpu.viewer.notifications import show_info

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from napari_wsigpu.viewer.annotations import LayerData

ENDINGS = (".geojson", ".geojson.gz")


def get_geojson_reader(
    path: str | Sequence[str],
) -> Callable[[str | Sequence[str]], list[LayerData]] | None:
    """Return `read_annotations` if every path has the name of a GeoJSON file, else None."""
    paths = [path] if isinstance(path, str) else list(path)
    named = all(name.lower().endswith(ENDINGS) for name in paths)
    return read_annotations if paths and named else None


def read_annotations(path: str | Sequence[str]) -> list[LayerData]:
    """Read objects as layers of shapes, points and labels, over the slide that is shown.

    Parameters
    ----------
    path : str or sequence of str
        GeoJSON files as `napari_wsigpu.read_geojson` takes them.

    Raises
    ------
    SlideError
        If one can't be read.
    """
    viewer = napari.current_viewer()
    layers: list[LayerData] = []
    for name in [path] if isinstance(path, str) else path:
        title = Path(name).name.partition(".")[0]
        slide_layer = slide_layer_for(viewer, {"name": title})
        found = annotation_layers(read_geojson(name), title, slide_layer)
        if any(kind == "labels" for *_, kind in found):
            show_info(MANY)
        layers += found
    return layers or [(None,)]  # type: ignore[list-item]  # napari's sign that there is nothing


def write_annotations(path: str, layers: list[LayerData]) -> list[str]:
    """Write layers of shapes, points and labels as GeoJSON, in pixels of their slide's level 0.

    Parameters
    ----------
    path : str
        The file.
    layers : list of (data, attributes, kind)
        Where no slide is open, their data coordinates are taken for its pixels.

    Returns
    -------
    list of str
        The path.

    Raises
    ------
    SlideError
        If the layers could belong to several slides, or the file can't be written.
    """
    viewer = napari.current_viewer()
    found = []
    for data in layers:
        _, attributes, _ = data
        slide_layer = slide_layer_for(viewer, attributes)
        ndim = len(attributes.get("scale", (1, 1)))
        found += annotations_of(data, to_pixels(viewer, attributes, ndim, slide_layer))
    write_geojson(path, found)
    return [path]
