"""Combine channels into one RGB image."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu import native
from napari_wsigpu.codecs.cpu import default_threads
from napari_wsigpu.native.tables import PLANE, SHADES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.model.arrays import Array, DType
    from napari_wsigpu.model.composite import ChannelStyle, Composite

    ColorsOfValues = tuple[NDArray[np.float32], int]

# Samples of any other type are first scaled to 16 bits, so that the window fills the full range.
TABLED = np.dtype(np.uint8), np.dtype(np.uint16)
FULL = 65_535
MOST = {1: 255, 2: FULL}  # largest value by the size of a sample in bytes
# Maximum number of cached color tables; each takes up to 1 MiB.
MOST_TABLES = 128
# Pixels below which one thread is faster than several.
SMALL_PIXELS = 1 << 15


def compose(
    channels: Sequence[Array],
    composite: Composite,
    shape: tuple[int, ...],
    sums: NDArray[np.float32] | None = None,
    before: Composite | None = None,
) -> NDArray[np.uint8]:
    """Return the RGB image of the visible channels.

    Colors are added in linear light: each channel's color is converted from sRGB (IEC 61966-2-1),
    and the sum back to sRGB.

    A change of few channels takes less time if the sums of the pixels are kept: only the old colors
    of these channels are subtracted, and their new ones added.

    Parameters
    ----------
    channels : sequence of ndarray, shape (height, width)
        The pixels of the visible channels, in order.
    composite : Composite
        How to show them; all visible channels have a window.
    shape : tuple of int
        (height, width), for a composite without visible channels.
    sums : ndarray of float32, shape (height, width, 4), optional
        Receives the sums of the colors; C-contiguous.
    before : Composite, optional
        The composite whose sums `sums` holds, of the same pixels.

    Returns
    -------
    ndarray of uint8, shape (height, width, 3)
    """
    steps = [(*each, 1) for each in zip(channels, _styles(composite), strict=True)]
    changes = None if before is None else _changes(channels, composite, before)
    if changes is not None and len(changes) < len(steps):
        steps = changes
    elif sums is not None:
        sums.fill(0)
    kept, records = [], []  # the records hold bare addresses
    for pixels, style, sign in steps:
        pixels, (table, low) = _tabled(pixels, style, sign)
        kept.append((pixels, table))
        place, colors = (pixels.ctypes.data, *pixels.strides), table.ctypes.data
        records.append((*place, colors, low, len(table) - 1, pixels.itemsize, 0))
    planes = np.array(records, PLANE)
    picture = np.empty((*shape, 3), np.uint8)
    shades = shades_of(inverted=composite.inverted)
    if native.core is not None:
        threads = 1 if math.prod(shape) < SMALL_PIXELS else default_threads()
        native.core.compose(planes, shades, picture, threads, sums)
        return picture
    sums = np.zeros((*shape, 4), np.float32) if sums is None else sums
    for (pixels, table), plane in zip(kept, planes, strict=True):
        entries = pixels.astype(np.int32) - plane["low"]
        sums += table[np.clip(entries, 0, plane["last"], out=entries)]
    shown = sums[..., :3].clip(0, 1)
    return shades[(shown * SHADES + 0.5).astype(np.int32)]


def _styles(composite: Composite) -> list[ChannelStyle]:
    """Return the styles of the visible channels."""
    return [composite.channels[index] for index in composite.visible]


def _changes(
    channels: Sequence[Array], composite: Composite, before: Composite
) -> list[tuple[Array, ChannelStyle, int]] | None:
    """Return what to subtract from the sums of a composite and what to add, with its sign.

    None if a channel was hidden, whose pixels are not among those of the visible `channels`.
    """
    if not {*before.visible} <= {*composite.visible}:
        return None
    pairs = zip(channels, composite.visible, strict=True)
    changed = [
        (pixels, before.channels[index], composite.channels[index])
        for pixels, index in pairs
        if before.channels[index] != composite.channels[index]
    ]
    minus = [(pixels, old, -1) for pixels, old, _ in changed if old.visible]
    return minus + [(pixels, new, 1) for pixels, _, new in changed]


def _tabled(pixels: Array, style: ChannelStyle, sign: int) -> tuple[Array, ColorsOfValues]:
    """Return 1- or 2-byte samples, and their color table."""
    if not has_table(pixels.dtype):
        assert style.window is not None
        # Before rounding, because a gamma below 1 magnifies the steps of dark values.
        bright = _bright(pixels.astype(np.float64), *style.window, style.gamma)
        pixels = (bright * FULL).round().astype(np.uint16)
        style = replace(style, window=(0, FULL), gamma=1.0)
    return pixels, colors_of(style, pixels.itemsize, sign)


def has_table(dtype: DType) -> bool:
    """Return whether samples of a type are looked up without being scaled first."""
    return dtype in TABLED and dtype.isnative


def colors_of(style: ChannelStyle, sample_bytes: int, sign: int = 1) -> ColorsOfValues:
    """Return the color of each value of a channel, and the value of the first entry.

    Returns
    -------
    ndarray of float32, shape (values, 4)
        Red, green, blue and 0 in linear light; negative if `sign` is. Values beyond the table have
        the colors of its ends.
    int
        Value of the first entry.
    """
    assert style.window is not None
    return _table(*style.window, style.gamma, style.color, MOST[sample_bytes], sign)


@lru_cache(maxsize=MOST_TABLES)
def _table(
    low: float, high: float, gamma: float, color: str, most: int, sign: int
) -> ColorsOfValues:
    """Return what `colors_of` does; `most` is the largest value."""
    # If the limits are equal, the values below them need an entry too.
    first = min(max(math.floor(low) - (high <= low), 0), most)
    last = max(first, min(math.ceil(high), most))
    values = np.arange(first, last + 1, dtype=np.float64)
    bright = _bright(values, low, high, gamma)
    table = np.zeros((len(values), 4), np.float32)
    parts = np.frombuffer(bytes.fromhex(color[1:]), np.uint8)
    # Powers take long, and the parts of most colors are equal or 0.
    for part in {*parts.tolist()} - {0}:
        table[:, np.flatnonzero(parts == part)] = sign * to_linear(bright * part / 255)[:, None]
    return table, first


def _bright(
    values: NDArray[np.float64], low: float, high: float, gamma: float
) -> NDArray[np.float64]:
    """Return how bright values are, from 0 up to `low` to 1 from `high` on; NaN is black."""
    low, high = float(low), float(high)
    if math.isinf(high - low):
        values, low, high = values / 2, low / 2, high / 2
    if high <= low:
        within = np.where(values >= high, 1.0, 0.0)
    else:
        with np.errstate(over="ignore"):
            within = ((values - low) / (high - low)).clip(0, 1)
    return np.nan_to_num(within if gamma == 1 else within**gamma, nan=0.0)


@lru_cache(maxsize=2)
def shades_of(*, inverted: bool) -> NDArray[np.uint8]:
    """Return the sRGB sample of each of SHADES + 1 sums from 0 to 1."""
    found = np.round(255 * from_linear(np.linspace(0, 1, SHADES + 1))).astype(np.uint8)
    return 255 - found if inverted else found


def to_linear(encoded: NDArray[np.float64]) -> NDArray[np.float64]:
    """Convert sRGB samples from 0 to 1 to linear light."""
    return np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)


def from_linear(linear: NDArray[np.float64]) -> NDArray[np.float64]:
    """Convert linear light from 0 to 1 to sRGB samples."""
    return np.where(linear <= 0.0031308, linear * 12.92, 1.055 * linear ** (1 / 2.4) - 0.055)
