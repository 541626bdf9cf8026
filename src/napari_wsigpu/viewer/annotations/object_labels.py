"""Many objects as a labels layer, which napari draws faster than shapes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from napari.utils.colormaps import CyclicLabelColormap

from napari_wsigpu.annotations.numbered import NumberedObjects
from napari_wsigpu.model.geometry import Rect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.annotations.annotation import Annotation, Color

    Index = slice | int | tuple[slice | int, ...]
    from napari_wsigpu.model.arrays import Array, DType
    from napari_wsigpu.viewer.layers.placement import Attributes

COARSEST = 1024  # pixels a side
KEPT = 1 << 22  # levels of at most this many pixels are drawn once, as a whole
OPACITY = 0.5  # keeps the slide visible
TRANSPARENT = (0.0, 0.0, 0.0, 0.0)


class ObjectLevel:
    """A level of a label image whose regions are drawn on demand.

    Parameters
    ----------
    objects : NumberedObjects
        The objects and their labels.
    size : tuple of int
        (width, height) of level 0.
    downsample : int
        Size of a pixel of this level in pixels of level 0.
    """

    dtype = np.dtype(np.int32)
    ndim = 2

    def __init__(self, objects: NumberedObjects, size: tuple[int, int], downsample: int) -> None:
        self._objects = objects
        self._downsample = downsample
        self._drawn: NDArray[np.int32] | None = None
        self.shape = math.ceil(size[1] / downsample), math.ceil(size[0] / downsample)

    @property
    def size(self) -> int:
        """Number of pixels."""
        return self.shape[0] * self.shape[1]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Index) -> NDArray[np.int32]:
        if self.size <= KEPT:
            whole: NDArray[np.int32] = self.__array__()[key]
            return whole
        keys = [*(key if isinstance(key, tuple) else (key,)), slice(None)][:2]
        rows, columns = (
            np.arange(length)[each] for length, each in zip(self.shape, keys, strict=True)
        )
        if not (rows.size and columns.size):
            return np.zeros((*rows.shape, *columns.shape), self.dtype)
        top, left = int(rows.min()), int(columns.min())
        window = Rect.between(top, int(rows.max()) + 1, left, int(columns.max()) + 1)
        part = self._objects.draw(window, self._downsample)
        found: NDArray[np.int32] = part[rows - top][..., columns - left]
        return found

    def __array__(self, dtype: DType | None = None, copy: bool | None = None) -> Array:
        drawn = self._drawn
        if drawn is None:
            drawn = self._objects.draw(Rect(0, 0, *self.shape), self._downsample)
            self._drawn = drawn if self.size <= KEPT else None
        return np.array(drawn, dtype=dtype, copy=copy)


def object_labels(
    annotations: Sequence[Annotation], size: tuple[int, int] | None, default: Color
) -> tuple[list[ObjectLevel], Attributes, NDArray[np.int64]]:
    """Return objects as levels of labels in the colors of their classes.

    Parameters
    ----------
    annotations : sequence of Annotation
        Polygons and ellipses.
    size : tuple of int, optional
        (width, height) of the slide; by default the extent of the objects.
    default : tuple of int
        Color of objects without one.

    Returns
    -------
    levels : list of ObjectLevel
        Each level is half as large as the one before.
    attributes : dict
        Attributes of the layer.
    numbers : ndarray of int
        The label of each object.
    """
    colors = [annotation.color or default for annotation in annotations]
    shown = {color: index for index, color in enumerate(dict.fromkeys(colors))}
    # napari repeats the colors cyclically: choose labels that map to each object's color.
    color_indices = np.array([shown[color] for color in colors])
    numbers = np.arange(len(annotations)) * len(shown) + color_indices + 1
    objects = NumberedObjects(annotations, numbers)
    if size is None:
        x, y = objects.extent
        size = math.ceil(x), math.ceil(y)
    steps = max(math.ceil(math.log2(max(size) / COARSEST)), 1)  # napari rejects a single level
    levels = [ObjectLevel(objects, size, 1 << step) for step in range(steps + 1)]
    rows = [TRANSPARENT, *((red / 255, green / 255, blue / 255, 1.0) for red, green, blue in shown)]
    attributes = {
        "multiscale": True,
        "colormap": CyclicLabelColormap(colors=np.array(rows)),
        "opacity": OPACITY,
    }
    return levels, attributes, numbers
