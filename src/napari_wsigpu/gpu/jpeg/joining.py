"""Code streams of stacked JPEG tiles, put together in memory of their own or where tiles lie."""

from __future__ import annotations

from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.codecs.jpeg import END_OF_IMAGE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    # Where a code stream begins and ends.
    Span = tuple[int, int]

FIRST_RESTART, RESTARTS = 0xD0, 8
MOST_FILL = 4096


class Stack(NamedTuple):
    """Tiles that share a header, with what comes before and after them.

    Attributes
    ----------
    header : bytes
        Of the stack.
    size : int
        How many tiles it has.
    end : bytes
        What follows the last tile's marker.
    marks : tuple of int
        See `Stacking`.
    """

    header: bytes
    size: int
    end: bytes
    marks: tuple[int, ...]


class Scans(NamedTuple):
    """The scans of a batch's tiles in a buffer, those of one stack after those of the other.

    Attributes
    ----------
    indices : ndarray of int64, shape (scans,)
        Index of each tile in its batch.
    starts, ends : ndarray of int64, shape (scans,)
        Where each scan starts, and where the marker behind it ends.
    """

    indices: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


def cut(count: int, most: int) -> list[int]:
    """Return where so many tiles are cut into stacks of at most so many, and their end."""
    stacks = -(-count // most)
    return [number * count // stacks for number in range(stacks + 1)]


def all_have(view: memoryview, wanted: bytes, places: NDArray[np.int64]) -> bool:
    """Whether these bytes are in all places of a buffer."""
    return _anywhere(view, len(wanted))[places].tobytes() == wanted * len(places)


def copy_stacks(
    stacks: list[Stack], scans: Scans, source: memoryview, target: memoryview
) -> tuple[list[Span], NDArray[np.int64]]:
    """Put stacks together in memory of their own.

    Returns
    -------
    list of (int, int)
        Where each stack begins and ends.
    ndarray of int64, shape (scans,)
        Where each scan begins.
    """
    place = 0
    spans: list[Span] = []
    begins: list[int] = []
    rest = zip(scans.starts.tolist(), scans.ends.tolist(), strict=True)
    for header, count, after, _ in stacks:
        first = place
        target[place : place + len(header)] = header
        place += len(header)
        for number, (start, end) in enumerate(islice(rest, count)):
            begins.append(place)
            place += end - start
            target[begins[-1] : place] = source[start:end]
            if after:  # else the tile's own marker ends the image
                target[place - 1] = FIRST_RESTART + number % RESTARTS
        target[place : place + len(after)] = after
        place += len(after)
        spans.append((first, place))
    return spans, np.array(begins, np.int64)


def leave_room(stacks: list[Stack], scans: Scans, size: int) -> bool:
    """Whether stacks can be put together where tiles lie, in a buffer of this size."""
    starts, ends = scans.starts, scans.ends
    room, needed = starts.copy(), np.zeros_like(starts)
    room[1:] -= ends[:-1]
    place, behind = 0, 0
    for header, count, after, _ in stacks:
        needed[place] = behind + len(header)
        place, behind = place + count, len(after)
    fits = (room >= needed) & (room <= MOST_FILL)
    return bool(fits.all()) and int(ends[-1]) + behind <= size


def stack_in_place(stacks: list[Stack], scans: Scans, view: memoryview) -> list[Span]:
    """Put stacks together where tiles lie; return where each begins and ends.

    A restart marker may have any number of 0xFF before it, so that it takes the place of all that
    lies between two scans.
    """
    _write_restarts([stack.size for stack in stacks], scans, view)
    starts, ends = scans.starts.tolist(), scans.ends.tolist()
    spans: list[Span] = []
    place = 0
    for header, count, after, _ in stacks:
        begin, end = starts[place] - len(header), ends[place + count - 1]
        view[begin : begin + len(header)] = header
        if after:
            view[end - 1] = FIRST_RESTART + (count - 1) % RESTARTS
            view[end : end + len(after)] = after
        spans.append((begin, end + len(after)))
        place += count
    return spans


def _write_restarts(counts: list[int], scans: Scans, view: memoryview) -> None:
    """Write a restart marker between any two scans of a stack."""
    numbers = _numbers(tuple(counts))
    places, behind = scans.ends[:-1] - len(END_OF_IMAGE), scans.starts[1:]
    lengths = np.where(numbers[1:] > 0, behind - places, 0)
    for length in {*lengths.tolist()} - {0}:
        these = (lengths == length).nonzero()[0]
        _anywhere(view, length)[places[these]] = _restarts(length)[numbers[these] % RESTARTS]


def _anywhere(view: memoryview, size: int) -> NDArray[np.void]:
    """Return a buffer as an array of so many bytes each, one from every place on."""
    return np.ndarray((len(view) - size + 1,), f"V{size}", view, strides=(1,))


@lru_cache(maxsize=256)
def _numbers(counts: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the number of each tile in its stack."""
    return np.concatenate([np.arange(count) for count in counts])


@lru_cache(maxsize=256)
def _restarts(length: int) -> NDArray[np.void]:
    """Return restart markers with as many 0xFF before them as make them so long."""
    markers = np.full((RESTARTS, length), 0xFF, np.uint8)
    markers[:, -1] = FIRST_RESTART + np.arange(RESTARTS)
    return markers.view(f"V{length}")[:, 0]
