"""`HostBackend`: read, decode and paste tiles in host memory."""

from __future__ import annotations

import os
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu import native
from napari_wsigpu.codecs.cpu import CpuDecoder, HostSlots
from napari_wsigpu.codecs.decoder import EncodedBatch
from napari_wsigpu.codecs.native_format import native_format
from napari_wsigpu.codecs.raw import is_stored_decoded
from napari_wsigpu.native.tables import HELD, MOST_TILES, TILE
from napari_wsigpu.reading.averages import Averages
from napari_wsigpu.reading.cache import Recurrence, TileKey
from napari_wsigpu.reading.executor import Decoding, Limits, check, execute
from napari_wsigpu.reading.pasting import NO_PARTS, NoPixels, Paste, WholeTiles, slices_of
from napari_wsigpu.reading.plan import ReadOptions
from napari_wsigpu.reading.planning import plan_regions
from napari_wsigpu.storage.buffers import RegionMemory, TileMemory
from napari_wsigpu.storage.file_source import FileSource
from napari_wsigpu.storage.source import FillingSource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from napari_wsigpu.codecs.color import ColorTable
    from napari_wsigpu.codecs.decoder import PendingBatch
    from napari_wsigpu.codecs.native_format import NativeFormat
    from napari_wsigpu.model.arrays import Array, ByteArray, Integers, Mask, Records
    from napari_wsigpu.model.geometry import Rect
    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.reading.cache import TileCache
    from napari_wsigpu.reading.executor import Batch
    from napari_wsigpu.reading.parts import SlideParts
    from napari_wsigpu.reading.pasting import Targets
    from napari_wsigpu.reading.plan import Keep, ReadPlan

    HostCanvas = Paste | WholeTiles

# Up to this many pixels, the calling thread decodes alone: helpers would save little time.
FEW_PIXELS = 1 << 17
MANY_READERS = 3
BATCH_BYTES, BATCH_PIXEL_BYTES = 64 << 20, 256 << 20
NATIVE_LIMITS = Limits(4096, BATCH_BYTES, BATCH_PIXEL_BYTES, 1)
PYTHON_LIMITS = Limits(512, BATCH_BYTES, BATCH_PIXEL_BYTES, 2)
# In bytes. With larger tiles, only one batch is in flight, and the next one reuses its memory.
LARGEST_AHEAD = BATCH_PIXEL_BYTES // 8


class HostBackend:
    """Reads tiles of one slide from its source and decodes them on the CPU.

    The native core reads, decodes and pastes the encodings that it supports. Other encodings are
    decoded by imagecodecs on threads.

    Parameters
    ----------
    parts : SlideParts
        The slide.
    cache : TileCache
        Cache of decoded tiles.
    """

    def __init__(self, parts: SlideParts, cache: TileCache) -> None:
        self.parts = parts
        self._source = parts.source
        self._cache = cache
        self._log = parts.log
        self._bytes = RegionMemory()
        self._tile_memory = TileMemory()
        self._averages = Averages(parts, self._tile_memory)
        self._recurrence = Recurrence(cache)
        # The core never waits for the GIL, so more threads than cores don't help.
        self._threads = min(parts.decoder.threads, os.cpu_count() or 1)
        self._forms: dict[int, NativeFormat | None] = {}

    def blank(self, image: int, table: ColorTable | None) -> float | Array:
        """Return the value of pixels that the file does not hold, in the colors of a table."""
        background = self.parts.layout.background
        if table is None:
            return background
        return table.background(background, self.parts.images[image].channels)

    def read(
        self, number: int, plans: Sequence[ReadPlan], regions: Targets, options: ReadOptions
    ) -> None:
        """Read regions of an image to host memory.

        Parameters
        ----------
        number : int
            Number of the image.
        plans : sequence of ReadPlan
            The result of `plan_regions`.
        regions : sequence of ndarray, shape (height, width, channels), or (height, width)
            Receives the pixels of each region; without channels if the options select one.
        options : ReadOptions
            How to read.

        Raises
        ------
        TileError
            If tiles fail to decode; the error names them.
        SlideError
            If the file can't be read.
        """
        check(self.parts, self._read(number, plans, regions, options), plans, options)

    def read_tiles(self, plan: ReadPlan, options: ReadOptions) -> dict[tuple[int, int], Array]:
        """Return the whole tiles of a plan by row and column, except tiles that fail.

        The tiles are cropped to the image, and cached as the options specify.
        """
        tiles = WholeTiles(plan, self.parts.images[plan.image])
        execute(self, [plan], lambda _: tiles, options)
        return tiles.found

    def check_tiles(self, plan: ReadPlan, options: ReadOptions) -> None:
        """Decode the whole tiles of a plan and drop their pixels.

        Raises
        ------
        TileError
            If tiles fail to decode; the error names them.
        """
        canvas = NoPixels(plan, self.parts.images[plan.image])
        check(self.parts, execute(self, [plan], lambda _: canvas, options), [plan], options)

    def clear_cache(self) -> None:
        """Drop the slide's decoded tiles, and start to observe again whether tiles recur."""
        self._cache.forget(self.parts.number)
        self._recurrence.forget()

    def read_small(self, number: int, region: Rect, pixels: Array) -> Keep | None:
        """Read a small region with one call of the core and without a plan.

        Parameters
        ----------
        number : int
            Number of the image.
        region : Rect
            The region.
        pixels : ndarray, shape (height, width, channels)
            Receives the pixels as stored. Pixels may be 4 bytes apart, as in RGBA.

        Returns
        -------
        str or None
            None if the region was read. Otherwise it is not small, extends beyond the image, or
            needs tiles that are missing or that the core can't decode. The caller must then plan
            it, with the returned value as `ReadOptions.keep`.
        """
        image = self.parts.images[number]
        form = self._form(number, image)
        if form is None or not isinstance(self._source, FileSource):
            return "recurring"
        address, grid, slide = form.addresses.get(pixels.strides[1]), image.grid, self.parts.number
        top, left, height, width = region
        inside = 0 <= top <= image.height - height and 0 <= left <= image.width - width
        if not address or not inside or not height or not width:
            return "recurring"
        high, wide = grid.tile_height, grid.tile_width
        rows = range(top // high, (top + height - 1) // high + 1)
        columns = range(left // wide, (left + width - 1) // wide + 1)
        count = len(rows) * len(columns)
        if count > MOST_TILES:
            return "recurring"
        recur = False
        # Threads that cache tiles contend for the allocator. With many readers, decoding some
        # tiles twice is faster.
        if not form.is_raw and self._source.readers < MANY_READERS:
            tiles = [row * form.columns + column for row in rows for column in columns]
            recur = self._recurrence.record(number, tiles, form.tile_bytes)
        table: Records | None = None
        keys, held, kept = [], 0, {}
        if recur or self._cache.holds_any(slide, number, rows, columns):
            keys = [TileKey(slide, number, row, column) for row in rows for column in columns]
            table = np.zeros(count, TILE)
            # The records hold bare addresses; `cached` keeps the pixels alive during the call.
            cached = [self._cache.get(key) for key in keys]
            for index, tile in enumerate(cached):
                if tile is not None:
                    held += 1
                    table[index] = (0, 0, tile.ctypes.data, 0, 0, *tile.shape[:2], HELD, 0)
                elif recur:
                    kept[index] = self._tile_memory.allocate(form.tile_bytes)
                    table["keep"][index] = kept[index].ctypes.data
        assert native.core is not None
        threads = self._threads_for(height * width)
        arguments = address, form.level, (left, top, width, height), pixels, table, threads
        read = self._source.call_native(native.core.read_region, *arguments)
        if read < 0:
            return "all" if recur else "none"
        for index, room in kept.items():
            assert table is not None
            self._cache.put(keys[index], form.tile(room, image, table[index]))
        self._log.count_read(held, count - held, read, form.tile_bytes)
        return None

    def release(self) -> None:
        """Free the buffers that are kept for the next plan."""
        self._bytes.clear()
        self._tile_memory.clear()

    def limits(self, number: int) -> Limits:
        """Return the limits of batches of an image."""
        image = self.parts.images[number]
        if self._form(number, image) is not None and isinstance(self._source, FileSource):
            return NATIVE_LIMITS
        ahead = image.tile_bytes <= LARGEST_AHEAD
        return PYTHON_LIMITS if ahead else PYTHON_LIMITS._replace(in_flight=1)

    def resolve(self, plan: ReadPlan, options: ReadOptions) -> ReadOptions:
        """Replace ``keep="recurring"`` with the decision whether to cache the tiles of a plan."""
        image = self.parts.images[plan.image]
        form = self._form(plan.image, image)
        if form is not None and form.is_raw and options.keep in ("recurring", "later"):
            # The operating system caches the file, and pasting from there is as fast.
            return replace(options, keep="none")
        if options.keep != "recurring" or not len(plan.tiles):
            return options
        numbers = plan.tiles[:, 0] * image.grid.columns + plan.tiles[:, 1]
        recur = self._recurrence.record(plan.image, numbers.tolist(), image.tile_bytes)
        return replace(options, keep="all" if recur else "none")

    def paste_cached(self, plan: ReadPlan, canvas: HostCanvas, options: ReadOptions) -> Integers:
        """Paste the cached tiles of a plan; return the indices of the others."""
        tiles = self._cache.get_all(self.parts.number, plan.image, plan.tiles, options.color)
        for index, pixels in enumerate(tiles):
            if pixels is not None:
                canvas.paste(index, pixels)
        return np.array([index for index, tile in enumerate(tiles) if tile is None], np.int64)

    def start(self, batch: Batch[HostCanvas], *, more: bool) -> Decoding:
        """Read a batch and start to decode it."""
        form = self._form(batch.plan.image, batch.image)
        if form is not None:
            return self._decode_natively(form, batch)
        pending = self._schedule(batch)
        finish = partial(self._finish, batch, pending)
        return Decoding(len(batch.tiles), finish, pending.cancel)

    def average(
        self, plan: ReadPlan, tiles: Integers, canvas: HostCanvas, options: ReadOptions
    ) -> dict[TileKey, str]:
        """Average tiles from the finer level, in groups that fit into memory."""
        failures: dict[TileKey, str] = {}
        images, image = self.parts.images, self.parts.images[plan.image]
        # The tiles under a computed level are four times as large as it. Caching them would cost a
        # third of the time, and evict what is on screen.
        keep = "none" if image.computed else options.keep
        for group in self._averages.groups(plan.image, plan.tiles, tiles):
            options.cancellation.check()
            finer = images[group.level]
            below = ReadOptions(
                tolerant=options.tolerant,
                keep="none" if finer.computed else keep,
                cancellation=options.cancellation,
            )
            plans = plan_regions(group.level, images, group.held)
            failed = self._read(group.level, plans, group.held_pixels, below)
            failures |= failed
            places = plan.tiles[group.tiles]
            threads = self._threads_for(int(group.held.offsets[-1]))
            found = self._averages.halves(plan.image, places, group.pixels, threads)
            rest = [index for index in range(len(places)) if index not in found]
            averages = self.parts.decoder.run_all(
                [
                    partial(self._averages.tile, plan.image, places[index], group.pixels[index])
                    for index in rest
                ]
            )
            found.update(zip(rest, averages, strict=True))
            for index, tile in enumerate(group.tiles):
                average = found[index]
                if options.table is not None:
                    average = self._tile_memory.copy(options.table.recolored(average))
                if not failed:
                    self._cache.put(self.parts.key(plan, tile, options.color), average)
                canvas.paste(tile, average)
            self._log.count(computed=len(group.tiles))
        return failures

    def _read(
        self, number: int, plans: Sequence[ReadPlan], regions: Targets, options: ReadOptions
    ) -> dict[TileKey, str]:
        """Read regions of an image; return why tiles failed."""
        blank, channel = self.blank(number, options.table), options.channel
        if channel is not None:
            blank = blank[channel] if isinstance(blank, np.ndarray) else blank
            plans = [plan for plan in plans if channel in plan.shown(channel + 1)]
        covered = np.zeros(len(regions), np.bool_)
        for plan in plans:
            covered |= plan.covered
        for index in np.flatnonzero(~covered).tolist():
            regions[index][...] = blank

        def canvas_of(plan: ReadPlan) -> Paste:
            own, shown = regions, channel
            if plan.channels is not None and shown is None:
                own = [region[..., plan.channels] for region in regions]
            elif plan.channels is not None and shown is not None:
                shown -= plan.channels.start
            for region, y, end_y, x, end_x, *_ in slices_of(plan.blanks, plan.regions.step):
                own[region][y:end_y, x:end_x] = blank
            return Paste(plan, own, shown, blank)

        return execute(self, plans, canvas_of, options)

    def _threads_for(self, pixels: int) -> int:
        """Return the number of threads for a read, so that all current reads share the cores."""
        if pixels <= FEW_PIXELS:
            return 1
        others = self._source.readers if isinstance(self._source, FileSource) else 0
        return self._threads // (others + 1)

    def _form(self, number: int, image: LevelLayout) -> NativeFormat | None:
        """Return the format of an image for the core; None if Python decodes its tiles."""
        if number not in self._forms:
            # The core would bypass a decoder supplied by the caller.
            usual = type(self.parts.decoder) is CpuDecoder
            form = native_format(image) if usual and native.core is not None else None
            # Sources other than files provide uncompressed tiles without a copy.
            uncopied = form is not None and form.is_raw and not isinstance(self._source, FileSource)
            self._forms[number] = None if uncopied else form
        return self._forms[number]

    def _decode_natively(self, form: NativeFormat, batch: Batch[HostCanvas]) -> Decoding:
        """Read, decode and paste tiles with the core.

        If the source is a file, all tiles are done when this returns. Otherwise another thread
        decodes them, so that the next batch can be read from a server at the same time.
        """
        assert native.core is not None
        image, plan, options, tiles = batch.image, batch.plan, batch.options, batch.tiles
        # The core pastes neither converted colors nor single channels (`address` is 0 then): it
        # decodes whole tiles, and `finish` pastes them.
        parts, pixel_bytes = (NO_PARTS, 0) if options.table is not None else batch.canvas.parts()
        address = form.addresses.get(pixel_bytes, 0)
        kept = batch.kept
        # Tiles to cache, and all that `finish` pastes, are decoded as a whole into separate memory.
        memory = self._memory_of(image, kept if address else np.ones_like(kept))
        table = form.records(*batch.places.T)
        if address:
            table["first"] = plan.starts[tiles]
            table["count"] = plan.starts[tiles + 1] - plan.starts[tiles]
        for index, room in memory.items():
            table["keep"][index] = room.ctypes.data
        run = partial(
            native.core.read_tiles,
            address or form.addresses[form.pixel_bytes],
            table,
            parts,
            cancel=options.cancellation.address,
            threads=self._threads_for(len(tiles) * image.grid.tile_height * image.grid.tile_width),
        )
        encoded: EncodedBatch | None = None
        running: Future[dict[int, str]] = Future()
        if isinstance(self._source, FileSource):
            with self._source.descriptor() as file:
                running.set_result(run(file=file))
            self._log.count(bytes_read=int(table["length"].sum()))
        else:
            encoded = self._encoded(image, batch.places)
            table["offset"], table["length"] = encoded.starts[0], encoded.lengths[0]
            # The core gets a bare address; `finish` keeps `encoded` and thus the bytes alive.
            running = self.parts.decoder.submit(partial(run, memory=encoded.address))

        def finish() -> dict[int, str]:
            failed = running.result()
            options.cancellation.check()
            for index, room in memory.items():
                if index not in failed:
                    pixels = form.tile(room, image, table[index])
                    self._store(batch, index, pixels, keep=kept[index], paste=not address)
            self._count_decoded(image, len(tiles) - len(failed))
            for index in np.flatnonzero(table["warnings"]).tolist():
                key = self.parts.key(plan, int(tiles[index]))
                self._log.record_doubtful(key, int(table["warnings"][index]))
            if not failed:
                return {}
            indices = list(failed)
            rest = batch.part(np.array(indices, np.int64))
            some = None if encoded is None else encoded.part(indices)
            return self._finish(rest, self._schedule(rest, some))

        return Decoding(len(tiles), finish, lambda: running.cancel() or running.exception())

    def _finish(self, batch: Batch[HostCanvas], pending: PendingBatch) -> dict[int, str]:
        """Wait for a batch that threads decode; return why tiles failed, by index."""
        failed = pending.wait()
        self._count_decoded(batch.image, len(batch.tiles) - len(failed))
        failures = {int(batch.tiles[index]): reason for index, reason in failed.items()}
        for tile in failures:
            batch.canvas.blank(tile)
        return failures

    def _count_decoded(self, image: LevelLayout, tiles: int) -> None:
        """Count tiles that the CPU has decoded."""
        self._log.count_decoded(cpu=tiles)
        self._log.count(bytes_decoded=tiles * image.tile_bytes)

    def _memory_of(self, image: LevelLayout, chosen: Mask) -> dict[int, ByteArray]:
        """Allocate memory for the chosen tiles of a batch; return it by index."""
        # Not in pool threads: malloc would spread their allocations over many heaps.
        indices = np.flatnonzero(chosen).tolist()
        if image.tile_bytes <= self._cache.budget:
            self._cache.make_room(len(indices) * image.tile_bytes)
        return {index: self._tile_memory.allocate(image.tile_bytes) for index in indices}

    def _store(
        self, batch: Batch[HostCanvas], index: int, pixels: Array, *, keep: bool, paste: bool = True
    ) -> None:
        """Convert the colors of a decoded tile, cache it and paste it."""
        tile, table = int(batch.tiles[index]), batch.options.table
        if table is not None:
            pixels = self._tile_memory.copy(table.recolored(pixels))
        if keep:
            key = self.parts.key(batch.plan, tile, batch.options.color)
            self._cache.put(key, pixels)
        if paste:
            batch.canvas.paste(tile, pixels)

    def _schedule(
        self, batch: Batch[HostCanvas], encoded: EncodedBatch | None = None
    ) -> PendingBatch:
        """Start to decode tiles on threads; read them first unless `encoded` has them."""
        keep = batch.kept
        rooms = self._memory_of(batch.image, keep & (batch.options.table is None))
        slots = HostSlots([rooms.get(index) for index in range(len(keep))])
        kept = keep.tolist()

        def deliver(indices: Sequence[int]) -> None:
            batch.options.cancellation.check()  # which ends the batch
            for index in indices:
                self._store(batch, index, slots.pixels[index], keep=kept[index])

        encoded = encoded or self._encoded(batch.image, batch.places)
        return self.parts.decoder.schedule(encoded, slots, deliver)

    def _encoded(self, image: LevelLayout, tiles: Integers) -> EncodedBatch:
        """Read encoded tiles, or open the file so that the decoding threads read them.

        Decoding threads read uncompressed tiles, and tiles that are scattered in a local file.
        """
        offsets, lengths = image.grid.ranges(*tiles.T)
        background = self.parts.layout.background
        if is_stored_decoded(image) and isinstance(self._source, FillingSource):
            ranges = list(zip(offsets[0].tolist(), lengths[0].tolist(), strict=True))
            self._log.count(bytes_read=int(lengths.sum()))
            return EncodedBatch.from_fills(image, tiles, self._source.fills(ranges), background)
        if isinstance(self._source, FileSource) and image.grid.planes == 1:
            reads = self._source.defer_reads(offsets[0], lengths[0])
            if reads is not None:
                self._log.count(bytes_read=int(lengths.sum()))
                return EncodedBatch.from_deferred(image, tiles, reads, background)
        joined = self._source.read_joined(offsets.ravel(), lengths.ravel(), self._new_buffer)
        self._log.count(bytes_read=int(joined.lengths.sum()))
        return EncodedBatch.from_joined(image, tiles, joined, lengths, background)

    def _new_buffer(self, size: int) -> memoryview:
        """Provide memory for encoded tiles, which the next batch reuses."""
        return self._bytes.empty((size,), np.dtype(np.uint8)).data
