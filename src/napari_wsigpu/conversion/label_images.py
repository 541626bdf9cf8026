"""Label images of a slide level, saved in an OME-Zarr together with the level's pixels."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.conversion.convert_slide import convert
from napari_wsigpu.conversion.ome_zarr_attributes import import_zarr
from napari_wsigpu.conversion.paths import remove
from napari_wsigpu.model.errors import ConversionError, TargetExistsError, write_errors
from napari_wsigpu.slide.containers import no_level
from napari_wsigpu.slide.slide import open_slide

if TYPE_CHECKING:
    import os
    import threading
    from collections.abc import Callable
    from types import ModuleType

    import zarr

    from napari_wsigpu.model.arrays import Array
    from napari_wsigpu.slide.slide import Slide

CHUNK = 1024
TRANSFORMATIONS = "coordinateTransformations"
COARSEST = 1024  # longest side of the coarsest level, in pixels
NAME = re.compile(r"[^\w .-]+")


def save_labels(
    slide: Slide,
    target: str | os.PathLike[str],
    labels: Array,
    *,
    level: int,
    name: str = "labels",
    progress: Callable[[int, int], None] | None = None,
    cancelled: threading.Event | None = None,
) -> None:
    """Write a label image of a level to an OME-Zarr that holds the pixels of that level.

    If the target does not exist, `convert` writes the level first. If it exists and its image has
    the size of the labels, the labels are added to it, replacing any of the same name.

    Parameters
    ----------
    slide : Slide
        The slide.
    target : str or PathLike
        Path of the OME-Zarr, ending in ``.zarr``.
    labels : ndarray of int, shape (height, width)
        Object numbers, 0 for background; as large as the level.
    level : int
        Number of the level in `Slide.pyramid`.
    name : str
        Name of the label image; characters that are unsafe in a folder name become "_".
    progress, cancelled
        As in `convert`.

    Raises
    ------
    ConversionError
        If the name does not end in ``.zarr``, or the labels are not integers of the level's shape.
    TargetExistsError
        If the target exists and is not an OME-Zarr of the size of the level.
    LevelError
        If the slide has no such level.
    SlideError
        If the target cannot be written or the slide cannot be read.
    """
    zarr = import_zarr()
    path = Path(target).absolute()
    if path.suffix.lower() != ".zarr":
        raise ConversionError(
            f"Labels are saved as OME-Zarr, so the name must end in .zarr: '{path}'."
        )
    found = next((each.layout for each in slide.pyramid if each.number == level), None)
    if found is None:
        raise no_level(slide.path, level, len(slide.pyramid))
    size = found.height, found.width
    if labels.ndim != 2 or labels.dtype.kind not in "iu" or labels.shape != size:
        raise ConversionError(
            f"Labels of shape {labels.shape} and type {labels.dtype} do not match level {level}; "
            f"pass integers of shape {size}."
        )
    if not path.exists():
        convert(slide, path, level=level, progress=progress, cancelled=cancelled)
    with write_errors(path):
        _check(zarr, path, labels.shape)
        group = zarr.open_group(path, mode="r+", zarr_format=3)
        safe_name = NAME.sub("_", name).strip(" .") or "labels"
        folder = path / "labels"
        # The labels appear under their name only when they are complete.
        work = f"{safe_name}.part"
        remove(folder / work)
        parent = group.require_group("labels")
        _write(parent.create_group(work), labels, group.attrs["ome"]["multiscales"][0], safe_name)
        remove(folder / safe_name)
        (folder / work).rename(folder / safe_name)
        known = parent.attrs.get("ome", {}).get("labels", [])
        names = list(dict.fromkeys([*known, safe_name]))
        parent.update_attributes({"ome": {"version": "0.5", "labels": names}})


def read_labels(slide: Slide, path: str | os.PathLike[str]) -> dict[str, tuple[int, Array]]:
    """Read the label images of an OME-Zarr that are as large as a level of the slide.

    Parameters
    ----------
    slide : Slide
        The slide on which they were painted.
    path : str or PathLike
        Path of the OME-Zarr.

    Returns
    -------
    dict of str to (int, ndarray of int, shape (height, width))
        By name: the number of the level in `Slide.pyramid`, and the object numbers.

    Raises
    ------
    ConversionError
        If it has no such label images.
    SlideError
        If it cannot be read.
    """
    numbers = {
        (level.layout.width, level.layout.height): level.number for level in slide.pyramid[::-1]
    }
    with open_slide(path, device="cpu") as saved:
        found = {
            name: (
                numbers[labels.dimensions],
                labels.read_region((0, 0), labels.dimensions)[..., 0],
            )
            for name, labels in saved.labels.items()
            if labels.dimensions in numbers
        }
    if not found:
        raise ConversionError(
            f"'{path}' has no label image of the size of a level of this slide; choose an OME-Zarr "
            "that was saved for it."
        )
    return found


def _check(zarr: ModuleType, path: Path, shape: tuple[int, ...]) -> None:
    try:
        group = zarr.open_group(path, mode="r", zarr_format=3)
        first = group.attrs["ome"]["multiscales"][0]["datasets"][0]["path"]
        same = group[first].shape[-2:] == shape
    except (KeyError, IndexError, TypeError, ValueError, FileNotFoundError):
        same = False
    if not same:
        raise TargetExistsError(
            f"These labels cannot be added to '{path}', which is not an OME-Zarr image of "
            f"{shape[1]:,} x {shape[0]:,} pixels; choose another name."
        )


def _write(group: zarr.Group, labels: Array, image: dict[str, Any], name: str) -> None:
    """Write a pyramid by taking every second pixel, with the scale and position of `image`."""
    # Averaging would create wrong object numbers.
    axes = [axis for axis in image["axes"] if axis["name"] in ("y", "x")]
    given = image["datasets"][0][TRANSFORMATIONS]
    first = {step["type"]: step[step["type"]][-2:] for step in given}
    datasets: list[dict[str, object]] = []
    level, factor = labels, 1
    while True:
        path = str(len(datasets))
        chunks = tuple(min(CHUNK, side) for side in level.shape)
        group.create_array(path, data=level, chunks=chunks, dimension_names=("y", "x"))
        scale = [size * factor for size in first["scale"]]
        steps: list[dict[str, object]] = [{"type": "scale", "scale": scale}]
        if "translation" in first:
            steps.append({"type": "translation", "translation": list(first["translation"])})
        datasets.append({"path": path, TRANSFORMATIONS: steps})
        if max(level.shape) <= COARSEST:
            break
        level, factor = np.ascontiguousarray(level[::2, ::2]), factor * 2
    multiscale = {"name": name, "axes": axes, "datasets": datasets}
    label = {"source": {"image": "../../"}}
    ome = {"version": "0.5", "multiscales": [multiscale], "image-label": label}
    group.update_attributes({"ome": ome})
