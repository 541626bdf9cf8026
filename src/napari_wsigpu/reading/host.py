"""`HostExecutor`: carries read plans out into host memory."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.codecs.cpu import HostSlots
from napari_wsigpu.codecs.decoder import EncodedBatch
from napari_wsigpu.codecs.raw import lies_decoded
from napari_wsigpu.reading.averages import Averages
from napari_wsigpu.reading.cache import Recurrence, TileKey
from napari_wsigpu.reading.pasting import Paste, slices_of
from napari_wsigpu.reading.plan import Wish, regions_with, tile_rect
from napari_wsigpu.reading.planning import plan_regions
from napari_wsigpu.storage.buffers import RegionMemory, TileMemory
from napari_wsigpu.storage.source import FillingSource, ScatteredSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.color import ColorTable
    from napari_wsigpu.codecs.cpu import Parts
    from napari_wsigpu.codecs.decoder import Decoder, PendingBatch
    from napari_wsigpu.model.layout import LevelLayout, PyramidLevel
    from napari_wsigpu.reading.cache import TileCache
    from napari_wsigpu.reading.log import TileLog
    from napari_wsigpu.reading.pasting import Targets
    from napari_wsigpu.reading.plan import ReadPlan
    from napari_wsigpu.storage.source import ByteSource

    Integers = NDArray[np.int64]
    # Takes the pixels of a tile, by its index in the plan; and shows one value in its place.
    Take = Callable[[int, NDArray[Any]], None]
    Fill = Callable[[int], None]
    # Where the pixels of some tiles go, if each goes to one place only.
    FindParts = Callable[[Integers], Parts | None]

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
        decoder: Decoder[HostSlots],
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

    def blank(self, image: int, table: ColorTable | None) -> Any:
        """Return what pixels show that the file does not hold."""
        if table is None:
            return self._background
        return table.background(self._background, self._images[image].channels)

    def read(self, number: int, plans: Sequence[ReadPlan], regions: Targets, wish: Wish) -> None:
        """Put the pixels of regions together.

        Parameters
        ----------
        number : int
            The image that the regions are of.
        plans : sequence of ReadPlan
            As `plan_regions` makes them.
        regions : sequence of ndarray, shape (height, width, channels), or (height, width)
            Where the pixels of each go; without channels if the wish is for one.
        wish : Wish
            How.

        Raises
        ------
        TileError
            If tiles can't be decoded, with their names.
        SlideError
            If the file can't be read.
        """
        failures = self._read(number, plans, regions, wish)
        if failures and not wish.tolerant:
            raise self._log.error(failures, regions_with(plans, (key[1:] for key in failures)))

    def read_tiles(self, plan: ReadPlan, wish: Wish) -> dict[tuple[int, int], NDArray[Any]]:
        """Return the whole tiles of a plan by row and column; those that fail are left out.

        They are cut to the image, and in the cache now.
        """
        image = self._images[plan.image]
        found: dict[tuple[int, int], NDArray[Any]] = {}
        places = list(map(tuple, plan.tiles.tolist()))

        def take(tile: int, pixels: NDArray[Any]) -> None:
            rect = tile_rect(image, *places[tile])
            found[places[tile]] = pixels[: rect.height, : rect.width]

        self._carry_out(plan, take, lambda tile: None, wish)
        return found

    def release(self) -> None:
        """Give back memory that is kept for the next plan."""
        self._bytes.clear()
        self._tile_memory.clear()

    def _read(
        self, number: int, plans: Sequence[ReadPlan], regions: Targets, wish: Wish
    ) -> dict[TileKey, str]:
        blank = self.blank(number, wish.table)
        if wish.channel is not None and wish.table is not None:
            blank = blank[wish.channel]
        covered = np.zeros(len(regions), np.bool_)
        for plan in plans:
            covered |= plan.covered
        for index in np.flatnonzero(~covered).tolist():
            regions[index][...] = blank
        failures: dict[TileKey, str] = {}
        for plan in plans:
            if len(plan.blanks):
                self._fill_blanks(plan, regions, blank)
            paste = Paste(plan, regions, wish.channel, blank)
            failures |= self._carry_out(plan, paste.take, paste.fill, wish, paste.parts)
        return failures

    def _fill_blanks(self, plan: ReadPlan, regions: Targets, blank: Any) -> None:
        for region, y, end_y, x, end_x, *_ in slices_of(plan.blanks, plan.regions.step):
            regions[region][y:end_y, x:end_x] = blank
        self._log.count(tiles_asked=len(plan.blanks), background=len(plan.blanks))

    def _carry_out(
        self, plan: ReadPlan, take: Take, fill: Fill, wish: Wish, parts: FindParts | None = None
    ) -> dict[TileKey, str]:
        """Give all tiles of a plan to who takes them."""
        image = self._images[plan.image]
        absent = self._from_cache(plan, take, wish)
        computed = plan.computed[absent]
        stored = absent[~computed] if computed.any() else absent
        if wish.keep == "recurring" and len(stored):
            recur = self._recurrence.note(plan.image, image, plan.tiles[stored])
            wish = replace(wish, keep="all" if recur else "none")
        begin = time.perf_counter()
        failures = self._decode(plan, image, stored, take, wish, parts)
        self._timed(image, len(stored), time.perf_counter() - begin)
        for tile in failures:
            fill(tile)
        named = {self._key(plan, tile): reason for tile, reason in failures.items()}
        if computed.any():
            named |= self._compute(plan, image, absent[computed], take, wish)
        self._log.note(named, report=wish.tolerant)
        return named

    def _key(self, plan: ReadPlan, tile: int) -> TileKey:
        return TileKey(self._slide, plan.image, *plan.tiles[tile].tolist())

    def _from_cache(self, plan: ReadPlan, take: Take, wish: Wish) -> Integers:
        """Give out the tiles that are in the cache, and return the others."""
        slide = self._slide if wish.table is None else ~self._slide
        tiles = self._cache.get_all(slide, plan.image, plan.tiles)
        absent = [tile for tile, pixels in enumerate(tiles) if pixels is None]
        hits = len(tiles) - len(absent)
        if hits:
            for tile, pixels in enumerate(tiles):
                if pixels is not None:
                    take(tile, pixels)
        self._log.count(tiles_asked=len(tiles), cache_hits=hits)
        return np.array(absent, np.int64)

    def _decode(
        self,
        plan: ReadPlan,
        image: LevelLayout,
        tiles: Integers,
        take: Take,
        wish: Wish,
        parts: FindParts | None,
    ) -> dict[int, str]:
        """Read and decode tiles: one batch is read while the one before it is decoded.

        But where a batch is a few large tiles, their memory is used again for the next.
        """
        ahead = image.tile_bytes <= LARGEST_AHEAD
        failures: dict[int, str] = {}
        flying: list[tuple[Integers, PendingBatch]] = []
        try:
            for batch in _batches(image, plan.tiles, tiles):
                wish.check()
                flying.append((batch, self._schedule(plan, image, batch, take, wish, parts)))
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
        take: Take,
        wish: Wish,
        parts: FindParts | None,
    ) -> PendingBatch:
        keep = wish.kept(plan, image, batch)
        kept = keep.tolist()
        coloured = wish.table is not None
        if image.tile_bytes <= self._cache.budget:
            self._cache.make_room(sum(kept) * image.tile_bytes)
        # Taken in one thread: a pool's threads would scatter it over as many heaps.
        memory = [
            self._tile_memory.take(image.tile_bytes) if stays and not coloured else None
            for stays in kept
        ]
        colours = wish.table
        alone = None if parts is None or coloured else parts(batch)
        if alone is not None:
            alone = replace(alone, only=alone.only & ~keep)
        slots = HostSlots(memory, alone)
        numbers = batch.tolist()
        if colours is None and not any(kept):
            pixels_of = slots.pixels

            def paste(indices: Sequence[int]) -> None:
                for index in indices:
                    take(numbers[index], pixels_of[index])

            return self._decoder.schedule(self._encoded(image, plan.tiles[batch]), slots, paste)

        def deliver(indices: Sequence[int]) -> None:
            for index in indices:
                pixels = slots.pixels[index]
                if colours is not None:
                    pixels = self._tile_memory.copy(colours.recolored(pixels))
                if kept[index]:
                    self._cache.put(self._kept_key(plan, numbers[index], wish), pixels)
                take(numbers[index], pixels)

        return self._decoder.schedule(self._encoded(image, plan.tiles[batch]), slots, deliver)

    def _kept_key(self, plan: ReadPlan, tile: int, wish: Wish) -> TileKey:
        key = self._key(plan, tile)
        return key if wish.table is None else key.in_srgb()

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
        self, plan: ReadPlan, image: LevelLayout, tiles: Integers, take: Take, wish: Wish
    ) -> dict[TileKey, str]:
        """Average tiles from the finer level, some at a time."""
        failures: dict[TileKey, str] = {}
        # All stored tiles pass through here for an overview, and would drive out what is kept;
        # the few below an inserted level are wanted next.
        keep = wish.keep if not image.computed or plan.image in self._inserted else "none"
        for group in self._averages.groups(plan.image, plan.tiles, tiles):
            wish.check()
            finer = self._images[group.level]
            below = Wish(
                tolerant=wish.tolerant, keep="none" if finer.computed else keep, check=wish.check
            )
            plans = plan_regions(group.level, self._images, group.held)
            failed = self._read(group.level, plans, group.held_pixels, below)
            failures |= failed
            for tile, pixels in zip(group.tiles, group.pixels, strict=True):
                average = self._averages.tile(plan.image, plan.tiles[tile], pixels)
                if wish.table is not None:
                    average = self._tile_memory.copy(wish.table.recolored(average))
                if not failed:
                    self._cache.put(self._kept_key(plan, tile, wish), average)
                take(tile, average)
            self._log.count(computed=len(group.tiles))
        return failures


def _batches(image: LevelLayout, places: Integers, tiles: Integers) -> Iterator[Integers]:
    """Cut tiles into batches that are bounded in tiles, encoded and decoded bytes."""
    most = max(1, min(BATCH_TILES, BATCH_PIXEL_BYTES // image.tile_bytes))
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
