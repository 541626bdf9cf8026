"""`HostBackend`: reads, decodes and pastes tiles in host memory."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from napari_wsigpu import native
from napari_wsigpu.codecs.cpu import CpuDecoder, HostSlots
from napari_wsigpu.codecs.decoder import EncodedBatch
from napari_wsigpu.codecs.native_format import native_format
from napari_wsigpu.codecs.raw import lies_decoded
from napari_wsigpu.native.tables import HELD, TILE
from napari_wsigpu.reading.averages import Averages
from napari_wsigpu.reading.cache import Recurrence, TileKey
from napari_wsigpu.reading.executor import Decoding, Limits, check, execute
from napari_wsigpu.reading.pasting import NO_PARTS, Paste, WholeTiles, slices_of
from napari_wsigpu.reading.plan import ReadOptions
from napari_wsigpu.reading.planning import plan_regions
from napari_wsigpu.storage.buffers import RegionMemory, TileMemory
from napari_wsigpu.storage.file import FileSource
from napari_wsigpu.storage.source import FillingSource, ScatteredSource

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.color import ColorTable
    from napari_wsigpu.codecs.decoder import PendingBatch
    from napari_wsigpu.codecs.native_format import NativeFormat
    from napari_wsigpu.model.geometry import Rect
    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.reading.cache import TileCache
    from napari_wsigpu.reading.executor import Batch
    from napari_wsigpu.reading.parts import SlideParts
    from napari_wsigpu.reading.pasting import Targets
    from napari_wsigpu.reading.plan import Keep, ReadPlan

    Integers = NDArray[np.int64]
    HostCanvas = Paste | WholeTiles

# So few tiles are decoded by the calling thread alone.
FEW_TILES = 16
MANY_READERS = 3
BATCH_BYTES, BATCH_PIXEL_BYTES = 64 << 20, 256 << 20
NATIVE_LIMITS = Limits(4096, BATCH_BYTES, BATCH_PIXEL_BYTES, 1)
PYTHON_LIMITS = Limits(512, BATCH_BYTES, BATCH_PIXEL_BYTES, 2)
# Of larger tiles, only one batch is in flight: the next one uses its memory again.
LARGEST_AHEAD = BATCH_PIXEL_BYTES // 8


class HostBackend:
    """Reads tiles of one slide from its source and decodes them on the CPU.

    The native core reads, decodes and pastes the encodings that it knows; others are decoded by
    imagecodecs on threads.

    Parameters
    ----------
    parts : SlideParts
        The slide.
    cache : TileCache
        Decoded tiles.
    timed : callable
        Called with a level, the number of its tiles that were decoded, and the seconds it took.
    """

    def __init__(
        self,
        parts: SlideParts,
        cache: TileCache,
        timed: Callable[[LevelLayout, int, float], None],
    ) -> None:
        self.parts = parts
        self._timed = timed
        self._source = parts.source
        self._cache = cache
        self._log = parts.log
        self._inserted = {level.number for level in parts.pyramid if level.inserted}
        self._bytes = RegionMemory()
        self._tile_memory = TileMemory()
        self._averages = Averages(parts, self._bytes, self._tile_memory)
        self._recurrence = Recurrence(cache)
        # More threads than cores only help those that wait for the interpreter.
        self._threads = min(parts.decoder.threads, os.cpu_count() or 1)
        self._forms: dict[int, NativeFormat | None] = {}

    def blank(self, image: int, table: ColorTable | None) -> Any:
        """Return the value of pixels that the file does not hold."""
        background = self.parts.layout.background
        if table is None:
            return background
        return table.background(background, self.parts.images[image].channels)

    def read(
        self, number: int, plans: Sequence[ReadPlan], regions: Targets, options: ReadOptions
    ) -> None:
        """Read regions of an image.

        Parameters
        ----------
        number : int
            The image.
        plans : sequence of ReadPlan
            As `plan_regions` makes them.
        regions : sequence of ndarray, shape (height, width, channels), or (height, width)
            Where the pixels of each go; without channels if the options name one.
        options : ReadOptions
            How to read.

        Raises
        ------
        TileError
            If tiles can't be decoded, with their names.
        SlideError
            If the file can't be read.
        """
        check(self.parts, self._read(number, plans, regions, options), plans, options)

    def read_tiles(
        self, plan: ReadPlan, options: ReadOptions
    ) -> dict[tuple[int, int], NDArray[Any]]:
        """Return the whole tiles of a plan by row and column, without those that fail.

        They are cut to the image, and in the cache now.
        """
        tiles = WholeTiles(plan, self.parts.images[plan.image])
        execute(self, [plan], lambda _: tiles, options)
        return tiles.found

    def read_small(self, number: int, region: Rect, pixels: NDArray[Any]) -> Keep | None:
        """Read a small region by one call of the core, in this thread and without a plan.

        Parameters
        ----------
        number : int
            The image.
        region : Rect
            A part of it.
        pixels : ndarray, shape (height, width, channels)
            Where its pixels go, as stored; the distance of pixels may be that of RGBA.

        Returns
        -------
        str or None
            None if it was read. Else it has to be planned, and tiles kept as this says: it is not
            small, lies partly outside the image, or in tiles that are missing or can't be decoded.
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
        if count > FEW_TILES:
            return "recurring"
        tiles = [row * form.columns + column for row in rows for column in columns]
        recur = self._recurrence.note(number, tiles, form.tile_bytes)
        # Threads that keep tiles wait for each other where they take memory: many are faster
        # without, although some tiles are decoded twice.
        recur = recur and self._source.readers < MANY_READERS
        table, keys, held, kept = None, [], 0, {}
        if recur or self._cache.holds_any(slide, number, rows, columns):
            keys = [TileKey(slide, number, row, column) for row in rows for column in columns]
            table = np.zeros(count, TILE)
            # `cached` holds the pixels until they are pasted.
            cached = [self._cache.get(key) for key in keys]
            for index, tile in enumerate(cached):
                if tile is not None:
                    held += 1
                    record = (0, 0, tile.ctypes.data, 0, 0, *tile.shape[:2], HELD, 0)
                    table[index] = record
                elif recur:
                    kept[index] = self._tile_memory.take(form.tile_bytes)
                    table["keep"][index] = kept[index].ctypes.data
        assert native.core is not None
        place = left, top, width, height
        read = self._source.read_by(
            native.core.read_region, address, form.level, place, pixels, table
        )
        if read < 0:
            return "all" if recur else "none"
        for index, room in kept.items():
            self._cache.put(keys[index], form.tile(room, image, cast("Any", table)[index]))
        self._log.count_read(held, count - held, read, form.tile_bytes)
        return None

    def release(self) -> None:
        """Free memory that is kept for the next plan."""
        self._bytes.clear()
        self._tile_memory.clear()

    def limits(self, number: int) -> Limits:
        """Return the limits for the tiles of an image."""
        image = self.parts.images[number]
        if self._form(number, image) is not None and isinstance(self._source, FileSource):
            return NATIVE_LIMITS
        ahead = image.tile_bytes <= LARGEST_AHEAD
        return PYTHON_LIMITS if ahead else PYTHON_LIMITS._replace(in_flight=1)

    def resolve(self, plan: ReadPlan, options: ReadOptions) -> ReadOptions:
        """Return options that say whether recurring tiles are kept."""
        if options.keep != "recurring" or not len(plan.tiles):
            return options
        image = self.parts.images[plan.image]
        numbers = plan.tiles[:, 0] * image.grid.columns + plan.tiles[:, 1]
        recur = self._recurrence.note(plan.image, numbers.tolist(), image.tile_bytes)
        return replace(options, keep="all" if recur else "none")

    def paste_cached(self, plan: ReadPlan, canvas: HostCanvas, options: ReadOptions) -> Integers:
        """Paste the tiles of a plan that are in the cache; return the indices of the others."""
        number = self.parts.number
        slide = number if options.table is None else ~number
        tiles = self._cache.get_all(slide, plan.image, plan.tiles)
        for index, pixels in enumerate(tiles):
            if pixels is not None:
                canvas.take(index, pixels)
        return np.array([index for index, tile in enumerate(tiles) if tile is None], np.int64)

    def begin(self, batch: Batch[HostCanvas], *, more: bool) -> Decoding:
        """Read a batch and start decoding it."""
        form = self._form(batch.plan.image, batch.image)
        if form is not None:
            return self._decode_natively(form, batch)
        pending = self._schedule(batch)
        finish = partial(self._finish, batch, pending)
        return Decoding(len(batch.tiles), finish, pending.cancel)

    def average(
        self, plan: ReadPlan, tiles: Integers, canvas: HostCanvas, options: ReadOptions
    ) -> dict[TileKey, str]:
        """Average tiles from the finer level, some at a time."""
        failures: dict[TileKey, str] = {}
        images, image = self.parts.images, self.parts.images[plan.image]
        # All stored tiles pass through here for an overview, and would drive out what is kept;
        # the few below an inserted level are wanted next.
        keep = options.keep if not image.computed or plan.image in self._inserted else "none"
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
            for tile, pixels in zip(group.tiles, group.pixels, strict=True):
                average = self._averages.tile(plan.image, plan.tiles[tile], pixels)
                if options.table is not None:
                    average = self._tile_memory.copy(options.table.recolored(average))
                if not failed:
                    self._cache.put(self._kept_key(plan, tile, options), average)
                canvas.take(tile, average)
            self._log.count(computed=len(group.tiles))
        return failures

    def timed(self, canvas: HostCanvas, image: LevelLayout, tiles: int, started: float) -> None:
        """Record that so many tiles were decoded since `time.perf_counter` was `started`."""
        self._timed(image, tiles, time.perf_counter() - started)

    def _read(
        self, number: int, plans: Sequence[ReadPlan], regions: Targets, options: ReadOptions
    ) -> dict[TileKey, str]:
        blank = self.blank(number, options.table)
        if options.channel is not None and options.table is not None:
            blank = blank[options.channel]
        covered = np.zeros(len(regions), np.bool_)
        for plan in plans:
            covered |= plan.covered
        for index in np.flatnonzero(~covered).tolist():
            regions[index][...] = blank

        def canvas_of(plan: ReadPlan) -> Paste:
            for region, y, end_y, x, end_x, *_ in slices_of(plan.blanks, plan.regions.step):
                regions[region][y:end_y, x:end_x] = blank
            return Paste(plan, regions, options.channel, blank)

        return execute(self, plans, canvas_of, options)

    def _form(self, number: int, image: LevelLayout) -> NativeFormat | None:
        """Describe an image to the core; None if Python reads and decodes its tiles."""
        if number not in self._forms:
            # An added decoder gets the encoded tiles; the core would bypass it.
            usual = type(self.parts.decoder) is CpuDecoder
            form = native_format(image) if usual and native.core is not None else None
            # Other sources hand out uncompressed tiles without a copy.
            uncopied = form is not None and form.is_raw and not isinstance(self._source, FileSource)
            self._forms[number] = None if uncopied else form
        return self._forms[number]

    def _decode_natively(self, form: NativeFormat, batch: Batch[HostCanvas]) -> Decoding:
        """Read, decode and paste tiles by the core: of a file now, of other sources on a thread.

        So the next batch is read from a server while this one is decoded.
        """
        assert native.core is not None
        image, plan, options, tiles = batch.image, batch.plan, batch.options, batch.tiles
        # Colors are converted, and channels chosen, once a tile is decoded.
        parts, pixel_bytes = (NO_PARTS, 0) if options.table is not None else batch.canvas.parts()
        address = form.addresses.get(pixel_bytes, 0)
        kept = batch.kept
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
            threads=1 if len(tiles) <= FEW_TILES else self._threads,
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
            running = self.parts.decoder.submit(partial(run, memory=encoded.address))

        def finish() -> dict[int, str]:
            failed = running.result()
            options.cancellation.check()
            for index, room in memory.items():
                if index not in failed:
                    pixels = form.tile(room, image, table[index])
                    self._take(batch, index, pixels, keep=kept[index], paste=not address)
            self._count_decoded(image, len(tiles) - len(failed))
            if not failed:
                return {}
            indices = list(failed)
            left = batch.part(np.array(indices, np.int64))
            some = None if encoded is None else encoded.part(indices)
            return self._finish(left, self._schedule(left, some))

        return Decoding(len(tiles), finish, lambda: running.cancel() or running.exception())

    def _finish(self, batch: Batch[HostCanvas], pending: PendingBatch) -> dict[int, str]:
        """Wait for a batch that threads decode; return why some tiles failed, by their index."""
        failed = pending.wait()
        self._count_decoded(batch.image, len(batch.tiles) - len(failed))
        failures = {int(batch.tiles[index]): reason for index, reason in failed.items()}
        for tile in failures:
            batch.canvas.fill(tile)
        return failures

    def _count_decoded(self, image: LevelLayout, tiles: int) -> None:
        """Count tiles that the CPU decoded."""
        self._log.count_decoded(cpu=tiles)
        self._log.count(bytes_decoded=tiles * image.tile_bytes)

    def _memory_of(
        self, image: LevelLayout, chosen: NDArray[np.bool_]
    ) -> dict[int, NDArray[np.uint8]]:
        """Take memory for whole tiles, by their index in a batch."""
        # Taken in one thread: a pool's threads would scatter it over as many heaps.
        indices = np.flatnonzero(chosen).tolist()
        if image.tile_bytes <= self._cache.budget:
            self._cache.make_room(len(indices) * image.tile_bytes)
        return {index: self._tile_memory.take(image.tile_bytes) for index in indices}

    def _take(
        self,
        batch: Batch[HostCanvas],
        index: int,
        pixels: NDArray[Any],
        *,
        keep: bool,
        paste: bool = True,
    ) -> None:
        """Convert the colors of a decoded tile, keep it, and paste it."""
        tile, table = int(batch.tiles[index]), batch.options.table
        if table is not None:
            pixels = self._tile_memory.copy(table.recolored(pixels))
        if keep:
            self._cache.put(self._kept_key(batch.plan, tile, batch.options), pixels)
        if paste:
            batch.canvas.take(tile, pixels)

    def _schedule(
        self, batch: Batch[HostCanvas], encoded: EncodedBatch | None = None
    ) -> PendingBatch:
        """Start decoding tiles on threads, after reading them unless they were read before."""
        keep = batch.kept
        rooms = self._memory_of(batch.image, keep & (batch.options.table is None))
        slots = HostSlots([rooms.get(index) for index in range(len(keep))])
        kept = keep.tolist()

        def deliver(indices: Sequence[int]) -> None:
            for index in indices:
                self._take(batch, index, slots.pixels[index], keep=kept[index])

        encoded = encoded or self._encoded(batch.image, batch.places)
        return self.parts.decoder.schedule(encoded, slots, deliver)

    def _kept_key(self, plan: ReadPlan, tile: int, options: ReadOptions) -> TileKey:
        key = self.parts.key(plan, tile)
        return key if options.table is None else key.in_srgb()

    def _encoded(self, image: LevelLayout, tiles: Integers) -> EncodedBatch:
        """Read encoded tiles; uncompressed ones are read later, by the thread that decodes."""
        offsets, wanted = image.grid.ranges(*tiles.T)
        background = self.parts.layout.background
        if lies_decoded(image) and isinstance(self._source, FillingSource):
            ranges = list(zip(offsets[0].tolist(), wanted[0].tolist(), strict=True))
            self._log.count(bytes_read=int(wanted.sum()))
            return EncodedBatch.filled(image, tiles, self._source.fills(ranges), background)
        if isinstance(self._source, ScatteredSource) and image.grid.planes == 1:
            reads = self._source.read_later(offsets[0], wanted[0])
            if reads is not None:
                self._log.count(bytes_read=int(wanted.sum()))
                return EncodedBatch.later(image, tiles, reads, background)
        joined = self._source.read_joined(offsets.ravel(), wanted.ravel(), self._new_buffer)
        self._log.count(bytes_read=int(joined.lengths.sum()))
        return EncodedBatch.joined(image, tiles, joined, wanted, background)

    def _new_buffer(self, size: int) -> memoryview:
        return self._bytes.empty((size,), np.dtype(np.uint8)).data
