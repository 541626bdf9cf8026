"""Olympus VSI: a file of tags, and tiles in .ets files of a folder beside it."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from datetime import UTC, datetime
from itertools import accumulate
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np

from napari_wsigpu.formats.fields import LONGEST_TEXT, even_step, positive_number
from napari_wsigpu.formats.pictures import JPEG_HEAD, encoding, jpeg_color
from napari_wsigpu.formats.tiff import tiff
from napari_wsigpu.formats.vsi.ets import Ets, read_ets
from napari_wsigpu.formats.vsi.vsi_tags import FIRST, MAGIC, Node, read_tags
from napari_wsigpu.model.errors import CorruptSlideError, PlaneError, SlideError
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
from napari_wsigpu.model.tags import COMPRESSION
from napari_wsigpu.storage.bounded import BoundedReader

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from napari_wsigpu.model.layout import Encoding

COLLECTION, IMAGE, FRAME, FILE, STACK = 2000, 2001, 2002, 2018, 2005
EXTERNAL, BOUNDARY, ORIGIN, OTHER_FILE = 20005, 2053, 2410, 2037
DIMENSION, PARAMETERS, MEANING, CHANNEL_NAME, COLOR = 2007, 2008, 2023, 2419, 2008
SCALE, UNIT, MICROMETRES = 2019, 2020, "10^-6m^1"
MAGNIFICATION, OBJECTIVE, STACK_KIND, STACK_NAME, CREATED = 120060, 120063, 2074, 2030, 2015
DOCUMENT = 2
DOCUMENT_TAGS = {
    11: "Document name", 12: "Document file path", 13: "Document note", 15: "Document author",
    16: "Document company", 34: "Product name", 35: "Product version",
}  # fmt: skip
Z, T, C = 1, 2, 4
AXES = {"z": Z, "t": T}
Z_STEP, FRAME_VALUES, TAKEN = 2013, 2006, 2017
VALUE, VALUE_UNIT = 268435458, 268435456
OVERVIEWS = {1, 256}
LARGEST_VSI = 256 << 20
MOST_LEVELS, LARGEST_MACRO = 32, 1 << 24


def probe(path: Path, head: bytes) -> bool:
    """Whether a path is a .vsi file whose tiles are in files of their own."""
    if not begins(head):
        return False
    with BoundedReader(path.open("rb", buffering=0)) as file:
        return lies_elsewhere(file)


def begins(head: bytes) -> bool:
    """Whether a file begins as a .vsi file does."""
    return head.startswith(b"II*\0") and head.startswith(MAGIC, FIRST)


def lies_elsewhere(file: IO[bytes]) -> bool:
    """Whether the tiles of a .vsi file are in files of their own."""
    root = read_tags(file.read(LARGEST_VSI))
    return any(_is_external(image) for image in _images(root))


def parse(path: Path, at: Mapping[str, int] = tiff.MIDDLE) -> SlideLayout:
    """Describe an Olympus slide: the plane `at` "z" and "t", else the middle z, the first t."""
    try:
        return _parse(path, at)
    except SlideError:
        raise
    except ValueError as error:
        raise CorruptSlideError(
            f"The Olympus slide '{path}' can't be understood: {error}; get a fresh copy of it."
        ) from error


class _Picture(NamedTuple):
    """A picture: its file, what that holds, and what the tags say of it."""

    path: Path
    ets: Ets
    image: Node
    width: int
    height: int

    @property
    def is_overview(self) -> bool:
        """Whether it is no scan, but shows where the scans are."""
        return self.image.value_of(STACK, STACK_KIND) in OVERVIEWS


def _parse(path: Path, at: Mapping[str, int]) -> SlideLayout:
    folder = path.parent / f"_{path.stem}_"
    beside = folder.glob("stack*/*.ets")
    found = sorted((each for each in beside if each.is_file()), key=_stack)  # a pipe would wait
    if not found:
        raise CorruptSlideError(
            f"'{path}' is an Olympus slide whose folder '{folder.name}' with its .ets files is "
            "missing; put it beside the file."
        )
    problems: list[str] = []
    with BoundedReader(path.open("rb", buffering=0)) as file:
        root = read_tags(file.read(LARGEST_VSI))
    pictures = _pictures(found, root, problems)
    scans = [picture for picture in pictures if not picture.is_overview] or pictures
    shown = max(scans, key=lambda picture: picture.width * picture.height)
    if len(scans) > 1:
        problems.append(
            f"{len(scans) - 1} further picture(s) of the slide are not shown, of at most "
            f"{_second(scans, shown)} pixels."
        )
    overviews = [picture for picture in pictures if picture.is_overview and picture is not shown]
    used = [shown, *overviews[:1]]
    files = [SlideFile.of(str(each.path), each.path.stat()) for each in used]
    files.append(SlideFile.of(str(path), path.stat()))
    starts = [0, *accumulate(file.size for file in files)]
    tiles, positions, hidden = _tiles_of(shown, at)
    levels = _levels(shown, tiles, starts[0], path, problems)
    tiff.check_tiles_present(levels, str(path), starts[-1])
    stack = shown.image.first(STACK)
    stack = Node(STACK) if stack is None else stack
    rgb = levels[0].encoding.samples == 3
    document = root.first(DOCUMENT)
    return SlideLayout(
        path=str(path),
        file_size=starts[-1],
        modified_ns=max(file.modified_ns for file in files),
        files=tuple(files),
        vendor="olympus",
        levels=tuple(levels),
        associated=_macro(overviews[:1], starts[1], path, problems),
        rgb=rgb,
        channels=() if rgb else _channels(shown.image, len(tiles)),
        background=tiff.background(levels[0]),
        mpp=_mpp(stack, problems),
        objective=_objective(stack),
        metadata={"olympus": _metadata(document, stack)},
        hidden_planes=hidden,
        planes=Planes.along(
            positions,
            _z_step(shown.image),
            _time_step(shown, positions.get("t", (0, 1))[1]),
        ),
        scan_date=_date(stack.value_of(CREATED)),
        problems=tuple(problems),
    )


def _stack(path: Path) -> tuple[int, str]:
    number = re.search(r"\d+", path.parent.name)
    return int(number.group()[:9]) if number else 0, path.name


def _second(scans: Sequence[_Picture], shown: _Picture) -> str:
    rest = [(each.width * each.height, each) for each in scans if each is not shown]
    each = max(rest, key=lambda item: item[0])[1]
    return f"{each.width} x {each.height}"


def _images(root: Node) -> list[Node]:
    collection = root.first(COLLECTION)
    return [] if collection is None else list(collection.all(IMAGE))


def _is_external(image: Node) -> bool:
    return any(frame.value_of(FILE, EXTERNAL) == 1 for frame in image.all(FRAME))


def _size(image: Node) -> tuple[int, int]:
    """Return width and height of an image, as its first frame says."""
    for frame in image.all(FRAME):
        box = frame.value_of(FILE, BOUNDARY)
        if isinstance(box, tuple) and len(box) == 4 and min(box[2:]) > 0:
            return box[2], box[3]
    return 0, 0


def _origin(image: Node) -> tuple[int, int]:
    """Return where the tile of column and row 0 begins, (x, y) in pixels of level 0."""
    for frame in image.all(FRAME):
        for layout in (FILE, OTHER_FILE):
            origin = frame.value_of(layout, ORIGIN)
            if isinstance(origin, tuple) and len(origin) >= 2:
                return origin[0], origin[1]
    return 0, 0


def _pictures(paths: Sequence[Path], root: Node, problems: list[str]) -> list[_Picture]:
    """Tell which file holds which image, by the size of both."""
    images = [image for image in _images(root) if _is_external(image)]
    found: list[_Picture] = []
    reasons: list[str] = []
    for path in paths:
        try:
            ets = read_ets(path)
            base = ets.coordinates[ets.levels == 0]
            if not len(base) or base[:, 2:].min(initial=0) < 0:
                raise ValueError(f"'{path.name}' has no tiles of full resolution")
        except (ValueError, SlideError) as error:
            reasons.append(f"{path.parent.name}: {error}")
            continue
        image = _image_of(path, ets, images)
        if image is None:
            problems.append(
                f"The tags say nothing that fits the picture in {path.parent.name}; it is as large "
                "as its tiles."
            )
            found.append(_Picture(path, ets, Node(IMAGE), *(ets.size or _extent(ets))))
        else:
            images.remove(image)
            found.append(_Picture(path, ets, image, *_size(image)))
    if reasons:
        if not found:
            raise ValueError(reasons[0])
        problems.append(f"{len(reasons)} picture(s) can't be read: {reasons[0].rstrip('.')}.")
    return found


def _extent(ets: Ets) -> tuple[int, int]:
    """Return what the tiles of full resolution cover, (width, height)."""
    last = ets.coordinates[ets.levels == 0][:, :2].max(axis=0) + 1
    return int(last[0]) * ets.tile_width, int(last[1]) * ets.tile_height


def _image_of(path: Path, ets: Ets, images: Sequence[Node]) -> Node | None:
    """Return the image that a file holds: that of its number, else one of its size."""

    def fits(image: Node, *, sparse: bool) -> bool:
        size = _size(image)
        if ets.size is not None:
            return size == ets.size
        ends = zip(_extent(ets), _origin(image), (ets.tile_width, ets.tile_height), strict=True)
        return all(
            end + first - tile < side and (sparse or side <= end + first)
            for (end, first, tile), side in zip(ends, size, strict=True)
        )

    number = _stack(path)[0]
    named = (image for image in images if image.number == number and fits(image, sparse=True))
    return next(named, None) or next((each for each in images if fits(each, sparse=False)), None)


def _dimensions(image: Node) -> dict[int, int]:
    """Return which coordinate of a tile means what: its place by `Z`, `T`, `C` and others."""
    found: dict[int, int] = {}
    for dimension in image.all(DIMENSION):
        for parameters in dimension.all(PARAMETERS):
            meaning = parameters.value_of(MEANING)
            if isinstance(meaning, int) and dimension.number is not None:
                found.setdefault(meaning, dimension.number + 2)
    return found


def _tiles_of(
    picture: _Picture, at: Mapping[str, int]
) -> tuple[list[NDArray[np.bool_]], dict[str, tuple[int, int]], int]:
    """Return which tiles are of each channel of a plane, which plane, and how many are hidden.

    By default the plane is the middle one along z, the first one of other dimensions.
    """
    ets = picture.ets
    places = _dimensions(picture.image)
    channel = places.get(C)
    further = [place for place in range(2, ets.coordinates.shape[1]) if place != channel]
    hidden = len(np.unique(ets.coordinates[:, further], axis=0)) - 1
    axes = {places[meaning]: axis for axis, meaning in AXES.items() if meaning in places}
    held = {place: np.unique(ets.coordinates[:, place]) for place in further}
    shown = {
        place: at.get(axes.get(place, ""), len(values) // 2 if axes.get(place) == "z" else 0)
        for place, values in held.items()
    }

    def chosen_tiles() -> NDArray[np.bool_]:
        chosen = np.ones(len(ets.levels), np.bool_)
        for place, values in held.items():
            chosen &= ets.coordinates[:, place] == values[shown[place]]
        return chosen

    chosen = chosen_tiles()
    if not chosen.any() and not at:  # the first plane that is there instead
        first = ets.coordinates[0]
        shown = {place: values.tolist().index(first[place]) for place, values in held.items()}
        chosen = chosen_tiles()
    positions = {
        axis: (shown[place], len(held[place])) for place, axis in axes.items() if place in held
    }
    if not chosen.any():
        plane = ", ".join(f"{axis} = {number}" for axis, (number, _) in positions.items())
        raise PlaneError(
            f"'{picture.path.name}' holds no tile of the plane {plane}; choose another one."
        )
    if channel is None or channel >= ets.coordinates.shape[1] or ets.samples > 1:
        if channel is not None and channel < ets.coordinates.shape[1]:
            chosen &= ets.coordinates[:, channel] == ets.coordinates[:, channel].min()
        return [chosen], positions, hidden
    numbers = np.unique(ets.coordinates[:, channel])
    return (
        [chosen & (ets.coordinates[:, channel] == number) for number in numbers],
        positions,
        hidden,
    )


def _levels(
    picture: _Picture,
    planes: Sequence[NDArray[np.bool_]],
    start: int,
    path: Path,
    problems: list[str],
) -> list[LevelLayout]:
    """Describe the levels, each half as large as the one before, rounded down."""
    ets = picture.ets
    how = replace(_encoding(picture), jpeg_tables=(None,) * len(planes))
    origin = _origin(picture.image)
    levels: list[LevelLayout] = []
    outside = 0
    for number in range(min(int(ets.levels.max()) + 1, MOST_LEVELS)):
        width, height = picture.width >> number, picture.height >> number
        begin_x, begin_y = (_halved(at, number) for at in origin)
        # The first column and row that are in the picture, and where they begin.
        first_x, first_y = -begin_x // ets.tile_width, -begin_y // ets.tile_height
        left, top = begin_x + first_x * ets.tile_width, begin_y + first_y * ets.tile_height
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
        scale, channels = float(1 << number), how.samples * len(planes)
        if left or top:
            size = columns * ets.tile_width, rows * ets.tile_height
            tiles = LevelLayout(*size, channels, how, grid)
            level = LevelLayout.mosaic(width, height, [Part.at(left, top, tiles)], scale)
        else:
            level = LevelLayout(width, height, channels, how, grid, reduction=scale)
        tiff.check_tile_size(level, str(path))
        levels.append(level)
    if not levels:
        raise ValueError("its largest picture has no tiles")
    if outside:
        problems.append(f"{outside} tiles lie beyond the picture; they are left out.")
    if ets.lost:
        problems.append(
            f"{ets.lost} of {len(ets.levels)} tiles of '{picture.path.name}' are missing or cut "
            "off; get a fresh copy of the slide."
        )
    return levels


def _halved(position: int, times: int) -> int:
    """Halve a position so often; halves of pixels are rounded towards 0."""
    found = (2 * abs(position) + (1 << times) - 1) >> (times + 1)
    return found if position > 0 else -found


def _encoding(picture: _Picture) -> Encoding:
    ets = picture.ets
    how = encoding(ets.compression, ets.samples, ets.dtype)
    if ets.compression == COMPRESSION.NONE:
        return replace(how, blue_first=ets.blue_first and ets.samples == 3)
    if ets.compression == COMPRESSION.JPEG:
        with picture.path.open("rb") as file:
            file.seek(int(ets.offsets[0]))
            head = file.read(JPEG_HEAD)
        try:
            return replace(how, jpeg_color=jpeg_color(head))
        except ValueError:
            return how
    return how


def _macro(
    overviews: Sequence[_Picture], start: int, path: Path, problems: list[str]
) -> tuple[AssociatedLayout, ...]:
    """Describe the overview, at the finest level that is no slide itself."""
    for picture in overviews:
        try:
            levels = _levels(picture, _tiles_of(picture, tiff.MIDDLE)[0][:1], start, path, problems)
        except (ValueError, SlideError) as error:
            problems.append(f"The macro image is left out: {str(error).rstrip('.')}.")
            continue
        small = (level for level in levels if level.width * level.height <= LARGEST_MACRO)
        return (AssociatedLayout("macro", next(small, levels[-1])),)
    return ()


# What the tags say


def _channels(image: Node, count: int) -> tuple[Channel, ...]:
    place = _dimensions(image).get(C)
    named: dict[int, Channel] = {}
    for dimension in image.all(DIMENSION):
        if place is None or dimension.number != place - 2:
            continue
        for channel in dimension.all(PARAMETERS):
            name, color = channel.value_of(CHANNEL_NAME), channel.value_of(COLOR)
            shade = None
            if isinstance(color, tuple) and len(color) == 3:
                shade = "#" + "".join(f"{value & 0xFF:02x}" for value in color)
            if isinstance(name, str) and name and channel.number is not None:
                named[channel.number] = Channel(name[:LONGEST_TEXT], shade)
    return tuple(named.get(number, Channel(f"channel {number}")) for number in range(count))


def _mpp(stack: Node, problems: list[str]) -> tuple[float, float] | None:
    scale, unit = stack.value_of(SCALE), stack.value_of(UNIT)
    if not isinstance(scale, tuple) or len(scale) != 2:
        return None
    if unit not in (None, MICROMETRES):
        problems.append("Its pixel size is given in another unit than micrometres; none is given.")
        return None
    x, y = (positive_number(value) for value in scale)
    return (x, y) if x and y else None


def _z_step(image: Node) -> float | None:
    """Return micrometres from one plane along z to the next; it may be counted downwards."""
    for dimension in image.all(DIMENSION):
        for parameters in dimension.all(PARAMETERS):
            if parameters.value_of(MEANING) == Z:
                step = _quantity(parameters.first(Z_STEP), "m")
                return None if step is None else positive_number(f"{abs(step) * 1e6:.12g}")
    return None


def _time_step(picture: _Picture, count: int) -> float | None:
    """Return seconds from one plane along t to the next, by when the frames were taken."""
    place = _dimensions(picture.image).get(T)
    if place is None:
        return None
    # Of frames, the first further dimension counts fastest.
    before = range(2, min(place, picture.ets.coordinates.shape[1]))
    every = math.prod(len(np.unique(picture.ets.coordinates[:, other])) for other in before)
    times = {
        frame.number: _quantity(frame.first(FRAME_VALUES, TAKEN), "s")
        for frame in picture.image.all(FRAME)
    }
    found = [times.get(number * every) for number in range(count)]
    known = [time for time in found if time is not None]
    return even_step(known) if len(known) == count else None


def _quantity(node: Node | None, unit: str) -> float | None:
    """Return a value in metres or seconds."""
    value = None if node is None else node.value_of(VALUE)
    stated = re.fullmatch(r"10\^(-?\d{1,2})([ms])\^1", str(node and node.value_of(VALUE_UNIT)))
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return None if stated is None or stated[2] != unit else value * 10.0 ** int(stated[1])


def _objective(stack: Node) -> float | None:
    found = (positive_number(node.value) for node in stack.anywhere(MAGNIFICATION))
    return next((value for value in found if value), None)


def _metadata(document: Node | None, stack: Node) -> dict[str, Any]:
    found = (
        {}
        if document is None
        else {name: document.value_of(tag) for tag, name in DOCUMENT_TAGS.items()}
    )
    found["Stack name"] = stack.value_of(STACK_NAME)
    lenses = (node.value for node in stack.anywhere(OBJECTIVE))
    found["Objective name"] = next((name for name in lenses if name), None)
    return {
        name: value[:LONGEST_TEXT] if isinstance(value, str) else value
        for name, value in found.items()
        if value
    }


def _date(seconds: Any) -> str | None:
    if not isinstance(seconds, int) or not 0 < seconds < 1 << 33:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat()
