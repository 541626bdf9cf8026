"""Encoded tiles, and the interface of what decodes them: on the CPU, or on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np

from napari_wsigpu.storage.source import NO_REASONS, Unreadable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.storage.source import Buffer, Fill, JoinedBytes, LaterReads

Slots = TypeVar("Slots", contravariant=True)


class EncodedTile(NamedTuple):
    """One tile's encoded bytes, one segment a plane (None where the file has none).

    Instead of them, `fill` may read its samples as they are to be right into its memory.
    """

    level: LevelLayout
    row: int
    column: int
    segments: tuple[memoryview | None, ...]
    background: float
    fill: Fill | None = None


class EncodedBatch(Sequence["EncodedTile"]):
    """Encoded tiles of one level in one buffer.

    Parameters
    ----------
    level : LevelLayout
        The level.
    tiles : ndarray of int64, shape (tiles, 2)
        Row and column of each.
    buffer : bytearray or memoryview
        The bytes of all.
    starts, lengths : ndarray of int64, shape (planes, tiles)
        Where each segment lies in the buffer.
    present : ndarray of bool, shape (planes, tiles)
        Whether the file has it; it may be cut short to nothing all the same.
    background : float
        Value of pixels that the file does not hold.
    reasons : Mapping of int to str
        Why segments, counted plane by plane, could not be read.
    fills : sequence of callable
        What reads each tile right into its memory, if that is how they are to be had.

    Attributes
    ----------
    level, tiles, starts, lengths
        As given.
    view : memoryview
        The buffer.
    """

    def __init__(
        self,
        level: LevelLayout,
        tiles: NDArray[np.int64],
        buffer: Buffer | bytes,
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        present: NDArray[np.bool_],
        background: float,
        *,
        reasons: Mapping[int, str] = NO_REASONS,
        fills: Sequence[Fill] = (),
    ) -> None:
        self.level = level
        self.starts = starts
        self.lengths = lengths
        self.tiles = tiles
        self._present = present
        self._background = background
        self._reasons = reasons
        self._fills = fills
        self._later: LaterReads | None = None
        self._places: list[Any] = []
        self._hold(buffer)

    @classmethod
    def joined(
        cls,
        level: LevelLayout,
        tiles: NDArray[np.int64],
        joined: JoinedBytes,
        wanted: NDArray[np.int64],
        background: float,
    ) -> EncodedBatch:
        """Take tiles as a source has read them; `wanted` is how long their segments should be."""
        # A segment that the file was to hold, but that lies beyond its end, is no missing one.
        return cls(
            level,
            tiles,
            joined.buffer,
            joined.starts.reshape(wanted.shape),
            joined.lengths.reshape(wanted.shape),
            wanted > 0,
            background,
            reasons=joined.reasons,
        )

    @classmethod
    def filled(
        cls,
        level: LevelLayout,
        tiles: NDArray[np.int64],
        fills: Sequence[Fill],
        background: float,
    ) -> EncodedBatch:
        """Take tiles that are each read by who decodes them."""
        nowhere = np.zeros((1, len(tiles)), np.int64)
        return cls(level, tiles, b"", nowhere, nowhere, nowhere > 0, background, fills=fills)

    @classmethod
    def later(
        cls,
        level: LevelLayout,
        tiles: NDArray[np.int64],
        reads: LaterReads,
        background: float,
    ) -> EncodedBatch:
        """Take tiles of one segment each that are read by who decodes them."""
        nowhere = np.zeros((1, len(tiles)), np.int64)
        batch = cls(level, tiles, b"", nowhere, nowhere, nowhere == 0, background)
        batch._later = reads
        return batch

    def _hold(self, buffer: Buffer | bytes) -> None:
        self.view = memoryview(buffer)
        self._bytes = np.frombuffer(buffer, np.uint8) if len(buffer) else np.zeros(0, np.uint8)

    def release(self) -> None:
        """Let go of the bytes."""
        self._hold(b"")
        self._fills = ()
        later, self._later = self._later, None
        if later is not None:
            later.close()

    @property
    def address(self) -> int:
        """Address of the buffer."""
        return int(self._bytes.ctypes.data)

    def __len__(self) -> int:
        return len(self.tiles)

    def part(self, indices: Sequence[int]) -> EncodedBatch:
        """Return some of its tiles, in the same buffer."""
        assert self._later is None  # ranges that are read later lie in no buffer
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
            self._background,
            reasons=reasons,
        )

    def _locate(self) -> None:
        """Make lists of the arrays: one look-up in an array takes as long as ten in a list."""
        columns = (self.starts, self.starts + self.lengths, self._present)
        places = [
            zip(*(column[plane].tolist() for column in columns), strict=True)
            for plane in range(len(self.starts))
        ]
        self._places = list(zip(self.tiles.tolist(), *places, strict=True))

    def __getitem__(self, index: Any) -> Any:
        if not self._places:
            self._locate()
        if self._fills:
            row, column = self._places[index][0]
            return EncodedTile(self.level, row, column, (), self._background, self._fills[index])
        (row, column), *places = self._places[index]
        if self._later is not None:
            read = (memoryview(self._later.read(index)),)
            return EncodedTile(self.level, row, column, read, self._background)
        if self._reasons:
            segments = tuple(
                self._unless_unreadable(plane * len(self) + index, *place)
                for plane, place in enumerate(places)
            )
        else:
            segments = tuple([self._segment(*place) for place in places])
        return EncodedTile(self.level, row, column, segments, self._background)

    @property
    def single(self) -> bool:
        """Whether each tile is one segment of the buffer as it was read."""
        return not self._reasons and not self._fills and len(self.starts) == 1

    def fetcher(self) -> Callable[[int], bytes | memoryview | None]:
        """Return what gives the bytes of a tile, which is `single`; None if it has none.

        It may read them, and raise `SlideError` if that can't be done.
        """
        return self._segments().__getitem__ if self._later is None else self._later.read

    def _segments(self) -> list[memoryview | None]:
        starts, ends = self.starts[0], self.starts[0] + self.lengths[0]
        view = self.view
        return [
            view[start:end] if held else None
            for start, end, held in zip(
                starts.tolist(), ends.tolist(), self._present[0].tolist(), strict=True
            )
        ]

    def _unless_unreadable(
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
        """Return when every tile was delivered or failed: index -> reason of each failure.

        Raises
        ------
        SlideError
            If the source of tiles that are read right into memory can't be read, or the device
            fails.
        """

    def cancel(self) -> None:
        """Drop tiles that are not begun and return when no more will be delivered."""


class Decoder(Protocol[Slots]):
    """Decodes batches of tiles to slots: on the host (`HostSlots`), or on a device."""

    name: str

    def refusal(self, level: LevelLayout) -> str | None:
        """Say why it can't decode tiles of a level; None if it can."""

    def schedule(self, batch: EncodedBatch, slots: Slots, deliver: Deliver) -> PendingBatch:
        """Begin to decode a batch and return at once.

        Parameters
        ----------
        batch : EncodedBatch
            The tiles.
        slots : Slots
            Where each is decoded to.
        deliver : callable
            Called from any thread with indices in `batch`, once or more often: the pixels of
            these tiles lie in their slots now, or will by what the slots' stream holds.
        """

    def release(self) -> None:
        """Let go of threads and memory until the next batch."""
