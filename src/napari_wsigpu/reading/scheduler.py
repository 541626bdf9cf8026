"""Which tiles a region needs, and how they get there: cache, file, finer level, background."""

from __future__ import annotations

import time
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from napari_wsigpu.codecs.decoder import EncodedTile
from napari_wsigpu.codecs.raw import lies_decoded
from napari_wsigpu.display.blocks import Block, extent
from napari_wsigpu.errors import (
    SlideChangedError,
    SlideClosedError,
    SlideError,
    SlideReadError,
)
from napari_wsigpu.memory import RegionMemory, TileMemory
from napari_wsigpu.reading.average import area_average
from napari_wsigpu.reading.cache import TileKey
from napari_wsigpu.reading.mosaic import compose, touches
from napari_wsigpu.reading.span import Span, overlaps
from napari_wsigpu.storage.source import ByteRange, FillingSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.color import ColorTable
    from napari_wsigpu.codecs.decoder import PendingBatch, TileDecoder
    from napari_wsigpu.layout import LevelLayout, PyramidLevel
    from napari_wsigpu.reading.cache import TileCache
    from napari_wsigpu.reading.log import TileLog
    from napari_wsigpu.storage.source import ByteSource

BATCH_TILES = 256
BATCH_BYTES = 64 << 20
BATCH_PIXEL_BYTES = 256 << 20


class Placement(NamedTuple):
    """Where a tile's pixels go: target[...] = tile[source]."""

    key: TileKey
    target: NDArray[Any]
    source: tuple[slice, slice]

    def paste(self, tile: NDArray[Any], channel: int | None) -> None:
        """Copy the wanted part of a decoded tile to its place."""
        part = tile[self.source]
        self.target[...] = part if channel is None else part[..., channel]

    def fill(self, value: Any) -> None:
        """Show one value instead of the tile."""
        self.target[...] = value

    def leaves_some(self, image: LevelLayout) -> bool:
        """Whether others may want pixels of the tile that are not pasted here."""
        return self.target.shape[:2] != _extent(image, self.key)


class WholeTile:
    """Takes a tile as it is, cut to its level."""

    def __init__(self, key: TileKey, shape: tuple[int, int, int], dtype: np.dtype[Any]) -> None:
        self.key = key
        self._shape = shape
        self._dtype = dtype
        self.pixels: NDArray[Any] = np.empty(0, dtype)

    def paste(self, tile: NDArray[Any], channel: int | None) -> None:
        """Take a decoded tile."""
        part = tile[: self._shape[0], : self._shape[1]]
        self.pixels = part if channel is None else part[..., channel]

    def fill(self, value: Any) -> None:
        """Show one value instead of the tile."""
        self.pixels = np.broadcast_to(np.asarray(value, self._dtype), self._shape)

    def leaves_some(self, image: LevelLayout) -> bool:
        """Whether others may want it, too."""
        return True


class StoredTile(NamedTuple):
    """A tile to decode, with the place of its bytes in each plane."""

    placement: Placement | WholeTile
    segments: list[ByteRange]


class TileScheduler:
    """Reads regions of one slide's levels and associated images.

    Parameters
    ----------
    slide : int
        Number of the open slide, for the keys of its tiles.
    images : Mapping of int to LevelLayout
        Pyramid levels by number from 0 on, then the pictures that lie on those that are
        canvases; associated images by -1, -2, ...
    pyramid : sequence of PyramidLevel
        Which level is averaged from which.
    background : int or float
        Value of pixels that the file does not hold.
    source, decoder, cache, log
        Where bytes come from, what decodes them, where tiles are kept, and what counts them.
    timed : callable
        Told of a level, how many of its tiles were read and decoded, and in how many seconds.
    keeps_whole : bool
        Whether tiles are kept that a region takes whole. Where each is read but once, to keep them
        takes longer than to let them go.
    """

    def __init__(
        self,
        slide: int,
        images: Mapping[int, LevelLayout],
        pyramid: Sequence[PyramidLevel],
        background: float,
        source: ByteSource,
        decoder: TileDecoder,
        cache: TileCache,
        log: TileLog,
        timed: Callable[[LevelLayout, int, float], None],
        *,
        keeps_whole: bool,
    ) -> None:
        self._slide = slide
        self._images = images
        self._numbers = {image: number for number, image in images.items()}
        self._finer = {level.number: level.finer for level in pyramid if level.finer is not None}
        self._inserted = {level.number for level in pyramid if level.inserted}
        self._background = background
        self._source = source
        self._decoder = decoder
        self._cache = cache
        self._log = log
        self._timed = timed
        self._keeps_whole = keeps_whole
        self._memory = RegionMemory()
        self._tile_memory = TileMemory()
        self._table: ColorTable | None = None
        self._stored: TileScheduler | None = None
        self._blank: Any = background

    def recolored(self, table: ColorTable) -> TileScheduler:
        """Return a scheduler of the same tiles in other colours, which keeps them so."""
        other = copy(self)
        other._table, other._stored = table, self
        other._blank = table.background(self._background, self._images[0].channels)
        return other

    def read(
        self,
        level: int,
        rows: Span,
        columns: Span,
        channel: int | None = None,
        *,
        tolerant: bool = False,
    ) -> NDArray[Any]:
        """Read positions that lie within one level.

        Parameters
        ----------
        level : int
            Index of the level.
        rows, columns : Span
            Positions in the level's own pixels, all within its extent.
        channel : int, optional
            One channel instead of all.
        tolerant : bool
            Show the background for tiles that can't be decoded, instead of raising.

        Returns
        -------
        ndarray, shape (rows, columns, channels), or (rows, columns) for one channel
            A new array.

        Raises
        ------
        TileError
            If tiles can't be decoded, with their names.
        SlideError
            If the file can't be read.
        """
        pixels, failures = self._read(level, rows, columns, channel, tolerant=tolerant)
        if failures and not tolerant:
            raise self._log.error(failures)
        return pixels

    def read_tiles(self, level: int, tiles: Sequence[tuple[int, int]]) -> list[NDArray[Any]]:
        """Read whole tiles of a level without parts; those that fail show the background.

        Parameters
        ----------
        level : int
            Index of the level.
        tiles : sequence of (int, int)
            Row and column of each.

        Returns
        -------
        list of ndarray, shape (height, width, channels)
            Cut to the level. All but failed ones are in the cache now.

        Raises
        ------
        SlideClosedError
            If the slide was closed.
        SlideReadError, SlideChangedError
            If the file can't be read now, or is another one.
        """
        image = self._images[level]
        wanted: list[WholeTile] = []
        absent: list[WholeTile] = []
        for row, column in tiles:
            key = TileKey(self._slide, level, row, column)
            shape = (*_extent(image, key), image.channels)
            wanted.append(WholeTile(key, shape, image.dtype))
            tile = self._cache.get(self._kept(key))
            if tile is None:
                absent.append(wanted[-1])
            else:
                wanted[-1].paste(tile, None)
        self._produce(image, absent, None, tolerant=True, keep=True, patient=True)
        return [tile.pixels for tile in wanted]

    def release(self) -> None:
        """Give back memory that is kept for the next region and the next tiles."""
        self._memory.clear()
        self._tile_memory.clear()

    def _read(
        self,
        level: int,
        rows: Span,
        columns: Span,
        channel: int | None,
        *,
        tolerant: bool,
        keep: bool = True,
    ) -> tuple[NDArray[Any], dict[TileKey, str]]:
        image = self._images[level]
        if image.parts:
            return self._read_canvas(image, rows, columns, channel, tolerant=tolerant, keep=keep)
        samples = () if channel is not None else (image.channels,)
        pixels = self._memory.empty((rows.length, columns.length, *samples), image.dtype)
        absent: list[Placement] = []
        hits = 0
        for placement in self._placements(level, rows, columns, pixels):
            tile = self._cache.get(self._kept(placement.key))
            if tile is None:
                absent.append(placement)
            else:
                hits += 1
                placement.paste(tile, channel)
        failures = self._produce(image, absent, channel, tolerant=tolerant, keep=keep)
        self._log.count(tiles_asked=hits + len(absent), cache_hits=hits)
        return pixels, failures

    def _produce(
        self,
        image: LevelLayout,
        absent: Sequence[Placement | WholeTile],
        channel: int | None,
        *,
        tolerant: bool,
        keep: bool,
        patient: bool = False,
    ) -> dict[TileKey, str]:
        """Put tiles in their places that are not in the cache.

        Who is patient would rather wait for a file than show background in place of it.
        """
        stored, missing = self._locate(image, absent)
        try:
            begin = time.perf_counter()
            failures = self._decode(image, stored, channel, keep=keep)
            self._timed(image, len(stored), time.perf_counter() - begin)
        except SlideClosedError:
            raise
        except SlideError as error:
            if not tolerant or (patient and isinstance(error, SlideReadError | SlideChangedError)):
                raise
            failures = {placement.key: str(error) for placement, _ in stored}
            for placement, _ in stored:
                placement.fill(self._blank)
        for placement in missing:
            failures |= self._fill(image, placement, channel, tolerant=tolerant, keep=keep)
        self._log.note(failures, report=tolerant)
        return failures

    def _read_canvas(
        self,
        image: LevelLayout,
        rows: Span,
        columns: Span,
        channel: int | None,
        *,
        tolerant: bool,
        keep: bool,
    ) -> tuple[NDArray[Any], dict[TileKey, str]]:
        failures: dict[TileKey, str] = {}

        def read(picture: LevelLayout, rows: Span, columns: Span) -> NDArray[Any]:
            number = self._numbers[picture]
            pixels, failed = self._read(
                number, rows, columns, channel, tolerant=tolerant, keep=keep
            )
            failures.update(failed)
            return pixels

        return compose(image, rows, columns, channel, self._blank, read), failures

    def _placements(
        self, level: int, rows: Span, columns: Span, pixels: NDArray[Any]
    ) -> Iterator[Placement]:
        grid = self._images[level].grid
        across = overlaps(columns, grid.tile_width)
        for down in overlaps(rows, grid.tile_height):
            for over in across:
                yield Placement(
                    TileKey(self._slide, level, down.tile, over.tile),
                    pixels[down.target, over.target],
                    (down.source, over.source),
                )

    def _locate(
        self, image: LevelLayout, placements: Sequence[Placement | WholeTile]
    ) -> tuple[list[StoredTile], list[Placement | WholeTile]]:
        """Tell tiles that the file holds, and where, from those that it lacks."""
        keys = [placement.key for placement in placements]
        places = image.grid.segments([key.row for key in keys], [key.column for key in keys])
        stored: list[StoredTile] = []
        missing: list[Placement | WholeTile] = []
        for placement, segments in zip(placements, places, strict=True):
            if any(length for _, length in segments):
                stored.append(StoredTile(placement, [ByteRange(*place) for place in segments]))
            else:
                missing.append(placement)
        return stored, missing

    def _decode(
        self, image: LevelLayout, tiles: list[StoredTile], channel: int | None, *, keep: bool
    ) -> dict[TileKey, str]:
        """Read and decode tiles: one batch is read while the one before it is decoded."""
        failures: dict[TileKey, str] = {}
        in_flight: tuple[list[StoredTile], PendingBatch] | None = None
        try:
            for batch in _batches(image, tiles):
                before = in_flight
                in_flight = batch, self._schedule(image, batch, channel, keep=keep)
                if before is not None:
                    failures |= self._finish(*before)
            if in_flight is not None:
                failures |= self._finish(*in_flight)
                in_flight = None
        finally:
            if in_flight is not None:
                in_flight[1].cancel()
        return failures

    def _schedule(
        self, image: LevelLayout, batch: list[StoredTile], channel: int | None, *, keep: bool
    ) -> PendingBatch:
        def deliver(index: int, tile: NDArray[Any]) -> None:
            placement = batch[index].placement
            tile = self._colored(tile)
            if keep and (self._keeps_whole or channel is not None or placement.leaves_some(image)):
                self._cache.put(self._kept(placement.key), tile)
            placement.paste(tile, channel)

        return self._decoder.schedule(self._encoded(image, batch), deliver)

    def _encoded(self, image: LevelLayout, batch: list[StoredTile]) -> list[EncodedTile]:
        """Read a batch's tiles, or have each read by who decodes it if they are not encoded."""
        places = [segment for tile in batch for segment in tile.segments]
        keys = [tile.placement.key for tile in batch]
        if lies_decoded(image) and isinstance(self._source, FillingSource):
            self._log.count(bytes_read=sum(length for _, length in places))
            return [
                EncodedTile(image, key.row, key.column, (), self._background, fill)
                for key, fill in zip(keys, self._source.fills(places), strict=True)
            ]
        views = self._source.read(places)
        self._log.count(bytes_read=sum(len(view) for view in views))
        unread = iter(views)
        return [
            EncodedTile(
                image,
                key.row,
                key.column,
                tuple(
                    view if segment.length else None
                    for segment, view in zip(tile.segments, unread, strict=False)
                ),
                self._background,
            )
            for key, tile in zip(keys, batch, strict=True)
        ]

    def _finish(self, batch: list[StoredTile], pending: PendingBatch) -> dict[TileKey, str]:
        failed = pending.wait()
        for index in failed:
            batch[index].placement.fill(self._blank)
        decoded = len(batch) - len(failed)
        image = self._images[batch[0].placement.key.level]
        self._log.count_decoded(cpu=decoded)
        self._log.count(bytes_decoded=decoded * image.tile_bytes)
        return {batch[index].placement.key: reason for index, reason in failed.items()}

    def _fill(
        self,
        image: LevelLayout,
        placement: Placement | WholeTile,
        channel: int | None,
        *,
        tolerant: bool,
        keep: bool,
    ) -> dict[TileKey, str]:
        """Fill in a tile that the file does not hold."""
        if image.missing == "background":
            placement.fill(self._blank)
            self._log.count(background=1)
            return {}
        # All stored tiles pass through here for an overview, and would drive out what is kept;
        # the few below an inserted level are wanted next.
        keep = keep and (not image.computed or placement.key.level in self._inserted)
        tile, failures = self._average_of_finer(image, placement.key, tolerant=tolerant, keep=keep)
        tile = self._colored(tile)
        if not failures:
            self._cache.put(self._kept(placement.key), tile)
        placement.paste(tile, channel)
        self._log.count(computed=1)
        return failures

    def _average_of_finer(
        self, image: LevelLayout, key: TileKey, *, tolerant: bool, keep: bool
    ) -> tuple[NDArray[Any], dict[TileKey, str]]:
        number = self._finer[key.level]
        finer = self._images[number]
        grid = image.grid
        factor_y, factor_x = self._factors(key.level)
        height = min(grid.tile_height, image.height - key.row * grid.tile_height)
        width = min(grid.tile_width, image.width - key.column * grid.tile_width)
        top = min(key.row * grid.tile_height * factor_y, finer.height)
        left = min(key.column * grid.tile_width * factor_x, finer.width)
        rows = Span(top, 1, min(height * factor_y, finer.height - top))
        columns = Span(left, 1, min(width * factor_x, finer.width - left))
        memory = self._tile_memory.take(height * width * image.channels * image.dtype.itemsize)
        tile = memory.view(image.dtype).reshape(height, width, image.channels)
        tile[...] = self._background
        failures: dict[TileKey, str] = {}
        if not self._is_blank(number, rows, columns):
            stored = self._stored or self
            pixels, failures = stored._read(
                number, rows, columns, None, tolerant=tolerant, keep=keep and not finer.computed
            )
            if image.categorical:
                average = pixels[::factor_y, ::factor_x]
            else:
                average = area_average(pixels, factor_y, factor_x)
            tile[: average.shape[0], : average.shape[1]] = average
        return tile, failures

    def _kept(self, key: TileKey) -> TileKey:
        """Return the name under which a tile is kept in these colours."""
        return key if self._table is None else key.in_srgb()

    def _colored(self, tile: NDArray[Any]) -> NDArray[Any]:
        if self._table is None:
            return tile
        return self._tile_memory.copy(self._table.recolored(tile))

    def _is_blank(self, level: int, rows: Span, columns: Span) -> bool:
        """Whether neither this level nor a finer one holds any tile of a region."""
        if not rows.length or not columns.length:
            return True
        image = self._images[level]
        if image.parts:
            return not touches(image, rows, columns)
        if not image.computed and image.grid.holds_any(
            rows.start, columns.start, rows.length, columns.length
        ):
            return False
        if image.missing == "background":
            return True
        factor_y, factor_x = self._factors(level)
        finer_rows = Span(rows.start * factor_y, 1, rows.length * factor_y)
        finer_columns = Span(columns.start * factor_x, 1, columns.length * factor_x)
        return self._is_blank(self._finer[level], finer_rows, finer_columns)

    def _factors(self, level: int) -> tuple[int, int]:
        """Return how many pixels of the finer level one of this level averages, (y, x)."""
        image, finer = self._images[level], self._images[self._finer[level]]
        return (
            max(1, round(finer.height / image.height)),
            max(1, round(finer.width / image.width)),
        )


def _extent(image: LevelLayout, key: TileKey) -> tuple[int, int]:
    """Return height and width of a tile, cut to its level."""
    block = Block(key.row, key.row + 1, key.column, key.column + 1)
    rows, columns = extent(image, block)
    return rows.length, columns.length


def _batches(image: LevelLayout, tiles: list[StoredTile]) -> Iterator[list[StoredTile]]:
    """Cut tiles into batches that are bounded in tiles, encoded and decoded bytes."""
    most = max(1, min(BATCH_TILES, BATCH_PIXEL_BYTES // image.tile_bytes))
    batch: list[StoredTile] = []
    batch_bytes = 0
    for tile in tiles:
        size = sum(segment.length for segment in tile.segments)
        if batch and (len(batch) == most or batch_bytes + size > BATCH_BYTES):
            yield batch
            batch, batch_bytes = [], 0
        batch.append(tile)
        batch_bytes += size
    if batch:
        yield batch
