"""`GpuBatch`: a batch of tiles decoded on a device, or on the CPU if the device cannot."""

from __future__ import annotations

import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.codecs.cpu import HostSlots
from napari_wsigpu.model.errors import DeviceError, device_error

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from napari_wsigpu.codecs.decoder import Deliver, EncodedBatch
    from napari_wsigpu.gpu.device.cuda import CudaDevice
    from napari_wsigpu.gpu.device.interfaces import Event, Slots, Stream
    from napari_wsigpu.gpu.device.worker import DecodeWorker
    from napari_wsigpu.gpu.jpeg.codestream import PreparedBatch
    from napari_wsigpu.gpu.jpeg.nvimagecodec import NvImageCodecDecoder
    from napari_wsigpu.model.arrays import Array


@dataclass(eq=False, repr=False)
class GpuBatch:
    """A batch of tiles that is being decoded.

    Up to two threads take part: the worker's thread may call `run`, and the caller's thread calls
    `wait` or `cancel`. The thread that acquires `_claim` decodes and then sets `_done`. In between,
    only that thread touches the other attributes; afterwards, only the caller's thread does.

    Until its stream is synchronized, the batch keeps alive all memory that the device uses: encoded
    bytes, the workspace, and the pixels that are uploaded or downloaded.

    Attributes
    ----------
    on_cpu : int
        Number of tiles that the CPU decoded, or tried to decode; final after `wait`.
    """

    _decoder: NvImageCodecDecoder
    _batch: EncodedBatch
    _slots: Slots
    _deliver: Deliver
    _stream: Stream
    on_cpu: int = 0
    _done: threading.Event = field(default_factory=threading.Event)
    _claim: threading.Lock = field(default_factory=threading.Lock)
    # Whether the stream may have work of this batch.
    _stream_busy: bool = False
    _engine: str = ""
    _failures: dict[int, str] = field(default_factory=dict)
    _error: Exception | None = None
    _compared: int = 0
    _prepared: PreparedBatch | None = None
    _on_gpu: list[int] = field(default_factory=list)
    _decoded: list[int] = field(default_factory=list)
    _cpu_parts: list[_CpuPart] = field(default_factory=list)
    # Parts whose memory is being uploaded; held until the stream is synchronized.
    _uploaded: list[_CpuPart] = field(default_factory=list)
    # Tiles that are compared: the CPU's result, and the device's.
    _samples: dict[int, Future[Array]] = field(default_factory=dict)
    _by_device: dict[int, Array] = field(default_factory=dict)
    _ready: Event | None = None

    def prepare(self) -> None:
        """Prepare the tiles that the device can decode, and start decoding the others on the CPU.

        Raises
        ------
        MemoryError
            If there is not enough memory for the workspace.
        """
        preparer = self._decoder.preparer(self._batch.level)
        if not isinstance(preparer, str):
            worker, count = self._decoder.worker, len(self._batch)
            work = worker.acquire_workspace()
            try:
                self._prepared = preparer.prepare(self._batch, count, work)
            except BaseException:
                worker.release_workspace(work)
                raise
            self._on_gpu = list(chain.from_iterable(self._prepared.groups))
        if len(self._on_gpu) < len(self._batch):
            rest = sorted({*range(len(self._batch))} - {*self._on_gpu})
            self._cpu_parts.append(_CpuPart(self._decoder, self._batch, rest))

    def run(self, worker: DecodeWorker) -> None:
        """Decode the batch, unless another thread has claimed it; a job of the worker."""
        if not self._claim.acquire(blocking=False):
            return
        try:
            with worker.device.active():
                self._decode(worker.device)
        except Exception as error:  # `wait` raises it in the caller's thread
            self._error = error
        finally:
            self._done.set()

    def wait(self) -> dict[int, str]:
        """Block until all tiles are decoded or have failed; return reasons of failures by index.

        Raises
        ------
        DeviceError
            If the device itself fails.
        """
        worker = self._decoder.worker
        if not self._claim.locked():
            self.run(worker)
        with worker.turn.lent():
            self._done.wait()
            try:
                if self._error is None and self._ready is not None:
                    self._complete(worker)
            except Exception as error:  # raised below, like errors of `run`
                self._error = error
            finally:
                self._synchronize()
                self._release()
        if self._error is None:
            return self._failures
        # An exception may be stored; its frames would keep the bytes and pixels of the batch alive.
        traceback.clear_frames(self._error.__traceback__)
        if isinstance(self._error, DeviceError):
            raise self._error
        raise device_error(worker.device.name, self._error) from self._error

    def cancel(self) -> None:
        """Drop the batch if no thread decodes it yet; block until the device is done with it."""
        for part in self._cpu_parts:
            part.cancel()
        if self._claim.acquire(blocking=False):
            self._done.set()
        self._done.wait()
        self._synchronize()
        self._release()

    @property
    def _pixels(self) -> int:
        """Number of pixels in each tile."""
        return self._slots.tile.height * self._slots.tile.width

    def _synchronize(self) -> None:
        """Block until the device no longer uses the batch's memory, even after an error."""
        if self._stream_busy:
            self._stream_busy = False
            with suppress(Exception):  # a device that failed has already been reported
                self._stream.synchronize()

    def _decode(self, device: CudaDevice) -> None:
        """Decode, and submit all later steps to the stream, without waiting for the stream."""
        self._stream_busy = True
        worker, stream = self._decoder.worker, self._stream
        if self._prepared is not None:
            prepared, kind = self._prepared, self._prepared.kind
            prepared.set_targets(self._slots.addresses.tolist(), stream)
            samples = self._decoder.verifier.samples(kind, self._on_gpu, self._pixels)
            self._samples = {
                index: worker.decode_reference(self._batch[index]) for index in samples
            }
            # References are decoded on the CPU while the device decodes.
            with worker.turn.lent(), worker.decoding:
                worked = prepared.decode(worker)
                self._engine = prepared.engine(worker)
            self._decoded = list(chain.from_iterable(compress(prepared.groups, worked)))
            if self._decoded:
                prepared.finish(worked, self._slots, device, stream)
        # Upload the CPU's tiles before `deliver` submits work on them to the same stream.
        self._deliver(self._decoded + self._upload_cpu_parts(stream))
        self._download_samples(device, stream)
        self._ready = device.record(stream)

    def _complete(self, worker: DecodeWorker) -> None:
        """Wait for the stream; let the CPU decode the tiles that failed or may be wrong."""
        assert self._ready is not None
        self._ready.synchronize()
        self._stream_busy = False
        retried: list[int] = []
        if len(self._decoded) < len(self._on_gpu):
            retried += sorted({*self._on_gpu} - {*self._decoded})
        if self._prepared is not None and self._decoded:
            doubtful = self._prepared.doubtful(self._decoded)
            retried += doubtful
            # In stacks, the decoder rather than a tile may be at fault if every tile is doubtful.
            if len(self._decoded) > 1 and self._prepared.joins:
                everywhere = len(doubtful) == len(self._decoded)
                self._decoder.verifier.record_doubts(self._engine, everywhere=everywhere)
        if not self._verified(set(retried)):
            retried = self._on_gpu
        if retried:
            self._cpu_parts.append(_CpuPart(self._decoder, self._batch, retried))
            self._stream_busy = True
            with worker.device.active():
                self._deliver(self._upload_cpu_parts(self._stream, cover=True))
                worker.device.record(self._stream).synchronize()
            self._stream_busy = False

    def _upload_cpu_parts(self, stream: Stream, *, cover: bool = False) -> list[int]:
        """Wait for the CPU, and upload its tiles; return the indices of those to deliver.

        Parameters
        ----------
        stream : Stream
            Stream of the copies.
        cover : bool
            Whether to deliver background instead of damaged tiles, as the device's pixels of these
            tiles have been delivered before.
        """
        done: list[int] = []
        parts, self._cpu_parts = self._cpu_parts, []
        self._uploaded += parts
        turn = self._decoder.worker.turn
        for part in parts:
            with turn.lent():
                failed = part.wait()
            self._failures |= failed
            self.on_cpu += len(part.indices)
            for index, pixels in zip(part.indices, part.memory, strict=True):
                if index in failed and cover:
                    pixels.view(self._batch.level.dtype)[...] = self._batch.background
                if index not in failed or cover:
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
                self._compared += 1
                if not self._decoder.verifier.agree(self._engine, pixels, sample.result()):
                    return False
        return True

    def _release(self) -> None:
        for part in self._cpu_parts:
            part.cancel()
        for sample in self._samples.values():
            if not sample.cancel():
                sample.exception()  # wait: the thread reads the batch's bytes
        if self._prepared is not None:
            unused = len(self._samples) - self._compared
            kind = self._prepared.kind
            self._decoder.verifier.return_samples(kind, unused, self._pixels)
            self._decoder.worker.release_workspace(self._prepared.work)
        self._prepared = self._ready = None
        self._samples = {}
        self._cpu_parts.clear()
        self._uploaded.clear()
        self._by_device.clear()
        self._batch.release()
        # `deliver` may reference this batch; dropping it breaks the cycle.
        self._deliver = lambda indices: None


class _CpuPart:
    """Tiles of a batch that the CPU decodes to staging memory, from which they are uploaded."""

    def __init__(
        self, decoder: NvImageCodecDecoder, batch: EncodedBatch, indices: Sequence[int]
    ) -> None:
        self.indices = indices
        size = batch.level.tile_bytes
        self.memory = decoder.worker.device.staging((len(indices), size), np.dtype(np.uint8))
        self._level = batch.level
        self._slots = HostSlots(list(self.memory))
        part = batch.part(indices)
        self._pending = decoder.cpu.schedule(part, self._slots, self._widen)
        self.cancel = self._pending.cancel

    def _widen(self, slots: Sequence[int]) -> None:
        """Move the pixels of cropped tiles to their positions in a full tile."""
        grid = self._level.grid
        for slot in slots:
            pixels = self._slots.pixels[slot]
            if pixels.shape[:2] != (grid.tile_height, grid.tile_width):
                shape = (grid.tile_height, grid.tile_width, self._level.channels)
                # The rows move within the same memory, so copy them first.
                cropped = pixels.copy()
                full = self.memory[slot].view(self._level.dtype).reshape(shape)
                full[: cropped.shape[0], : cropped.shape[1]] = cropped

    def wait(self) -> dict[int, str]:
        failed = self._pending.wait()
        return {self.indices[slot]: reason for slot, reason in failed.items()}
