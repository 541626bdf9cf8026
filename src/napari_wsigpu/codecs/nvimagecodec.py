"""Tiles decoded by nvImageCodec: batches in flight, and the worker thread that runs them."""

from __future__ import annotations

import logging
import queue
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from napari_wsigpu.codecs.codestream import CodeStreams, recipe
from napari_wsigpu.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.codestream import Recipe
    from napari_wsigpu.codecs.cpu import CpuBatch, CpuDecoder
    from napari_wsigpu.codecs.decoder import EncodedTile
    from napari_wsigpu.codecs.device import Device, Stream, TileFormat
    from napari_wsigpu.codecs.verify import Verifier
    from napari_wsigpu.formats.layout import LevelLayout

    Job = Callable[["DecodeWorker", Stream], None]
    Then = Callable[[Stream, Sequence[int]], None]

SWITCH_INTERVAL = 5e-5

logger = logging.getLogger(__name__)


class Slots(NamedTuple):
    """Places in device memory for the tiles of a batch.

    Attributes
    ----------
    tile : TileFormat
        What each place holds.
    addresses : ndarray of int64, shape (tiles,)
        Where they are.
    images : sequence
        The same as nvImageCodec's images.
    """

    tile: TileFormat
    addresses: NDArray[np.int64]
    images: Sequence[Any]


class DecodeWorker:
    """One thread with a decoder of each kind and a stream of its own.

    A decoder must not be used by two threads: it would end the process. The thread starts
    with the first batch.

    Parameters
    ----------
    device : Device
        What it decodes on.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._decoders: dict[str, tuple[Any, str | None]] = {}
        self._warned: set[str] = set()

    def submit(self, job: Job) -> None:
        """Have a job run with the worker and its stream, after those before it."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="wsigpu-gpu", daemon=True)
                self._thread.start()
            self._queue.put(job)

    def close(self) -> None:
        """End the thread after the batches that were submitted, and let go of its decoders."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._queue.put(None)
        if thread is not None:
            thread.join()

    def engine(self, kind: str) -> str | None:
        """Return the name of the path that decodes a kind, None if there is none.

        From the worker's thread only. The first time, the decoder is made.
        """
        if kind not in self._decoders:
            try:
                self._decoders[kind] = self.device.decoder(kind)
            except DeviceError as error:
                self._decoders[kind] = None, None
                self._warn(kind, error)
        return self._decoders[kind][1]

    def decode(
        self,
        how: Recipe,
        streams: Sequence[Any],
        images: Sequence[Any],
        params: Any,
        stream: Stream,
    ) -> list[bool]:
        """Decode code streams into images; say of each whether it worked.

        If the device runs out of memory, smaller parts are tried.
        """
        if not streams or self.engine(how.kind) is None:
            return [False] * len(streams)
        decoder = self._decoders[how.kind][0]
        try:
            with prompt_switching():
                found = decoder.decode(
                    streams, images=images, params=params, cuda_stream=stream.ptr
                )
        except (RuntimeError, ValueError, MemoryError) as error:
            if len(streams) > 1:
                half = len(streams) // 2
                return [
                    *self.decode(how, streams[:half], images[:half], params, stream),
                    *self.decode(how, streams[half:], images[half:], params, stream),
                ]
            self._warn(how.kind, error)
            return [False]
        return [image is not None for image in found]

    def _warn(self, kind: str, error: Exception) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(
                "What '%s' can't decode is decoded on the CPU: %s", self.device.name, error
            )

    def _work(self) -> None:
        stream = None
        while (job := self._queue.get()) is not None:
            with self.device.active():
                stream = stream or self.device.new_stream()
                job(self, stream)
            del job
        self._decoders.clear()


_switching = threading.Lock()
_switchers = 0
_usual_interval = 0.0


@contextmanager
def prompt_switching() -> Iterator[None]:
    """Have Python's threads take turns every 50 µs while a batch is decoded.

    nvImageCodec asks for the interpreter once an image. With a busy thread beside it, each
    time would take 5 ms by default, and a viewport half a second.
    """
    global _switchers, _usual_interval
    with _switching:
        if _switchers == 0:
            _usual_interval = sys.getswitchinterval()
            sys.setswitchinterval(min(SWITCH_INTERVAL, _usual_interval))
        _switchers += 1
    try:
        yield
    finally:
        with _switching:
            _switchers -= 1
            if _switchers == 0:
                sys.setswitchinterval(_usual_interval)


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
        from nvidia import nvimgcodec

        self.worker = worker
        self.cpu = cpu
        self.verifier = verifier
        self._nvimgcodec = nvimgcodec
        self._makers: dict[int, tuple[Recipe, CodeStreams, Any] | str] = {}

    def schedule(
        self,
        batch: Sequence[EncodedTile],
        slots: Slots,
        then: Then,
        *,
        share: float = 1.0,
        stream: Stream | None = None,
    ) -> GpuBatch:
        """Begin to decode a batch of tiles of one level and return at once.

        Parameters
        ----------
        batch : sequence of EncodedTile
            The tiles.
        slots : Slots
            Where each is decoded to.
        then : callable
            Called by the worker with a stream and indices of tiles in `batch`: may give the
            stream work that uses these tiles. It is called again for tiles that had to be
            decoded another way.
        share : float
            Part of the tiles that the device decodes; the CPU decodes the rest meanwhile.
        stream : Stream, optional
            Used instead of the worker's own.
        """
        pending = GpuBatch(self, batch, slots, then, stream)
        pending.prepare(share)
        self.worker.submit(pending.run)
        return pending

    def images(self, addresses: Sequence[int], tile: TileFormat) -> list[Any]:
        """Wrap places in device memory for nvImageCodec, once for all batches."""
        views = self.worker.device.views(addresses, tile)
        return list(self._nvimgcodec.as_images(views))

    def code_stream(self, data: Any) -> Any:
        """Wrap encoded bytes for nvImageCodec."""
        return self._nvimgcodec.CodeStream(data)

    def maker(self, level: LevelLayout) -> tuple[Recipe, CodeStreams, Any] | str:
        """Return recipe, code streams and parameters of a level, or why the CPU decodes it."""
        if self.verifier.reason is not None:
            return self.verifier.reason
        made = self._makers.get(id(level))
        if made is None:
            how = recipe(level)
            made = (
                how if isinstance(how, str) else (how, CodeStreams(level, how), self._params(how))
            )
            self._makers[id(level)] = made
        return made

    def _params(self, how: Recipe) -> Any:
        nvimgcodec = self._nvimgcodec
        return nvimgcodec.DecodeParams(
            apply_exif_orientation=False,
            allow_any_depth=True,
            sample_format=nvimgcodec.SampleFormat.__members__[how.sample_format],
            color_spec=nvimgcodec.ColorSpec.__members__[how.color_spec],
        )


class GpuBatch:
    """A batch in flight. It owns all that the device still uses, until it is done."""

    def __init__(
        self,
        decoder: NvImageCodecDecoder,
        batch: Sequence[EncodedTile],
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
        self._cancelled = False
        self._failures: dict[int, str] = {}
        self._error: Exception | None = None
        self._decoded_on_cpu = 0
        self._how: Recipe | None = None
        self._params: Any = None
        self._on_gpu: list[int] = []
        self._streams: list[Any] = []
        self._cpu_parts: list[_CpuPart] = []
        self._taken: list[_CpuPart] = []
        self._samples: _CpuPart | None = None

    @property
    def on_cpu(self) -> int:
        """Number of tiles that the CPU decoded, or tried to; final after `wait`."""
        return self._decoded_on_cpu

    def prepare(self, share: float) -> None:
        """Sort the tiles by who decodes them, and start those of the CPU."""
        made = self._decoder.maker(self._batch[0].level) if self._batch else ""
        if not isinstance(made, str):
            self._how, streams, self._params = made
            for index in range(round(share * len(self._batch))):
                data = streams.data(self._batch[index])
                if data is not None:
                    self._on_gpu.append(index)
                    self._streams.append(self._decoder.code_stream(data))
            samples = self._decoder.verifier.samples(self._how.kind, self._on_gpu)
            if samples:
                self._samples = _CpuPart(self._decoder, self._batch, samples)
        rest = sorted(set(range(len(self._batch))) - set(self._on_gpu))
        if rest:
            self._cpu_parts.append(_CpuPart(self._decoder, self._batch, rest))

    def run(self, worker: DecodeWorker, stream: Stream) -> None:
        """Decode; called by the worker."""
        try:
            if not self._cancelled:
                self._run(worker, self._stream or stream)
        except Exception as error:  # every kind is handed to the thread that waits
            self._error = error
        finally:
            self._done.set()
            self._let_go()

    def wait(self) -> dict[int, str]:
        """Return when every tile was decoded or failed: index -> reason of each failure.

        Raises
        ------
        DeviceError
            If the device itself fails.
        """
        self._done.wait()
        if isinstance(self._error, DeviceError):
            raise self._error
        if self._error is not None:
            name = self._decoder.worker.device.name
            raise DeviceError(
                f"'{name}' failed ({self._error}); use device='cpu', or start again."
            ) from self._error
        return self._failures

    def cancel(self) -> None:
        """Drop the batch if it is not begun, and return when the device is done with it."""
        self._cancelled = True
        for part in (self._samples, *self._cpu_parts):
            if part is not None:
                part.cancel()
        self._done.wait()

    def _run(self, worker: DecodeWorker, stream: Stream) -> None:
        device, tile = worker.device, self._slots.tile
        decoded: list[int] = []
        unclear = None
        if self._how is not None:
            images = [self._slots.images[index] for index in self._on_gpu]
            worked = worker.decode(self._how, self._streams, images, self._params, stream)
            decoded = [index for index, good in zip(self._on_gpu, worked, strict=True) if good]
            if decoded and self._how.convert:
                device.ycbcr_to_rgb(self._rows(decoded), tile, stream)
            if decoded and self._how.engine_rgb and worker.engine(self._how.kind) == "hardware":
                unclear = device.round_as_libjpeg(self._rows(decoded), tile, stream)
        ready = decoded + self._take_cpu_parts(stream)
        self._then(stream, ready)
        flags = None if unclear is None else device.download(unclear, stream)
        compared = self._download_samples(device, decoded, stream)
        stream.synchronize()
        again = sorted(set(self._on_gpu) - set(decoded))
        if flags is not None and flags.any():
            again += [index for index, flag in zip(decoded, flags, strict=True) if flag]
        if not self._verified(worker, compared, set(again)):
            again = list(self._on_gpu)
        if again:
            self._cpu_parts.append(_CpuPart(self._decoder, self._batch, again))
            self._then(stream, self._take_cpu_parts(stream))
            stream.synchronize()

    def _take_cpu_parts(self, stream: Stream) -> list[int]:
        """Upload what the CPU decoded; return the indices of these tiles."""
        done: list[int] = []
        parts, self._cpu_parts = self._cpu_parts, []
        self._taken += parts
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

    def _download_samples(
        self, device: Device, decoded: list[int], stream: Stream
    ) -> list[tuple[int, NDArray[Any], NDArray[Any]]]:
        if self._samples is None:
            return []
        failed = self._samples.wait()
        return [
            (
                index,
                device.download_tile(int(self._slots.addresses[index]), self._slots.tile, stream),
                expected,
            )
            for index, expected in self._samples.pixels()
            if index in decoded and index not in failed
        ]

    def _verified(
        self,
        worker: DecodeWorker,
        compared: list[tuple[int, NDArray[Any], NDArray[Any]]],
        again: set[int],
    ) -> bool:
        engine = None if self._how is None else worker.engine(self._how.kind)
        if engine is None:
            return True
        agree = self._decoder.verifier.agree
        return all(
            agree(engine, pixels, expected.view(pixels.dtype).reshape(pixels.shape))
            for index, pixels, expected in compared
            if index not in again
        )

    def _rows(self, indices: list[int]) -> NDArray[np.int64]:
        rows = np.zeros((len(indices), 3), np.int64)
        rows[:, 0] = self._slots.addresses[indices]
        return rows

    def _let_go(self) -> None:
        for part in (self._samples, *self._cpu_parts):
            if part is not None:
                part.cancel()
        self._streams.clear()
        self._cpu_parts.clear()
        self._taken.clear()
        self._samples = None
        del self._then


class _CpuPart:
    """Tiles of a batch that the CPU decodes into memory that is fast to upload."""

    def __init__(
        self, decoder: NvImageCodecDecoder, batch: Sequence[EncodedTile], indices: Sequence[int]
    ) -> None:
        self.indices = indices
        self._tiles = [batch[index] for index in indices]
        size = batch[0].level.tile_bytes
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
