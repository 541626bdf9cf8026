"""Pixels of one level at the resolution of another, for displays: quick, not exact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

# From here on blocks of one colour would be seen; up to here smoothing costs more than it shows.
COARSE = 4
ROWS_AT_ONCE = 128


def positions(start: int, stop: int, ratio: float, length: int) -> NDArray[np.intp]:
    """Return the pixel of a level of `length` that lies under each pixel of another one.

    Parameters
    ----------
    start, stop : int
        The range of pixels of the other level.
    ratio : float
        How many pixels of the level one of the other spans.
    """
    centres = (np.arange(start, stop) + 0.5) * ratio
    return np.minimum(centres.astype(np.intp), length - 1)


def resample(
    source: NDArray[Any], rows: NDArray[np.intp], columns: NDArray[np.intp], out: NDArray[Any]
) -> None:
    """Draw a picture larger or smaller: nearest pixels, smoothed where these would be seen.

    Parameters
    ----------
    source : ndarray, shape (height, width) or (height, width, channels)
        The picture.
    rows, columns : ndarray of int
        The row and column of it that each one of `out` shows, ascending.
    out : ndarray
        Where to draw; its last axis is contiguous.
    """
    factor = min(len(rows) / source.shape[0], len(columns) / source.shape[1])
    if factor > COARSE and source.dtype == np.uint8 and source.shape[2:] in ((), (3,), (4,)):
        height, width = -(-len(rows) // COARSE), -(-len(columns) // COARSE)
        from PIL import Image

        picture = Image.fromarray(np.ascontiguousarray(source))
        source = np.asarray(picture.resize((width, height), Image.Resampling.BILINEAR))
        rows, columns = np.arange(len(rows)) // COARSE, np.arange(len(columns)) // COARSE
    wide = np.take(_whole_pixels(source), columns, axis=1)
    target = _whole_pixels(out)
    for first in range(0, len(rows), ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        target[part] = wide[rows[part]]


def _whole_pixels(pixels: NDArray[Any]) -> NDArray[Any]:
    """View all channels of a pixel as one value: NumPy copies these several times as fast."""
    if pixels.ndim == 2:
        return pixels
    if not pixels.flags.c_contiguous and pixels.strides[2] != pixels.itemsize:
        pixels = np.ascontiguousarray(pixels)
    return pixels.view(f"V{pixels.shape[2] * pixels.itemsize}")[..., 0]
