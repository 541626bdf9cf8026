"""OME-Zarr 0.5 attributes of an image: its axes, pixel sizes and position."""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from napari_wsigpu.model.errors import MissingPackageError

if TYPE_CHECKING:
    from collections.abc import Container, Mapping
    from types import ModuleType

TYPES = {"t": "time", "c": "channel"}
UNITS = {"t": "second"}


def import_zarr() -> ModuleType:
    """Return the module zarr, which is an optional dependency.

    Raises
    ------
    MissingPackageError
        If zarr is not installed.
    """
    try:
        return import_module("zarr")
    except ImportError:
        raise MissingPackageError(
            'OME-Zarr requires zarr, which is not installed; run pip install "napari-wsigpu[zarr]".'
        ) from None


def image_attributes(
    name: str,
    axes: str,
    scales: list[list[float]],
    position: Mapping[str, float] = MappingProxyType({}),
    known: Container[str] = (),
    steps: Mapping[str, float | None] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the OME attributes of an image.

    Parameters
    ----------
    name : str
        Name of the image.
    axes : str
        One letter per axis, ending in ``"yx"``.
    scales : list of list of float
        Pixel size (y, x) of each level.
    position : Mapping of str to float
        Center of the first pixel by axis, in the units of the scales; 0 by default.
    known : container of str
        Axes measured in micrometers ("t" in seconds); the others get no unit.
    steps : Mapping of str to float or None
        Distance between planes along the other axes; 1 by default.
    """
    moved = []
    if any(position.values()):
        translation = [position.get(axis, 0.0) for axis in axes]
        moved = [{"type": "translation", "translation": translation}]
    other = [steps.get(axis) or 1.0 for axis in axes[:-2]]
    units = {axis: {"unit": UNITS.get(axis, "micrometer")} for axis in axes if axis in known}
    listed = [
        {"name": axis, "type": TYPES.get(axis, "space"), **units.get(axis, {})} for axis in axes
    ]
    datasets = []
    for index, scale in enumerate(scales):
        steps_of_level = [{"type": "scale", "scale": [*other, *scale]}, *moved]
        datasets.append({"path": str(index), "coordinateTransformations": steps_of_level})
    return {"version": "0.5", "multiscales": [{"name": name, "axes": listed, "datasets": datasets}]}
