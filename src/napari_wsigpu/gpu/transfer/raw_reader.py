"""`RawReader`: uncompressed tiles of a local file, read straight into device memory."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.codecs.raw import NOWHERE, segments_of
from napari_wsigpu.gpu.device.kernel_tables import SEGMENT
from napari_wsigpu.gpu.transfer.gds import Transfer
from napari_wsigpu.storage.file_reads import PAGE, FileReads

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.raw import Segments
    from napari_wsigpu.gpu.device.interfaces import Stream
    from napari_wsigpu.gpu.transfer.gds import Loader
    from napari_wsigpu.model.arrays import DeviceArray, Integers
    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.storage.file_source import FileSource

# Bytes of decoded tiles in a batch.
BATCH_BYTES = 512 << 20


class RawTiles(NamedTuple):
    """Tiles in device memory, which is reused for the next batch.

    Attributes
    ----------
    first : int
        Index of the first tile in the whole request.
    addresses : ndarray of int64, shape (tiles,)
        Device address of each tile; 0 for tiles that failed.
    failures : dict of int to str
        Reason for each tile that failed, by its index in `addresses`.
    """

    first: int
    addresses: Integers
    failures: dict[int, str]


class RawReader:
    """Reads raw tiles (see `codecs.raw`). They are not cached: reading them again is just as fast.

    Parameters
    ----------
    loader : Loader
        Loader of the device.
    source : FileSource
        File of the slide.
    count : callable
        Called with the number of bytes of each batch that was read.
    """

    def __init__(self, loader: Loader, source: FileSource, count: Callable[[int], None]) -> None:
        self._loader = loader
        self._device = loader.device
        self._source = source
        self._count = count

    def read(
        self, level: LevelLayout, tiles: Integers, background: float, stream: Stream
    ) -> Generator[RawTiles, None, None]:
        """Read tiles into device memory, in smaller batches if memory is short.

        The tiles of a batch are valid for work on `stream` until the next batch is requested.

        Parameters
        ----------
        level : LevelLayout
            Level of the tiles.
        tiles : ndarray of int64, shape (tiles, 2)
            Row and column of each tile.
        background : int or float
            Value of samples that the file does not contain.
        stream : Stream
            Stream for all work on the tiles.

        Raises
        ------
        MemoryError
            If the device does not have enough memory for even one tile.
        SlideError
            If the file cannot be read.
        """
        most = max(1, BATCH_BYTES // level.tile_bytes)
        done = 0
        while True:
            start = done
            try:
                for found in self._read(level, tiles[start:], most, background, stream):
                    yield found._replace(first=start + found.first)
                    done += len(found.addresses)
            except MemoryError:  # halve the batches, and continue with the remaining tiles
                if most == 1:
                    raise
                most = min(most, len(tiles)) // 2 or 1
            else:
                return

    def _read(
        self, level: LevelLayout, tiles: Integers, most: int, background: float, stream: Stream
    ) -> Generator[RawTiles, None, None]:
        parts = [tiles[first : first + most] for first in range(0, len(tiles), most)]
        ranges = [level.grid.ranges(*part.T) for part in parts]
        joined = [
            self._source.join(offsets.ravel(), lengths.ravel(), PAGE) for offsets, lengths in ranges
        ]
        batches = [FileReads(plan.size, [(self._source, plan.runs)]) for plan in joined]
        with closing(Transfer(self._loader, stream).buffers(batches)) as buffers:
            for number, buffer in enumerate(buffers):
                part, plan, present = parts[number], joined[number], ranges[number][1] > 0
                shape = present.shape
                found = segments_of(
                    level, part, plan.starts.reshape(shape), plan.lengths.reshape(shape), present
                )
                self._count(int(plan.lengths.sum()))
                base = self._device.address(buffer)
                addresses = np.zeros(len(part), np.int64)
                pool: DeviceArray = None  # owns the tiles while the caller uses them
                if found.plain:
                    addresses[found.tile] = found.start + base
                else:
                    with stream:
                        pool = self._device.empty((len(part) * level.tile_bytes,), np.uint8)
                    slots = self._device.address(pool) + level.tile_bytes * np.arange(len(part))
                    addresses[found.tile] = slots[found.tile]
                    table = _table(found, base, addresses)
                    self._device.scatter_segments(table, level, background, stream)
                yield RawTiles(number * most, addresses, found.failures)


def _table(found: Segments, base: int, addresses: Integers) -> NDArray[np.void]:
    table = np.empty(len(found.tile), SEGMENT)
    table["source"] = np.where(found.start == NOWHERE, 0, found.start + base)
    table["target"] = addresses[found.tile]
    table["rows"], table["pixels"], table["channel"] = found.rows, found.pixels, found.channel
    return table
