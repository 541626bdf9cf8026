"""Where a viewer looks on a slide, and how to have it look elsewhere."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.model.errors import RegionError
from napari_wsigpu.viewer.region import flat_affine_of, in_units_of, pixels_in, seen_pixels

if TYPE_CHECKING:
    from napari import Viewer
    from napari.layers import Layer
    from numpy.typing import NDArray

    from napari_wsigpu.slide.slide import Slide

OF_ONE_MICROMETRE = 10  # the objective with which scanners reach 1 µm a pixel
MARGIN = 1.2  # around what is shown as a whole
MAGNIFICATIONS = (1, 5, 10, 20, 40)
# As it is written by hand, or copied from the navigator, other tables or a script.
POSITION = re.compile(
    r"[\s(\[]*(?:x\s*[=:]?)?\s*([-+]?[\d.]+)\s*(?:µm|um|px)?[\s,;]+(?:y\s*[=:]?)?\s*"
    r"([-+]?[\d.]+)\s*(?:µm|um|px)?[\s)\]]*",
    re.IGNORECASE,
)


def objective_of(slide: Slide) -> float | None:
    """Return the magnification of one pixel of level 0 on one of the screen; None if unknown.

    Where the file names no objective, its pixel size tells: 0.25 µm are 40x, as scanners have it.
    """
    if slide.objective:
        return slide.objective
    return None if slide.mpp is None else OF_ONE_MICROMETRE * 2 / sum(slide.mpp)


def look_at(viewer: Viewer, layer: Layer, x: float, y: float) -> None:
    """Move a position of a slide to the middle of the view.

    Parameters
    ----------
    viewer, layer
        A viewer, and a layer of the slide in it.
    x, y : float
        In pixels of level 0, counted from the upper left corner of the first one.
    """
    world = _world(viewer, layer, np.array([[y - 0.5, x - 0.5]]))[0]
    center = list(viewer.scene.camera.center)
    center[-2:] = world
    viewer.scene.camera.center = tuple(center)


def look_at_all_of(viewer: Viewer, layer: Layer, box: NDArray[np.float64]) -> None:
    """Move a box to the middle of the view; zoom out if it is larger, or in if it is tiny.

    Parameters
    ----------
    viewer, layer
        A viewer, and a layer of the slide in it.
    box : ndarray, shape (2, 2)
        Its least and largest (x, y), in pixels of level 0.
    """
    look_at(viewer, layer, *box.mean(axis=0).tolist())
    room = np.array(viewer.canvas.viewbox_size(viewer.layers))[::-1]
    fits = float((room / np.maximum(box[1] - box[0], 1)).min()) / MARGIN
    now = screen_pixels(viewer, layer)
    if now > fits or now * MARGIN**8 < fits:
        set_screen_pixels(viewer, layer, min(fits, max(now, 1.0)))


def view(viewer: Viewer, layer: Layer) -> NDArray[np.float64]:
    """Return the corners of what a viewer shows of a slide.

    Returns
    -------
    ndarray, shape (4, 2)
        (x, y) in pixels of level 0, in order around the view.
    """
    around = seen_pixels(viewer, layer)[[0, 1, 3, 2]]
    found: NDArray[np.float64] = around[:, ::-1] + 0.5
    return found


def cursor(viewer: Viewer, layer: Layer) -> tuple[float, float]:
    """Return (x, y) under the mouse, in pixels of level 0."""
    world = np.array([viewer.cursor.position[-2:]])
    y, x = (_pixels(viewer, layer, world)[0] + 0.5).tolist()
    return x, y


def screen_pixels(viewer: Viewer, layer: Layer) -> float:
    """Return how many pixels of the screen one of level 0 spans."""
    return float(viewer.scene.camera.zoom) * _pixel_in_world(viewer, layer)


def set_screen_pixels(viewer: Viewer, layer: Layer, count: float) -> None:
    """Have one pixel of level 0 span so many of the screen."""
    viewer.scene.camera.zoom = count / _pixel_in_world(viewer, layer)


def _pixel_in_world(viewer: Viewer, layer: Layer) -> float:
    matrix, _ = flat_affine_of(layer)
    units = in_units_of(viewer, layer)
    return float(np.sqrt(abs(np.linalg.det(matrix)) / np.prod(units)))


def _world(viewer: Viewer, layer: Layer, points: NDArray[np.float64]) -> NDArray[np.float64]:
    matrix, origin = flat_affine_of(layer)
    moved: NDArray[np.float64] = (points @ matrix.T + origin) / in_units_of(viewer, layer)
    return moved


def _pixels(viewer: Viewer, layer: Layer, world: NDArray[np.float64]) -> NDArray[np.float64]:
    return pixels_in(layer, world * in_units_of(viewer, layer))


class Whereabouts(NamedTuple):
    """What is said of a view.

    Attributes
    ----------
    frame : ndarray, shape (4, 2), or None
        Its corners, as `view` returns them; None in three dimensions.
    magnification, position : str
        How large the slide is shown, and what is under the mouse.
    """

    frame: NDArray[np.float64] | None
    magnification: str
    position: str


def whereabouts(viewer: Viewer, layer: Layer, slide: Slide) -> Whereabouts:
    """Return where a viewer looks on a slide that a layer shows."""
    objective, shown = objective_of(slide), screen_pixels(viewer, layer)
    magnification = (
        f"{shown * objective:.3g}\N{MULTIPLICATION SIGN}" if objective else f"{shown:.1%}"
    )
    x, y = cursor(viewer, layer)
    width, height = slide.dimensions
    position = ""
    if viewer.mouse_over_canvas and 0 <= x < width and 0 <= y < height:
        position = f"x {int(x)}, y {int(y)} px"
        if slide.mpp is not None:
            position = f"x {x * slide.mpp[0]:.1f}, y {y * slide.mpp[1]:.1f} µm\n{position}"
    frame = view(viewer, layer) if viewer.dims.ndisplay == 2 else None
    return Whereabouts(frame, f"Shown at {magnification}", position)


def magnify(viewer: Viewer, layer: Layer, slide: Slide, number: float) -> None:
    """Show a slide as by an objective; do nothing where its magnification is unknown."""
    objective = objective_of(slide)
    if objective:
        set_screen_pixels(viewer, layer, number / objective)


def position_in(text: str, slide: Slide, *, in_micrometres: bool) -> tuple[float, float]:
    """Return (x, y) in pixels of level 0 of a position that somebody wrote.

    Raises
    ------
    RegionError
        If it is no position, or lies outside of the slide.
    """
    found = POSITION.fullmatch(text)
    try:
        x, y = (float(number) for number in found.groups()) if found else (None, None)
    except ValueError:  # too many points
        x = y = None
    if x is None or y is None:
        raise RegionError("Write two numbers, x and y: 12000, 8500")
    if in_micrometres and slide.mpp is not None:
        x, y = x / slide.mpp[0], y / slide.mpp[1]
    width, height = slide.dimensions
    if not (0 <= x <= width and 0 <= y <= height):
        raise RegionError("This position lies outside of the slide.")
    return x, y
