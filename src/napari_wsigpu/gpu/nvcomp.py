"""Lossless compression in device memory by nvCOMP, of chunks as numcodecs and zarr write them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.errors import MissingPackageError, UnsupportedSlideError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from napari_wsigpu.gpu.device import Stream

LARGEST_BLOCK = 1 << 24
# numcodecs writes the decoded size before the data.
HEADERS = {"LZ4": 4}
ALIGNMENT = 8


class Lz4Encoder:
    """Encodes as numcodecs' LZ4 does: the decoded size in 4 bytes, then one LZ4 block.

    Raises
    ------
    MissingPackageError
        If nvCOMP is not installed.
    """

    def __init__(self) -> None:
        try:
            self._nvcomp = import_module("nvidia.nvcomp")
        except (ImportError, OSError) as error:
            raise MissingPackageError(
                f"LZ4 on the GPU needs nvCOMP, which can't be imported ({error}); "
                "run pip install nvidia-nvcomp-cu12, or -cu13, as your driver's CUDA version is."
            ) from error
        self._stream = import_module("cupy").cuda.Stream(non_blocking=True)

    def __call__(self, chunks: Any) -> tuple[Any, Sequence[int]]:
        """Encode chunks of at most 16 MiB.

        Parameters
        ----------
        chunks : cupy.ndarray of uint8, shape (chunks, bytes)
            In device memory.

        Returns
        -------
        data : cupy.ndarray of uint8
            The encoded chunks, one after another.
        lengths : sequence of int
            Bytes of each.
        """
        size = chunks.shape[1]
        if size > LARGEST_BLOCK:
            raise UnsupportedSlideError(
                f"nvCOMP's LZ4 takes chunks of at most 16 MiB, not of {size / 2**20:.0f} MiB; "
                "choose smaller ones."
            )
        head = size.to_bytes(HEADERS["LZ4"], "little")
        nvcomp, cupy, stream = self._nvcomp, import_module("cupy"), self._stream
        cupy.cuda.get_current_stream().synchronize()
        # A codec uses its stream when it is freed, and frees what it returned.
        with _codec("LZ4", stream) as codec:
            found = codec.encode(nvcomp.as_arrays(list(chunks), cuda_stream=stream.ptr))
            with stream:
                header = cupy.asarray(np.frombuffer(head, np.uint8))
                encoded = [cupy.asarray(block).view(np.uint8).ravel() for block in found]
                data = cupy.concatenate([part for block in encoded for part in (header, block)])
            lengths = [header.size + block.size for block in encoded]
            stream.synchronize()
        return data, lengths


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
    with _codec(algorithm, stream, device_id=device) as codec:
        found = codec.decode(nvcomp.as_arrays(data, cuda_stream=stream.ptr), "|u1")
        wrong = [each.buffer_size for each in found if each.buffer_size != size]
        if wrong:
            raise RuntimeError(f"nvCOMP makes {wrong[0]} bytes of a chunk of {size}")
        with stream:
            for target, each in zip(decoded, found, strict=True):
                target[...] = cupy.asarray(each).view("u1").ravel()
        # What nvCOMP returns is freed with its own objects.
        stream.synchronize()
    return decoded


def _codec(algorithm: str, stream: Stream, **device: int) -> Any:
    nvcomp = import_module("nvidia.nvcomp")
    return nvcomp.Codec(
        algorithm=algorithm,
        bitstream_kind=nvcomp.BitstreamKind.RAW,
        cuda_stream=stream.ptr,
        **device,
    )


def _aligned(part: Any) -> Any:
    return part if part.data.ptr % ALIGNMENT == 0 else part.copy()
