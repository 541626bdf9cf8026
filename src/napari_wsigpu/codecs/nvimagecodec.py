"""Tiles decoded by nvImageCodec: batches in flight, and the worker thread that runs them."""

from __future__ import annotations

import logging
import queue
import threading
import traceback
from contextlib import suppress
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from napari_wsigpu.codecs.codestream import CodeStreams, recipe
from napari_wsigpu.errors import DeviceError, device_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.codestream import Recipe
    from napari_wsigpu.codecs.cpu import CpuBatch, CpuDecoder
    from napari_wsigpu.codecs.decoder import EncodedBatch, EncodedTile
    from napari_wsigpu.codecs.device import Device, Event, Stream, TileFormat
    from napari_wsigpu.codecs.library import LibraryDecoder, LibraryImages, LibraryStreams
    from napari_wsigpu.codecs.verify import Verifier
    from napari_wsigpu.formats.layout import LevelLayout

    Job = Callable[["DecodeWorker"], None]
    Then = Callable[[Any], None]

STREAMS = 320

logger = logging.getLogger(__name__)


class Slots(NamedTuple):
    """Places in device memory for the tiles of a batch.

    Attributes
    ----------
    tile : TileFormat
        What each place holds.
    addresses : ndarray of int64, shape (tiles,)
        Where they are.
    images : ndarray of uint64
        Handles of the same for nvImageCodec, with the worker's stream.
    """

    tile: TileFormat
    addresses: NDArray[np.int64]
    images: NDArray[np.uint64]


class DecodeWorker:
    """A thread with a decoder of each kind and a stream of its own.

    A decoder must not be used by two threads at once: it would end the process. Who waits for
    a job that the thread has not begun runs it there and then, one job at a time. The thread
    starts with the first job.

    Parameters
    ----------
    device : Device
        What it decodes on.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._turn = threading.RLock()
        self._thread: threading.Thread | None = None
        with device.active():
            self.stream = device.new_stream()
        self._decoders: dict[str, tuple[LibraryDecoder, str] | None] = {}
        self._streams: list[LibraryStreams] = []
        self._warned: set[str] = set()

    def submit(self, job: Job) -> None:
        """Have a job called with the worker, after those before it."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="wsigpu-gpu", daemon=True)
                self._thread.start()
            self._queue.put(job)

    def run(self, job: Job) -> None:
        """Call a job in this thread, once the worker does nothing else."""
        with self._turn:
            job(self)

    def close(self) -> None:
        """End the thread after the jobs that were submitted, and let go of its decoders."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._queue.put(None)
        if thread is not None:
            thread.join()
        with self._turn:
            for made in self._decoders.values():
                if made is not None:
                    made[0].close()
            self._decoders.clear()
            self._streams.clear()

    def take_streams(self, count: int) -> LibraryStreams:
        """Give out room for code streams, which comes back by `give_streams`."""
        with self._lock:
            if self._streams and len(self._streams[-1].handles) >= count:
                return self._streams.pop()
        return self.device.code_streams(max(count, STREAMS))

    def give_streams(self, streams: LibraryStreams) -> None:
        """Take room for code streams back."""
        streams.clear()
        with self._lock:
            self._streams.append(streams)

    def engine(self, kind: str) -> str | None:
        """Return the name of the path that decodes a kind, None if there is none.

        From jobs only. The first time, the decoder is made.
        """
        if kind not in self._decoders:
            try:
                self._decoders[kind] = self.device.decoder(kind)
            except DeviceError as error:
                self._decoders[kind] = None
                self._warn(kind, error)
        made = self._decoders[kind]
        return None if made is None else made[1]

    def decode(
        self, kind: str, streams: NDArray[np.uint64], images: NDArray[np.uint64]
    ) -> list[bool]:
        """Decode code streams into images; say of each whether it worked.

        If nothing works, as when memory runs out or one stream spoils the batch, smaller parts
        are tried.
        """
        made = self._decoders[kind] if len(streams) and self.engine(kind) else None
        if made is None:
            return [False] * len(streams)
        try:
            decoded = made[0].decode(streams, images)
        except RuntimeError as error:
            decoded = [False] * len(streams)
            if len(streams) == 1:
                self._warn(kind, error)
        if len(streams) > 1 and not any(decoded):
            half = len(streams) // 2
            return [
                *self.decode(kind, streams[:half], images[:half]),
                *self.decode(kind, streams[half:], images[half:]),
            ]
        return decoded

    def _warn(self, kind: str, error: Exception) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(
                "What '%s' can't decode is decoded on the CPU: %s", self.device.name, error
            )

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                self.run(job)
            except Exception:  # or no later job would ever run
                logger.exception("A job on '%s' failed", self.device.name)
            del job


class NvImageCodecDecoder:
    """Decodes the tiles of one slide on a device, and what the device can't on the CPU.

    Parameters
    ----------
    worker : DecodeWorker
        Runs the batches; shared by all slides on the device.
    cpu : CpuDecoder
        Decodes what the device can't.
    verifier : Verifier
        Proves that the device's pixels are right.
    """

    name = "nvimagecodec"

    def __init__(self, worker: DecodeWorker, cpu: CpuDecoder, verifier: Verifier) -> None:
        self.worker = worker
        self.cpu = cpu
        self.verifier = verifier
        self._makers: dict[LevelLayout, tuple[Recipe, CodeStreams] | str] = {}

    def schedule(
        self,
        batch: EncodedBatch,
        slots: Slots,
        then: Then,
        *,
        share: float = 1.0,
        stream: Stream | None = None,
        at_once: bool = True,
    ) -> GpuBatch:
        """Begin to decode a batch of tiles of one level and return at once.

        Parameters
        ----------
        batch : EncodedBatch
            The tiles.
        slots : Slots
            Where each is decoded to.
        then : callable
            Called with the rows of tiles (see `Device.rows`): may give `stream`, or else the
            worker's, work that uses these tiles. It is called again for tiles that had to be
            decoded another way.
        share : float
            Part of the tiles that the device decodes; the CPU decodes the rest meanwhile.
        stream : Stream, optional
            Of the caller, used instead of the worker's own.
        at_once : bool
            Have the worker's thread begin now; else the caller is about to wait, and decodes
            in its own thread, which saves a change of threads.
        """
        pending = GpuBatch(self, batch, slots, then, stream)
        pending.prepare(share)
        if at_once:
            self.worker.submit(pending.run)
        return pending

    def maker(self, level: LevelLayout) -> tuple[Recipe, CodeStreams] | str:
        """Return recipe and code streams of a level, or why the CPU decodes it."""
        if self.verifier.reason is not None:
            return self.verifier.reason
        made = self._makers.get(level)
        if made is None:
            how = recipe(level)
            made = how if isinstance(how, str) else (how, CodeStreams(level, how))
            self._makers[level] = made
        return made


class GpuBatch:
    """A batch in flight. It owns all that the device still uses, until it is done."""

    def __init__(
        self,
        decoder: NvImageCodecDecoder,
        batch: EncodedBatch,
        slots: Slots,
        then: Then,
        stream: Stream | None,
    ) -> None:
        self._decoder = decoder
        self._batch = batch
        self._slots = slots
        self._then = then
        self._stream = stream
        self._done = threading.Event()
        self._claim = threading.Lock()
        self._begun = False
        self._engine = ""
        self._failures: dict[int, str] = {}
        self._error: Exception | None = None
        self._decoded_on_cpu = 0
        self._proven = 0
        self._how: Recipe | None = None
        self._on_gpu: list[int] = []
        self._decoded: list[int] = []
        self._streams: LibraryStreams | None = None
        self._images: LibraryImages | None = None
        self._cpu_parts: list[_CpuPart] = []
        self._uploaded: list[_CpuPart] = []
        self._samples: _CpuPart | None = None
        self._compared: list[tuple[int, NDArray[Any], NDArray[Any]]] = []
        self._unclear: NDArray[np.int32] | None = None
        self._ready: Event | None = None

    @property
    def on_cpu(self) -> int:
        """Number of tiles that the CPU decoded, or tried to; final after `wait`."""
        return self._decoded_on_cpu

    def prepare(self, share: float) -> None:
        """Sort the tiles by who decodes them, and start those of the CPU."""
        made = self._decoder.maker(self._batch.level)
        if not isinstance(made, str):
            self._how, maker = made
            count = round(share * len(self._batch))
            self._streams = streams = self._decoder.worker.take_streams(count)
            self._on_gpu = maker.fill(self._batch, count, streams)
            samples = self._decoder.verifier.samples(self._how.kind, self._on_gpu)
            if samples:
                self._samples = _CpuPart(self._decoder, self._batch, samples)
        rest = sorted(set(range(len(self._batch))) - set(self._on_gpu))
        if rest:
            self._cpu_parts.append(_CpuPart(self._decoder, self._batch, rest))

    def run(self, worker: DecodeWorker) -> None:
        """Decode, unless another thread has begun to; a job of the worker."""
        if not self._claim.acquire(blocking=False):
            return
        try:
            with worker.device.active():
                self._begin(worker.device)
        except Exception as error:  # every kind is handed to the thread that waits
            self._error = error
        finally:
            self._done.set()

    def wait(self) -> dict[int, str]:
        """Return when every tile was decoded or failed: index -> reason of each failure.

        Raises
        ------
        DeviceError
            If the device itself fails.
        """
        worker = self._decoder.worker
        if not self._claim.locked():
            worker.run(self.run)
        self._done.wait()
        try:
            if self._error is None and self._ready is not None:
                self._settle(worker)
        except Exception as error:  # said below, as what went wrong before
            self._error = error
        finally:
            self._quiesce()
            self._let_go()
        if self._error is None:
            return self._failures
        # Who keeps the exception shall not keep the bytes and pixels of the batch.
        traceback.clear_frames(self._error.__traceback__)
        if isinstance(self._error, DeviceError):
            raise self._error
        raise device_error(worker.device.name, self._error) from self._error

    def cancel(self) -> None:
        """Drop the batch if it is not begun, and return when the device is done with it."""
        for part in (self._samples, *self._cpu_parts):
            if part is not None:
                part.cancel()
        if self._claim.acquire(blocking=False):
            self._done.set()
        self._done.wait()
        self._quiesce()
        self._let_go()

    def _quiesce(self) -> None:
        """Wait until the device uses nothing of the batch, whatever happened."""
        if self._begun:
            self._begun = False
            with suppress(Exception):  # a device that failed has said so before
                (self._stream or self._decoder.worker.stream).synchronize()

    def _begin(self, device: Device) -> None:
        """Decode, and give the stream all that follows; nothing waits for the stream."""
        self._begun = True
        worker, tile = self._decoder.worker, self._slots.tile
        stream = self._stream or worker.stream
        rows = None
        if self._how is not None and self._streams is not None and self._on_gpu:
            images = self._slots.images
            if self._stream is not None:
                addresses = self._slots.addresses.tolist()
                self._images = device.images(addresses, tile, self._stream)
                images = self._images.handles
            self._engine = worker.engine(self._how.kind) or ""
            worked = worker.decode(self._how.kind, self._streams.used, images[self._on_gpu])
            self._decoded = list(compress(self._on_gpu, worked))
            rows = self._rows(self._decoded, stream)
            if self._decoded and self._how.convert:
                device.ycbcr_to_rgb(rows, tile, stream)
            exact = self._how.engine_rgb and self._engine == "hardware"
            if self._decoded and exact:
                self._unclear = device.round_as_libjpeg(rows, tile, stream)
        from_cpu = self._take_cpu_parts(stream)
        if from_cpu or rows is None:
            rows = self._rows(self._decoded + from_cpu, stream)
        self._then(rows)
        self._download_samples(device, stream)
        self._ready = device.record(stream)

    def _settle(self, worker: DecodeWorker) -> None:
        """Wait for the stream, and have the CPU decode what did not work."""
        assert self._ready is not None
        self._ready.synchronize()
        self._begun = False
        again = sorted(set(self._on_gpu) - set(self._decoded))
        if self._unclear is not None and self._unclear.any():
            again += compress(self._decoded, self._unclear)
        if not self._verified(set(again)):
            again = self._on_gpu
        if again:
            self._cpu_parts.append(_CpuPart(self._decoder, self._batch, again))
            stream = self._stream or worker.stream
            self._begun = True
            with worker.device.active():
                self._then(self._rows(self._take_cpu_parts(stream), stream))
                worker.device.record(stream).synchronize()
            self._begun = False

    def _take_cpu_parts(self, stream: Stream) -> list[int]:
        """Upload what the CPU decoded; return the indices of these tiles."""
        done: list[int] = []
        parts, self._cpu_parts = self._cpu_parts, []
        self._uploaded += parts
        for part in parts:
            failed = part.wait()
            self._failures |= failed
            self._decoded_on_cpu += len(part.indices)
            for index, pixels in part.pixels():
                if index not in failed:
                    address = int(self._slots.addresses[index])
                    self._decoder.worker.device.upload(address, pixels, stream)
                    done.append(index)
        return done

    def _download_samples(self, device: Device, stream: Stream) -> None:
        if self._samples is None:
            return
        failed, tile = self._samples.wait(), self._slots.tile
        for index, expected in self._samples.pixels():
            if index in self._decoded and index not in failed:
                address = int(self._slots.addresses[index])
                pixels = device.download_tile(address, tile, stream)
                self._compared.append((index, pixels, expected))

    def _verified(self, doubtful: set[int]) -> bool:
        for index, pixels, expected in self._compared:
            if index not in doubtful:
                self._proven += 1
                whole = expected.view(pixels.dtype).reshape(pixels.shape)
                if not self._decoder.verifier.agree(self._engine, pixels, whole):
                    return False
        return True

    def _rows(self, indices: list[int], stream: Stream) -> Any:
        chosen = np.asarray(indices, np.int64)
        rows = np.column_stack([self._slots.addresses[chosen], self._batch.tiles[chosen]])
        return self._decoder.worker.device.rows(rows, stream)

    def _let_go(self) -> None:
        for part in (self._samples, *self._cpu_parts):
            if part is not None:
                part.cancel()
        if self._samples is not None and self._how is not None:
            unproven = len(self._samples.indices) - self._proven
            self._decoder.verifier.give_back(self._how.kind, unproven)
        if self._streams is not None:
            self._decoder.worker.give_streams(self._streams)
        self._streams = self._images = self._samples = self._unclear = self._ready = None
        self._cpu_parts.clear()
        self._uploaded.clear()
        self._compared.clear()
        self._batch.release()
        self._then = _nothing


def _nothing(rows: Any) -> None:
    """Take the place of a function that is no longer needed."""


class _CpuPart:
    """Tiles of a batch that the CPU decodes into memory that is fast to upload."""

    def __init__(
        self, decoder: NvImageCodecDecoder, batch: EncodedBatch, indices: Sequence[int]
    ) -> None:
        self.indices = indices
        self._tiles: list[EncodedTile] = [batch[index] for index in indices]
        size = batch.level.tile_bytes
        self._memory = decoder.worker.device.staging(len(indices), size)
        self._pending: CpuBatch = decoder.cpu.schedule(
            self._tiles, self._deliver, list(self._memory)
        )

    def _deliver(self, place: int, pixels: NDArray[Any]) -> None:
        """Give a tile that was cut to its level the room of a full one."""
        tile = self._tiles[place]
        grid = tile.level.grid
        if pixels.shape[:2] != (grid.tile_height, grid.tile_width):
            shape = (grid.tile_height, grid.tile_width, tile.level.channels)
            cut = pixels.copy()
            full = self._memory[place].view(tile.level.dtype).reshape(shape)
            full[...] = tile.background
            full[: cut.shape[0], : cut.shape[1]] = cut

    def wait(self) -> dict[int, str]:
        failed = self._pending.wait()
        return {self.indices[place]: reason for place, reason in failed.items()}

    def pixels(self) -> list[tuple[int, NDArray[np.uint8]]]:
        return list(zip(self.indices, self._memory, strict=True))

    def cancel(self) -> None:
        self._pending.cancel()
