"""Chunks that numcodecs or zarr compressed, decompressed in device memory by nvCOMP."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from napari_wsigpu.gpu.device.device import Stream

# numcodecs writes the decoded size before the data.
HEADERS = {"LZ4": 4}
ALIGNMENT = 8


def decompress(parts: Sequence[Any], algorithm: str, size: int, device: int, stream: Stream) -> Any:
    """Decompress buffers side by side.

    Parameters
    ----------
    parts : sequence of device arrays of uint8
        One chunk each, as numcodecs and zarr write it.
    algorithm : {"LZ4", "Zstd"}
        What they are compressed with.
    size : int
        Bytes that each has to have afterwards.
    device : int
        Number of the CUDA device.
    stream : Stream
        The order of work.

    Returns
    -------
    device array of uint8, shape (parts, size)

    Raises
    ------
    ImportError
        If nvCOMP is not installed.
    RuntimeError
        If it can't decompress them.
    """
    nvcomp, cupy = import_module("nvidia.nvcomp"), import_module("cupy")
    with stream:
        data = [_aligned(part[HEADERS.get(algorithm, 0) :]) for part in parts]
        decoded = cupy.empty((len(parts), size), "u1")
    with codec(algorithm, stream, device_id=device) as nvcomp_codec:
        found = nvcomp_codec.decode(nvcomp.as_arrays(data, cuda_stream=stream.ptr), "|u1")
        wrong = [each.buffer_size for each in found if each.buffer_size != size]
        if wrong:
            raise RuntimeError(f"nvCOMP makes {wrong[0]} bytes of a chunk of {size}")
        with stream:
            for target, each in zip(decoded, found, strict=True):
                target[...] = cupy.asarray(each).view("u1").ravel()
        # What nvCOMP returns is freed with its own objects.
        stream.synchronize()
    return decoded


def codec(algorithm: str, stream: Stream, **device: int) -> Any:
    """Return nvCOMP's codec of bare blocks."""
    nvcomp = import_module("nvidia.nvcomp")
    return nvcomp.Codec(
        algorithm=algorithm,
        bitstream_kind=nvcomp.BitstreamKind.RAW,
        cuda_stream=stream.ptr,
        **device,
    )


def _aligned(part: Any) -> Any:
    return part if part.data.ptr % ALIGNMENT == 0 else part.copy()
