"""Regions of a slide that are drawn or seen in a viewer."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from napari_wsigpu.model.errors import RegionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from napari import Viewer
    from napari.layers import Layer, Shapes
    from numpy.typing import NDArray

    from napari_wsigpu.slide.slide import Slide

ROUNDING = 0.01  # pixels: napari keeps shapes in single precision
UPRIGHT = 0.5  # pixels


class Region(NamedTuple):
    """A rectangle within a slide, not empty.

    Attributes
    ----------
    x, y, width, height : int
        In pixels of level 0.
    notes : tuple of str
        How it differs from what was drawn, one sentence each.
    """

    x: int
    y: int
    width: int
    height: int
    notes: tuple[str, ...] = ()


def whole(slide: Slide) -> Region:
    """Return all of a slide."""
    return Region(0, 0, *slide.dimensions)


def seen(viewer: Viewer, layer: Layer, slide: Slide) -> Region:
    """Return what a viewer shows of a slide now.

    Parameters
    ----------
    viewer : Viewer
        The viewer.
    layer : Layer
        A layer of the slide in that viewer.
    slide : Slide
        The slide.

    Raises
    ------
    RegionError
        If it shows nothing of the slide, or in three dimensions.
    """
    if viewer.dims.ndisplay != 2:
        raise RegionError("The view is three-dimensional; switch it to 2D, or choose a shape.")
    return region_around(seen_pixels(viewer, layer), slide)._replace(notes=())


def seen_pixels(viewer: Viewer, layer: Layer) -> NDArray[np.float64]:
    """Return the corners of what a flat view shows, shape (4, 2), in data coordinates of a layer.

    They are the upper left, upper right, lower left and lower right one.
    """
    camera = viewer.scene.camera
    half = np.array(viewer.canvas.viewbox_size(viewer.layers)) / (2 * camera.zoom)
    middle = np.array(camera.center[-2:])
    corners = np.array([middle + half * signs for signs in product((-1, 1), (-1, 1))])
    return pixels_in(layer, corners * in_units_of(viewer, layer))


def drawn(viewer: Viewer, shapes: Shapes, layer: Layer, slide: Slide) -> Region:
    """Return the bounding box of the selected shapes, or of the last one if none is selected.

    A pixel belongs to it if its centre does.

    Parameters
    ----------
    viewer : Viewer
        The viewer.
    shapes : Shapes
        A layer of shapes in that viewer; it may be scaled, moved and rotated against the slide,
        and have other units.
    layer : Layer
        A layer of the slide in that viewer.
    slide : Slide
        The slide.

    Raises
    ------
    RegionError
        If there is no shape, or none that holds a pixel of the slide.
    """
    outlines = shapes.data
    chosen = sorted(shapes.selected_data) or [len(outlines) - 1]
    if not outlines:
        raise RegionError(f"The layer '{shapes.name}' has no shape yet; draw a rectangle in it.")
    points = np.concatenate([outlines[index] for index in chosen])
    pixels = on_slide(viewer, shapes, layer, points)
    notes = []
    upright = shapes.shape_type[chosen[0]] != "ellipse" and _is_upright(pixels)
    if len(chosen) > 1:
        notes.append(f"It is the bounding box of the {len(chosen)} selected shapes.")
    elif not upright:
        notes.append("It is the bounding box of the shape.")
    if len(outlines) > 1 and not shapes.selected_data:
        notes.append("No shape is selected; it is the one that was drawn last.")
    return region_around(pixels, slide, *notes)


def on_slide(
    viewer: Viewer, layer: Layer, slide_layer: Layer, points: NDArray[Any]
) -> NDArray[np.float64]:
    """Return where points of a layer are on a slide.

    Parameters
    ----------
    viewer : Viewer
        The viewer of both.
    layer : Layer
        A layer that may be scaled, moved and rotated against the slide, and have other units.
    slide_layer : Layer
        A layer of the slide.
    points : ndarray, shape (points, axes)
        Data coordinates of `layer`.

    Returns
    -------
    ndarray, shape (points, 2)
        (y, x) in pixels of level 0, counted from the centre of its first pixel.
    """
    # napari ignores all units where some can't be converted.
    known = viewer.layers.extent.units is not None
    factors: Any = _factors(layer.units, slide_layer.units) if known else 1
    return pixels_in(slide_layer, _world(layer, points)[:, -2:] * factors)


def region_around(pixels: NDArray[np.float64], slide: Slide, *notes: str) -> Region:
    """Return the pixels whose centres, which are whole numbers, lie within a bounding box."""
    size = np.array(slide.dimensions[::-1])
    edges = np.stack([pixels.min(axis=0), pixels.max(axis=0)])
    start, stop = np.ceil(np.clip(edges, -1, size + 1) - ROUNDING).astype(int)
    if np.any(start >= size) or np.any(stop <= 0):
        raise RegionError("The region lies outside of the slide; move it onto the slide.")
    within = np.clip([start, stop], 0, size)
    (top, left), (height, width) = within[0].tolist(), (within[1] - within[0]).tolist()
    if height <= 0 or width <= 0:
        raise RegionError("The region holds no pixel of the slide; draw a larger one.")
    if np.any(within != [start, stop]):
        notes = (*notes, "What lies outside of the slide is left out.")
    return Region(left, top, width, height, notes)


def _is_upright(pixels: NDArray[np.float64]) -> bool:
    """Whether an outline is a rectangle along the slide's axes."""
    box = np.array(list(product(*np.stack([pixels.min(axis=0), pixels.max(axis=0)], axis=1))))
    far = np.abs(pixels[:, None] - box).max(axis=2) > UPRIGHT
    return len(pixels) == len(box) and not far.all(axis=0).any()


def _world(layer: Layer, points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return where points of a layer, shape (points, axes), are in the layer's own units."""
    matrix, origin = affine_of(layer)
    moved: NDArray[np.float64] = points @ matrix.T + origin
    return moved


def pixels_in(layer: Layer, world: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the data coordinates, (y, x), of points that are given in the layer's own units."""
    matrix, origin = flat_affine_of(layer)
    pixels: NDArray[Any] = np.linalg.solve(matrix, (world - origin).T).T
    return pixels


def in_units_of(viewer: Viewer, layer: Layer) -> NDArray[np.float64]:
    """Return how many of a layer's units, (y, x), one of the viewer's world is."""
    units = viewer.layers.extent.units
    # napari ignores all units where some can't be converted.
    return np.ones(2) if units is None else _factors(units, layer.units)


def affine_of(layer: Layer) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the matrix and the shift that lead from data coordinates to a layer's own units."""
    origin = np.array(layer.data_to_world(np.zeros(layer.ndim)))
    columns = [np.array(layer.data_to_world(axis)) - origin for axis in np.eye(layer.ndim)]
    return np.stack(columns, axis=1), origin


def flat_affine_of(layer: Layer) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return what `affine_of` does for the last two axes of a slide's layer: those of a plane."""
    matrix, origin = affine_of(layer)
    return matrix[-2:, -2:], origin[-2:]


def _factors(units: Sequence[Any], others: Sequence[Any]) -> NDArray[np.float64]:
    """Return how many of the other units the last two of `units` are."""
    pairs = zip(units[-2:], others[-2:], strict=True)
    return np.array([(1 * unit).to(other).magnitude for unit, other in pairs])
