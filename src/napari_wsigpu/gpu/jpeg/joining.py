"""JPEG tiles joined to tall images, so that a few code streams keep all engines of a GPU busy.

Restart markers between the tiles' scans (ITU-T T.81, E.1.4) reset the decoder's predictions, so
that each tile decodes as it does alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from napari_wsigpu import native
from napari_wsigpu.codecs.decoder import EncodedBatch
from napari_wsigpu.codecs.jpeg import END_OF_IMAGE
from napari_wsigpu.native.tables import SCAN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.model.layout import LevelLayout

    Integers = NDArray[np.int64]

FIRST_RESTART, RESTARTS = 0xD0, 8
COPYING_THREADS = 4


class Stack(NamedTuple):
    """Tiles that share a header, with what comes before and after their scans.

    Attributes
    ----------
    header : bytes
        Header of the stack.
    size : int
        How many tiles it has.
    end : bytes
        What follows the last tile's marker; empty for a tile alone, which keeps its own marker.
    marks : tuple of int
        See `Stacking`.
    """

    header: bytes
    size: int
    end: bytes
    marks: tuple[int, ...]


class Joined(NamedTuple):
    """Where stacks, and the scans of their tiles, lie in a buffer.

    Attributes
    ----------
    stacks : tuple of Stack
        The stacks.
    header : bytes
        What each tile begins with, where it was read from.
    scans : ndarray of `native.tables.SCAN`, shape (tiles,)
        Where each tile is read from, and where its scan goes.
    spans : list of (int, int)
        Where each stack begins and ends.
    """

    stacks: tuple[Stack, ...]
    header: bytes
    scans: NDArray[Any]
    spans: list[tuple[int, int]]

    @property
    def end(self) -> int:
        """Where the last stack ends."""
        return self.spans[-1][1]

    def write_ends(self, buffer: memoryview) -> None:
        """Write what is around the scans: the header and the end of each stack."""
        for stack, (begin, end) in zip(self.stacks, self.spans, strict=True):
            buffer[begin : begin + len(stack.header)] = stack.header
            buffer[end - len(stack.end) : end] = stack.end

    def copy(self, source: EncodedBatch, buffer: NDArray[np.uint8]) -> bool:
        """Put stacks together of tiles in memory.

        Returns
        -------
        bool
            False if a tile does not begin with the header, or end with EOI.
        """
        # The core also refuses headers that are longer than it has room for.
        copied = native.core is not None and native.core.read_scans(
            self.scans,
            self.header,
            buffer.ctypes.data,
            memory=source.address,
            threads=COPYING_THREADS,
        )
        copied = copied or self._copy_in_python(source.view, buffer.data)
        self.write_ends(buffer.data)
        return copied

    def _copy_in_python(self, source: memoryview, buffer: memoryview) -> bool:
        skipped = len(self.header)
        for offset, length, place, marker, _ in self.scans.tolist():
            begin, end, past = offset + skipped, offset + length, place + length - skipped
            if source[offset:begin] != self.header or source[end - 2 : end] != END_OF_IMAGE:
                return False
            buffer[place:past] = source[begin:end]
            buffer[past - 1] = marker
        return True


class StackedBatch(EncodedBatch):
    """Tiles that were joined to stacks as they were read; each is put together again for a CPU.

    Parameters
    ----------
    level : LevelLayout
        The level.
    tiles : ndarray of int64, shape (tiles, 2)
        Row and column of each.
    buffer : memoryview
        The stacks, in page-locked memory.
    joined : Joined
        Where they lie in it; kept as `stacked`.
    background : float
        Value of pixels that the file does not hold.
    """

    def __init__(
        self,
        level: LevelLayout,
        tiles: Integers,
        buffer: memoryview,
        joined: Joined,
        background: float,
    ) -> None:
        self.stacked = joined
        starts = joined.scans["place"][None]
        lengths = joined.scans["length"][None] - len(joined.header)
        super().__init__(level, tiles, buffer, starts, lengths, lengths > 0, background)

    def part(self, indices: Sequence[int]) -> EncodedBatch:
        """Return some of the tiles as they were stored, in a buffer of their own."""
        segments = [self[index].segments[0] for index in indices]
        lengths = np.array([[len(segment) for segment in segments]], np.int64)
        starts = np.cumsum(lengths, axis=1) - lengths
        chosen, buffer = self.tiles[np.array(indices, np.int64)], b"".join(segments)
        return EncodedBatch(
            self.level, chosen, buffer, starts, lengths, lengths > 0, self._background
        )

    def _segment(self, start: int, end: int, present: bool) -> memoryview | None:
        scan = self.view[start : end - len(END_OF_IMAGE)]
        return memoryview(b"".join((self.stacked.header, scan, END_OF_IMAGE)))


def cut(count: int, most: int) -> list[int]:
    """Return where so many tiles are cut into stacks of at most so many, and their end."""
    stacks = -(-count // most)
    return [number * count // stacks for number in range(stacks + 1)]


def join(
    stacks: tuple[Stack, ...], header: bytes, offsets: Integers, lengths: Integers, begin: int = 0
) -> Joined:
    """Plan where stacks go in a buffer, one after another.

    Parameters
    ----------
    stacks : tuple of Stack
        The stacks.
    header : bytes
        What each tile begins with.
    offsets, lengths : ndarray of int64, shape (tiles,)
        Where each tile is read from.
    begin : int
        Where the first stack goes.
    """
    frame = _frame(stacks)
    scans = np.empty(len(offsets), SCAN)
    scans["offset"], scans["length"], scans["marker"] = offsets, lengths, frame.markers
    sizes = lengths - len(header)
    ends = begin + frame.gaps + np.cumsum(sizes)
    scans["place"] = ends - sizes
    firsts = scans["place"][frame.firsts] - frame.before
    past = ends[frame.lasts] + frame.behind
    return Joined(stacks, header, scans, list(zip(firsts.tolist(), past.tolist(), strict=True)))


class _Frame(NamedTuple):
    """What surrounds the scans of stacks.

    Attributes
    ----------
    firsts, lasts, before, behind : ndarray of int64, shape (stacks,)
        First and last scan of each stack, and the bytes before and behind these.
    gaps : ndarray of int64, shape (scans,)
        Bytes before each scan that belong to no scan.
    markers : ndarray of int32, shape (scans,)
        Codes of the markers that end the scans.
    """

    firsts: Integers
    lasts: Integers
    before: Integers
    behind: Integers
    gaps: Integers
    markers: NDArray[np.int32]


@lru_cache(maxsize=256)
def _frame(stacks: tuple[Stack, ...]) -> _Frame:
    counts = np.array([stack.size for stack in stacks], np.int64)
    before = np.array([len(stack.header) for stack in stacks], np.int64)
    behind = np.array([len(stack.end) for stack in stacks], np.int64)
    past = np.cumsum(counts)
    firsts = past - counts
    gaps = np.zeros(int(counts.sum()), np.int64)
    gaps[firsts] = before
    gaps[firsts[1:]] += behind[:-1]
    numbers = np.arange(len(gaps)) - np.repeat(firsts, counts)
    alone = np.repeat(behind == 0, counts)
    markers = np.where(alone, END_OF_IMAGE[1], FIRST_RESTART + numbers % RESTARTS)
    return _Frame(firsts, past - 1, before, behind, np.cumsum(gaps), markers.astype(np.int32))
