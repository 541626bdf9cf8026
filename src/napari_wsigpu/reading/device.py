"""`DeviceBackend`: decode and paste tiles in device memory."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from napari_wsigpu.codecs.decoder import EncodedBatch
from napari_wsigpu.gpu.device.interfaces import TileFormat
from napari_wsigpu.gpu.device.kernel_tables import PASTE
from napari_wsigpu.gpu.device.switching import prompt_switching
from napari_wsigpu.gpu.jpeg.jpeg_stacks import JpegStreams
from napari_wsigpu.gpu.transfer.device_tiles import Reserved
from napari_wsigpu.model.errors import RegionError, SlideError, device_error
from napari_wsigpu.reading.cache import TileKey
from napari_wsigpu.reading.executor import Decoding, Limits, check, execute
from napari_wsigpu.reading.plan import CancelledError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from napari_wsigpu.gpu.device.cuda import CudaDevice
    from napari_wsigpu.gpu.device.interfaces import Stream
    from napari_wsigpu.gpu.jpeg.gpu_batch import GpuBatch
    from napari_wsigpu.gpu.jpeg.nvimagecodec import NvImageCodecDecoder
    from napari_wsigpu.gpu.transfer.device_tiles import DeviceTiles
    from napari_wsigpu.model.arrays import AnyArray, Array, DeviceArray, DType, Integers, Mask
    from napari_wsigpu.model.layout import LevelLayout, TileGrid
    from napari_wsigpu.reading.executor import Batch
    from napari_wsigpu.reading.parts import SlideParts
    from napari_wsigpu.reading.plan import Pastes, ReadOptions, ReadPlan

    AnyStream = int | Stream | None  # None for a stream of the backend


Result = TypeVar("Result")

LIMITS = Limits(1024, None, 256 << 20, 2)


@dataclass
class DeviceCanvas:
    """Canvas in device memory for the pixels of regions, one region after another.

    Attributes
    ----------
    pixels : device array, shape (pixels, channels), or (pixels,) for one channel
        The pixels.
    stream : Stream
        The stream that orders all work on the pixels.
    offsets : ndarray of int64
        Index of each region's first pixel.
    options : ReadOptions
        How to read.
    colors : device array or None
        Color table in device memory.
    pinned : list of Reserved
        Slots of cached tiles that the stream may still read; unpinned after synchronization.
    """

    pixels: DeviceArray
    stream: Stream
    offsets: Integers
    options: ReadOptions
    colors: DeviceArray
    pinned: list[Reserved] = field(default_factory=list)


class DeviceBackend:
    """Decodes tiles of one slide on a device and caches them in its memory.

    Parameters
    ----------
    parts : SlideParts
        The slide.
    decoder : NvImageCodecDecoder
        Decodes batches of tiles.
    tiles : DeviceTiles
        Cache of decoded tiles on the device.

    Attributes
    ----------
    parts, decoder, tiles
        As given.
    worker : DecodeWorker
        The worker of the device.
    device : CudaDevice
        The device.
    """

    def __init__(
        self,
        parts: SlideParts,
        decoder: NvImageCodecDecoder,
        tiles: DeviceTiles,
    ) -> None:
        self.parts = parts
        self.decoder = decoder
        self.tiles = tiles
        self.device = decoder.worker.device
        self.worker = decoder.worker
        self._distrusted = False
        self._released = False

    def read(
        self,
        number: int,
        plans: Sequence[ReadPlan],
        offsets: Integers,
        options: ReadOptions,
        *,
        to_host: bool,
        out: DeviceArray = None,
        stream: AnyStream = None,
    ) -> AnyArray | None:
        """Read regions of an image with the device.

        Parameters
        ----------
        number : int
            Number of the image.
        plans : sequence of ReadPlan
            The result of `plan_regions`.
        offsets : ndarray of int64
            `Regions.offsets` of the regions.
        options : ReadOptions
            How to read; tiles are cached as stored, whatever the color table.
        to_host : bool
            Return an ndarray instead of a device array.
        out : device array, optional
            Receives the pixels; must have the right number of bytes.
        stream : int or object with ``ptr``, optional
            The caller's CUDA stream, on which all work is ordered.

        Returns
        -------
        array, shape (pixels, channels), or (pixels,) for one channel
            Pixels of one region after another. None if the host must read them, because the device
            can't carry out one of the plans or is short of memory.

        Raises
        ------
        RegionError
            If `out` is not in the memory of the device.
        TileError
            If tiles fail to decode; the error names them.
        SlideError
            If the file can't be read, or the device fails.
        """
        self._check(out)
        if any(plan.computed.any() for plan in plans):
            return None
        if any(len(plan.blanks) for plan in plans[1:]):
            return None  # the blanks of an upper image hide the images below it
        if any(plan.channels is not None for plan in plans):
            return None  # the device can only paste all channels of a pixel
        image = self.parts.images[number]
        samples = () if options.channel is not None else (image.channels,)
        shape = (int(offsets[-1]), *samples)
        try:
            with self.device.active(), self._stream(stream) as used:
                pixels = self._empty(shape, image.dtype) if out is None else out.reshape(shape)
                colors = None if options.table is None else self.device.colors(options.table)
                canvas = DeviceCanvas(pixels, used, offsets, options, colors)
                self.device.follow(used)
                try:
                    if not plans or _shows_background(plans, options):
                        self._fill(image, canvas)
                    with prompt_switching(), self.worker.turn.taken():
                        failures = execute(self, plans, lambda _: canvas, options)
                    if to_host:
                        pixels = self.device.download(pixels, used)
                finally:
                    # Kernels may read pinned slots until the stream has finished.
                    used.synchronize()
                    for reserved in canvas.pinned:
                        self.tiles.unpin(reserved)
        except MemoryError:
            return None
        except (SlideError, CancelledError):
            raise
        except Exception as error:  # exceptions of CUDA and CuPy have no common base
            raise device_error(self.device.name, error) from error
        finally:
            if self._released:
                self.release()
        check(self.parts, failures, plans, options)
        return pixels

    def decode(self, numbers: Sequence[int], tiles: Integers) -> None:
        """Decode whole tiles of images to the cache; those of images stored alike in one batch.

        Tiles that are cached or not in the file are left out, and so are those for which the device
        has no memory. The log lists those that fail.

        Parameters
        ----------
        numbers : sequence of int
            Numbers of the images, which have the same grid.
        tiles : ndarray of int64, shape (tiles, 2)
            Row and column of each tile.
        """
        image = self.parts.images[numbers[0]]
        stacked = isinstance(self.decoder.preparer(image), JpegStreams)
        alike = all(self.parts.images[number].encoding == image.encoding for number in numbers)
        try:
            for some in [numbers] if alike and not stacked else [[each] for each in numbers]:
                wanted = np.array([self._wanted(number, tiles) for number in some])
                absent = int(wanted.sum())
                self.parts.log.count(tiles_asked=wanted.size, cache_hits=wanted.size - absent)
                if absent:
                    with prompt_switching(), self.worker.turn.taken():
                        self.work(partial(self._decode, some, tiles, wanted))
        except MemoryError:
            pass
        finally:
            if self._released:
                self.release()

    def _decode(
        self, numbers: Sequence[int], tiles: Integers, wanted: Mask, stream: Stream
    ) -> None:
        which, index = np.nonzero(wanted)
        image = self.parts.images[numbers[0]]
        most = max(1, LIMITS.pixel_bytes // image.tile_bytes)
        while len(which):
            reserved = self.tiles.reserve(
                tile_format(image), image.tile_bytes, min(most, len(which))
            )
            taken = len(reserved.indices)
            some, places = which[:taken], tiles[index[:taken]]
            which, index = which[taken:], index[taken:]
            parts = [(number, some == at) for at, number in enumerate(numbers)]
            try:
                if len(numbers) == 1:
                    encoded = self.encoded(image, places)
                else:
                    ranges = [self._grid(number).ranges(*places[own].T) for number, own in parts]
                    encoded = self._joined(image, places, *np.concatenate(ranges, 2))
                buffer = encoded.view
                pending = self.decoder.schedule(
                    encoded, reserved.slots, lambda _: None, stream, at_once=False
                )
                failed = self._wait(pending, image, taken)
                kept = np.ones(taken, np.bool_)
                kept[list(failed)] = False
                for number, own in parts:
                    self._keep(reserved, number, places, own & kept)
            finally:
                self.tiles.unpin(reserved)
            self.worker.release_buffer(buffer)
            keys = {
                TileKey(self.parts.number, numbers[some[at]], *places[at].tolist()): reason
                for at, reason in failed.items()
            }
            self.parts.log.record_failures(keys, report=True)

    def _wanted(self, number: int, tiles: Integers) -> Mask:
        """Return the mask of an image's tiles that are in the file but not in the cache."""
        here = self.tiles.holds(self.parts.number, number, tiles)
        return ~here & (self._grid(number).ranges(*tiles.T)[1] > 0).any(axis=0)

    def _grid(self, number: int) -> TileGrid:
        return self.parts.images[number].grid

    def send(self, pixels: Array, out: DeviceArray = None, stream: AnyStream = None) -> AnyArray:
        """Copy host pixels to a device array.

        Raises
        ------
        RegionError
            If the device has no memory for them.
        """
        self._check(out)

        def task(used: Stream) -> AnyArray:
            target = self._empty(pixels.shape, pixels.dtype) if out is None else out
            self.device.send(pixels, target, used)
            return target

        try:
            # New arrays are in the pool of the current stream: on this stream, no event is needed.
            return self.work(task, self.device.current_stream() if stream is None else stream)
        except MemoryError:
            raise _too_large(pixels.nbytes, self.device.name) from None

    def fetch(self, pixels: DeviceArray) -> Array:
        """Copy a device array to the host."""
        return self.work(partial(self.device.download, pixels))

    def drop_tiles(self, level: int, tiles: Integers) -> None:
        """Drop tiles of an image from the cache of the device; see `DeviceTiles.drop`."""
        self.tiles.drop(self.parts.number, level, tiles)

    def forget_tiles(self) -> None:
        """Drop the slide's tiles from the cache of the device."""
        self.tiles.forget(self.parts.number)

    def release(self) -> None:
        """Free the slide's tiles and the memory that only they used."""
        # A read that is still running releases again at its end.
        self._released = True
        self.forget_tiles()
        self.tiles.trim()
        self.worker.trim()

    def empty(self, shape: tuple[int, ...], dtype: DType) -> AnyArray:
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

    def work(self, task: Callable[[Stream], Result], stream: AnyStream = None) -> Result:
        """Call a task with a stream and wait for the work that it submits.

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
                    # Memory that the task frees may go to other streams, so its work must be done.
                    used.synchronize()
        except (MemoryError, SlideError):
            raise
        except Exception as error:  # exceptions of CUDA and CuPy have no common base
            raise device_error(self.device.name, error) from error

    def limits(self, number: int) -> Limits:
        """Return the limits of batches of an image."""
        return LIMITS

    def resolve(self, plan: ReadPlan, options: ReadOptions) -> ReadOptions:
        """Return the options unchanged: on devices, ``keep="recurring"`` caches all tiles."""
        return options

    def paste_cached(self, plan: ReadPlan, canvas: DeviceCanvas, options: ReadOptions) -> Integers:
        """Paste the cached tiles of a plan; return the indices of the others."""
        reserved, cached = self.tiles.find(self.parts.number, plan.image, plan.tiles)
        if reserved is not None:
            canvas.pinned.append(reserved)
            addresses = np.zeros(len(cached), np.int64)
            addresses[cached] = reserved.slots.addresses
            self._paste(plan, plan.pastes_of(np.flatnonzero(cached)), addresses, canvas)
        return np.flatnonzero(~cached)

    def start(self, batch: Batch[DeviceCanvas], *, more: bool) -> Decoding:
        """Read a batch and start to decode it.

        Raises
        ------
        MemoryError
            If there is no device memory for any tile.
        """
        image = batch.image
        reserved = self.tiles.reserve(tile_format(image), image.tile_bytes, len(batch.tiles))
        if len(reserved.indices) < len(batch.tiles):
            batch = batch.part(slice(len(reserved.indices)))
        addresses = np.zeros(len(batch.plan.tiles), np.int64)
        addresses[batch.tiles] = reserved.slots.addresses

        def deliver(indices: Sequence[int]) -> None:
            ready = batch.tiles if len(indices) == len(batch.tiles) else batch.tiles[indices]
            self._paste(batch.plan, batch.plan.pastes_of(ready), addresses, batch.canvas)

        try:
            canvas = batch.canvas
            encoded = self.encoded(image, batch.places)
            buffer = encoded.view
            pending = self.decoder.schedule(
                encoded, reserved.slots, deliver, canvas.stream, at_once=more
            )
        except BaseException:
            # Slots that stayed pinned could never be evicted.
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
        """Never called: `read` leaves plans with computed tiles to the host."""
        raise NotImplementedError

    def encoded(self, image: LevelLayout, tiles: Integers) -> EncodedBatch:
        """Read encoded tiles, joined into JPEG stacks if the device decodes these.

        Parameters
        ----------
        image : LevelLayout
            The image.
        tiles : ndarray of int64, shape (tiles, 2)
            Row and column of each tile.
        """
        source, background = self.parts.source, self.parts.layout.background
        stacked = self.decoder.read_stacked(source, image, tiles, background)
        if stacked is not None:
            self.parts.log.count(bytes_read=int(stacked.stacked.scans["length"].sum()))
            return stacked
        return self._joined(image, tiles, *image.grid.ranges(*tiles.T))

    def _joined(
        self, image: LevelLayout, tiles: Integers, offsets: Integers, lengths: Integers
    ) -> EncodedBatch:
        """Read the ranges of tiles, in arrays of shape (planes, tiles), into one buffer."""
        with self.worker.turn.lent():
            joined = self.parts.source.read_joined(
                offsets.ravel(), lengths.ravel(), self.worker.acquire_buffer
            )
        self.parts.log.count(bytes_read=int(joined.lengths.sum()))
        background = self.parts.layout.background
        return EncodedBatch.from_joined(image, tiles, joined, lengths, background)

    def _cancel(self, reserved: Reserved, pending: GpuBatch) -> None:
        pending.cancel()
        self.tiles.unpin(reserved)

    def _finish(
        self, batch: Batch[DeviceCanvas], reserved: Reserved, pending: GpuBatch, buffer: memoryview
    ) -> dict[int, str]:
        """Wait for a batch and cache its tiles; return why tiles failed, by index."""
        try:
            failed = self._wait(pending, batch.image, len(batch.tiles))
            kept = batch.kept
            kept[list(failed)] = False
            self._keep(reserved, batch.plan.image, batch.places, kept)
        finally:
            self.tiles.unpin(reserved)
        self.worker.release_buffer(buffer)
        return {int(batch.tiles[index]): reason for index, reason in failed.items()}

    def _wait(self, pending: GpuBatch, image: LevelLayout, count: int) -> dict[int, str]:
        """Wait for a batch of `count` tiles; return why tiles failed, by index."""
        try:
            failed = pending.wait()
        except BaseException:
            # The GPU must not write to the slots once they are unpinned.
            pending.cancel()
            raise
        # Once a comparison with the CPU fails, none of the GPU's tiles can be trusted.
        if self.decoder.verifier.reason is not None and not self._distrusted:
            self._distrusted = True
            self.forget_tiles()
        log, by_cpu = self.parts.log, pending.on_cpu
        log.count_decoded(cpu=by_cpu - len(failed), nvimagecodec=count - by_cpu)
        log.count(bytes_decoded=(count - len(failed)) * image.tile_bytes)
        return failed

    def _keep(self, reserved: Reserved, number: int, places: Integers, kept: Mask) -> None:
        """Register those tiles of an image that are to be cached."""
        if kept.any():
            some, grid = Reserved(reserved.pool, reserved.indices[kept]), self._grid(number)
            size = grid.rows, grid.columns
            self.tiles.keep(some, self.parts.number, number, size, places[kept])

    def _check(self, out: DeviceArray) -> None:
        if out is not None and not self.device.is_own(out):
            raise RegionError(f"out must be an array in the memory of '{self.device.name}'.")

    def _empty(self, shape: tuple[int, ...], dtype: DType) -> AnyArray:
        try:
            return self.device.empty(shape, dtype)
        except ValueError:  # more bytes than an int64 can count
            raise MemoryError from None

    @contextmanager
    def _stream(self, given: AnyStream) -> Iterator[Stream]:
        """Provide the caller's stream, or an idle one, so that reads don't wait for each other."""
        if given is not None:
            yield self.device.as_stream(given)
            return
        stream = self.worker.acquire_stream()
        yield stream
        # Skipped after an error: a stream whose work has failed must not be used again.
        self.worker.release_stream(stream)

    def _fill(self, image: LevelLayout, canvas: DeviceCanvas) -> None:
        """Fill the canvas with the background."""
        table, background = canvas.options.table, self.parts.layout.background
        if table is None:
            self.device.fill(canvas.pixels, background, canvas.stream)
        else:
            colors = table.background(background, image.channels).tolist()
            fill_channels(self.device, canvas.pixels, colors, canvas.stream)

    def _paste(
        self, plan: ReadPlan, pastes: Pastes, addresses: Integers, canvas: DeviceCanvas
    ) -> None:
        """Copy parts of tiles to their regions; `addresses` holds the address of each tile."""
        tile, step = tile_format(self.parts.images[plan.image]), plan.regions.step
        pixel = tile.channels * np.dtype(tile.dtype).itemsize
        table = np.empty(len(pastes), PASTE)
        # Sources are addresses in bytes; targets count pixels from the start of the canvas.
        table["source"] = addresses[pastes.tile] + (pastes.top * tile.width + pastes.left) * pixel
        pitch = plan.regions.widths[pastes.region]
        table["target"] = canvas.offsets[pastes.region] + pastes.y * pitch + pastes.x
        table["pitch"] = pitch
        table["height"], table["width"] = pastes.height, pastes.width
        pixels = canvas.pixels
        if canvas.colors is None:
            channel = canvas.options.channel
            self.device.paste(table, tile, pixels, canvas.stream, channel=channel, step=step)
        else:
            self.device.paste_colors(table, tile, pixels, canvas.colors, canvas.stream, step=step)


def fill_channels(
    device: CudaDevice, pixels: DeviceArray, values: Sequence[float], stream: Stream
) -> None:
    """Set each channel of a device array to one value."""
    for channel, value in enumerate(values):
        device.fill(pixels[..., channel], value, stream)


def tile_format(image: LevelLayout) -> TileFormat:
    """Return the format of an image's decoded tiles."""
    grid = image.grid
    return TileFormat(grid.tile_height, grid.tile_width, image.channels, image.encoding.dtype)


def _too_large(size: int, device: str) -> RegionError:
    return RegionError(
        f"A region of {size >> 20} MiB doesn't fit into the memory of '{device}'; read it in parts."
    )


def _shows_background(plans: Sequence[ReadPlan], options: ReadOptions) -> bool:
    """Return whether some pixels may show the background after all tiles are pasted."""
    if options.tolerant or any(len(plan.blanks) for plan in plans):
        return True
    covered = plans[0].covered
    for plan in plans[1:]:
        covered = covered | plan.covered
    return not covered.all()
