"""A device that is host memory, so that the GPU's decoder and engine run without a GPU."""

from __future__ import annotations

import ctypes
import threading
from contextlib import nullcontext
from typing import Any

import numpy as np

from napari_wsigpu.codecs.cpu import _ycbcr_to_rgb


class HostStream:
    ptr = 0

    def __init__(self, device):
        self._device = device

    def synchronize(self):
        with self._device.lock:
            self._device.synchronised += 1


class HostDevice:
    """Does what `CudaDevice` does with nvImageCodec's CPU backend.

    `free` is how many bytes it still gives out; `live` how many are taken.
    """

    def __init__(self, free: int = 1 << 40, engine: str = "GPU"):
        self.name = "cuda:0"
        self.lock = threading.Lock()
        self.free = free
        self.live = 0
        self.synchronised = 0
        self.engine = engine
        self.wrap_decoder = lambda decoder: decoder
        self.staged: list[Any] = []

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
        from nvidia import nvimgcodec

        backend = nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)
        cpu = nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY
        decoder = nvimgcodec.Decoder(device_id=cpu, max_num_cpu_threads=2, backends=[backend])
        return self.wrap_decoder(decoder), self.engine

    def allocate(self, size):
        with self.lock:
            if self.live + size > self.free:
                raise MemoryError("no memory")
            self.live += size
        return _Memory.new(self, size)

    def views(self, addresses, tile):
        shape = (tile.height, tile.width, tile.channels)
        return [at(address, shape, tile.dtype) for address in addresses]

    def empty(self, shape, dtype):
        # Not zeros: what nobody writes must show.
        return np.full(shape, 77, dtype)

    def fill(self, pixels, value, stream):
        pixels[...] = value

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
