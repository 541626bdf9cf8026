"""A batch of tiles in flight: decoded on a device, and on the CPU what the device can't."""

from __future__ import annotations

import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import TYPE_CHECKING, Any

from napari_wsigpu.codecs.cpu import HostSlots
from napari_wsigpu.model.errors import DeviceError, device_error

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.decoder import Deliver, EncodedBatch
    from napari_wsigpu.gpu.device.cuda import CudaDevice
    from napari_wsigpu.gpu.device.device import Event, Slots, Stream
    from napari_wsigpu.gpu.device.worker import DecodeWorker
    from napari_wsigpu.gpu.jpeg.codestream import Prepared
    from napari_wsigpu.gpu.jpeg.nvimagecodec import NvImageCodecDecoder


@dataclass(eq=False, repr=False)
class GpuBatch:
    """A batch in flight. It owns all that the device still uses, until it is done.

    Attributes
    ----------
    on_cpu : int
        Number of tiles that the CPU decoded, or tried to; final after `wait`.
    """

    _decoder: NvImageCodecDecoder
    _batch: EncodedBatch
    _slots: Slots
    _deliver: Deliver
    _stream: Stream
    on_cpu: int = 0
    _done: threading.Event = field(default_factory=threading.Event)
    _claim: threading.Lock = field(default_factory=threading.Lock)
    _begun: bool = False
    _engine: str = ""
    _failures: dict[int, str] = field(default_factory=dict)
    _error: Exception | None = None
    _proven: int = 0
    _prepared: Prepared | None = None
    _on_gpu: list[int] = field(default_factory=list)
    _decoded: list[int] = field(default_factory=list)
    _cpu_parts: list[_CpuPart] = field(default_factory=list)
    _uploaded: list[_CpuPart] = field(default_factory=list)
    _samples: dict[int, Future[NDArray[Any]]] = field(default_factory=dict)
    _by_device: dict[int, NDArray[Any]] = field(default_factory=dict)
    _ready: Event | None = None

    def prepare(self, share: float) -> None:
        """Sort the tiles by who decodes them, and start those of the CPU.

        Raises
        ------
        MemoryError
            If the device has no memory to work in.
        """
        made = self._decoder.maker(self._batch.level)
        if not isinstance(made, str):
            worker, count = self._decoder.worker, round(share * len(self._batch))
            work = worker.take_workspace()
            try:
                self._prepared = made.prepare(self._batch, count, work)
            except BaseException:
                worker.give_workspace(work)
                raise
            self._on_gpu = list(chain.from_iterable(self._prepared.groups))
        if len(self._on_gpu) < len(self._batch):
            rest = sorted({*range(len(self._batch))} - {*self._on_gpu})
            self._cpu_parts.append(_CpuPart(self._decoder, self._batch, rest))

    def run(self, worker: DecodeWorker) -> None:
        """Decode, unless another thread has started to; a job of the worker."""
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
            self.run(worker)
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
        for part in self._cpu_parts:
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
                self._stream.synchronize()

    def _begin(self, device: CudaDevice) -> None:
        """Decode, and give the stream all that follows; nothing waits for the stream."""
        self._begun = True
        worker, stream = self._decoder.worker, self._stream
        if self._prepared is not None:
            prepared, kind = self._prepared, self._prepared.kind
            prepared.describe(self._slots.addresses.tolist(), stream)
            samples = self._decoder.verifier.samples(kind, self._on_gpu)
            self._samples = {
                index: worker.decode_reference(self._batch[index]) for index in samples
            }
            with worker.decoding:
                worked = prepared.decode(worker)
                self._engine = prepared.engine(worker)
            self._decoded = list(chain.from_iterable(compress(prepared.groups, worked)))
            if self._decoded:
                prepared.finish(worked, self._slots, device, stream)
        self._deliver(self._decoded + self._take_cpu_parts(stream))
        self._download_samples(device, stream)
        self._ready = device.record(stream)

    def _settle(self, worker: DecodeWorker) -> None:
        """Wait for the stream, and have the CPU decode what did not work."""
        assert self._ready is not None
        self._ready.synchronize()
        self._begun = False
        again: list[int] = []
        if len(self._decoded) < len(self._on_gpu):
            again += sorted({*self._on_gpu} - {*self._decoded})
        if self._prepared is not None and self._decoded:
            doubtful = self._prepared.doubtful(self._decoded)
            again += doubtful
            if len(self._decoded) > 1 and self._prepared.joins:
                everywhere = len(doubtful) == len(self._decoded)
                self._decoder.verifier.note_doubts(self._engine, everywhere=everywhere)
        if not self._verified(set(again)):
            again = self._on_gpu
        if again:
            self._cpu_parts.append(_CpuPart(self._decoder, self._batch, again))
            self._begun = True
            with worker.device.active():
                self._deliver(self._take_cpu_parts(self._stream))
                worker.device.record(self._stream).synchronize()
            self._begun = False

    def _take_cpu_parts(self, stream: Stream) -> list[int]:
        """Upload what the CPU decoded; return the indices of these tiles."""
        done: list[int] = []
        parts, self._cpu_parts = self._cpu_parts, []
        self._uploaded += parts
        for part in parts:
            failed = part.wait()
            self._failures |= failed
            self.on_cpu += len(part.indices)
            for index, pixels in zip(part.indices, part.memory, strict=True):
                if index not in failed:
                    address = int(self._slots.addresses[index])
                    self._decoder.worker.device.upload(address, pixels, stream)
                    done.append(index)
        return done

    def _download_samples(self, device: CudaDevice, stream: Stream) -> None:
        for index in self._samples:
            if index in self._decoded:
                address = int(self._slots.addresses[index])
                self._by_device[index] = device.download_tile(address, self._slots.tile, stream)

    def _verified(self, doubtful: set[int]) -> bool:
        for index, pixels in self._by_device.items():
            sample = self._samples[index]
            if index not in doubtful and sample.exception() is None:
                self._proven += 1
                if not self._decoder.verifier.agree(self._engine, pixels, sample.result()):
                    return False
        return True

    def _let_go(self) -> None:
        for part in self._cpu_parts:
            part.cancel()
        for sample in self._samples.values():
            if not sample.cancel():
                sample.exception()  # it reads the batch's bytes
        if self._prepared is not None:
            unproven = len(self._samples) - self._proven
            self._decoder.verifier.give_back(self._prepared.kind, unproven)
            self._decoder.worker.give_workspace(self._prepared.work)
        self._prepared = self._ready = None
        self._samples = {}
        self._cpu_parts.clear()
        self._uploaded.clear()
        self._by_device.clear()
        self._batch.release()
        self._deliver = lambda indices: None


class _CpuPart:
    """Tiles of a batch that the CPU decodes into memory that is fast to upload."""

    def __init__(
        self, decoder: NvImageCodecDecoder, batch: EncodedBatch, indices: Sequence[int]
    ) -> None:
        self.indices = indices
        size = batch.level.tile_bytes
        self.memory = decoder.worker.device.staging(len(indices), size)
        self._level = batch.level
        self._slots = HostSlots(list(self.memory))
        part = batch.part(indices)
        self._pending = decoder.cpu.schedule(part, self._slots, self._widen)
        self.cancel = self._pending.cancel

    def _widen(self, places: Sequence[int]) -> None:
        """Give tiles that were cut to their level the memory of full ones."""
        grid = self._level.grid
        for place in places:
            pixels = self._slots.pixels[place]
            if pixels.shape[:2] != (grid.tile_height, grid.tile_width):
                shape = (grid.tile_height, grid.tile_width, self._level.channels)
                cut = pixels.copy()
                full = self.memory[place].view(self._level.dtype).reshape(shape)
                full[: cut.shape[0], : cut.shape[1]] = cut

    def wait(self) -> dict[int, str]:
        failed = self._pending.wait()
        return {self.indices[place]: reason for place, reason in failed.items()}
