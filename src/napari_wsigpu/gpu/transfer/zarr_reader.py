"""Reading Zarr arrays into device memory."""

from __future__ import annotations

import logging
import math
import os
from contextlib import closing
from importlib import import_module
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.gpu.device.devices import cuda_index
from napari_wsigpu.gpu.transfer.gds import Transfer
from napari_wsigpu.gpu.transfer.nvcomp import decompress
from napari_wsigpu.model.errors import (
    DeviceError,
    MissingPackageError,
    RegionError,
    SlideError,
    SlideReadError,
    UnsupportedArrayError,
)
from napari_wsigpu.storage.zarr.chunks import (
    axes_of,
    batches_of,
    chunk_encoding,
    find_chunks,
    local_files,
    plan_reads,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import zarr

    from napari_wsigpu.gpu.device.cuda import CudaDevice
    from napari_wsigpu.gpu.device.devices import Devices
    from napari_wsigpu.gpu.device.interfaces import Stream
    from napari_wsigpu.gpu.transfer.gds import Loader
    from napari_wsigpu.model.arrays import DeviceArray
    from napari_wsigpu.storage.zarr.chunks import Axis, Chunk, ChunkEncoding, Selection

METHODS = ("direct", "nvcomp", "host")
BATCH_BYTES = 256 << 20

logger = logging.getLogger(__name__)
_warned: set[str] = set()


def read_zarr(
    devices: Devices,
    array: zarr.Array | str | os.PathLike[str],
    selection: Selection,
    device: str,
    how: str,
) -> DeviceArray:
    """Read a part of a Zarr array into device memory; implements `read_zarr_to_gpu`.

    Parameters
    ----------
    devices : Devices
        Devices of the process.
    array, selection, device, how
        See `read_zarr_to_gpu`.

    Returns
    -------
    cupy.ndarray
        The selected elements, with the array's type.
    """
    if how not in ("auto", *METHODS):
        raise RegionError(
            f"how={how!r} is not supported; use 'auto', 'direct', 'nvcomp' or 'host'."
        )
    try:
        worker = devices.worker(cuda_index(device))
    except DeviceError as error:
        sentence = str(error).replace("device='cpu', 'cuda'", "device='cuda'")
        raise DeviceError(
            sentence.replace("use device='cpu'", "read the array with zarr")
        ) from error
    target = worker.device
    opened = _opened(array)
    axes = axes_of(selection, opened.shape)
    failure: Exception | None = None
    for method in METHODS if how == "auto" else (how,):
        try:
            with target.active():
                if method == "host":
                    return _on_host(opened, axes, target)
                return _by_chunks(opened, axes, worker.loader, compressed=method == "nvcomp")
        except UnsupportedArrayError as error:
            failure = error
        except SlideError:
            raise
        except MemoryError:
            size = math.prod(axis.length for axis in axes) * np.dtype(opened.dtype).itemsize
            raise RegionError(
                f"A selection of {size >> 20} MiB doesn't fit into the memory of '{device}'; "
                "read it in parts."
            ) from None
        except Exception as error:  # CUDA, kvikio, nvCOMP and codecs have no common base class
            failure = error
            if how == "auto" and method != "host" and method not in _warned:
                _warned.add(method)
                logger.warning("'%s' is not read with how='%s': %s", opened.name, method, error)
    if isinstance(failure, UnsupportedArrayError):
        raise UnsupportedArrayError(
            f"'{opened.store}' cannot be read with how='{how}' because {failure}; use how='auto'."
        ) from None
    raise SlideReadError(f"'{opened.store}' cannot be read ({failure}).") from failure


def _opened(array: zarr.Array | str | os.PathLike[str]) -> zarr.Array:
    try:
        package = import_module("zarr")
    except ImportError:
        raise MissingPackageError(
            'read_zarr_to_gpu requires zarr; run pip install "napari-wsigpu[zarr]".'
        ) from None
    if isinstance(array, package.Array):
        return array
    path = os.fspath(array)
    try:
        return package.open_array(path, mode="r")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise SlideReadError(f"'{path}' cannot be opened as a Zarr array ({error}).") from error


def _on_host(array: zarr.Array, axes: Sequence[Axis], device: CudaDevice) -> DeviceArray:
    """Read and decode on the host with zarr, and upload the elements."""
    selection = tuple(
        slice(axis.start, axis.start + axis.step * axis.length, axis.step) for axis in axes
    )
    found = array[selection]
    if not device.is_own(found):
        host = np.asarray(found)
        stream = device.new_stream()
        found = device.empty(host.shape, host.dtype)
        device.follow(stream)
        device.send(host, found, stream)
        stream.synchronize()
    return found.reshape(_shape(axes))


def _by_chunks(
    array: zarr.Array, axes: Sequence[Axis], loader: Loader, *, compressed: bool
) -> DeviceArray:
    """Read whole chunks into device memory, and decompress them there."""
    device = loader.device
    encoding = chunk_encoding(array)
    if compressed != (encoding.algorithm is not None):
        raise UnsupportedArrayError(
            "its chunks are not compressed" if compressed else "its chunks are compressed"
        )
    chunks, complete = find_chunks(array, encoding, axes, local_files(array))
    shape = tuple(axis.length for axis in axes)
    pixels = device.empty(shape, encoding.dtype)
    batches = list(batches_of(chunks, BATCH_BYTES))
    stream = device.new_stream()
    # `pixels` may be in memory that the current stream still uses.
    device.follow(stream)
    try:
        if not complete:
            device.fill(pixels, array.fill_value or 0, stream)
        _fill(pixels, encoding, batches, loader, stream)
    finally:
        # The caller works on another stream, and buffers are freed on return.
        stream.synchronize()
    return pixels.reshape(_shape(axes))


def _fill(
    pixels: DeviceArray,
    encoding: ChunkEncoding,
    batches: Sequence[Sequence[Chunk]],
    loader: Loader,
    stream: Stream,
) -> None:
    """Read the chunks batch by batch, and copy their elements to `pixels`."""
    device = loader.device
    plans = [plan_reads(chunks) for chunks in batches]
    reads = Transfer(loader, stream).buffers([batch for batch, _ in plans])
    with closing(reads) as buffers:
        for (_, starts), chunks, buffer in zip(plans, batches, buffers, strict=True):
            parts = [
                buffer[start : start + chunk.size]
                for start, chunk in zip(starts, chunks, strict=True)
            ]
            if encoding.algorithm is not None:
                parts = decompress(parts, encoding.algorithm, encoding.size, device.index, stream)
            with stream:
                for part, chunk in zip(parts, chunks, strict=True):
                    if device.address(part) % encoding.dtype.itemsize:
                        part = part.copy()  # kernels read aligned elements only
                    decoded = part.view(encoding.dtype).reshape(encoding.chunk)
                    pixels[chunk.target] = decoded[chunk.inside]


def _shape(axes: Sequence[Axis]) -> tuple[int, ...]:
    return tuple(axis.length for axis in axes if axis.kept)
