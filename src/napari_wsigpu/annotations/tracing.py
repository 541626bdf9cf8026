"""Outlines of the objects of a label image, along the edges of its pixels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.model.errors import AnnotationError

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Ways along an edge with the object on the right hand: right, down, left, up. Of each, where in
# (y, x) the pixel lies whose edge it is, seen from the corner at which the edge begins; and the
# step to its end.
STEPS = np.array([(0, 1), (1, 0), (0, -1), (-1, 0)])
STARTS = np.array([(0, 0), (0, 1), (1, 1), (1, 0)])
# For each way, where the pixel on the left hand is.
OUTWARD = [(-1, 0), (0, 1), (1, 0), (0, -1)]


def outlines(labels: NDArray[Any]) -> dict[int, list[NDArray[np.float64]]]:
    """Return the rings around each object.

    Parameters
    ----------
    labels : ndarray of int, shape (height, width)
        Numbers of objects, 0 where there is none. Pixels that meet at a corner alone are apart.

    Returns
    -------
    dict of int to list of ndarray, shape (vertices, 2)
        By number: (x, y) of the corners of its outlines and of its holes', counted from the upper
        left corner of the first pixel.

    Raises
    ------
    AnnotationError
        If it is no label image.
    """
    if labels.ndim != 2 or labels.dtype.kind not in "iub":
        raise AnnotationError(
            f"An array of {labels.ndim} axes and type {labels.dtype} is no flat label image; "
            "choose a labels layer of two dimensions."
        )
    padded = np.pad(labels, 1)
    edges = _edges(padded)
    if not edges.size:
        return {}
    following = _following(padded, edges)
    corner = np.zeros(len(edges), bool)
    turns = edges % 4 != (edges % 4)[following]
    corner[following[turns]] = True
    while not corner[following].all():  # straight on to the next corner
        following = np.where(corner[following], following, following[following])
    pixels = np.stack(np.divmod(edges // 4, padded.shape[1]), axis=1)
    starts = (pixels - 1 + STARTS[edges % 4])[:, ::-1].astype(np.float64)
    numbers = padded.reshape(-1)[edges // 4]
    return _rings(np.flatnonzero(corner), following, starts, numbers)


def _edges(padded: NDArray[Any]) -> NDArray[np.int64]:
    """Return the edges between objects, sorted: 4 times the index of a pixel and the way."""
    found = []
    inner = padded[1:-1, 1:-1]
    width = padded.shape[1]
    for way, (down, right) in enumerate(OUTWARD):
        other = padded[1 + down : padded.shape[0] - 1 + down, 1 + right : width - 1 + right]
        row, column = np.nonzero((inner != 0) & (inner != other))
        found.append(((row + 1) * width + column + 1) * 4 + way)
    return np.sort(np.concatenate(found))


def _following(padded: NDArray[Any], edges: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the index of the edge after each one, around its object."""
    flat, width = padded.reshape(-1), padded.shape[1]
    pixel, way = edges // 4, edges % 4
    ahead = (STEPS[:, 0] * width + STEPS[:, 1])[way]
    left = np.array([down * width + right for down, right in OUTWARD])[way]
    number = flat[pixel]
    goes_on = flat[pixel + ahead] == number
    turns_left = goes_on & (flat[pixel + ahead + left] == number)
    after = pixel * 4 + (way + 1) % 4
    after = np.where(goes_on, (pixel + ahead) * 4 + way, after)
    after = np.where(turns_left, (pixel + ahead + left) * 4 + (way + 3) % 4, after)
    return np.searchsorted(edges, after)


def _rings(
    corners: NDArray[np.int64],
    following: NDArray[np.int64],
    starts: NDArray[np.float64],
    numbers: NDArray[Any],
) -> dict[int, list[NDArray[np.float64]]]:
    rank = np.zeros(len(following), np.int64)
    rank[corners] = np.arange(len(corners))
    after = rank[following[corners]].tolist()
    of = numbers[corners].tolist()
    positions = starts[corners]
    seen = bytearray(len(corners))
    found: dict[int, list[NDArray[np.float64]]] = {}
    for first in range(len(corners)):
        if seen[first]:
            continue
        ring, at = [], first
        while not seen[at]:
            seen[at] = 1
            ring.append(at)
            at = after[at]
        found.setdefault(of[first], []).append(positions[ring])
    return found
