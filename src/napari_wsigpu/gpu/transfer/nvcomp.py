"""Decompression of Zarr chunks in device memory, by nvCOMP."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import nvidia.nvcomp

    from napari_wsigpu.gpu.device.interfaces import Stream
    from napari_wsigpu.model.arrays import DeviceArray

# Bytes before the compressed data, in which numcodecs stores the decoded size.
HEADERS = {"LZ4": 4}
# nvCOMP requires aligned input.
ALIGNMENT = 8


def decompress(
    parts: Sequence[DeviceArray], algorithm: str, size: int, device: int, stream: Stream
) -> DeviceArray:
    """Decompress chunks in parallel.

    Parameters
    ----------
    parts : sequence of device arrays of uint8
        One chunk each, as numcodecs or zarr write it.
    algorithm : {"LZ4", "Zstd"}
        Compression of the chunks.
    size : int
        Decoded size of every chunk, in bytes.
    device : int
        Number of the CUDA device.
    stream : Stream
        Stream for all work; it is synchronized before the function returns.

    Returns
    -------
    device array of uint8, shape (parts, size)

    Raises
    ------
    ImportError
        If nvCOMP is not installed.
    RuntimeError
        If nvCOMP cannot decompress the chunks.
    """
    nvcomp, cupy = import_module("nvidia.nvcomp"), import_module("cupy")
    with stream:
        data = [_aligned(part[HEADERS.get(algorithm, 0) :]) for part in parts]
        decoded = cupy.empty((len(parts), size), "u1")
    with codec(algorithm, stream, device_id=device) as nvcomp_codec:
        found = nvcomp_codec.decode(nvcomp.as_arrays(data, cuda_stream=stream.ptr), "|u1")
        wrong = [each.buffer_size for each in found if each.buffer_size != size]
        if wrong:
            raise RuntimeError(f"nvCOMP decoded a chunk to {wrong[0]} bytes instead of {size}")
        with stream:
            for target, each in zip(decoded, found, strict=True):
                target[...] = cupy.asarray(each).view("u1").ravel()
        # nvCOMP's objects own the memory that these copies read, and are freed on return.
        stream.synchronize()
    return decoded


def codec(algorithm: str, stream: Stream, **device: int) -> nvidia.nvcomp.Codec:
    """Return nvCOMP's codec for bare compressed blocks, without nvCOMP's container."""
    nvcomp = import_module("nvidia.nvcomp")
    return nvcomp.Codec(
        algorithm=algorithm,
        bitstream_kind=nvcomp.BitstreamKind.RAW,
        cuda_stream=stream.ptr,
        **device,
    )


def _aligned(part: DeviceArray) -> DeviceArray:
    return part if part.data.ptr % ALIGNMENT == 0 else part.copy()
