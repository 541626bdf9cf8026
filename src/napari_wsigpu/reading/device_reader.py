"""Regions put together in device memory: its cache, batches that are decoded to it, one paste."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.codecs.decoder import EncodedBatch
from napari_wsigpu.codecs.raw import is_raw
from napari_wsigpu.errors import (
    DeviceError,
    RegionError,
    SlideClosedError,
    SlideError,
    device_error,
)
from napari_wsigpu.gpu.device import TileFormat, Window
from napari_wsigpu.gpu.raw_reader import RawReader
from napari_wsigpu.gpu.switching import prompt_switching
from napari_wsigpu.reading.average import area_average
from napari_wsigpu.reading.cache import TileKey
from napari_wsigpu.storage.file import FileSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.color import ColorTable
    from napari_wsigpu.gpu.batch import GpuBatch
    from napari_wsigpu.gpu.device import Device, Stream
    from napari_wsigpu.gpu.nvimagecodec import NvImageCodecDecoder
    from napari_wsigpu.gpu.tiles import DeviceTiles, Reserved
    from napari_wsigpu.layout import LevelLayout
    from napari_wsigpu.reading.log import TileLog
    from napari_wsigpu.storage.source import ByteSource

BATCH_TILES = 320
BATCH_PIXEL_BYTES = 256 << 20
IN_FLIGHT = 2
SMALLEST_ROOM = 1 << 20


@dataclass
class _Reading:
    """One region on its way."""

    level: int
    image: LevelLayout
    tile: TileFormat
    window: Window
    shape: tuple[int, ...]
    blank: bool
    to_host: bool
    share: float
    keeps_whole: bool
    pixels: Any
    table: ColorTable | None
    colors: Any = None
    given: Stream | None = None
    stream: Any = None
    host: NDArray[Any] | None = None
    corrected: bool = False
    hits: int = 0
    failures: dict[TileKey, str] = field(default_factory=dict)


@dataclass
class _InFlight:
    """A batch of a region that is being decoded."""

    tiles: NDArray[np.int64]
    reserved: Reserved
    pending: GpuBatch
    room: memoryview


class DeviceReader:
    """Reads regions of one slide's levels through a device.

    Parameters
    ----------
    slide : int
        Number of the open slide, for the keys of its tiles.
    images : Mapping of int to LevelLayout
        Pyramid levels by index from 0 on.
    background : int or float
        Value of pixels that the file does not hold.
    source, decoder, tiles, log
        Where bytes come from, what decodes them, where tiles are kept, and what counts them.
    timed : callable
        Told of a level, how many of its tiles were decoded for the host, in how many seconds,
        and the device's share of them.
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
        self._slide = slide
        self._images = images
        self._background = background
        self._source = source
        self._decoder = decoder
        self._tiles = tiles
        self._log = log
        self._timed = timed
        self._raw: RawReader | None = None
        if isinstance(source, FileSource):
            self._raw = RawReader(decoder.worker.loader, source, log)
        self._lock = threading.Lock()
        self._released = False
        self._doubted = False
        self._idle_streams: list[Stream] = []
        self._idle_rooms: deque[memoryview] = deque(maxlen=2 * IN_FLIGHT)

    @property
    def device(self) -> Device:
        """The device it reads through."""
        return self._decoder.worker.device

    def read(
        self,
        level: int,
        window: Window,
        *,
        to_host: bool,
        tolerant: bool = False,
        share: float = 1.0,
        keeps_whole: bool = True,
        out: Any = None,
        stream: Any = None,
        table: ColorTable | None = None,
    ) -> Any | None:
        """Read a window of one level; outside of it, it shows the background.

        Parameters
        ----------
        level : int
            Index of the level.
        window : Window
            The region.
        to_host : bool
            Return an ndarray instead of a device array.
        tolerant : bool
            Show the background for tiles that can't be decoded, instead of raising.
        share : float
            Part of the tiles that the device decodes; the CPU decodes the rest meanwhile.
        keeps_whole : bool
            Whether tiles stay on the device that the window takes whole.
        out : device array, optional
            Where to put the pixels.
        stream : int or object with ``ptr``, optional
            A CUDA stream of the caller to work on.
        table : ColorTable, optional
            The colours that the pixels get; tiles are kept without them.

        Returns
        -------
        array, shape (height, width, channels), or (height, width) for one channel
            None if the region needs tiles that are computed, or device memory is short.

        Raises
        ------
        RegionError
            If `out` is not in the device's memory.
        TileError
            If tiles can't be decoded, with their names.
        SlideError
            If the file can't be read, or the device fails.
        """
        self._check(out)
        image = self._images[level]
        grid = image.grid
        rows = _tiles(window.top, window.height, image.height, grid.tile_height)
        columns = _tiles(window.left, window.width, image.width, grid.tile_width)
        stored: NDArray[np.bool_] = np.any(grid.byte_counts[:, rows, columns] > 0, axis=0)
        complete = bool(stored.all())
        if image.missing == "finer" and not complete:
            return None
        samples = () if window.channel is not None else (image.channels,)
        reading = _Reading(
            level=level,
            image=image,
            tile=tile_format(image),
            window=window,
            shape=(window.height, window.width, *samples),
            blank=tolerant or not complete or not _within(window, image),
            to_host=to_host,
            share=share,
            keeps_whole=keeps_whole,
            pixels=out,
            table=table,
        )
        try:
            with self.device.active():
                reading.given = None if stream is None else self.device.as_stream(stream)
                if table is not None:
                    reading.colors = self.device.colors(table)
                if self._raw is not None and is_raw(image) and window.channel is None:
                    self._read_raw(self._raw, reading, stored, rows, columns)
                else:
                    self._read(reading, stored, rows, columns)
        except MemoryError:
            return None
        except (DeviceError, SlideClosedError):
            raise
        except SlideError:
            if tolerant:
                return None
            raise
        except Exception as error:  # what CUDA and CuPy raise has no common base
            raise device_error(self.device.name, error) from error
        finally:
            if self._released:
                self.release()
        self._log.count(
            tiles_asked=stored.size,
            cache_hits=reading.hits,
            background=stored.size - int(np.count_nonzero(stored)),
        )
        self._log.note(reading.failures, report=tolerant)
        if reading.failures and not tolerant:
            raise self._log.error(reading.failures)
        return reading.host if to_host else reading.pixels

    def read_to_host(
        self,
        level: int,
        window: Window,
        halvings: int,
        *,
        tolerant: bool = False,
        share: float = 1.0,
        keeps_whole: bool = True,
        table: ColorTable | None = None,
    ) -> NDArray[Any] | None:
        """Read a window of a level, or of what 2 x 2 averages make of it, to the host.

        Parameters
        ----------
        level, tolerant, share, keeps_whole, table
            As in `read`; tiles stay that are averaged.
        window : Window
            The region in averaged pixels; within their extent, where there are halvings.
        halvings : int
            How many times the level's pixels are averaged, on the device.

        Returns
        -------
        ndarray, shape (height, width, channels), or (height, width) for one channel
            None as in `read`.

        Raises
        ------
        TileError, SlideError
            As `read` does.
        """
        if not halvings:
            return self.read(
                level,
                window,
                to_host=True,
                tolerant=tolerant,
                share=share,
                keeps_whole=keeps_whole,
                table=table,
            )
        try:
            with self.device.active():
                pixels = self._averaged(level, window, halvings, tolerant=tolerant, share=share)
        except MemoryError:
            return None
        except SlideError:
            raise
        except Exception as error:  # what CUDA and CuPy raise has no common base
            raise device_error(self.device.name, error) from error
        return pixels if pixels is None or table is None else table.recolored(pixels)

    def _averaged(
        self, level: int, window: Window, halvings: int, *, tolerant: bool, share: float
    ) -> NDArray[Any] | None:
        image, step = self._images[level], 1 << halvings
        top, left, height, width, channel = window
        samples = image.channels if channel is None else 1
        row_bytes = step * step * width * samples * image.dtype.itemsize
        rows_at_once = max(1, BATCH_PIXEL_BYTES // max(1, row_bytes))
        across = left * step, min(width * step, image.width - left * step)
        with self._stream(None, decodes=False) as stream:
            with stream:
                pixels = self._empty((height, width, samples), image.dtype)
            for start in range(0, height, rows_at_once):
                first = (top + start) * step
                count = min(rows_at_once * step, (top + height) * step - first)
                part = Window(
                    first, across[0], min(count, image.height - first), across[1], channel
                )
                finer = self.read(level, part, to_host=False, tolerant=tolerant, share=share)
                if finer is None:
                    return None
                with stream:
                    average = finer.reshape(*finer.shape[:2], samples)
                    for _ in range(halvings):
                        average = area_average(average, 2, 2)
                    pixels[start : start + rows_at_once] = average
                # Other streams may be given the memory of the finer pixels once these are let go.
                stream.synchronize()
            host = self.device.download(pixels, stream)
            stream.synchronize()
        return host if channel is None else host[..., 0]

    def _read(
        self, reading: _Reading, stored: NDArray[np.bool_], rows: slice, columns: slice
    ) -> None:
        found, here = self._tiles.find(self._slide, reading.level, rows, columns)
        corner = np.array([rows.start, columns.start])
        wanted = np.argwhere(stored & ~here) + corner
        try:
            with self._stream(reading.given, decodes=len(wanted) > 0) as stream:
                reading.stream = stream
                if reading.pixels is None:
                    reading.pixels = self._empty(reading.shape, reading.image.dtype)
                try:
                    self.device.follow(stream)
                    if reading.blank:
                        self._fill(reading)
                    if found is not None:
                        reading.hits = len(found.places)
                        addresses = found.shelf.addresses[found.places]
                        tiles = np.column_stack([addresses, np.argwhere(here) + corner])
                        self._paste(reading, self.device.rows(tiles, stream))
                    if len(wanted):
                        with prompt_switching():
                            self._decode(reading, wanted)
                    elif reading.to_host:
                        reading.host = self.device.download(reading.pixels, stream)
                finally:
                    if found is not None or not len(wanted):
                        stream.synchronize()
        finally:
            if found is not None:
                self._tiles.unpin(found)

    def _read_raw(
        self,
        raw: RawReader,
        reading: _Reading,
        stored: NDArray[np.bool_],
        rows: slice,
        columns: slice,
    ) -> None:
        image, window = reading.image, reading.window
        tiles = np.argwhere(stored) + np.array([rows.start, columns.start])
        complete = bool((image.grid.byte_counts[:, rows, columns] > 0).all())
        with self._stream(reading.given, decodes=False) as stream:
            if reading.pixels is None:
                reading.pixels = self._empty(reading.shape, image.dtype)
            try:
                self.device.follow(stream)
                if reading.blank or not complete:
                    self.device.fill(reading.pixels, self._background, stream)
                failed = raw.read(image, reading.tile, tiles, reading.pixels, window, stream)
                if reading.colors is not None:
                    self._recolor(reading, stream)
                if reading.to_host:
                    reading.host = self.device.download(reading.pixels, stream)
            finally:
                stream.synchronize()
        self._log.count_decoded(raw=len(tiles) - len(failed))
        self._log.count(bytes_decoded=(len(tiles) - len(failed)) * image.tile_bytes)
        for index, reason in failed.items():
            row, column = tiles[index].tolist()
            reading.failures[TileKey(self._slide, reading.level, row, column)] = reason

    def _recolor(self, reading: _Reading, stream: Stream) -> None:
        """Look all colours of the region up, where they are."""
        height, width, channels = reading.shape
        region = TileFormat(height, width, channels, reading.image.encoding.dtype)
        row = np.array([[self.device.address(reading.pixels), 0, 0]], np.int64)
        self.device.paste_colors(
            self.device.rows(row, stream),
            region,
            (height, width),
            reading.pixels,
            Window(0, 0, height, width),
            reading.colors,
            stream,
        )

    def _fill(self, reading: _Reading) -> None:
        """Show the background everywhere."""
        self.device.fill(reading.pixels, self._background, reading.stream)
        if reading.table is not None:
            blank = reading.table.background(self._background, reading.image.channels)
            for channel, value in enumerate(blank.tolist()):
                self.device.fill(reading.pixels[..., channel], value, reading.stream)

    def send(self, pixels: NDArray[Any], out: Any = None, stream: Any = None) -> Any:
        """Copy host pixels to a device array.

        Raises
        ------
        RegionError
            If the device has no memory for them.
        """
        self._check(out)
        try:
            with self.device.active():
                given = None if stream is None else self.device.as_stream(stream)
                with self._stream(given, decodes=False) as used:
                    target = self._empty(pixels.shape, pixels.dtype) if out is None else out
                    self.device.follow(used)
                    self.device.send(pixels, target, used)
                    used.synchronize()
        except MemoryError:
            raise RegionError(
                f"A region of {pixels.nbytes >> 20} MiB doesn't fit into the memory of "
                f"'{self.device.name}'; read it in parts."
            ) from None
        return target

    def _check(self, out: Any) -> None:
        if out is not None and not self.device.is_own(out):
            raise RegionError(f"out has to be an array in the memory of '{self.device.name}'.")

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        try:
            return self.device.empty(shape, dtype)
        except ValueError:  # more bytes than a number can count
            raise MemoryError from None

    def forget_tiles(self) -> None:
        """Drop the slide's tiles on the device."""
        self._tiles.forget(self._slide)

    def release(self) -> None:
        """Let go of streams and of the slide's tiles, and of memory that only these used."""
        self._released = True
        self.forget_tiles()
        self._tiles.trim()
        self._decoder.worker.trim()
        with self._lock:
            self._idle_streams.clear()
            self._idle_rooms.clear()

    def _decode(self, reading: _Reading, wanted: NDArray[np.int64]) -> None:
        """Read and decode tiles: a batch is read while the one before it is decoded."""
        begin = time.perf_counter()
        count = len(wanted)
        most = max(1, min(BATCH_TILES, BATCH_PIXEL_BYTES // reading.image.tile_bytes))
        most = -(-len(wanted) // -(-len(wanted) // most))
        flying: list[_InFlight] = []
        try:
            while len(wanted):
                if len(flying) == IN_FLIGHT:
                    self._finish(reading, flying.pop(0))
                try:
                    flying.append(self._begin(reading, wanted, most, only=not flying))
                except MemoryError:
                    if flying:
                        self._finish(reading, flying.pop(0))
                    elif most > 1:
                        most //= 2
                    else:
                        raise
                else:
                    wanted = wanted[len(flying[-1].tiles) :]
            while flying:
                self._finish(reading, flying.pop(0))
            if reading.to_host:
                if reading.corrected:
                    reading.host = self.device.download(reading.pixels, reading.stream)
                    self.device.record(reading.stream).synchronize()
                seconds = time.perf_counter() - begin
                self._timed(reading.image, count, seconds, reading.share)
        finally:
            for batch_in_flight in flying:
                batch_in_flight.pending.cancel()
                self._tiles.unpin(batch_in_flight.reserved)

    def _begin(
        self, reading: _Reading, wanted: NDArray[np.int64], most: int, *, only: bool
    ) -> _InFlight:
        """Read a batch of the wanted tiles and begin to decode it.

        Raises
        ------
        MemoryError
            If there is no device memory for it.
        """
        tile, size = reading.tile, reading.image.tile_bytes
        reserved = self._tiles.reserve(tile, size, min(most, len(wanted)))
        tiles = wanted[: len(reserved.places)]
        try:
            encoded = self._encoded(reading.image, tiles)
            room = encoded.view
            last = len(tiles) == len(wanted)
            pending = self._schedule(reading, encoded, reserved, last=last, only=last and only)
        except BaseException:
            self._tiles.unpin(reserved)
            raise
        return _InFlight(tiles, reserved, pending, room)

    def _schedule(
        self,
        reading: _Reading,
        encoded: EncodedBatch,
        reserved: Reserved,
        *,
        last: bool,
        only: bool,
    ) -> GpuBatch:
        pasted = False

        def paste(rows: Any) -> None:
            nonlocal pasted
            self._paste(reading, rows)
            if pasted:
                reading.corrected = True
            elif last and reading.to_host:
                reading.host = self.device.download(reading.pixels, reading.stream)
            pasted = True

        return self._decoder.schedule(
            encoded,
            reserved.slots,
            paste,
            share=reading.share,
            stream=reading.given,
            at_once=not only,
        )

    def _encoded(self, image: LevelLayout, tiles: NDArray[np.int64]) -> EncodedBatch:
        offsets, wanted = image.grid.ranges(*tiles.T)
        buffer, starts, lengths = self._source.read_joined(
            offsets.ravel(), wanted.ravel(), self._room, self._decoder.apart(image, len(tiles))
        )
        self._log.count(bytes_read=int(lengths.sum()))
        # A segment that the file was to hold, but that lies beyond its end, is no missing one.
        present = starts.reshape(offsets.shape), lengths.reshape(offsets.shape)
        return EncodedBatch(
            image, tiles, buffer, *present, wanted > 0, self._background, shared=True
        )

    def _room(self, size: int) -> memoryview:
        """Give out a buffer that is used again, since new memory costs more than to read."""
        with self._lock:
            room = self._idle_rooms.pop() if self._idle_rooms else None
        if room is None or len(room) < size:
            room = self.device.shared(max(SMALLEST_ROOM, size + size // 4), np.uint8).data
        return room

    def _paste(self, reading: _Reading, rows: Any) -> None:
        level = (reading.image.height, reading.image.width)
        to = reading.pixels, reading.window
        if reading.colors is None:
            self.device.paste(rows, reading.tile, level, *to, reading.stream)
        else:
            self.device.paste_colors(rows, reading.tile, level, *to, reading.colors, reading.stream)

    def _finish(self, reading: _Reading, batch: _InFlight) -> None:
        try:
            try:
                failed = batch.pending.wait()
            except BaseException:
                batch.pending.cancel()
                raise
            if self._decoder.verifier.reason is not None and not self._doubted:
                self._doubted = True
                self.forget_tiles()
            kept = self._to_keep(reading, batch.tiles)
            kept[list(failed)] = False
            if kept.any():
                grid, places = reading.image.grid, batch.reserved.places[kept]
                self._tiles.keep(
                    batch.reserved._replace(places=places),
                    self._slide,
                    reading.level,
                    (grid.rows, grid.columns),
                    batch.tiles[kept],
                )
        finally:
            self._tiles.unpin(batch.reserved)
        self._idle_rooms.append(batch.room)
        by_cpu = batch.pending.on_cpu
        self._log.count_decoded(cpu=by_cpu - len(failed), nvimagecodec=len(batch.tiles) - by_cpu)
        decoded = len(batch.tiles) - len(failed)
        self._log.count(bytes_decoded=decoded * reading.image.tile_bytes)
        for index, reason in failed.items():
            row, column = batch.tiles[index].tolist()
            reading.failures[TileKey(self._slide, reading.level, row, column)] = reason

    def _to_keep(self, reading: _Reading, tiles: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which tiles others may want, too."""
        if reading.keeps_whole:
            return np.ones(len(tiles), np.bool_)
        image, window = reading.image, reading.window
        tile = np.array([image.grid.tile_height, image.grid.tile_width])
        begins = tiles * tile
        ends = np.minimum(begins + tile, [image.height, image.width])
        start = window.top, window.left
        end = window.top + window.height, window.left + window.width
        partly: NDArray[np.bool_] = np.any((begins < start) | (ends > end), axis=1)
        return partly

    @contextmanager
    def _stream(self, given: Stream | None, *, decodes: bool) -> Iterator[Stream]:
        """Give out the caller's stream, the worker's, or one that is idle."""
        if given is not None:
            yield given
        elif decodes:
            yield self._decoder.worker.stream
        else:
            with self._lock:
                stream = self._idle_streams.pop() if self._idle_streams else None
            stream = stream or self.device.new_stream()
            yield stream
            with self._lock:
                self._idle_streams.append(stream)


def _tiles(start: int, length: int, extent: int, tile: int) -> slice:
    """Return the tiles of one axis that a range of pixels needs."""
    first, last = max(0, start), min(start + length, extent)
    return slice(first // tile, -(-last // tile)) if first < last else slice(0, 0)


def _within(window: Window, image: LevelLayout) -> bool:
    return (
        min(window.top, window.left) >= 0
        and window.top + window.height <= image.height
        and window.left + window.width <= image.width
    )


def tile_format(image: LevelLayout) -> TileFormat:
    """Return what a decoded tile of a level is."""
    grid = image.grid
    return TileFormat(grid.tile_height, grid.tile_width, image.channels, image.encoding.dtype)
