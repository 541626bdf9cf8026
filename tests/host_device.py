"""A device that is host memory, so that the GPU's decoder and engine run without a GPU."""

from __future__ import annotations

import ctypes
import threading
from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np

from napari_wsigpu.codecs.cpu import CpuDecoder, _ycbcr_to_rgb
from napari_wsigpu.codecs.decoder import EncodedBatch
from napari_wsigpu.codecs.library import CPU_ONLY, NO_DEVICE, Library
from napari_wsigpu.codecs.nvimagecodec import DecodeWorker, NvImageCodecDecoder, Slots
from napari_wsigpu.codecs.verify import Verifier
from napari_wsigpu.engine.device_reader import NO_FORMAT, tile_format
from napari_wsigpu.formats.layout import Encoding, LevelLayout, TileGrid


@cache
def library() -> Library:
    """Return nvImageCodec, loaded once."""
    return Library()


class HostStream:
    ptr = 0

    def __init__(self, device):
        self._device = device

    def synchronize(self):
        with self._device.lock:
            self._device.synchronised += 1


class HostEvent:
    """A place in a stream; once it is reached, to wait for it costs nothing."""

    def __init__(self, stream):
        self._stream = stream

    def synchronize(self):
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.synchronize()


class HostDevice:
    """Does what `CudaDevice` does with nvImageCodec's CPU backend.

    `free` is how many bytes it still gives out; `live` how many are taken. `behind` are the
    pixels behind each of nvImageCodec's images.
    """

    def __init__(self, free: int = 1 << 40, engine: str = "GPU"):
        self.name = "cuda:0"
        self.lock = threading.Lock()
        self.free = free
        self.live = 0
        self.synchronised = 0
        self.engine = engine
        self.wrap_decoder = lambda decoder: decoder
        self.behind: dict[int, Any] = {}

    @property
    def memory(self):
        return self.free, 1 << 34

    def active(self):
        return nullcontext()

    def new_stream(self):
        return HostStream(self)

    def as_stream(self, stream):
        self.given_stream = stream
        return HostStream(self)

    def decoder(self, kind):
        return self.wrap_decoder(library().decoder(NO_DEVICE, CPU_ONLY)), self.engine

    def code_streams(self, count):
        return library().streams(count)

    def images(self, addresses, tile, stream):
        made = library().images(addresses, tile, on_device=False, stream=0)
        shape = (tile.height, tile.width, tile.channels)
        for handle, address in zip(made.handles.tolist(), addresses, strict=True):
            self.behind[handle] = at(address, shape, tile.dtype)
        return made

    def is_own(self, pixels):
        return isinstance(pixels, np.ndarray)

    def follow(self, stream):
        pass

    def record(self, stream):
        return HostEvent(stream)

    def allocate(self, size):
        with self.lock:
            if self.live + size > self.free:
                raise MemoryError("no memory")
            self.live += size
        return _Memory.new(self, size)

    def empty(self, shape, dtype):
        # Not zeros: what nobody writes must show.
        return np.full(shape, 77, dtype)

    def fill(self, pixels, value, stream):
        pixels[...] = value

    def rows(self, tiles, stream):
        return np.array(tiles)

    def paste(self, tiles, tile, level, pixels, window, stream):
        shape = (tile.height, tile.width, tile.channels)
        for address, row, column in np.asarray(tiles).tolist():
            source = at(address, shape, tile.dtype)
            if window.channel is not None:
                source = source[..., window.channel]
            top, left = row * tile.height, column * tile.width
            y0, y1 = max(top, window.top), min(top + tile.height, window.top + window.height)
            x0, x1 = max(left, window.left), min(left + tile.width, window.left + window.width)
            y1, x1 = min(y1, level[0]), min(x1, level[1])
            if y0 < y1 and x0 < x1:
                part = source[y0 - top : y1 - top, x0 - left : x1 - left]
                target = pixels[y0 - window.top : y1 - window.top]
                target[:, x0 - window.left : x1 - window.left] = part

    def ycbcr_to_rgb(self, tiles, tile, stream):
        for address in tiles[:, 0].tolist():
            _ycbcr_to_rgb(at(address, (tile.height, tile.width, tile.channels), tile.dtype))

    def round_as_libjpeg(self, tiles, tile, stream):
        return np.zeros(len(tiles), np.int32)

    def upload(self, address, pixels, stream):
        at(address, (pixels.nbytes,), "uint8")[:] = pixels.view(np.uint8).ravel()

    def send(self, pixels, target, stream):
        target[...] = pixels

    def download(self, pixels, stream):
        return np.array(pixels)

    def download_tile(self, address, tile, stream):
        return at(address, (tile.height, tile.width, tile.channels), tile.dtype).copy()

    def staging(self, count, size):
        return np.empty((count, size), np.uint8)


class _Memory:
    @classmethod
    def new(cls, device, size):
        self = cls()
        self.device, self.size = device, size
        self.bytes = np.empty(size, np.uint8)
        return int(self.bytes.ctypes.data), self

    def __del__(self):
        with self.device.lock:
            self.device.live -= self.size


def at(address, shape, dtype):
    """Return host memory at an address as an array."""
    kind = np.dtype(dtype)
    size = int(np.prod(shape)) * kind.itemsize
    memory = (ctypes.c_uint8 * size).from_address(address)
    return np.frombuffer(memory, kind).reshape(shape)


def level_of(channels=3, *, planes=1, tile=(48, 64), size=None, **encoding):
    """Describe a level, by default one of YCbCr JPEGs; its tiles lie nowhere."""
    height, width = size or tile
    stored = {"compression": 7, "dtype": "uint8", "jpeg_color": "ycbcr"} | encoding
    nothing = np.zeros((planes, -(-height // tile[0]), -(-width // tile[1])), np.int64)
    return LevelLayout(
        width=width,
        height=height,
        channels=channels,
        encoding=Encoding(
            photometric=2,
            predictor=1,
            fill_order=1,
            byte_order="<",
            samples=channels // planes,
            **stored,
        ),
        grid=TileGrid(*tile, nothing, nothing),
    )


class Buffer(bytearray):
    """The bytes of a batch, which can be watched by a weak reference."""


def joined(tiles, level=None):
    """Put the segments of tiles into one buffer, with other bytes between them."""
    level = level or tiles[0].level
    shape = (level.grid.planes, len(tiles))
    starts, lengths = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    present = np.zeros(shape, bool)
    buffer = Buffer(b"before")
    for index, tile in enumerate(tiles):
        for plane, segment in enumerate(tile.segments):
            present[plane, index] = segment is not None
            starts[plane, index], lengths[plane, index] = len(buffer), len(segment or b"")
            buffer += bytes(segment or b"") + b"between"
    places = np.array([(tile.row, tile.column) for tile in tiles], np.int64).reshape(-1, 2)
    background = tiles[0].background if tiles else 0
    return EncodedBatch(level, places, buffer, starts, lengths, present, background)


class WrappedDecoder:
    """A decoder whose decoding a test takes into its own hands.

    `decode(decoder, streams, images)` is called instead of its own.
    """

    def __init__(self, decoder, decode):
        self.decoder, self._decode = decoder, decode

    def decode(self, streams, images):
        return self._decode(self.decoder, streams, images)

    def close(self):
        self.decoder.close()


class OnDevice:
    """A slide's decoder on a `HostDevice`, and places for its tiles."""

    def __init__(self, device=None, path="slide.svs"):
        self.device = device or HostDevice()
        self.worker = DecodeWorker(self.device)
        self.verifier = Verifier(path)
        self.cpu = CpuDecoder(2)
        self.decoder = NvImageCodecDecoder(self.worker, self.cpu, self.verifier)

    def close(self):
        self.worker.close()
        self.cpu.release()

    def decode_by(self, decode):
        """Have the device's decoders call `decode(decoder, streams, images)`."""
        self.device.wrap_decoder = lambda decoder: WrappedDecoder(decoder, decode)

    def schedule(self, batch, then=None, **options):
        return Scheduled(self, batch, then, options)


class Scheduled:
    """A batch in flight with the places of its tiles, and how often each was given out."""

    def __init__(self, on, batch, then, options):
        if not isinstance(batch, EncodedBatch):
            batch = joined(batch)
        level = batch.level
        self.tile = tile_format(level)
        start, self._memory = on.device.allocate(len(batch) * level.tile_bytes)
        at(start, (len(batch) * level.tile_bytes,), "uint8")[:] = 77
        self._addresses = start + level.tile_bytes * np.arange(len(batch))
        handles = np.zeros(len(batch), np.uint64)
        if self.tile.sample_format != NO_FORMAT:
            stream = on.worker.stream
            self._images = on.device.images(self._addresses.tolist(), self.tile, stream)
            handles = self._images.handles
        self.slots = Slots(self.tile, self._addresses, handles)
        self._device = on.device
        self.calls = []
        on.latest = self

        def count(rows):
            places = self._addresses.tolist()
            indices = [places.index(address) for address in rows[:, 0].tolist()]
            assert rows[:, 1:].tolist() == batch.tiles[indices].tolist()
            self.calls.append(indices)
            if then is not None:
                then(indices)

        self.pending = on.decoder.schedule(batch, self.slots, count, **options)

    def wait(self):
        """Wait, and return the failures."""
        return self.pending.wait()

    def index_of(self, image):
        """Return which tile an image of nvImageCodec is the place of."""
        place = self._device.behind[int(image)].ctypes.data
        return int(np.flatnonzero(self._addresses == place)[0])

    def pixels(self, index):
        """Return the pixels of a tile, copied."""
        shape = (self.tile.height, self.tile.width, self.tile.channels)
        return at(int(self._addresses[index]), shape, self.tile.dtype).copy()
