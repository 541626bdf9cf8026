"""`HostExecutor`: carries read plans out into host memory."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from napari_wsigpu import native
from napari_wsigpu.codecs.cpu import CpuDecoder, HostSlots
from napari_wsigpu.codecs.decoder import EncodedBatch
from napari_wsigpu.codecs.native_format import native_format
from napari_wsigpu.codecs.raw import lies_decoded
from napari_wsigpu.model.geometry import Rect
from napari_wsigpu.native.tables import DONE, HELD, PART, TILE
from napari_wsigpu.reading.averages import Averages
from napari_wsigpu.reading.cache import Recurrence, TileKey
from napari_wsigpu.reading.pasting import NO_PARTS, Paste, WholeTiles, slices_of
from napari_wsigpu.reading.plan import ReadOptions, regions_with, tile_rect
from napari_wsigpu.reading.planning import plan_regions
from napari_wsigpu.storage.buffers import RegionMemory, TileMemory
from napari_wsigpu.storage.file import FileSource
from napari_wsigpu.storage.source import FillingSource, ScatteredSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.color import ColorTable
    from napari_wsigpu.codecs.decoder import PendingBatch
    from napari_wsigpu.codecs.native_format import NativeFormat
    from napari_wsigpu.model.layout import LevelLayout, PyramidLevel
    from napari_wsigpu.reading.cache import TileCache
    from napari_wsigpu.reading.log import TileLog
    from napari_wsigpu.reading.pasting import Targets
    from napari_wsigpu.reading.plan import Keep, ReadPlan
    from napari_wsigpu.storage.source import ByteSource

    Integers = NDArray[np.int64]
    Target = Paste | WholeTiles

# So few tiles are decoded by the calling thread alone.
FEW_TILES = 16
MANY_READERS = 3
NATIVE_BATCH_TILES = 4096
BATCH_TILES = 512
BATCH_BYTES = 64 << 20
BATCH_PIXEL_BYTES = 256 << 20
LARGEST_AHEAD = BATCH_PIXEL_BYTES // 8


class HostExecutor:
    """Carries plans of one slide's images out: from the cache, the file, a finer level.

    Parameters
    ----------
    slide : int
        Number of the open slide, for the keys of its tiles.
    images : Mapping of int to LevelLayout
        Pyramid levels by number from 0 on, then the pictures that lie on those that are
        mosaics; associated images by -1, -2, ...
    pyramid : sequence of PyramidLevel
        Which level is averaged from which.
    background : int or float
        Value of pixels that the file does not hold.
    source, decoder, cache, log
        Where bytes come from, what decodes them, where tiles are kept, and what counts them.
    timed : callable
        Told of a level, how many of its tiles were read and decoded, and in how many seconds.
    """

    def __init__(
        self,
        slide: int,
        images: Mapping[int, LevelLayout],
        pyramid: Sequence[PyramidLevel],
        background: float,
        source: ByteSource,
        decoder: CpuDecoder,
        cache: TileCache,
        log: TileLog,
        timed: Callable[[LevelLayout, int, float], None],
    ) -> None:
        self._slide = slide
        self._images = images
        self._inserted = {level.number for level in pyramid if level.inserted}
        self._background = background
        self._source = source
        self._decoder = decoder
        self._cache = cache
        self._log = log
        self._timed = timed
        self._bytes = RegionMemory()
        self._tile_memory = TileMemory()
        self._averages = Averages(images, pyramid, background, self._bytes, self._tile_memory)
        self._recurrence = Recurrence(cache)
        # More threads than cores only help those that wait for the interpreter.
        self._threads = min(decoder.threads, os.cpu_count() or 1)
        self._forms: dict[int, NativeFormat | None] = {}

    def blank(self, image: int, table: ColorTable | None) -> Any:
        """Return what pixels show that the file does not hold."""
        if table is None:
            return self._background
        return table.background(self._background, self._images[image].channels)

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
        image = self._images[number]
        form = self._form(number, image)
        if form is None or not isinstance(self._source, FileSource):
            return "recurring"
        address, grid, slide = form.addresses.get(pixels.strides[1]), image.grid, self._slide
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
        recur, held = self._recurrence.note(number, tiles, form.tile_bytes), 0
        # Threads that keep tiles wait for each other where they take memory: many are faster
        # without, although some tiles are decoded twice.
        recur = recur and self._source.readers < MANY_READERS
        if recur or self._cache.holds_any(slide, number, rows, columns):
            few = _FewTiles(image, TileKey(slide, number, rows.start, columns.start), region)
            with self._source.descriptor() as file:
                held, read = self._read_few(form, few, file, pixels, keep=recur)
        else:
            assert native.core is not None
            place = left, top, width, height
            read = self._source.read_by(native.core.read_region, address, form.level, place, pixels)
        if read < 0:
            return "all" if recur else "none"
        self._log.count_read(held, count - held, read, form.tile_bytes)
        return None

    def _read_few(
        self, form: NativeFormat, few: _FewTiles, file: int, pixels: NDArray[Any], *, keep: bool
    ) -> tuple[int, int]:
        """Paste tiles of a small region that are cached, and decode the others.

        Returns
        -------
        held : int
            How many tiles were cached.
        read : int
            How many bytes were read, or -1 if a tile is missing or can't be decoded.
        """
        assert native.core is not None
        image, held, first = few.image, 0, int(pixels.ctypes.data)
        pitch, pixel = pixels.strides[:2]
        tiles: list[tuple[int, ...]] = []
        parts: list[tuple[int, ...]] = []
        rooms: dict[int, tuple[TileKey, NDArray[np.uint8]]] = {}
        cached = []  # alive until they are pasted
        for number, (key, rect, y, x) in enumerate(few.parts()):
            offset, length, height, width = few.stored(key)
            found = self._cache.get(key)
            place, status = 0, DONE
            if found is not None:
                held += 1
                cached.append(found)
                length, place, status = 0, found.ctypes.data, HELD
                height, width = found.shape[:2]
            elif not length:
                return held, -1
            elif keep:
                room = self._tile_memory.take(image.tile_bytes)
                rooms[number] = key, room
                place = room.ctypes.data
            tiles.append((offset, length, place, number, 1, height, width, status, 0))
            target = first + y * pitch + x * pixel
            parts.append((target, pitch, rect.left, rect.top, rect.width, rect.height))
        table = np.array(tiles, TILE)
        address = form.addresses[pixel]
        if native.core.read_tiles(address, table, np.array(parts, PART), file=file):
            return held, -1
        for number, (key, room) in rooms.items():
            self._cache.put(key, form.tile(room, image, table[number]))
        return held, int(table["length"].sum())

    def read(
        self, number: int, plans: Sequence[ReadPlan], regions: Targets, options: ReadOptions
    ) -> None:
        """Put the pixels of regions together.

        Parameters
        ----------
        number : int
            The image that the regions are of.
        plans : sequence of ReadPlan
            As `plan_regions` makes them.
        regions : sequence of ndarray, shape (height, width, channels), or (height, width)
            Where the pixels of each go; without channels if the options name one.
        options : ReadOptions
            How.

        Raises
        ------
        TileError
            If tiles can't be decoded, with their names.
        SlideError
            If the file can't be read.
        """
        failures = self._read(number, plans, regions, options)
        if failures and not options.tolerant:
            raise self._log.error(failures, regions_with(plans, (key[1:] for key in failures)))

    def read_tiles(
        self, plan: ReadPlan, options: ReadOptions
    ) -> dict[tuple[int, int], NDArray[Any]]:
        """Return the whole tiles of a plan by row and column; those that fail are left out.

        They are cut to the image, and in the cache now.
        """
        tiles = WholeTiles(plan, self._images[plan.image])
        self._carry_out(plan, tiles, options)
        return tiles.found

    def release(self) -> None:
        """Give back memory that is kept for the next plan."""
        self._bytes.clear()
        self._tile_memory.clear()

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
        failures: dict[TileKey, str] = {}
        for plan in plans:
            channel, pixels = options.channel, regions
            if plan.channels is not None and channel is None:
                pixels = [region[..., plan.channels] for region in regions]
            elif plan.channels is not None and channel is not None:
                if not plan.channels.start <= channel < plan.channels.stop:
                    continue
                channel -= plan.channels.start
            if len(plan.blanks):
                self._fill_blanks(plan, pixels, blank)
            failures |= self._carry_out(plan, Paste(plan, pixels, channel, blank), options)
        return failures

    def _fill_blanks(self, plan: ReadPlan, regions: Targets, blank: Any) -> None:
        for region, y, end_y, x, end_x, *_ in slices_of(plan.blanks, plan.regions.step):
            regions[region][y:end_y, x:end_x] = blank
        self._log.count(tiles_asked=len(plan.blanks), background=len(plan.blanks))

    def _carry_out(self, plan: ReadPlan, paste: Target, options: ReadOptions) -> dict[TileKey, str]:
        """Paste all tiles of a plan: from the cache, from the file, or from a finer level."""
        image = self._images[plan.image]
        absent = self._from_cache(plan, paste, options)
        computed = plan.computed[absent]
        stored = absent[~computed] if computed.any() else absent
        if options.keep == "recurring" and len(plan.tiles):
            numbers = plan.tiles[:, 0] * image.grid.columns + plan.tiles[:, 1]
            recur = self._recurrence.note(plan.image, numbers.tolist(), image.tile_bytes)
            options = replace(options, keep="all" if recur else "none")
        begin = time.perf_counter()
        failures = self._decode(plan, image, stored, paste, options)
        self._timed(image, len(stored), time.perf_counter() - begin)
        for tile in failures:
            paste.fill(tile)
        named = {self._key(plan, tile): reason for tile, reason in failures.items()}
        if computed.any():
            named |= self._compute(plan, image, absent[computed], paste, options)
        self._log.note(named, report=options.tolerant)
        return named

    def _key(self, plan: ReadPlan, tile: int) -> TileKey:
        return TileKey(self._slide, plan.image, *plan.tiles[tile].tolist())

    def _from_cache(self, plan: ReadPlan, paste: Target, options: ReadOptions) -> Integers:
        """Paste the tiles that are in the cache, and return the others."""
        slide = self._slide if options.table is None else ~self._slide
        tiles = self._cache.get_all(slide, plan.image, plan.tiles)
        absent = [tile for tile, pixels in enumerate(tiles) if pixels is None]
        hits = len(tiles) - len(absent)
        if hits:
            for tile, pixels in enumerate(tiles):
                if pixels is not None:
                    paste.take(tile, pixels)
        self._log.count(tiles_asked=len(tiles), cache_hits=hits)
        return np.array(absent, np.int64)

    def _decode(
        self,
        plan: ReadPlan,
        image: LevelLayout,
        tiles: Integers,
        paste: Target,
        options: ReadOptions,
    ) -> dict[int, str]:
        """Read, decode and paste tiles: by the native core if it knows their encoding.

        Returns
        -------
        dict of int to str
            Why tiles, by their index in the plan, can't be decoded.
        """
        form = self._form(plan.image, image)
        if form is None:
            return self._decode_in_python(plan, image, tiles, paste, options)
        failures: dict[int, str] = {}
        for batch in _batches(image, plan.tiles, tiles, NATIVE_BATCH_TILES):
            failures |= self._decode_natively(form, plan, image, batch, paste, options)
        return failures

    def _form(self, number: int, image: LevelLayout) -> NativeFormat | None:
        """Describe an image to the core; None if Python reads and decodes its tiles."""
        if number not in self._forms:
            # An added decoder gets the encoded tiles; the core would bypass it.
            usual = type(self._decoder) is CpuDecoder
            form = native_format(image) if usual and native.core is not None else None
            # Other sources hand out uncompressed tiles without a copy.
            uncopied = form is not None and form.is_raw and not isinstance(self._source, FileSource)
            self._forms[number] = None if uncopied else form
        return self._forms[number]

    def _decode_natively(
        self,
        form: NativeFormat,
        plan: ReadPlan,
        image: LevelLayout,
        tiles: Integers,
        paste: Target,
        options: ReadOptions,
    ) -> dict[int, str]:
        """Read, decode and paste tiles by the core; Python decodes those that it refuses."""
        assert native.core is not None
        grid = image.grid
        rows, columns = plan.tiles[tiles].T
        table = np.zeros(len(tiles), TILE)
        table["offset"] = grid.offsets[0, rows, columns]
        table["length"] = grid.byte_counts[0, rows, columns]
        table["height"] = np.minimum(grid.tile_height, image.height - rows * grid.tile_height)
        table["width"] = np.minimum(grid.tile_width, image.width - columns * grid.tile_width)
        # Colors are converted, and channels chosen, once a tile is decoded.
        parts, pixel_bytes = (NO_PARTS, 0) if options.table is not None else paste.parts()
        address = form.addresses.get(pixel_bytes, 0)
        direct = address != 0
        if direct:
            table["first"] = plan.starts[tiles]
            table["count"] = plan.starts[tiles + 1] - plan.starts[tiles]
        kept = options.kept(plan, image, tiles)
        memory = self._memory_of(image, kept if direct else np.ones_like(kept))
        for index, room in memory.items():
            table["keep"][index] = room.ctypes.data
        threads = 1 if len(tiles) <= FEW_TILES else self._threads
        run = partial(
            native.core.read_tiles,
            address or form.addresses[form.pixel_bytes],
            table,
            parts,
            cancel=options.cancellation.address,
            threads=threads,
        )
        encoded: EncodedBatch | None = None
        if isinstance(self._source, FileSource):
            with self._source.descriptor() as file:
                failed = run(file=file)
            self._log.count(bytes_read=int(table["length"].sum()))
        else:
            encoded = self._encoded(image, plan.tiles[tiles])
            table["offset"], table["length"] = encoded.starts[0], encoded.lengths[0]
            failed = run(memory=encoded.address)
        options.cancellation.check()
        for index, room in memory.items():
            if index not in failed:
                pixels = form.tile(room, image, table[index])
                self._take(
                    plan,
                    int(tiles[index]),
                    pixels,
                    options,
                    None if direct else paste,
                    keep=kept[index],
                )
        decoded = len(tiles) - len(failed)
        self._log.count_decoded(cpu=decoded)
        self._log.count(bytes_decoded=decoded * image.tile_bytes)
        if not failed:
            return {}
        left = tiles[list(failed)]
        if encoded is None:
            return self._decode_in_python(plan, image, left, paste, options)
        encoded = encoded.part(list(failed))
        return self._finish(image, left, self._schedule(plan, image, left, paste, options, encoded))

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
        plan: ReadPlan,
        tile: int,
        pixels: NDArray[Any],
        options: ReadOptions,
        paste: Target | None,
        *,
        keep: bool,
    ) -> None:
        """Convert the colors of a decoded tile, keep it, and paste it."""
        if options.table is not None:
            pixels = self._tile_memory.copy(options.table.recolored(pixels))
        if keep:
            self._cache.put(self._kept_key(plan, tile, options), pixels)
        if paste is not None:
            paste.take(tile, pixels)

    def _decode_in_python(
        self,
        plan: ReadPlan,
        image: LevelLayout,
        tiles: Integers,
        paste: Target,
        options: ReadOptions,
    ) -> dict[int, str]:
        """Decode tiles by imagecodecs: one batch is read while the one before it is decoded.

        But where a batch is a few large tiles, their memory is used again for the next.
        """
        ahead = image.tile_bytes <= LARGEST_AHEAD
        failures: dict[int, str] = {}
        flying: list[tuple[Integers, PendingBatch]] = []
        try:
            for batch in _batches(image, plan.tiles, tiles, BATCH_TILES):
                options.cancellation.check()
                flying.append((batch, self._schedule(plan, image, batch, paste, options)))
                if len(flying) > ahead:
                    failures |= self._finish(image, *flying.pop(0))
            while flying:
                failures |= self._finish(image, *flying.pop(0))
        finally:
            for _, pending in flying:
                pending.cancel()
        return failures

    def _schedule(
        self,
        plan: ReadPlan,
        image: LevelLayout,
        batch: Integers,
        paste: Target,
        options: ReadOptions,
        encoded: EncodedBatch | None = None,
    ) -> PendingBatch:
        """Begin to decode tiles, which are read now unless they were before."""
        keep = options.kept(plan, image, batch)
        rooms = self._memory_of(image, keep & (options.table is None))
        slots = HostSlots([rooms.get(index) for index in range(len(batch))])
        kept, numbers = keep.tolist(), batch.tolist()

        def deliver(indices: Sequence[int]) -> None:
            for index in indices:
                pixels = slots.pixels[index]
                self._take(plan, numbers[index], pixels, options, paste, keep=kept[index])

        encoded = encoded or self._encoded(image, plan.tiles[batch])
        return self._decoder.schedule(encoded, slots, deliver)

    def _kept_key(self, plan: ReadPlan, tile: int, options: ReadOptions) -> TileKey:
        key = self._key(plan, tile)
        return key if options.table is None else key.in_srgb()

    def _encoded(self, image: LevelLayout, tiles: Integers) -> EncodedBatch:
        """Read tiles, or have each read by who decodes it if they are not encoded."""
        offsets, wanted = image.grid.ranges(*tiles.T)
        if lies_decoded(image) and isinstance(self._source, FillingSource):
            ranges = list(zip(offsets[0].tolist(), wanted[0].tolist(), strict=True))
            self._log.count(bytes_read=int(wanted.sum()))
            return EncodedBatch.filled(image, tiles, self._source.fills(ranges), self._background)
        if isinstance(self._source, ScatteredSource) and image.grid.planes == 1:
            reads = self._source.read_later(offsets[0], wanted[0])
            if reads is not None:
                self._log.count(bytes_read=int(wanted.sum()))
                return EncodedBatch.later(image, tiles, reads, self._background)
        joined = self._source.read_joined(offsets.ravel(), wanted.ravel(), self._new_buffer)
        self._log.count(bytes_read=int(joined.lengths.sum()))
        return EncodedBatch.joined(image, tiles, joined, wanted, self._background)

    def _new_buffer(self, size: int) -> memoryview:
        return self._bytes.empty((size,), np.dtype(np.uint8)).data

    def _finish(self, image: LevelLayout, batch: Integers, pending: PendingBatch) -> dict[int, str]:
        failed = pending.wait()
        decoded = len(batch) - len(failed)
        self._log.count_decoded(cpu=decoded)
        self._log.count(bytes_decoded=decoded * image.tile_bytes)
        return {int(batch[index]): reason for index, reason in failed.items()}

    def _compute(
        self,
        plan: ReadPlan,
        image: LevelLayout,
        tiles: Integers,
        paste: Target,
        options: ReadOptions,
    ) -> dict[TileKey, str]:
        """Average tiles from the finer level, some at a time."""
        failures: dict[TileKey, str] = {}
        # All stored tiles pass through here for an overview, and would drive out what is kept;
        # the few below an inserted level are wanted next.
        keep = options.keep if not image.computed or plan.image in self._inserted else "none"
        for group in self._averages.groups(plan.image, plan.tiles, tiles):
            options.cancellation.check()
            finer = self._images[group.level]
            below = ReadOptions(
                tolerant=options.tolerant,
                keep="none" if finer.computed else keep,
                cancellation=options.cancellation,
            )
            plans = plan_regions(group.level, self._images, group.held)
            failed = self._read(group.level, plans, group.held_pixels, below)
            failures |= failed
            for tile, pixels in zip(group.tiles, group.pixels, strict=True):
                average = self._averages.tile(plan.image, plan.tiles[tile], pixels)
                if options.table is not None:
                    average = self._tile_memory.copy(options.table.recolored(average))
                if not failed:
                    self._cache.put(self._kept_key(plan, tile, options), average)
                paste.take(tile, average)
            self._log.count(computed=len(group.tiles))
        return failures


class _FewTiles(NamedTuple):
    """The tiles of a small region inside an image; `first` is the one at its upper left."""

    image: LevelLayout
    first: TileKey
    region: Rect

    def parts(self) -> Iterator[tuple[TileKey, Rect, int, int]]:
        """Yield the key of each tile, its part in the region, and the part's position there."""
        grid, (top, left, height, width) = self.image.grid, self.region
        slide, level, first_row, first_column = self.first
        for row in range(first_row, (top + height - 1) // grid.tile_height + 1):
            begin_y = row * grid.tile_height
            y, end_y = max(top, begin_y), min(top + height, begin_y + grid.tile_height)
            for column in range(first_column, (left + width - 1) // grid.tile_width + 1):
                begin_x = column * grid.tile_width
                x, end_x = max(left, begin_x), min(left + width, begin_x + grid.tile_width)
                rect = Rect(y - begin_y, x - begin_x, end_y - y, end_x - x)
                yield TileKey(slide, level, row, column), rect, y - top, x - left

    def stored(self, key: TileKey) -> tuple[int, int, int, int]:
        """Return offset, length, height and width of a tile's part of the image."""
        grid, place = self.image.grid, (0, key.row, key.column)
        *_, height, width = tile_rect(self.image, key.row, key.column)
        return int(grid.offsets[place]), int(grid.byte_counts[place]), height, width


def _batches(
    image: LevelLayout, places: Integers, tiles: Integers, at_once: int
) -> Iterator[Integers]:
    """Cut tiles into batches that are bounded in tiles, encoded and decoded bytes."""
    most = max(1, min(at_once, BATCH_PIXEL_BYTES // image.tile_bytes))
    if not len(tiles):
        return
    sizes = image.grid.byte_counts[:, places[tiles, 0], places[tiles, 1]].sum(axis=0)
    past = np.cumsum(sizes)
    first = 0
    while first < len(tiles):
        before = past[first - 1] if first else 0
        fitting = int(np.searchsorted(past, before + BATCH_BYTES, "right")) - first
        last = first + max(1, min(most, fitting))
        yield tiles[first:last]
        first = last
