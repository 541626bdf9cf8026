"""Outlines of the objects in a label image, along pixel edges."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.model.errors import AnnotationError

if TYPE_CHECKING:
    from napari_wsigpu.annotations.rings import Ring
    from napari_wsigpu.model.arrays import Array
    from napari_wsigpu.model.geometry import Integers

# An edge runs along its object's pixel, with the object on the right. The four directions are
# right, down, left and up. `STEPS` is (y, x) from the start of an edge to its end; `STARTS` is
# (y, x) from the pixel's upper left corner to the start; `OUTWARD` leads from the pixel to its
# neighbor on the left of the edge.
STEPS = np.array([(0, 1), (1, 0), (0, -1), (-1, 0)])
STARTS = np.array([(0, 0), (0, 1), (1, 1), (1, 0)])
OUTWARD = [(-1, 0), (0, 1), (1, 0), (0, -1)]


def outlines(labels: Array) -> dict[int, list[Ring]]:
    """Trace the rings around each object.

    Parameters
    ----------
    labels : ndarray of int, shape (height, width)
        Object numbers, 0 where there is no object. Pixels that share only a corner are not
        connected.

    Returns
    -------
    dict of int to list of ndarray, shape (vertices, 2)
        By object number, the (x, y) corners of its outlines and holes, measured from the upper
        left corner of the first pixel.

    Raises
    ------
    AnnotationError
        If the array is not a label image.
    """
    if labels.ndim != 2 or labels.dtype.kind not in "iub":
        found = f"An array of type {labels.dtype} with {labels.ndim} axes"
        raise AnnotationError(f"{found} is not a label image; choose a 2D labels layer.")
    padded = np.pad(labels, 1)
    edges = _edges(padded)
    if not edges.size:
        return {}
    following = _following(padded, edges)
    corner = np.zeros(len(edges), bool)
    turns = edges % 4 != (edges % 4)[following]
    corner[following[turns]] = True
    # Pointer jumping: each edge skips straight segments until it points to a corner.
    while not corner[following].all():
        following = np.where(corner[following], following, following[following])
    pixels = np.stack(np.divmod(edges // 4, padded.shape[1]), axis=1)
    starts = (pixels - 1 + STARTS[edges % 4])[:, ::-1].astype(np.float64)
    numbers = padded.reshape(-1)[edges // 4]
    return _rings(np.flatnonzero(corner), following, starts, numbers)


def _edges(padded: Array) -> Integers:
    """Return all edges of objects, sorted; an edge is 4 * (index of the pixel) + direction."""
    found = []
    inner = padded[1:-1, 1:-1]
    width = padded.shape[1]
    for direction, (down, right) in enumerate(OUTWARD):
        other = padded[1 + down : padded.shape[0] - 1 + down, 1 + right : width - 1 + right]
        row, column = np.nonzero((inner != 0) & (inner != other))
        found.append(((row + 1) * width + column + 1) * 4 + direction)
    return np.sort(np.concatenate(found))


def _following(padded: Array, edges: Integers) -> Integers:
    """Return the index of the edge that follows each edge, clockwise around the object."""
    flat, width = padded.reshape(-1), padded.shape[1]
    pixel, direction = edges // 4, edges % 4
    ahead = (STEPS[:, 0] * width + STEPS[:, 1])[direction]
    left = np.array([down * width + right for down, right in OUTWARD])[direction]
    number = flat[pixel]
    goes_on = flat[pixel + ahead] == number
    turns_left = goes_on & (flat[pixel + ahead + left] == number)
    # Turn right where the object ends, and left where it also covers the pixel ahead on the left;
    # otherwise go straight on.
    after = pixel * 4 + (direction + 1) % 4
    after = np.where(goes_on, (pixel + ahead) * 4 + direction, after)
    after = np.where(turns_left, (pixel + ahead + left) * 4 + (direction + 3) % 4, after)
    return np.searchsorted(edges, after)


def _rings(
    corners: Integers, following: Integers, starts: Ring, numbers: Array
) -> dict[int, list[Ring]]:
    """Follow the edges from corner to corner and collect the rings by object number."""
    rank = np.zeros(len(following), np.int64)
    rank[corners] = np.arange(len(corners))
    after = rank[following[corners]].tolist()
    owners = numbers[corners].tolist()
    positions = starts[corners]
    seen = bytearray(len(corners))
    found: dict[int, list[Ring]] = {}
    for first in range(len(corners)):
        if seen[first]:
            continue
        ring, at = [], first
        while not seen[at]:
            seen[at] = 1
            ring.append(at)
            at = after[at]
        found.setdefault(owners[first], []).append(positions[ring])
    return found
