"""Read Zarr arrays into device memory, using the devices of the process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from napari_wsigpu.gpu.transfer.zarr_reader import read_zarr
from napari_wsigpu.slide.runtime import default as default_runtime

if TYPE_CHECKING:
    import os
    from types import EllipsisType

    import zarr

    from napari_wsigpu.model.arrays import DeviceArray
    from napari_wsigpu.slide.runtime import Runtime

    Selection = int | slice | EllipsisType | tuple[int | slice | EllipsisType, ...]


def read_zarr_to_gpu(
    array: zarr.Array | str | os.PathLike[str],
    selection: Selection = ...,
    *,
    device: str = "cuda",
    how: str = "auto",
    runtime: Runtime | None = None,
) -> DeviceArray:
    """Read a part of a Zarr array into device memory.

    Parameters
    ----------
    array : zarr.Array, str or PathLike
        A Zarr v2 or v3 array, or its path.
    selection : int, slice, ellipsis or tuple of these
        The part to read, as in ``array[selection]``; steps must be positive.
    device : str
        Device name, such as ``"cuda"`` or ``"cuda:1"``.
    how : {"auto", "direct", "nvcomp", "host"}
        Method: ``"direct"`` reads uncompressed chunks of local files straight into device memory,
        with GPUDirect Storage where available; ``"nvcomp"`` reads zstd or LZ4 chunks the same way
        and decompresses them on the device; ``"host"`` reads any array with zarr and copies the
        result. ``"auto"`` tries them in this order, and logs the first unexpected failure of
        ``"direct"`` and of ``"nvcomp"`` in the process.
    runtime : Runtime, optional
        Runtime whose devices are used; the default runtime of the process if None.

    Returns
    -------
    cupy.ndarray
        The part, with the array's dtype. Missing chunks hold the fill value.

    Raises
    ------
    MissingPackageError
        If zarr is not installed.
    RegionError
        If the selection is invalid, or does not fit the array or the device memory.
    DeviceError
        If the device cannot be used.
    UnsupportedArrayError
        If the array cannot be read with the chosen method.
    SlideReadError
        If the array cannot be read at all.

    Examples
    --------
    >>> pixels = read_zarr_to_gpu("slide.zarr/0", np.s_[0, :, 1024:2048])  # doctest: +SKIP
    """
    shared = default_runtime() if runtime is None else runtime
    return read_zarr(shared.devices, array, selection, device, how)
