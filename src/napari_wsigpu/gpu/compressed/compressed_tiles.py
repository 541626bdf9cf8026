"""`CompressedTiles`: tiles of a batch that are compressed with deflate, LZW, PackBits or zstd."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.codecs.raw import is_swapped
from napari_wsigpu.gpu.compressed.compressed_engine import (
    DEFLATE,
    ENGINE,
    LZW,
    PACKBITS,
    ZSTD,
    room_for,
)
from napari_wsigpu.gpu.jpeg.codestream import PreparedBatch
from napari_wsigpu.model.tags import PREDICTOR

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.decoder import EncodedBatch
    from napari_wsigpu.gpu.compressed.compressed_engine import CompressedEngine
    from napari_wsigpu.gpu.device.cuda import CudaDevice
    from napari_wsigpu.gpu.device.interfaces import Slots, Stream
    from napari_wsigpu.gpu.device.worker import DecodeWorker
    from napari_wsigpu.gpu.device.workspace import Workspace
    from napari_wsigpu.model.arrays import Integers, Mask
    from napari_wsigpu.model.layout import LevelLayout

# First bytes of a frame (RFC 8878, 3.1.1), and bits of its descriptor for a checksum, a dictionary,
# and extensions.
FRAME, UNUSUAL = b"\x28\xb5\x2f\xfd", 0b1111
# Bytes of zlib's header and checksum (RFC 1950).
ZLIB_HEADER, ZLIB_CHECKSUM = 2, 4
SHORTEST, LONGEST = 8, 1 << 27  # bytes of a stream; kernels count its bits in 32 bits


class CompressedTiles:
    """Prepares tiles whose bytes are compressed; the CPU decodes those with unusual headers.

    Parameters
    ----------
    level : LevelLayout
        Level of the tiles.
    algorithm : str
        `LZW`, `DEFLATE`, `PACKBITS` or `ZSTD`.
    engine : CompressedEngine
        Decoder of the device.
    """

    def __init__(self, level: LevelLayout, algorithm: str, engine: CompressedEngine) -> None:
        self._level, self._algorithm, self._engine = level, algorithm, engine

    def prepare(self, batch: EncodedBatch, count: int, work: Workspace) -> PreparedBatch:
        """Choose from the first `count` tiles those that the device can decode."""
        starts, lengths = batch.starts[0, :count], batch.lengths[0, :count]
        encoded = np.frombuffer(batch.view, np.uint8)
        long = (lengths >= SHORTEST) & (lengths < LONGEST)
        # Tiles of other sizes are never looked at; all others have these bytes.
        places = np.where(long, starts, 0)[:, None] + np.arange(SHORTEST)
        good = long.copy()
        if long.any():
            good &= _is_known(self._algorithm, encoded[np.minimum(places, len(encoded) - 1)])
        chosen = np.flatnonzero(good)
        # The batch's buffer may be larger than its tiles.
        last = int((starts + lengths).max(initial=0))
        work.make_room(0, room_for(self._algorithm, last, len(chosen)), count)
        return _Tiles(batch, chosen, encoded, self._algorithm, self._engine, work)


class _Tiles(PreparedBatch):
    def __init__(
        self,
        batch: EncodedBatch,
        chosen: Integers,
        encoded: NDArray[np.uint8],
        algorithm: str,
        engine: CompressedEngine,
        work: Workspace,
    ) -> None:
        self.kind, self.work = algorithm, work
        self.groups = [[index] for index in chosen.tolist()]
        self._level, self._chosen, self._encoded = batch.level, chosen, encoded
        self._engine = engine
        self._starts, self._lengths = batch.starts[0, chosen], batch.lengths[0, chosen]

    def set_targets(self, addresses: Sequence[int], stream: Stream) -> None:
        self._targets, self._stream = np.array(addresses, np.int64)[self._chosen], stream

    def decode(self, worker: DecodeWorker) -> list[bool]:
        if not len(self._chosen):
            return []
        starts, lengths, sums = self._starts, self._lengths, None
        if self.kind == DEFLATE:
            ends = (starts + lengths)[:, None] - np.arange(ZLIB_CHECKSUM, 0, -1)
            sums = self._encoded[ends].view(">u4").ravel().astype(np.uint64)
            starts, lengths = starts + ZLIB_HEADER, lengths - ZLIB_HEADER - ZLIB_CHECKSUM
        self._flags[:] = 1  # the kernels set 0 for success
        self._engine.decode(
            self.kind,
            self._encoded,
            starts,
            lengths,
            sums,
            self._targets,
            self._level.tile_bytes,
            self._flags,
            self.work.planes,
            self._stream,
        )
        return [True] * len(self._chosen)

    def engine(self, worker: DecodeWorker) -> str:
        return ENGINE

    def finish(self, worked: list[bool], slots: Slots, device: CudaDevice, stream: Stream) -> None:
        if self._level.encoding.predictor == PREDICTOR.FLOATINGPOINT:  # in any byte order
            self._engine.restore_floats(self._targets, self._level, stream)
            return
        swap = is_swapped(self._level)
        differences = self._level.encoding.predictor == PREDICTOR.HORIZONTAL
        if swap or differences:
            self._engine.restore(
                self._targets, self._level, swap=swap, sum_up=differences, stream=stream
            )

    def doubtful(self, decoded: Sequence[int]) -> list[int]:
        wrong = set(self._chosen[np.flatnonzero(self._flags)].tolist())
        return sorted(wrong & {*decoded})

    @property
    def _flags(self) -> NDArray[np.int32]:
        return self.work.doubts[: len(self._chosen)]


def _is_known(algorithm: str, heads: NDArray[np.uint8]) -> Mask:
    """Return whether the first bytes of streams announce what the device can decode."""
    first, second = heads[:, 0].astype(np.int64), heads[:, 1].astype(np.int64)
    if algorithm == LZW:  # a clear code of 9 bits; the CPU decodes the order of old writers
        known: Mask = (first == 0x80) & (second < 0x80)
    elif algorithm == PACKBITS:  # no header
        known = np.ones(len(heads), np.bool_)
    elif algorithm == ZSTD:
        framed = (heads[:, :4] == np.frombuffer(FRAME, np.uint8)).all(axis=1)
        known = framed & (heads[:, 4] & UNUSUAL == 0)
    else:
        known = (first & 0x0F == 8) & ((256 * first + second) % 31 == 0) & (second & 0x20 == 0)
    return known
