"""Area averages: compute coarser pixels from finer ones."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu import native

if TYPE_CHECKING:
    from napari_wsigpu.model.arrays import Array, DType, Indices

# In pixels; smaller overlaps are rounding errors.
EDGE = 1e-6
# Sample types that the core averages.
HALVED_TYPES = (np.uint8, np.uint16)


def area_average(pixels: Array, factor_y: int, factor_x: int) -> Array:
    """Average blocks of pixels, integers rounded half up.

    This function defines computed levels. The reduced resolutions of JPEG and JPEG 2000 decoders
    are no substitute: a smaller inverse DCT or a wavelet filter also weights pixels outside a
    block, and scales the planes of a YCbCr image before they are converted to RGB.

    Parameters
    ----------
    pixels : ndarray, shape (height, width, channels)
        Pixels of the finer level.
    factor_y, factor_x : int
        Size of a block in pixels. Blocks at the lower and right edges average the pixels that
        exist.

    Returns
    -------
    ndarray, shape (ceil(height / factor_y), ceil(width / factor_x), channels)
        The averages, of the same type as `pixels`.
    """
    height, width, channels = pixels.shape
    shape = -(-height // factor_y), -(-width // factor_x), channels
    average = np.empty(shape, pixels.dtype)
    rows, columns = height // factor_y, width // factor_x
    bottom, right = rows * factor_y, columns * factor_x
    if rows and columns:
        whole = pixels[:bottom, :right]
        _average_blocks(whole[None], (factor_y, factor_x), average[None, :rows, :columns])
    if bottom < height:
        average[rows:] = area_average(pixels[bottom:], height - bottom, factor_x)
    if right < width:
        average[:rows, columns:] = area_average(pixels[:bottom, right:], factor_y, width - right)
    return average


def can_halve(pixels: Array, shape: tuple[int, ...]) -> bool:
    """Return whether the core can average 2 x 2 pixels of pictures to results of this shape."""
    rows, columns, channels = shape
    contiguous = channels * pixels.itemsize, pixels.itemsize
    return (
        pixels.dtype in HALVED_TYPES
        and pixels.shape[-3:] == (2 * rows, 2 * columns, channels)
        and pixels.strides[-2:] == contiguous
    )


def source_span(first: int, count: int, scale: float) -> tuple[int, int]:
    """Return the first source pixel under a run of result pixels, and the count of source pixels.

    Parameters
    ----------
    first, count : int
        Index of the first result pixel along one axis, and the number of result pixels.
    scale : float
        Number of source pixels that a result pixel spans.
    """
    start = math.floor(first * scale + EDGE)
    return start, math.ceil((first + count) * scale - EDGE) - start


def resample_area(
    pixels: Array,
    size: tuple[int, int],
    scale: tuple[float, float],
    first: tuple[int, int] = (0, 0),
    out: Array | None = None,
) -> Array:
    """Reduce images to a smaller size with a box filter.

    Each result pixel is the mean of the ``scale`` source pixels that it spans, weighted by
    covered area; at the edges of the source, only existing pixels count. Integers are rounded half
    up.

    Parameters
    ----------
    pixels : ndarray, shape (pictures, height, width, channels)
        The finer pictures.
    size : tuple of (int, int)
        Height and width of the result.
    scale : tuple of (float, float)
        Number of source pixels that a result pixel spans, down and across; at least 1 each.
    first : tuple of (int, int)
        Row and column of the first result pixel; `pixels` start with the source pixels under it,
        as `source_span` returns them.
    out : ndarray, optional
        Receives the result.

    Returns
    -------
    ndarray, shape (pictures, *size, channels)
        `out`, or a new array; same type as `pixels`.
    """
    count, height, width, channels = pixels.shape
    average = np.empty((count, *size, channels), pixels.dtype) if out is None else out
    if 0 in size:
        return average
    # Whole blocks need no weights: integer sums are exact and faster.
    if scale in ((2.0, 2.0), (4.0, 4.0)) and (height, width) == tuple(
        int(length * step) for length, step in zip(size, scale, strict=True)
    ):
        _average_blocks(pixels, (int(scale[0]), int(scale[1])), average)
        return average
    real = _real_type(pixels.dtype)
    down = _taps(first[0], size[0], height, scale[0], real)
    # NumPy gathers single samples faster than pixels. All pictures reuse the buffers below.
    across = [
        ((columns[:, None] * channels + np.arange(channels)).ravel(), weight.repeat(channels))
        for columns, weight in _taps(first[1], size[1], width, scale[1], real)
    ]
    sums = np.empty((size[0], width * channels), real)
    gathered = np.empty(sums.shape, pixels.dtype)
    weighted = np.empty(sums.shape, real)
    mean, part = np.empty((2, size[0], size[1] * channels), real)
    for picture, target in zip(pixels, average, strict=True):
        samples = picture.reshape(height, -1)
        sums.fill(0)
        for rows, weight in down:
            np.take(samples, rows, axis=0, out=gathered, mode="clip")
            sums += np.multiply(gathered, weight[:, None], out=weighted)
        mean.fill(0)
        for columns, weight in across:
            np.take(sums, columns, axis=1, out=part, mode="clip")
            part *= weight
            mean += part
        target[...] = _rounded(mean, pixels.dtype).reshape(target.shape)
    return average


def _average_blocks(pixels: Array, factors: tuple[int, int], averages: Array) -> None:
    """Average whole blocks, picture by picture.

    All pictures share one buffer of sums: allocating one for each would take longer than summing.
    """
    (down, across), (_, rows, columns, channels) = factors, averages.shape
    halved = factors == (2, 2) and can_halve(pixels, averages.shape[1:])
    if native.core is not None and halved and averages.strides[2:] == pixels.strides[2:]:
        native.core.halve([*pixels], [*averages])
        return
    dtype = _sum_type(pixels.dtype, down * across)
    sums = np.empty((rows, columns, across * channels), dtype)
    means = np.empty((rows, columns, channels), dtype)
    for picture, average in zip(pixels, averages, strict=True):
        lines = picture.reshape(rows, down, *sums.shape[1:])
        np.add(lines[:, 0], lines[:, 1] if down > 1 else 0, out=sums, dtype=dtype)
        for y in range(2, down):
            sums += lines[:, y]
        for channel in range(channels):
            mean, parts = means[..., channel], sums[..., channel::channels]
            np.add(parts[..., 0], parts[..., 1] if across > 1 else 0, out=mean)
            for x in range(2, across):
                mean += parts[..., x]
        average[...] = _divide(means, down * across, pixels.dtype)


def _taps(
    first: int, count: int, length: int, scale: float, real: DType
) -> list[tuple[Indices, Array]]:
    """Return the first, second, ... source pixel under each result pixel along an axis.

    Each item is (indices, weights); the weights of a result pixel add up to 1.
    """
    origin = source_span(first, count, scale)[0]
    start = np.arange(first, first + count) * scale
    end = np.minimum(start + scale, origin + length)
    nearest = np.floor(start + EDGE).astype(np.intp)
    found = []
    for number in range(math.ceil(scale) + 1):
        pixel = nearest + number
        weight = np.minimum(end, pixel + 1) - np.maximum(start, pixel)
        weight[weight < EDGE] = 0
        if weight.any():
            found.append((np.minimum(pixel - origin, length - 1), weight))
    total = np.sum([weight for _, weight in found], axis=0)
    return [(pixel, (weight / total).astype(real)) for pixel, weight in found]


def _sum_type(dtype: DType, count: int) -> DType:
    """Return a type that holds the sum of `count` samples, plus `count // 2` for rounding."""
    if dtype.kind == "f":
        return np.dtype(np.float64)
    if dtype == np.uint8 and count <= 256:
        return np.dtype(np.uint16)
    if dtype.itemsize <= 2 and count < 1 << 15:
        return np.dtype(np.int32)
    return np.dtype(np.int64 if dtype.itemsize <= 4 else np.float64)


def _real_type(dtype: DType) -> DType:
    """Return the float type in which to compute means of samples of a type."""
    small = dtype.itemsize <= (4 if dtype.kind == "f" else 2)
    return np.dtype(np.float32 if small else np.float64)


def _rounded(means: Array, dtype: DType) -> Array:
    """Round floats half up, in place, and clip them to the range of an integer type."""
    if dtype.kind == "f":
        return means
    limits = np.iinfo(dtype)
    # A float may not represent the largest integer; if so, use the next smaller float.
    most = means.dtype.type(limits.max)
    if int(most) > limits.max:
        most = np.nextafter(most, means.dtype.type(0))
    means += 0.5
    return np.clip(np.floor(means, out=means), limits.min, most, out=means)


def _divide(sums: Array, count: int, dtype: DType) -> Array:
    """Divide sums in place, which saves an allocation; integers are rounded half up."""
    if sums.dtype.kind == "f":
        sums /= count
        return _rounded(sums, dtype)
    # This also rounds correctly for odd counts: a remainder is never exactly half an odd count.
    sums += count // 2
    sums //= count
    return sums
