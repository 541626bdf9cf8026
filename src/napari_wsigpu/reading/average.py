"""Area average: how coarser pixels are computed from finer ones."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Less than this of a pixel is an error of arithmetic.
EDGE = 1e-6


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
    down = np.empty_like(pixels, dtype, shape=(rows, columns * factor_x, channels))
    down[:, :width] = pixels[::factor_y]
    down[:, width:] = 0
    for y in range(1, factor_y):
        part = pixels[y::factor_y]
        down[: len(part), :width] += part
    # Of each pixel and the next ones, though few of these sums are used: NumPy adds what lies in
    # one piece several times as fast as every other pixel.
    flat = down.reshape(rows, -1)
    length = flat.shape[1] - (factor_x - 1) * channels
    sums = flat[:, :length]
    for x in range(1, factor_x):
        sums = np.add(sums, flat[:, x * channels :][:, :length], out=sums if x > 1 else None)

    last_y, last_x = height - (rows - 1) * factor_y, width - (columns - 1) * factor_x
    below, beside = sums[-1:].copy(), sums[:, -channels:].copy()
    average = np.empty_like(pixels, shape=(rows, columns, channels))
    _spread(_divide(sums, factor_y * factor_x, pixels.dtype), factor_x, average)
    if last_y < factor_y:
        _spread(_divide(below, last_y * factor_x, pixels.dtype), factor_x, average[-1:])
    if last_x < factor_x:
        corner = _divide(beside[-1:].copy(), last_y * last_x, pixels.dtype)
        average[:, -1] = _divide(beside, factor_y * last_x, pixels.dtype)
        average[-1:, -1] = corner
    return average


def source_span(first: int, count: int, scale: float) -> tuple[int, int]:
    """Return the first of the source's pixels that lie under some of the result, and how many do.

    Parameters
    ----------
    first, count : int
        Number of the first of them along one axis, and how many they are.
    scale : float
        How many pixels of the source one spans.
    """
    begin = math.floor(first * scale + EDGE)
    return begin, math.ceil((first + count) * scale - EDGE) - begin


def resample_area(
    pixels: NDArray[Any],
    size: tuple[int, int],
    scale: tuple[float, float],
    first: tuple[int, int] = (0, 0),
    out: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """Average pictures to a smaller size, each pixel by the area that lies under it.

    A pixel of the result spans ``scale`` pixels of the source, the first one from its corner on. It
    is the mean of those, weighted by how much of each it covers, integers rounded half up: a box
    filter. Where it reaches beyond the source it is the mean of what there is.

    Parameters
    ----------
    pixels : ndarray, shape (pictures, height, width, channels)
        The finer pictures.
    size : tuple of (int, int)
        Height and width that are wanted.
    scale : tuple of (float, float)
        How many finer pixels one spans, down and across, at least 1 each.
    first : tuple of (int, int)
        Row and column of the first pixel that is wanted, where `pixels` are not the whole source
        but begin with what lies under that one; see `source_span`.
    out : ndarray, optional
        Where to put them.

    Returns
    -------
    ndarray, shape (pictures, *size, channels)
        `out`, or a new array; same type as `pixels`.
    """
    count, height, width, channels = pixels.shape
    average = np.empty((count, *size, channels), pixels.dtype) if out is None else out
    if scale in ((2.0, 2.0), (4.0, 4.0)) and (height, width) == tuple(
        int(length * step) for length, step in zip(size, scale, strict=True)
    ):
        _average_blocks(pixels, int(scale[0]), average)
        return average
    real = _real_type(pixels.dtype)
    down = _taps(first[0], size[0], height, scale[0], real)
    # Samples of a row lie in one piece, which NumPy takes faster than pixels; in memory that
    # every picture has in turn.
    across = [
        ((columns[:, None] * channels + np.arange(channels)).ravel(), weight.repeat(channels))
        for columns, weight in _taps(first[1], size[1], width, scale[1], real)
    ]
    sums = np.empty((size[0], width * channels), real)
    taken = np.empty(sums.shape, pixels.dtype)
    weighed = np.empty(sums.shape, real)
    mean, part = np.empty((2, size[0], size[1] * channels), real)
    for picture, target in zip(pixels, average, strict=True):
        samples = picture.reshape(height, -1)
        sums.fill(0)
        for rows, weight in down:
            np.take(samples, rows, axis=0, out=taken, mode="clip")
            sums += np.multiply(taken, weight[:, None], out=weighed)
        mean.fill(0)
        for columns, weight in across:
            np.take(sums, columns, axis=1, out=part, mode="clip")
            part *= weight
            mean += part
        target[...] = _rounded(mean, pixels.dtype).reshape(target.shape)
    return average


def _average_blocks(pixels: NDArray[Any], factor: int, averages: NDArray[Any]) -> None:
    """Average whole blocks of pictures one by one, as `area_average` does.

    Sums are put in memory that all pictures have in turn: what is fetched from the system for each
    takes longer than the sums.
    """
    _, rows, columns, channels = averages.shape
    dtype = _sum_type(pixels.dtype, factor * factor)
    sums = np.empty((rows, columns, factor * channels), dtype)
    means = np.empty((rows, columns, channels), dtype)
    for picture, average in zip(pixels, averages, strict=True):
        lines = picture.reshape(rows, factor, *sums.shape[1:])
        np.add(lines[:, 0], lines[:, 1], out=sums, dtype=dtype)
        for y in range(2, factor):
            sums += lines[:, y]
        for channel in range(channels):
            mean = means[..., channel]
            np.add(sums[..., channel], sums[..., channel + channels], out=mean)
            for x in range(2, factor):
                mean += sums[..., channel + x * channels]
        average[...] = _divide(means, factor * factor, pixels.dtype)


def _taps(
    first: int, count: int, length: int, scale: float, real: np.dtype[Any]
) -> list[tuple[NDArray[np.intp], NDArray[Any]]]:
    """Return the first, second, ... source pixel under each pixel along one axis, and its share."""
    origin = source_span(first, count, scale)[0]
    begin = np.arange(first, first + count) * scale
    end = np.minimum(begin + scale, origin + length)
    nearest = np.floor(begin + EDGE).astype(np.intp)
    found = []
    for number in range(math.ceil(scale) + 1):
        pixel = nearest + number
        weight = np.minimum(end, pixel + 1) - np.maximum(begin, pixel)
        weight[weight < EDGE] = 0
        if weight.any():
            found.append((np.minimum(pixel - origin, length - 1), weight))
    total = np.sum([weight for _, weight in found], axis=0)
    return [(pixel, (weight / total).astype(real)) for pixel, weight in found]


def _sum_type(dtype: np.dtype[Any], count: int) -> np.dtype[Any]:
    if dtype.kind == "f":
        return np.dtype(np.float64)
    if dtype == np.uint8 and count <= 256:
        return np.dtype(np.uint16)
    if dtype.itemsize <= 2 and count < 1 << 15:
        return np.dtype(np.int32)
    return np.dtype(np.int64 if dtype.itemsize <= 4 else np.float64)


def _real_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return a type of floats that holds means of a type exactly enough."""
    small = dtype.itemsize <= (4 if dtype.kind == "f" else 2)
    return np.dtype(np.float32 if small else np.float64)


def _rounded(means: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Round floats half up to what whole numbers of a type can be, in the same memory."""
    if dtype.kind == "f":
        return means
    limits = np.iinfo(dtype)
    most = means.dtype.type(limits.max)
    if int(most) > limits.max:
        most = np.nextafter(most, means.dtype.type(0))
    means += 0.5
    return np.clip(np.floor(means, out=means), limits.min, most, out=means)


def _divide(sums: NDArray[Any], count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the means, in the same memory: more of it would be fetched from the system each time.

    Integers are rounded half up.
    """
    if sums.dtype.kind == "f":
        sums /= count
        return _rounded(sums, dtype)
    # Half of an odd count is rounded down: a remainder of exactly one half can't occur there.
    sums += count // 2
    sums //= count
    return sums


def _spread(means: NDArray[Any], factor: int, average: NDArray[Any]) -> None:
    """Take the means of every so many pixels."""
    channels = average.shape[-1]
    for channel in range(channels):
        average[..., channel] = means[:, channel :: factor * channels]
