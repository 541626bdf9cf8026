"""Uncompressed tiles of a local file, laid out in device memory as they come from the disk."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

from napari_wsigpu.codecs.raw import segments_of
from napari_wsigpu.gpu.gds import Transfer
from napari_wsigpu.storage.batch import PAGE, Batch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from napari_wsigpu.gpu.device import Stream, TileFormat, Window
    from napari_wsigpu.gpu.gds import Loader
    from napari_wsigpu.layout import LevelLayout
    from napari_wsigpu.reading.log import TileLog
    from napari_wsigpu.storage.file import FileSource

BATCH_BYTES = 512 << 20


class RawReader:
    """Reads raw tiles; see `codecs.raw`. They are not kept: to read them again is as fast.

    Parameters
    ----------
    loader, source, log
        What brings bytes to the device, where they come from, and what counts them.
    """

    def __init__(self, loader: Loader, source: FileSource, log: TileLog) -> None:
        self._loader = loader
        self._device = loader.device
        self._source = source
        self._log = log

    def read(
        self,
        image: LevelLayout,
        tile: TileFormat,
        tiles: NDArray[np.int64],
        pixels: Any,
        window: Window,
        stream: Stream,
    ) -> dict[int, str]:
        """Put the parts of tiles that lie in a window to their place in `pixels`.

        Parameters
        ----------
        image, tile
            The level, and what its tiles are.
        tiles : ndarray of int64, shape (tiles, 2)
            Row and column of each.
        pixels : device array, shape (height, width, channels)
            What the window shows; samples that the file does not hold are left as they are.
        window : Window
            All channels of a region.
        stream : Stream
            The order of work.

        Returns
        -------
        dict of int to str
            Why tiles, by their index, could not be had.

        Raises
        ------
        MemoryError
            If the device has no memory for the bytes of one tile.
        SlideError
            If the file can't be read.
        """

        def attempt(most: int) -> dict[int, str]:
            parts = [tiles[first : first + most] for first in range(0, len(tiles), most)]
            ranges = [image.grid.ranges(*part.T) for part in parts]
            joined = [
                self._source.join(offsets.ravel(), wanted.ravel(), PAGE)
                for offsets, wanted in ranges
            ]
            batches = [Batch(plan.size, [(self._source, plan.runs)]) for plan in joined]
            failures: dict[int, str] = {}
            level = (image.height, image.width)
            with closing(Transfer(self._loader, stream).buffers(batches)) as buffers:
                for number, buffer in enumerate(buffers):
                    part, plan, present = parts[number], joined[number], ranges[number][1] > 0
                    starts, lengths = (
                        each.reshape(present.shape) for each in (plan.starts, plan.lengths)
                    )
                    found = segments_of(image, part, starts, lengths, present)
                    found.rows[:, 0] += self._device.address(buffer)
                    rows = self._device.rows(found.rows, stream)
                    if found.plain:
                        self._device.paste(rows, tile, level, pixels, window, stream)
                    else:
                        self._device.lay_out(rows, image, pixels, window, stream)
                    first = number * most
                    failures |= {first + index: why for index, why in found.failures.items()}
                    self._log.count(bytes_read=int(plan.lengths.sum()))
            return failures

        most = max(1, BATCH_BYTES // image.tile_bytes)
        while True:
            try:
                return attempt(most)
            except MemoryError:
                if most == 1:
                    raise
                most = min(most, len(tiles)) // 2 or 1
