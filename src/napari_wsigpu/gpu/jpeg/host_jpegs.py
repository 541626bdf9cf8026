"""JPEG tiles on the CPU, decoded by one call for many where many cores share the work.

Threads of Python wait for each other in the interpreter between any two tiles: sixteen decode
hardly more small tiles than eight. nvImageCodec's CPU backend, which is libjpeg-turbo as well and
gives the same pixels, decodes a hundred tiles by its own threads without the interpreter. Of a
tile of which only a part is wanted it decodes no more than that, right to where it goes.
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
from napari_wsigpu.codecs.jpeg_tiles import CHECKED
from napari_wsigpu.gpu.jpeg.codestream import recipe
from napari_wsigpu.gpu.jpeg.jpeg_rows import JpegRows, at_once
from napari_wsigpu.gpu.jpeg.library import HOST_JPEGS, Library
from napari_wsigpu.gpu.jpeg.library_handles import ImageFormat
from napari_wsigpu.model.errors import SlideError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.decoder import Deliver, EncodedBatch, PendingBatch
    from napari_wsigpu.model.layout import LevelLayout

    Data = bytes | memoryview

# Batches of many tiles come one after another. Some are decoded at a time, so that cores need not
# wait while the next tiles are read.
BATCHES = 3
# For fewer or larger tiles, threads of Python do as well; on few cores, for more than such a
# share of the pixels of tiles.
FEWEST, LARGEST_PIXELS, SMALL_SHARE = 16, 1 << 19, 0.6
# libjpeg takes both edges of a narrower part for those of the image.
NARROWEST = 8
FORMATS = {"ycbcr": ("I_RGB", "SRGB"), "stored": ("I_RGB", "SRGB"), "gray": ("I_Y", "GRAY")}
START_OF_IMAGE = b"\xff\xd8"
# Adobe's segment, by which libjpeg knows that samples are RGB, if JFIF's does not say YCbCr.
IS_RGB, JFIF = b"\xff\xee\0\x0eAdobe\0\x64\0\0\0\0\0", 0xE0

logger = logging.getLogger(__name__)


def host_library() -> Library:
    """Load no more of nvImageCodec than decodes JPEGs on the CPU."""
    return Library(HOST_JPEGS)


class HostJpegs:
    """nvImageCodec's CPU decoders of one process; the library is loaded in the background.

    Parameters
    ----------
    opened : callable
        Loads the library, or raises a `DeviceError`.
    """

    def __init__(self, opened: Callable[[], Library] = host_library) -> None:
        self._opened = opened
        self._lock = threading.Lock()
        self._starting: threading.Thread | None = None
        self._library: Library | None = None
        self._idle: dict[int, list[JpegRows]] = {}

    def take(self, threads: int) -> JpegRows | None:
        """Return a decoder of so many threads to the caller alone; None while there is none."""
        self._begin()
        with self._lock:
            if self._library is None:
                return None
            idle = self._idle.get(threads)
            if idle:
                return idle.pop()
        return JpegRows(self._library, threads)

    def give(self, decoder: JpegRows) -> None:
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
        decoder = self._jpegs.take(self._cpu.threads) if self._takes(batch, slots) else None
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

    def _takes(self, batch: EncodedBatch, slots: HostSlots) -> bool:
        level = batch.level
        pixels = level.grid.tile_height * level.grid.tile_width
        if len(batch) < FEWEST or not batch.single or pixels > LARGEST_PIXELS:
            return False
        if level.encoding.jpeg_color not in FORMATS:
            return False
        if int(batch.lengths.max()) * pixels * level.channels >= CHECKED:
            return False
        if self._cpu.threads <= FEW_CORES:
            parts = slots.parts
            if parts is None:
                return False
            wanted = np.where(parts.only, parts.heights * parts.widths, pixels)
            if wanted.sum() > SMALL_SHARE * pixels * len(batch):
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
        decoder: JpegRows,
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
        self._form: Hashable = None
        self._ended = False
        self._failures: dict[int, str] = {}
        self._error: SlideError | None = None
        self.helper: Future[None] | None = None

    def work(self) -> None:
        """Decode all tiles, those that nvImageCodec refuses last."""
        batch = self._batch
        if batch is None or self._ended:
            return
        rest: list[int] = []
        try:
            step = at_once(self._size)
            for first in range(0, len(batch), step):
                if self._ended:
                    return
                rest += self._decode(batch, first, min(first + step, len(batch)))
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

    def _decode(self, batch: EncodedBatch, first: int, last: int) -> list[int]:
        """Decode some tiles and deliver them; return those that are for `CpuDecoder`."""
        good = self._read(batch, first, last)
        memory, slots, deliver = self._decoder.memory(self._size), self._slots, self._deliver
        parts = None if slots.parts is None else slots.parts.of(first + good)
        if parts is not None:
            direct = parts.only & (parts.widths >= NARROWEST)
            parts, good = parts.of(np.flatnonzero(direct)), good[np.argsort(~direct, kind="stable")]
        whole: list[int] = good[0 if parts is None else len(parts) :].tolist()
        targets = [slots.memory[first + number] for number in whole]
        form = self._shape, self._form
        worked = self._decoder.decode(good, parts, targets, self._image, form)
        for number, target, fine in zip(
            whole, targets, worked[len(good) - len(whole) :], strict=True
        ):
            if fine:
                tile = first + number
                pixels = memory[number] if target is None else target
                slots.pixels[tile] = pixels.reshape(self._shape)
                deliver((tile,))
                slots.pixels[tile] = None
        if len(worked) == last - first and all(worked):
            return []
        done = {number for number, fine in zip(good.tolist(), worked, strict=True) if fine}
        return [first + number for number in range(last - first) if number not in done]

    def _read(self, batch: EncodedBatch, first: int, last: int) -> NDArray[np.int64]:
        """Read some tiles into the decoder's rows; return the numbers of those it can take.

        nvImageCodec would refuse a whole batch for one tile that is too large, and fill in a
        smaller one in part.
        """
        begin, sizes = self._begin, batch.lengths_of(first, last)
        before = len(begin) - len(START_OF_IMAGE)
        rows = self._decoder.make_room(before + max(sizes))[: len(sizes)]
        batch.copy_to(first, last, rows[:, before:])
        ends = before + np.array(sizes, np.int64)
        every = np.arange(len(sizes))
        good = ends >= len(begin) + len(END_OF_IMAGE)
        for back, byte in enumerate(reversed(END_OF_IMAGE), 1):
            good &= rows[every, ends - back] == byte
        fits = self._fits
        for number in np.flatnonzero(good).tolist():
            good[number] = fits(rows[number, before : ends[number]].data)
            if self._form is not None:  # most others begin as this one, and are told by one look
                break
        head = np.frombuffer(self._header, np.uint8)
        alike = np.zeros_like(good)
        if ends.max() >= before + len(head):
            alike = (rows[:, before : before + len(head)] == head).all(axis=1)
        for number in np.flatnonzero(good & ~alike).tolist():
            good[number] = fits(rows[number, before : ends[number]].data)
        rows[:, : len(begin)] = np.frombuffer(begin, np.uint8)
        return np.flatnonzero(good)

    def _fits(self, data: Data) -> bool:
        """Whether a header is as the level says, and of the form of the batch's others."""
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
        form = header.frame, header.sampling
        if self._form not in (None, form):
            return False
        self._header, self._form = head, form
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
