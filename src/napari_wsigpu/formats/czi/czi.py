"""Zeiss CZI: subblocks that lie on a mosaic, at several scales, one set a plane and channel."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.formats import markup
from napari_wsigpu.formats.czi.czi_file import MAGIC, CziFile, Subblocks
from napari_wsigpu.formats.fields import LONGEST_TEXT, even_step, number, positive_number
from napari_wsigpu.formats.pictures import (
    JPEG_HEAD,
    encoding,
    jpeg_color,
    jpeg_picture,
    side_by_side,
)
from napari_wsigpu.formats.tiff import tiff
from napari_wsigpu.model.errors import (
    CorruptSlideError,
    PlaneError,
    SlideError,
    UnsupportedSlideError,
)
from napari_wsigpu.model.geometry import Rect, Rects
from napari_wsigpu.model.layout import (
    AssociatedLayout,
    Channel,
    LevelLayout,
    Planes,
    Scattered,
    SlideFile,
    SlideLayout,
    TileGrid,
)
from napari_wsigpu.model.limits import limits
from napari_wsigpu.model.tags import COMPRESSION, CZI_ZSTD

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import IO
    from xml.etree.ElementTree import Element

    from numpy.typing import NDArray

    from napari_wsigpu.model.geometry import Integers
    from napari_wsigpu.model.layout import Encoding

COMPRESSIONS = {
    0: COMPRESSION.NONE,
    1: COMPRESSION.JPEG,
    2: COMPRESSION.LZW,
    4: COMPRESSION.JPEGXR,
    5: COMPRESSION.ZSTD,
    6: CZI_ZSTD,
}
BYTES = {COMPRESSION.NONE, COMPRESSION.LZW, COMPRESSION.ZSTD, CZI_ZSTD}
# Kinds of pixels: their type, and how many samples they have, blue first.
PIXELS = {
    0: ("uint8", 1),
    1: ("uint16", 1),
    2: ("float32", 1),
    3: ("uint8", 3),
    4: ("uint16", 3),
    8: ("float32", 3),
    12: ("uint32", 1),
}
CHOSEN, FIRST = "ZT", "HRIBV"  # of each one position is shown: the one asked for, or the first
PICTURES = {"Label": "label", "SlidePreview": "macro", "Thumbnail": "thumbnail"}
# Levels that show less of a scene than this part of it are left out.
COVERED = 0.97
NEAR = 0.1
MOST_OFFSETS = 1 << 16


def probe(path: Path, head: bytes) -> bool:
    """Whether a path is a CZI file."""
    return head[:16].rstrip(b"\0") == MAGIC


def parse(path: Path, at: Mapping[str, int] = tiff.MIDDLE) -> SlideLayout:
    """Describe a CZI file: the plane `at` "z" and "t", else the middle z, the first t."""
    status = path.stat()
    try:
        with path.open("rb") as file:
            return _parse(path, file, SlideFile.of(str(path), status), at)
    except SlideError:
        raise
    except ValueError as error:
        raise CorruptSlideError(
            f"The CZI file '{path}' can't be understood: {error}; get a fresh copy of it."
        ) from error


def _parse(path: Path, file: IO[bytes], source: SlideFile, at: Mapping[str, int]) -> SlideLayout:
    problems: list[str] = []
    czi = CziFile(file, source.size)
    shown = _choose(czi.subblocks(), path, problems, at)
    levels = _levels(czi, file, shown, path, problems)
    tiff.check_tiles_present(levels, str(path), source.size)
    root = markup.parse(czi.xml())
    if root is None:
        problems.append("Its metadata can't be read: sizes of pixels and names are missing.")
    rgb = levels[0].encoding.samples == 3
    information = _found(root, "Metadata/Information")
    said = {} if information is None else {"Information": markup.nested(information)}
    return SlideLayout(
        path=str(path),
        file_size=source.size,
        modified_ns=source.modified_ns,
        files=(source,),
        vendor="zeiss",
        levels=tuple(levels),
        associated=tuple(_associated(czi, file, source, path, problems)),
        rgb=rgb,
        channels=() if rgb else _channels(root, shown.channels),
        background=tiff.background(levels[0]),
        mpp=_mpp(root),
        objective=_objective(root),
        metadata={"zeiss": said},
        hidden_planes=shown.hidden,
        planes=Planes.along(shown.planes, _micrometres(root, "Z"), _interval(root)),
        scanner=_scanner(root),
        scan_date=_text(root, "Metadata/Information/Image/AcquisitionDateAndTime"),
        problems=tuple(problems),
    )


# Which subblocks are shown


class _Shown(NamedTuple):
    """Subblocks of one plane.

    Attributes
    ----------
    subblocks : Subblocks
        Those that are shown.
    channels : list of int
        Their channels' numbers.
    box : Rect
        Where the subblocks of all planes lie.
    planes : Mapping of str to (int, int)
        Which plane along "z" and "t" it is, and of how many.
    hidden : int
        How many planes are hidden.
    """

    subblocks: Subblocks
    channels: list[int]
    box: Rect
    planes: Mapping[str, tuple[int, int]]
    hidden: int


def _choose(
    found: Subblocks, path: Path, problems: list[str], at: Mapping[str, int] = tiff.MIDDLE
) -> _Shown:
    found = _readable(found, path, problems)
    channels, kind = _channel_numbers(found, path, problems)
    planes = np.stack([found.starts[letter] for letter in CHOSEN + FIRST], axis=1)
    hidden = len(np.unique(planes, axis=0)) - 1
    box = _box(found)
    found = found[np.isin(found.starts["C"], channels) & (found.pixel_type == kind)]
    held = {letter: np.unique(found.starts[letter]) for letter in CHOSEN}
    shown = {"Z": at.get("z", len(held["Z"]) // 2), "T": at.get("t", 0)}
    chosen = _at(found, held, shown)
    if not len(chosen) and not at:
        first = {letter: int(found.starts[letter][0]) for letter in CHOSEN}
        shown = {letter: held[letter].tolist().index(first[letter]) for letter in CHOSEN}
        chosen = _at(found, held, shown)
    if not len(chosen):
        raise PlaneError(
            f"'{path}' holds no picture of the plane z = {shown['Z']}, t = {shown['T']}; "
            "choose another one."
        )
    for letter in FIRST:
        chosen = chosen[chosen.starts[letter] == chosen.starts[letter].min()]
    positions = {letter.lower(): (shown[letter], len(held[letter])) for letter in CHOSEN}
    return _Shown(chosen, channels, box, positions, hidden)


def _at(found: Subblocks, held: Mapping[str, Integers], shown: Mapping[str, int]) -> Subblocks:
    """Return the subblocks of a plane, by its place among those along each axis."""
    for letter, place in shown.items():
        found = found[found.starts[letter] == held[letter][place]]
    return found


def _readable(found: Subblocks, path: Path, problems: list[str]) -> Subblocks:
    known = np.isin(found.pixel_type, [*PIXELS])
    if not known.any():
        raise UnsupportedSlideError(
            f"'{path}' holds pixels of a kind that can't be shown (complex or with opacity); "
            "convert it by ZEN."
        )
    if not known.all():
        problems.append(f"{np.count_nonzero(~known)} pictures of a kind that can't be shown.")
    found = found[known]
    readable = np.isin(found.compression, [*COMPRESSIONS])
    if not readable.all():
        codes = sorted(set(found.compression[~readable].tolist()))
        text = f"compressed in a way that is not supported ({codes[0]})"
        if not readable.any():
            raise UnsupportedSlideError(f"'{path}' holds pictures {text}; convert it by ZEN.")
        problems.append(f"{np.count_nonzero(~readable)} pictures are {text}.")
    return found[readable]


def _channel_numbers(found: Subblocks, path: Path, problems: list[str]) -> tuple[list[int], int]:
    """Return the channels that can be laid over the first one, and their kind of pixels."""
    channels = np.unique(found.starts["C"])
    _, firsts = np.unique(found.starts["C"], return_index=True)
    kinds = found.pixel_type[firsts].tolist()
    kind = kinds[0]
    alike = [
        channel for channel, other in zip(channels.tolist(), kinds, strict=True) if other == kind
    ]
    if PIXELS[kind][1] == 3:
        alike = alike[:1]
    if len(alike) > limits.planes:
        raise UnsupportedSlideError(
            f"'{path}' claims {len(alike)} channels, more than any slide has: "
            f"{limits.advice('planes')}."
        )
    if len(alike) < len(kinds):
        problems.append(
            f"{len(kinds) - len(alike)} channels are not shown: they can't be laid over the first "
            "one, of another kind of pixels or of colours."
        )
    return alike, kind


def _box(found: Subblocks) -> Rect:
    box = Rect.between(
        int(found.starts["Y"].min()),
        int((found.starts["Y"] + found.height).max()),
        int(found.starts["X"].min()),
        int((found.starts["X"] + found.width).max()),
    )
    if max(box.width, box.height) >= tiff.LARGEST_SIDE:
        raise ValueError(f"it is said to be of {box.width} x {box.height} pixels")
    return box


# Where they lie


class _Stack(NamedTuple):
    """Subblocks of neighbouring channels that lie alike, in the order in which they are laid down.

    Attributes
    ----------
    first : int
        Which of the channels that are shown is the first one.
    members : ndarray of int64, shape (channels, tiles)
        Number of each subblock among the level's.
    alike : ndarray of int64, shape (6, tiles)
        Scene, place, size and compression, which are the same for all channels.
    """

    first: int
    members: Integers
    alike: Integers


def _levels(
    czi: CziFile, file: IO[bytes], shown: _Shown, path: Path, problems: list[str]
) -> list[LevelLayout]:
    found, box = shown.subblocks, shown.box
    scales = _scales(found)
    base: NDArray[np.float64] | None = None
    levels: list[LevelLayout] = []
    for scale in np.unique(scales).tolist():
        here = found[scales == scale]
        stacks = _stacked(here, shown.channels)
        size = (-(-box.width // scale), -(-box.height // scale))
        areas: dict[int, float] = {}
        parts = list(
            _parts(czi, file, here, stacks, (box.left, box.top), scale, areas, path, problems)
        )
        scenes = np.unique(found.starts["S"])
        area = np.array([areas.get(scene, 0.0) for scene in scenes.tolist()]) * scale**2
        if base is None:
            base = area
        elif not (area >= COVERED * base).all():
            continue  # it does not show all; what it shows is computed from the finer level
        channels = len(shown.channels) * parts[0].image.encoding.samples
        reduction = scale / _first_scale(scales)
        levels.append(LevelLayout.mosaic(*size, parts, reduction, channels))
        tiff.check_tile_size(levels[-1], str(path))
    if _first_scale(scales) > 1:
        problems.append("Its pictures of full resolution are missing; the finest others are shown.")
    return levels


def _first_scale(scales: Integers) -> int:
    return int(scales.min())


def _scales(found: Subblocks) -> Integers:
    """Return how many pixels of level 0 one of each subblock spans, as a whole number."""
    wide = found.stored_width >= found.stored_height
    ratio = np.where(wide, found.width / found.stored_width, found.height / found.stored_height)
    power = 2.0 ** np.round(np.log2(ratio))
    near = np.abs(ratio / power - 1) < NEAR
    return np.maximum(1, np.where(near, power, np.round(ratio))).astype(np.int64)


def _stacked(found: Subblocks, channels: Sequence[int]) -> list[_Stack]:
    """Join channels whose subblocks lie alike; higher M and later ones on top.

    A file may hold a channel on another grid, shifted, in another compression or only in part.
    What a subblock has no samples of is another stack's, not its own background.
    """
    stacks: list[_Stack] = []
    order = np.lexsort((found.starts["M"], found.starts["C"]))
    bounds = np.searchsorted(found.starts["C"][order], [*channels, channels[-1] + 1])
    for index, (begin, end) in enumerate(pairwise(bounds.tolist())):
        own = order[begin:end]
        places = [found.starts[name] for name in "SYX"]
        stored = (found.stored_height, found.stored_width, found.compression)
        alike = np.stack([values[own] for values in (*places, *stored)])
        last = stacks[-1] if stacks else None
        joins = last is not None and last.first + len(last.members) == index
        if last is not None and joins and np.array_equal(last.alike, alike):
            stacks[-1] = last._replace(members=np.vstack([last.members, own]))
        elif len(own):
            stacks.append(_Stack(index, own[None], alike))
    return stacks


def _parts(
    czi: CziFile,
    file: IO[bytes],
    found: Subblocks,
    stacks: Sequence[_Stack],
    corner: tuple[int, int],
    scale: int,
    areas: dict[int, float],
    path: Path,
    problems: list[str],
) -> Iterator[Scattered]:
    """Lay down a level's tiles; those that are compressed otherwise in parts of their own.

    `areas` gets how many pixels of each scene are shown, of all channels.
    """
    offsets, lengths = czi.payloads(found.position)
    for stack in stacks:
        first = found[stack.members[0]]
        lefts = _whole((first.starts["X"] - corner[0]) / scale)
        tops = _whole((first.starts["Y"] - corner[1]) / scale)
        rects = Rects(tops, lefts, tops + first.stored_height, lefts + first.stored_width)
        # Before they are sorted by compression, as a tile of one may cover one of another.
        owner, on = rects.visible()
        area = (on.bottoms - on.tops).astype(float) * (on.rights - on.lefts)
        scenes = first.starts["S"][owner]
        for scene in np.unique(scenes).tolist():
            shown = float(area[scenes == scene].sum()) * len(stack.members)
            areas[scene] = areas.get(scene, 0.0) + shown
        for code in np.unique(first.compression[owner]).tolist():
            chosen = first.compression == code
            members = stack.members[:, chosen]
            places = offsets[members], lengths[members]
            image = _image(file, first[chosen], code, *places, path, problems)
            here = chosen[owner]
            columns = (np.cumsum(chosen) - 1)[owner[here]]
            yield Scattered(
                image,
                np.zeros_like(columns),
                columns,
                on.tops[here] - tops[owner[here]],
                on.lefts[here] - lefts[owner[here]],
                on[here],
                stack.first,
            )


def _image(
    file: IO[bytes],
    tiles: Subblocks,
    code: int,
    begins: Integers,
    lengths: Integers,
    path: Path,
    problems: list[str],
) -> LevelLayout:
    """Lay out tiles of one compression; `begins` and `lengths` have shape (channels, tiles)."""
    compression = COMPRESSIONS[code]
    dtype, samples = PIXELS[int(tiles.pixel_type[0])]
    pixel = np.dtype(dtype).itemsize * samples
    if compression == COMPRESSION.NONE:  # a shorter one is damaged, and said to be so
        lengths = np.minimum(lengths, tiles.stored_height * tiles.stored_width * pixel)
    lost = int(np.count_nonzero(lengths == 0))
    if lost:
        problems.append(
            f"{lost} of its pictures are missing or cut off; get a fresh copy of the file."
        )
    counts = np.maximum(lengths, 1)
    height, width = int(tiles.stored_height.max()), int(tiles.stored_width.max())
    sizes = np.stack([tiles.stored_height, tiles.stored_width])[:, None]
    alike = bool((sizes == [[[height]], [[width]]]).all())
    grid = TileGrid(height, width, begins[:, None], counts[:, None], None if alike else sizes)
    how = _encoding(file, compression, dtype, samples, begins, counts)
    image = side_by_side(grid, replace(how, jpeg_tables=(None,) * len(begins)))
    tiff.check_tile_size(image, str(path))
    return image


def _whole(values: NDArray[np.float64]) -> Integers:
    found: Integers = np.floor(values + 0.5).astype(np.int64)
    return found


def _encoding(
    file: IO[bytes],
    compression: int,
    dtype: str,
    samples: int,
    begins: Integers,
    counts: Integers,
) -> Encoding:
    how = encoding(compression, samples, dtype)
    if compression in BYTES:
        return replace(how, blue_first=samples == 3)
    if compression == COMPRESSION.JPEG and counts.any():
        file.seek(int(begins[counts > 0][0]))
        try:
            return replace(how, jpeg_color=jpeg_color(file.read(JPEG_HEAD)))
        except ValueError:
            return how
    return how


# Pictures beside it


def _associated(
    czi: CziFile, file: IO[bytes], source: SlideFile, path: Path, problems: list[str]
) -> Iterator[AssociatedLayout]:
    try:
        attached = list(czi.attached())
    except ValueError as error:
        problems.append(f"Its attachments can't be read: {error}.")
        return
    names = set[str]()
    for each in attached:
        name = PICTURES.get(each.name)
        if name is None or name in names:
            continue
        try:
            if each.kind == "JPG":
                file.seek(each.offset)
                head = file.read(min(JPEG_HEAD, each.size))
                image = jpeg_picture(head, each.offset, each.size)
            else:
                image = _inner_picture(CziFile(file, source.size, each.offset), file, path)
        except (ValueError, SlideError) as error:
            problems.append(f"The {name} image is left out: {str(error).rstrip('.')}.")
            continue
        names.add(name)
        yield AssociatedLayout(name, image)


def _inner_picture(czi: CziFile, file: IO[bytes], path: Path) -> LevelLayout:
    """Describe a CZI file that is attached, which holds one picture."""
    shown = _choose(czi.subblocks(), path, [])
    level = _levels(czi, file, shown, path, [])[0]
    image = level.stored[0]
    if (image.width, image.height) != (level.width, level.height) or image.grid.columns != 1:
        raise ValueError("it is put together of several pictures")
    return image


# What its metadata say


def _found(root: Element | None, way: str) -> Element | None:
    return None if root is None else root.find(way)


def _text(root: Element | None, way: str) -> str | None:
    found = None if root is None else root.findtext(way)
    return found.strip()[:LONGEST_TEXT] or None if found else None


def _mpp(root: Element | None) -> tuple[float, float] | None:
    x, y = _micrometres(root, "X"), _micrometres(root, "Y")
    return (x, y) if x and y else None


def _micrometres(root: Element | None, axis: str) -> float | None:
    """Return the size of a pixel, or the distance of planes, in micrometres."""
    metres = positive_number(_text(root, f"Metadata/Scaling/Items/Distance[@Id='{axis}']/Value"))
    # Metres times a million is rarely the number of micrometres that was meant.
    return None if metres is None else float(f"{metres * 1e6:.12g}")


def _interval(root: Element | None) -> float | None:
    """Return the seconds from one plane along t to the next, if they are the same for all."""
    positions = "Metadata/Information/Image/Dimensions/T/Positions"
    stated = positive_number(_text(root, f"{positions}/Interval/Increment"))
    if stated is not None:
        return stated
    offsets = (_text(root, f"{positions}/List/Offsets") or "").split()
    try:
        return even_step([number(offset) for offset in offsets[:MOST_OFFSETS]])
    except ValueError:
        return None


def _objective(root: Element | None) -> float | None:
    way = "Metadata/Information/Instrument/Objectives/Objective/NominalMagnification"
    return positive_number(_text(root, way))


def _scanner(root: Element | None) -> str | None:
    microscope = _found(root, "Metadata/Information/Instrument/Microscopes/Microscope")
    name = None if microscope is None else microscope.get("Name")
    return name[:LONGEST_TEXT] if name else None


def _channels(root: Element | None, numbers: Sequence[int]) -> tuple[Channel, ...]:
    """Name the channels that are shown, as the metadata list all of them."""
    dimensions = _found(root, "Metadata/Information/Image/Dimensions/Channels")
    settings = _found(root, "Metadata/DisplaySetting/Channels")
    listed = [*markup.children(dimensions, "Channel")]
    displayed = [*markup.children(settings, "Channel")]
    by_id = {each.get("Id"): each for each in displayed}
    found = []
    for index, place in enumerate(numbers):
        channel = listed[place] if 0 <= place < len(listed) else None
        display = None
        if channel is not None:
            display = by_id.get(channel.get("Id"))
        if display is None and 0 <= place < len(displayed):
            display = displayed[place]
        sources = [each for each in (channel, display) if each is not None]
        name = next((each.get("Name") for each in sources if each.get("Name")), None)
        colors = (markup.text(each, "Color") for each in sources[::-1])
        found.append(
            Channel(
                (name or f"channel {index}")[:LONGEST_TEXT],
                next(filter(None, map(_color, colors)), None),
            )
        )
    return tuple(found)


def _color(text: str | None) -> str | None:
    """Read a colour as #AARRGGBB or #RRGGBB."""
    digits = (text or "").strip().lstrip("#")[-6:]
    try:
        return f"#{int(digits, 16):06x}" if len(digits) == 6 else None
    except ValueError:
        return None
