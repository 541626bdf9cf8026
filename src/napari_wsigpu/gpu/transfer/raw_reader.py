"""Uncompressed tiles of a local file, brought to device memory as they come from the disk."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from napari_wsigpu.codecs.raw import NOWHERE, segments_of
from napari_wsigpu.gpu.device.tables import SEGMENT
from napari_wsigpu.gpu.transfer.gds import Transfer
from napari_wsigpu.storage.batch import PAGE, Batch

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.raw import Segments
    from napari_wsigpu.gpu.device.device import Stream
    from napari_wsigpu.gpu.transfer.gds import Loader
    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.storage.file import FileSource

BATCH_BYTES = 512 << 20


class RawTiles(NamedTuple):
    """Tiles that lie in device memory as long as the next ones are not asked for.

    Attributes
    ----------
    first : int
        Index of the first of them among those that were asked for.
    addresses : ndarray of int64, shape (tiles,)
        Where each lies; 0 for those that failed.
    failures : dict of int to str
        Why tiles, by their index, could not be had.
    """

    first: int
    addresses: NDArray[np.int64]
    failures: dict[int, str]


class RawReader:
    """Reads raw tiles; see `codecs.raw`. They are not kept: to read them again is as fast.

    Parameters
    ----------
    loader, source
        What brings bytes to the device, and where they come from.
    count : callable
        Told how many bytes were read.
    """

    def __init__(self, loader: Loader, source: FileSource, count: Callable[[int], None]) -> None:
        self._loader = loader
        self._device = loader.device
        self._source = source
        self._count = count

    def read(
        self, image: LevelLayout, tiles: NDArray[np.int64], background: float, stream: Stream
    ) -> Generator[RawTiles, None, None]:
        """Bring tiles to the device, some at a time: as many as memory allows.

        Parameters
        ----------
        image : LevelLayout
            The level.
        tiles : ndarray of int64, shape (tiles, 2)
            Row and column of each.
        background : int or float
            Value of samples that the file does not hold.
        stream : Stream
            The order of work.

        Raises
        ------
        MemoryError
            If the device has no memory for the bytes of one tile.
        SlideError
            If the file can't be read.
        """
        most = max(1, BATCH_BYTES // image.tile_bytes)
        done = 0
        while True:
            begun = done
            try:
                for found in self._read(image, tiles[begun:], most, background, stream):
                    yield found._replace(first=begun + found.first)
                    done += len(found.addresses)
            except MemoryError:
                if most == 1:
                    raise
                most = min(most, len(tiles)) // 2 or 1
            else:
                return

    def _read(
        self,
        image: LevelLayout,
        tiles: NDArray[np.int64],
        most: int,
        background: float,
        stream: Stream,
    ) -> Generator[RawTiles, None, None]:
        parts = [tiles[first : first + most] for first in range(0, len(tiles), most)]
        ranges = [image.grid.ranges(*part.T) for part in parts]
        joined = [
            self._source.join(offsets.ravel(), wanted.ravel(), PAGE) for offsets, wanted in ranges
        ]
        batches = [Batch(plan.size, [(self._source, plan.runs)]) for plan in joined]
        with closing(Transfer(self._loader, stream).buffers(batches)) as buffers:
            for number, buffer in enumerate(buffers):
                part, plan, present = parts[number], joined[number], ranges[number][1] > 0
                shape = present.shape
                found = segments_of(
                    image, part, plan.starts.reshape(shape), plan.lengths.reshape(shape), present
                )
                self._count(int(plan.lengths.sum()))
                first = self._device.address(buffer)
                addresses = np.zeros(len(part), np.int64)
                pool: Any = None
                if found.plain:
                    addresses[found.tile] = found.start + first
                else:
                    with stream:
                        pool = self._device.empty((len(part) * image.tile_bytes,), np.uint8)
                    slots = self._device.address(pool) + image.tile_bytes * np.arange(len(part))
                    addresses[found.tile] = slots[found.tile]
                    table = _table(found, first, addresses)
                    self._device.lay_out(table, image, background, stream)
                yield RawTiles(number * most, addresses, found.failures)


def _table(found: Segments, first: int, addresses: NDArray[np.int64]) -> NDArray[np.void]:
    table = np.empty(len(found.tile), SEGMENT)
    table["source"] = np.where(found.start == NOWHERE, 0, found.start + first)
    table["target"] = addresses[found.tile]
    table["rows"], table["pixels"], table["channel"] = found.rows, found.pixels, found.channel
    return table
