"""Describe a multiscale image of OME-Zarr: one Zarr array per level.

Zarr chunks have no offsets. The offsets of a level's tiles point into a virtual file that would
hold all tiles uncompressed; they only identify the tiles.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import PureWindowsPath
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.formats.pictures import plain_encoding
from napari_wsigpu.formats.tiff import tiff
from napari_wsigpu.formats.units import unknown_length
from napari_wsigpu.formats.zarr import ngff
from napari_wsigpu.model.errors import (
    CorruptSlideError,
    NotASlideError,
    SlideError,
    UnsupportedSlideError,
    file_error,
)
from napari_wsigpu.model.layout import SHOWN, LevelLayout, SlideFile, TileGrid, ZarrArray
from napari_wsigpu.model.limits import limits
from napari_wsigpu.model.tags import COMPRESSION, PHOTOMETRIC
from napari_wsigpu.storage.zarr.array import open_array, read_node
from napari_wsigpu.storage.zarr.server import KeyFolder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from zarr import Array

    from napari_wsigpu.formats.fields import Metadata
    from napari_wsigpu.formats.zarr.ngff import Axes, Transform
    from napari_wsigpu.model.layout import Channel
    from napari_wsigpu.storage.zarr.array import Folder, Node

VERSIONS = ("0.1", "0.2", "0.3", "0.4", "0.5", "0.6")
SMALLEST_TILE = 256
LARGEST_GROWN = 4 << 20
LONGEST_PATH = 1024
WHITE = "#ffffff"
# Row, column and image of a plate, or an image of a well.
PLAIN_PATH = re.compile(r"(([A-Z]{1,2}|\d{1,3})/\d{1,3}/)?\d{1,5}", re.ASCII)


class ZarrImage(NamedTuple):
    """A multiscale image: its levels and their position in physical space."""

    axes: Axes
    transform: Transform | None
    levels: tuple[LevelLayout, ...]
    channels: tuple[Channel, ...]
    files: tuple[SlideFile, ...]
    other_planes: int
    background: float
    # The index of the shown plane and the number of planes, by the letter of the axis.
    planes: Mapping[str, tuple[int, int]]
    # Whether samples are False or True, which are read as 0 and 1.
    is_boolean: bool = False

    @property
    def end(self) -> int:
        """Offset of the end of its last tile, where the tiles of the next image may start."""
        grid, size = self.levels[-1].grid, self.levels[-1].tile_bytes
        return int(grid.offsets[0, -1, -1]) + size

    def spacing(self, letter: str) -> float | None:
        """Return the micrometers or seconds between planes along an axis; None if unknown."""
        if letter not in self.axes.letters:
            return None
        step, _, known = self.along(letter)
        return step if known and step > 0 else None

    @property
    def starts(self) -> dict[str, float]:
        """Position of the first plane along "z" and "t", in micrometers and seconds."""
        starts = {letter: self.along(letter)[1] for letter in "zt" if self.spacing(letter)}
        return {letter: start for letter, start in starts.items() if start}

    @property
    def first(self) -> tuple[float, float]:
        """Center of the first pixel, (x, y), in micrometers; in pixels if the unit is unknown."""
        known = self.along("x")[2] and self.along("y")[2]
        x, y = (shift / (1 if known else size) for size, shift, _ in map(self.along, "xy"))
        return x, y

    def along(self, letter: str) -> tuple[float, float, bool]:
        """Return the pixel size and first position along an axis, and whether their unit is known.

        The unit is the micrometer, or the second for t.
        """
        if self.transform is None:
            return 1.0, 0.0, False
        index, unit = self.axes.letters.index(letter), self.axes.unit(letter)
        factor = unit or 1.0
        scale, shift = self.transform.scale[index], self.transform.translation[index]
        return scale * factor, shift * factor, unit is not None


def slide_file(path: Folder) -> SlideFile:
    """Return the path, size and modification time of a file.

    Raises
    ------
    SlideError
        If it can't be found.
    """
    if isinstance(path, KeyFolder):
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
    at: Mapping[str, int] = tiff.DEFAULT_PLANE,
) -> ZarrImage:
    """Describe a group's multiscale image.

    Parameters
    ----------
    node : Node
        The group.
    problems : list of str
        Receives a message for each problem.
    start : int
        Offset of the first tile.
    labelled : ZarrImage, optional
        The image that the group labels, if it is a label image; the same plane is shown.
    at : Mapping of str to int, optional
        The plane along "z" and "t"; by default, the plane in the rendering settings.

    Raises
    ------
    SlideError
        If it is not an image, or can't be shown.
    """
    multiscale = _multiscale(node, problems)
    arrays = _arrays(node, multiscale, problems)
    shape = arrays[0][2].shape
    axes = ngff.axes(ngff.axes_of(multiscale), len(shape), problems)
    if axes is None:
        raise UnsupportedSlideError(
            f"'{node.folder}' holds arrays of {len(shape)} dimensions without usable axes; "
            "save it as OME-Zarr with axes."
        )
    if labelled is None:
        problems += _unselectable(axes, shape)
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
    found: list[tuple[LevelLayout, Transform | None, Node, Array]] = []
    for dataset, array_node, array in arrays:
        try:
            planes = _scaled(position, shape, array.shape)
            level = _level(array_node.folder, array, axes.letters, planes, photometric)
            _check_smaller(level, [item[0] for item in found], array_node.folder)
            _check_tile_count([*(item[0] for item in found), level], array_node.folder)
        except SlideError as error:
            if not found:
                raise
            problems.append(f"A level is left out. {error}")
            continue
        shared = (step for step in _steps(multiscale) if not ngff.has_output(step))
        steps = [*_steps(dataset), *shared]
        wrong: list[str] = []
        transform = ngff.transform(steps, axes, wrong) if steps else None
        problems += [problem for problem in wrong if problem not in problems]
        if transform is None and steps:
            problems.append(f"The scale of the level {array_node.folder.name!r} is invalid.")
        level = replace(level, categorical=labelled is not None)
        found.append((level, transform, array_node, array))
    problems += _misplaced(found, axes)
    ignored = sum(map(ngff.has_output, _steps(multiscale)))
    if ignored:
        problems.append(f"Transformations to {ignored} more coordinate system(s) are ignored.")
    unknown = [letter for letter in "xy" if axes.unit(letter) is None]
    if unknown and _is_scaled(found[0][1], axes):
        problems.append(unknown_length(axes.stated_unit(unknown[0])))
    planes_along = {
        letter: (index, length)
        for letter, index, length in zip(axes.letters, position, shape, strict=True)
        if letter not in SHOWN
    }
    count = math.prod(length for _, length in planes_along.values())
    return ZarrImage(
        axes=axes,
        transform=found[0][1],
        levels=_with_offsets(_with_reductions(found, axes, problems), start),
        channels=channels,
        files=tuple(slide_file(path) for item in found for path in item[2].documents),
        other_planes=count - 1,
        background=_background(found[0][3]),
        planes=planes_along,
        is_boolean=found[0][3].dtype.kind == "b",
    )


def _multiscale(node: Node, problems: list[str]) -> Metadata:
    """Return the metadata of a group's first multiscale image."""
    stated = node.ome.get("multiscales")
    if not isinstance(stated, list) or not stated or not isinstance(stated[0], dict):
        raise _refusal(node)
    if len(stated) > 1:
        problems.append(f"{len(stated) - 1} more multiscale image(s) are not shown.")
    version = (node.ome if "ome" in node.attributes else stated[0]).get("version")
    if version is not None and str(version)[:3] not in VERSIONS:
        problems.append(
            f"The OME-Zarr version {str(version)[:20]!r} is unknown; the image is read as if its "
            "version were known."
        )
    return stated[0]


def _refusal(node: Node) -> SlideError:
    """Return the error for a group that is not an image; it names the folder to open instead."""
    folder, ome = node.folder, node.ome
    if "plate" in ome or "well" in ome:
        kind = "plate" if "plate" in ome else "well"
        inner = _image_of_plate(node) if kind == "plate" else _image_of_well(node)
        is_plain = inner is not None and PLAIN_PATH.fullmatch(inner)  # not a patient's name
        example = f", for example '{folder.name}/{inner}'" if is_plain else ""
        return UnsupportedSlideError(
            f"'{folder}' is a {kind} with many images; open the folder of one of them{example}."
        )
    if isinstance(ome.get("labels"), list):
        return NotASlideError(
            f"'{folder}' is a list of label images; open the image's folder, one level up."
        )
    return NotASlideError(
        f"'{folder}' is a Zarr group without multiscale images; open the folder of an OME-Zarr "
        "image, or of an array."
    )


def _image_of_plate(node: Node) -> str | None:
    """Return the path of the first existing image of a plate."""
    for path in _paths(node.ome.get("plate"), "wells"):
        try:
            inner = _image_of_well(child(node, path))
        except SlideError:
            continue
        if inner is not None:
            return f"{path}/{inner}"
    return None


def _image_of_well(node: Node) -> str | None:
    """Return the path of the first existing image of a well."""
    for path in _paths(node.ome.get("well"), "images"):
        with suppress(SlideError):
            child(node, path)
            return path
    return None


def _paths(metadata: object, name: str) -> list[str]:
    """Return the paths of the items in a list of this name; empty if there is no such list."""
    items = metadata.get(name) if isinstance(metadata, dict) else None
    found = items[: limits.levels] if isinstance(items, list) else []
    paths = [item.get("path") for item in found if isinstance(item, dict)]
    return [path for path in paths if isinstance(path, str)]


def _arrays(
    node: Node, multiscale: Metadata, problems: list[str]
) -> list[tuple[Metadata, Node, Array]]:
    """Return the dataset, node and array of each level of a multiscale image, largest first."""
    datasets = multiscale.get("datasets")
    stated = datasets if isinstance(datasets, list) else []
    if len(stated) > limits.levels:
        problems.append(f"Only {limits.levels} of {len(stated)} levels are read.")
    found: list[tuple[Metadata, Node, Array]] = []
    errors: list[SlideError] = []
    for item in stated[: limits.levels]:
        dataset = item if isinstance(item, dict) else {}
        try:
            array_node = child(node, dataset.get("path"))
            if not array_node.is_array:
                raise CorruptSlideError(f"'{array_node.folder}' is not an array.")
            found.append((dataset, array_node, open_array(array_node.folder)))
        except SlideError as error:
            errors.append(error)
    if not found:
        if errors:
            raise errors[0]
        raise CorruptSlideError(f"'{node.folder}' lists no levels; get a fresh copy of it.")
    problems += [f"A level is left out. {error}" for error in errors]
    return sorted(found, key=lambda item: -math.prod(item[2].shape))


def child(node: Node, name: object) -> Node:
    """Return the node at a path within a group, where the path comes from the metadata.

    Raises
    ------
    CorruptSlideError
        If it doesn't exist, or the path leads out of the group.
    """
    text = name if isinstance(name, str) else ""
    parts = re.split(r"[/\\]", text)
    is_absolute = text.startswith(("/", "\\")) or PureWindowsPath(text).drive
    if not text or len(text) > LONGEST_PATH or "\0" in text or ".." in parts or is_absolute:
        raise CorruptSlideError(
            f"'{node.folder}' refers to {str(name)[:80]!r}, which is not a path within it; get a "
            "fresh copy of it."
        )
    found = read_node(node.folder / text)
    if found is None:
        raise CorruptSlideError(
            f"'{node.folder}' lacks {text[:80]!r}, which its metadata lists; get a fresh "
            "copy of it."
        )
    return found


def _unselectable(axes: Axes, shape: Sequence[int]) -> Iterator[str]:
    """Yield a problem for each axis along which only the first plane can be shown."""
    for letter, name, length in zip(axes.letters, axes.names, shape, strict=True):
        if letter == ngff.OTHER and length > 1:
            yield (
                f"{length - 1} of {length} planes along the axis {name!r} can't be selected; only "
                "the first one is shown."
            )


def _scaled(position: Sequence[int], base: Sequence[int], shape: Sequence[int]) -> list[int]:
    """Convert the finest level's index along each axis to the index in a level of another shape."""
    if len(shape) != len(base):
        return [0] * len(shape)
    return [
        at * length // max(1, whole)
        for at, whole, length in zip(position, base, shape, strict=True)
    ]


def _is_scaled(transform: Transform | None, axes: Axes) -> bool:
    """Whether the stated pixel size along x or y differs from 1."""
    indices = map(axes.letters.index, "xy")
    return transform is not None and any(transform.scale[index] != 1 for index in indices)


def _steps(metadata: Metadata) -> list[object]:
    stated = metadata.get("coordinateTransformations")
    return stated if isinstance(stated, list) else []


# Levels


def _level(
    folder: Folder, array: Array, letters: str, position: Sequence[int], photometric: int
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
            f"'{folder}' has samples of type {dtype.name}, which can't be shown; "
            "save it with integer or floating-point samples."
        )
    sizes = dict(zip(letters, shape, strict=True))
    width, height, count = sizes["x"], sizes["y"], sizes.get("c", 1)
    if min(*shape, *chunks) < 1:
        raise CorruptSlideError(f"'{folder}' holds no pixels; get a fresh copy of it.")
    if max(*shape, *chunks) >= tiff.LARGEST_SIDE:
        raise UnsupportedSlideError(
            f"'{folder}' claims a shape of {_shape_text(shape)} in chunks of "
            f"{_shape_text(chunks)}, more than a slide can have; get a fresh copy of it."
        )
    if math.prod(chunks) * dtype.itemsize > limits.tile_bytes:
        raise UnsupportedSlideError(
            f"'{folder}' has chunks of {_shape_text(chunks)}, too large to decode: "
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
    name = "uint8" if dtype.kind == "b" else dtype.name
    level = LevelLayout(
        width,
        height,
        count,
        plain_encoding(COMPRESSION.NONE, count, name, photometric=photometric),
        TileGrid(tile_height, tile_width, offsets, np.broadcast_to(np.int64(size), offsets.shape)),
        array=ZarrArray(str(folder), letters, tuple(shown), channels_apart=chunk.get("c") == 1),
    )
    tiff.check_tile_size(level, str(folder))
    return level


def _check_tile_count(levels: Sequence[LevelLayout], folder: Folder) -> None:
    """Refuse a level if all levels together have more tiles than the limits allow."""
    tiles = sum(level.grid.rows * level.grid.columns for level in levels)
    if tiles > limits.tiles:
        raise _too_many(folder, tiles)


def _too_many(folder: Folder, tiles: int) -> UnsupportedSlideError:
    return UnsupportedSlideError(
        f"'{folder}' claims {tiles} tiles, more than any slide has: {limits.advice('tiles')}."
    )


def _shape_text(lengths: Sequence[int]) -> str:
    return " x ".join(str(length)[:20] for length in lengths[:8])


def _grown(side: int, extent: int, most: int) -> int:
    """Return the side of a tile: the side of a chunk, or a multiple of it if chunks are small."""
    times = max(1, min(math.ceil(SMALLEST_TILE / side), most // side))
    return min(side * times, extent)


def _check_smaller(level: LevelLayout, finer: Sequence[LevelLayout], folder: Folder) -> None:
    """Refuse an array that is not a smaller version of the finer levels."""
    if not finer:
        return
    base, last = finer[0], finer[-1]
    difference = abs(level.width * base.height - level.height * base.width)
    smaller = level.width * level.height < last.width * last.height
    same = smaller and difference <= 4 * max(base.width, base.height)
    if not same or (level.channels, level.dtype) != (base.channels, base.dtype):
        raise CorruptSlideError(
            f"'{folder}' is not a smaller version of the finest level, or has other channels or "
            "another sample type."
        )


def _with_reductions(
    found: Sequence[tuple[LevelLayout, Transform | None, Node, Array]],
    axes: Axes,
    problems: list[str],
) -> list[LevelLayout]:
    """Return the levels with their stated downsamples, unless one is missing or contradictory."""
    levels = [item[0] for item in found]
    transforms = [item[1] for item in found]
    base = levels[0]
    reduced = []
    for level, transform in zip(levels, transforms, strict=True):
        if transform is None or transforms[0] is None:
            return levels
        indices = map(axes.letters.index, "xy")
        x, y = (transform.scale[index] / transforms[0].scale[index] for index in indices)
        if abs(base.width / x - level.width) > 2 or abs(base.height / y - level.height) > 2:
            problems.append(
                f"The scale of the level of {level.width} x {level.height} pixels contradicts "
                "its size; the size is used."
            )
            return levels
        reduced.append(replace(level, reduction=(x + y) / 2))
    return reduced


def _misplaced(
    found: Sequence[tuple[LevelLayout, Transform | None, Node, Array]], axes: Axes
) -> Iterator[str]:
    """Yield a problem for each level whose position contradicts that of the finest level."""
    first = found[0][1]
    for level, transform, _, _ in found[1:]:
        if first is None or transform is None:
            continue
        # Positions refer to the center of a pixel or to its corner, depending on the writer.
        if any(
            abs(transform.translation[index] - first.translation[index]) > transform.scale[index]
            for index in map(axes.letters.index, "xy")
        ):
            yield (
                f"The position of the level of {level.width} x {level.height} pixels contradicts "
                "that of the finest level, with which it is aligned."
            )


def _with_offsets(levels: Sequence[LevelLayout], start: int) -> tuple[LevelLayout, ...]:
    """Shift the offsets of each level so that they follow the previous level's."""
    found = []
    for level in levels:
        grid = replace(level.grid, offsets=level.grid.offsets + start)
        found.append(replace(level, grid=grid))
        start += level.grid.rows * level.grid.columns * level.tile_bytes
    return tuple(found)


def _background(array: Array) -> float:
    """Return an array's fill value; 0 if it is missing or not a finite number."""
    value = np.asarray(0 if array.fill_value is None else array.fill_value)
    if value.ndim or value.dtype.kind not in "iufb" or not np.isfinite(value):
        return 0
    number: float = value.item()
    return int(number) if value.dtype.kind != "f" else number


# Bare arrays


def bare_image(node: Node) -> ZarrImage:
    """Describe an array without OME-Zarr metadata, from its shape alone."""
    array = open_array(node.folder)
    channels = array.shape[2] if len(array.shape) == 3 else 1
    if len(array.shape) not in (2, 3) or channels > 4:
        raise NotASlideError(
            f"'{node.folder}' is a Zarr array of {_shape_text(array.shape)} without axes; "
            "open the folder of the OME-Zarr image that it belongs to."
        )
    axes = ngff.Axes.of("yxc"[: len(array.shape)])
    rgb = channels > 2 and array.dtype.name in ("uint8", "uint16")
    photometric = PHOTOMETRIC.RGB if rgb else PHOTOMETRIC.MINISBLACK
    level = _level(node.folder, array, axes.letters, (0,) * len(array.shape), photometric)
    is_boolean = array.dtype.kind == "b"
    return ZarrImage(axes, None, (level,), (), (), 0, _background(array), {}, is_boolean)
