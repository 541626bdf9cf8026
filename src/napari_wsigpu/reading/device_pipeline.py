"""`DevicePipeline`: tiles of read plans, decoded to device memory and pasted there."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.codecs.decoder import EncodedBatch
from napari_wsigpu.codecs.raw import is_raw
from napari_wsigpu.gpu.device.device import TileFormat
from napari_wsigpu.gpu.device.switching import prompt_switching
from napari_wsigpu.gpu.device.tables import PASTE
from napari_wsigpu.gpu.transfer.raw_reader import RawReader
from napari_wsigpu.reading.cache import TileKey
from napari_wsigpu.storage.file import FileSource

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.gpu.device.device import Device, Stream
    from napari_wsigpu.gpu.jpeg.batch import GpuBatch
    from napari_wsigpu.gpu.jpeg.nvimagecodec import NvImageCodecDecoder
    from napari_wsigpu.gpu.transfer.tiles import DeviceTiles, Reserved
    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.reading.log import TileLog
    from napari_wsigpu.reading.plan import Pastes, ReadOptions, ReadPlan
    from napari_wsigpu.storage.source import ByteSource

    Integers = NDArray[np.int64]

BATCH_TILES, BATCH_PIXEL_BYTES, IN_FLIGHT = 1024, 256 << 20, 2


@dataclass
class Output:
    """The pixels of the regions of plans, one region after another, on their way.

    Attributes
    ----------
    pixels : device array, shape (pixels, channels), or (pixels,) for one channel
        Where they go.
    stream, given : Stream
        What the work is given to, and the caller's own stream if there is one.
    offsets : ndarray of int64
        Where each region begins in them.
    options : ReadOptions
        How they are wanted.
    share : float
        Part of the tiles that the device decodes.
    colors : device array or None
        What colours become.
    corrected : bool
        Whether tiles were pasted again after the pixels could have been copied.
    settled : bool
        Whether all work that the stream was given for them is done.
    host : ndarray or None
        The copy on the host, if one is wanted.
    """

    pixels: Any
    given: Stream | None
    offsets: Integers
    options: ReadOptions
    share: float
    to_host: bool
    colors: Any
    stream: Any = None
    corrected: bool = False
    settled: bool = False
    host: NDArray[Any] | None = None
    failures: dict[TileKey, str] = field(default_factory=dict)


@dataclass
class _InFlight:
    """A batch of a plan's tiles that is being decoded."""

    tiles: Integers
    reserved: Reserved
    pending: GpuBatch
    buffer: memoryview


class DevicePipeline:
    """Decodes and pastes tiles of one slide's images: a batch is read while another is decoded.

    Parameters
    ----------
    slide : int
        Number of the open slide.
    images : Mapping of int to LevelLayout
        Its images by number.
    background : int or float
        Value of pixels that the file does not hold.
    source, decoder, tiles, log
        Where bytes come from, what decodes them, where tiles are kept, and what counts them.
    timed : callable
        Told of a level, how many of its tiles were decoded for the host, in how many seconds,
        and the device's share of them.

    Attributes
    ----------
    slide, images, background, decoder, tiles, log
        As given.
    """

    def __init__(
        self,
        slide: int,
        images: Mapping[int, LevelLayout],
        background: float,
        source: ByteSource,
        decoder: NvImageCodecDecoder,
        tiles: DeviceTiles,
        log: TileLog,
        timed: Callable[[LevelLayout, int, float, float], None],
    ) -> None:
        self.slide = slide
        self.images = images
        self.background = background
        self._source = source
        self.decoder = decoder
        self._device: Device = decoder.worker.device
        self.tiles = tiles
        self.log = log
        self._timed = timed
        self._raw: RawReader | None = None
        if isinstance(source, FileSource):
            loader = decoder.worker.loader
            self._raw = RawReader(loader, source, lambda count: log.count(bytes_read=count))
        self._doubted = False

    def reads_raw(self, plan: ReadPlan) -> bool:
        """Whether its tiles lie uncompressed in a file, and are read past the cache."""
        return self._raw is not None and is_raw(self.images[plan.image])

    def read(
        self,
        plan: ReadPlan,
        found: Reserved | None,
        here: NDArray[np.bool_],
        output: Output,
        *,
        last: bool,
    ) -> None:
        """Paste the tiles of a plan that are here, and decode and paste the others.

        Parameters
        ----------
        plan : ReadPlan
            What is wanted.
        found : Reserved or None
            Places of the tiles that are here, pinned.
        here : ndarray of bool, shape (tiles,)
            Which these are.
        output : Output
            Where they go.
        last : bool
            Whether the pixels are complete with this plan.

        Raises
        ------
        MemoryError
            If there is no device memory for one tile.
        SlideError
            If the file can't be read, or the device fails.
        """
        if self.reads_raw(plan):
            self._read_raw(plan, output)
            return
        output.settled = False
        hits, blank = 0 if found is None else len(found.places), len(plan.blanks)
        self.log.count(tiles_asked=len(plan.tiles) + blank, cache_hits=hits, background=blank)
        if hits == len(here):
            if found is not None:
                self._paste(plan, plan.pastes, found.slots.addresses, output)
            return
        addresses = np.zeros(len(here), np.int64)
        if found is not None:
            addresses[here] = found.slots.addresses
        known, absent = np.flatnonzero(here), np.flatnonzero(~here)
        with prompt_switching():
            self._decode(plan, absent, known, addresses, output, last=last)

    def _decode(
        self,
        plan: ReadPlan,
        absent: Integers,
        here: Integers,
        addresses: Integers,
        output: Output,
        *,
        last: bool,
    ) -> None:
        """Read and decode tiles: a batch is read while the one before it is decoded.

        Those that are here are pasted with the first batch.
        """
        begin = time.perf_counter()
        image, count = self.images[plan.image], len(absent)
        most = max(1, min(BATCH_TILES, BATCH_PIXEL_BYTES // image.tile_bytes))
        most = -(-count // -(-count // most))
        flying: list[_InFlight] = []
        try:
            while len(absent):
                output.options.cancellation.check()
                if len(flying) == IN_FLIGHT:
                    self._finish(plan, flying.pop(0), output)
                try:
                    alone = len(absent) <= most
                    flying.append(
                        self._begin(
                            plan,
                            absent[:most],
                            here,
                            addresses,
                            output,
                            last=last and alone,
                            only=alone and not flying,
                        )
                    )
                except MemoryError:
                    if flying:
                        self._finish(plan, flying.pop(0), output)
                    elif most > 1:
                        most //= 2
                    else:
                        raise
                else:
                    absent, here = absent[len(flying[-1].tiles) :], here[:0]
            while flying:
                self._finish(plan, flying.pop(0), output)
            output.settled = True
            if output.to_host:
                if output.corrected:
                    output.host = None
                self._timed(image, count, time.perf_counter() - begin, output.share)
        finally:
            for batch in flying:
                batch.pending.cancel()
                self.tiles.unpin(batch.reserved)

    def _begin(
        self,
        plan: ReadPlan,
        tiles: Integers,
        here: Integers,
        addresses: Integers,
        output: Output,
        *,
        last: bool,
        only: bool,
    ) -> _InFlight:
        """Read a batch of tiles and begin to decode it.

        Raises
        ------
        MemoryError
            If there is no device memory for it.
        """
        image = self.images[plan.image]
        reserved = self.tiles.reserve(tile_format(image), image.tile_bytes, len(tiles))
        if len(reserved.places) < len(tiles):
            last = only = False
        tiles = tiles[: len(reserved.places)]
        addresses[tiles] = reserved.slots.addresses
        pasted = False

        def deliver(indices: Sequence[int]) -> None:
            nonlocal pasted
            ready = tiles if len(indices) == len(tiles) else tiles[np.array(indices, np.int64)]
            ready = np.append(here, ready) if len(here) and not pasted else ready
            self._paste(plan, plan.pastes_of(ready), addresses, output)
            if pasted:
                output.corrected = True
            elif last and output.to_host:
                output.host = self._device.download(output.pixels, output.stream)
            pasted = True

        try:
            encoded = self.encoded(image, plan.tiles[tiles])
            buffer = encoded.view
            pending = self.decoder.schedule(
                encoded,
                reserved.slots,
                deliver,
                share=output.share,
                stream=output.given,
                at_once=not only,
            )
        except BaseException:
            self.tiles.unpin(reserved)
            raise
        return _InFlight(tiles, reserved, pending, buffer)

    def encoded(self, image: LevelLayout, tiles: Integers) -> EncodedBatch:
        """Read tiles of shape (tiles, 2), row and column of each, as they are stored."""
        offsets, wanted = image.grid.ranges(*tiles.T)
        spacing = self.decoder.spacing(image, len(tiles))
        joined = self._source.read_joined(
            offsets.ravel(), wanted.ravel(), self.decoder.worker.take_buffer, spacing
        )
        self.log.count(bytes_read=int(joined.lengths.sum()))
        return EncodedBatch.joined(image, tiles, joined, wanted, self.background, shared=True)

    def _paste(self, plan: ReadPlan, pastes: Pastes, addresses: Integers, output: Output) -> None:
        """Copy parts of tiles that lie at addresses to their places."""
        options = output.options
        tile, step = tile_format(self.images[plan.image]), plan.regions.step
        pixel = tile.channels * np.dtype(tile.dtype).itemsize
        table = np.empty(len(pastes), PASTE)
        begin = pastes.top * tile.width + pastes.left
        table["source"] = addresses[pastes.tile] + begin * pixel
        pitch = plan.regions.widths[pastes.region]
        table["target"] = output.offsets[pastes.region] + pastes.y * pitch + pastes.x
        table["pitch"] = pitch
        table["height"], table["width"] = pastes.height, pastes.width
        to = tile, output.pixels
        if output.colors is None:
            self._device.paste(table, *to, output.stream, channel=options.channel, step=step)
        else:
            self._device.paste_colors(table, *to, output.colors, output.stream, step=step)

    def _finish(self, plan: ReadPlan, batch: _InFlight, output: Output) -> None:
        image = self.images[plan.image]
        try:
            try:
                failed = batch.pending.wait()
            except BaseException:
                batch.pending.cancel()
                raise
            if self.decoder.verifier.reason is not None and not self._doubted:
                self._doubted = True
                self.tiles.forget(self.slide)
            kept = output.options.kept(plan, image, batch.tiles)
            kept[list(failed)] = False
            if kept.any():
                grid, places = image.grid, batch.reserved.places[kept]
                self.tiles.keep(
                    batch.reserved._replace(places=places),
                    self.slide,
                    plan.image,
                    (grid.rows, grid.columns),
                    plan.tiles[batch.tiles[kept]],
                )
        finally:
            self.tiles.unpin(batch.reserved)
        self.decoder.worker.give_buffer(batch.buffer)
        by_cpu = batch.pending.on_cpu
        self.log.count_decoded(cpu=by_cpu - len(failed), nvimagecodec=len(batch.tiles) - by_cpu)
        self.log.count(bytes_decoded=(len(batch.tiles) - len(failed)) * image.tile_bytes)
        self._note_failures(plan, {batch.tiles[i]: why for i, why in failed.items()}, output)

    def _note_failures(self, plan: ReadPlan, failures: Mapping[int, str], output: Output) -> None:
        for tile, reason in failures.items():
            output.failures[TileKey(self.slide, plan.image, *plan.tiles[tile].tolist())] = reason

    def _read_raw(self, plan: ReadPlan, output: Output) -> None:
        assert self._raw is not None
        image, stream = self.images[plan.image], output.stream
        addresses, failed = np.zeros(len(plan.tiles), np.int64), 0
        for part in self._raw.read(image, plan.tiles, self.background, stream):
            tiles = part.first + np.flatnonzero(part.addresses)
            addresses[tiles] = part.addresses[part.addresses > 0]
            self._paste(plan, plan.pastes_of(tiles), addresses, output)
            failures = {part.first + index: why for index, why in part.failures.items()}
            self._note_failures(plan, failures, output)
            failed += len(failures)
        decoded, blank = len(plan.tiles) - failed, len(plan.blanks)
        self.log.count(tiles_asked=len(plan.tiles) + blank, background=blank)
        self.log.count_decoded(raw=decoded)
        self.log.count(bytes_decoded=decoded * image.tile_bytes)


def tile_format(image: LevelLayout) -> TileFormat:
    """Return what a decoded tile of a level is."""
    grid = image.grid
    return TileFormat(grid.tile_height, grid.tile_width, image.channels, image.encoding.dtype)
