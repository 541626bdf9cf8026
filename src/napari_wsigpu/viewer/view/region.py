"""Regions of a slide: the visible part, the whole slide, or the bounding box of shapes."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.model.errors import RegionError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from napari import Viewer
    from napari.layers import Layer, Shapes
    from numpy.typing import NDArray
    from pint import Unit

    from napari_wsigpu.model.arrays import Array
    from napari_wsigpu.slide.slide import Slide

    # From data coordinates of a layer, (points, axes), to (y, x) in pixels of level 0.
    ToPixels = Callable[[Array], NDArray[np.float64]]

ROUNDING = 0.01  # pixels: napari keeps shapes in single precision
UPRIGHT = 0.5  # pixels: tolerance for the corners of an upright rectangle


class Region(NamedTuple):
    """A rectangle within a slide that holds at least one pixel.

    Attributes
    ----------
    x, y, width, height : int
        In pixels of level 0.
    notes : tuple of str
        Sentences that explain how the region differs from the shape that the user drew.
    """

    x: int
    y: int
    width: int
    height: int
    notes: tuple[str, ...] = ()


def whole(slide: Slide) -> Region:
    """Return the region that covers a whole slide."""
    return Region(0, 0, *slide.dimensions)


def seen(viewer: Viewer, layer: Layer, slide: Slide) -> Region:
    """Return the region of a slide that a viewer shows.

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
        If the slide is out of view, or the view is three-dimensional.
    """
    if viewer.dims.ndisplay != 2:
        raise RegionError("The view is three-dimensional; switch it to 2D, or choose a shape.")
    return region_around(seen_pixels(viewer, layer), slide)._replace(notes=())


def seen_pixels(viewer: Viewer, layer: Layer) -> NDArray[np.float64]:
    """Return the corners of a two-dimensional view, shape (4, 2), in data coordinates of a layer.

    The order is upper left, upper right, lower left, lower right.
    """
    camera = viewer.scene.camera
    half = np.array(viewer.canvas.viewbox_size(viewer.layers)) / (2 * camera.zoom)
    middle = np.array(camera.center[-2:])
    corners = np.array([middle + half * signs for signs in product((-1, 1), (-1, 1))])
    return pixels_in(layer, corners * in_units_of(viewer, layer))


def drawn(viewer: Viewer, shapes: Shapes, layer: Layer, slide: Slide) -> Region:
    """Return the bounding box of the selected shapes, or of the last one if none are selected.

    A pixel belongs to the region if its center does.

    Parameters
    ----------
    viewer : Viewer
        The viewer.
    shapes : Shapes
        A shapes layer in that viewer; it may be scaled, moved and rotated relative to the
        slide, and have other units.
    layer : Layer
        A layer of the slide in that viewer.
    slide : Slide
        The slide.

    Raises
    ------
    RegionError
        If there is no shape, or the region contains no pixel of the slide.
    """
    outlines = shapes.data
    chosen = sorted(shapes.selected_data) or [len(outlines) - 1]
    if not outlines:
        raise RegionError(f"The layer '{shapes.name}' has no shape yet; draw a rectangle in it.")
    points = np.concatenate([outlines[index] for index in chosen])
    pixels = to_slide(viewer, shapes, layer)(points)
    notes = []
    upright = shapes.shape_type[chosen[0]] != "ellipse" and _is_upright(pixels)
    if len(chosen) > 1:
        notes.append(f"This is the bounding box of the {len(chosen)} selected shapes.")
    elif not upright:
        notes.append("This is the bounding box of the shape.")
    if len(outlines) > 1 and not shapes.selected_data:
        notes.append("No shape is selected, so this is the last one drawn.")
    return region_around(pixels, slide, *notes, *selection(shapes))


def selection(shapes: Shapes) -> list[str]:
    """Return a sentence if only some shapes are selected, which may be hard to see."""
    selected, count = len(shapes.selected_data), len(shapes.data)
    return [f"Selected: {selected} of {count} shapes."] if 0 < selected < count else []


def to_slide(viewer: Viewer, layer: Layer, slide_layer: Layer) -> ToPixels:
    """Return the conversion from a layer's data coordinates to pixels of a slide.

    Parameters
    ----------
    viewer : Viewer
        The viewer of both layers.
    layer : Layer
        A layer that may be scaled, moved and rotated relative to the slide, and have other units.
    slide_layer : Layer
        A layer of the slide.

    Returns
    -------
    callable
        Converts points, shape (points, axes), to (y, x) in pixels of level 0, measured from the
        center of its first pixel. It keeps no reference to the layers, and works in any thread.
    """
    # napari ignores all units if some cannot be converted.
    known = viewer.layers.extent.units is not None
    factors = _factors(layer.units, slide_layer.units) if known else np.ones(2)
    (matrix, origin), (below, corner) = affine_of(layer), flat_affine_of(slide_layer)

    def convert(points: Array) -> NDArray[np.float64]:
        world = (np.asarray(points, np.float64) @ matrix.T + origin)[:, -2:] * factors
        pixels: Array = np.linalg.solve(below, (world - corner).T).T
        return pixels

    return convert


def region_around(pixels: NDArray[np.float64], slide: Slide, *notes: str) -> Region:
    """Return the region of pixels whose centers, at whole numbers, are in a bounding box."""
    size = np.array(slide.dimensions[::-1])
    edges = np.stack([pixels.min(axis=0), pixels.max(axis=0)])
    start, stop = np.ceil(np.clip(edges, -1, size + 1) - ROUNDING).astype(int)
    if np.any(start >= size) or np.any(stop <= 0):
        raise RegionError("The region is outside the slide; move it onto the slide.")
    within = np.clip([start, stop], 0, size)
    (top, left), (height, width) = within[0].tolist(), (within[1] - within[0]).tolist()
    if height <= 0 or width <= 0:
        raise RegionError("The region contains no pixel of the slide; draw a larger one.")
    if np.any(within != [start, stop]):
        notes = (*notes, "The part outside the slide is left out.")
    return Region(left, top, width, height, notes)


def _is_upright(pixels: NDArray[np.float64]) -> bool:
    """Whether an outline is a rectangle along the slide's axes."""
    box = np.array(list(product(*np.stack([pixels.min(axis=0), pixels.max(axis=0)], axis=1))))
    far = np.abs(pixels[:, None] - box).max(axis=2) > UPRIGHT
    return len(pixels) == len(box) and not far.all(axis=0).any()


def pixels_in(layer: Layer, world: NDArray[np.float64]) -> NDArray[np.float64]:
    """Convert points, (y, x), from a layer's own units to its data coordinates."""
    matrix, origin = flat_affine_of(layer)
    pixels: Array = np.linalg.solve(matrix, (world - origin).T).T
    return pixels


def in_units_of(viewer: Viewer, layer: Layer) -> NDArray[np.float64]:
    """Return the length of a viewer's unit in a layer's own units, (y, x)."""
    units = viewer.layers.extent.units
    # napari ignores all units if some cannot be converted.
    return np.ones(2) if units is None else _factors(units, layer.units)


def affine_of(layer: Layer) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the matrix and offset of the transform from data coordinates to a layer's units."""
    origin = np.array(layer.data_to_world(np.zeros(layer.ndim)))
    columns = [np.array(layer.data_to_world(axis)) - origin for axis in np.eye(layer.ndim)]
    return np.stack(columns, axis=1), origin


def flat_affine_of(layer: Layer) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return `affine_of` for the last two axes of a slide's layer, which span a plane."""
    matrix, origin = affine_of(layer)
    return matrix[-2:, -2:], origin[-2:]


def _factors(units: Sequence[Unit], others: Sequence[Unit]) -> NDArray[np.float64]:
    """Return the factors that convert the last two of `units` to `others`."""
    pairs = zip(units[-2:], others[-2:], strict=True)
    return np.array([(1 * unit).to(other).magnitude for unit, other in pairs])
