"""Tiles decoded on the CPU by imagecodecs: `decode_tile`, and a pool that runs it."""

from __future__ import annotations

import math
import os
import struct
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from io import BytesIO
from typing import TYPE_CHECKING, Any

import imagecodecs
import numpy as np

from napari_wsigpu.codecs.intervals import join_intervals
from napari_wsigpu.codecs.jpeg import END_OF_IMAGE
from napari_wsigpu.codecs.lzw import lzw_decode
from napari_wsigpu.compression import compression_name
from napari_wsigpu.errors import SlideError
from napari_wsigpu.memory import TileMemory
from napari_wsigpu.storage.source import Unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.decoder import Deliver, EncodedBatch, EncodedTile
    from napari_wsigpu.layout import Encoding, LevelLayout

LZW, APERIO_YCBCR = 5, 33003
NO_PREDICTOR, HORIZONTAL, FLOATING_POINT = 1, 2, 3
CODESTREAM_HEAD = 4096
FEW_CORES = 4

BYTE_CODECS: dict[int, Callable[..., bytes | bytearray]] = {
    8: imagecodecs.deflate_decode,
    32946: imagecodecs.deflate_decode,
    32773: imagecodecs.packbits_decode,
    34925: imagecodecs.lzma_decode,
    34926: imagecodecs.zstd_decode,
    50000: imagecodecs.zstd_decode,
}
LERC_WRAPPINGS: dict[int, Callable[..., bytes | bytearray]] = {
    1: imagecodecs.deflate_decode,
    2: imagecodecs.zstd_decode,
}
JPEG_COLORS: dict[str, dict[str, Any]] = {
    "gray": {"outcolorspace": "GRAYSCALE"},
    "stored": {"colorspace": "RGB", "outcolorspace": "RGB"},
    "ycbcr": {"outcolorspace": "RGB"},
    "auto": {},
    "cmyk": {"outcolorspace": "CMYK"},
}


def _jpeg(data: Any, encoding: Encoding, plane: int, out: NDArray[Any]) -> None:
    if bytes(data[-2:]) != END_OF_IMAGE and not bytes(data).rstrip(b"\0").endswith(END_OF_IMAGE):
        # libjpeg would fill what is missing with gray and say nothing.
        raise ValueError("its JPEG data end early")
    imagecodecs.jpeg_decode(
        data, tables=encoding.jpeg_tables[plane], out=out, **JPEG_COLORS[encoding.jpeg_color]
    )


def _jpeg2000(data: Any, encoding: Encoding, plane: int, out: NDArray[Any]) -> None:
    subsampled = _check_codestream(data, out.shape)
    imagecodecs.jpeg2k_decode(data, out=out)
    if encoding.compression == APERIO_YCBCR and out.shape[2] == 3 and not subsampled:
        _ycbcr_to_rgb(out)


def _webp(data: Any, encoding: Encoding, plane: int, out: NDArray[Any]) -> None:
    imagecodecs.webp_decode(data, hasalpha=out.shape[2] == 4, out=out)


def _jpegxl(data: Any, encoding: Encoding, plane: int, out: NDArray[Any]) -> None:
    imagecodecs.jpegxl_decode(data, out=out)


def _jpegxr(data: Any, encoding: Encoding, plane: int, out: NDArray[Any]) -> None:
    imagecodecs.jpegxr_decode(data, out=out)


def _lerc(data: Any, encoding: Encoding, plane: int, out: NDArray[Any]) -> None:
    if encoding.lerc_wrapping:
        unwrap = LERC_WRAPPINGS[encoding.lerc_wrapping]
        data = unwrap(data, out=2 * out.nbytes + 4096)
    imagecodecs.lerc_decode(data, out=out)


IMAGE_CODECS: dict[int, Callable[[Any, Encoding, int, NDArray[Any]], None]] = {
    7: _jpeg,
    22610: _jpegxr,
    33003: _jpeg2000,
    33004: _jpeg2000,
    33005: _jpeg2000,
    34712: _jpeg2000,
    34887: _lerc,
    34934: _jpegxr,
    34927: _webp,
    50001: _webp,
    50002: _jpegxl,
    52546: _jpegxl,
}


def decode_tile(tile: EncodedTile, memory: NDArray[np.uint8]) -> NDArray[Any]:
    """Decode one tile.

    Parameters
    ----------
    tile : EncodedTile
        Its encoded bytes.
    memory : ndarray of uint8
        As many bytes as the full tile has, to decode into.

    Returns
    -------
    ndarray, shape (height, width, channels)
        In native byte order, in `memory`. Tiles at the lower and right edge may be cut to
        their level.

    Raises
    ------
    RuntimeError, ValueError
        If the bytes are damaged; the codec says how.
    SlideError
        If the source they are read from right into memory can't be read.
    """
    level = tile.level
    if tile.fill is not None:
        views = list(_possible_views(level, tile.row, tile.column, memory))
        return _view_of(tile.fill(memory.data), views)
    if level.encoding.jpeg_header is not None:
        return _decode_intervals(level.encoding.jpeg_header, tile, memory)
    if len(tile.segments) == 1 and tile.segments[0] is not None:
        return _decode_segment(tile.segments[0], tile, 0, memory)
    samples = level.encoding.samples
    grid = level.grid
    pixels = memory.view(level.dtype).reshape(grid.tile_height, grid.tile_width, level.channels)
    pixels[...] = tile.background
    plane_memory = np.empty(memory.size // len(tile.segments), np.uint8)
    height, width = 1, 1
    for plane, segment in enumerate(tile.segments):
        if segment is not None:
            part = _decode_segment(segment, tile, plane, plane_memory)
            height, width = max(height, part.shape[0]), max(width, part.shape[1])
            target = pixels[: part.shape[0], : part.shape[1]]
            target[..., plane * samples : (plane + 1) * samples] = part
    return pixels[:height, :width]


def _decode_intervals(header: bytes, tile: EncodedTile, memory: NDArray[np.uint8]) -> NDArray[Any]:
    """Decode a tile that is made up of restart intervals of a large JPEG."""
    grid, encoding = tile.level.grid, tile.level.encoding
    intervals = [interval for interval in tile.segments if interval is not None]
    if None in tile.segments[: len(intervals)]:
        raise ValueError("a part of it is missing")
    shape = (
        len(intervals) * grid.tile_height // grid.planes,
        grid.tile_width,
        encoding.samples,
    )
    pixels = memory.view(tile.level.dtype)[: math.prod(shape)].reshape(shape)
    data = join_intervals(header, intervals)
    if encoding.jpeg_scale > 1:
        _decode_smaller(data, encoding.jpeg_scale, pixels)
    else:
        imagecodecs.jpeg_decode(data, out=pixels, **JPEG_COLORS[encoding.jpeg_color])
    return pixels


def _decode_smaller(data: bytes, scale: int, pixels: NDArray[Any]) -> None:
    """Have libjpeg decode fewer pixels, which imagecodecs can't."""
    from PIL import Image  # for few slides

    try:
        with Image.open(BytesIO(data), formats=("JPEG",)) as image:
            image.draft(None, (image.width // scale, image.height // scale))
            smaller = np.asarray(image)
    except (OSError, SyntaxError) as error:
        raise ValueError(f"it can't be decoded at 1/{scale} ({error})") from error
    if smaller.size != pixels.size:
        raise ValueError(f"at 1/{scale} it has {smaller.shape} samples")
    pixels[...] = smaller.reshape(pixels.shape)


def _decode_segment(
    data: memoryview, tile: EncodedTile, plane: int, memory: NDArray[np.uint8]
) -> NDArray[Any]:
    """Decode one plane's bytes to the one of the possible shapes that they have."""
    if isinstance(data.obj, Unreadable):
        raise ValueError(data.obj.reason)
    encoding = tile.level.encoding
    views = _possible_views(tile.level, tile.row, tile.column, memory)
    image_codec = IMAGE_CODECS.get(encoding.compression)
    if image_codec is None:
        return _decode_bytes(data, encoding, list(views))
    # A codec checks its own header against `pixels` before it allocates anything, so a tile
    # that claims to be huge costs nothing.
    first_error: Exception | None = None
    for pixels in views:
        try:
            image_codec(data, encoding, plane, pixels)
        except (RuntimeError, ValueError) as error:
            first_error = first_error or error
        else:
            return pixels
    assert first_error is not None
    raise first_error


def _possible_views(
    level: LevelLayout, row: int, column: int, memory: NDArray[np.uint8]
) -> Iterator[NDArray[Any]]:
    """Yield memory in the shapes that a tile's pixels may have, full size first.

    Some writers cut the tiles at the right and lower edge to the level's extent.
    """
    grid, samples, dtype = level.grid, level.encoding.samples, level.dtype
    height = min(grid.tile_height, level.height - row * grid.tile_height)
    width = min(grid.tile_width, level.width - column * grid.tile_width)
    sizes = (grid.tile_height, grid.tile_width), (height, grid.tile_width), (height, width)
    for high, wide in dict.fromkeys(sizes):
        size = high * wide * samples * dtype.itemsize
        yield memory[:size].view(dtype).reshape(high, wide, samples)


def _decode_bytes(data: Any, encoding: Encoding, views: Sequence[NDArray[Any]]) -> NDArray[Any]:
    size = views[0].nbytes
    if encoding.fill_order == 2:
        data = imagecodecs.bitorder_decode(bytes(data))
    if encoding.compression == 1:
        raw = memoryview(data)[:size]
    elif encoding.compression == LZW:
        raw = memoryview(lzw_decode(data, [view.nbytes for view in views]))
    else:
        raw = memoryview(BYTE_CODECS[encoding.compression](data, out=size))
    pixels = _view_of(len(raw), views)
    if encoding.predictor == FLOATING_POINT:
        # This predictor works on the stored order of bytes and restores the native one.
        values = np.frombuffer(raw, pixels.dtype).reshape(pixels.shape)
        pixels[...] = imagecodecs.floatpred_decode(values, axis=-2)
        return pixels
    stored = pixels.dtype.newbyteorder(encoding.byte_order)
    pixels[...] = np.frombuffer(raw, stored).reshape(pixels.shape)
    if encoding.predictor == HORIZONTAL:
        imagecodecs.delta_decode(pixels, axis=-2, out=pixels)
    return pixels


def _view_of(size: int, views: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return the one of possible views that has so many bytes."""
    for pixels in views:
        if pixels.nbytes == size:
            return pixels
    raise ValueError(f"it holds {size} bytes of {views[0].nbytes}")


def _check_codestream(data: memoryview, shape: tuple[int, ...]) -> bool:
    """Compare a JPEG 2000 code stream's own sizes with those wanted, before it is decoded.

    OpenJPEG would decode the whole of a stream that claims to be huge.

    Returns
    -------
    bool
        Whether the second component is subsampled; OpenJPEG then makes RGB of YCbCr itself.

    Raises
    ------
    ValueError
        If the stream is damaged or of another size.
    """
    head = bytes(data[:CODESTREAM_HEAD])
    start = head.find(b"\xff\x4f\xff\x51")
    if start < 0 or len(head) < start + 48:
        raise ValueError("it is no JPEG 2000 code stream")
    right, lower, left, upper = struct.unpack_from(">4I", head, start + 8)
    (components,) = struct.unpack_from(">H", head, start + 40)
    found = (lower - upper, right - left, components)
    if found != shape:
        raise ValueError(f"its code stream says {found} pixels instead of {shape}")
    return components > 1 and head[start + 46 : start + 48] != b"\x01\x01"


def _ycbcr_to_rgb(pixels: NDArray[Any]) -> None:
    """Convert full-range BT.601 YCbCr to RGB in place, rounded as libjpeg does."""
    y = pixels[..., 0].astype(np.int32)
    cb = pixels[..., 1].astype(np.int32) - 128
    cr = pixels[..., 2].astype(np.int32) - 128
    half = 1 << 15
    red = y + ((91881 * cr + half) >> 16)
    green = y + ((-22554 * cb - 46802 * cr + half) >> 16)
    blue = y + ((116130 * cb + half) >> 16)
    for channel, values in enumerate((red, green, blue)):
        pixels[..., channel] = np.clip(values, 0, 255)


def threads_at_work() -> int:
    """Return how many threads decode one batch: those of the pool and the one that waits."""
    cores = os.cpu_count() or 1
    return cores if cores > FEW_CORES else cores + 1


class HostSlots:
    """Where a batch's tiles are decoded to on the host.

    Parameters
    ----------
    memory : sequence of (ndarray of uint8 or None)
        As many bytes for each tile as a full one has; None for one whose pixels are used only while
        it is delivered: the thread that decodes it has a buffer for these.

    Attributes
    ----------
    memory
        As given.
    pixels : list of (ndarray or None)
        Each tile as it was decoded, while it is delivered: shape (height, width, channels). Tiles
        at the lower and right edge may be cut to their level.
    """

    def __init__(self, memory: Sequence[NDArray[np.uint8] | None]) -> None:
        self.memory = memory
        self.pixels: list[Any] = [None] * len(memory)


class CpuDecoder:
    """A pool of threads that decode tiles.

    Parameters
    ----------
    workers : int, optional
        Number of threads beside the one that waits for a batch, which works too. By default one
        a core, and one fewer where there are many: a thread more than cores slows all by a
        fifth; with 0, who waits decodes alone.
    """

    name = "cpu"

    def __init__(self, workers: int | None = None) -> None:
        self._workers = threads_at_work() - 1 if workers is None else workers
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._memory = TileMemory()

    def refusal(self, level: LevelLayout) -> str | None:
        """Say why it can't decode tiles of a level; None if it can."""
        encoding = level.encoding
        compression = encoding.compression
        if encoding.lerc_wrapping and encoding.lerc_wrapping not in LERC_WRAPPINGS:
            return f"the compression around its LERC, {encoding.lerc_wrapping}, is not supported"
        if compression in IMAGE_CODECS:
            return None
        if compression not in (1, LZW) and compression not in BYTE_CODECS:
            return f"its compression, {compression_name(compression)}, is not supported"
        if encoding.predictor not in (NO_PREDICTOR, HORIZONTAL, FLOATING_POINT):
            return f"its predictor, {encoding.predictor}, is not supported"
        return None

    def schedule(self, batch: EncodedBatch, slots: HostSlots, deliver: Deliver) -> CpuBatch:
        """Begin to decode a batch and return at once; see `Decoder.schedule`."""
        pending = CpuBatch(batch, slots, deliver, self._memory)
        if not self._workers:
            return pending
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._workers, "wsigpu-decode")
            with suppress(RuntimeError):  # the interpreter ends: who waits decodes alone
                for _ in range(min(self._workers, len(batch))):
                    pending.helpers.append(self._pool.submit(pending.work))
        return pending

    def release(self) -> None:
        """Join the threads and give back kept memory; the next batch takes new ones."""
        self._memory.clear()
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)


class CpuBatch:
    """Tiles that any number of threads take from one queue."""

    def __init__(
        self, batch: EncodedBatch, slots: HostSlots, deliver: Deliver, memory: TileMemory
    ) -> None:
        self._batch: Sequence[EncodedTile] = batch
        self._slots = slots
        self._deliver = deliver
        self._memory = memory
        self._size = batch.level.tile_bytes
        self._queue = deque(range(len(batch)))
        self._failures: dict[int, str] = {}
        self._error: SlideError | None = None
        self.helpers: list[Future[None]] = []

    def work(self) -> None:
        """Decode tiles until none is left."""
        batch, slots, deliver = self._batch, self._slots, self._deliver
        own: NDArray[np.uint8] | None = None
        while self._queue:
            try:
                index = self._queue.popleft()
            except IndexError:
                return
            memory = slots.memory[index]
            if memory is None:
                # Used again for the next tile, it stays in the core's cache.
                memory = own = self._memory.take(self._size) if own is None else own
            try:
                slots.pixels[index] = decode_tile(batch[index], memory)
            except SlideError as error:
                self._error = error
                self._queue.clear()
            except (RuntimeError, ValueError, TypeError, MemoryError) as error:
                self._failures[index] = str(error) or type(error).__name__
            else:
                deliver((index,))
                slots.pixels[index] = None

    def wait(self) -> dict[int, str]:
        """Help decoding, and return when every tile was delivered or failed."""
        try:
            self.work()
        finally:
            self.cancel()
        if self._error is not None:
            raise self._error
        return self._failures

    def cancel(self) -> None:
        """Drop tiles that are not begun and return when no more will be delivered."""
        self._queue.clear()
        for helper in self.helpers:
            if not helper.cancel():
                helper.result()
        # Who delivers may hold this batch: nothing is to live on for a circle's sake.
        self.helpers, self._batch = [], ()
        self._slots, self._deliver = HostSlots([]), _ignore


def _ignore(indices: Sequence[int]) -> None:
    """Take the place of who wanted tiles."""
