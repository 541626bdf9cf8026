"""nvImageCodec's hardware decoder for JPEG, and a test of whether it works here."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

import imagecodecs
import numpy as np

from napari_wsigpu.codecs.jpeg import MAX_ROWS
from napari_wsigpu.gpu.jpeg.nvimagecodec_handles import ImageFormat
from napari_wsigpu.gpu.jpeg.nvimagecodec_library import HARDWARE

if TYPE_CHECKING:
    from napari_wsigpu.gpu.device.cuda import CudaDevice
    from napari_wsigpu.gpu.jpeg.nvimagecodec_library import LibraryDecoder

# Environment variable: with "hardware", the engine decodes all batches; with any other value, none.
JPEG_ENGINE, BY_HARDWARE = "WSIGPU_JPEG_ENGINE", "hardware"


def may_use_engine() -> bool:
    """Return whether the user has not disabled the JPEG engine."""
    return os.environ.get(JPEG_ENGINE, BY_HARDWARE) == BY_HARDWARE


class JpegEngine(NamedTuple):
    """A backend of nvImageCodec for JPEG, and how to keep it busy.

    Attributes
    ----------
    backend : int
        nvImageCodec's number.
    at_once : int
        Number of images that it decodes at the same time. Each costs 40 µs of processor time.
    pixels : int
        Minimum number of pixels in an image that make this time worthwhile.
    threads : int
        Number of nvImageCodec's own threads that prepare images; 0 for one on each core.
    """

    backend: int
    at_once: int
    pixels: int
    threads: int

    def tiles_per_image(self, tiles: int, pixels: int, most: int) -> int:
        """Return how many tiles to join into each image so that all are decoded soonest.

        Parameters
        ----------
        tiles, pixels : int
            Number of tiles, and of pixels in each.
        most : int
            Maximum number of tiles in an image.
        """
        images = min(self.at_once, max(LEAST_IMAGES, tiles * pixels // self.pixels))
        images = max(images, -(-tiles // most))
        if images > self.at_once:  # a last round with fewer images would take as long as the others
            images = -(-images // self.at_once) * self.at_once
        return max(1, -(-tiles // images))


# GPUs have up to 7 JPEG engines. Waking more than 4 threads for them takes longer than it saves.
JPEG_HARDWARE = JpegEngine(HARDWARE, 7, 1 << 19, 4)
# Minimum number of images in a batch, so that at least two engines work.
LEAST_IMAGES = 2
# Number and size of the stacks of a thousand tiles, and nvImageCodec's number for 4:2:0.
STACKS, STACK, SUBSAMPLED = 28, (MAX_ROWS, 256), 3
# Test images: height of the pattern that is repeated, JPEG quality, and how often they are decoded.
SIDE, QUALITY, ROUNDS = 64, 75, 2


def decodes(device: CudaDevice, decoder: LibraryDecoder, count: int, size: tuple[int, int]) -> bool:
    """Return whether a decoder decodes test images, and let it allocate memory for larger batches.

    Each of a decoder's alternating buffers stays as large as the largest images so far.
    The test images therefore have as many encoded bytes as tissue.

    Parameters
    ----------
    device : CudaDevice
        Device of the decoder.
    decoder : LibraryDecoder
        Decoder to try.
    count : int
        Number of images.
    size : tuple of (int, int)
        Height and width of each image in pixels.

    Raises
    ------
    MemoryError
        If the device does not have enough memory for the decoded images.
    """
    noise = np.random.default_rng(0).integers(100, 156, (SIDE, size[1], 3), dtype=np.uint8)
    pixels = np.resize(noise, (*size, 3))
    encoded = imagecodecs.jpeg8_encode(pixels, level=QUALITY, subsampling="420")
    picture = np.frombuffer(encoded, np.uint8)
    chroma = -(-size[0] // 2), -(-size[1] // 2), 1
    planes = ((*size, 1), chroma, chroma)
    image = ImageFormat(planes, "uint8", "P_YUV", "SYCC", SUBSAMPLED)
    total = sum(height * width for height, width, _ in planes)
    # `_memory` is held until the stream is synchronized below.
    address, _memory = device.allocate(count * total)
    stream = device.new_stream()
    streams, images = device.code_streams(), device.images()
    for number in range(count):
        streams.add(picture.ctypes.data, picture.nbytes)
        images.add(address + number * total, image, stream.ptr)
    worked = decoder.decode(streams.used, images.used)
    stream.synchronize()
    return all(worked)
