"""Images that lie in Zarr arrays, one a level: what OME-Zarr says of them, as levels."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import PureWindowsPath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from napari_wsigpu.formats.tiff import tiff
from napari_wsigpu.formats.zarr import ngff
from napari_wsigpu.model.errors import (
    CorruptSlideError,
    NotASlideError,
    SlideError,
    UnsupportedSlideError,
    file_error,
)
from napari_wsigpu.model.layout import SHOWN, Encoding, LevelLayout, SlideFile, TileGrid, ZarrArray
from napari_wsigpu.model.limits import limits
from napari_wsigpu.model.tags import COMPRESSION, FILLORDER, PHOTOMETRIC, PREDICTOR
from napari_wsigpu.storage.zarr.array import open_array, read_node
from napari_wsigpu.storage.zarr.server import ServerFolder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from napari_wsigpu.formats.zarr.ngff import Axes, Transform
    from napari_wsigpu.model.layout import Channel
    from napari_wsigpu.storage.zarr.array import Folder, Node

VERSIONS = ("0.1", "0.2", "0.3", "0.4", "0.5", "0.6")
SMALLEST_TILE = 256
LARGEST_GROWN = 4 << 20
LONGEST_PATH = 1024
WHITE = "#ffffff"


class ZarrImage(NamedTuple):
    """A multiscale image: its levels, and where it lies in space."""

    axes: Axes
    place: Transform | None
    levels: tuple[LevelLayout, ...]
    channels: tuple[Channel, ...]
    files: tuple[SlideFile, ...]
    hidden_planes: int
    background: float
    # By the letter of an axis, which of its positions is shown, and how many there are.
    planes: Mapping[str, tuple[int, int]]

    @property
    def end(self) -> int:
        """Where its tiles end in the file that they are thought to lie in."""
        grid, size = self.levels[-1].grid, self.levels[-1].tile_bytes
        return int(grid.offsets[0, -1, -1]) + size

    def spacing(self, letter: str) -> float | None:
        """Return micrometres, or seconds, between planes along an axis, where the file says so."""
        if letter not in self.axes.letters:
            return None
        step, _, known = self.along(letter)
        return step if known and step > 0 else None

    @property
    def starts(self) -> dict[str, float]:
        """Where the first plane along "z" and "t" lies, in micrometres and seconds."""
        starts = {letter: self.along(letter)[1] for letter in "zt" if self.spacing(letter)}
        return {letter: start for letter, start in starts.items() if start}

    @property
    def first(self) -> tuple[float, float]:
        """Where the first pixel's centre lies, (x, y): in micrometres, or else in pixels."""
        known = self.along("x")[2] and self.along("y")[2]
        x, y = (shift / (1 if known else size) for size, shift, _ in map(self.along, "xy"))
        return x, y

    def along(self, letter: str) -> tuple[float, float, bool]:
        """Return the size of a pixel, where the first one lies, and if that's in micrometres."""
        if self.place is None:
            return 1.0, 0.0, False
        index, unit = self.axes.letters.index(letter), self.axes.unit(letter)
        factor = unit or 1.0
        scale, shift = self.place.scale[index], self.place.translation[index]
        return scale * factor, shift * factor, unit is not None


def slide_file(path: Folder) -> SlideFile:
    """Return a file as it is now.

    Raises
    ------
    SlideError
        If it is not there.
    """
    if isinstance(path, ServerFolder):
        return SlideFile(str(path), path.stat().st_size, 0)
    try:
        status = path.stat()
    except OSError as error:
        raise file_error(str(path), error) from error
    return SlideFile.of(str(path), status)


def read_image(
    node: Node,
    problems: list[str],
    start: int = 0,
    labelled: ZarrImage | None = None,
    at: Mapping[str, int] = tiff.MIDDLE,
) -> ZarrImage:
    """Describe a group's multiscale image.

    Parameters
    ----------
    node : Node
        The group.
    problems : list of str
        Gets a sentence for each thing that is wrong.
    start : int
        From where on its tiles are thought to lie.
    labelled : ZarrImage, optional
        The image whose objects its pixels number; the same plane is shown of both.
    at : Mapping of str to int, optional
        Which plane along "z" and "t" is shown, instead of the one that the file names.

    Raises
    ------
    SlideError
        If it is no image, or can't be shown.
    """
    said = _multiscale(node, problems)
    arrays = _arrays(node, said, problems)
    shape = arrays[0][2].shape
    axes = ngff.axes(ngff.axes_of(said), len(shape), problems)
    if axes is None:
        raise UnsupportedSlideError(
            f"'{node.folder}' holds arrays of {len(shape)} dimensions and does not say which are "
            "y and x; save it as OME-Zarr with axes."
        )
    omero = node.ome.get("omero")
    count = dict(zip(axes.letters, shape, strict=True)).get("c", 1)
    channels = ngff.channels(omero, count, problems)
    photometric = PHOTOMETRIC.MINISBLACK
    if count == 3 and ngff.are_rgb(channels, arrays[0][2].dtype.name):
        photometric = PHOTOMETRIC.RGB
    elif [channel.color or WHITE for channel in channels] == [WHITE] and ngff.is_inverted(omero):
        photometric = PHOTOMETRIC.MINISWHITE
        channels = (replace(channels[0], color=None),)
    shown = {} if labelled is None else labelled.planes
    position = [
        shown[letter][0] * length // shown[letter][1]
        if letter in shown
        else at.get(letter, ngff.default_position(omero, letter, length))
        for letter, length in zip(axes.letters, shape, strict=True)
    ]
    found: list[tuple[LevelLayout, Transform | None, Node, Any]] = []
    for dataset, array_node, array in arrays:
        try:
            planes = _scaled(position, shape, array.shape)
            level = _level(array_node.folder, array, axes.letters, planes, photometric)
            _check_alike(level, [item[0] for item in found], array_node.folder)
            _check_number([*(item[0] for item in found), level], array_node.folder)
        except SlideError as error:
            if not found:
                raise
            problems.append(f"A level is left out. {error}")
            continue
        steps = [*_steps(dataset), *(step for step in _steps(said) if not ngff.is_named(step))]
        wrong: list[str] = []
        place = ngff.transform(steps, len(shape), wrong) if steps else None
        problems += [problem for problem in wrong if problem not in problems]
        if place is None and steps:
            problems.append(f"The scale of the level {array_node.folder.name!r} is not possible.")
        found.append((replace(level, categorical=labelled is not None), place, array_node, array))
    further = [step for step in _steps(said) if ngff.is_named(step)]
    if further:
        problems.append(
            f"It is said to lie in {len(further)} further coordinate system(s); positions are not "
            "those in them."
        )
    if _is_scaled(found[0][1], axes) and None in map(axes.unit, "xy"):
        problems.append("The size of a pixel has no known unit of length, so that none is given.")
    hidden = math.prod(
        length for letter, length in zip(axes.letters, shape, strict=True) if letter not in SHOWN
    )
    return ZarrImage(
        axes=axes,
        place=found[0][1],
        levels=_placed(_reduced(found, axes, problems), start),
        channels=channels,
        files=tuple(slide_file(path) for item in found for path in item[2].documents),
        hidden_planes=hidden - 1,
        background=_background(found[0][3]),
        planes={
            letter: (at, length)
            for letter, at, length in zip(axes.letters, position, shape, strict=True)
            if letter not in SHOWN
        },
    )


def _multiscale(node: Node, problems: list[str]) -> dict[str, Any]:
    """Return what a group says of its first multiscale image."""
    stated = node.ome.get("multiscales")
    if not isinstance(stated, list) or not stated or not isinstance(stated[0], dict):
        raise _refusal(node)
    if len(stated) > 1:
        problems.append(f"{len(stated) - 1} further multiscale image(s) are not shown.")
    version = (node.ome if "ome" in node.attributes else stated[0]).get("version")
    if version is not None and str(version)[:3] not in VERSIONS:
        problems.append(
            f"It is of version {str(version)[:20]!r} of OME-Zarr, which is not known; "
            "it is read like those that are."
        )
    return stated[0]


def _refusal(node: Node) -> SlideError:
    """Say what a group is that is no image, and what to open instead."""
    folder, said = node.folder, node.ome
    if "plate" in said or "well" in said:
        kind = "plate" if "plate" in said else "well"
        inner = _image_of_plate(node) if kind == "plate" else _image_of_well(node)
        example = "" if inner is None else f", for example '{folder.name}/{inner}'"
        return UnsupportedSlideError(
            f"'{folder}' is a {kind} of many images; open the folder of one of them{example}."
        )
    if isinstance(said.get("labels"), list):
        return NotASlideError(
            f"'{folder}' is a list of label images; open the folder of the image above it."
        )
    return NotASlideError(
        f"'{folder}' is a Zarr group without multiscale images; open the folder of an OME-Zarr "
        "image, or of an array."
    )


def _image_of_plate(node: Node) -> str | None:
    """Return the path of the first image of a plate that is there."""
    for path in _paths(node.ome.get("plate"), "wells"):
        try:
            inner = _image_of_well(child(node, path))
        except SlideError:
            continue
        if inner is not None:
            return f"{path}/{inner}"
    return None


def _image_of_well(node: Node) -> str | None:
    """Return the path of the first image of a well that is there."""
    for path in _paths(node.ome.get("well"), "images"):
        with suppress(SlideError):
            child(node, path)
            return path
    return None


def _paths(said: Any, name: str) -> list[str]:
    """Return the paths in a list that metadata may have."""
    items = said.get(name) if isinstance(said, dict) else None
    found = items[: limits.levels] if isinstance(items, list) else []
    paths = [item.get("path") for item in found if isinstance(item, dict)]
    return [path for path in paths if isinstance(path, str)]


def _arrays(
    node: Node, said: dict[str, Any], problems: list[str]
) -> list[tuple[dict[str, Any], Node, Any]]:
    """Open the arrays of a multiscale image, the largest first."""
    datasets = said.get("datasets")
    stated = datasets if isinstance(datasets, list) else []
    if len(stated) > limits.levels:
        problems.append(f"Of {len(stated)} levels, only {limits.levels} are looked at.")
    found: list[tuple[dict[str, Any], Node, Any]] = []
    errors: list[SlideError] = []
    for item in stated[: limits.levels]:
        dataset = item if isinstance(item, dict) else {}
        try:
            array_node = child(node, dataset.get("path"))
            if not array_node.is_array:
                raise CorruptSlideError(f"'{array_node.folder}' is no array.")
            found.append((dataset, array_node, open_array(array_node.folder)))
        except SlideError as error:
            errors.append(error)
    if not found:
        if errors:
            raise errors[0]
        raise CorruptSlideError(f"'{node.folder}' lists no levels; get a fresh copy of it.")
    problems += [f"A level is left out. {error}" for error in errors]
    return sorted(found, key=lambda item: -math.prod(item[2].shape))


def child(node: Node, name: Any) -> Node:
    """Return the node below another one by the path that metadata give.

    Raises
    ------
    CorruptSlideError
        If there is none, or the path leads out of the group.
    """
    text = name if isinstance(name, str) else ""
    parts = re.split(r"[/\\]", text)
    if not text or len(text) > LONGEST_PATH or "\0" in text or ".." in parts:
        raise _stray(node, name)
    if text.startswith(("/", "\\")) or PureWindowsPath(text).drive:
        raise _stray(node, name)
    found = read_node(node.folder / text)
    if found is None:
        raise CorruptSlideError(
            f"'{node.folder}' lacks its part {text[:80]!r}; get a fresh copy of it."
        )
    return found


def _stray(node: Node, name: Any) -> CorruptSlideError:
    return CorruptSlideError(
        f"'{node.folder}' says that a part of it lies at {str(name)[:80]!r}, which is no place in "
        "it; get a fresh copy of it."
    )


def _scaled(position: Sequence[int], base: Sequence[int], shape: Sequence[int]) -> list[int]:
    """Return which plane along each axis of a level is the one of the finest level."""
    if len(shape) != len(base):
        return [0] * len(shape)
    return [
        at * length // max(1, whole)
        for at, whole, length in zip(position, base, shape, strict=True)
    ]


def _is_scaled(place: Transform | None, axes: Axes) -> bool:
    """Whether pixels are said to be of another size than 1."""
    return place is not None and any(
        scale != 1 and letter in "xy"
        for scale, letter in zip(place.scale, axes.letters, strict=True)
    )


def _steps(said: dict[str, Any]) -> list[Any]:
    stated = said.get("coordinateTransformations")
    return stated if isinstance(stated, list) else []


# Levels


def _level(
    folder: Folder, array: Any, letters: str, position: Sequence[int], photometric: int
) -> LevelLayout:
    """Describe an array as a level."""
    shape, chunks, dtype = array.shape, array.chunks, np.dtype(array.dtype)
    if len(shape) != len(letters):
        raise CorruptSlideError(
            f"'{folder}' has {len(shape)} dimensions instead of {len(letters)}; "
            "get a fresh copy of it."
        )
    if dtype.kind not in "iufb":
        raise NotASlideError(
            f"'{folder}' has samples of type {dtype.name}, which are no brightness; "
            "save it with whole or floating-point numbers."
        )
    sizes = dict(zip(letters, shape, strict=True))
    width, height, count = sizes["x"], sizes["y"], sizes.get("c", 1)
    if min(*shape, *chunks) < 1:
        raise CorruptSlideError(f"'{folder}' holds no pixels; get a fresh copy of it.")
    if max(*shape, *chunks) >= tiff.LARGEST_SIDE:
        raise UnsupportedSlideError(
            f"'{folder}' claims a shape of {_product(shape)} in chunks of {_product(chunks)}, more "
            "than a slide can have; get a fresh copy of it."
        )
    if math.prod(chunks) * dtype.itemsize > limits.tile_bytes:
        raise UnsupportedSlideError(
            f"'{folder}' has chunks of {_product(chunks)}, too large to decode: "
            f"{limits.advice('tile_bytes')}, or save it with chunks of 256 to 1024 pixels."
        )
    chunk = dict(zip(letters, chunks, strict=True))
    pixel = count * dtype.itemsize
    tile_width = _grown(chunk["x"], width, LARGEST_GROWN // (pixel * chunk["y"]))
    tile_height = _grown(chunk["y"], height, LARGEST_GROWN // (pixel * tile_width))
    rows, columns = math.ceil(height / tile_height), math.ceil(width / tile_width)
    if rows * columns > limits.tiles:
        raise _too_many(folder, rows * columns)
    size = pixel * tile_height * tile_width
    offsets = np.arange(rows * columns, dtype=np.int64).reshape(1, rows, columns) * size
    shown = [0 if letter in SHOWN else at for letter, at in zip(letters, position, strict=True)]
    level = LevelLayout(
        width,
        height,
        count,
        Encoding(
            compression=COMPRESSION.NONE,
            photometric=photometric,
            predictor=PREDICTOR.NONE,
            fill_order=FILLORDER.MSB2LSB,
            byte_order="<",
            dtype="uint8" if dtype.kind == "b" else dtype.name,
            samples=count,
        ),
        TileGrid(tile_height, tile_width, offsets, np.broadcast_to(np.int64(size), offsets.shape)),
        array=ZarrArray(str(folder), letters, tuple(shown)),
    )
    tiff.check_tile_size(level, str(folder))
    return level


def _check_number(levels: Sequence[LevelLayout], folder: Folder) -> None:
    """Refuse a level with which there are too many tiles."""
    tiles = sum(level.grid.rows * level.grid.columns for level in levels)
    if tiles > limits.tiles:
        raise _too_many(folder, tiles)


def _too_many(folder: Folder, tiles: int) -> UnsupportedSlideError:
    return UnsupportedSlideError(
        f"'{folder}' claims {tiles} tiles, more than any slide has: {limits.advice('tiles')}."
    )


def _product(lengths: Sequence[int]) -> str:
    return " x ".join(str(length)[:20] for length in lengths[:8])


def _grown(side: int, extent: int, most: int) -> int:
    """Return a side of a tile: several of a chunk's if these are short, but not many pixels."""
    times = max(1, min(math.ceil(SMALLEST_TILE / side), most // side))
    return min(side * times, extent)


def _check_alike(level: LevelLayout, finer: Sequence[LevelLayout], folder: Folder) -> None:
    """Refuse an array that is no smaller picture of the finer ones."""
    if not finer:
        return
    base, last = finer[0], finer[-1]
    difference = abs(level.width * base.height - level.height * base.width)
    smaller = level.width * level.height < last.width * last.height
    same = smaller and difference <= 4 * max(base.width, base.height)
    if not same or (level.channels, level.dtype) != (base.channels, base.dtype):
        raise CorruptSlideError(
            f"'{folder}' is no smaller picture of the finest level, or has other samples."
        )


def _reduced(
    found: Sequence[tuple[LevelLayout, Transform | None, Node, Any]],
    axes: Axes,
    problems: list[str],
) -> list[LevelLayout]:
    """Return the levels with how much smaller they are, if all say so and none contradicts it."""
    levels = [item[0] for item in found]
    places = [item[1] for item in found]
    base = levels[0]
    reductions = []
    for level, place in zip(levels, places, strict=True):
        if place is None or places[0] is None:
            return levels
        ratios = []
        for letter, size, whole in (
            ("x", level.width, base.width),
            ("y", level.height, base.height),
        ):
            index = axes.letters.index(letter)
            ratios.append(place.scale[index] / places[0].scale[index])
            if abs(whole / ratios[-1] - size) > 2:
                problems.append(
                    f"The scale of the level of {level.width} x {level.height} pixels contradicts "
                    "its size, which counts."
                )
                return levels
        reductions.append(sum(ratios) / 2)
    return [
        replace(level, reduction=reduction)
        for level, reduction in zip(levels, reductions, strict=True)
    ]


def _placed(levels: Sequence[LevelLayout], start: int) -> tuple[LevelLayout, ...]:
    """Put the tiles of levels one after another into the file they are thought to lie in."""
    placed = []
    for level in levels:
        grid = replace(level.grid, offsets=level.grid.offsets + start)
        placed.append(replace(level, grid=grid))
        start += level.grid.rows * level.grid.columns * level.tile_bytes
    return tuple(placed)


def _background(array: Any) -> float:
    """Return an array's fill value, if it is a number that can be shown."""
    value = np.asarray(0 if array.fill_value is None else array.fill_value)
    if value.ndim or value.dtype.kind not in "iufb" or not np.isfinite(value):
        return 0
    number: float = value.item()
    return int(number) if value.dtype.kind != "f" else number


# Bare arrays


def bare_image(node: Node) -> ZarrImage:
    """Describe an array of which nothing more is known than its shape."""
    array = open_array(node.folder)
    channels = array.shape[2] if len(array.shape) == 3 else 1
    if len(array.shape) not in (2, 3) or channels > 4:
        raise NotASlideError(
            f"'{node.folder}' is a Zarr array of {_product(array.shape)} without axes; "
            "open the folder of the OME-Zarr image that it belongs to."
        )
    axes = ngff.Axes.of("yxc"[: len(array.shape)])
    rgb = channels > 2 and array.dtype.name in ("uint8", "uint16")
    photometric = PHOTOMETRIC.RGB if rgb else PHOTOMETRIC.MINISBLACK
    level = _level(node.folder, array, axes.letters, (0,) * len(array.shape), photometric)
    return ZarrImage(axes, None, (level,), (), (), 0, _background(array), {})
