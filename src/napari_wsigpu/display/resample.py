"""Draw pixels of one level at the resolution of another: fast and approximate, for displays."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from napari_wsigpu.model.arrays import Array, Indices

# Magnification from which blocks of one color are visible, so that smoothing is worth its cost.
COARSE = 4


class Axis(NamedTuple):
    """Mapping from pixels of a display to pixels of a source, along one axis.

    Attributes
    ----------
    start : float
        Position of the first display pixel, in pixels of the source.
    ratio : float
        Pixels of the source that a display pixel spans.
    """

    start: float
    ratio: float

    def under(self, count: int, length: int) -> Indices:
        """Return the source pixels under the centers of the first `count` display pixels."""
        centers = self.start + (np.arange(count) + 0.5) * self.ratio
        return np.asarray(np.clip(centers, 0, length - 1), np.intp)

    def range(self, count: int, length: int) -> tuple[float, float]:
        """Return the start and end of the first `count` display pixels, clipped to the source."""
        end = min(self.start + count * self.ratio, length)
        return max(0.0, min(self.start, end - self.ratio)), end


def shows_blocks(down: Axis, across: Axis, pixels: Array, step: int = COARSE) -> bool:
    """Return whether `draw` would show visible blocks that `draw_smoothly` can avoid."""
    return (
        max(down.ratio, across.ratio) < 1 / step
        and pixels.dtype == np.uint8
        and pixels.shape[2:] in ((), (3,), (4,))
    )


def draw(source: Array, rows: Indices, columns: Indices, out: Array) -> None:
    """Draw the nearest pixel of a source for each pixel of `out`.

    Parameters
    ----------
    source : ndarray, shape (height, width) or (height, width, channels)
        The source.
    rows, columns : ndarray of int
        Row and column of the source for each row and column of `out`; never decreasing.
    out : ndarray, shape (rows, columns) or (rows, columns, channels)
        Receives the drawing.
    """
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    repeats = np.diff(starts, append=len(rows))
    channels = math.prod(source.shape[2:])
    samples = (columns[:, None] * channels + np.arange(channels)).ravel()
    # NumPy gathers single samples several times as fast as pixels of three samples.
    lines = np.take(_lines(source, rows[starts]), samples, axis=1).reshape(-1, *out.shape[1:])
    for number in range(repeats.max(initial=0)):
        more = repeats > number
        out[starts[more] + number] = lines if more.all() else lines[more]


def _lines(source: Array, rows: Indices) -> Array:
    """Return rows of a source, with all samples of a row along one axis."""
    every = len(rows) > 0 and rows[-1] - rows[0] + 1 == len(rows)
    part = source[rows[0] : rows[-1] + 1] if every else source[rows]
    return part.reshape(len(part), -1)


def draw_smoothly(source: Array, down: Axis, across: Axis, out: Array, step: int = COARSE) -> None:
    """Enlarge a source with linear interpolation; see `shows_blocks`.

    Parameters
    ----------
    source : ndarray of uint8, shape (height, width) or (height, width, channels)
        The source.
    down, across : Axis
        Mapping from rows and columns of `out` to the source.
    out : ndarray of uint8
        Receives the drawing.
    step : int
        Side of the squares of equal pixels in `out`: larger ones are drawn faster.
    """
    height, width = out.shape[:2]
    smooth = _smoothed(source, down, across, height, width, step)
    if step == 1:
        out[...] = smooth
    else:
        draw(smooth, np.arange(height) // step, np.arange(width) // step, out)


def prepare() -> None:
    """Import Pillow before the first frame needs it: the import takes longer than drawing it."""
    import PIL.Image  # noqa: F401


def _smoothed(source: Array, down: Axis, across: Axis, height: int, width: int, step: int) -> Array:
    """Return a linearly interpolated picture with one pixel for each `step` display pixels."""
    from PIL import Image

    size = -(-height // step), -(-width // step)
    (top, bottom), (left, right) = (
        axis.range(step * count, length)
        for axis, count, length in zip((down, across), size, source.shape[:2], strict=True)
    )
    picture = Image.fromarray(np.ascontiguousarray(source))
    box = left, top, right, bottom
    return np.asarray(picture.resize(size[::-1], Image.Resampling.BILINEAR, box=box))
