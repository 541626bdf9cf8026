"""napari writer that saves a slide in any format that `convert` writes."""

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
from napari_wsigpu.viewer.layers.slide_layers import slide_of, slide_of_data
from napari_wsigpu.viewer.layers.stack_axes import shown_plane
from napari_wsigpu.viewer.window.notifications import show_info

if TYPE_CHECKING:
    from napari_wsigpu.slide.slide import Slide
    from napari_wsigpu.viewer.layers.slide_layers import LayerData


def write_slide(path: str, layers: list[LayerData]) -> list[str]:
    """Write the whole slide that layers show; see `convert`.

    napari asks before it replaces a file. This function passes images other than slides to napari's
    own writer, as napari offers only one writer for both.

    Parameters
    ----------
    path : str
        Path of the file; its suffix selects the format.
    layers : list of (data, attributes, "image")
        One or more layers of the same slide.

    Returns
    -------
    list of str
        The path; empty if the user cancelled.

    Raises
    ------
    SlideError
        If the layers show several slides, or the slide cannot be read or written.
    """
    try:
        return _write_layers(path, layers)
    except ConversionCancelledError:
        return []
    except SlideError as error:
        # napari takes a ValueError to mean "this writer does not apply", and drops its message.
        raise SlideError(str(error)) from error


def _write_layers(path: str, layers: list[LayerData]) -> list[str]:
    slides = {
        slide_of_data(data[0] if attributes.get("multiscale") else data)
        for data, attributes, _ in layers
    }
    [slide, *others] = slides
    if others:
        raise LayerError(
            f"The {len(layers)} layers show several slides; select layers of one slide and save "
            "again."
        )
    if slide is not None:
        return _write(slide, path, selected=len(layers))
    if len(layers) > 1:
        raise LayerError("The layers show no slide; save them one at a time, or all to a folder.")
    data, attributes, _ = layers[0]
    written = napari_write_image(path, data, attributes)
    return [written] if written else []


def _write(slide: Slide, path: str, selected: int) -> list[str]:
    cancelled = threading.Event()
    name = Path(path).name
    bar = cancelable_progress(total=0, desc=f"Saving {name}", cancel_callback=cancelled.set)

    def report(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    # Only these formats hold stacks; in others, save the plane that is shown.
    holds_stacks = kind_of(Path(path)) in ("ome-tiff", "ome-zarr")
    plane = {} if holds_stacks else _shown_plane(slide)
    with bar:
        done = convert(
            slide,
            path,
            z=plane.get("z"),
            t=plane.get("t"),
            color=slide.display_color,
            overwrite=True,
            keep=False,
            progress=report,
            cancelled=cancelled,
        )
    notes = list(done.notes)
    if selected < len(slide.channels):
        notes.insert(0, f"All {len(slide.channels)} channels of the slide were saved.")
    if notes:
        show_info(f"Saved '{name}'. {' '.join(notes)}")
    return [done.path]


def _shown_plane(slide: Slide) -> dict[str, int]:
    """Return the plane of a slide that the current viewer shows."""
    viewer = napari.current_viewer()
    layers = [] if viewer is None else viewer.layers
    shown = [shown_plane(viewer, layer, slide) for layer in layers if slide_of(layer) is slide]
    return shown[0] if shown else {}
