"""Label images of very many objects, drawn on demand at any position and scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.annotations.masks import WITH_AREA, draw_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.annotations.annotation import Annotation
    from napari_wsigpu.annotations.rings import Ring
    from napari_wsigpu.model.geometry import Integers, Rect


class NumberedObjects:
    """Draws objects as label images.

    Parameters
    ----------
    annotations : sequence of Annotation
        Objects in pixels of level 0. Lines and points are left out.
    numbers : ndarray of int
        Pixel value of each object. Where objects overlap, the highest number is on top.
    """

    def __init__(self, annotations: Sequence[Annotation], numbers: Integers) -> None:
        self._rings: list[Ring] = []
        owners: list[int] = []
        for annotation, number in zip(annotations, numbers.tolist(), strict=True):
            if annotation.kind in WITH_AREA:
                self._rings += annotation.rings
                owners += [number] * len(annotation.rings)
        self._numbers = np.array(owners, np.int64)
        starts = np.cumsum([0, *map(len, self._rings)])[:-1]
        vertices = np.concatenate(self._rings) if self._rings else np.empty((0, 2))
        # Bounding box of each ring.
        self._least = np.minimum.reduceat(vertices, starts) if owners else vertices
        self._most = np.maximum.reduceat(vertices, starts) if owners else vertices

    @property
    def extent(self) -> tuple[float, float]:
        """(x, y) of the lower right corner of the objects' bounding box."""
        x, y = self._most.max(axis=0, initial=1).tolist()
        return x, y

    def draw(self, rect: Rect, downsample: float) -> NDArray[np.int32]:
        """Draw the objects in a rectangle.

        Parameters
        ----------
        rect : Rect
            Rectangle in pixels of a level.
        downsample : float
            Pixels of level 0 per pixel of that level.

        Returns
        -------
        ndarray of int32, shape (height, width)
            Number of the object at the center of each pixel, or 0. An object smaller than a pixel
            fills the pixel at its center, so that no object disappears.
        """
        labels = np.zeros((rect.height, rect.width), np.int32)
        least, most = self._least / downsample, self._most / downsample
        start, stop = (rect.left, rect.top), (rect.right, rect.bottom)
        here = np.flatnonzero(np.all((most > start) & (least < stop), axis=1))
        small = here[np.all(most[here] - least[here] < 1, axis=1)]
        x, y = np.floor((least[small] + most[small]) / 2).astype(int).T - np.array([start]).T
        seen = (x >= 0) & (x < rect.width) & (y >= 0) & (y < rect.height)
        labels[y[seen], x[seen]] = self._numbers[small][seen]
        rings = [self._rings[ring] for ring in here]
        draw_numbers(rings, self._numbers[here], labels, rect, downsample)
        return labels
