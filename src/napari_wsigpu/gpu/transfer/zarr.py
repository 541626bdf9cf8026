"""Zarr arrays read into device memory."""

from __future__ import annotations

import logging
import math
import os
from contextlib import closing
from importlib import import_module
from typing import TYPE_CHECKING, Any

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
from napari_wsigpu.storage.zarr.chunks import axes_of, batches_of, encoded, find_chunks, plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from napari_wsigpu.gpu.device.cuda import CudaDevice
    from napari_wsigpu.gpu.device.device import Stream
    from napari_wsigpu.gpu.device.devices import Devices
    from napari_wsigpu.gpu.transfer.gds import Loader
    from napari_wsigpu.storage.zarr.chunks import Axis, Chunk, Encoded

WAYS = ("direct", "nvcomp", "host")
BATCH_BYTES = 256 << 20

logger = logging.getLogger(__name__)
_said: set[str] = set()


def read_zarr(devices: Devices, array: Any, selection: Any, device: str, how: str) -> Any:
    """Read a part of a Zarr array into device memory, as `read_zarr_to_gpu` says.

    Parameters
    ----------
    devices : Devices
        What has the device.
    array, selection, device, how
        As there.

    Returns
    -------
    cupy.ndarray
        Of the array's type.
    """
    if how not in ("auto", *WAYS):
        raise RegionError(
            f"There is no way {how!r} to read; use 'auto', 'direct', 'nvcomp' or 'host'."
        )
    try:
        worker = devices.worker(cuda_index(device))
    except DeviceError as error:
        sentence = str(error).replace("device='cpu', 'cuda'", "device='cuda'")
        raise DeviceError(sentence.replace("use device='cpu'", "read the array by zarr")) from error
    target = worker.device
    opened = _opened(array)
    axes = axes_of(selection, opened.shape)
    failure: Exception | None = None
    for way in WAYS if how == "auto" else (how,):
        try:
            with target.active():
                if way == "host":
                    return _on_host(opened, axes, target)
                return _by_chunks(opened, axes, worker.loader, compressed=way == "nvcomp")
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
        except Exception as error:  # CUDA, kvikio, nvCOMP and zarr's codecs have no common base
            failure = error
            if how == "auto" and way != "host" and way not in _said:
                _said.add(way)
                logger.warning("'%s' is not read by the way '%s': %s", opened.name, way, error)
    if isinstance(failure, UnsupportedArrayError):
        raise UnsupportedArrayError(
            f"'{opened.store}' can't be read by the way '{how}', because {failure}; use how='auto'."
        ) from None
    raise SlideReadError(f"'{opened.store}' can't be read ({failure}).") from failure


def _opened(array: Any) -> Any:
    try:
        zarr = import_module("zarr")
    except ImportError:
        raise MissingPackageError(
            'read_zarr_to_gpu needs zarr; pip install "napari-wsigpu[zarr]".'
        ) from None
    if isinstance(array, zarr.Array):
        return array
    path = os.fspath(array)
    try:
        return zarr.open_array(path, mode="r")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise SlideReadError(f"'{path}' can't be opened as a Zarr array ({error}).") from error


def _on_host(array: Any, axes: Sequence[Axis], device: CudaDevice) -> Any:
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


def _by_chunks(array: Any, axes: Sequence[Axis], loader: Loader, *, compressed: bool) -> Any:
    device = loader.device
    stored = encoded(array)
    if compressed != (stored.algorithm is not None):
        raise UnsupportedArrayError(
            "its chunks are not compressed" if compressed else "its chunks are compressed"
        )
    chunks, complete = find_chunks(array, stored, axes)
    shape = tuple(axis.length for axis in axes)
    pixels = device.empty(shape, stored.dtype)
    batches = list(batches_of(chunks, BATCH_BYTES))
    stream = device.new_stream()
    device.follow(stream)
    try:
        if not complete:
            device.fill(pixels, array.fill_value or 0, stream)
        _fill(pixels, stored, batches, loader, stream)
    finally:
        stream.synchronize()
    return pixels.reshape(_shape(axes))


def _fill(
    pixels: Any,
    stored: Encoded,
    batches: Sequence[Sequence[Chunk]],
    loader: Loader,
    stream: Stream,
) -> None:
    """Read chunks, and put them where they belong."""
    device = loader.device
    plans = [plan(chunks) for chunks in batches]
    reads = Transfer(loader, stream).buffers([batch for batch, _ in plans])
    with closing(reads) as buffers:
        for (_, starts), chunks, buffer in zip(plans, batches, buffers, strict=True):
            parts = [
                buffer[start : start + chunk.size]
                for start, chunk in zip(starts, chunks, strict=True)
            ]
            if stored.algorithm is not None:
                index = int(device.name.partition(":")[2])
                parts = decompress(parts, stored.algorithm, stored.size, index, stream)
            with stream:
                for part, chunk in zip(parts, chunks, strict=True):
                    if device.address(part) % stored.dtype.itemsize:
                        part = part.copy()
                    decoded = part.view(stored.dtype).reshape(stored.chunk)
                    pixels[chunk.target] = decoded[chunk.inside]


def _shape(axes: Sequence[Axis]) -> tuple[int, ...]:
    return tuple(axis.length for axis in axes if axis.kept)
