"""Encoded tiles, and the interface of a decoder to host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from napari_wsigpu.codecs.jpeg import END_OF_IMAGE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from napari_wsigpu.layout import Encoding, LevelLayout
    from napari_wsigpu.storage.source import Buffer, Fill


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
    shared : bool
        Whether the buffer lies in page-locked memory, and may be written to.

    Attributes
    ----------
    level, tiles, starts, lengths, shared
        As given.
    view : memoryview
        The buffer.
    lost : bytes or None
        What all tiles began with, before this and the marker that ended each were overwritten.
    """

    def __init__(
        self,
        level: LevelLayout,
        tiles: NDArray[np.int64],
        buffer: Buffer,
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        present: NDArray[np.bool_],
        background: float,
        *,
        shared: bool = False,
    ) -> None:
        self.level = level
        self.starts = starts
        self.lengths = lengths
        self.tiles = tiles
        self.shared = shared
        self.lost: bytes | None = None
        self._present = present
        self._background = background
        self._hold(buffer)

    def _hold(self, buffer: Buffer) -> None:
        self.view = memoryview(buffer)
        self._bytes = np.frombuffer(buffer, np.uint8) if len(buffer) else np.zeros(0, np.uint8)

    def release(self) -> None:
        """Let go of the bytes."""
        self._hold(bytearray())

    @property
    def address(self) -> int:
        """Address of the buffer."""
        return int(self._bytes.ctypes.data)

    def __len__(self) -> int:
        return len(self.tiles)

    def __getitem__(self, index: Any) -> Any:
        row, column = self.tiles[index].tolist()
        segments = tuple(
            self._segment(start, start + length) if present else None
            for start, length, present in zip(
                self.starts[:, index].tolist(),
                self.lengths[:, index].tolist(),
                self._present[:, index].tolist(),
                strict=True,
            )
        )
        return EncodedTile(self.level, row, column, segments, self._background)

    def _segment(self, start: int, end: int) -> memoryview:
        if self.lost is None:
            return self.view[start:end]
        scan = self.view[start + len(self.lost) : end - len(END_OF_IMAGE)]
        return memoryview(b"".join((self.lost, scan, END_OF_IMAGE)))


Deliver = Callable[[int, "NDArray[Any]"], None]


class PendingBatch(Protocol):
    """A batch of tiles that is being decoded."""

    def wait(self) -> dict[int, str]:
        """Return when every tile was delivered or failed: index -> reason of each failure.

        Raises
        ------
        SlideError
            If the source of tiles that are read right into memory can't be read.
        """

    def cancel(self) -> None:
        """Drop tiles that are not begun and return when no more will be delivered."""


class TileDecoder(Protocol):
    """Decodes batches of tiles to host memory."""

    name: str

    def refusal(self, encoding: Encoding) -> str | None:
        """Say why tiles of this encoding can't be decoded; None if they can."""

    def schedule(self, batch: Sequence[EncodedTile], deliver: Deliver) -> PendingBatch:
        """Begin to decode a batch and return at once.

        Parameters
        ----------
        batch : sequence of EncodedTile
            The tiles.
        deliver : callable
            Called from any thread with the index in `batch` and the pixels of each decoded
            tile: shape (height, width, channels), native byte order, the receiver's own.
            Edge tiles may be cut to their level's extent.
        """

    def release(self) -> None:
        """Let go of threads and memory until the next batch."""
