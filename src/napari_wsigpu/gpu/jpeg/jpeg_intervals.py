"""`IntervalStreams`: tiles that consist of restart intervals of one large JPEG, as in NDPI."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.codecs.jpeg import END_OF_IMAGE, RESTARTS, without_restarts
from napari_wsigpu.gpu.jpeg.joining import join
from napari_wsigpu.gpu.jpeg.jpeg_stacks import JpegStreams

if TYPE_CHECKING:
    from napari_wsigpu.codecs.decoder import EncodedBatch
    from napari_wsigpu.gpu.device.worker import DecodeWorker
    from napari_wsigpu.gpu.device.workspace import Workspace
    from napari_wsigpu.gpu.jpeg.codestream import Recipe
    from napari_wsigpu.gpu.jpeg.joining import Joined
    from napari_wsigpu.model.arrays import Integers, Mask
    from napari_wsigpu.model.layout import LevelLayout


class IntervalStreams(JpegStreams):
    """Makes code streams of tiles that consist of restart intervals of one large JPEG.

    A stack contains the intervals of a tile, one after another, as the CPU joins them. All tiles
    have one header, which is in the layout. The CPU decodes tiles with missing intervals.

    Parameters
    ----------
    level : LevelLayout
        Level of the tiles; its encoding has a `jpeg_header`.
    recipe : Recipe
        How its tiles are decoded.
    worker : DecodeWorker, optional
        See `JpegStreams`.

    Attributes
    ----------
    works : bool
        Whether intervals with this header can be stacked.
    """

    def __init__(
        self,
        level: LevelLayout,
        recipe: Recipe,
        worker: DecodeWorker | None = None,
    ) -> None:
        self._intervals = level.grid.planes
        super().__init__(level, recipe, worker)
        # The header of a stack defines its own restart interval.
        header = without_restarts(level.encoding.jpeg_header or b"")
        self._common_header = self._own = self._check(header)
        most = self._stacking(self._own).max_tiles if self._own else 1
        self.works = most >= max(2, self._intervals)

    def _join(
        self, batch: EncodedBatch, count: int, work: Workspace
    ) -> list[tuple[Joined, Integers]]:
        self._common_header = self._own
        whole = _whole_tiles(batch, count)
        if not len(whole):
            return []
        stacks = self._stacks(self._own, len(whole), self._tiles_per_stack(len(whole), work.device))
        offsets, lengths = (each[:, whole].T.ravel() for each in (batch.starts, batch.lengths))
        joined = join(stacks, b"", offsets, lengths)
        work.make_room(joined.end, 0, 0)
        return [(joined, whole)] if joined.copy(batch, work.encoded) else []

    def _repeated(self, header: bytes) -> bytes:
        return b""

    def _joins(self, header: bytes, count: int, most: int) -> bool:
        return True


def _whole_tiles(batch: EncodedBatch, count: int) -> Integers:
    """Return the indices of tiles whose intervals are all there, each with the marker after it."""
    lengths = batch.lengths[:, :count]
    found: Integers = np.flatnonzero((lengths > len(END_OF_IMAGE)).all(axis=0))
    if not len(found):
        return found
    encoded = np.frombuffer(batch.view, np.uint8)
    ends = (batch.starts[:, :count] + lengths)[:, found]
    code = encoded[ends - 1]
    ended = (code == END_OF_IMAGE[1]) | ((code >= RESTARTS[0]) & (code <= RESTARTS[-1]))
    marked: Mask = (ended & (encoded[ends - 2] == END_OF_IMAGE[0])).all(axis=0)
    return found[marked]
