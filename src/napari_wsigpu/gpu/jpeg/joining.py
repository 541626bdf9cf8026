"""JPEG tiles joined into tall images, so that a few code streams keep all engines of a GPU busy.

Restart markers between the tiles' scans (ITU-T T.81, E.1.4) reset the decoder's DC predictions, so
each tile decodes as if it were alone. The code streams follow T.81, annex B: a header with DRI, the
scans of the tiles, each ended by RSTm with m counting modulo 8, the strip, and EOI.

If a tile consists of restart intervals of a larger JPEG, each interval is a scan.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu import native
from napari_wsigpu.codecs.decoder import EncodedBatch
from napari_wsigpu.codecs.jpeg import END_OF_IMAGE, RESTART_MARKERS, RESTARTS
from napari_wsigpu.native.tables import SCAN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.model.arrays import Integers
    from napari_wsigpu.model.layout import LevelLayout


COPYING_THREADS = 4


class Stack(NamedTuple):
    """A code stream of tiles with the same header: everything except the tiles' scans.

    Attributes
    ----------
    header : bytes
        Header of the stack.
    size : int
        Number of scans.
    end : bytes
        Strip and EOI after the last restart marker; empty for a single tile, which ends with EOI.
    marks : tuple of int
        See `codecs.jpeg.Stacking`.
    """

    header: bytes
    size: int
    end: bytes
    marks: tuple[int, ...]


class Joined(NamedTuple):
    """Layout of stacks, and of the scans of their tiles, in a buffer.

    Attributes
    ----------
    stacks : tuple of Stack
        The stacks, one after another.
    header : bytes
        Header at the start of every tile in its source, which is not copied; empty for restart
        intervals.
    scans : ndarray of `native.tables.SCAN`, shape (scans,)
        Position of each tile or interval at its source, and of its scan in the buffer.
    spans : list of (int, int)
        Start and end of each stack in the buffer.
    """

    stacks: tuple[Stack, ...]
    header: bytes
    scans: NDArray[np.void]
    spans: list[tuple[int, int]]

    @property
    def end(self) -> int:
        """End of the last stack."""
        return self.spans[-1][1]

    def write_ends(self, buffer: memoryview) -> None:
        """Write the bytes around the scans: the header and end of each stack."""
        for stack, (start, end) in zip(self.stacks, self.spans, strict=True):
            buffer[start : start + len(stack.header)] = stack.header
            buffer[end - len(stack.end) : end] = stack.end

    def copy(self, source: EncodedBatch, buffer: NDArray[np.uint8]) -> bool:
        """Copy the scans of tiles in memory to a buffer, and write the bytes around them.

        Parameters
        ----------
        source : EncodedBatch
            Batch with the encoded tiles.
        buffer : ndarray of uint8
            Target; holds at least `end` bytes.

        Returns
        -------
        bool
            False if a tile does not start with the header or does not end with EOI, or an interval
            does not end with a restart marker or EOI.
        """
        # The core refuses headers that are longer than its buffer; Python copies those tiles.
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
            start, end, past = offset + skipped, offset + length, place + length - skipped
            ending = bytes(source[end - 2 : end])
            ended = ending == END_OF_IMAGE or (not skipped and ending in RESTART_MARKERS)
            if source[offset:start] != self.header or not ended:
                return False
            buffer[place:past] = source[start:end]
            buffer[past - 1] = marker
        return True


class StackedBatch(EncodedBatch):
    """Tiles that were joined into stacks while they were read; the CPU gets them separately.

    Parameters
    ----------
    level : LevelLayout
        Level of the tiles.
    tiles : ndarray of int64, shape (tiles, 2)
        Row and column of each tile.
    buffer : memoryview
        Page-locked memory with the stacks; owned by the batch until it is released.
    joined : Joined
        Layout of the buffer; kept as `stacked`.
    background : float
        Value of pixels that the file does not contain.
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
        starts = joined.scans["place"].reshape(len(tiles), -1).T
        lengths = joined.scans["length"].reshape(len(tiles), -1).T - len(joined.header)
        super().__init__(level, tiles, buffer, starts, lengths, lengths > 0, background)

    def part(self, indices: Sequence[int]) -> EncodedBatch:
        """Return some of the tiles as they were stored, in a new buffer."""
        segments = [segment or b"" for index in indices for segment in self[index].segments]
        lengths = np.array([len(segment) for segment in segments], np.int64)
        starts = np.cumsum(lengths) - lengths
        starts, lengths = (each.reshape(len(indices), -1).T for each in (starts, lengths))
        chosen, buffer = self.tiles[np.array(indices, np.int64)], b"".join(segments)
        return EncodedBatch(
            self.level, chosen, buffer, starts, lengths, lengths > 0, self.background
        )

    def _segment(self, start: int, end: int, present: bool) -> memoryview | None:
        if not self.stacked.header:
            return self.view[start:end]
        scan = self.view[start : end - len(END_OF_IMAGE)]
        return memoryview(b"".join((self.stacked.header, scan, END_OF_IMAGE)))


def cut(count: int, most: int) -> list[int]:
    """Split tiles into as few stacks as possible; return the first tile of each, and `count`."""
    stacks = -(-count // most)
    return [number * count // stacks for number in range(stacks + 1)]


def join(
    stacks: tuple[Stack, ...], header: bytes, offsets: Integers, lengths: Integers, start: int = 0
) -> Joined:
    """Lay out stacks in a buffer, one after another.

    Parameters
    ----------
    stacks : tuple of Stack
        The stacks.
    header : bytes
        See `Joined`.
    offsets, lengths : ndarray of int64, shape (scans,)
        Position and length of each tile or interval at its source.
    start : int
        Offset of the first stack in the buffer.
    """
    frame = _frame(stacks)
    scans = np.empty(len(offsets), SCAN)
    scans["offset"], scans["length"], scans["marker"] = offsets, lengths, frame.markers
    sizes = lengths - len(header)
    ends = start + frame.gaps + np.cumsum(sizes)
    scans["place"] = ends - sizes
    firsts = scans["place"][frame.firsts] - frame.before
    past = ends[frame.lasts] + frame.after
    return Joined(stacks, header, scans, list(zip(firsts.tolist(), past.tolist(), strict=True)))


class _Frame(NamedTuple):
    """Positions and sizes of the bytes around scans, which depend on the stacks only.

    Attributes
    ----------
    firsts, lasts, before, after : ndarray of int64, shape (stacks,)
        Index of the first and last scan of each stack, and bytes of the stack before and after.
    gaps : ndarray of int64, shape (scans,)
        Total number of bytes before each scan that belong to no scan.
    markers : ndarray of int32, shape (scans,)
        Second byte of the marker that ends each scan.
    """

    firsts: Integers
    lasts: Integers
    before: Integers
    after: Integers
    gaps: Integers
    markers: NDArray[np.int32]


@lru_cache(maxsize=256)
def _frame(stacks: tuple[Stack, ...]) -> _Frame:
    counts = np.array([stack.size for stack in stacks], np.int64)
    before = np.array([len(stack.header) for stack in stacks], np.int64)
    after = np.array([len(stack.end) for stack in stacks], np.int64)
    past = np.cumsum(counts)
    firsts = past - counts
    gaps = np.zeros(int(counts.sum()), np.int64)
    gaps[firsts] = before
    gaps[firsts[1:]] += after[:-1]
    numbers = np.arange(len(gaps)) - np.repeat(firsts, counts)
    single = np.repeat(after == 0, counts)
    markers = np.where(single, END_OF_IMAGE[1], RESTARTS[0] + numbers % len(RESTARTS))
    return _Frame(firsts, past - 1, before, after, np.cumsum(gaps), markers.astype(np.int32))
