"""Hamamatsu NDPI: each level is one large JPEG, cut into tiles at its restart markers."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from tifffile.tifffile import jpeg_shape

from napari_wsigpu.formats.fields import MOST_FIELDS, even_step
from napari_wsigpu.formats.tiff import claims, tiff
from napari_wsigpu.model.errors import CorruptSlideError
from napari_wsigpu.model.layout import (
    LevelLayout,
    Planes,
    SlideFile,
    SlideLayout,
    TileGrid,
    computed_level,
)
from napari_wsigpu.model.tags import COMPRESSION, DATATYPE, Tag

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import IO

    from numpy.typing import NDArray
    from tifffile import TiffFile, TiffPage

FORMAT, SOURCE_LENS, X_OFFSET, Y_OFFSET, FOCAL_PLANE = 65420, 65421, 65422, 65423, 65424
REFERENCE, FLUORESCENCE, PROPERTIES = 65427, 65434, 65449
LITTLE_ENDIAN = b"II*\0"
HEADER, ENTRY = struct.Struct("<4sQ"), struct.Struct("<H10x")
MACRO = -1.0
NANOMETRES = 1e-3  # of a focal plane's position, in micrometres
# Named otherwise by OpenSlide, in the TIFF part, or of no use to people.
KNOWN_ELSEWHERE = frozenset(
    (
        "Make", "Model", "Software", "Magnification", "XOffsetFromSlideCenter",
        "YOffsetFromSlideCenter", "SlideLabel", "Comments", "McuStarts",
    )
)  # fmt: skip
TILE_PIXELS = 512 * 256
SCALES = (2, 4, 8)
JPEG_HEAD = 1 << 16


def begins(file: IO[bytes], size: int) -> bool:
    """Whether a file of `size` bytes has offsets of 64 bits as Hamamatsu's, by its first directory.

    Its header is that of a TIFF with offsets of 32 bits, but four more bytes belong to it.
    """
    file.seek(0)
    head = file.read(HEADER.size).ljust(HEADER.size, b"\0")
    magic, offset = HEADER.unpack(head)
    if magic != LITTLE_ENDIAN or offset >= size:
        return False
    file.seek(offset)
    count = min(int.from_bytes(file.read(2), "little"), claims.MOST_TAGS)
    entries = file.read(ENTRY.size * count)
    whole = len(entries) // ENTRY.size * ENTRY.size
    return FORMAT in chain.from_iterable(ENTRY.iter_unpack(entries[:whole]))


def probe(file: TiffFile) -> bool:
    """Whether Hamamatsu's software wrote the file, by a tag that only it writes."""
    return FORMAT in file.pages.first.tags


def parse(file: TiffFile, source: SlideFile, at: Mapping[str, int] = tiff.MIDDLE) -> SlideLayout:
    """Describe a Hamamatsu slide: the focal plane `at` "z", else the central one."""
    path, pages = source.path, tiff.pages(file)
    problems: list[str] = []
    in_pyramid = [page for page in pages if _number(page, SOURCE_LENS) > 0]
    if not in_pyramid:
        raise CorruptSlideError(
            f"'{path}' is a Hamamatsu slide without a level; get a fresh copy of it."
        )
    full = max(page.imagewidth for page in in_pyramid)
    focal = sorted({_focal_plane(page) for page in in_pyramid if page.imagewidth == full})
    z = at.get("z", focal.index(min(focal, key=abs)))
    alone = sum(_focal_plane(page) not in focal for page in in_pyramid)
    if alone:
        problems.append(f"{alone} level(s) of focal planes that lack level 0 are left out.")
    stored: list[LevelLayout] = []
    for page in in_pyramid:
        if _focal_plane(page) == focal[z] and all(page.imagewidth < item.width for item in stored):
            stored.append(_level(page, path, problems))
    first = pages[0]
    lens = _number(first, SOURCE_LENS)
    properties = _properties(first)
    named = (("macro", page) for page in pages if _number(page, SOURCE_LENS) == MACRO)
    layout = tiff.slide_layout(
        source,
        "hamamatsu",
        stored,
        first,
        properties,
        associated=tiff.associated_images(named, path, problems),
        problems=problems,
    )
    return replace(
        layout,
        levels=_with_scaled(stored),
        background=0 if first.tags.valueof(FLUORESCENCE) else layout.background,
        objective=lens if lens > 0 else None,
        hidden_planes=len(focal) - 1,
        planes=Planes(z, size_z=len(focal), z_spacing=even_step(focal, NANOMETRES)),
        barcode=properties.get("Reference"),
    )


def _number(page: TiffPage, code: int) -> float:
    """Return a tag's number; 0 unless it is there and finite."""
    return tiff.number_tag(page, code) or 0


def _text(page: TiffPage, code: int) -> str:
    """Return a tag's text with all its white space, up to the first zero."""
    tag = page.tags.get(code)
    if tag is None or tag.dtype != DATATYPE.ASCII:
        return ""
    file = page.parent.filehandle
    file.seek(tag.valueoffset)
    return file.read(tag.count).partition(b"\0")[0].decode("utf-8", "replace")


def _focal_plane(page: TiffPage) -> float:
    return _number(page, FOCAL_PLANE)


def _level(page: TiffPage, path: str, problems: list[str]) -> LevelLayout:
    """Describe a page, with tiles of many restart intervals where it has them."""
    if page.jpegheader is None:
        return _plain_level(page, path)
    columns = math.ceil(page.imagewidth / page.tilewidth)
    rows = math.ceil(page.imagelength / page.tilelength)
    lengths = page.databytecounts
    spill = columns * page.tilewidth - page.imagewidth
    if len(lengths) != rows * columns or min(lengths) <= 0 or spill >= page.tilelength:
        problems.append(
            f"The places of the restart markers of the level of {page.imagewidth} x "
            f"{page.imagelength} pixels contradict its size, so it is decoded as a whole."
        )
        _forget_intervals(page)
        return _plain_level(page, path)
    level = tiff.page_level(page, path)
    return replace(level, grid=_joined(level.grid))


def _forget_intervals(page: TiffPage) -> None:
    """Have the page be the one strip that its tags say."""
    page.jpegheader = None
    page.tilewidth = page.tilelength = 0
    page.dataoffsets = page.tags.valueof(Tag.STRIP_OFFSETS)
    page.databytecounts = page.tags.valueof(Tag.STRIP_BYTE_COUNTS)


def _plain_level(page: TiffPage, path: str) -> LevelLayout:
    """Describe a page that is one JPEG, whose own size counts: small levels' tags may be wrong."""
    level = tiff.page_level(page, path)
    if page.compression != COMPRESSION.JPEG or level.grid.offsets.size != 1:
        return level
    file = page.parent.filehandle
    file.seek(int(level.grid.offsets[0, 0, 0]))
    head = file.read(min(JPEG_HEAD, int(level.grid.byte_counts[0, 0, 0])))
    try:
        _, height, width, _ = jpeg_shape(head)
    except (ValueError, struct.error):
        return level
    if not (width and height):
        return level
    grid = replace(level.grid, tile_height=height, tile_width=width)
    level = replace(level, width=width, height=height, grid=grid)
    tiff.check_tile_size(level, path)
    return level


def _joined(grid: TileGrid) -> TileGrid:
    """Make tiles of handy size of restart intervals that lie one below the other."""
    count = min(max(1, TILE_PIXELS // (grid.tile_width * grid.tile_height)), grid.rows)

    def regrouped(values: NDArray[np.int64]) -> NDArray[np.int64]:
        padded = np.pad(values[0], ((0, -grid.rows % count), (0, 0)))
        return padded.reshape(-1, count, grid.columns).swapaxes(0, 1)

    return TileGrid(
        grid.tile_height * count,
        grid.tile_width,
        regrouped(grid.offsets),
        regrouped(grid.byte_counts),
    )


def _with_scaled(stored: list[LevelLayout]) -> tuple[LevelLayout, ...]:
    """Add the levels that a JPEG decoder's smaller scales make, as OpenSlide counts them.

    Where a level is one large JPEG, they are averages of the next finer level instead, and those
    are left out that whole pixels of it don't average to.
    """
    found: dict[int, tuple[LevelLayout, int]] = {}
    for level in stored:
        found[level.width] = level, 1
        grid = level.grid
        interval_height = grid.tile_height // grid.planes
        for scale in SCALES:
            if grid.tile_width % scale == interval_height % scale == 0:
                found[level.width // scale] = level, scale
    held = {level.width: level for level in stored}
    levels: list[LevelLayout] = []
    for width in sorted(found, reverse=True):
        level, scale = found[width]
        height = level.height // scale
        if width in held:
            levels.append(held[width])
        elif width and height and _can_be_scaled(level):
            levels.append(_scaled(level, scale))
        elif width and height:
            finer = levels[-1]
            if abs(finer.width / round(finer.width / width) - width) <= 1:
                levels.append(computed_level(finer, width, height))
    return tuple(levels)


def _can_be_scaled(level: LevelLayout) -> bool:
    encoding = level.encoding
    return encoding.jpeg_header is not None and encoding.jpeg_color in ("ycbcr", "gray")


def _scaled(level: LevelLayout, scale: int) -> LevelLayout:
    """Describe a level as its decoder makes it smaller."""
    width, height, grid = level.width // scale, level.height // scale, level.grid
    tile_height, tile_width = grid.tile_height // scale, grid.tile_width // scale
    needed = np.s_[:, : math.ceil(height / tile_height), : math.ceil(width / tile_width)]
    return replace(
        level,
        width=width,
        height=height,
        encoding=replace(level.encoding, jpeg_scale=scale),
        grid=TileGrid(tile_height, tile_width, grid.offsets[needed], grid.byte_counts[needed]),
    )


def _properties(page: TiffPage) -> dict[str, Any]:
    """Return what the tags say, under OpenSlide's names where it has one."""
    found: dict[str, Any] = {}
    for name, code in (
        ("SourceLens", SOURCE_LENS),
        ("XOffsetFromSlideCentre", X_OFFSET),
        ("YOffsetFromSlideCentre", Y_OFFSET),
    ):
        if code in page.tags:
            found[name] = f"{_number(page, code):.17g}"
    reference = _text(page, REFERENCE)
    if reference:
        found["Reference"] = reference
    for record in _text(page, PROPERTIES).split("\r\n")[:MOST_FIELDS]:
        key, _, value = record.partition("=")
        if key and value:
            found[key] = value
    for name, value in (page.ndpi_tags or {}).items():
        number = isinstance(value, int | float) and math.isfinite(value)
        if name not in KNOWN_ELSEWHERE and (number or (isinstance(value, str) and value)):
            found.setdefault(name, value)
    return found
