"""napari reader for patches and attention scores in HDF5 files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import napari
import numpy as np

from napari_wsigpu.annotations.overlays import has_scores, overlay, read_patches
from napari_wsigpu.model.errors import AnnotationError
from napari_wsigpu.viewer.annotations.annotation_layers import (
    SLIDE,
    image_placement,
    layer_name,
    slide_layer_for,
)
from napari_wsigpu.viewer.layers.slide_layers import slide_of
from napari_wsigpu.viewer.view.arrangement import hide_like_slide
from napari_wsigpu.viewer.window.notifications import show_info

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from napari_wsigpu.viewer.annotations.annotation_layers import LayerData

ENDINGS = (".h5", ".hdf5")
OPACITY = 0.5  # keeps the slide visible


def get_heatmap_reader(
    path: str | Sequence[str],
) -> Callable[[str | Sequence[str]], list[LayerData]] | None:
    """Return `read_heatmaps` if all paths have an HDF5 suffix, else None."""
    paths = [path] if isinstance(path, str) else list(path)
    known = all(name.lower().endswith(ENDINGS) for name in paths)
    return read_heatmaps if paths and known else None


def read_heatmaps(path: str | Sequence[str]) -> list[LayerData]:
    """Read patches and their scores as image layers over the slide with the file's name.

    A file with another name belongs to the active slide.

    Parameters
    ----------
    path : str or sequence of str
        HDF5 files that `napari_wsigpu.annotations.read_patches` accepts.

    Raises
    ------
    SlideError
        If no slide is open or a file cannot be read.
    """
    viewer = napari.current_viewer()
    layers: list[LayerData] = []
    for name in [path] if isinstance(path, str) else path:
        title = Path(name).stem
        slide_layer = slide_layer_for(viewer, {"name": title}, title)
        slide = slide_of(slide_layer)
        if slide is None:
            raise AnnotationError(f"'{name}' holds patches of a slide; open the slide first.")
        image, step, corner = overlay(slide, *read_patches(name, slide))
        low, high = float(np.nanmin(image)), float(np.nanmax(image))
        is_uniform = low == high
        if is_uniform:
            file = f"'{Path(name).name}'"
            reason = (
                f"All scores in {file} are equal" if has_scores(name) else f"{file} has no scores"
            )
            show_info(f"{reason}, so its patches have one color.")
        attributes = {
            "name": layer_name(slide, title, "patches" if is_uniform else "heat map"),
            "colormap": "cyan" if is_uniform else "turbo",
            "opacity": OPACITY,
            "contrast_limits": (high - 1, high) if is_uniform else (low, high),
            "interpolation2d": "nearest",
            "metadata": {SLIDE: slide.path},
            **image_placement(slide_layer, step, corner),
        }
        hide_like_slide(viewer, slide_layer, [attributes], Path(name).name)
        layers.append((image, attributes, "image"))
    return layers
