"""Area average: how coarser pixels are computed from finer ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def area_average(pixels: NDArray[Any], factor_y: int, factor_x: int) -> NDArray[Any]:
    """Average blocks of pixels, integers rounded half up.

    Computed levels are defined by it. What JPEG and JPEG 2000 decoders return when they decode
    at less resolution is not the same, so it is not used in its place: a smaller inverse DCT or
    wavelet filter weighs neighbours outside of a block too, and each plane of a YCbCr image is
    scaled before it is converted to RGB.

    Parameters
    ----------
    pixels : ndarray or cupy.ndarray, shape (height, width, channels)
        The finer level's pixels.
    factor_y, factor_x : int
        Size of a block. Blocks at the lower and right edge average what there is.

    Returns
    -------
    ndarray or cupy.ndarray, shape (ceil(height / factor_y), ceil(width / factor_x), channels)
        Same type as `pixels`, and in the same memory.
    """
    height, width, channels = pixels.shape
    rows, columns = -(-height // factor_y), -(-width // factor_x)
    dtype = _sum_type(pixels.dtype, factor_y * factor_x)
    down = pixels[::factor_y].astype(dtype)
    for y in range(1, factor_y):
        part = pixels[y::factor_y]
        down[: len(part)] += part
    sums = np.empty_like(down, shape=(rows, columns, channels))
    # Of one channel, pixels lie at equal distances, so that NumPy adds a whole row at once.
    for channel in range(channels):
        sums[..., channel] = down[:, ::factor_x, channel]
        for x in range(1, factor_x):
            part = down[:, x::factor_x, channel]
            sums[:, : part.shape[1], channel] += part

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
    if dtype.itemsize <= 2 and count < 1 << 15:
        return np.dtype(np.int32)
    return np.dtype(np.int64)


def _divide(sums: NDArray[Any], count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    if dtype.kind == "f":
        return (sums / count).astype(dtype)
    # Half of an odd count is rounded down: a remainder of exactly one half can't occur there.
    means = sums + count // 2
    means //= count
    return means.astype(dtype)
