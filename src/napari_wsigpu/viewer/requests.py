"""napari's requests for a layer's slices: what they are made of, and what answers them.

napari keeps them to itself. `fits` says whether its layers have what is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.display.drawing import View
from napari_wsigpu.model.geometry import Rect
from napari_wsigpu.viewer.layers import image_of

if TYPE_CHECKING:
    from napari.layers import Image, Layer
    from numpy.typing import NDArray

    from napari_wsigpu.model.layout import LevelLayout

MOST_PIXELS = 40 << 20
SEAM = ("_make_slice_request_internal", "_make_slice_request", "_update_slice_response")
REQUEST = (
    "corner_pixels", "data_at_data_level", "data_at_thumbnail_level", "data_level", "data_slice",
    "downsample_factors", "level_shapes", "projection_mode", "slice_input",
)  # fmt: skip


def fits(layer: Layer) -> bool:
    """Whether this napari's layers have what progressive display needs."""
    state = getattr(layer, "_slicing_state", None)
    request = getattr(state, "_slice_request_class", None)
    named = {field.name for field in fields(request)} if is_dataclass(request) else set()
    return named.issuperset(REQUEST) and all(callable(getattr(state, name, None)) for name in SEAM)


@dataclass(frozen=True)
class Composed:
    """What a slice reads instead of a level: pixels that were composed for it.

    Attributes
    ----------
    pixels : ndarray
        The pixels.
    fixed : tuple of int
        Axes that they lack, as the plane was chosen along them.
    """

    pixels: Any
    fixed: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """That of a level, with the axes that the pixels lack."""
        return np.expand_dims(self.pixels, self.fixed).shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the pixels."""
        return self.pixels.dtype  # type: ignore[no-any-return]

    def __getitem__(self, key: tuple[slice | int, ...]) -> Composed:
        return Composed(
            self.pixels, tuple(axis for axis in self.fixed if isinstance(key[axis], slice))
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(np.expand_dims(self.pixels, self.fixed), dtype)


def blank(request: Any, layer: Image, planes: int) -> Any:
    """Make a request show the background of a plane that can't be read."""
    level = len(request.level_shapes) - 1
    stack, slide = layer.data[level], image_of(layer)
    assert slide is not None
    background = slide.displayed.background(slide.display_color)
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


def affordable(request: Any) -> tuple[int, NDArray[Any]]:
    """Return level and corners of a request, of a coarser level where it asks for too much."""
    level, corners = request.data_level, request.corner_pixels
    shapes = request.level_shapes
    while level < len(shapes) - 1 and np.prod(corners[1] - corners[0] + 1) > MOST_PIXELS:
        corners = np.minimum(corners * shapes[level + 1] // shapes[level], shapes[level + 1] - 1)
        level += 1
    return level, corners


def within(level: int, corners: NDArray[Any], image: LevelLayout) -> View:
    """Return a view of at least one pixel; corners may still be those of a larger level."""
    (top, left), (last_row, last_column) = corners.tolist()
    top, left = min(top, image.height - 1), min(left, image.width - 1)
    bottom, right = min(last_row + 1, image.height), min(last_column + 1, image.width)
    return View(level, Rect.between(top, max(bottom, top + 1), left, max(right, left + 1)))
