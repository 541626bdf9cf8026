"""Masks and label images drawn from the rings of objects."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.model.errors import AnnotationError
from napari_wsigpu.model.geometry import Rect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.annotations.annotation import Annotation
    from napari_wsigpu.annotations.rings import Ring
    from napari_wsigpu.model.geometry import Integers, Pair

    Labels = NDArray[np.int32]

# Kinds of objects that have an area.
WITH_AREA = "polygon", "ellipse"
# Objects are drawn in batches to limit the memory for edge crossings and pixel indices.
MOST_VERTICES, MOST_PIXELS = 1 << 18, 1 << 22


def rings_mask(rings: Sequence[Ring], rect: Rect, downsample: float = 1.0) -> NDArray[np.bool_]:
    """Return a mask of a rectangle: pixels whose centers are inside an odd number of rings.

    Parameters
    ----------
    rings : sequence of ndarray, shape (vertices, 2)
        (x, y) in pixels of level 0, as in `Annotation.rings`.
    rect : Rect
        Rectangle in pixels of a level.
    downsample : float
        Pixels of level 0 per pixel of that level.

    Returns
    -------
    ndarray of bool, shape (height, width)
    """
    # Each crossing of an edge toggles all pixels to its right in the row.
    turns = np.zeros((rect.height, rect.width + 1), np.uint8)
    _, row, column = _crossings(rings, rect, downsample)
    np.add.at(turns, (row, column), 1)
    within: NDArray[np.bool_] = np.cumsum(turns[:, :-1], axis=1, dtype=np.uint8) % 2 == 1
    return within


def label_image(annotations: Sequence[Annotation], shape: Pair, downsample: float = 1.0) -> Labels:
    """Draw objects as a label image, for segmentation tools and napari's Labels layers.

    With very many objects, this takes a fraction of the time and memory of a shapes layer.

    Parameters
    ----------
    annotations : sequence of Annotation
        Objects, such as those returned by `read_geojson`. Lines and points are left out.
    shape : tuple of (int, int)
        Height and width in pixels of a level, ``slide.levels[level].shape[:2]``.
    downsample : float
        Pixels of level 0 per pixel of that level, ``slide.level_downsamples[level]``.

    Returns
    -------
    ndarray of int32, shape (height, width)
        1 for pixels whose center is inside the first of `annotations`, 2 for the second, and so
        on; 0 for all others. Where objects overlap, later ones cover earlier ones.

    Raises
    ------
    AnnotationError
        If the image does not fit into memory.

    Examples
    --------
    >>> cells = read_geojson("cells.geojson")  # doctest: +SKIP
    >>> labels = label_image(cells, slide.levels[1].shape[:2], slide.level_downsamples[1])
    ... # doctest: +SKIP
    """
    height, width = shape
    try:
        labels = np.zeros((height, width), np.int32)
    except (MemoryError, ValueError):
        size = f"A label image of {width} x {height} pixels"
        raise AnnotationError(f"{size} doesn't fit into memory; use a coarser level.") from None
    rings: list[Ring] = []
    numbers: list[int] = []
    vertices, rect = 0, Rect(0, 0, *shape)
    for number, annotation in enumerate(annotations, 1):
        if annotation.kind in WITH_AREA:
            rings += annotation.rings
            numbers += [number] * len(annotation.rings)
            vertices += sum(map(len, annotation.rings))
            if vertices > MOST_VERTICES:
                draw_numbers(rings, np.array(numbers), labels, rect, downsample)
                rings, numbers, vertices = [], [], 0
    draw_numbers(rings, np.array(numbers), labels, rect, downsample)
    return labels


def draw_numbers(
    rings: Sequence[Ring], numbers: Integers, labels: Labels, rect: Rect, downsample: float
) -> None:
    """Fill the pixels inside each object's rings with its number; higher numbers are on top.

    Parameters
    ----------
    rings, downsample
        As in `rings_mask`.
    numbers : ndarray of int
        Number of the object that each ring belongs to.
    labels : ndarray of int32, shape (height, width)
        Pixels of the rectangle, modified in place.
    rect : Rect
        Rectangle in pixels of a level.
    """
    if not rings:
        return
    ring, row, column = _crossings(rings, rect, downsample)
    number = numbers[ring]
    order = np.lexsort((column, row, number))
    # By the even-odd rule, the crossings of a row alternately enter and leave an object.
    number, row, start = (each[order[::2]] for each in (number, row, column))
    lengths = column[order[1::2]] - start
    start += row * labels.shape[1]
    past, flat, first = np.cumsum(lengths), labels.reshape(-1), 0
    while first < len(lengths):
        done = past[first - 1] if first else 0
        last = max(first + 1, int(np.searchsorted(past, done + MOST_PIXELS, "right")))
        some = slice(first, last)
        pixels = np.arange(past[last - 1] - done)
        pixels += np.repeat(start[some] - (past[some] - lengths[some] - done), lengths[some])
        flat[pixels] = np.repeat(number[some], lengths[some])
        first = last


def _crossings(
    rings: Sequence[Ring], rect: Rect, downsample: float
) -> tuple[Integers, Integers, Integers]:
    """Find where edges of rings cross the center lines of a rectangle's rows.

    Returns
    -------
    ring, row, column : ndarray of int64, shape (crossings,)
        Index of the ring, the row, and the first column whose center is right of the crossing.
    """
    lengths = np.array([len(ring) for ring in rings])
    x, y = (np.concatenate(rings) / downsample - (rect.left, rect.top)).T
    after, ends = np.arange(1, len(x) + 1), np.cumsum(lengths)
    after[ends - 1] = ends - lengths
    x_next, y_next = x[after], y[after]
    first = np.ceil(np.minimum(y, y_next) - 0.5).clip(0, rect.height).astype(int)
    last = np.ceil(np.maximum(y, y_next) - 0.5).clip(0, rect.height).astype(int)
    counts = last - first
    edge = np.repeat(np.arange(len(x)), counts)
    row = np.arange(len(edge)) - np.repeat(np.cumsum(counts) - counts, counts) + first[edge]
    part = (row + 0.5 - y[edge]) / (y_next - y)[edge]
    crossing = x[edge] + part * (x_next - x)[edge]
    column = np.ceil(crossing - 0.5).clip(0, rect.width).astype(int)
    return np.repeat(np.arange(len(rings)), lengths)[edge], row, column
