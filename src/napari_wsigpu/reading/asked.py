"""What callers ask for: checked, and in the words of those who read."""

from __future__ import annotations

import math
import operator
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.model.errors import RegionError
from napari_wsigpu.model.geometry import Rect
from napari_wsigpu.reading.batches import AHEAD_BYTES
from napari_wsigpu.reading.plan import Regions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.reading.scaling import Target

# Batches or regions at the same time to the host, and to a device.
AHEAD_ON_HOST, AHEAD_ON_DEVICE = 2, 3
MOST_AVERAGING = 8
# So many tiles keep a GPU busy while the next ones are read.
TILES_TOGETHER = 1024
FARTHEST = 1 << 60


def regions_of(
    locations: Sequence[tuple[int, int]], size: tuple[int, int], downsample: float
) -> Regions:
    """Return regions in a level's own pixels.

    Parameters
    ----------
    locations : sequence of tuple of int
        (x, y) of each upper left corner in pixels of level 0.
    size : tuple of int
        (width, height) in pixels of the level.
    downsample : float
        How many pixels of level 0 one of the level's spans.

    Raises
    ------
    RegionError
        If a location or the size is no pair of whole numbers, or can't be.
    """
    if len(locations) == 1:  # NumPy takes longer for one
        return Regions.one(region_of(locations[0], size, downsample))
    width, height = size_of(size)
    exact = np.clip(_places(locations) / downsample, -FARTHEST, FARTHEST)
    corners = np.floor(exact + 0.5).astype(np.int64)
    return Regions.alike(corners[:, 1], corners[:, 0], height, width)


def region_of(location: tuple[int, int], size: tuple[int, int], downsample: float) -> Rect:
    """Return one region in a level's own pixels; see `regions_of`."""
    width, height = size_of(size)
    x, y = _integers("location", location)
    if downsample != 1 or max(abs(x), abs(y)) > FARTHEST:
        x, y = _nearest(x / downsample), _nearest(y / downsample)
    return Rect(y, x, height, width)


def size_of(size: Any, least: int = 0) -> tuple[int, int]:
    """Return width and height of a region.

    Raises
    ------
    RegionError
        If they are no whole numbers, smaller than `least`, or larger than any memory.
    """
    width, height = _integers("size", size)
    if min(width, height) < least:
        raise RegionError(f"A region can't be {width} x {height} pixels; use a size >= {least}.")
    if max(width, height) > FARTHEST:
        raise RegionError(
            f"A region of {width} x {height} pixels doesn't fit into memory; read it in parts."
        )
    return width, height


def count_of(batch_size: Any) -> int:
    """Return how many regions a batch has; what is no number is refused where it is used."""
    return int(batch_size) if isinstance(batch_size, int | np.integer) else 1


def batches_ahead(device: str, target: Target) -> int:
    """Return how many batches, or regions, are read at the same time."""
    if device == "cpu":
        # To average takes a thread about as long as to decode takes several.
        cores = 1 if target.exact else (os.cpu_count() or 1) // 2
        return max(AHEAD_ON_HOST, min(cores, MOST_AVERAGING))
    return AHEAD_ON_DEVICE


def batches_together(
    device: str, target: Target, tiles_a_region: float, count: int, batch_bytes: int
) -> int:
    """Return how many batches of so many regions are read to a device by one call.

    Parameters
    ----------
    device : str
        Where they go.
    target : Target
        What they are read from.
    tiles_a_region : float
        How many tiles of the level one region needs.
    count : int
        How many regions a batch has.
    batch_bytes : int
        Memory of a batch.
    """
    if device == "cpu" or not target.exact:
        return 1
    room = AHEAD_BYTES // (2 * max(1, batch_bytes))
    return max(1, min(int(TILES_TOGETHER / max(1, tiles_a_region * count)), room))


def check_out(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Raise a `RegionError` if pixels can't be put into an array of the caller's."""
    contiguous = getattr(getattr(out, "flags", None), "c_contiguous", False)
    if not contiguous or tuple(out.shape) != shape or out.dtype != dtype:
        raise RegionError(f"out has to be a C-contiguous array of {shape} {dtype}.")


def _places(locations: Sequence[tuple[int, int]]) -> NDArray[np.float64]:
    """Return (x, y) of each location."""
    try:
        places: NDArray[Any] = np.array(locations)
    except (TypeError, ValueError):  # they are not alike
        places = np.zeros(0)
    if places.dtype.kind not in "iu" or places.shape != (len(locations), 2):
        # One may be wrong, or a whole number of another type.
        pairs = [_integers("location", location) for location in locations]
        places = np.array(pairs, object).reshape(-1, 2)
    return places.astype(np.float64)


def _integers(name: str, values: tuple[int, int]) -> tuple[int, int]:
    try:
        first, second = map(operator.index, values)
    except (TypeError, ValueError):
        raise RegionError(f"The {name} {values!r} is not a pair of whole numbers.") from None
    return first, second


def _nearest(position: float) -> int:
    """Round a position; what is farther away than any pixel stays within 64 bits."""
    return math.floor(max(-FARTHEST, min(position, FARTHEST)) + 0.5)
