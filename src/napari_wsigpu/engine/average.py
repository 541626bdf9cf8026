"""Area average: how coarser pixels are computed from finer ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def area_average(pixels: NDArray[Any], factor_y: int, factor_x: int) -> NDArray[Any]:
    """Average blocks of pixels, integers rounded half up.

    Parameters
    ----------
    pixels : ndarray, shape (height, width, channels)
        The finer level's pixels.
    factor_y, factor_x : int
        Size of a block. Blocks at the lower and right edge average what there is.

    Returns
    -------
    ndarray, shape (ceil(height / factor_y), ceil(width / factor_x), channels)
        Same type as `pixels`.
    """
    height, width, channels = pixels.shape
    rows, columns = -(-height // factor_y), -(-width // factor_x)
    sums = np.zeros((rows, columns, channels), _sum_type(pixels.dtype, factor_y * factor_x))
    for y in range(factor_y):
        for x in range(factor_x):
            part = pixels[y::factor_y, x::factor_x]
            sums[: part.shape[0], : part.shape[1]] += part

    average = _divide(sums, factor_y * factor_x, pixels.dtype)
    last_y, last_x = height - (rows - 1) * factor_y, width - (columns - 1) * factor_x
    average[-1:] = _divide(sums[-1:], last_y * factor_x, pixels.dtype)
    average[:, -1:] = _divide(sums[:, -1:], factor_y * last_x, pixels.dtype)
    average[-1:, -1:] = _divide(sums[-1:, -1:], last_y * last_x, pixels.dtype)
    return average


def _sum_type(dtype: np.dtype[Any], count: int) -> np.dtype[Any]:
    if dtype.kind == "f":
        return np.dtype(np.float64)
    if dtype == np.uint8 and count <= 256:
        return np.dtype(np.uint16)
    return np.dtype(np.int64)


def _divide(sums: NDArray[Any], count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    if dtype.kind == "f":
        return np.asarray(sums / count, dtype)
    # Half of an odd count is rounded down: a remainder of exactly one half can't occur there.
    return np.asarray((sums + count // 2) // count, dtype)
