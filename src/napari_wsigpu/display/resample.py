"""Pixels of one level at the resolution of another, for displays: quick, not exact."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

# From here on blocks of one colour would be seen; up to here smoothing costs more than it shows.
COARSE = 4


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


def shows_blocks(down: Axis, across: Axis, pixels: NDArray[Any], step: int = COARSE) -> bool:
    """Whether nearest pixels would be seen as blocks, and `draw_smoothly` can do better."""
    return (
        max(down.ratio, across.ratio) < 1 / step
        and pixels.dtype == np.uint8
        and pixels.shape[2:] in ((), (3,), (4,))
    )


def draw(
    source: NDArray[Any], rows: NDArray[np.intp], columns: NDArray[np.intp], out: NDArray[Any]
) -> None:
    """Draw one pixel of a picture for each of `out`.

    Parameters
    ----------
    source : ndarray, shape (height, width) or (height, width, channels)
        The picture.
    rows, columns : ndarray of int
        Which of its pixels; they never decrease.
    out : ndarray, shape (rows, columns) or (rows, columns, channels)
        Where to draw.
    """
    begins = np.flatnonzero(np.diff(rows, prepend=-1))
    repeats = np.diff(begins, append=len(rows))
    channels = math.prod(source.shape[2:])
    samples = (columns[:, None] * channels + np.arange(channels)).ravel()
    # NumPy takes single samples several times as fast as pixels of three of them.
    lines = np.take(_lines(source, rows[begins]), samples, axis=1).reshape(-1, *out.shape[1:])
    for number in range(repeats.max(initial=0)):
        more = repeats > number
        out[begins[more] + number] = lines if more.all() else lines[more]


def _lines(source: NDArray[Any], rows: NDArray[np.intp]) -> NDArray[Any]:
    """Return rows of a picture, all samples of each in one axis."""
    every = len(rows) > 0 and rows[-1] - rows[0] + 1 == len(rows)
    part = source[rows[0] : rows[-1] + 1] if every else source[rows]
    return part.reshape(len(part), -1)


def draw_smoothly(
    source: NDArray[Any], down: Axis, across: Axis, out: NDArray[Any], step: int = COARSE
) -> None:
    """Draw a picture larger, interpolated linearly; see `shows_blocks`.

    Parameters
    ----------
    source : ndarray of uint8, shape (height, width) or (height, width, channels)
        The picture.
    down, across : Axis
        How the pixels of `out` lie over it.
    out : ndarray of uint8
        Where to draw.
    step : int
        How many pixels of `out`, down and across, become the same: the more, the quicker.
    """
    height, width = out.shape[:2]
    smooth = _smoothed(source, down, across, height, width, step)
    if step == 1:
        out[...] = smooth
    else:
        draw(smooth, np.arange(height) // step, np.arange(width) // step, out)


def prepare() -> None:
    """Load what `draw_smoothly` needs: that takes longer than to draw."""
    import PIL.Image  # noqa: F401


def _smoothed(
    source: NDArray[Any], down: Axis, across: Axis, height: int, width: int, step: int
) -> NDArray[Any]:
    """Return a picture, interpolated linearly, a pixel for each `step` that are wanted."""
    from PIL import Image

    size = -(-height // step), -(-width // step)
    (top, bottom), (left, right) = (
        axis.range(step * count, length)
        for axis, count, length in zip((down, across), size, source.shape[:2], strict=True)
    )
    picture = Image.fromarray(np.ascontiguousarray(source))
    box = left, top, right, bottom
    return np.asarray(picture.resize(size[::-1], Image.Resampling.BILINEAR, box=box))
