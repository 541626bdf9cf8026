"""Whole-slide images in napari and in scripts.

Public interface: `open_slide`, `Slide`, `convert`, `read_geojson`, `write_geojson`, `Annotation`,
`measure`, `read_zarr_to_gpu`, `wait`, the errors in `napari_wsigpu.errors`, and what slides share
in `napari_wsigpu.runtime`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from napari.layers import Layer

    from napari_wsigpu import errors as errors
    from napari_wsigpu import runtime as runtime
    from napari_wsigpu.annotations import (
        Annotation,
        label_image,
        measure,
        read_geojson,
        write_geojson,
    )
    from napari_wsigpu.compat.zarr_to_gpu import read_zarr_to_gpu
    from napari_wsigpu.conversion import Conversion, convert
    from napari_wsigpu.model.errors import SlideError
    from napari_wsigpu.slide.slide import Slide, open_slide

__all__ = [
    "Annotation",
    "Conversion",
    "Slide",
    "SlideError",
    "__version__",
    "convert",
    "label_image",
    "measure",
    "open_slide",
    "read_geojson",
    "read_zarr_to_gpu",
    "wait",
    "write_geojson",
]
__version__ = version("napari-wsigpu")


# Where each name is; all take a quarter of a second, which a command's help need not.
_MODULES = "errors", "runtime"
_PLACES = {
    "Annotation": "annotations",
    "Conversion": "conversion",
    "Slide": "slide.slide",
    "SlideError": "model.errors",
    "convert": "conversion",
    "label_image": "annotations",
    "measure": "annotations",
    "open_slide": "slide.slide",
    "read_geojson": "annotations",
    "read_zarr_to_gpu": "compat.zarr_to_gpu",
    "write_geojson": "annotations",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for."""
    if name in _MODULES:
        return import_module(f"napari_wsigpu.{name}")
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"napari_wsigpu.{_PLACES[name]}"), name)
    return found


def wait(layer: Layer, timeout: float = 60.0) -> None:
    """Return when what a viewer shows of a slide's layer is exact, not a coarser stand-in.

    For scripts, screenshots and tests; call it in the main thread. The application's events are
    handled meanwhile. ``layer.data`` needs no waiting: it is always exact.

    Parameters
    ----------
    layer : napari.layers.Layer
        A layer that shows a slide. One that is invisible, or in no viewer, is not waited for.
        A labels layer has no stand-ins, and is waited for until napari has drawn it.
    timeout : float
        How many seconds to wait at most.

    Raises
    ------
    LayerError
        If the layer shows neither a slide nor labels.
    DisplayTimeoutError
        If tiles are still missing after the timeout.
    SlideError
        If tiles can't be had, because the file or the device fails.

    Examples
    --------
    >>> [layer] = viewer.open("slide.svs", plugin="napari-wsigpu")  # doctest: +SKIP
    >>> viewer.scene.camera.zoom = 0.5  # doctest: +SKIP
    >>> napari_wsigpu.wait(layer)  # doctest: +SKIP
    >>> viewer.screenshot("slide.png")  # doctest: +SKIP
    """
    from napari_wsigpu.viewer import waiting

    waiting.wait(layer, timeout)
