"""Read and change a viewer's position and magnification on a slide."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.model.errors import RegionError
from napari_wsigpu.viewer.view.region import flat_affine_of, in_units_of, pixels_in, seen_pixels

if TYPE_CHECKING:
    from napari import Viewer
    from napari.layers import Layer
    from numpy.typing import NDArray

    from napari_wsigpu.slide.slide import Slide

OBJECTIVE_AT_1_UM = 10  # scanners reach 1 µm per pixel with a 10x objective
MARGIN = 1.2  # relative space around a fitted box
MAGNIFICATIONS = (1, 2, 5, 10, 20, 40)
TOLERANCE = 1.05  # objectives are nominal: a 40x scanner may store 0.26 µm per pixel
SAME = 0.01  # relative difference of magnifications that count as equal
# Accepts positions typed by hand, or copied from the navigator, a table or a script.
POSITION = re.compile(
    r"[\s(\[]*(?:x\s*[=:]?)?\s*([-+]?[\d.]+)\s*(?:µm|um|px)?[\s,;]+(?:y\s*[=:]?)?\s*"
    r"([-+]?[\d.]+)\s*(?:µm|um|px)?[\s)\]]*",
    re.IGNORECASE,
)


def objective_of(slide: Slide) -> float | None:
    """Return the magnification at which a pixel of level 0 fills a screen pixel, or None.

    If the file names no objective, this is derived from the pixel size: 0.25 µm corresponds to 40x.
    """
    if slide.objective:
        return slide.objective
    return None if slide.mpp is None else OBJECTIVE_AT_1_UM * 2 / sum(slide.mpp)


def center_on(viewer: Viewer, layer: Layer, x: float, y: float) -> None:
    """Center the view on a position of a slide.

    Parameters
    ----------
    viewer, layer
        A viewer and one of its layers that shows the slide.
    x, y : float
        In pixels of level 0, from the upper left corner of the first pixel.
    """
    world = _world(viewer, layer, np.array([[y - 0.5, x - 0.5]]))[0]
    center = list(viewer.scene.camera.center)
    center[-2:] = world
    viewer.scene.camera.center = tuple(center)


def center_on_box(viewer: Viewer, layer: Layer, box: NDArray[np.float64]) -> None:
    """Center the view on a box unless all of it is visible; zoom if it does not fit or looks tiny.

    Parameters
    ----------
    viewer, layer
        A viewer and one of its layers that shows the slide.
    box : ndarray, shape (2, 2)
        Minimum and maximum (x, y) in pixels of level 0.
    """
    corners = view(viewer, layer)
    if (corners.min(axis=0) <= box[0]).all() and (box[1] <= corners.max(axis=0)).all():
        return
    center_on(viewer, layer, *box.mean(axis=0).tolist())
    room = np.array(viewer.canvas.viewbox_size(viewer.layers))[::-1]
    fitting = float((room / np.maximum(box[1] - box[0], 1)).min()) / MARGIN
    now = screen_pixels(viewer, layer)
    if now > fitting or now * MARGIN**8 < fitting:
        set_screen_pixels(viewer, layer, min(fitting, max(now, 1.0)))


def view(viewer: Viewer, layer: Layer) -> NDArray[np.float64]:
    """Return the corners of a viewer's visible area on a slide.

    Returns
    -------
    ndarray, shape (4, 2)
        (x, y) in pixels of level 0, in order around the area.
    """
    around = seen_pixels(viewer, layer)[[0, 1, 3, 2]]
    found: NDArray[np.float64] = around[:, ::-1] + 0.5
    return found


def cursor(viewer: Viewer, layer: Layer) -> tuple[float, float]:
    """Return the mouse position (x, y) in pixels of level 0."""
    world = np.array([viewer.cursor.position[-2:]])
    y, x = (_pixels(viewer, layer, world)[0] + 0.5).tolist()
    return x, y


def screen_pixels(viewer: Viewer, layer: Layer) -> float:
    """Return the number of screen pixels that a pixel of level 0 spans."""
    return float(viewer.scene.camera.zoom) * _pixel_in_world(viewer, layer)


def set_screen_pixels(viewer: Viewer, layer: Layer, count: float) -> None:
    """Zoom so that a pixel of level 0 spans `count` screen pixels."""
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


class ViewDescription(NamedTuple):
    """A view's frame on the slide, and text that describes the view.

    Attributes
    ----------
    frame : ndarray, shape (4, 2), or None
        Corners of the visible area, as `view` returns them; None in three dimensions.
    magnification, position : str
        Texts with the magnification and with the position of the mouse.
    """

    frame: NDArray[np.float64] | None
    magnification: str
    position: str


def describe_view(viewer: Viewer, layer: Layer, slide: Slide) -> ViewDescription:
    """Describe a viewer's position on a slide."""
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
    return ViewDescription(frame, f"Shown at {magnification}", position)


def magnify(viewer: Viewer, layer: Layer, slide: Slide, number: float) -> None:
    """Show a slide at an objective's magnification, unless the slide's own is unknown."""
    objective = objective_of(slide)
    if objective:
        set_screen_pixels(viewer, layer, number / objective)


def magnifications_of(slide: Slide) -> list[int]:
    """Return the magnifications up to the slide's own; none if it is unknown."""
    objective = objective_of(slide) or 0
    return [number for number in MAGNIFICATIONS if number <= objective * TOLERANCE]


def current_magnification(viewer: Viewer, layer: Layer, slide: Slide) -> int | None:
    """Return a two-dimensional view's magnification if it is in `magnifications_of`, or None."""
    shown = screen_pixels(viewer, layer) * (objective_of(slide) or 0)
    near = (each for each in magnifications_of(slide) if abs(shown / each - 1) < SAME)
    return next(near, None) if viewer.dims.ndisplay == 2 else None


def position_in(text: str, slide: Slide, *, in_micrometers: bool) -> tuple[float, float]:
    """Convert a position that the user typed to (x, y) in pixels of level 0.

    Raises
    ------
    RegionError
        If the text is not a position, or the position is outside the slide.
    """
    found = POSITION.fullmatch(text)
    try:
        x, y = (float(number) for number in found.groups()) if found else (None, None)
    except ValueError:  # several decimal points
        x = y = None
    if x is None or y is None:
        raise RegionError("This is not a position; enter two numbers, x and y: 12000, 8500")
    if in_micrometers and slide.mpp is not None:
        x, y = x / slide.mpp[0], y / slide.mpp[1]
    width, height = slide.dimensions
    if not (0 <= x <= width and 0 <= y <= height):
        raise RegionError("This position is outside the slide.")
    return x, y
