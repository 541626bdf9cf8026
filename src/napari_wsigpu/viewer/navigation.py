"""Where a viewer looks on a slide, and how to have it look elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.viewer.region import flat_affine_of, in_units_of, pixels_in, seen_pixels

if TYPE_CHECKING:
    from napari import Viewer
    from napari.layers import Layer
    from numpy.typing import NDArray

    from napari_wsigpu.slide.slide import Slide

OF_ONE_MICROMETRE = 10  # the objective with which scanners reach 1 µm a pixel
MARGIN = 1.2  # around what is shown as a whole


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
