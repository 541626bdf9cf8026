"""Pixels of one level at the resolution of another, for displays: quick, not exact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

# From here on blocks of one colour would be seen; up to here smoothing costs more than it shows.
COARSE = 4
ROWS_AT_ONCE = 32


class Axis(NamedTuple):
    """How pixels of a display lie over those of a picture, along one axis.

    Attributes
    ----------
    start : float
        Where the first one begins, in pixels of the picture.
    ratio : float
        How many pixels of the picture one spans.
    """

    start: float
    ratio: float

    def under(self, count: int, length: int) -> NDArray[np.intp]:
        """Return the pixels of a picture of `length` under the centres of the first `count`."""
        centres = self.start + (np.arange(count) + 0.5) * self.ratio
        return np.asarray(np.clip(centres, 0, length - 1), np.intp)

    def range(self, count: int, length: int) -> tuple[float, float]:
        """Return begin and end of the first `count`, within a picture of `length`."""
        end = min(self.start + count * self.ratio, length)
        return max(0.0, min(self.start, end - self.ratio)), end


def resample(source: NDArray[Any], down: Axis, across: Axis, out: NDArray[Any]) -> None:
    """Draw a picture larger or smaller: nearest pixels, smoothed where these would be seen.

    Parameters
    ----------
    source : ndarray, shape (height, width) or (height, width, channels)
        The picture.
    down, across : Axis
        How the pixels of `out` lie over it.
    out : ndarray
        Where to draw; its last axis is contiguous.
    """
    height, width = out.shape[:2]
    if (
        max(down.ratio, across.ratio) < 1 / COARSE
        and source.dtype == np.uint8
        and source.shape[2:] in ((), (3,), (4,))
    ):
        source = _smoothed(source, down, across, height, width)
        down = across = Axis(0, 1 / COARSE)
    rows, columns = down.under(height, source.shape[0]), across.under(width, source.shape[1])
    pixels, target = _whole_pixels(source), _whole_pixels(out)
    for first in range(0, height, ROWS_AT_ONCE):  # few enough to stay in the processor's cache
        part = rows[first : first + ROWS_AT_ONCE]
        wide = np.take(pixels[part[0] : part[-1] + 1], columns, axis=1)
        target[first : first + ROWS_AT_ONCE] = wide[part - part[0]]


def _smoothed(
    source: NDArray[Any], down: Axis, across: Axis, height: int, width: int
) -> NDArray[Any]:
    """Return a picture, interpolated linearly, of a quarter of the size that is wanted."""
    from PIL import Image

    quarter = -(-height // COARSE), -(-width // COARSE)
    (top, bottom), (left, right) = (
        axis.range(COARSE * count, length)
        for axis, count, length in zip((down, across), quarter, source.shape[:2], strict=True)
    )
    picture = Image.fromarray(np.ascontiguousarray(source))
    box = left, top, right, bottom
    return np.asarray(picture.resize(quarter[::-1], Image.Resampling.BILINEAR, box=box))


def _whole_pixels(pixels: NDArray[Any]) -> NDArray[Any]:
    """View all channels of a pixel as one value: NumPy copies these several times as fast."""
    if pixels.ndim == 2:
        return pixels
    if not pixels.flags.c_contiguous and pixels.strides[2] != pixels.itemsize:
        pixels = np.ascontiguousarray(pixels)
    return pixels.view(f"V{pixels.shape[2] * pixels.itemsize}")[..., 0]
