"""Ventana BIF and TIFF: tiles are overlapping camera frames; the file's XML positions them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.formats import markup
from napari_wsigpu.formats.fields import number, positive_number, texts, whole_number
from napari_wsigpu.formats.tiff import tiff
from napari_wsigpu.model.errors import CorruptSlideError, NotASlideError
from napari_wsigpu.model.layout import AxisMapping, LevelLayout, Part, Planes
from napari_wsigpu.model.tags import Tag

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from xml.etree.ElementTree import Element

    from tifffile import TiffFile, TiffPage

    from napari_wsigpu.model.arrays import Array
    from napari_wsigpu.model.layout import SlideFile, SlideLayout

NAMES = {"Label Image": "macro", "Label_Image": "macro", "Thumbnail": "thumbnail"}
# The axis of a joint: 0 is x, 1 is y. Scanners differ in which of two tiles they name first.
DIRECTIONS = {"RIGHT": 0, "LEFT": 0, "UP": 1, "DOWN": 1}
# Models with this prefix measure the overlap of each pair of tiles.
BY_PAIRS = "VENTANA DP"


class _Area(NamedTuple):
    """A scanned area: position in pixels, first tile and number of tiles, each (x, y)."""

    position: tuple[int, int]
    first: tuple[int, int]
    tiles: tuple[int, int]


class _Joint(NamedTuple):
    """The overlap, in pixels, of tile `cell` along `axis` with the tile before it."""

    axis: int
    cell: int
    overlap: float
    confidence: int


class _Stitching(NamedTuple):
    """The layout of the tiles of level 0."""

    areas: tuple[_Area, ...]
    joints: tuple[_Joint, ...]


def probe(file: TiffFile) -> bool:
    """Whether Ventana's software wrote the file, judging by the XML of its first page."""
    return "<iScan" in tiff.text_tag(file.pages.first, Tag.XML_PACKET)


def parse(
    file: TiffFile, source: SlideFile, at: Mapping[str, int] = tiff.DEFAULT_PLANE
) -> SlideLayout:
    """Describe a Ventana slide at the focal plane `at` "z"; by default the plane in focus."""
    pages = tiff.pages(file)
    problems: list[str] = []
    fields = _fields(tiff.text_tag(pages[0], Tag.XML_PACKET), problems)
    found = _pyramid(pages, source.path, problems)
    page = found[0][1]
    layers = _layers(page, source.path)
    z = at.get("z", layers.index(0))
    complete = [each for each in found if each[1].imagedepth == len(layers)]
    if left_out := len(found) - len(complete):
        problems.append(
            f"{left_out} level(s) with a different number of focal planes are left out."
        )
    stored = []
    for magnification, each in complete:
        level = tiff.page_level(each, source.path, layer=layers[z])
        stored.append(replace(level, reduction=found[0][0] / magnification))
    levels = _stitched(stored, tiff.text_tag(page, Tag.XML_PACKET), fields, problems)
    named = ((NAMES.get(page.description), page) for page in pages)
    layout = tiff.slide_layout(
        source,
        "ventana",
        levels,
        page,
        {**fields, "regions": levels[0].part_bounds},
        associated=tiff.associated_images(named, source.path, problems),
        problems=problems,
    )
    stated = positive_number(fields.get("Z-layers")) or 1
    if stated != len(layers):
        problem = f"The file declares {stated:g} focal plane(s), but holds {len(layers)}."
        layout = replace(layout, problems=(*layout.problems, problem))
    spacing = positive_number(fields.get("Z-spacing")) if len(layers) > 1 else None
    mpp = positive_number(fields.get("ScanRes"))
    return replace(
        layout,
        other_planes=len(layers) - 1,
        planes=Planes(z, size_z=len(layers), z_spacing=spacing),
        background=_background(fields.get("ScanWhitePoint"), levels[0]),
        mpp=None if mpp is None else (mpp, mpp),
        objective=positive_number(fields.get("Magnification")),
        scanner=fields.get("ScannerModel"),
        barcode=fields.get("Barcode2D") or fields.get("Barcode1D"),
    )


def _layers(page: TiffPage, path: str) -> list[int]:
    """Return the page's layer of each focal plane, from one end of the stack to the other.

    The file stores the plane in focus first, then the planes on one side of it, then the planes on
    the other.
    """
    depth = page.imagedepth
    tiles = math.ceil(page.imagewidth / page.tilewidth)
    tiles *= math.ceil(page.imagelength / page.tilelength)
    if depth != 1 and not 1 <= depth * tiles <= len(page.dataoffsets):
        raise CorruptSlideError(
            f"'{path}' claims {depth} focal planes of {tiles} tiles, but lists "
            f"{len(page.dataoffsets)} tiles; get a fresh copy of the file."
        )
    before = (depth - 1) // 2
    return [*range(before, 0, -1), 0, *range(before + 1, depth)]


def _fields(text: str, problems: list[str]) -> dict[str, str]:
    try:
        root = markup.root(text)
        scan = root if root.tag == "iScan" else root.find("iScan")
        if scan is None:
            raise ValueError("its XML has no element iScan")
    except ValueError as error:
        problems.append(f"The slide's properties can't be read: {error}.")
        return {}
    return texts((name.rpartition("}")[2], value) for name, value in scan.attrib.items())


def _pyramid(pages: list[TiffPage], path: str, problems: list[str]) -> list[tuple[float, TiffPage]]:
    """Return the magnification and page of each level, finest first."""
    found: dict[float, TiffPage] = {}
    for page in pages:
        if "level=" not in page.description or not page.is_tiled:
            continue
        pairs = dict(word.split("=", 1) for word in page.description.split(" ") if "=" in word)
        magnification = positive_number(pairs.get("mag"))
        if magnification is None or magnification in found:
            problems.append("A level with a missing or repeated magnification is left out.")
        else:
            found[magnification] = page
    if not found:
        tiled = [page for page in pages if page.is_tiled]
        if not tiled:
            raise NotASlideError(f"'{path}' holds no level of a slide; get a fresh copy of it.")
        largest = max(tiled, key=lambda page: page.imagewidth * page.imagelength)
        problems.append("The file marks no image as a level; the largest one is shown.")
        return [(1.0, largest)]
    return sorted(found.items(), reverse=True)


def _background(text: str | None, level: LevelLayout) -> float:
    """Return the scanner's white point, which is the color of areas that it did not scan."""
    most = tiff.background(level)
    white = positive_number(text)
    return round(white) if white is not None and white <= most else most


# Stitching


def _stitched(
    stored: list[LevelLayout], packet: str, fields: dict[str, str], problems: list[str]
) -> list[LevelLayout]:
    """Arrange the tiles of each level as the XML of level 0 describes."""
    base = stored[0]
    same = [
        level
        for level in stored
        if (level.channels, level.dtype, level.grid.tile_width, level.grid.tile_height)
        == (base.channels, base.dtype, base.grid.tile_width, base.grid.tile_height)
    ]
    if len(same) < len(stored):
        problems.append("A level with different channels, tile size or sample type is left out.")
    if not packet:
        return same
    try:
        stitching = _stitching(packet, base, problems)
        if len(stitching.areas) == 1 and fields.get("ScannerModel", "").startswith(BY_PAIRS):
            whole = _by_pairs(base, base, stitching)
            return [whole, *(_lower(level, base, whole, stitching) for level in same[1:])]
        levels = [_by_average(level, base, stitching, level.reduction or 1) for level in same]
        sides = levels[0].width, levels[0].height
        if not 0 < min(sides) <= max(sides) < tiff.LARGEST_SIDE:
            raise ValueError("its scanned areas lie outside any slide")
    except ValueError as error:
        problems.append(f"The slide's tiles are shown side by side, as stored: {error}.")
        return same
    return levels


def _lower(
    level: LevelLayout, base: LevelLayout, whole: LevelLayout, stitching: _Stitching
) -> LevelLayout:
    """Arrange a lower level, which the scanner made from level 0 before or after stitching.

    Unless it was stitched, it is about as large as level 0's tiles side by side.
    """
    steps = level.reduction or 1
    width, height = math.ceil(whole.width / steps), math.ceil(whole.height / steps)
    excess = level.width + level.height - width - height
    if 2 * excess >= (base.width + base.height) / steps - width - height:
        return _by_pairs(level, base, stitching)
    return replace(level, width=min(level.width, width), height=min(level.height, height))


def _stitching(packet: str, base: LevelLayout, problems: list[str]) -> _Stitching:
    root = markup.root(packet)
    infos = root.findall("SlideStitchInfo/ImageInfo") if root.tag == "EncodeInfo" else []
    origins = root.findall("AoiOrigin/*")
    if not infos or len(infos) != len(origins):
        raise ValueError("its XML doesn't give the positions of its scanned areas")
    areas: list[_Area] = []
    joints: list[_Joint] = []
    reasons: list[str] = []
    unused = 0
    for info, origin in zip(infos, origins, strict=True):
        if info.get("AOIScanned", "0").strip() == "0":
            continue
        try:
            area = _area(info, origin, base)
        except ValueError as error:
            reasons.append(str(error))
            continue
        found = [_joint(item, area, base) for item in info.iterfind("TileJointInfo")]
        good = [joint for joint in found if joint is not None]
        unused += len(found) - len(good)
        areas.append(area)
        joints += good
    if reasons:
        problems.append(f"{len(reasons)} scanned area(s) are left out: {reasons[0]}.")
    if unused:
        problems.append(f"{unused} overlap(s) of tiles are inconsistent and are not used.")
    if not areas:
        raise ValueError("its XML has no scanned area")
    return _Stitching(tuple(areas), tuple(joints))


def _area(info: Element, origin: Element, base: LevelLayout) -> _Area:
    grid = base.grid
    tile = (grid.tile_width, grid.tile_height)
    names = ("Width", "Height", "NumCols", "NumRows")
    width, height, *count = (whole_number(info.get(name)) for name in names)
    start = [whole_number(origin.get(name)) for name in ("OriginX", "OriginY")]
    if (width, height) != tile or start[0] % tile[0] or start[1] % tile[1]:
        raise ValueError("its tiles differ in size from the file's tiles")
    first = (start[0] // tile[0], start[1] // tile[1])
    ends = (first[0] + count[0], first[1] + count[1])
    if min(first) < 0 or min(count) < 1:
        raise ValueError("it has no tiles")
    if ends[0] > grid.columns or ends[1] > grid.rows:
        raise ValueError("it extends beyond the tiles of the file")
    x, y = (math.trunc(number(info.get(name))) for name in ("Pos-X", "Pos-Y"))
    return _Area((x, y), first, (count[0], count[1]))


def _joint(item: Element, area: _Area, base: LevelLayout) -> _Joint | None:
    """Read the overlap of two tiles; None if they are not neighbors or a number is wrong."""
    try:
        axis = DIRECTIONS[item.get("Direction", "")]
        tiles = [_tile(whole_number(item.get(name)), area.tiles) for name in ("Tile1", "Tile2")]
        overlap = number(item.get("OverlapX" if axis == 0 else "OverlapY"))
        confidence = whole_number(item.get("Confidence"))
    except (KeyError, ValueError):
        return None
    one, other = tiles
    distance = (abs(other[0] - one[0]), abs(other[1] - one[1]))
    if distance != ((1, 0) if axis == 0 else (0, 1)):
        return None
    size = (base.grid.tile_width, base.grid.tile_height)[axis]
    if not 0 <= overlap < size or not 0 <= confidence <= 1 << 32:
        return None
    return _Joint(axis, max(one[axis], other[axis]), overlap, confidence)


def _tile(tile: int, count: tuple[int, int]) -> tuple[int, int]:
    """Return (column, row) of a tile; numbers run in a serpentine from the lower left tile."""
    if not 1 <= tile <= count[0] * count[1]:
        raise ValueError("the tile does not exist")
    row, column = divmod(tile - 1, count[0])
    if row % 2:
        column = count[0] - 1 - column
    return column, count[1] - 1 - row


def _by_average(
    level: LevelLayout, base: LevelLayout, stitching: _Stitching, reduction: float
) -> LevelLayout:
    """Place all tiles by the mean overlap of all pairs.

    A tile of a lower level shows several tiles of level 0, and each of these parts is placed
    separately.
    """
    sizes = (base.grid.tile_width, base.grid.tile_height)
    steps = [
        size - _mean([joint for joint in stitching.joints if joint.axis == axis])
        for axis, size in enumerate(sizes)
    ]
    heights = [int((area.tiles[1] - 1) * steps[1] + sizes[1]) for area in stitching.areas]
    placed = list(zip(stitching.areas, heights, strict=True))
    top = max(0, *(area.position[1] + height for area, height in placed))
    parts = []
    ends: list[list[int]] = [[], []]
    for area, height in placed:
        position = (area.position[0], top - area.position[1] - height)  # the XML's y points up
        mappings = []
        for axis, limit in enumerate((level.width, level.height)):
            step, size = steps[axis], sizes[axis]
            cells = area.first[axis] + np.arange(area.tiles[axis])
            offset = (position[axis] - area.first[axis] * step) / reduction
            starts = cells * (step / reduction) + offset
            ends[axis].append(math.ceil(starts[-1] + size / reduction))
            split = max(1, int(reduction))
            sources = cells // split * size + cells % split * (size / split)
            mappings.append(_axis_mapping(starts, sources, size / split, limit))
        columns, rows = mappings
        if columns is not None and rows is not None:
            parts.append(Part(level, rows, columns))
    if not parts:
        return level
    width, height = max(ends[0]), max(ends[1])
    return LevelLayout.mosaic(width, height, parts, level.reduction)


def _by_pairs(level: LevelLayout, base: LevelLayout, stitching: _Stitching) -> LevelLayout:
    """Place each row and column of tiles by its mean overlap with the one before it."""
    (area,) = stitching.areas
    steps = level.reduction / base.reduction if level.reduction and base.reduction else 1
    mappings = []
    sizes = (base.grid.tile_width, level.width), (base.grid.tile_height, level.height)
    for axis, (size, limit) in enumerate(sizes):
        joints: list[list[_Joint]] = [[] for _ in range(area.tiles[axis])]
        for joint in stitching.joints:
            if joint.axis == axis:
                joints[joint.cell].append(joint)
        starts = np.cumsum([size - _mean(each) for each in joints]) - size
        cells = area.first[axis] + np.arange(area.tiles[axis])
        found = _axis_mapping(starts / steps, cells * (size / steps), size / steps, limit)
        if found is None:
            raise ValueError("a level lacks all of its tiles")
        mappings.append(found)
    columns, rows = mappings
    part = Part(level, rows, columns)
    return LevelLayout.mosaic(columns.end, rows.end, [part], level.reduction)


def _mean(joints: Sequence[_Joint]) -> float:
    """Return the mean overlap in pixels, weighted by confidence."""
    weight = sum(joint.confidence for joint in joints)
    return sum(joint.confidence * joint.overlap for joint in joints) / weight if weight else 0.0


def _axis_mapping(starts: Array, sources: Array, size: float, limit: int) -> AxisMapping | None:
    """Round positions to whole pixels; parts beyond the stored image are left out.

    Returns None if nothing remains.
    """
    start = np.floor(starts + 0.5).astype(np.int64)
    source = np.floor(sources + 0.5).astype(np.int64)
    inside = source < limit
    start, source = start[inside], source[inside]
    if not start.size:
        return None
    length = min(round(size), limit - int(source[-1]))
    return AxisMapping(start, source, int(start[-1]) + length)
