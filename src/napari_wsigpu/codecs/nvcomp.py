"""LZ4 by nvCOMP: chunks in device memory become what any Zarr reader decodes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.errors import MissingPackageError, UnsupportedSlideError

if TYPE_CHECKING:
    from collections.abc import Sequence

LARGEST_BLOCK = 1 << 24


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
        nvcomp, cupy, stream = self._nvcomp, import_module("cupy"), self._stream
        cupy.cuda.get_current_stream().synchronize()
        # A codec uses its stream when it is freed, and frees what it returned.
        with nvcomp.Codec(
            algorithm="LZ4", bitstream_kind=nvcomp.BitstreamKind.RAW, cuda_stream=stream.ptr
        ) as codec:
            found = codec.encode(nvcomp.as_arrays(list(chunks), cuda_stream=stream.ptr))
            with stream:
                header = cupy.asarray(np.frombuffer(size.to_bytes(4, "little"), np.uint8))
                encoded = [cupy.asarray(block).view(np.uint8).ravel() for block in found]
                data = cupy.concatenate([part for block in encoded for part in (header, block)])
            lengths = [header.size + block.size for block in encoded]
            stream.synchronize()
        return data, lengths
