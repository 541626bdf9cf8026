"""JPEG tiles on the CPU, decoded by one call for many where many cores share the work.

Threads of Python wait for each other in the interpreter between any two tiles: sixteen decode
hardly more small tiles than eight. nvImageCodec's CPU backend, which is libjpeg-turbo as well and
gives the same pixels, decodes a hundred tiles by its own threads without the interpreter.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.codecs.cpu import FEW_CORES, CpuDecoder, HostSlots
from napari_wsigpu.codecs.jpeg import (
    END_OF_IMAGE,
    LONGEST_HEADER,
    header_length,
    header_of_tile,
    segments,
)
from napari_wsigpu.errors import SlideError
from napari_wsigpu.gpu.codestream import recipe
from napari_wsigpu.gpu.library import CPU_ONLY, NO_DEVICE, ImageFormat, Library

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.decoder import Deliver, EncodedBatch, PendingBatch
    from napari_wsigpu.layout import LevelLayout

    Data = bytes | memoryview

# So many tiles at a time: their pixels stay in the processors' caches until they are pasted.
AT_ONCE = 128
# One batch is pasted while others are decoded.
BATCHES = 2
# For fewer or larger tiles, threads of Python do as well.
FEWEST, LARGEST_PIXELS = 16, 1 << 19
FORMATS = {"ycbcr": ("I_RGB", "SRGB"), "stored": ("I_RGB", "SRGB"), "gray": ("I_Y", "GRAY")}
START_OF_IMAGE = b"\xff\xd8"
# Adobe's segment, by which libjpeg knows that samples are RGB, if JFIF's does not say YCbCr.
IS_RGB, JFIF = b"\xff\xee\0\x0eAdobe\0\x64\0\0\0\0\0", 0xE0
# As libjpeg does by itself, and everybody else who decodes by it.
SMOOTH = "libjpeg_turbo_decoder:fancy_upsampling=1"

logger = logging.getLogger(__name__)


class HostJpegs:
    """nvImageCodec's CPU decoders of one process; the library is loaded in the background.

    Parameters
    ----------
    opened : callable
        Loads the library, or raises a `DeviceError`.
    """

    def __init__(self, opened: Callable[[], Library] = Library) -> None:
        self._opened = opened
        self._lock = threading.Lock()
        self._starting: threading.Thread | None = None
        self._library: Library | None = None
        self._idle: dict[int, list[_Decoder]] = {}

    def take(self, threads: int) -> _Decoder | None:
        """Return a decoder of so many threads to the caller alone; None while there is none."""
        self._begin()
        with self._lock:
            if self._library is None:
                return None
            idle = self._idle.get(threads)
            if idle:
                return idle.pop()
        return _Decoder(self._library, threads)

    def give(self, decoder: _Decoder) -> None:
        """Take a decoder back for the next batch."""
        with self._lock:
            self._idle.setdefault(decoder.threads, []).append(decoder)

    def wait(self) -> bool:
        """Wait until the library is there, and return whether it can be used."""
        self._begin().join()
        return self._library is not None

    def close(self) -> None:
        """Let go of decoders that nobody uses."""
        with self._lock:
            idle, self._idle = self._idle, {}
        for decoder in (decoder for decoders in idle.values() for decoder in decoders):
            decoder.close()

    def _begin(self) -> threading.Thread:
        """Return what loads the library, at work since the first call."""
        with self._lock:
            if self._starting is None:
                # Not joined at the end of the process, which need not wait for a library.
                self._starting = threading.Thread(
                    target=self._start, name="wsigpu-library", daemon=True
                )
                self._starting.start()
            return self._starting

    def _start(self) -> None:
        try:
            library = self._opened()
        except SlideError as error:
            logger.debug("JPEGs are decoded by threads of Python: %s", error)
        else:
            self._library = library


class _Decoder:
    """A decoder with its handles, and memory for the pixels of tiles that nobody keeps."""

    def __init__(self, library: Library, threads: int) -> None:
        self.threads = threads
        self._decoder = library.decoder(NO_DEVICE, CPU_ONLY, SMOOTH, threads)
        self._streams, self._images = library.streams(), library.images(on_device=False)
        self._memory = np.empty((0, 0), np.uint8)
        self._addresses: list[int] = []

    def memory(self, size: int) -> NDArray[np.uint8]:
        """Return memory for so many bytes of each of `AT_ONCE` tiles."""
        if self._memory.shape[1] != size:
            self._memory = np.empty((AT_ONCE, size), np.uint8)
            first = int(self._memory.ctypes.data)
            self._addresses = [first + size * number for number in range(AT_ONCE)]
        return self._memory

    def decode(
        self,
        encoded: Sequence[Data],
        targets: Sequence[NDArray[np.uint8] | None],
        image: ImageFormat,
    ) -> list[bool]:
        """Decode up to `AT_ONCE` JPEGs, each to its target or a row of `memory`."""
        joined = np.frombuffer(b"".join(encoded), np.uint8)
        address = int(joined.ctypes.data)
        self._streams.clear()
        self._images.clear()
        taken = []
        for number, (data, target) in enumerate(zip(encoded, targets, strict=True)):
            if self._streams.add(address, len(data)):
                place = self._addresses[number] if target is None else int(target.ctypes.data)
                self._images.add(place, image, 0)
                taken.append(number)
            address += len(data)
        worked = [False] * len(encoded)
        with suppress(RuntimeError):  # then each is decoded by itself
            good = self._decoder.decode(self._streams.used, self._images.used)
            for number, decoded in zip(taken, good, strict=True):
                worked[number] = decoded
        self._streams.clear()
        return worked

    def close(self) -> None:
        self._decoder.close()


class HostDecoder:
    """Decodes on the CPU: small JPEGs many at a time, anything else by threads of Python.

    Parameters
    ----------
    cpu : CpuDecoder
        What decodes the others, and tiles that nvImageCodec refuses.
    jpegs : HostJpegs
        The process's decoders.
    """

    name = "cpu"

    def __init__(self, cpu: CpuDecoder, jpegs: HostJpegs) -> None:
        self._cpu = cpu
        self._jpegs = jpegs
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def refusal(self, level: LevelLayout) -> str | None:
        """Say why it can't decode tiles of a level; None if it can."""
        return self._cpu.refusal(level)

    def schedule(self, batch: EncodedBatch, slots: HostSlots, deliver: Deliver) -> PendingBatch:
        """Begin to decode a batch and return at once; see `Decoder.schedule`."""
        decoder = self._jpegs.take(self._cpu.threads) if self._takes(batch) else None
        if decoder is None:
            return self._cpu.schedule(batch, slots, deliver)
        pending = _JpegBatch(batch, slots, deliver, decoder, self._cpu, self._jpegs)
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(BATCHES, "wsigpu-jpegs")
            with suppress(RuntimeError):  # the interpreter ends: who waits decodes
                pending.helper = self._pool.submit(pending.work)
        return pending

    def release(self) -> None:
        """Join the threads; the next batch takes new ones."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)
        self._cpu.release()

    def _takes(self, batch: EncodedBatch) -> bool:
        level = batch.level
        pixels = level.grid.tile_height * level.grid.tile_width
        many = self._cpu.threads > FEW_CORES and len(batch) >= FEWEST and batch.single
        if not many or pixels > LARGEST_PIXELS or level.encoding.jpeg_color not in FORMATS:
            return False
        how = recipe(level)
        return not isinstance(how, str) and how.kind == "jpeg"


class _JpegBatch:
    """JPEG tiles of one level that are being decoded by one thread."""

    def __init__(
        self,
        batch: EncodedBatch,
        slots: HostSlots,
        deliver: Deliver,
        decoder: _Decoder,
        cpu: CpuDecoder,
        jpegs: HostJpegs,
    ) -> None:
        level = batch.level
        grid, encoding = level.grid, level.encoding
        self._batch: EncodedBatch | None = batch
        self._slots, self._deliver = slots, deliver
        self._decoder, self._cpu, self._jpegs = decoder, cpu, jpegs
        self._shape = grid.tile_height, grid.tile_width, level.channels
        self._size = level.tile_bytes
        self._image = ImageFormat((self._shape,), encoding.dtype, *FORMATS[encoding.jpeg_color])
        tables = encoding.jpeg_tables[0]
        self._stored = encoding.jpeg_color == "stored"
        self._begin = tables[: tables.rfind(END_OF_IMAGE)] if tables else START_OF_IMAGE
        if self._stored:
            self._begin = START_OF_IMAGE + IS_RGB + self._begin[len(START_OF_IMAGE) :]
        self._header = b"?"
        self._ended = False
        self._failures: dict[int, str] = {}
        self._error: SlideError | None = None
        self.helper: Future[None] | None = None

    def work(self) -> None:
        """Decode all tiles, those that nvImageCodec refuses last."""
        batch = self._batch
        if batch is None or self._ended:
            return
        fetch = batch.fetcher(END_OF_IMAGE)
        rest: list[int] = []
        try:
            for first in range(0, len(batch), AT_ONCE):
                if self._ended:
                    return
                tiles = range(first, min(first + AT_ONCE, len(batch)))
                rest += self._decode(tiles, [fetch(tile) for tile in tiles])
            if rest:
                self._decode_alone(batch, rest)
        except SlideError as error:
            self._error = error

    def wait(self) -> dict[int, str]:
        """Return when every tile was delivered or failed."""
        try:
            if self.helper is None or self.helper.cancel():
                self.work()
            else:
                self.helper.result()
        finally:
            self.cancel()
        if self._error is not None:
            raise self._error
        return self._failures

    def cancel(self) -> None:
        """Drop tiles that are not begun and return when no more will be delivered."""
        self._ended = True
        if self.helper is not None and not self.helper.cancel():
            wait([self.helper])
        if self._batch is not None:
            self._batch.release()
            self._jpegs.give(self._decoder)
        # Who delivers may hold this batch: nothing is to live on for a circle's sake.
        self.helper, self._batch = None, None
        self._slots, self._deliver = HostSlots([]), lambda indices: None

    def _decode(self, tiles: range, found: Sequence[Data | None]) -> list[int]:
        """Decode some tiles and deliver them; return those that are for `CpuDecoder`."""
        memory, slots, deliver = self._decoder.memory(self._size), self._slots, self._deliver
        chosen = [
            (tile, data)
            for tile, data in zip(tiles, found, strict=True)
            if data is not None and self._fits(data)
        ]
        encoded = [data for _, data in chosen]
        if self._begin != START_OF_IMAGE:
            encoded = [self._whole(data) for data in encoded]
        kept = [slots.memory[tile] for tile, _ in chosen]
        worked = self._decoder.decode(encoded, kept, self._image) if chosen else []
        done = set()
        for number, ((tile, _), good) in enumerate(zip(chosen, worked, strict=True)):
            if good:
                target = kept[number]
                pixels = memory[number] if target is None else target
                slots.pixels[tile] = pixels.reshape(self._shape)
                deliver((tile,))
                slots.pixels[tile] = None
                done.add(tile)
        return [tile for tile in tiles if tile not in done]

    def _fits(self, data: Data) -> bool:
        """Whether a header is as the level says.

        nvImageCodec would refuse a whole batch for one tile that is too large, and fill in a
        smaller one in part.
        """
        if data[: len(self._header)] == self._header:
            return True
        head = bytes(data[:LONGEST_HEADER])
        head = head[: header_length(head)]
        whole = self._whole(head)
        header = header_of_tile(whole, self._shape) if head.startswith(START_OF_IMAGE) else None
        if header is None:
            return False
        jfif = any(marker == JFIF for marker, *_ in segments(whole))
        if self._stored and (jfif or header.transform != 0):
            return False
        self._header = head
        return True

    def _whole(self, data: Data) -> bytes:
        """Return a tile or its header with what the level's tiles have in common."""
        return self._begin + bytes(data[len(START_OF_IMAGE) :])

    def _decode_alone(self, batch: EncodedBatch, tiles: list[int]) -> None:
        outer = self._slots
        slots = HostSlots([outer.memory[tile] for tile in tiles])

        def deliver(indices: Sequence[int]) -> None:
            for index in indices:
                outer.pixels[tiles[index]] = slots.pixels[index]
                self._deliver((tiles[index],))
                outer.pixels[tiles[index]] = None

        failed = self._cpu.schedule(batch.part(tiles), slots, deliver).wait()
        self._failures |= {tiles[index]: reason for index, reason in failed.items()}
