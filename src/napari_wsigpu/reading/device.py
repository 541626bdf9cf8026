"""`DeviceBackend`: decodes and pastes tiles in device memory."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from napari_wsigpu.codecs.decoder import EncodedBatch
from napari_wsigpu.codecs.raw import is_raw
from napari_wsigpu.gpu.device.device import TileFormat
from napari_wsigpu.gpu.device.switching import prompt_switching
from napari_wsigpu.gpu.device.tables import PASTE
from napari_wsigpu.gpu.transfer.raw_reader import RawReader
from napari_wsigpu.model.errors import RegionError, SlideError, device_error
from napari_wsigpu.reading.executor import Decoding, Limits, check, execute
from napari_wsigpu.storage.file import FileSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.gpu.device.cuda import CudaDevice
    from napari_wsigpu.gpu.device.device import Stream
    from napari_wsigpu.gpu.jpeg.batch import GpuBatch
    from napari_wsigpu.gpu.jpeg.nvimagecodec import NvImageCodecDecoder
    from napari_wsigpu.gpu.transfer.tiles import DeviceTiles, Reserved
    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.reading.cache import TileKey
    from napari_wsigpu.reading.executor import Batch
    from napari_wsigpu.reading.parts import SlideParts
    from napari_wsigpu.reading.plan import Pastes, ReadOptions, ReadPlan

    Integers = NDArray[np.int64]

Result = TypeVar("Result")

NO_LIMIT = 1 << 60
LIMITS = Limits(1024, None, 256 << 20, 2)
# Raw tiles are cut into batches by `RawReader`, which reads one while it copies another.
RAW_LIMITS = Limits(NO_LIMIT, None, NO_LIMIT, 1)


@dataclass
class DeviceCanvas:
    """The pixels of regions in device memory, one region after another.

    Attributes
    ----------
    pixels : device array, shape (pixels, channels), or (pixels,) for one channel
        The pixels.
    stream : Stream
        The order of all work on them.
    offsets : ndarray of int64
        Index of each region's first pixel.
    options : ReadOptions
        How to read.
    share : float
        Part of the tiles that the device decodes; the CPU decodes the others.
    colors : device array or None
        Color table.
    pinned : list of Reserved
        Places of cached tiles that the stream may still read.
    decoded : list of (LevelLayout, int, float)
        Levels whose tiles were decoded, how many, and when that started.
    """

    pixels: Any
    stream: Stream
    offsets: Integers
    options: ReadOptions
    share: float
    colors: Any
    pinned: list[Reserved] = field(default_factory=list)
    decoded: list[tuple[LevelLayout, int, float]] = field(default_factory=list)


class DeviceBackend:
    """Decodes tiles of one slide on a device, and keeps them in its memory.

    Parameters
    ----------
    parts : SlideParts
        The slide.
    decoder : NvImageCodecDecoder
        Decodes batches.
    tiles : DeviceTiles
        Decoded tiles.
    timed : callable
        Called with a level, the number of its tiles that were decoded for the host, the seconds
        it took, and the device's share of them.

    Attributes
    ----------
    parts, decoder, tiles
        As given.
    device : CudaDevice
        The device.
    """

    def __init__(
        self,
        parts: SlideParts,
        decoder: NvImageCodecDecoder,
        tiles: DeviceTiles,
        timed: Callable[[LevelLayout, int, float, float], None],
    ) -> None:
        self.parts = parts
        self.decoder = decoder
        self.tiles = tiles
        self.device = decoder.worker.device
        self._worker = decoder.worker
        self._timed = timed
        self._raw: RawReader | None = None
        if isinstance(parts.source, FileSource):
            count = parts.log.count
            loader = self._worker.loader
            self._raw = RawReader(loader, parts.source, lambda size: count(bytes_read=size))
        self._doubted = False
        self._released = False

    def read(
        self,
        number: int,
        plans: Sequence[ReadPlan],
        offsets: Integers,
        options: ReadOptions,
        *,
        to_host: bool,
        share: float = 1.0,
        out: Any = None,
        stream: Any = None,
    ) -> Any | None:
        """Read regions of an image.

        Parameters
        ----------
        number : int
            The image.
        plans : sequence of ReadPlan
            As `plan_regions` makes them.
        offsets : ndarray of int64
            `Regions.offsets` of the regions.
        options : ReadOptions
            How to read; tiles are kept without its colors.
        to_host : bool
            Return an ndarray instead of a device array.
        share : float
            Part of the tiles that the device decodes; the CPU decodes the others.
        out : device array, optional
            Where to put the pixels, of as many bytes.
        stream : int or object with ``ptr``, optional
            CUDA stream of the caller to work on.

        Returns
        -------
        array, shape (pixels, channels), or (pixels,) for one channel
            Region after region. None if they need tiles that are computed, or device memory is
            short.

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
        if any(plan.computed.any() for plan in plans):
            return None
        if any(len(plan.blanks) for plan in plans[1:]):
            return None  # in a picture above others, even the background hides what is below
        if any(plan.channels is not None for plan in plans):
            return None  # the device pastes all channels of a pixel
        image = self.parts.images[number]
        samples = () if options.channel is not None else (image.channels,)
        shape = (int(offsets[-1]), *samples)
        try:
            with self.device.active(), self._stream(stream) as used:
                pixels = self._empty(shape, image.dtype) if out is None else out.reshape(shape)
                colors = None if options.table is None else self.device.colors(options.table)
                canvas = DeviceCanvas(pixels, used, offsets, options, share, colors)
                self.device.follow(used)
                try:
                    if not plans or _shows_background(plans, options):
                        self._fill(image, canvas)
                    with prompt_switching():
                        failures = execute(self, plans, lambda _: canvas, options)
                    if to_host:
                        pixels = self.device.download(pixels, used)
                finally:
                    used.synchronize()
                    for reserved in canvas.pinned:
                        self.tiles.unpin(reserved)
                for level, tiles, started in canvas.decoded if to_host else ():
                    self._timed(level, tiles, time.perf_counter() - started, share)
        except MemoryError:
            return None
        except SlideError:
            raise
        except Exception as error:  # what CUDA and CuPy raise has no common base
            raise device_error(self.device.name, error) from error
        finally:
            if self._released:
                self.release()
        check(self.parts, failures, plans, options)
        return pixels

    def send(self, pixels: NDArray[Any], out: Any = None, stream: Any = None) -> Any:
        """Copy host pixels to a device array.

        Raises
        ------
        RegionError
            If the device has no memory for them.
        """
        self._check(out)

        def task(used: Stream) -> Any:
            target = self._empty(pixels.shape, pixels.dtype) if out is None else out
            self.device.send(pixels, target, used)
            return target

        try:
            return self.work(task, stream)
        except MemoryError:
            raise _too_large(pixels.nbytes, self.device.name) from None

    def fetch(self, pixels: Any) -> NDArray[Any]:
        """Copy a device array to the host."""
        return self.work(partial(self.device.download, pixels))

    def drop_tiles(self, level: int, tiles: Integers) -> None:
        """Drop some of a level's tiles on the device; see `DeviceTiles.drop`."""
        self.tiles.drop(self.parts.number, level, tiles)

    def forget_tiles(self) -> None:
        """Drop the slide's tiles on the device."""
        self.tiles.forget(self.parts.number)

    def release(self) -> None:
        """Free the slide's tiles, and memory that only these used."""
        self._released = True
        self.forget_tiles()
        self.tiles.trim()
        self._worker.trim()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return a new device array.

        Raises
        ------
        RegionError
            If the device has no memory for it.
        """
        try:
            return self._empty(shape, dtype)
        except MemoryError:
            raise _too_large(int(np.prod(shape)) * dtype.itemsize, self.device.name) from None

    def work(self, task: Callable[[Stream], Result], stream: Any = None) -> Result:
        """Call a task with a stream, or with the caller's, and wait for what it submits.

        Raises
        ------
        DeviceError
            If the device fails.
        """
        try:
            with self.device.active(), self._stream(stream) as used:
                self.device.follow(used)
                try:
                    return task(used)
                finally:
                    # Other streams may be given memory that is released now.
                    used.synchronize()
        except (MemoryError, SlideError):
            raise
        except Exception as error:  # what CUDA and CuPy raise has no common base
            raise device_error(self.device.name, error) from error

    def limits(self, number: int) -> Limits:
        """Return the limits for the tiles of an image."""
        return RAW_LIMITS if self._reads_raw(self.parts.images[number]) else LIMITS

    def resolve(self, plan: ReadPlan, options: ReadOptions) -> ReadOptions:
        """Return options that say whether recurring tiles are kept: here, all are."""
        return options

    def paste_cached(self, plan: ReadPlan, canvas: DeviceCanvas, options: ReadOptions) -> Integers:
        """Paste the tiles of a plan that are in the cache; return the indices of the others."""
        reserved, cached = self.tiles.find(self.parts.number, plan.image, plan.tiles)
        if reserved is not None:
            canvas.pinned.append(reserved)
            addresses = np.zeros(len(cached), np.int64)
            addresses[cached] = reserved.slots.addresses
            self._paste(plan, plan.pastes_of(np.flatnonzero(cached)), addresses, canvas)
        return np.flatnonzero(~cached)

    def begin(self, batch: Batch[DeviceCanvas], *, more: bool) -> Decoding:
        """Read a batch and start decoding it.

        Raises
        ------
        MemoryError
            If there is no device memory for any tile.
        """
        if self._reads_raw(batch.image):
            failures = self._read_raw(batch)
            return Decoding(len(batch.tiles), lambda: failures, lambda: None)
        image = batch.image
        reserved = self.tiles.reserve(tile_format(image), image.tile_bytes, len(batch.tiles))
        batch = batch.part(slice(len(reserved.places)))
        addresses = np.zeros(len(batch.plan.tiles), np.int64)
        addresses[batch.tiles] = reserved.slots.addresses

        def deliver(indices: Sequence[int]) -> None:
            ready = batch.tiles if len(indices) == len(batch.tiles) else batch.tiles[indices]
            self._paste(batch.plan, batch.plan.pastes_of(ready), addresses, batch.canvas)

        try:
            canvas = batch.canvas
            encoded = self.encoded(image, batch.places, canvas.share)
            buffer = encoded.view
            pending = self.decoder.schedule(
                encoded,
                reserved.slots,
                deliver,
                canvas.stream,
                share=canvas.share,
                at_once=more,
            )
        except BaseException:
            self.tiles.unpin(reserved)
            raise
        return Decoding(
            len(batch.tiles),
            partial(self._finish, batch, reserved, pending, buffer),
            partial(self._cancel, reserved, pending),
        )

    def average(
        self, plan: ReadPlan, tiles: Integers, canvas: DeviceCanvas, options: ReadOptions
    ) -> dict[TileKey, str]:
        """Compute tiles that the file lacks: never called, as `read` leaves these to the host."""
        raise NotImplementedError

    def timed(self, canvas: DeviceCanvas, image: LevelLayout, tiles: int, started: float) -> None:
        """Record that so many tiles were decoded since `time.perf_counter` was `started`."""
        canvas.decoded.append((image, tiles, started))

    def encoded(self, image: LevelLayout, tiles: Integers, share: float = 1) -> EncodedBatch:
        """Read tiles as they are stored, or joined for the device to decode them all.

        Parameters
        ----------
        image : LevelLayout
            The level.
        tiles : ndarray of int64, shape (tiles, 2)
            Row and column of each.
        share : float
            Part of the tiles that the device decodes.
        """
        offsets, wanted = image.grid.ranges(*tiles.T)
        source, background = self.parts.source, self.parts.layout.background
        stacked = self.decoder.read(source, image, tiles, background) if share == 1 else None
        if stacked is not None:
            self.parts.log.count(bytes_read=int(wanted.sum()))
            return stacked
        joined = source.read_joined(offsets.ravel(), wanted.ravel(), self._worker.take_buffer)
        self.parts.log.count(bytes_read=int(joined.lengths.sum()))
        return EncodedBatch.joined(image, tiles, joined, wanted, background)

    def _cancel(self, reserved: Reserved, pending: GpuBatch) -> None:
        pending.cancel()
        self.tiles.unpin(reserved)

    def _finish(
        self,
        batch: Batch[DeviceCanvas],
        reserved: Reserved,
        pending: GpuBatch,
        buffer: memoryview,
    ) -> dict[int, str]:
        """Wait for a batch and keep its tiles; return why some failed, by index in the plan."""
        image, log = batch.image, self.parts.log
        try:
            try:
                failed = pending.wait()
            except BaseException:
                pending.cancel()
                raise
            if self.decoder.verifier.reason is not None and not self._doubted:
                self._doubted = True
                self.forget_tiles()
            kept = batch.kept
            kept[list(failed)] = False
            if kept.any():
                self.tiles.keep(
                    reserved._replace(places=reserved.places[kept]),
                    self.parts.number,
                    batch.plan.image,
                    (image.grid.rows, image.grid.columns),
                    batch.places[kept],
                )
        finally:
            self.tiles.unpin(reserved)
        self._worker.give_buffer(buffer)
        count, by_cpu = len(batch.tiles), pending.on_cpu
        log.count_decoded(cpu=by_cpu - len(failed), nvimagecodec=count - by_cpu)
        log.count(bytes_decoded=(count - len(failed)) * image.tile_bytes)
        return {int(batch.tiles[index]): reason for index, reason in failed.items()}

    def _check(self, out: Any) -> None:
        if out is not None and not self.device.is_own(out):
            raise RegionError(f"out has to be an array in the memory of '{self.device.name}'.")

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        try:
            return self.device.empty(shape, dtype)
        except ValueError:  # more bytes than a number can count
            raise MemoryError from None

    @contextmanager
    def _stream(self, given: Any) -> Iterator[Stream]:
        """Provide the caller's stream, or one that is idle: reads don't wait for each other."""
        if given is not None:
            yield self.device.as_stream(given)
            return
        stream = self._worker.take_stream()
        yield stream
        self._worker.give_stream(stream)

    def _fill(self, image: LevelLayout, canvas: DeviceCanvas) -> None:
        """Show the background everywhere."""
        table, background = canvas.options.table, self.parts.layout.background
        if table is None:
            self.device.fill(canvas.pixels, background, canvas.stream)
        else:
            colors = table.background(background, image.channels).tolist()
            fill_channels(self.device, canvas.pixels, colors, canvas.stream)

    def _reads_raw(self, image: LevelLayout) -> bool:
        """Whether tiles lie uncompressed in a file, and are read past the cache."""
        return self._raw is not None and is_raw(image)

    def _read_raw(self, batch: Batch[DeviceCanvas]) -> dict[int, str]:
        assert self._raw is not None
        image, plan, canvas = batch.image, batch.plan, batch.canvas
        addresses = np.zeros(len(plan.tiles), np.int64)
        failures: dict[int, str] = {}
        background = self.parts.layout.background
        for part in self._raw.read(image, batch.places, background, canvas.stream):
            tiles = batch.tiles[part.first + np.flatnonzero(part.addresses)]
            addresses[tiles] = part.addresses[part.addresses > 0]
            self._paste(plan, plan.pastes_of(tiles), addresses, canvas)
            for index, reason in part.failures.items():
                failures[int(batch.tiles[part.first + index])] = reason
        decoded = len(batch.tiles) - len(failures)
        self.parts.log.count_decoded(raw=decoded)
        self.parts.log.count(bytes_decoded=decoded * image.tile_bytes)
        return failures

    def _paste(
        self, plan: ReadPlan, pastes: Pastes, addresses: Integers, canvas: DeviceCanvas
    ) -> None:
        """Copy parts of tiles, given by their addresses, to their regions."""
        tile, step = tile_format(self.parts.images[plan.image]), plan.regions.step
        pixel = tile.channels * np.dtype(tile.dtype).itemsize
        table = np.empty(len(pastes), PASTE)
        table["source"] = addresses[pastes.tile] + (pastes.top * tile.width + pastes.left) * pixel
        pitch = plan.regions.widths[pastes.region]
        table["target"] = canvas.offsets[pastes.region] + pastes.y * pitch + pastes.x
        table["pitch"] = pitch
        table["height"], table["width"] = pastes.height, pastes.width
        to = tile, canvas.pixels
        if canvas.colors is None:
            channel = canvas.options.channel
            self.device.paste(table, *to, canvas.stream, channel=channel, step=step)
        else:
            self.device.paste_colors(table, *to, canvas.colors, canvas.stream, step=step)


def fill_channels(device: CudaDevice, pixels: Any, values: Sequence[float], stream: Stream) -> None:
    """Set each channel of a device array to one value."""
    for channel, value in enumerate(values):
        device.fill(pixels[..., channel], value, stream)


def tile_format(image: LevelLayout) -> TileFormat:
    """Return the format of a level's decoded tiles."""
    grid = image.grid
    return TileFormat(grid.tile_height, grid.tile_width, image.channels, image.encoding.dtype)


def _too_large(size: int, device: str) -> RegionError:
    return RegionError(
        f"A region of {size >> 20} MiB doesn't fit into the memory of '{device}'; read it in parts."
    )


def _shows_background(plans: Sequence[ReadPlan], options: ReadOptions) -> bool:
    """Whether pixels may be left over when all tiles were pasted."""
    if options.tolerant or any(len(plan.blanks) for plan in plans):
        return True
    covered = plans[0].covered
    for plan in plans[1:]:
        covered = covered | plan.covered
    return not covered.all()
