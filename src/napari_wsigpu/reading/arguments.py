"""Check the arguments of region reads and convert them for readers."""

from __future__ import annotations

import math
import operator
import os
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from napari_wsigpu.model.errors import RegionError, too_large
from napari_wsigpu.model.geometry import Rect
from napari_wsigpu.model.tags import COMPRESSION, DEFLATE, ZSTD
from napari_wsigpu.reading.batches import AHEAD_BYTES
from napari_wsigpu.reading.plan import Regions

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.model.arrays import AnyArray, Array, DType
    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.reading.scaling import Target

# Number of batches or single regions that are read concurrently.
AHEAD_ON_HOST, AHEAD_ON_DEVICE = 2, 3
# A device decodes each of these tiles with one thread, so it needs more of them at once.
SLOW_ALONE, AHEAD_IF_SLOW = frozenset({COMPRESSION.LZW, *DEFLATE, *ZSTD}), 6
MAX_AHEAD_AVERAGING = 8
# This many tiles keep a GPU busy while the next ones are read.
TILES_PER_READ = 1024
# In pixels. The sum of a corner and a region's size still fits in 64 bits.
MAX_COORDINATE, FARTHEST = 1 << 60, 1 << 120


def regions_of(
    locations: Sequence[tuple[int, int]], size: tuple[int, int], downsample: float
) -> Regions:
    """Convert the locations of regions to pixels of a level.

    Parameters
    ----------
    locations : sequence of tuple of int
        (x, y) of the upper left corner of each region in pixels of level 0.
    size : tuple of int
        (width, height) in pixels of the level.
    downsample : float
        Pixels of level 0 that one pixel of the level spans.

    Raises
    ------
    RegionError
        If a location or the size is not a pair of whole numbers, or the size is out of range.
    """
    if len(locations) == 1:  # avoids the overhead of NumPy
        return Regions.one(region_of(locations[0], size, downsample))
    width, height = size_of(size)
    exact = np.clip(_as_array(locations) / downsample, -MAX_COORDINATE, MAX_COORDINATE)
    corners = np.floor(exact + 0.5).astype(np.int64)
    return Regions.alike(corners[:, 1], corners[:, 0], height, width)


def region_of(location: tuple[int, int], size: tuple[int, int], downsample: float) -> Rect:
    """Convert the location of one region to pixels of a level; see `regions_of`."""
    width, height = size_of(size)
    x, y = _integers("location", location)
    if downsample != 1 or max(abs(x), abs(y)) > MAX_COORDINATE:
        x, y = (_nearest(_clipped(each) / downsample) for each in (x, y))
    return Rect(y, x, height, width)


def size_of(size: Any, least: int = 0) -> tuple[int, int]:
    """Return the width and height of a region as integers.

    Raises
    ------
    RegionError
        If they are not whole numbers, are smaller than `least`, or exceed `MAX_COORDINATE`.
    """
    width, height = _integers("size", size)
    if min(width, height) < least:
        raise RegionError(
            f"A region of {width} x {height} pixels is not valid; use a size >= {least}."
        )
    if max(width, height) > MAX_COORDINATE:
        raise too_large(width, height)
    return width, height


def count_of(batch_size: object) -> int:
    """Return the size of batches; 1 for None, and for non-numbers, which `read_ahead` rejects."""
    return int(batch_size) if isinstance(batch_size, int | np.integer) else 1


def batches_ahead(device: str, target: Target, image: LevelLayout) -> int:
    """Return the number of batches, or single regions, to read concurrently from an image."""
    if device == "cpu":
        # Averaging a region occupies one thread for about as long as decoding it occupies several,
        # so more regions are read at once.
        cores = 1 if target.exact else (os.cpu_count() or 1) // 2
        return max(AHEAD_ON_HOST, min(cores, MAX_AHEAD_AVERAGING))
    return AHEAD_IF_SLOW if image.encoding.compression in SLOW_ALONE else AHEAD_ON_DEVICE


def batches_per_read(
    device: str, target: Target, tiles_per_region: float, count: int, batch_bytes: int
) -> int:
    """Return how many batches a device decodes in one call.

    Parameters
    ----------
    device : str
        The device that decodes; on the CPU, batches are never grouped.
    target : Target
        The level that the regions are read from, and the scale.
    tiles_per_region : float
        Average number of tiles that a region needs.
    count : int
        Number of regions in a batch.
    batch_bytes : int
        Bytes of pixels in a batch.
    """
    if device == "cpu" or not target.exact:
        return 1
    room = AHEAD_BYTES // (2 * max(1, batch_bytes))
    return max(1, min(int(TILES_PER_READ / max(1, tiles_per_region * count)), room))


def check_out(out: AnyArray, shape: tuple[int, ...], dtype: DType, *, on_host: bool) -> None:
    """Raise a `RegionError` unless the caller's array can receive the pixels.

    The native core writes to the array's address, where nothing else would stop it.
    """
    flags = getattr(out, "flags", None)
    usable = getattr(flags, "c_contiguous", False) and getattr(flags, "writeable", True)
    if on_host and not isinstance(out, np.ndarray):
        usable = False
    if not usable or tuple(out.shape) != shape or out.dtype != dtype:
        kind = "NumPy array" if on_host else "array"
        raise RegionError(
            f"out must be a writable C-contiguous {kind} of shape {shape} and type {dtype}."
        )


def listed(locations: Iterable[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """Return locations as a sequence.

    Raises
    ------
    RegionError
        If they can't be iterated.
    """
    if hasattr(locations, "__len__"):
        return cast("Sequence[tuple[int, int]]", locations)
    try:
        return list(locations)
    except TypeError:
        raise RegionError(
            f"{locations!r} is not a list of locations; pass pairs (x, y) of integers."
        ) from None


def _as_array(locations: Sequence[tuple[int, int]]) -> NDArray[np.float64]:
    """Return the (x, y) of all locations as an array of shape (locations, 2)."""
    try:
        pairs: Array = np.array(locations)
    except (TypeError, ValueError):  # the items differ in length
        pairs = np.zeros(0)
    if pairs.dtype.kind not in "iu" or pairs.shape != (len(locations), 2):
        # An item may be invalid, or of an integer type that NumPy stores as object.
        checked = [map(_clipped, _integers("location", location)) for location in locations]
        pairs = np.array([*map(tuple, checked)], object).reshape(-1, 2)
    return pairs.astype(np.float64)


def _integers(name: str, values: tuple[int, int]) -> tuple[int, int]:
    try:
        first, second = map(operator.index, values)
    except (TypeError, ValueError):
        pair = "(width, height)" if name == "size" else "(x, y), several in a list,"
        raise RegionError(
            f"The {name} {values!r} is not a pair of whole numbers; pass {pair} as integers."
        ) from None
    return first, second


def _clipped(position: int) -> int:
    """Clip a position that may have too many digits for a float; slides are smaller."""
    return max(-FARTHEST, min(position, FARTHEST))


def _nearest(position: float) -> int:
    """Round a position half up, clipped to fit in 64 bits."""
    return math.floor(max(-MAX_COORDINATE, min(position, MAX_COORDINATE)) + 0.5)
