"""The ways in which nvImageCodec decodes JPEG, and a trial of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import imagecodecs
import numpy as np

from napari_wsigpu.codecs.jpeg import MOST_ROWS
from napari_wsigpu.gpu.jpeg.library import HARDWARE, HYBRID
from napari_wsigpu.gpu.jpeg.library_handles import ImageFormat

if TYPE_CHECKING:
    from napari_wsigpu.gpu.device.cuda import CudaDevice
    from napari_wsigpu.gpu.jpeg.library import LibraryDecoder

JPEG_ENGINE = "WSIGPU_JPEG_ENGINE"


class JpegEngine(NamedTuple):
    """How nvImageCodec decodes JPEG.

    Attributes
    ----------
    backend : int
        What it calls the way.
    at_once : int
        Images that keep it busy; each keeps the processor busy for 40 us.
    tiles : int
        Fewer tiles than these are not worth an image of their own, unless there is only one.
    threads : int
        Of its own that prepare images, 0 for one a core.
    """

    backend: int
    at_once: int
    tiles: int
    threads: int


# A GPU has up to 7 JPEG engines. To wake more threads for them takes longer than their work.
JPEG_ENGINES = {
    "hardware": JpegEngine(HARDWARE, 7, 8, 4),
    "hybrid": JpegEngine(HYBRID, 14, 1, 0),
}
# What a batch of a thousand tiles is stacked to; 3 is nvImageCodec's name of 4:2:0.
STACKS, STACK, SUBSAMPLED = 22, (MOST_ROWS, 256), 3
SIDE, QUALITY, ROUNDS = 64, 75, 2
# Without it, images of less than a million pixels keep the processor busy instead.
ALL_ON_GPU = "nvjpeg_cuda_decoder:hybrid_huffman_threshold=0"


def decodes(device: CudaDevice, decoder: LibraryDecoder, count: int, size: tuple[int, int]) -> bool:
    """Decode so many pictures that have as many bytes as those of tissue have.

    The decoder takes memory for the largest ones that there were, once for each of its turns.
    """
    noise = np.random.default_rng(0).integers(100, 156, (SIDE, size[1], 3), dtype=np.uint8)
    pixels = np.resize(noise, (*size, 3))
    encoded = imagecodecs.jpeg8_encode(pixels, level=QUALITY, subsampling="420")
    picture = np.frombuffer(encoded, np.uint8)
    small = -(-size[0] // 2), -(-size[1] // 2), 1
    planes = ((*size, 1), small, small)
    image = ImageFormat(planes, "uint8", "P_YUV", "SYCC", SUBSAMPLED)
    total = sum(height * width for height, width, _ in planes)
    address, _memory = device.allocate(count * total)
    stream = device.new_stream()
    streams, images = device.code_streams(), device.images()
    for number in range(count):
        streams.add(picture.ctypes.data, picture.nbytes)
        images.add(address + number * total, image, stream.ptr)
    worked = decoder.decode(streams.used, images.used)
    stream.synchronize()
    return all(worked)
