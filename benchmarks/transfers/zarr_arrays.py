"""The Zarr arrays that benchmarks write, and those that zarr-python reads."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from napari_wsigpu.model.errors import MissingPackageError
from napari_wsigpu.storage.zarr.array import open_array

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from benchmarks.transfers.reference import Region
    from napari_wsigpu.model.layout import ZarrArray

ZarrCodec = Literal["none", "lz4"]


def require_zarr() -> Any:
    """Return the module zarr.

    Raises
    ------
    MissingPackageError
        If it is not installed.
    """
    try:
        return import_module("zarr")
    except ImportError as error:
        raise MissingPackageError(
            f"Zarr arrays need zarr-python, which can't be imported ({error}); "
            'run pip install "napari-wsigpu[zarr]" and start again.'
        ) from error


def create(
    folder: Path, shape: Sequence[int], dtype: Any, tile: tuple[int, int], codec: ZarrCodec
) -> Any:
    """Create an empty array of shape (height, width, channels), in place of one that is there.

    It is of Zarr 3, or of Zarr 2 with LZ4, which the third version does not have.
    """
    zarr = require_zarr()
    coded: dict[str, Any] = {"zarr_format": 3, "compressors": None}
    if codec == "lz4":
        coded = {"zarr_format": 2, "compressors": import_module("numcodecs").LZ4()}
    return zarr.create_array(
        str(folder),
        shape=tuple(shape),
        dtype=dtype,
        chunks=(*tile, shape[2]),
        filters=None,
        overwrite=True,
        **coded,
    )


def stored(folder: Path) -> NDArray[Any]:
    """Return what zarr-python reads of an array."""
    pixels: NDArray[Any] = require_zarr().open_array(str(folder), mode="r")[...]
    return pixels


def level_reader(array: ZarrArray) -> Callable[[Region], NDArray[Any]]:
    """Return what reads regions of a level by zarr-python, shape (height, width, channels)."""
    opened = open_array(Path(array.path))
    shown = [letter for letter in array.axes if letter in "yxc"]
    order = [shown.index(letter) for letter in "yxc" if letter in shown]

    def read(region: Region) -> NDArray[Any]:
        taken = {
            "y": slice(region.top, region.top + region.height),
            "x": slice(region.left, region.left + region.width),
            "c": slice(None),
        }
        key = [taken.get(axis, at) for axis, at in zip(array.axes, array.position, strict=True)]
        pixels = np.asarray(opened[tuple(key)]).transpose(order)
        return pixels if pixels.ndim == 3 else pixels[..., None]

    return read
