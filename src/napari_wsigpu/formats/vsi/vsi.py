"""Olympus VSI: a .vsi file of tags, and tiles in .ets files in a folder next to it."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from datetime import UTC, datetime
from itertools import accumulate
from typing import IO, TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.formats.fields import LONGEST_TEXT, even_step, positive_number
from napari_wsigpu.formats.pictures import read_encoding
from napari_wsigpu.formats.tiff import tiff
from napari_wsigpu.formats.vsi.ets import Ets, read_ets
from napari_wsigpu.formats.vsi.vsi_tags import FIRST, MAGIC, Node, read_tags
from napari_wsigpu.model.errors import (
    CorruptSlideError,
    PlaneError,
    SlideError,
    UnsupportedSlideError,
)
from napari_wsigpu.model.layout import (
    AssociatedLayout,
    Channel,
    LevelLayout,
    Part,
    Planes,
    SlideFile,
    SlideLayout,
    TileGrid,
)
from napari_wsigpu.storage.bounded import BoundedReader

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from napari_wsigpu.formats.fields import Metadata
    from napari_wsigpu.formats.vsi.vsi_tags import Value

COLLECTION, IMAGE, FRAME, FILE, STACK = 2000, 2001, 2002, 2018, 2005
EXTERNAL, BOUNDARY, ORIGIN, OTHER_FILE = 20005, 2053, 2410, 2037
DIMENSION, PARAMETERS, MEANING, CHANNEL_NAME, COLOR = 2007, 2008, 2023, 2419, 2008
SCALE, UNIT, MICROMETERS = 2019, 2020, "10^-6m^1"
MAGNIFICATION, OBJECTIVE, STACK_KIND, STACK_NAME, CREATED = 120060, 120063, 2074, 2030, 2015
DOCUMENT = 2
DOCUMENT_TAGS = {
    11: "Document name", 12: "Document file path", 13: "Document note", 15: "Document author",
    16: "Document company", 34: "Product name", 35: "Product version",
}  # fmt: skip
Z, T, C = 1, 2, 4
AXES = {"z": Z, "t": T}
Z_STEP, FRAME_VALUES, ACQUIRED = 2013, 2006, 2017
VALUE, VALUE_UNIT = 268435458, 268435456
OVERVIEWS = {1, 256}
LARGEST_VSI = 256 << 20
MOST_LEVELS, LARGEST_MACRO = 32, 1 << 24


def probe(path: Path, head: bytes) -> bool:
    """Whether a path is a .vsi file whose tiles are in other files."""
    if not is_vsi(head):
        return False
    with BoundedReader(path.open("rb", buffering=0)) as file:
        return has_external_tiles(file)


def is_vsi(head: bytes) -> bool:
    """Whether a file that starts with these bytes is a .vsi file."""
    return head.startswith(b"II*\0") and head.startswith(MAGIC, FIRST)


def has_external_tiles(file: IO[bytes]) -> bool:
    """Whether the tiles of a .vsi file are in other files."""
    root = read_tags(file.read(LARGEST_VSI))
    return any(_is_external(image) for image in _images(root))


def parse(path: Path, at: Mapping[str, int] = tiff.DEFAULT_PLANE) -> SlideLayout:
    """Describe an Olympus slide at the plane `at` "z" and "t"; middle z and first t by default."""
    try:
        return _parse(path, at)
    except SlideError:
        raise
    except ValueError as error:
        raise CorruptSlideError(
            f"The Olympus slide '{path}' can't be read: {error}; get a fresh copy of it."
        ) from error


class _Image(NamedTuple):
    """An image: its file and the file's contents, and its tags and size in pixels."""

    path: Path
    ets: Ets
    tags: Node
    width: int
    height: int

    @property
    def is_overview(self) -> bool:
        """Whether it is an overview of the slide instead of a scan."""
        return self.tags.value_of(STACK, STACK_KIND) in OVERVIEWS


def _parse(path: Path, at: Mapping[str, int]) -> SlideLayout:
    folder = path.parent / f"_{path.stem}_"
    paths = folder.glob("stack*/frame_*.ets")  # blob_*.ets of later scanners hold no pictures
    found = sorted((each for each in paths if each.is_file()), key=_stack_key)  # a pipe would block
    in_tiffs = sum(1 for _ in folder.glob("stack*/*.tif*"))
    if in_tiffs and not found:
        raise UnsupportedSlideError(
            f"'{path}' is an Olympus slide whose pixels are in TIFF files, which can't be read "
            f"through it; open a TIFF file in the subfolders of '{folder.name}' instead."
        )
    if not found:
        raise CorruptSlideError(
            f"'{path}' is an Olympus slide whose folder '{folder.name}' with its .ets files is "
            "missing; copy that folder next to the file."
        )
    problems: list[str] = []
    if in_tiffs:
        problems.append(
            f"{in_tiffs} TIFF file(s) of the slide are not read, perhaps its largest images; open "
            f"them in the subfolders of '{folder.name}'."
        )
    with BoundedReader(path.open("rb", buffering=0)) as file:
        root = read_tags(file.read(LARGEST_VSI))
    images = _read_images(found, root, problems)
    scans = [image for image in images if not image.is_overview] or images
    shown = max(scans, key=lambda image: image.width * image.height)
    if len(scans) > 1:
        problems.append(
            f"{len(scans) - 1} more image(s) of the slide are not shown; the largest has "
            f"{_size_of_largest_other(scans, shown)} pixels."
        )
    overviews = [image for image in images if image.is_overview and image is not shown]
    used = [shown, *overviews[:1]]
    files = [SlideFile.of(str(each.path), each.path.stat()) for each in used]
    files.append(SlideFile.of(str(path), path.stat()))
    starts = [0, *accumulate(file.size for file in files)]
    tiles, positions, others = _tiles_of(shown, at)
    levels = _levels(shown, tiles, starts[0], path, problems)
    tiff.check_tiles_present(levels, str(path), starts[-1])
    stack = shown.tags.first(STACK)
    stack = Node(STACK) if stack is None else stack
    rgb = levels[0].encoding.samples == 3
    document = root.first(DOCUMENT)
    return SlideLayout(
        path=str(path),
        files=tuple(files),
        vendor="olympus",
        levels=tuple(levels),
        associated=_macro(overviews, starts[1], path, problems),
        rgb=rgb,
        channels=() if rgb else _channels(shown.tags, len(tiles)),
        background=tiff.background(levels[0]),
        mpp=_mpp(stack, problems),
        objective=_objective(stack),
        metadata={"olympus": _metadata(document, stack)},
        other_planes=others,
        planes=Planes.along(
            positions, _z_step(shown.tags), _time_step(shown, positions.get("t", (0, 1))[1])
        ),
        scan_date=_date(stack.value_of(CREATED)),
        problems=tuple(problems),
    )


def _stack_key(path: Path) -> tuple[int, str]:
    number = re.search(r"\d+", path.parent.name)
    return int(number.group()[:9]) if number else 0, path.name


def _size_of_largest_other(scans: Sequence[_Image], shown: _Image) -> str:
    rest = [(each.width * each.height, each) for each in scans if each is not shown]
    each = max(rest, key=lambda item: item[0])[1]
    return f"{each.width} x {each.height}"


def _images(root: Node) -> list[Node]:
    collection = root.first(COLLECTION)
    return [] if collection is None else list(collection.all(IMAGE))


def _is_external(image: Node) -> bool:
    return any(frame.value_of(FILE, EXTERNAL) == 1 for frame in image.all(FRAME))


def _size(image: Node) -> tuple[int, int]:
    """Return the width and height of an image from its frames' tags; (0, 0) if unknown."""
    for frame in image.all(FRAME):
        box = _integers(frame.value_of(FILE, BOUNDARY))
        if len(box) == 4 and min(box[2:]) > 0:
            return box[2], box[3]
    return 0, 0


def _origin(image: Node) -> tuple[int, int]:
    """Return the corner of the tile at column 0 and row 0, (x, y) in pixels of level 0."""
    for frame in image.all(FRAME):
        for layout in (FILE, OTHER_FILE):
            origin = _integers(frame.value_of(layout, ORIGIN))
            if len(origin) >= 2:
                return origin[0], origin[1]
    return 0, 0


def _integers(value: Value) -> tuple[int, ...]:
    """Return a tuple of numbers as integers; an empty one if any can't be a pixel position."""
    numbers = value if isinstance(value, tuple) else ()
    # NaN fails the comparison too.
    return tuple(map(int, numbers)) if all(abs(n) < tiff.LARGEST_SIDE for n in numbers) else ()


def _read_images(paths: Sequence[Path], root: Node, problems: list[str]) -> list[_Image]:
    """Read the .ets files, and match each with the tags of its image."""
    images = [image for image in _images(root) if _is_external(image)]
    found: list[_Image] = []
    reasons: list[str] = []
    for path in paths:
        try:
            ets = read_ets(path)
            base = ets.coordinates[ets.levels == 0]
            if not len(base) or base[:, 2:].min(initial=0) < 0:
                raise ValueError(f"'{path.name}' has no tiles at full resolution")
        except (ValueError, SlideError) as error:
            reasons.append(f"{path.parent.name}: {error}")
            continue
        image = _image_of(path, ets, images)
        if image is None:
            problems.append(
                f"No tags match the image in {path.parent.name}; its size is taken from the .ets "
                "file."
            )
            found.append(_Image(path, ets, Node(IMAGE), *(ets.size or _extent(ets))))
        else:
            images.remove(image)
            found.append(_Image(path, ets, image, *_size(image)))
    if reasons:
        if not found:
            raise ValueError(reasons[0].rstrip("."))
        problems.append(f"{len(reasons)} image(s) can't be read: {reasons[0].rstrip('.')}.")
    return found


def _extent(ets: Ets) -> tuple[int, int]:
    """Return the (width, height) that the tiles at full resolution cover, in pixels."""
    last = ets.coordinates[ets.levels == 0][:, :2].max(axis=0) + 1
    return int(last[0]) * ets.tile_width, int(last[1]) * ets.tile_height


def _image_of(path: Path, ets: Ets, images: Sequence[Node]) -> Node | None:
    """Return the tags of the image in a file, found by its number or else by its size."""

    def fits(image: Node, *, sparse: bool) -> bool:
        size = _size(image)
        if ets.size is not None:
            return size == ets.size
        ends = zip(_extent(ets), _origin(image), (ets.tile_width, ets.tile_height), strict=True)
        return all(
            end + first - tile < side and (sparse or side <= end + first)
            for (end, first, tile), side in zip(ends, size, strict=True)
        )

    number = _stack_key(path)[0]
    named = (image for image in images if image.number == number and fits(image, sparse=True))
    return next(named, None) or next((each for each in images if fits(each, sparse=False)), None)


def _dimensions(image: Node) -> dict[int, int]:
    """Map each dimension (`Z`, `T`, `C` and others) to its column in `Ets.coordinates`."""
    found: dict[int, int] = {}
    for dimension in image.all(DIMENSION):
        for parameters in dimension.all(PARAMETERS):
            meaning = parameters.value_of(MEANING)
            if isinstance(meaning, int) and dimension.number is not None:
                found.setdefault(meaning, dimension.number + 2)
    return found


def _tiles_of(
    image: _Image, at: Mapping[str, int]
) -> tuple[list[NDArray[np.bool_]], dict[str, tuple[int, int]], int]:
    """Select the tiles of one plane.

    By default, it is the middle one along z and the first one along other dimensions.

    Returns
    -------
    masks : list of ndarray of bool, shape (tiles,)
        The plane's tiles, for each channel.
    positions : dict of str to (int, int)
        Index of the plane and number of planes along "z" and "t".
    other_planes : int
        Number of other planes.
    """
    ets = image.ets
    columns = _dimensions(image.tags)
    count = ets.coordinates.shape[1]
    channel = columns.get(C, count)
    others = [column for column in range(2, count) if column != channel]
    other_planes = len(np.unique(ets.coordinates[:, others], axis=0)) - 1
    axes = {columns[meaning]: axis for axis, meaning in AXES.items() if meaning in columns}
    held = {column: np.unique(ets.coordinates[:, column]) for column in others}
    shown = {
        column: at.get(axes.get(column, ""), len(values) // 2 if axes.get(column) == "z" else 0)
        for column, values in held.items()
    }

    def chosen_tiles() -> NDArray[np.bool_]:
        chosen = np.ones(len(ets.levels), np.bool_)
        for column, values in held.items():
            chosen &= ets.coordinates[:, column] == values[shown[column]]
        return chosen

    chosen = chosen_tiles()
    if not chosen.any() and not at:  # no tiles: take the first tile's plane
        first = ets.coordinates[0]
        shown = {column: values.tolist().index(first[column]) for column, values in held.items()}
        chosen = chosen_tiles()
    positions = {
        axis: (shown[column], len(held[column])) for column, axis in axes.items() if column in held
    }
    if not chosen.any():
        plane = ", ".join(f"{axis} = {number}" for axis, (number, _) in positions.items())
        raise PlaneError(f"'{image.path.name}' has no tiles at {plane}; choose another plane.")
    if channel >= count:
        return [chosen], positions, other_planes
    numbers = np.unique(ets.coordinates[:, channel])[: 1 if ets.samples > 1 else None]
    masks = [chosen & (ets.coordinates[:, channel] == number) for number in numbers]
    return masks, positions, other_planes


def _levels(
    image: _Image, planes: Sequence[NDArray[np.bool_]], start: int, path: Path, problems: list[str]
) -> list[LevelLayout]:
    """Describe the levels, each half as large as the one before, rounded down.

    `planes` are the masks of `_tiles_of`; `start` is the offset of the file in the slide's bytes.
    """
    ets = image.ets
    with image.path.open("rb") as file:
        tile_encoding = read_encoding(
            file, int(ets.offsets[0]), ets.compression, ets.samples, ets.dtype
        )
    tile_encoding = replace(
        tile_encoding, jpeg_tables=(None,) * len(planes), blue_first=ets.blue_first
    )
    origin = _origin(image.tags)
    levels: list[LevelLayout] = []
    outside = 0
    for number in range(min(int(ets.levels.max()) + 1, MOST_LEVELS)):
        width, height = image.width >> number, image.height >> number
        origin_x, origin_y = (_halved(at, number) for at in origin)
        # The first column and row of tiles within the image, and their position.
        first_x, first_y = -origin_x // ets.tile_width, -origin_y // ets.tile_height
        left, top = origin_x + first_x * ets.tile_width, origin_y + first_y * ets.tile_height
        rows = -(-(height - top) // ets.tile_height)
        columns = -(-(width - left) // ets.tile_width)
        if not min(width, height) or rows * columns > 1 << 24:
            break
        offsets = np.full((len(planes), rows, columns), 0, np.int64)
        counts = np.zeros_like(offsets)
        for plane, members in enumerate(planes):
            here = np.flatnonzero(members & (ets.levels == number))
            x, y = ets.coordinates[here, 0] - first_x, ets.coordinates[here, 1] - first_y
            inside = (x >= 0) & (x < columns) & (y >= 0) & (y < rows)
            outside += int(np.count_nonzero(~inside))
            here, where = here[inside], (plane, y[inside], x[inside])
            offsets[where] = ets.offsets[here] + start
            counts[where] = ets.byte_counts[here]
        if not counts.any():
            break
        grid = TileGrid(ets.tile_height, ets.tile_width, offsets, counts)
        scale, channels = float(1 << number), tile_encoding.samples * len(planes)
        if left or top:
            size = columns * ets.tile_width, rows * ets.tile_height
            tiles = LevelLayout(*size, channels, tile_encoding, grid)
            level = LevelLayout.mosaic(width, height, [Part.at(left, top, tiles)], scale)
        else:
            level = LevelLayout(width, height, channels, tile_encoding, grid, reduction=scale)
        tiff.check_tile_size(level, str(path))
        levels.append(level)
    if not levels:
        raise ValueError("its largest image has no tiles")
    if outside:
        problems.append(f"{outside} tiles lie outside the image and are left out.")
    if ets.lost:
        problems.append(
            f"{ets.lost} of {len(ets.levels)} tiles of '{image.path.name}' are missing or cut "
            "off; get a fresh copy of the slide."
        )
    return levels


def _halved(position: int, times: int) -> int:
    """Divide a position by 2 ** `times`, rounded to the nearest pixel, halves toward 0."""
    found = (2 * abs(position) + (1 << times) - 1) >> (times + 1)
    return found if position > 0 else -found


def _macro(
    overviews: Sequence[_Image], start: int, path: Path, problems: list[str]
) -> tuple[AssociatedLayout, ...]:
    """Describe the overview's finest level of at most `LARGEST_MACRO` pixels, else its last one."""
    if not overviews:
        return ()
    try:
        tiles = _tiles_of(overviews[0], tiff.DEFAULT_PLANE)[0][:1]
        levels = _levels(overviews[0], tiles, start, path, problems)
    except (ValueError, SlideError) as error:
        problems.append(f"The macro image is left out: {str(error).rstrip('.')}.")
        return ()
    small = (level for level in levels if level.width * level.height <= LARGEST_MACRO)
    return (AssociatedLayout("macro", next(small, levels[-1])),)


# Metadata


def _channels(image: Node, count: int) -> tuple[Channel, ...]:
    column = _dimensions(image).get(C)
    named: dict[int, Channel] = {}
    for dimension in image.all(DIMENSION):
        if column is None or dimension.number != column - 2:
            continue
        for channel in dimension.all(PARAMETERS):
            name, color = channel.value_of(CHANNEL_NAME), channel.value_of(COLOR)
            shade = None
            if isinstance(color, tuple) and len(color) == 3:
                shade = "#" + "".join(f"{int(value) & 0xFF:02x}" for value in color)
            if isinstance(name, str) and name and channel.number is not None:
                named[channel.number] = Channel(name[:LONGEST_TEXT], shade)
    return tuple(named.get(number, Channel(f"channel {number}")) for number in range(count))


def _mpp(stack: Node, problems: list[str]) -> tuple[float, float] | None:
    scale, unit = stack.value_of(SCALE), stack.value_of(UNIT)
    if not isinstance(scale, tuple) or len(scale) != 2:
        return None
    if unit not in (None, MICROMETERS):
        problems.append("The pixel size is not in micrometers and is ignored.")
        return None
    x, y = (positive_number(value) for value in scale)
    return (x, y) if x and y else None


def _z_step(image: Node) -> float | None:
    """Return the micrometers from one z plane to the next; the stored step may be negative."""
    for dimension in image.all(DIMENSION):
        for parameters in dimension.all(PARAMETERS):
            if parameters.value_of(MEANING) == Z:
                step = _quantity(parameters.first(Z_STEP), "m")
                return None if step is None else positive_number(f"{abs(step) * 1e6:.12g}")
    return None


def _time_step(image: _Image, count: int) -> float | None:
    """Return the seconds from one plane along t to the next, from the frames' acquisition times."""
    column = _dimensions(image.tags).get(T)
    if column is None:
        return None
    # Frames are numbered with the dimensions before t varying faster.
    before = range(2, min(column, image.ets.coordinates.shape[1]))
    stride = math.prod(len(np.unique(image.ets.coordinates[:, other])) for other in before)
    times = {
        frame.number: _quantity(frame.first(FRAME_VALUES, ACQUIRED), "s")
        for frame in image.tags.all(FRAME)
    }
    found = [times.get(number * stride) for number in range(count)]
    known = [time for time in found if time is not None]
    return even_step(known) if len(known) == count else None


def _quantity(node: Node | None, unit: str) -> float | None:
    """Return a value in meters or seconds, as specified by `unit`; None if it has another unit."""
    value = None if node is None else node.value_of(VALUE)
    stated = re.fullmatch(r"10\^(-?\d{1,2})([ms])\^1", str(node and node.value_of(VALUE_UNIT)))
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return None if stated is None or stated[2] != unit else value * 10.0 ** int(stated[1])


def _objective(stack: Node) -> float | None:
    found = (positive_number(node.value) for node in stack.anywhere(MAGNIFICATION))
    return next((value for value in found if value), None)


def _metadata(document: Node | None, stack: Node) -> Metadata:
    document = Node(DOCUMENT) if document is None else document
    found = {name: document.value_of(tag) for tag, name in DOCUMENT_TAGS.items()}
    found["Stack name"] = stack.value_of(STACK_NAME)
    lenses = (node.value for node in stack.anywhere(OBJECTIVE))
    found["Objective name"] = next((name for name in lenses if name), None)
    return {
        name: value[:LONGEST_TEXT] if isinstance(value, str) else value
        for name, value in found.items()
        if value
    }


def _date(seconds: object) -> str | None:
    if not isinstance(seconds, int) or not 0 < seconds < 1 << 33:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat()
