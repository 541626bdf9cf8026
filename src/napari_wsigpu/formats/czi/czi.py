"""Zeiss CZI: subblocks form a mosaic at several scales, for each plane and channel."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.formats import markup
from napari_wsigpu.formats.czi.czi_file import MAGIC, CziFile, Subblocks
from napari_wsigpu.formats.fields import LONGEST_TEXT, even_step, number, positive_number
from napari_wsigpu.formats.pictures import JPEG_HEAD, jpeg_picture, read_encoding, side_by_side
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

COMPRESSIONS = {
    0: COMPRESSION.NONE,
    1: COMPRESSION.JPEG,
    2: COMPRESSION.LZW,
    4: COMPRESSION.JPEGXR,
    5: COMPRESSION.ZSTD,
    6: CZI_ZSTD,
}
# Compressions of raw samples, which keep the order blue, green, red.
RAW_SAMPLES = {COMPRESSION.NONE, COMPRESSION.LZW, COMPRESSION.ZSTD, CZI_ZSTD}
# Pixel types: the type and number of samples; three samples are blue, green, red.
PIXELS = {
    0: ("uint8", 1),
    1: ("uint16", 1),
    2: ("float32", 1),
    3: ("uint8", 3),
    4: ("uint16", 3),
    8: ("float32", 3),
    12: ("uint32", 1),
}
# Dimensions whose position the caller selects, and dimensions whose first position is shown.
SELECTABLE, FIRST = "ZT", "HRIBV"
ASSOCIATED = {"Label": "label", "SlidePreview": "macro", "Thumbnail": "thumbnail"}
# A level is left out if, in any scene, it covers less than this fraction of the finest level's
# area.
COVERED = 0.97
# Relative difference up to which a scale counts as a power of two.
NEAR = 0.1
MOST_OFFSETS = 1 << 16


def probe(path: Path, head: bytes) -> bool:
    """Whether a path is a CZI file."""
    return head[:16].rstrip(b"\0") == MAGIC


def parse(path: Path, at: Mapping[str, int] = tiff.DEFAULT_PLANE) -> SlideLayout:
    """Describe a CZI file at the plane `at` "z" and "t"; the middle z and first t by default."""
    status = path.stat()
    try:
        with path.open("rb") as file:
            source = SlideFile.of(str(path), status)
            return _parse(_Input(CziFile(file, source.size), file, path, []), source, at)
    except SlideError:
        raise
    except ValueError as error:
        raise CorruptSlideError(
            f"The CZI file '{path}' can't be read: {error}; get a fresh copy of it."
        ) from error


class _Input(NamedTuple):
    """The open file, its structure and path, and the list to which problems are appended."""

    czi: CziFile
    file: IO[bytes]
    path: Path
    problems: list[str]


def _parse(opened: _Input, source: SlideFile, at: Mapping[str, int]) -> SlideLayout:
    czi, _, path, problems = opened
    shown = _choose(czi.subblocks(), path, problems, at)
    levels = _levels(opened, shown)
    tiff.check_tiles_present(levels, str(path), source.size)
    root = markup.parse(czi.xml())
    if root is None:
        problems.append("The metadata can't be read: the pixel size and channel names are missing.")
    rgb = levels[0].encoding.samples == 3
    information = _element(root, "Metadata/Information")
    metadata = {} if information is None else {"Information": markup.nested(information)}
    return SlideLayout(
        path=str(path),
        files=(source,),
        vendor="zeiss",
        levels=tuple(levels),
        associated=tuple(_associated(opened, source.size)),
        rgb=rgb,
        channels=() if rgb else _channels(root, shown.channels),
        background=tiff.background(levels[0]),
        mpp=_mpp(root),
        objective=_objective(root),
        metadata={"zeiss": metadata},
        other_planes=shown.others,
        planes=Planes.along(shown.planes, _micrometers(root, "Z"), _interval(root)),
        scanner=_scanner(root),
        scan_date=_text(root, "Metadata/Information/Image/AcquisitionDateAndTime"),
        problems=tuple(problems),
    )


# Selecting the subblocks of a plane


class _Shown(NamedTuple):
    """The subblocks of one plane.

    Attributes
    ----------
    subblocks : Subblocks
        The subblocks.
    channels : list of int
        The numbers of their channels.
    box : Rect
        Bounding box of the subblocks of all planes, in pixels of level 0.
    planes : Mapping of str to (int, int)
        Index of the plane and number of planes along "z" and "t".
    others : int
        Number of other planes.
    """

    subblocks: Subblocks
    channels: list[int]
    box: Rect
    planes: Mapping[str, tuple[int, int]]
    others: int


def _choose(
    found: Subblocks, path: Path, problems: list[str], at: Mapping[str, int] = tiff.DEFAULT_PLANE
) -> _Shown:
    found = _readable(found, path, problems)
    channels, kind = _channel_numbers(found, path, problems)
    planes = np.stack([found.starts[letter] for letter in SELECTABLE + FIRST], axis=1)
    others = len(np.unique(planes, axis=0)) - 1
    box = _box(found)
    found = found[np.isin(found.starts["C"], channels) & (found.pixel_type == kind)]
    held = {letter: np.unique(found.starts[letter]) for letter in SELECTABLE}
    shown = {"Z": at.get("z", len(held["Z"]) // 2), "T": at.get("t", 0)}
    chosen = _at(found, held, shown)
    if not len(chosen) and not at:
        first = {letter: int(found.starts[letter][0]) for letter in SELECTABLE}
        shown = {letter: held[letter].tolist().index(first[letter]) for letter in SELECTABLE}
        chosen = _at(found, held, shown)
    if not len(chosen):
        raise PlaneError(
            f"'{path}' has no image at z = {shown['Z']}, t = {shown['T']}; choose another plane."
        )
    for letter in FIRST:
        chosen = chosen[chosen.starts[letter] == chosen.starts[letter].min()]
    positions = {letter.lower(): (shown[letter], len(held[letter])) for letter in SELECTABLE}
    return _Shown(chosen, channels, box, positions, others)


def _at(found: Subblocks, held: Mapping[str, Integers], shown: Mapping[str, int]) -> Subblocks:
    """Return the subblocks of the plane with these indices into the positions of each axis."""
    for letter, index in shown.items():
        found = found[found.starts[letter] == held[letter][index]]
    return found


def _readable(found: Subblocks, path: Path, problems: list[str]) -> Subblocks:
    known = np.isin(found.pixel_type, [*PIXELS])
    if not known.any():
        raise UnsupportedSlideError(
            f"'{path}' holds pixels of an unsupported type (complex or with alpha); "
            "convert it with ZEN."
        )
    if not known.all():
        problems.append(
            f"{np.count_nonzero(~known)} images have an unsupported pixel type and are left out."
        )
    found = found[known]
    readable = np.isin(found.compression, [*COMPRESSIONS])
    if not readable.all():
        codes = sorted(set(found.compression[~readable].tolist()))
        reason = f"an unsupported compression (code {codes[0]})"
        if not readable.any():
            raise UnsupportedSlideError(f"'{path}' uses {reason}; convert it with ZEN.")
        problems.append(f"{np.count_nonzero(~readable)} images with {reason} are left out.")
    return found[readable]


def _channel_numbers(found: Subblocks, path: Path, problems: list[str]) -> tuple[list[int], int]:
    """Return the channels that have the pixel type of the first channel, and that type.

    If it is a color type, only the first channel is returned.
    """
    channels, firsts = np.unique(found.starts["C"], return_index=True)
    kinds = found.pixel_type[firsts].tolist()
    kind = kinds[0]
    same = channels[np.array(kinds) == kind].tolist()
    if PIXELS[kind][1] == 3:
        same = same[:1]
    if len(same) > limits.planes:
        raise UnsupportedSlideError(
            f"'{path}' claims {len(same)} channels, more than any slide has: "
            f"{limits.advice('planes')}."
        )
    if len(same) < len(kinds):
        problems.append(
            f"{len(kinds) - len(same)} channels are not shown: they are in color, or their pixel "
            "type differs from the first channel's."
        )
    return same, kind


def _box(found: Subblocks) -> Rect:
    box = Rect.between(
        int(found.starts["Y"].min()),
        int((found.starts["Y"] + found.height).max()),
        int(found.starts["X"].min()),
        int((found.starts["X"] + found.width).max()),
    )
    if max(box.width, box.height) >= tiff.LARGEST_SIDE:
        raise ValueError(f"it claims {box.width} x {box.height} pixels")
    return box


# Composing the levels


class _Stack(NamedTuple):
    """Subblocks of adjacent channels with the same layout, in drawing order.

    Attributes
    ----------
    first : int
        Index of the first channel among the shown channels.
    members : ndarray of int64, shape (channels, tiles)
        Index of each subblock among the level's subblocks.
    layout : ndarray of int64, shape (6, tiles)
        Scene, y, x, height, width and compression, which all channels share.
    """

    first: int
    members: Integers
    layout: Integers


def _levels(opened: _Input, shown: _Shown) -> list[LevelLayout]:
    found, box = shown.subblocks, shown.box
    scales = _scales(found)
    first_scale = int(scales.min())
    base: NDArray[np.float64] | None = None
    levels: list[LevelLayout] = []
    for scale in np.unique(scales).tolist():
        here = found[scales == scale]
        stacks = _stacked(here, shown.channels)
        size = (-(-box.width // scale), -(-box.height // scale))
        areas: dict[int, float] = {}
        parts = list(_parts(opened, here, stacks, (box.left, box.top), scale, areas))
        scenes = np.unique(found.starts["S"])
        area = np.array([areas.get(scene, 0.0) for scene in scenes.tolist()]) * scale**2
        if base is None:
            base = area
        elif not (area >= COVERED * base).all():
            continue  # the level is incomplete; viewers compute one from the finer level instead
        channels = len(shown.channels) * parts[0].image.encoding.samples
        levels.append(LevelLayout.mosaic(*size, parts, scale / first_scale, channels))
        tiff.check_tile_size(levels[-1], str(opened.path))
    if first_scale > 1:
        opened.problems.append("The full resolution is missing; the next finest level is shown.")
    return levels


def _scales(found: Subblocks) -> Integers:
    """Return each subblock's downsample as a whole number, a power of two if it is close to one."""
    wide = found.stored_width >= found.stored_height
    ratio = np.where(wide, found.width / found.stored_width, found.height / found.stored_height)
    power = 2.0 ** np.round(np.log2(ratio))
    near = np.abs(ratio / power - 1) < NEAR
    return np.maximum(1, np.where(near, power, np.round(ratio))).astype(np.int64)


def _stacked(found: Subblocks, channels: Sequence[int]) -> list[_Stack]:
    """Group adjacent channels whose subblocks have the same layout.

    Subblocks with a higher mosaic index (M) are drawn later.

    A file may hold a channel on another grid, with an offset, in another compression or only in
    part. Such a channel gets its own stack, which leaves the other channels untouched.
    """
    stacks: list[_Stack] = []
    order = np.lexsort((found.starts["M"], found.starts["C"]))
    bounds = np.searchsorted(found.starts["C"][order], [*channels, channels[-1] + 1])
    for index, (start, end) in enumerate(pairwise(bounds.tolist())):
        own = order[start:end]
        positions = [found.starts[name] for name in "SYX"]
        stored = (found.stored_height, found.stored_width, found.compression)
        layout = np.stack([values[own] for values in (*positions, *stored)])
        last = stacks[-1] if stacks else None
        adjacent = last is not None and last.first + len(last.members) == index
        if last is not None and adjacent and np.array_equal(last.layout, layout):
            stacks[-1] = last._replace(members=np.vstack([last.members, own]))
        elif len(own):
            stacks.append(_Stack(index, own[None], layout))
    return stacks


def _parts(
    opened: _Input,
    found: Subblocks,
    stacks: Sequence[_Stack],
    corner: tuple[int, int],
    scale: int,
    areas: dict[int, float],
) -> Iterator[Scattered]:
    """Yield the visible parts of a level's tiles, by stack and compression.

    Parameters
    ----------
    opened : _Input
        The file.
    found : Subblocks
        The level's subblocks.
    stacks : sequence of _Stack
        Their stacks.
    corner : tuple of int
        Upper left corner of the mosaic, (x, y) in pixels of level 0.
    scale : int
        Downsample of the level.
    areas : dict of int to float
        Receives the visible pixels of each scene, over all channels.
    """
    offsets, lengths = opened.czi.payloads(found.position)
    for stack in stacks:
        first = found[stack.members[0]]
        lefts = _rounded((first.starts["X"] - corner[0]) / scale)
        tops = _rounded((first.starts["Y"] - corner[1]) / scale)
        rects = Rects(tops, lefts, tops + first.stored_height, lefts + first.stored_width)
        # Visibility is computed over all compressions, since tiles of one may cover tiles of
        # another.
        owner, on = rects.visible()
        area = (on.bottoms - on.tops).astype(float) * (on.rights - on.lefts)
        scenes = first.starts["S"][owner]
        for scene in np.unique(scenes).tolist():
            shown = float(area[scenes == scene].sum()) * len(stack.members)
            areas[scene] = areas.get(scene, 0.0) + shown
        for code in np.unique(first.compression[owner]).tolist():
            chosen = first.compression == code
            members = stack.members[:, chosen]
            image = _image(opened, first[chosen], code, offsets[members], lengths[members])
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
    opened: _Input, tiles: Subblocks, code: int, offsets: Integers, lengths: Integers
) -> LevelLayout:
    """Describe tiles of one compression; `offsets` and `lengths` have shape (channels, tiles)."""
    compression = COMPRESSIONS[code]
    dtype, samples = PIXELS[int(tiles.pixel_type[0])]
    pixel = np.dtype(dtype).itemsize * samples
    if compression == COMPRESSION.NONE:  # ignore padding; the decoder reports a short tile
        lengths = np.minimum(lengths, tiles.stored_height * tiles.stored_width * pixel)
    lost = int(np.count_nonzero(lengths == 0))
    if lost:
        opened.problems.append(
            f"{lost} image(s) are missing or truncated; get a fresh copy of the file."
        )
    counts = np.maximum(lengths, 1)
    height, width = int(tiles.stored_height.max()), int(tiles.stored_width.max())
    sizes = np.stack([tiles.stored_height, tiles.stored_width])[:, None]
    uniform = bool((sizes == [[[height]], [[width]]]).all())
    grid = TileGrid(height, width, offsets[:, None], counts[:, None], None if uniform else sizes)
    tile_encoding = replace(
        read_encoding(opened.file, int(offsets[0, 0]), compression, samples, dtype),
        jpeg_tables=(None,) * len(offsets),
        blue_first=compression in RAW_SAMPLES and samples == 3,
    )
    image = side_by_side(grid, tile_encoding)
    tiff.check_tile_size(image, str(opened.path))
    return image


def _rounded(values: NDArray[np.float64]) -> Integers:
    found: Integers = np.floor(values + 0.5).astype(np.int64)
    return found


# Associated images


def _associated(opened: _Input, file_size: int) -> Iterator[AssociatedLayout]:
    czi, file, path, problems = opened
    try:
        attached = list(czi.attached())
    except ValueError as error:
        problems.append(f"The attachments can't be read: {error}.")
        return
    names = set[str]()
    for each in attached:
        name = ASSOCIATED.get(each.name)
        if name is None or name in names:
            continue
        try:
            if each.kind == "JPG":
                file.seek(each.offset)
                head = file.read(min(JPEG_HEAD, each.size))
                image = jpeg_picture(head, each.offset, each.size)
            else:
                inner = _Input(CziFile(file, file_size, each.offset), file, path, [])
                image = _attached_image(inner)
        except (ValueError, SlideError) as error:
            problems.append(f"The {name} image is left out: {str(error).rstrip('.')}.")
            continue
        names.add(name)
        yield AssociatedLayout(name, image)


def _attached_image(opened: _Input) -> LevelLayout:
    """Describe an attached CZI file, which must hold a single image."""
    shown = _choose(opened.czi.subblocks(), opened.path, opened.problems)
    level = _levels(opened, shown)[0]
    image = level.stored[0]
    if (image.width, image.height) != (level.width, level.height) or image.grid.columns != 1:
        raise ValueError("it consists of several images")
    return image


# Metadata


def _element(root: Element | None, path: str) -> Element | None:
    return None if root is None else root.find(path)


def _text(root: Element | None, path: str) -> str | None:
    found = None if root is None else root.findtext(path)
    return found.strip()[:LONGEST_TEXT] or None if found else None


def _mpp(root: Element | None) -> tuple[float, float] | None:
    x, y = _micrometers(root, "X"), _micrometers(root, "Y")
    return (x, y) if x and y else None


def _micrometers(root: Element | None, axis: str) -> float | None:
    """Return the micrometers per pixel along x or y, or between planes along z."""
    meters = positive_number(_text(root, f"Metadata/Scaling/Items/Distance[@Id='{axis}']/Value"))
    # Formatting removes the rounding error of the product.
    return None if meters is None else float(f"{meters * 1e6:.12g}")


def _interval(root: Element | None) -> float | None:
    """Return the seconds from one plane along t to the next; None if the intervals differ."""
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
    path = "Metadata/Information/Instrument/Objectives/Objective/NominalMagnification"
    return positive_number(_text(root, path))


def _scanner(root: Element | None) -> str | None:
    microscope = _element(root, "Metadata/Information/Instrument/Microscopes/Microscope")
    name = None if microscope is None else microscope.get("Name")
    return name[:LONGEST_TEXT] if name else None


def _channels(root: Element | None, numbers: Sequence[int]) -> tuple[Channel, ...]:
    """Return the names and colors of the channels with these numbers.

    Display settings take precedence for the color, but not for the name.
    """
    dimensions = _element(root, "Metadata/Information/Image/Dimensions/Channels")
    settings = _element(root, "Metadata/DisplaySetting/Channels")
    listed = [*markup.children(dimensions, "Channel")]
    displayed = [*markup.children(settings, "Channel")]
    by_id = {each.get("Id"): each for each in displayed}
    found = []
    for index, channel_number in enumerate(numbers):
        channel = listed[channel_number] if 0 <= channel_number < len(listed) else None
        display = None if channel is None else by_id.get(channel.get("Id"))
        if display is None and 0 <= channel_number < len(displayed):
            display = displayed[channel_number]
        sources = [each for each in (channel, display) if each is not None]
        name = next((each.get("Name") for each in sources if each.get("Name")), None)
        colors = (markup.text(each, "Color") for each in sources[::-1])
        color = next(filter(None, map(_color, colors)), None)
        found.append(Channel((name or f"channel {index}")[:LONGEST_TEXT], color))
    return tuple(found)


def _color(text: str | None) -> str | None:
    """Read a color written as #AARRGGBB or #RRGGBB."""
    digits = (text or "").strip().lstrip("#")[-6:]
    try:
        return f"#{int(digits, 16):06x}" if len(digits) == 6 else None
    except ValueError:
        return None
