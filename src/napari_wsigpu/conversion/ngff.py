"""What OME-Zarr 0.5 says of an image: its axes, and how large its pixels are."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from napari_wsigpu.model.errors import MissingPackageError

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

TYPES = {"t": "time", "c": "channel"}
UNITS = {"t": "second"}


def import_zarr() -> Any:
    """Return zarr, which is an extra.

    Raises
    ------
    MissingPackageError
        If it is not installed.
    """
    try:
        import zarr
    except ImportError:
        raise MissingPackageError(
            "OME-Zarr needs zarr, which is not installed; pip install napari-wsigpu[zarr]."
        ) from None
    return zarr


def image_attributes(
    name: str,
    axes: str,
    scales: list[list[float]],
    first: tuple[float, float] = (0, 0),
    known: Container[str] = (),
    steps: Mapping[str, float | None] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the OME attributes of an image; `scales` are (y, x) of each level.

    `first` is where the first pixel lies, (y, x) in the same units. `steps` are those of other
    axes, `known` the axes that are in micrometres or seconds.
    """
    moved = []
    if any(first):
        moved = [{"type": "translation", "translation": [*[0.0] * (len(axes) - 2), *first]}]
    other = [steps.get(axis) or 1.0 for axis in axes[:-2]]
    return {
        "version": "0.5",
        "multiscales": [
            {
                "name": name,
                "axes": [
                    {"name": axis, "type": TYPES.get(axis, "space")}
                    | ({"unit": UNITS.get(axis, "micrometer")} if axis in known else {})
                    for axis in axes
                ],
                "datasets": [
                    {
                        "path": str(index),
                        "coordinateTransformations": [
                            {"type": "scale", "scale": [*other, *scale]},
                            *moved,
                        ],
                    }
                    for index, scale in enumerate(scales)
                ],
            }
        ],
    }
