"""Batches of encoded tiles, and the interface of the decoders on the CPU and on devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from napari_wsigpu.storage.source import NO_REASONS, Unreadable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from napari_wsigpu.model.arrays import Integers, Mask
    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.storage.source import Buffer, DeferredReads, Fill, JoinedBytes


class EncodedTile(NamedTuple):
    """The encoded bytes of a tile: one segment per plane, None for a missing one.

    Uncompressed tiles may have a `fill` function instead, which reads the samples straight into
    the tile's memory.
    """

    level: LevelLayout
    row: int
    column: int
    segments: tuple[memoryview | None, ...]
    background: float
    fill: Fill | None = None


class EncodedBatch:
    """Encoded tiles of one level in one buffer, or functions that read them on demand.

    Parameters
    ----------
    level : LevelLayout
        The level.
    tiles : ndarray of int64, shape (tiles, 2)
        Row and column of each tile.
    buffer : bytearray or memoryview
        The bytes of all segments; the batch owns it until `release`.
    starts, lengths : ndarray of int64, shape (planes, tiles)
        Position and length of each segment in the buffer.
    present : ndarray of bool, shape (planes, tiles)
        Whether the file contains the segment; it may still be truncated, even to nothing.
    background : float
        Value of pixels that the file does not contain.
    reasons : Mapping of int to str
        The reason for each segment that could not be read; the index counts segments plane by
        plane.

    Attributes
    ----------
    level, tiles, starts, lengths, background
        The parameters.
    view : memoryview
        View of the buffer.
    """

    def __init__(
        self,
        level: LevelLayout,
        tiles: Integers,
        buffer: Buffer | bytes,
        starts: Integers,
        lengths: Integers,
        present: Mask,
        background: float,
        *,
        reasons: Mapping[int, str] = NO_REASONS,
    ) -> None:
        self.level = level
        self.starts = starts
        self.lengths = lengths
        self.tiles = tiles
        self._present = present
        self.background = background
        self._reasons = reasons
        self._fills: Sequence[Fill] = ()
        self._deferred: DeferredReads | None = None
        self._rows_and_columns: list[list[int]] = []
        self._bounds: list[list[tuple[int, int, bool]]] = []
        self._set_buffer(buffer)

    @classmethod
    def from_joined(
        cls,
        level: LevelLayout,
        tiles: Integers,
        joined: JoinedBytes,
        byte_counts: Integers,
        background: float,
    ) -> EncodedBatch:
        """Create a batch from the segments that a source has read into one buffer.

        `byte_counts`, shape (planes, tiles), has the lengths of the segments in the layout.
        """
        # A segment beyond the end of a truncated file has length 0 here, but is not missing:
        # decoding it is an error, while a missing segment shows the background.
        return cls(
            level,
            tiles,
            joined.buffer,
            joined.starts.reshape(byte_counts.shape),
            joined.lengths.reshape(byte_counts.shape),
            byte_counts > 0,
            background,
            reasons=joined.reasons,
        )

    @classmethod
    def from_fills(
        cls, level: LevelLayout, tiles: Integers, fills: Sequence[Fill], background: float
    ) -> EncodedBatch:
        """Create a batch of uncompressed tiles, which the decoding threads read into memory."""
        zeros = np.zeros((1, len(tiles)), np.int64)
        batch = cls(level, tiles, b"", zeros, zeros, zeros > 0, background)
        batch._fills = fills
        return batch

    @classmethod
    def from_deferred(
        cls, level: LevelLayout, tiles: Integers, reads: DeferredReads, background: float
    ) -> EncodedBatch:
        """Create a batch of tiles with one segment each, which the decoding threads read."""
        zeros = np.zeros((1, len(tiles)), np.int64)
        batch = cls(level, tiles, b"", zeros, zeros, zeros == 0, background)
        batch._deferred = reads
        return batch

    def _set_buffer(self, buffer: Buffer | bytes) -> None:
        self.view = memoryview(buffer)
        self._bytes = np.frombuffer(buffer, np.uint8) if len(buffer) else np.zeros(0, np.uint8)

    def release(self) -> None:
        """Release the buffer, and let the source close its file."""
        self._set_buffer(b"")
        self._fills = ()
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            deferred.close()

    @property
    def address(self) -> int:
        """Memory address of the buffer."""
        return int(self._bytes.ctypes.data)

    def __len__(self) -> int:
        return len(self.tiles)

    def part(self, indices: Sequence[int]) -> EncodedBatch:
        """Return a batch of some of these tiles, which shares the buffer."""
        assert self._deferred is None  # deferred reads use no buffer
        chosen = np.array(indices, np.int64)
        reasons = {
            plane * len(indices) + number: self._reasons[plane * len(self) + index]
            for number, index in enumerate(indices)
            for plane in range(len(self.starts))
            if plane * len(self) + index in self._reasons
        }
        return EncodedBatch(
            self.level,
            self.tiles[chosen],
            self.view,
            self.starts[:, chosen],
            self.lengths[:, chosen],
            self._present[:, chosen],
            self.background,
            reasons=reasons,
        )

    def _make_lists(self) -> None:
        """Convert the arrays to lists: indexing an array takes ten times as long."""
        columns = (self.starts.T, (self.starts + self.lengths).T, self._present.T)
        self._rows_and_columns = self.tiles.tolist()
        # Set last: if `_bounds` is not empty, other threads assume that both lists exist.
        self._bounds = [
            list(zip(*bounds, strict=True))
            for bounds in zip(*(column.tolist() for column in columns), strict=True)
        ]

    def __iter__(self) -> Iterator[EncodedTile]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> EncodedTile:
        if not self._bounds:
            self._make_lists()
        row, column = self._rows_and_columns[index]
        if self._fills:
            return EncodedTile(self.level, row, column, (), self.background, self._fills[index])
        segments: tuple[memoryview | None, ...]
        if self._deferred is not None:
            segments = (memoryview(self._deferred.read(index)),)
        elif self._reasons:
            segments = tuple(
                self._readable_segment(plane * len(self) + index, *bounds)
                for plane, bounds in enumerate(self._bounds[index])
            )
        else:
            segments = tuple([self._segment(*bounds) for bounds in self._bounds[index]])
        return EncodedTile(self.level, row, column, segments, self.background)

    @property
    def single(self) -> bool:
        """Whether each tile is a single segment that was, or can be, read."""
        return not self._reasons and not self._fills and len(self.starts) == 1

    def segment_reader(self) -> Callable[[int], bytes | memoryview | None]:
        """Return a function that returns a tile's segment by the tile's index; None if missing.

        The batch must be `single`. The function may read the file, and raises `SlideError` if that
        fails.
        """
        return self._segments().__getitem__ if self._deferred is None else self._deferred.read

    def _segments(self) -> list[memoryview | None]:
        starts, ends = self.starts[0], self.starts[0] + self.lengths[0]
        view = self.view
        bounds = zip(starts.tolist(), ends.tolist(), self._present[0].tolist(), strict=True)
        return [view[start:end] if present else None for start, end, present in bounds]

    def _readable_segment(
        self, segment: int, start: int, end: int, present: bool
    ) -> memoryview | None:
        reason = self._reasons.get(segment)
        if reason is not None:
            return memoryview(Unreadable(reason))
        return self._segment(start, end, present)

    def _segment(self, start: int, end: int, present: bool) -> memoryview | None:
        return self.view[start:end] if present else None


Deliver = Callable[[Sequence[int]], None]


class PendingBatch(Protocol):
    """A batch of tiles that is being decoded."""

    def wait(self) -> dict[int, str]:
        """Wait until every tile was delivered or failed; return the reasons of failures by index.

        Raises
        ------
        SlideError
            If the device fails, or if a tile is read when it is decoded and the source fails.
        """

    def cancel(self) -> None:
        """Drop the tiles that are not being decoded yet; return when no more will be delivered."""
