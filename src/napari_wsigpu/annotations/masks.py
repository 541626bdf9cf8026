"""Which pixels lie within rings, and an image that numbers objects."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.model.errors import AnnotationError
from napari_wsigpu.model.geometry import Rect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.annotations.annotation import Annotation

WITH_AREA = "polygon", "ellipse"
# What is drawn at once.
MOST_VERTICES, MOST_PIXELS = 1 << 18, 1 << 22


def inside(
    rings: Sequence[NDArray[np.float64]], rect: Rect, downsample: float = 1.0
) -> NDArray[np.bool_]:
    """Return which pixels of a rectangle have their centre within an odd number of rings.

    Parameters
    ----------
    rings : sequence of ndarray, shape (vertices, 2)
        (x, y) in pixels of level 0, as of an `Annotation`.
    rect : Rect
        In pixels of a level.
    downsample : float
        How many pixels of level 0 one of that level spans.

    Returns
    -------
    ndarray of bool, shape (height, width)
    """
    # Each edge turns all pixels right of it in the rows that it crosses.
    turns = np.zeros((rect.height, rect.width + 1), np.uint8)
    _, row, column = _crossings(rings, rect, downsample)
    np.add.at(turns, (row, column), 1)
    within: NDArray[np.bool_] = np.cumsum(turns[:, :-1], axis=1, dtype=np.uint8) % 2 == 1
    return within


def label_image(
    annotations: Sequence[Annotation], shape: tuple[int, int], downsample: float = 1.0
) -> NDArray[np.int32]:
    """Draw objects as a label image, as segmentation programs and napari's Labels layers have them.

    Of very many objects it takes a fraction of the time and memory of a layer of shapes.

    Parameters
    ----------
    annotations : sequence of Annotation
        Objects, such as `read_geojson` returns. Lines and points have no area and are left out.
    shape : tuple of (int, int)
        Height and width in pixels of a level, ``slide.levels[level].shape[:2]``.
    downsample : float
        How many pixels of level 0 one of that level spans, ``slide.level_downsamples[level]``.

    Returns
    -------
    ndarray of int32, shape (height, width)
        Of each pixel whose centre lies in an object, 1 for the first of `annotations`, 2 for the
        second; of several it is the last one's. Elsewhere 0.

    Raises
    ------
    AnnotationError
        If the shape is too large for this machine's memory.

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
        raise AnnotationError(
            f"A label image of {width} x {height} pixels doesn't fit into memory; use a coarser "
            "level."
        ) from None
    rings: list[NDArray[np.float64]] = []
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
    rings: Sequence[NDArray[np.float64]],
    numbers: NDArray[np.int64],
    labels: NDArray[np.int32],
    rect: Rect,
    downsample: float,
) -> None:
    """Put the numbers of objects into the pixels within their rings, the largest on top.

    Parameters
    ----------
    rings, downsample
        As of `inside`.
    numbers : ndarray of int
        Of each ring, that of its object.
    labels : ndarray of int32
        The pixels of the rectangle.
    rect : Rect
        In pixels of a level.
    """
    if not rings:
        return
    ring, row, column = _crossings(rings, rect, downsample)
    number = numbers[ring]
    order = np.lexsort((column, row, number))
    # Along a row, each second crossing of an object leaves it again.
    number, row, begin = (each[order[::2]] for each in (number, row, column))
    lengths = column[order[1::2]] - begin
    begin += row * labels.shape[1]
    past, flat, first = np.cumsum(lengths), labels.reshape(-1), 0
    while first < len(lengths):
        done = past[first - 1] if first else 0
        last = max(first + 1, int(np.searchsorted(past, done + MOST_PIXELS, "right")))
        some = slice(first, last)
        pixels = np.arange(past[last - 1] - done)
        pixels += np.repeat(begin[some] - (past[some] - lengths[some] - done), lengths[some])
        flat[pixels] = np.repeat(number[some], lengths[some])
        first = last


def _crossings(
    rings: Sequence[NDArray[np.float64]], rect: Rect, downsample: float
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return where edges cross the middle of a rectangle's rows.

    Returns
    -------
    tuple of ndarray of int64, shape (crossings,)
        Index of the ring, row, and the first column whose middle lies right of it.
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
