"""Zarr arrays read into device memory, by what the process shares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from napari_wsigpu.gpu.transfer.zarr import read_zarr
from napari_wsigpu.slide.runtime import default as default_runtime

if TYPE_CHECKING:
    from napari_wsigpu.slide.runtime import Runtime


def read_zarr_to_gpu(
    array: Any,
    selection: Any = ...,
    *,
    device: str = "cuda",
    how: str = "auto",
    runtime: Runtime | None = None,
) -> Any:
    """Read a part of a Zarr array into device memory.

    Parameters
    ----------
    array : zarr.Array, str or PathLike
        The array, of Zarr v2 or v3, or where it is.
    selection : int, slice, ellipsis or tuple of these
        The part, as in ``array[selection]``; slices go forward.
    device : str
        ``"cuda"`` or ``"cuda:1"``.
    how : {"auto", "direct", "nvcomp", "host"}
        The way: uncompressed chunks of local files straight into device memory, by GPUDirect
        Storage where that works; chunks of zstd or LZ4 in the same way, decompressed there by
        nvCOMP; any array by zarr on the host, and one copy. By default the first of them that
        can be gone. What fails then is said once in the log, and the next one is tried.
    runtime : Runtime, optional
        The devices to use instead of the process's own.

    Returns
    -------
    cupy.ndarray
        Of the array's type. Chunks that are missing hold the fill value.

    Raises
    ------
    MissingPackageError
        If zarr is not installed.
    RegionError
        If the selection is none, or does not fit the array or the device's memory.
    DeviceError
        If the device can't be used.
    UnsupportedArrayError
        If the array can't be read in the way that was asked for.
    SlideReadError
        If it can't be read at all.

    Examples
    --------
    >>> pixels = read_zarr_to_gpu("slide.zarr/0", np.s_[0, :, 1024:2048])  # doctest: +SKIP
    """
    shared = default_runtime() if runtime is None else runtime
    return read_zarr(shared.devices, array, selection, device, how)
