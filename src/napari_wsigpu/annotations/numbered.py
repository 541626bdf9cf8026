"""Very many objects as label images of any part and scale, drawn when they are asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.annotations.masks import WITH_AREA, draw_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.annotations.annotation import Annotation
    from napari_wsigpu.model.geometry import Rect


class NumberedObjects:
    """Draws objects by their numbers.

    Parameters
    ----------
    annotations : sequence of Annotation
        Objects in pixels of level 0; lines and points have no area and are left out.
    numbers : ndarray of int
        Of each object, the value of its pixels; where objects overlap, the largest is seen.
    """

    def __init__(self, annotations: Sequence[Annotation], numbers: NDArray[np.int64]) -> None:
        self._rings: list[NDArray[np.float64]] = []
        of: list[int] = []
        for annotation, number in zip(annotations, numbers.tolist(), strict=True):
            if annotation.kind in WITH_AREA:
                self._rings += annotation.rings
                of += [number] * len(annotation.rings)
        self._numbers = np.array(of, np.int64)
        starts = np.cumsum([0, *map(len, self._rings)])[:-1]
        vertices = np.concatenate(self._rings) if self._rings else np.empty((0, 2))
        self._least = np.minimum.reduceat(vertices, starts) if of else vertices
        self._most = np.maximum.reduceat(vertices, starts) if of else vertices

    @property
    def extent(self) -> tuple[float, float]:
        """(x, y) of the lower right corner around all objects."""
        x, y = self._most.max(axis=0, initial=1).tolist()
        return x, y

    def draw(self, rect: Rect, downsample: float) -> NDArray[np.int32]:
        """Draw what lies in a rectangle.

        Parameters
        ----------
        rect : Rect
            In pixels of a level.
        downsample : float
            How many pixels of level 0 one of that level spans.

        Returns
        -------
        ndarray of int32, shape (height, width)
            The number of the object that holds the centre of the pixel, or 0. Objects that are
            smaller than a pixel have the one that they lie in, so that none is lost.
        """
        labels = np.zeros((rect.height, rect.width), np.int32)
        least, most = self._least / downsample, self._most / downsample
        start, stop = (rect.left, rect.top), (rect.right, rect.bottom)
        here = np.flatnonzero(np.all((most > start) & (least < stop), axis=1))
        small = here[np.all(most[here] - least[here] < 1, axis=1)]
        x, y = np.floor((least[small] + most[small]) / 2).astype(int).T - np.array([start]).T
        seen = (x >= 0) & (x < rect.width) & (y >= 0) & (y < rect.height)
        labels[y[seen], x[seen]] = self._numbers[small][seen]
        draw_numbers(
            [self._rings[ring] for ring in here], self._numbers[here], labels, rect, downsample
        )
        return labels
