"""The napari writer: a slide's layers as a file of any kind that `convert` writes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import napari
from napari.utils import cancelable_progress
from napari_builtins.io import napari_write_image

from napari_wsigpu.conversion import convert
from napari_wsigpu.conversion.options import kind_of
from napari_wsigpu.model.errors import ConversionCancelledError, LayerError, SlideError
from napari_wsigpu.viewer.layers import slide_of, slide_of_data
from napari_wsigpu.viewer.notifications import show_info
from napari_wsigpu.viewer.planes import shown_plane

if TYPE_CHECKING:
    from napari_wsigpu.slide.slide import Slide
    from napari_wsigpu.viewer.layers import LayerData


def write_slide(path: str, layers: list[LayerData]) -> list[str]:
    """Write the slide that layers show, all of it; see `convert`.

    napari asks before a file is replaced. A picture that is no slide is left to napari, which
    offers one writer for both.

    Parameters
    ----------
    path : str
        What to write; its ending says which kind of file.
    layers : list of (data, attributes, "image")
        One or more layers of one slide.

    Returns
    -------
    list of str
        The path; none if the user has cancelled.

    Raises
    ------
    SlideError
        If they are not the layers of one slide, or it can't be read or written.
    """
    try:
        return _written(path, layers)
    except ConversionCancelledError:
        return []
    except SlideError as error:
        # napari takes a ValueError for a writer that does not fit, and drops what it says.
        raise SlideError(str(error)) from error


def _written(path: str, layers: list[LayerData]) -> list[str]:
    slides = {
        slide_of_data(data[0] if attributes.get("multiscale") else data)
        for data, attributes, _ in layers
    }
    [slide, *others] = slides
    if others:
        raise LayerError(
            f"The {len(layers)} layers are not of one slide; select those of one, and save it."
        )
    if slide is not None:
        return _write(slide, path, selected=len(layers))
    if len(layers) > 1:
        raise LayerError("The layers are of no slide; save one at a time, or all to a folder.")
    data, attributes, _ = layers[0]
    written = napari_write_image(path, data, attributes)
    return [written] if written else []


def _write(slide: Slide, path: str, selected: int) -> list[str]:
    cancelled = threading.Event()
    name = Path(path).name
    bar = cancelable_progress(total=0, desc=f"Saving {name}", cancel_callback=cancelled.set)

    def note(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    # What holds one plane gets the one that is shown.
    several = kind_of(Path(path)) in ("ome-tiff", "ome-zarr")
    plane = {} if several else _shown_plane(slide)
    with bar:
        done = convert(
            slide,
            path,
            z=plane.get("z"),
            t=plane.get("t"),
            color=slide.display_color,
            overwrite=True,
            keep=False,
            progress=note,
            cancelled=cancelled,
        )
    notes = list(done.notes)
    if selected < len(slide.channels):
        notes.insert(0, f"All {len(slide.channels)} channels of the slide were saved.")
    if notes:
        show_info(f"Saved '{name}'. {' '.join(notes)}")
    return [done.path]


def _shown_plane(slide: Slide) -> dict[str, int]:
    """Return the plane of a slide that napari's current viewer shows."""
    viewer = napari.current_viewer()
    layers = [] if viewer is None else viewer.layers
    shown = [shown_plane(viewer, layer, slide) for layer in layers if slide_of(layer) is slide]
    return shown[0] if shown else {}
