"""A device that is host memory, so that the GPU's decoder and engine run without a GPU."""

from __future__ import annotations

import ctypes
import re
import threading
from contextlib import nullcontext
from functools import cache
from math import prod
from typing import Any

import numpy as np

from napari_wsigpu.codecs.cpu import CpuDecoder
from napari_wsigpu.codecs.decoder import EncodedBatch
from napari_wsigpu.codecs.jpeg import FRAMES, segments
from napari_wsigpu.codecs.jpeg2000 import ycbcr_to_rgb as to_rgb_in_place
from napari_wsigpu.gpu.device.devices import Devices
from napari_wsigpu.gpu.device.interfaces import Slots
from napari_wsigpu.gpu.device.verify import Verifier
from napari_wsigpu.gpu.device.worker import DecodeWorker
from napari_wsigpu.gpu.jpeg.jpeg_engine import JpegEngine
from napari_wsigpu.gpu.jpeg.nvimagecodec import NvImageCodecDecoder
from napari_wsigpu.gpu.jpeg.nvimagecodec_handles import ImageFormat, LibraryImages, LibraryStreams
from napari_wsigpu.gpu.jpeg.nvimagecodec_library import CPU_ONLY, HARDWARE, NO_DEVICE, Library
from napari_wsigpu.model.errors import DeviceError
from napari_wsigpu.model.layout import Encoding, LevelLayout, TileGrid
from napari_wsigpu.native.tables import SHADES
from napari_wsigpu.reading.average import resample_area
from napari_wsigpu.reading.device import tile_format

# Tests' tiles are so small that an allocation of the usual size would hold ten thousands.
SLAB_BYTES = 1 << 18

_loading = threading.Lock()
_loaded = cache(Library)


def library() -> Library:
    """Return nvImageCodec, loaded once: what one instance makes is nothing to another."""
    with _loading:
        return _loaded()


class HostStream:
    ptr = 0

    def __init__(self, device):
        self._device = device

    def synchronize(self):
        with self._device.lock:
            self._device.synchronised += 1

    def wait_event(self, event):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


class HostEvent:
    """A place in a stream; once it is reached, to wait for it costs nothing."""

    def __init__(self, stream):
        self._stream = stream

    @property
    def done(self):
        return self._stream is None

    def synchronize(self):
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.synchronize()


class HostBuffer:
    """An OpenGL buffer that is written as `SharedBuffer` writes one, from host memory."""

    def __init__(self, buffer, size):
        self.buffer, self.size = buffer, size
        self.written = 0
        self.closed = False

    def write(self, address, size):
        from OpenGL import GL

        assert not self.closed
        GL.glBindBuffer(GL.GL_PIXEL_UNPACK_BUFFER, self.buffer)
        pixels = at(address, (size,), "uint8")
        GL.glBufferSubData(GL.GL_PIXEL_UNPACK_BUFFER, 0, size, pixels)
        GL.glBindBuffer(GL.GL_PIXEL_UNPACK_BUFFER, 0)
        self.written += 1

    def close(self):
        self.closed = True


class HostDevice:
    """Does what `CudaDevice` does with nvImageCodec's CPU backend.

    `free` is how many bytes it still gives out; `live` how many are taken. `behind` are the
    planes behind each of nvImageCodec's images. `compile_kernels` is what runs kernels, if they are
    to be run.
    """

    def __init__(self, free: int = 1 << 40, engine: str = "GPU"):
        self.name = "cuda:0"
        self.index = 0
        self.model = "host memory"
        self.jpeg_engine = JpegEngine(HARDWARE, 14, 1, 0)
        self.lock = threading.Lock()
        self.free = free
        self.live = 0
        self.synchronised = 0
        self.engine = engine
        self.shares: Any = HostBuffer
        self.shared_buffers: list[Any] = []
        self.wrap_decoder = lambda decoder: decoder
        self.compile_kernels = None
        self.prepared = False
        self.behind: dict[int, list[Any]] = {}
        self.interleaved: dict[int, Any] = {}

    @property
    def memory(self):
        return self.free, 1 << 34

    def active(self):
        return nullcontext()

    def new_stream(self):
        return HostStream(self)

    def current_stream(self):
        return HostStream(self)

    def as_stream(self, stream):
        self.given_stream = stream
        return HostStream(self)

    def decoder(self, kind):
        options = "libjpeg_turbo_decoder:fancy_upsampling=0"
        made = library().decoder(NO_DEVICE, CPU_ONLY, options)
        by_hardware = kind == "jpeg" and self.engine == "GPU"
        name = "hardware" if by_hardware else self.engine
        return self.wrap_decoder(PlanarDecoder(made, self)), name

    def prepare(self):
        self.prepared = True

    def compile(self, *texts):
        if self.compile_kernels is None:
            raise DeviceError("host memory runs no kernels")
        return self.compile_kernels(*texts)

    def code_streams(self):
        return HostStreams()

    def images(self):
        return HostImages(self)

    def address(self, pixels):
        return int(pixels.ctypes.data)

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

    def table(self, table, stream):
        return np.array(table)

    def colors(self, table):
        return table.colors

    def paste(self, pastes, tile, pixels, stream, *, channel=None, step=(1, 1)):
        self._paste(pastes, tile, pixels, channel, step)

    def paste_colors(self, pastes, tile, pixels, colors, stream, *, step=(1, 1)):
        self._paste(pastes, tile, pixels, None, step, colors)

    def _paste(self, pastes, tile, pixels, channel, step, colors=None):
        flat = pixels.reshape(-1, *(() if channel is not None else (tile.channels,)))
        for paste in pastes:
            high, wide = (
                (int(paste[name]) - 1) * by + 1
                for name, by in zip(("height", "width"), step, strict=True)
            )
            if high < 1 or wide < 1:
                continue
            shape = (high - 1) * tile.width + wide, tile.channels
            source = at(int(paste["source"]), shape, tile.dtype)
            rows, columns = np.arange(0, high, step[0]), np.arange(0, wide, step[1])
            found = source[rows[:, None] * tile.width + columns]
            if colors is not None:
                found = in_colors(found, colors)
            if channel is not None:
                found = found[..., channel]
            pitch = int(paste["pitch"])
            places = np.arange(len(rows))[:, None] * pitch + np.arange(len(columns))
            flat[int(paste["target"]) + places] = found

    def paste_scaled(self, parts, tile, pixels, stream, *, channel=None, colors=None):
        flat = pixels.reshape(-1, *pixels.shape[2:])
        for part in parts:
            rows, columns = int(part["rows"]), int(part["columns"])
            shape = (rows, tile.width, tile.channels)
            source = at(int(part["source"]), shape, tile.dtype)[:, :columns]
            y, x = (
                np.clip((part[start] + (np.arange(part[count]) + 0.5) * part[by]), 0, most - 1)
                for start, count, by, most in (
                    ("top", "height", "down", rows),
                    ("left", "width", "across", columns),
                )
            )
            drawn = source[y.astype(int)[:, None], x.astype(int)]
            if channel is not None:
                drawn = drawn[..., channel]
            else:
                if colors is not None:
                    drawn = np.stack([in_colors(row, colors) for row in drawn])
                opaque = np.full((*drawn.shape[:2], 1), 255, np.uint8)
                drawn = np.concatenate([drawn, opaque], axis=2)[..., :4]
            for number, row in enumerate(drawn):
                place = int(part["target"]) + number * int(part["pitch"])
                flat[place : place + len(row)] = row

    def compose(self, planes, tile, shades, targets, stream):
        size, step = tile.height * tile.width, tile.channels
        for row, target in zip(planes, targets.tolist(), strict=True):
            sums = np.zeros((size, 4), np.float32)
            for source, colors, low, last in row.tolist():
                samples = at(source, ((size - 1) * step + 1,), tile.dtype)[::step].astype(int)
                sums += at(colors, (last + 1, 4), "float32")[np.clip(samples - low, 0, last)]
            shown = sums[:, :3].clip(0, 1) * SHADES + np.float32(0.5)
            at(target, (size, 3), "uint8")[...] = shades[shown.astype(int)]

    def copy(self, address, pixels, stream):
        self.upload(address, np.ascontiguousarray(pixels), stream)

    def share_buffer(self, buffer, size):
        shared = self.shares(buffer, size)
        self.shared_buffers.append(shared)
        return shared

    def average_area(self, finer, pixels, scale, first, stream):
        pixels[...] = resample_area(finer, pixels.shape[1:3], scale, first)

    def ycbcr_to_rgb(self, addresses, tile, stream):
        for address in addresses.tolist():
            to_rgb_in_place(at(address, (tile.height, tile.width, tile.channels), tile.dtype))

    def merge_planes(self, tiles, tile, sampling, doubts, stream, *, to_rgb):
        across, down = sampling
        small = (-(-tile.height // down), -(-tile.width // across))
        shapes = [(tile.height, tile.width), small, small][: tile.channels]
        self.check_scans(tiles, tile.width, doubts, stream)
        for row in tiles:
            planes = zip(row["planes"].tolist(), shapes, strict=False)
            found = [at(*place, "uint8") for place in planes]
            smoothed = [found[0], *(smooth(plane, across, down) for plane in found[1:])]
            pixels = at(int(row["target"]), (tile.height, tile.width, tile.channels), "uint8")
            pixels[...] = np.stack([plane[: tile.height, : tile.width] for plane in smoothed], -1)
            if to_rgb:
                to_rgb_in_place(pixels)

    def check_scans(self, scans, width, doubts, stream):
        shade = np.arange(width) // 8 % 2
        for number, row in enumerate(scans):
            if row["strip"]:
                strip = at(int(row["strip"]), (width,), "uint8").astype(int)
                if (np.abs(strip - row["shades"][shade]) > 3).any():
                    doubts[number] = True
            scan = ctypes.string_at(int(row["scan"]), int(row["length"]) + 1)
            if re.search(rb"\xff[^\0]", scan, re.DOTALL):
                doubts[number] = True

    def pinned_array(self, count, dtype):
        return np.full(count, 77, dtype)

    def upload(self, address, pixels, stream):
        at(address, (pixels.nbytes,), "uint8")[:] = pixels.view(np.uint8).ravel()

    def send(self, pixels, target, stream):
        target[...] = pixels

    def download(self, pixels, stream):
        return np.array(pixels)

    def download_tile(self, address, tile, stream):
        return at(address, (tile.height, tile.width, tile.channels), tile.dtype).copy()

    def staging(self, shape, dtype):
        return np.empty(shape, dtype)


def in_colors(pixels, colors):
    """Return RGB or RGBA pixels whose colours were looked up."""
    red, green, blue = np.moveaxis(pixels[..., :3].astype(np.int64), -1, 0)
    found = colors[red + 256 * green + 65536 * blue]
    new = [found & 255, found >> 8 & 255, found >> 16 & 255]
    return np.concatenate([np.stack(new, -1).astype(np.uint8), pixels[..., 3:]], -1)


class HostStreams:
    """Code streams, of which JPEGs say that their components are to be left as they are stored.

    nvImageCodec's CPU backend knows no planes of less resolution. So it decodes JPEGs as RGB,
    each sample of chroma repeated, and `PlanarDecoder` takes them apart.
    """

    def __init__(self):
        self._streams = LibraryStreams(library())
        self._kept = []

    @property
    def used(self):
        return self._streams.used

    def add(self, address, length):
        data = ctypes.string_at(address, length)
        if data.startswith(b"\xff\xd8"):
            data = as_stored(data)
        self._kept.append(data)
        return self._streams.add(np.frombuffer(data, np.uint8).ctypes.data, len(data))

    def clear(self):
        self._streams.clear()
        self._kept.clear()


def as_stored(data):
    """Have a JPEG of three components say that it is RGB."""
    parts, place = [data[:2], b"\xff\xee\x00\x0eAdobe\x00\x64" + bytes(5)], 2
    for marker, start, end in segments(data):
        if marker not in (0xE0, 0xEE):  # JFIF would say YCbCr
            parts.append(data[start:end])
        if marker in FRAMES and data[start + 9] != 3:
            return data
        place = end
    return b"".join([*parts, data[place:]])


class HostImages:
    """Places to decode to, and what is behind each."""

    def __init__(self, device):
        self._device = device
        self._images = LibraryImages(library(), on_device=False)

    @property
    def used(self):
        return self._images.used

    def add(self, address, image, stream):
        if image.sample_format != "P_YUV":
            self._images.add(address, image, 0)
            interleaved = None
        else:
            height, width, _ = image.planes[0]
            interleaved = np.empty((height, width, 3), np.uint8)
            whole = ImageFormat(((height, width, 3),), "uint8", "I_RGB", "SRGB")
            self._images.add(interleaved.ctypes.data, whole, 0)
        planes = []
        for shape in image.planes:
            planes.append(at(address, shape, image.dtype))
            address += planes[-1].nbytes
        handle = int(self.used[-1])
        self._device.behind[handle], self._device.interleaved[handle] = planes, interleaved

    def clear(self):
        self._images.clear()


class PlanarDecoder:
    """nvImageCodec's CPU backend, which also decodes to planes."""

    def __init__(self, decoder, device):
        self._decoder, self._device = decoder, device

    def decode(self, streams, images):
        worked = self._decoder.decode(streams, images)
        for handle, good in zip(images.tolist(), worked, strict=True):
            interleaved = self._device.interleaved[handle]
            if good and interleaved is not None:
                height, width = interleaved.shape[:2]
                for channel, plane in enumerate(self._device.behind[handle]):
                    down, across = -(-height // plane.shape[0]), -(-width // plane.shape[1])
                    plane[..., 0] = interleaved[::down, ::across, channel]
        return worked

    def close(self):
        self._decoder.close()


def smooth(plane, across, down):
    """Enlarge a plane of chroma as libjpeg does, by what its source says."""
    wide = plane.astype(np.int32)
    if across == 1:
        return wide
    if down == 1:
        left, right = np.hstack([wide[:, :1], wide[:, :-1]]), np.hstack([wide[:, 1:], wide[:, -1:]])
        both = [(3 * wide + left + 1) >> 2, (3 * wide + right + 2) >> 2]
        return np.stack(both, -1).reshape(len(wide), -1)
    above, below = np.vstack([wide[:1], wide[:-1]]), np.vstack([wide[1:], wide[-1:]])
    rows = []
    for other in (above, below):
        sums = 3 * wide + other
        left, right = np.hstack([sums[:, :1], sums[:, :-1]]), np.hstack([sums[:, 1:], sums[:, -1:]])
        both = [(3 * sums + left + 8) >> 4, (3 * sums + right + 7) >> 4]
        rows.append(np.stack(both, -1).reshape(len(wide), -1))
    return np.stack(rows, 1).reshape(2 * len(wide), -1)


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
    size = prod(shape) * kind.itemsize
    memory = (ctypes.c_uint8 * size).from_address(address)
    return np.frombuffer(memory, kind).reshape(shape)


def level_of(channels=3, *, planes=1, tile=(48, 64), size=None, **encoding):
    """Describe a level, by default one of YCbCr JPEGs; its tiles lie nowhere."""
    height, width = size or tile
    stored = {"compression": 7, "photometric": 2, "dtype": "uint8", "jpeg_color": "ycbcr"}
    stored |= {"predictor": 1, "fill_order": 1}
    nothing = np.zeros((planes, -(-height // tile[0]), -(-width // tile[1])), np.int64)
    return LevelLayout(
        width=width,
        height=height,
        channels=channels,
        encoding=Encoding(
            byte_order="<",
            samples=channels // planes,
            **(stored | encoding),
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


class PartlyAble(NvImageCodecDecoder):
    """A decoder that leaves tiles at the end of each batch to the CPU."""

    local = threading.local()

    def preparer(self, level):
        found, share = super().preparer(level), self.local.share
        return found if isinstance(found, str) or share == 1 else FirstTiles(found, share)


class FirstTiles:
    """A preparer of only a share of the tiles."""

    def __init__(self, preparer, share):
        self.preparer, self.share = preparer, share

    def prepare(self, batch, count, work):
        return self.preparer.prepare(batch, round(self.share * count), work)


class OnDevice:
    """A slide's decoder on a `HostDevice`, and places for its tiles."""

    def __init__(self, device=None, path="slide.svs"):
        self.device = device or HostDevice()
        self.worker = DecodeWorker(self.device)
        self.stream = self.device.new_stream()
        self.verifier = Verifier(path)
        self.cpu = CpuDecoder(2)
        self.decoder = PartlyAble(self.worker, self.cpu, self.verifier)

    def close(self):
        self.worker.close()
        self.cpu.release()

    def decode_by(self, decode):
        """Have the device's decoders call `decode(decoder, streams, images)`."""
        self.device.wrap_decoder = lambda decoder: WrappedDecoder(decoder, decode)

    def schedule(self, batch, then=None, *, share=1, **options):
        """Decode a batch, of which the device can decode only the first share of the tiles."""
        self.decoder.local.share = share
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
        self.slots = Slots(self.tile, self._addresses)
        self._device = on.device
        self.calls = []
        on.latest = self

        def count(indices):
            self.calls.append(list(indices))
            if then is not None:
                then(indices)

        stream = options.pop("stream", on.stream)
        self.pending = on.decoder.schedule(batch, self.slots, count, stream, **options)

    def wait(self):
        """Wait, and return the failures."""
        return self.pending.wait()

    def pixels(self, index):
        """Return the pixels of a tile, copied."""
        shape = (self.tile.height, self.tile.width, self.tile.channels)
        return at(int(self._addresses[index]), shape, self.tile.dtype).copy()


class HostMachine:
    """A machine whose only CUDA device is host memory; both can be taken away."""

    def __init__(self):
        self.device = HostDevice()
        self.driver = True

    def open(self, index):
        if index:
            raise DeviceError(f"There is no device 'cuda:{index}'; use 'cuda:0'.")
        return self.device

    def devices(self, slab_bytes=SLAB_BYTES):
        return Devices(lambda index: self.open(index), lambda: self.driver, slab_bytes)
