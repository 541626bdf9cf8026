"""Whole-slide images in napari and in scripts.

The public interface is `open_slide`, `Slide`, `convert`, `read_geojson`, `write_geojson`,
`Annotation`, `measure`, `label_image`, `read_zarr_to_gpu`, `set_request_headers` and `wait`, with
the errors in `napari_wsigpu.errors` and the resources that slides share in `napari_wsigpu.runtime`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

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
    from napari_wsigpu.storage.remote.request_headers import set_request_headers

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
    "set_request_headers",
    "wait",
    "write_geojson",
]
__version__ = version("napari-wsigpu")


# Module of each public name. Names are imported on first use: importing all of them takes a quarter
# of a second, which would delay commands like ``wsigpu --help``.
_SUBMODULES = "errors", "runtime"
_MODULE_OF = {
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
    "set_request_headers": "storage.remote.request_headers",
    "write_geojson": "annotations",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name in _SUBMODULES:
        return import_module(f"napari_wsigpu.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"napari_wsigpu.{_MODULE_OF[name]}"), name)
    return found


def wait(layer: Layer, timeout: float = 60.0) -> None:
    """Wait until a viewer shows a slide's layer exactly, without coarser stand-ins for tiles.

    This function is meant for scripts, screenshots and tests. Call it in the main thread, where it
    processes the application's events. ``layer.data`` is always exact and needs no waiting.

    Parameters
    ----------
    layer : napari.layers.Layer
        A layer that shows a slide. If it is invisible or in no viewer, the function returns at
        once. A labels layer has no stand-ins; the function waits until napari has drawn it.
    timeout : float
        Maximum number of seconds to wait.

    Raises
    ------
    LayerError
        If the layer shows neither a slide nor labels.
    DisplayTimeoutError
        If tiles are still missing after the timeout.
    SlideError
        If tiles cannot be read or decoded, because the file or the device fails.

    Examples
    --------
    >>> [layer] = viewer.open("slide.svs", plugin="napari-wsigpu")  # doctest: +SKIP
    >>> viewer.scene.camera.zoom = 0.5  # doctest: +SKIP
    >>> napari_wsigpu.wait(layer)  # doctest: +SKIP
    >>> viewer.screenshot("slide.png")  # doctest: +SKIP
    """
    from napari_wsigpu.viewer.session import waiting

    waiting.wait(layer, timeout)
