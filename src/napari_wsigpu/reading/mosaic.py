"""Levels that are canvases: pictures laid on the background, whole or in pieces."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from napari_wsigpu.reading.span import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.layout import LevelLayout, Part, Pieces

    Read = Callable[[LevelLayout, Span, Span], NDArray[Any]]

MOST_PIXELS = 1 << 24


class NamedPart(NamedTuple):
    """A picture that lies on a canvas, and its name for messages."""

    name: str
    image: LevelLayout


class Touched(NamedTuple):
    """The positions of a span at which a picture lies, and its own positions there."""

    target: slice
    sources: NDArray[np.int64]


def parts_of(pyramid: Sequence[LevelLayout]) -> Mapping[int, NamedPart]:
    """Return the pictures that lie on canvases by numbers that no level has."""
    found: list[NamedPart] = []
    for index, level in enumerate(pyramid):
        if level.parts:
            images = level.stored
            several = len(images) > 1
            for count, image in enumerate(images):
                name = f"level {index}, part {count}" if several else f"level {index}"
                found.append(NamedPart(name, image))
    return dict(enumerate(found, len(pyramid)))


def touches(canvas: LevelLayout, rows: Span, columns: Span) -> bool:
    """Whether any picture lies in a region of a canvas."""
    return any(True for _ in _touched(canvas, rows, columns))


def compose(
    canvas: LevelLayout,
    rows: Span,
    columns: Span,
    channel: int | None,
    background: Any,
    read: Read,
) -> NDArray[Any]:
    """Put a region of a canvas together.

    Parameters
    ----------
    canvas : LevelLayout
        A level with parts.
    rows, columns : Span
        Positions within its extent.
    channel : int, optional
        The one channel that `read` returns.
    background : int, float or ndarray, shape (channels,)
        Value of pixels where nothing lies.
    read : callable
        Reads (rows, columns) of a picture.

    Returns
    -------
    ndarray, shape (rows, columns, channels), or (rows, columns) for one channel
    """
    samples = () if channel is not None else (canvas.channels,)
    pixels = np.full((rows.length, columns.length, *samples), background, canvas.dtype)
    for part, down, across in _touched(canvas, rows, columns):
        target = pixels[down.target, across.target]
        _paste(target, part.image, down.sources, across.sources, read)
    return pixels


def _touched(
    canvas: LevelLayout, rows: Span, columns: Span
) -> Iterator[tuple[Part, Touched, Touched]]:
    for part in reversed(canvas.parts):
        down, across = _places(part.rows, rows), _places(part.columns, columns)
        if down.sources.size and across.sources.size:
            yield part, down, across


def _places(pieces: Pieces, span: Span) -> Touched:
    start, step, length = span
    first = max(0, -(-(pieces.start - start) // step))
    last = min(length, -(-(pieces.end - start) // step))
    positions = start + step * np.arange(first, last, dtype=np.int64)
    piece = np.searchsorted(pieces.starts, positions, side="right") - 1
    sources = pieces.sources[piece] + positions - pieces.starts[piece]
    return Touched(slice(first, max(first, last)), sources)


def _paste(
    target: NDArray[Any],
    image: LevelLayout,
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
    read: Read,
) -> None:
    """Read the least region that covers the wanted positions, and keep these."""
    down, across = _covering(rows), _covering(columns)
    spare = not (_is_all(rows, down) and _is_all(columns, across))
    if spare and down.length * across.length > MOST_PIXELS and max(target.shape[:2]) > 1:
        if len(rows) > 1:
            half = len(rows) // 2
            _paste(target[:half], image, rows[:half], columns, read)
            _paste(target[half:], image, rows[half:], columns, read)
        else:
            half = len(columns) // 2
            _paste(target[:, :half], image, rows, columns[:half], read)
            _paste(target[:, half:], image, rows, columns[half:], read)
        return
    pixels = read(image, down, across)
    if not _is_all(rows, down):
        pixels = pixels[(rows - down.start) // down.step]
    index = (columns - across.start) // across.step
    ends = np.flatnonzero(np.diff(index) != 1) + 1
    # A slice a run is many times as fast as an index for each column.
    for first, last in pairwise((0, *ends.tolist(), len(index))):
        start = index[first]
        target[:, first:last] = pixels[:, start : start + last - first]


def _covering(positions: NDArray[np.int64]) -> Span:
    first, last = int(positions.min()), int(positions.max())
    step = int(np.gcd.reduce(np.diff(positions))) or 1
    return Span(first, step, (last - first) // step + 1)


def _is_all(positions: NDArray[np.int64], span: Span) -> bool:
    start, step, length = span
    return np.array_equal(positions, np.arange(start, start + step * length, step))
