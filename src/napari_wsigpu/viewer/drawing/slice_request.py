"""Functions that read and replace the data of napari's slice requests."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.display.composite_source import source_of
from napari_wsigpu.display.drawing import View
from napari_wsigpu.model.geometry import Rect
from napari_wsigpu.viewer.layers.slide_layers import image_of
from napari_wsigpu.viewer.napari_internals import SLICE_REQUESTS, SLICING

if TYPE_CHECKING:
    from napari.layers import Image, Layer
    from napari.layers._scalar_field._slice import _ScalarFieldSliceRequest as SliceRequest

    from napari_wsigpu.display.device_pixels import DevicePixels
    from napari_wsigpu.model.arrays import Array, DType
    from napari_wsigpu.model.layout import LevelLayout

MOST_PIXELS = 40 << 20
REQUEST = (
    "corner_pixels", "data_at_data_level", "data_at_thumbnail_level", "data_level", "data_slice",
    "downsample_factors", "level_shapes", "projection_mode", "slice_input",
)  # fmt: skip


def fits(layer: Layer) -> bool:
    """Whether this version of napari has the methods and fields that progressive display needs."""
    try:
        state = SLICING.get(layer)
        *methods, request = (SLICE_REQUESTS.get(state, each) for each in SLICE_REQUESTS.attributes)
    except AttributeError:
        return False
    named = {field.name for field in fields(request)} if is_dataclass(request) else set()
    return named.issuperset(REQUEST) and all(map(callable, methods))


@dataclass(frozen=True)
class Composed:
    """A composed picture that napari slices instead of a level.

    Attributes
    ----------
    pixels : ndarray
        The picture, without the fixed axes.
    fixed : tuple of int
        Axes of the layer along which the slice shows only one position.
    """

    pixels: Array | DevicePixels
    fixed: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape including the fixed axes, like a level's shape."""
        return np.expand_dims(self.pixels, self.fixed).shape

    @property
    def dtype(self) -> DType:
        """Type of the pixels."""
        return self.pixels.dtype

    def __getitem__(self, key: tuple[slice | int, ...]) -> Composed:
        return Composed(
            self.pixels, tuple(axis for axis in self.fixed if isinstance(key[axis], slice))
        )

    def __array__(self, dtype: DType | None = None, copy: bool | None = None) -> Array:
        return np.asarray(np.expand_dims(self.pixels, self.fixed), dtype)


def blank(request: SliceRequest, layer: Image, planes: int) -> SliceRequest:
    """Return a request that shows background, for a plane that cannot be read."""
    level = len(request.level_shapes) - 1
    stack, slide = layer.data[level], image_of(layer)
    assert slide is not None
    source = source_of(stack) or slide.displayed
    background = source.background(slide.display_color)
    if stack.channel is not None:
        background = np.broadcast_to(background, stack.layout.channels)[stack.channel]
    corners = np.zeros_like(request.corner_pixels)
    corners[1, -2:] = request.level_shapes[level][-2:] - 1
    empty = np.broadcast_to(np.asarray(background, stack.dtype), stack.level_shape)
    pixels = Composed(empty, tuple(range(planes)))
    return replace(
        request,
        data_level=level,
        corner_pixels=corners,
        data_at_data_level=pixels,
        data_at_thumbnail_level=pixels,
    )


def affordable(request: SliceRequest) -> tuple[int, Array]:
    """Return a request's level and corners; a coarser level if it exceeds `MOST_PIXELS`."""
    level, corners = request.data_level, request.corner_pixels
    shapes = request.level_shapes
    while level < len(shapes) - 1 and np.prod(corners[1] - corners[0] + 1) > MOST_PIXELS:
        corners = np.minimum(corners * shapes[level + 1] // shapes[level], shapes[level + 1] - 1)
        level += 1
    return level, corners


def within(level: int, corners: Array, image: LevelLayout) -> View:
    """Clip corners, which may come from a larger level, to at least one pixel of a level."""
    (top, left), (last_row, last_column) = corners.tolist()
    top, left = min(top, image.height - 1), min(left, image.width - 1)
    bottom, right = min(last_row + 1, image.height), min(last_column + 1, image.width)
    return View(level, Rect.between(top, max(bottom, top + 1), left, max(right, left + 1)))
