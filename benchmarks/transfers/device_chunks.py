"""Chunks of a local Zarr array, compressed in device memory and written from there."""

from __future__ import annotations

from importlib import import_module
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.transfers.chunk_writer import ChunkWriter, blocks
from napari_wsigpu.gpu.transfer.nvcomp import HEADERS, codec
from napari_wsigpu.model.errors import MissingPackageError, UnsupportedSlideError
from napari_wsigpu.storage.zarr.writer import put_chunk, whole_file

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


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
        head = size.to_bytes(HEADERS["LZ4"], "little")
        nvcomp, cupy, stream = self._nvcomp, import_module("cupy"), self._stream
        cupy.cuda.get_current_stream().synchronize()
        # A codec uses its stream when it is freed, and frees what it returned.
        with codec("LZ4", stream) as encoder:
            found = encoder.encode(nvcomp.as_arrays(list(chunks), cuda_stream=stream.ptr))
            with stream:
                header = cupy.asarray(np.frombuffer(head, np.uint8))
                encoded = [cupy.asarray(block).view(np.uint8).ravel() for block in found]
                data = cupy.concatenate([part for block in encoded for part in (header, block)])
            lengths = [header.size + block.size for block in encoded]
            stream.synchronize()
        return data, lengths


class DeviceChunkWriter(ChunkWriter):
    """Writes chunks from device memory.

    They are laid out on the device, encoded there, and copied to pinned memory all at once.

    Parameters
    ----------
    folder, array
        As for `ChunkWriter`.
    encode : callable, optional
        Makes of chunks, a device array of uint8 and shape (chunks, bytes), their stored bytes one
        after another, and the length of each.
    """

    def __init__(
        self,
        folder: Path,
        array: Any,
        encode: Callable[[Any], tuple[Any, Sequence[int]]] | None = None,
    ) -> None:
        super().__init__(folder, array)
        self._encode_all = encode or _as_they_are

    def write(self, pixels: Any, top: int, left: int) -> None:
        """Write a region; see `ChunkWriter.write`. The pixels may be changed afterwards."""
        paths = [path for _, _, path in self._places(pixels.shape, top, left)]
        cupy = import_module("cupy")
        chunks = blocks(cupy, pixels, self._array.chunks, self._array.fill_value)
        data, lengths = self._encode_all(chunks)
        bounds = pairwise((0, *accumulate(lengths)))
        self._put_all(paths, data, [slice(*ends) for ends in bounds])

    def _put_all(self, paths: Sequence[Path], data: Any, places: Sequence[slice]) -> None:
        host = import_module("cupyx").empty_pinned(data.shape, np.uint8)
        data.get(out=host)
        for path, place in zip(paths, places, strict=True):
            self._submit(place.stop - place.start, put_chunk, path, host[place])


class KvikioChunkWriter(DeviceChunkWriter):
    """Writes chunks from device memory by kvikio: by GPUDirect Storage where that works."""

    def _put_all(self, paths: Sequence[Path], data: Any, places: Sequence[slice]) -> None:
        cu_file = import_module("kvikio").CuFile
        import_module("cupy").cuda.get_current_stream().synchronize()
        for path, place in zip(paths, places, strict=True):
            self._submit(place.stop - place.start, _put_from_device, cu_file, path, data[place])


def _put_from_device(cu_file: Any, path: Path, data: Any) -> None:
    with whole_file(path) as unfinished, cu_file(str(unfinished), "w") as file:
        file.write(data)


def _as_they_are(chunks: Any) -> tuple[Any, Sequence[int]]:
    return chunks.ravel(), [chunks.shape[1]] * len(chunks)
