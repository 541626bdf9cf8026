"""Label images of a slide's level, as OME-Zarr beside the pixels of that level."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.conversion.ngff import import_zarr
from napari_wsigpu.conversion.paths import refused, remove
from napari_wsigpu.conversion.run import convert
from napari_wsigpu.model.errors import ConversionError, TargetExistsError

if TYPE_CHECKING:
    import os
    import threading
    from collections.abc import Callable

    from numpy.typing import NDArray

    from napari_wsigpu.slide.slide import Slide

CHUNK = 1024
COARSEST = 1024  # pixels a side of the coarsest level
NAME = re.compile(r"[^\w .-]+")


def save_labels(
    slide: Slide,
    target: str | os.PathLike[str],
    labels: NDArray[Any],
    *,
    level: int,
    name: str = "labels",
    progress: Callable[[int, int], None] | None = None,
    cancelled: threading.Event | None = None,
) -> None:
    """Write a label image of a level into an OME-Zarr with the pixels of that level.

    If the target is not there, the level is written first, as `convert` does; if it is, and its
    image has the size of the labels, these are added to it, and replace those of the same name.

    Parameters
    ----------
    slide : Slide
        The slide.
    target : str or PathLike
        A path that ends in ``.zarr``.
    labels : ndarray of int, shape (height, width)
        Numbers of objects, 0 where there is none; as large as the level.
    level : int
        Number of the level in `Slide.pyramid`.
    name : str
        Name of the label image; what no folder should be called becomes "_".
    progress, cancelled
        As of `convert`.

    Raises
    ------
    ConversionError
        If the labels are no such image, or not as large as the level.
    TargetExistsError
        If the target is something else than an OME-Zarr of this level's size.
    SlideError
        If it can't be written, or the slide can't be read.
    """
    zarr = import_zarr()
    path = Path(target).absolute()
    if path.suffix.lower() != ".zarr":
        raise ConversionError(f"'{path}' is no name of an OME-Zarr; end it in .zarr.")
    found = next((each.layout for each in slide.pyramid if each.number == level), None)
    size = None if found is None else (found.height, found.width)
    if labels.ndim != 2 or labels.dtype.kind not in "iu" or labels.shape != size:
        raise ConversionError(
            f"Labels of shape {labels.shape} and type {labels.dtype} are none of level {level}; "
            f"give whole numbers of shape {size}."
        )
    if not path.exists():
        convert(slide, path, level=level, progress=progress, cancelled=cancelled)
    with refused(path):
        _check(zarr, path, labels.shape)
        group = zarr.open_group(path, mode="r+", zarr_format=3)
        own = NAME.sub("_", name).strip(" .") or "labels"
        folder = path / "labels"
        work = f"{own}.part"
        remove(folder / work)
        parent = group.require_group("labels")
        _write(parent.create_group(work), labels, group.attrs["ome"]["multiscales"][0], own)
        remove(folder / own)
        (folder / work).rename(folder / own)
        known = parent.attrs.get("ome", {}).get("labels", [])
        names = list(dict.fromkeys([*known, own]))
        parent.update_attributes({"ome": {"version": "0.5", "labels": names}})


def _check(zarr: Any, path: Path, shape: tuple[int, ...]) -> None:
    try:
        group = zarr.open_group(path, mode="r", zarr_format=3)
        first = group.attrs["ome"]["multiscales"][0]["datasets"][0]["path"]
        same = group[first].shape[-2:] == shape
    except (KeyError, IndexError, TypeError, ValueError, FileNotFoundError):
        same = False
    if not same:
        raise TargetExistsError(
            f"'{path}' is no OME-Zarr image of {shape[1]:,} x {shape[0]:,} pixels, so that these "
            "labels can't be added to it; choose another name."
        )


def _write(group: Any, labels: NDArray[Any], image: dict[str, Any], name: str) -> None:
    """Write levels of every second pixel, with the scale and place of an image."""
    axes = [axis for axis in image["axes"] if axis["name"] in ("y", "x")]
    first = {
        step["type"]: step[step["type"]][-2:]
        for step in image["datasets"][0]["coordinateTransformations"]
    }
    datasets: list[dict[str, Any]] = []
    level, factor = labels, 1
    while True:
        path = str(len(datasets))
        chunks = tuple(min(CHUNK, side) for side in level.shape)
        array = group.create_array(
            path, shape=level.shape, chunks=chunks, dtype=level.dtype, dimension_names=("y", "x")
        )
        array[...] = level
        steps: list[dict[str, Any]] = [
            {"type": "scale", "scale": [size * factor for size in first["scale"]]}
        ]
        if "translation" in first:
            steps.append({"type": "translation", "translation": list(first["translation"])})
        datasets.append({"path": path, "coordinateTransformations": steps})
        if max(level.shape) <= COARSEST:
            break
        level, factor = np.ascontiguousarray(level[::2, ::2]), factor * 2
    multiscale = {"name": name, "axes": axes, "datasets": datasets}
    label = {"source": {"image": "../../"}}
    group.update_attributes(
        {"ome": {"version": "0.5", "multiscales": [multiscale], "image-label": label}}
    )
