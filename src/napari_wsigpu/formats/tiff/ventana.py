"""Ventana BIF and TIFF: tiles are a camera's overlapping frames, joined by the file's XML."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from napari_wsigpu.formats import markup
from napari_wsigpu.formats.fields import number, positive_number, texts, whole_number
from napari_wsigpu.formats.tiff import tiff
from napari_wsigpu.model.errors import CorruptSlideError, NotASlideError
from napari_wsigpu.model.layout import LevelLayout, Part, Pieces, Planes, SlideFile, SlideLayout
from napari_wsigpu.model.tags import Tag

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from xml.etree.ElementTree import Element

    from numpy.typing import NDArray
    from tifffile import TiffFile, TiffPage

NAMES = {"Label Image": "macro", "Label_Image": "macro", "Thumbnail": "thumbnail"}
# The axis of a joint (x, y). Which tile is named first differs between scanners.
DIRECTIONS = {"RIGHT": 0, "LEFT": 0, "UP": 1, "DOWN": 1}
# These scanners say of each pair of tiles how far it overlaps.
BY_PAIRS = "VENTANA DP"


class _Area(NamedTuple):
    """A scanned area: its place on the slide, its first tile and its tiles, each (x, y)."""

    place: tuple[int, int]
    first: tuple[int, int]
    tiles: tuple[int, int]


class _Joint(NamedTuple):
    """By how many pixels two tiles overlap."""

    axis: int
    gap: int
    overlap: float
    confidence: int


class _Stitching(NamedTuple):
    """Where the tiles of level 0 lie."""

    areas: tuple[_Area, ...]
    joints: tuple[_Joint, ...]


def probe(file: TiffFile) -> bool:
    """Whether Ventana's software wrote the file, by the XML of its first page."""
    return "<iScan" in tiff.text_tag(file.pages.first, Tag.XML_PACKET)


def parse(file: TiffFile, source: SlideFile, at: Mapping[str, int] = tiff.MIDDLE) -> SlideLayout:
    """Describe a Ventana slide: the focal plane `at` "z", else the one that is to be sharp."""
    pages = tiff.pages(file)
    problems: list[str] = []
    fields = _fields(tiff.text_tag(pages[0], Tag.XML_PACKET), problems)
    found = _pyramid(pages, source.path, problems)
    page = found[0][1]
    layers = _layers(page, source.path)
    z = at.get("z", layers.index(0))
    alike = [each for each in found if each[1].imagedepth == len(layers)]
    if len(alike) < len(found):
        problems.append(f"{len(found) - len(alike)} level(s) with other focal planes are left out.")
    stored = [
        replace(
            tiff.page_level(page, source.path, layer=layers[z]),
            reduction=found[0][0] / magnification,
        )
        for magnification, page in alike
    ]
    levels = _placed(stored, tiff.text_tag(page, Tag.XML_PACKET), fields, problems)
    named = ((NAMES.get(page.description), page) for page in pages)
    layout = tiff.slide_layout(
        source,
        "ventana",
        levels,
        page,
        {**fields, "regions": levels[0].places},
        associated=tiff.associated_images(named, source.path, problems),
        problems=problems,
    )
    stated = positive_number(fields.get("Z-layers")) or 1
    if stated != len(layers):
        said = f"The file says to have {stated:g} focal plane(s), but holds {len(layers)}."
        layout = replace(layout, problems=(*layout.problems, said))
    spacing = positive_number(fields.get("Z-spacing")) if len(layers) > 1 else None
    mpp = positive_number(fields.get("ScanRes"))
    return replace(
        layout,
        hidden_planes=len(layers) - 1,
        planes=Planes(z, size_z=len(layers), z_spacing=spacing),
        background=_background(fields.get("ScanWhitePoint"), levels[0]),
        mpp=None if mpp is None else (mpp, mpp),
        objective=positive_number(fields.get("Magnification")),
        scanner=fields.get("ScannerModel"),
        barcode=fields.get("Barcode2D") or fields.get("Barcode1D"),
    )


def _layers(page: TiffPage, path: str) -> list[int]:
    """Return which layer of a page each focal plane is, from one end of the stack to the other.

    The sharp one comes first in the file, then those on one side of it, then those on the other.
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
            raise ValueError("its XML has no properties of the scan")
    except ValueError as error:
        problems.append(f"The slide's properties can't be shown: {error}.")
        return {}
    return texts((name.rpartition("}")[2], value) for name, value in scan.attrib.items())


def _pyramid(pages: list[TiffPage], path: str, problems: list[str]) -> list[tuple[float, TiffPage]]:
    """Return magnification and page of each level, finest first."""
    found: dict[float, TiffPage] = {}
    for page in pages:
        if "level=" not in page.description or not page.is_tiled:
            continue
        pairs = dict(word.split("=", 1) for word in page.description.split(" ") if "=" in word)
        magnification = positive_number(pairs.get("mag"))
        if magnification is None or magnification in found:
            problems.append("A level without a magnification of its own is left out.")
        else:
            found[magnification] = page
    if not found:
        tiled = [page for page in pages if page.is_tiled]
        if not tiled:
            raise NotASlideError(f"'{path}' holds no level of a slide; get a fresh copy of it.")
        largest = max(tiled, key=lambda page: page.imagewidth * page.imagelength)
        problems.append("The file says of no image that it is a level; the largest one is shown.")
        return [(1.0, largest)]
    return sorted(found.items(), reverse=True)


def _background(text: str | None, level: LevelLayout) -> float:
    """Return the white of the scanner, which it gives to what it did not scan."""
    most = tiff.background(level)
    white = positive_number(text)
    return round(white) if white is not None and white <= most else most


# Where tiles lie


def _placed(
    stored: list[LevelLayout], packet: str, fields: dict[str, str], problems: list[str]
) -> list[LevelLayout]:
    """Lay the tiles of each level where the XML of level 0 says."""
    base = stored[0]
    same = [
        level
        for level in stored
        if (level.channels, level.dtype, level.grid.tile_width, level.grid.tile_height)
        == (base.channels, base.dtype, base.grid.tile_width, base.grid.tile_height)
    ]
    if len(same) < len(stored):
        problems.append("A level of other channels, tiles or sample type is left out.")
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
            raise ValueError("its scanned areas are said to lie where no slide is")
    except ValueError as error:
        problems.append(f"The slide's tiles are shown side by side, as they are stored: {error}.")
        return same
    return levels


def _lower(
    level: LevelLayout, base: LevelLayout, whole: LevelLayout, stitching: _Stitching
) -> LevelLayout:
    """Lay out a lower level, which is as wide as the tiles of level 0 side by side, or stitched."""
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
        raise ValueError("its XML doesn't say where its scanned areas lie")
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
        problems.append(f"{unused} joint(s) of tiles contradict themselves and are not used.")
    if not areas:
        raise ValueError("its XML names no scanned area")
    return _Stitching(tuple(areas), tuple(joints))


def _area(info: Element, origin: Element, base: LevelLayout) -> _Area:
    grid = base.grid
    tile = (grid.tile_width, grid.tile_height)
    names = ("Width", "Height", "NumCols", "NumRows")
    width, height, *count = (whole_number(info.get(name)) for name in names)
    start = [whole_number(origin.get(name)) for name in ("OriginX", "OriginY")]
    if (width, height) != tile or start[0] % tile[0] or start[1] % tile[1]:
        raise ValueError("its tiles are of another size than the file's")
    first = (start[0] // tile[0], start[1] // tile[1])
    ends = (first[0] + count[0], first[1] + count[1])
    if min(first) < 0 or min(count) < 1:
        raise ValueError("it has no tiles")
    if ends[0] > grid.columns or ends[1] > grid.rows:
        raise ValueError("it reaches beyond the file's tiles")
    x, y = (math.trunc(number(info.get(name))) for name in ("Pos-X", "Pos-Y"))
    return _Area((x, y), first, (count[0], count[1]))


def _joint(item: Element, area: _Area, base: LevelLayout) -> _Joint | None:
    """Read by how much two neighbours overlap, or return None if they are none."""
    try:
        axis = DIRECTIONS[item.get("Direction", "")]
        tiles = [_tile(whole_number(item.get(name)), area.tiles) for name in ("Tile1", "Tile2")]
        overlap = number(item.get("OverlapX" if axis == 0 else "OverlapY"))
        confidence = whole_number(item.get("Confidence"))
    except (KeyError, ValueError):
        return None
    one, other = tiles
    apart = (abs(other[0] - one[0]), abs(other[1] - one[1]))
    if apart != ((1, 0) if axis == 0 else (0, 1)):
        return None
    size = (base.grid.tile_width, base.grid.tile_height)[axis]
    if not 0 <= overlap < size or not 0 <= confidence <= 1 << 32:
        return None
    return _Joint(axis, max(one[axis], other[axis]), overlap, confidence)


def _tile(tile: int, count: tuple[int, int]) -> tuple[int, int]:
    """Return (column, row) of a tile; they are counted to and fro from the lower left one."""
    if not 1 <= tile <= count[0] * count[1]:
        raise ValueError("there is no such tile")
    row, column = divmod(tile - 1, count[0])
    if row % 2:
        column = count[0] - 1 - column
    return column, count[1] - 1 - row


def _by_average(
    level: LevelLayout, base: LevelLayout, stitching: _Stitching, reduction: float
) -> LevelLayout:
    """Place all tiles by the mean overlap of all pairs; at lower levels, each part of a tile."""
    sizes = (base.grid.tile_width, base.grid.tile_height)
    steps = [
        size - _mean([joint for joint in stitching.joints if joint.axis == axis])
        for axis, size in enumerate(sizes)
    ]
    heights = [int((area.tiles[1] - 1) * steps[1] + sizes[1]) for area in stitching.areas]
    top = max(
        0, *(area.place[1] + height for area, height in zip(stitching.areas, heights, strict=True))
    )
    parts = []
    ends: list[list[int]] = [[], []]
    for area, height in zip(stitching.areas, heights, strict=True):
        places = (area.place[0], top - area.place[1] - height)
        pieces = []
        for axis, limit in enumerate((level.width, level.height)):
            step, size = steps[axis], sizes[axis]
            cells = area.first[axis] + np.arange(area.tiles[axis])
            offset = (places[axis] - area.first[axis] * step) / reduction
            starts = cells * (step / reduction) + offset
            ends[axis].append(math.ceil(starts[-1] + size / reduction))
            split = max(1, int(reduction))
            sources = cells // split * size + cells % split * (size / split)
            pieces.append(_pieces(starts, sources, size / split, limit))
        columns, rows = pieces
        if columns is not None and rows is not None:
            parts.append(Part(level, rows, columns))
    if not parts:
        return level
    width, height = max(ends[0]), max(ends[1])
    return LevelLayout.mosaic(width, height, parts, level.reduction)


def _by_pairs(level: LevelLayout, base: LevelLayout, stitching: _Stitching) -> LevelLayout:
    """Place each row and column of level 0's tiles by its own overlap with the one before it."""
    (area,) = stitching.areas
    steps = level.reduction / base.reduction if level.reduction and base.reduction else 1
    pieces = []
    for axis, (size, limit) in enumerate(
        [(base.grid.tile_width, level.width), (base.grid.tile_height, level.height)]
    ):
        gaps: list[list[_Joint]] = [[] for _ in range(area.tiles[axis])]
        for joint in stitching.joints:
            if joint.axis == axis:
                gaps[joint.gap].append(joint)
        starts = np.cumsum([size - _mean(joints) for joints in gaps]) - size
        cells = area.first[axis] + np.arange(area.tiles[axis])
        found = _pieces(starts / steps, cells * (size / steps), size / steps, limit)
        if found is None:
            raise ValueError("a level lacks all of its tiles")
        pieces.append(found)
    columns, rows = pieces
    part = Part(level, rows, columns)
    return LevelLayout.mosaic(columns.end, rows.end, [part], level.reduction)


def _mean(joints: Sequence[_Joint]) -> float:
    """Return the mean overlap, weighted by confidence."""
    weight = sum(joint.confidence for joint in joints)
    return sum(joint.confidence * joint.overlap for joint in joints) / weight if weight else 0.0


def _pieces(
    starts: NDArray[np.floating[Any]], sources: NDArray[np.floating[Any]], size: float, limit: int
) -> Pieces | None:
    """Round to whole pixels, and leave out what lies beyond the stored picture."""
    begin = np.floor(starts + 0.5).astype(np.int64)
    source = np.floor(sources + 0.5).astype(np.int64)
    inside = source < limit
    begin, source = begin[inside], source[inside]
    if not begin.size:
        return None
    length = min(round(size), limit - int(source[-1]))
    return Pieces(begin, source, int(begin[-1]) + length)
