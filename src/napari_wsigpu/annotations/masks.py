"""Which pixels lie within rings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.geometry import Rect


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
    for ring in rings:
        x, y = (ring / downsample - (rect.left, rect.top)).T
        x_next, y_next = np.roll(x, -1), np.roll(y, -1)
        first = np.ceil(np.minimum(y, y_next) - 0.5).clip(0, rect.height).astype(int)
        last = np.ceil(np.maximum(y, y_next) - 0.5).clip(0, rect.height).astype(int)
        counts = last - first
        edge = np.repeat(np.arange(len(ring)), counts)
        row = np.arange(len(edge)) - np.repeat(np.cumsum(counts) - counts, counts) + first[edge]
        part = (row + 0.5 - y[edge]) / (y_next - y)[edge]
        crossing = x[edge] + part * (x_next - x)[edge]
        column = np.ceil(crossing - 0.5).clip(0, rect.width).astype(int)
        np.add.at(turns, (row, column), 1)
    within: NDArray[np.bool_] = np.cumsum(turns[:, :-1], axis=1, dtype=np.uint8) % 2 == 1
    return within
