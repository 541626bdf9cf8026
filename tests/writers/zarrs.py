"""OME-Zarr images that the tests write with zarr."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr
from zarr.errors import ZarrUserWarning

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

UNITS = {"z": "micrometer", "y": "micrometer", "x": "micrometer"}
TYPES = {"t": "time", "c": "channel"}


def halved(pixels: NDArray[Any], axes: str, count: int) -> list[NDArray[Any]]:
    """Return an array and `count` others, each of every second pixel of the last."""
    levels = [pixels]
    every = tuple(slice(None, None, 2 if letter in "yx" else None) for letter in axes)
    for _ in range(count):
        levels.append(levels[-1][every])
    return levels


def write_image(
    folder: Path,
    levels: Sequence[NDArray[Any]],
    axes: str = "cyx",
    *,
    version: str = "0.5",
    units: dict[str, str] | None = None,
    pixel: float = 0.5,
    more: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Write a multiscale image; `options` are zarr's, `more` are further OME attributes.

    Returns
    -------
    dict
        The OME attributes as they were written.
    """
    units = UNITS if units is None else units
    datasets = []
    for number, level in enumerate(levels):
        write_array(folder / str(number), level, version=version, **options)
        scale = [
            pixel * levels[0].shape[i] / level.shape[i] if letter in "yx" else 1.0
            for i, letter in enumerate(axes)
        ]
        step = {"type": "scale", "scale": scale}
        datasets.append({"path": str(number), "coordinateTransformations": [step]})
    stated = [
        {"name": letter, "type": TYPES.get(letter, "space")}
        | ({"unit": units[letter]} if letter in units else {})
        for letter in axes
    ]
    image = {"axes": stated, "datasets": datasets, "name": "image"}
    ome = {"multiscales": [image], **(more or {})}
    write_group(folder, ome, version)
    return ome


def write_array(
    folder: Path,
    pixels: NDArray[Any],
    *,
    version: str = "0.5",
    chunks: tuple[int, ...] | None = None,
    **options: Any,
) -> None:
    """Write a Zarr array of the format that a version of OME-Zarr lies on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ZarrUserWarning)
        array = zarr.create_array(
            store=folder,
            shape=pixels.shape,
            dtype=pixels.dtype,
            chunks=chunks or tuple(min(64, length) for length in pixels.shape),
            zarr_format=3 if version == "0.5" else 2,
            **options,
        )
    array[...] = pixels


def write_group(folder: Path, ome: dict[str, Any], version: str = "0.5") -> None:
    """Write or replace the attributes of a group."""
    folder.mkdir(parents=True, exist_ok=True)
    if version == "0.5":
        attributes = {"ome": {"version": version, **ome}}
        document = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
        (folder / "zarr.json").write_text(json.dumps(document))
        return
    (folder / ".zgroup").write_text('{"zarr_format": 2}')
    (folder / ".zattrs").write_text(json.dumps(ome))


def multiscale(axes: str, scales: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return what a group says of an image whose arrays are 0, 1, ..."""
    stated = [
        {"name": letter, "type": TYPES.get(letter, "space")}
        | ({"unit": UNITS[letter]} if letter in UNITS else {})
        for letter in axes
    ]
    datasets = [
        {"path": str(number), "coordinateTransformations": [{"type": "scale", "scale": [*scale]}]}
        for number, scale in enumerate(scales)
    ]
    return {"axes": stated, "datasets": datasets, "name": "image"}


def write_label(
    folder: Path, name: str, levels: Sequence[np.ndarray[Any, Any]], **options: Any
) -> None:
    """Write a label image of the image in a folder."""
    write_group(folder / "labels", {"labels": [name]}, options.get("version", "0.5"))
    options = {"more": {"image-label": {}}, "axes": "yx"} | options
    write_image(folder / "labels" / name, levels, **options)


def read_array(folder: Path) -> NDArray[Any]:
    """Return what zarr itself reads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ZarrUserWarning)
        array = zarr.open_array(folder, mode="r")
    return np.asarray(array[...])
