"""`DeviceExecutor`: carries read plans out in device memory."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager, nullcontext
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
from napari_wsigpu.gpu.device import TileFormat
from napari_wsigpu.gpu.raw_reader import RawReader
from napari_wsigpu.gpu.switching import prompt_switching
from napari_wsigpu.gpu.tables import PASTE
from napari_wsigpu.reading.cache import TileKey
from napari_wsigpu.reading.plan import partly_taken, regions_with
from napari_wsigpu.storage.file import FileSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.gpu.batch import GpuBatch
    from napari_wsigpu.gpu.device import Device, Stream
    from napari_wsigpu.gpu.nvimagecodec import NvImageCodecDecoder
    from napari_wsigpu.gpu.tiles import DeviceTiles, Reserved
    from napari_wsigpu.layout import LevelLayout
    from napari_wsigpu.reading.log import TileLog
    from napari_wsigpu.reading.plan import ReadPlan, Wish
    from napari_wsigpu.storage.source import ByteSource

    Integers = NDArray[np.int64]

BATCH_TILES = 1024
BATCH_PIXEL_BYTES = 256 << 20
IN_FLIGHT = 2
# So many are read by one thread at a time.
MANY_TILES = 512


@dataclass
class _Output:
    """The pixels of the regions of plans, one region after another, on their way.

    Attributes
    ----------
    pixels : device array, shape (pixels, channels), or (pixels,) for one channel
        Where they go.
    stream, given : Stream
        What the work is given to, and the caller's own stream if there is one.
    offsets : ndarray of int64
        Where each region begins in them.
    wish : Wish
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
    wish: Wish
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


class DeviceExecutor:
    """Carries plans of one slide's images out through a device.

    Parameters
    ----------
    slide : int
        Number of the open slide, for the keys of its tiles.
    images : Mapping of int to LevelLayout
        Pyramid levels by index from 0 on, and the pictures that lie on mosaics.
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
            self._raw = RawReader(
                decoder.worker.loader, source, lambda count: log.count(bytes_read=count)
            )
        self._lock = threading.Lock()
        # Two that read a thousand tiles each wait for each other in the interpreter at every one.
        self._reading = threading.Lock()
        self._released = False
        self._doubted = False
        self._idle_streams: list[Stream] = []

    @property
    def device(self) -> Device:
        """The device it works on."""
        return self._decoder.worker.device

    def read(
        self,
        number: int,
        plans: Sequence[ReadPlan],
        offsets: Integers,
        wish: Wish,
        *,
        to_host: bool,
        share: float = 1.0,
        out: Any = None,
        stream: Any = None,
    ) -> Any | None:
        """Put the pixels of regions together.

        Parameters
        ----------
        number : int
            The image that the regions are of.
        plans : sequence of ReadPlan
            As `plan_regions` makes them.
        offsets : ndarray of int64
            The regions' own, `Regions.offsets`.
        wish : Wish
            How; tiles are kept without its colours.
        to_host : bool
            Return an ndarray instead of a device array.
        share : float
            Part of the tiles that the device decodes; the CPU decodes the rest meanwhile.
        out : device array, optional
            Where to put the pixels, of so many bytes.
        stream : int or object with ``ptr``, optional
            A CUDA stream of the caller to work on.

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
        image = self._images[number]
        samples = () if wish.channel is not None else (image.channels,)
        try:
            with self.device.active():
                shape = (int(offsets[-1]), *samples)
                output = _Output(
                    self._empty(shape, image.dtype) if out is None else out.reshape(shape),
                    None if stream is None else self.device.as_stream(stream),
                    offsets,
                    wish,
                    share,
                    to_host,
                    None if wish.table is None else self.device.colors(wish.table),
                )
                self._carry_out(image, plans, output)
        except MemoryError:
            return None
        except (DeviceError, SlideClosedError):
            raise
        except SlideError:
            if wish.tolerant:
                return None
            raise
        except Exception as error:  # what CUDA and CuPy raise has no common base
            raise device_error(self.device.name, error) from error
        finally:
            if self._released:
                self.release()
        self._log.note(output.failures, report=wish.tolerant)
        if output.failures and not wish.tolerant:
            failed = (key[1:] for key in output.failures)
            raise self._log.error(output.failures, regions_with(plans, failed))
        return output.host if to_host else output.pixels

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
            raise _too_large(pixels.nbytes, self.device.name) from None
        return target

    def forget_tiles(self) -> None:
        """Drop the slide's tiles on the device."""
        self._tiles.forget(self._slide)

    def release(self) -> None:
        """Let go of streams and of the slide's tiles, and of memory that only these used."""
        self._released = True
        self.forget_tiles()
        self._tiles.trim()
        self._decoder.release()
        with self._lock:
            self._idle_streams.clear()

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

    def work(self, task: Callable[[Stream], Any], stream: Any = None) -> Any:
        """Have work of the caller's done on a stream, or on that of the caller, and wait for it.

        Raises
        ------
        DeviceError
            If the device fails.
        """
        try:
            with self.device.active():
                given = None if stream is None else self.device.as_stream(stream)
                with self._stream(given, decodes=False) as used:
                    self.device.follow(used)
                    try:
                        return task(used)
                    finally:
                        # Other streams may be given memory that is let go now.
                        used.synchronize()
        except (MemoryError, SlideError):
            raise
        except Exception as error:  # what CUDA and CuPy raise has no common base
            raise device_error(self.device.name, error) from error

    def _check(self, out: Any) -> None:
        if out is not None and not self.device.is_own(out):
            raise RegionError(f"out has to be an array in the memory of '{self.device.name}'.")

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        try:
            return self.device.empty(shape, dtype)
        except ValueError:  # more bytes than a number can count
            raise MemoryError from None

    def _carry_out(self, image: LevelLayout, plans: Sequence[ReadPlan], output: _Output) -> None:
        found = [self._tiles.find(self._slide, plan.image, plan.tiles) for plan in plans]
        decodes = any(not here.all() for _, here in found)
        raw = [self._reads_raw(plan) for plan in plans]
        try:
            with self._stream(output.given, decodes=decodes and not any(raw)) as stream:
                output.stream = stream
                self.device.follow(stream)
                try:
                    if not plans or _shows_background(plans, output.wish):
                        self._fill(image, output)
                    for plan, (reserved, here), is_raw_plan in zip(plans, found, raw, strict=True):
                        last = plan is plans[-1]
                        if is_raw_plan:
                            self._read_raw(plan, output)
                        else:
                            self._read(plan, reserved, here, output, last=last)
                    if output.to_host and output.host is None:
                        output.settled = False
                        output.host = self.device.download(output.pixels, stream)
                finally:
                    if not output.settled:
                        stream.synchronize()
        finally:
            for reserved, _ in found:
                if reserved is not None:
                    self._tiles.unpin(reserved)

    def _reads_raw(self, plan: ReadPlan) -> bool:
        return self._raw is not None and is_raw(self._images[plan.image])

    def _fill(self, image: LevelLayout, output: _Output) -> None:
        """Show the background everywhere."""
        wish = output.wish
        if wish.table is None:
            self.device.fill(output.pixels, self._background, output.stream)
            return
        blank = wish.table.background(self._background, image.channels)
        for channel, value in enumerate(blank.tolist()):
            self.device.fill(output.pixels[..., channel], value, output.stream)

    def _read(
        self,
        plan: ReadPlan,
        found: Reserved | None,
        here: NDArray[np.bool_],
        output: _Output,
        *,
        last: bool,
    ) -> None:
        """Paste the tiles that are here, and decode and paste the others."""
        output.settled = False
        self._log.count(
            tiles_asked=len(plan.tiles) + len(plan.blanks),
            cache_hits=int(np.count_nonzero(here)),
            background=len(plan.blanks),
        )
        addresses = np.zeros(len(plan.tiles), np.int64)
        if found is not None:
            addresses[here] = found.slots.addresses
        absent = np.flatnonzero(~here)
        if not len(absent):
            self._paste(plan, np.flatnonzero(here), addresses, output)
            return
        with prompt_switching():
            self._decode(plan, absent, np.flatnonzero(here), addresses, output, last=last)

    def _decode(
        self,
        plan: ReadPlan,
        absent: Integers,
        here: Integers,
        addresses: Integers,
        output: _Output,
        *,
        last: bool,
    ) -> None:
        """Read and decode tiles: a batch is read while the one before it is decoded.

        Those that are here are pasted with the first batch.
        """
        begin = time.perf_counter()
        image, count = self._images[plan.image], len(absent)
        most = max(1, min(BATCH_TILES, BATCH_PIXEL_BYTES // image.tile_bytes))
        most = -(-count // -(-count // most))
        flying: list[_InFlight] = []
        try:
            while len(absent):
                output.wish.check()
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
                self._tiles.unpin(batch.reserved)

    def _begin(
        self,
        plan: ReadPlan,
        tiles: Integers,
        here: Integers,
        addresses: Integers,
        output: _Output,
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
        image = self._images[plan.image]
        reserved = self._tiles.reserve(tile_format(image), image.tile_bytes, len(tiles))
        if len(reserved.places) < len(tiles):
            last = only = False
        tiles = tiles[: len(reserved.places)]
        addresses[tiles] = reserved.slots.addresses
        pasted = False

        def deliver(indices: Sequence[int]) -> None:
            nonlocal pasted
            ready = tiles if len(indices) == len(tiles) else tiles[np.array(indices, np.int64)]
            self._paste(plan, ready if pasted else np.append(here, ready), addresses, output)
            if pasted:
                output.corrected = True
            elif last and output.to_host:
                output.host = self.device.download(output.pixels, output.stream)
            pasted = True

        try:
            encoded = self._encoded(image, plan.tiles[tiles])
            buffer = encoded.view
            pending = self._decoder.schedule(
                encoded,
                reserved.slots,
                deliver,
                share=output.share,
                stream=output.given,
                at_once=not only,
            )
        except BaseException:
            self._tiles.unpin(reserved)
            raise
        return _InFlight(tiles, reserved, pending, buffer)

    def _encoded(self, image: LevelLayout, tiles: Integers) -> EncodedBatch:
        offsets, wanted = image.grid.ranges(*tiles.T)
        spacing = self._decoder.spacing(image, len(tiles))
        with self._reading if len(tiles) >= MANY_TILES else nullcontext():
            joined = self._source.read_joined(
                offsets.ravel(), wanted.ravel(), self._decoder.worker.take_buffer, spacing
            )
        self._log.count(bytes_read=int(joined.lengths.sum()))
        return EncodedBatch.joined(image, tiles, joined, wanted, self._background, shared=True)

    def _paste(self, plan: ReadPlan, tiles: Integers, addresses: Integers, output: _Output) -> None:
        """Copy parts of tiles that lie at addresses to their places."""
        image = self._images[plan.image]
        pastes, wish = plan.pastes, output.wish
        if len(tiles) < len(plan.tiles):
            chosen = np.zeros(len(plan.tiles), np.bool_)
            chosen[tiles] = True
            pastes = pastes[chosen[pastes.tile]]
        tile, step = tile_format(image), plan.regions.step
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
            self.device.paste(table, *to, output.stream, channel=wish.channel, step=step)
        else:
            self.device.paste_colors(table, *to, output.colors, output.stream, step=step)

    def _finish(self, plan: ReadPlan, batch: _InFlight, output: _Output) -> None:
        image = self._images[plan.image]
        try:
            try:
                failed = batch.pending.wait()
            except BaseException:
                batch.pending.cancel()
                raise
            if self._decoder.verifier.reason is not None and not self._doubted:
                self._doubted = True
                self.forget_tiles()
            kept = self._to_keep(plan, image, batch.tiles, output.wish)
            kept[list(failed)] = False
            if kept.any():
                grid, places = image.grid, batch.reserved.places[kept]
                self._tiles.keep(
                    batch.reserved._replace(places=places),
                    self._slide,
                    plan.image,
                    (grid.rows, grid.columns),
                    plan.tiles[batch.tiles[kept]],
                )
        finally:
            self._tiles.unpin(batch.reserved)
        self._decoder.worker.give_buffer(batch.buffer)
        by_cpu = batch.pending.on_cpu
        self._log.count_decoded(cpu=by_cpu - len(failed), nvimagecodec=len(batch.tiles) - by_cpu)
        self._log.count(bytes_decoded=(len(batch.tiles) - len(failed)) * image.tile_bytes)
        self._note_failures(plan, {batch.tiles[i]: why for i, why in failed.items()}, output)

    def _note_failures(self, plan: ReadPlan, failures: Mapping[int, str], output: _Output) -> None:
        for tile, reason in failures.items():
            row, column = plan.tiles[tile].tolist()
            output.failures[TileKey(self._slide, plan.image, row, column)] = reason

    def _to_keep(
        self, plan: ReadPlan, image: LevelLayout, tiles: Integers, wish: Wish
    ) -> NDArray[np.bool_]:
        """Return which tiles others may want, too."""
        if wish.keep == "later" and wish.later is not None:
            return wish.later(plan.tiles[tiles])
        if wish.keep == "partly" and wish.channel is None:
            return partly_taken(plan, image)[tiles]
        return np.full(len(tiles), wish.keep != "none", np.bool_)

    def _read_raw(self, plan: ReadPlan, output: _Output) -> None:
        assert self._raw is not None
        image, stream = self._images[plan.image], output.stream
        addresses = np.zeros(len(plan.tiles), np.int64)
        failed = 0
        for part in self._raw.read(image, plan.tiles, self._background, stream):
            tiles = part.first + np.flatnonzero(part.addresses)
            addresses[tiles] = part.addresses[part.addresses > 0]
            self._paste(plan, tiles, addresses, output)
            failures = {part.first + index: why for index, why in part.failures.items()}
            self._note_failures(plan, failures, output)
            failed += len(failures)
        decoded = len(plan.tiles) - failed
        self._log.count(tiles_asked=len(plan.tiles) + len(plan.blanks), background=len(plan.blanks))
        self._log.count_decoded(raw=decoded)
        self._log.count(bytes_decoded=decoded * image.tile_bytes)

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


def _too_large(size: int, device: str) -> RegionError:
    return RegionError(
        f"A region of {size >> 20} MiB doesn't fit into the memory of '{device}'; read it in parts."
    )


def _shows_background(plans: Sequence[ReadPlan], wish: Wish) -> bool:
    """Whether pixels may be left over when all tiles were pasted."""
    if wish.tolerant or any(len(plan.blanks) for plan in plans):
        return True
    covered = plans[0].covered
    for plan in plans[1:]:
        covered = covered | plan.covered
    return not covered.all()


def tile_format(image: LevelLayout) -> TileFormat:
    """Return what a decoded tile of a level is."""
    grid = image.grid
    return TileFormat(grid.tile_height, grid.tile_width, image.channels, image.encoding.dtype)
