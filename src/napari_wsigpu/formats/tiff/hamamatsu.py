"""Hamamatsu NDPI: each level is one large JPEG, which its restart markers divide into tiles.

A restart interval (ITU-T T.81, section E.2.4) can be decoded without the intervals before it. The
file lists the position of each restart marker.
"""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
from tifffile.tifffile import TIFF, jpeg_shape

from napari_wsigpu.formats.fields import MOST_FIELDS, even_step
from napari_wsigpu.formats.tiff import claims, tiff
from napari_wsigpu.model.errors import CorruptSlideError
from napari_wsigpu.model.layout import Planes, TileGrid, computed_level
from napari_wsigpu.model.tags import COMPRESSION, DATATYPE, Tag

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import IO

    from tifffile import TiffFile, TiffPage, TiffTag

    from napari_wsigpu.formats.fields import Metadata
    from napari_wsigpu.model.arrays import Integers
    from napari_wsigpu.model.layout import LevelLayout, SlideFile, SlideLayout

FORMAT, SOURCE_LENS, X_OFFSET, Y_OFFSET, FOCAL_PLANE = 65420, 65421, 65422, 65423, 65424
REFERENCE, FLUORESCENCE, PROPERTIES, BARCODE = 65427, 65434, 65449, 65468
LITTLE_ENDIAN = b"II*\0"
HEADER, ENTRY = struct.Struct("<4sQ"), struct.Struct("<H10x")
# Position of the value or offset in a directory entry, and the largest size of a value in TIFF.
VALUE, SHORTEST = 8, 4
MACRO = -1.0
NANOMETER = 1e-3  # the unit of focal plane positions, in micrometers
# Tags that appear under another name or in the TIFF section, or that mean nothing to users.
OMITTED_TAGS = frozenset(
    (
        "Make", "Model", "Software", "Magnification", "XOffsetFromSlideCenter",
        "YOffsetFromSlideCenter", "SlideLabel", "Comments", "McuStarts",
    )
)  # fmt: skip
TILE_PIXELS = 512 * 256
SCALES = (2, 4, 8)
JPEG_HEAD = 1 << 16


def is_ndpi(file: IO[bytes], size: int) -> bool:
    """Whether a file of `size` bytes is NDPI, judging by a private tag in its first directory.

    NDPI has the header of a classic TIFF, but the offset in it has 64 bits instead of 32.
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
    """Whether Hamamatsu's software wrote the file, judging by its private tag."""
    return FORMAT in file.pages.first.tags


def parse(
    file: TiffFile, source: SlideFile, at: Mapping[str, int] = tiff.DEFAULT_PLANE
) -> SlideLayout:
    """Describe a Hamamatsu slide at the focal plane `at` "z"; by default, the one nearest to 0."""
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
    incomplete = sum(_focal_plane(page) not in focal for page in in_pyramid)
    if incomplete:
        problems.append(f"{incomplete} level(s) of focal planes without level 0 are left out.")
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
        levels=with_scaled(stored),
        background=0 if first.tags.valueof(FLUORESCENCE) else layout.background,
        objective=lens if lens > 0 else None,
        other_planes=len(focal) - 1,
        planes=Planes(z, size_z=len(focal), z_spacing=even_step(focal, NANOMETER)),
        barcode=properties.get("Barcode") or properties.get("Reference"),
    )


def _number(page: TiffPage, code: int) -> float:
    """Return a tag's number; 0 if it is missing or not finite."""
    return tiff.number_tag(page, code) or 0


def _text(page: TiffPage, code: int) -> str:
    """Return the text of an ASCII tag up to the first NUL; tifffile would strip white space."""
    tag = page.tags.get(code)
    if tag is None or tag.dtype != DATATYPE.ASCII:
        return ""
    file = page.parent.filehandle
    start = tag.valueoffset if tag.count > SHORTEST else _offset(page, tag)
    text = b""
    if HEADER.size <= start <= file.size - tag.count:
        file.seek(start)
        text = file.read(tag.count)
    if tag.count <= SHORTEST and not text.endswith(b"\0"):
        file.seek(tag.offset + VALUE)
        text = file.read(tag.count)
    return text.partition(b"\0")[0].decode("utf-8", "replace")


def _offset(page: TiffPage, tag: TiffTag) -> int:
    """Return the value field of a tag as an offset, whose upper half follows the directory.

    NDPI stores even the shortest strings outside the directory. Some programs store them in this
    field, as TIFF does.
    """
    file = page.parent.filehandle
    file.seek(tag.offset + VALUE)
    low = file.read(4)
    file.seek(page.offset)
    start, size = page.offset + 2, ENTRY.size
    count = int.from_bytes(file.read(2), "little")
    file.seek(start + count * size + 8 + (tag.offset - start) // size * 4)
    return int.from_bytes(low + file.read(4), "little")


def _focal_plane(page: TiffPage) -> float:
    return _number(page, FOCAL_PLANE)


def _level(page: TiffPage, path: str, problems: list[str]) -> LevelLayout:
    """Describe a page as tiles of several restart intervals, or as one tile if it has none."""
    if page.jpegheader is None:
        return _plain_level(page, path)
    columns = math.ceil(page.imagewidth / page.tilewidth)
    rows = math.ceil(page.imagelength / page.tilelength)
    lengths = page.databytecounts
    excess = columns * page.tilewidth - page.imagewidth
    if len(lengths) != rows * columns or min(lengths) <= 0 or excess >= page.tilelength:
        problems.append(
            f"The restart markers of the level of {page.imagewidth} x {page.imagelength} pixels "
            "contradict its size, so it is decoded as a whole."
        )
        _forget_intervals(page)
        return _plain_level(page, path)
    level = tiff.page_level(page, path)
    return replace(level, grid=joined(level.grid))


def _forget_intervals(page: TiffPage) -> None:
    """Undo tifffile's division of the page into restart intervals: its tags declare one strip."""
    page.jpegheader = None
    page.tilewidth = page.tilelength = 0
    page.dataoffsets = page.tags.valueof(Tag.STRIP_OFFSETS)
    page.databytecounts = page.tags.valueof(Tag.STRIP_BYTE_COUNTS)


def _plain_level(page: TiffPage, path: str) -> LevelLayout:
    """Describe a page of one JPEG by the size in its header; tags of small levels may be wrong."""
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


def joined(grid: TileGrid) -> TileGrid:
    """Group vertically adjacent restart intervals into tiles of about `TILE_PIXELS` pixels."""
    count = min(max(1, TILE_PIXELS // (grid.tile_width * grid.tile_height)), grid.rows)

    # The intervals of a tile become its planes, as `Encoding.jpeg_header` requires.
    def regrouped(values: Integers) -> Integers:
        padded = np.pad(values[0], ((0, -grid.rows % count), (0, 0)))
        return padded.reshape(-1, count, grid.columns).swapaxes(0, 1)

    return TileGrid(
        grid.tile_height * count,
        grid.tile_width,
        regrouped(grid.offsets),
        regrouped(grid.byte_counts),
    )


def with_scaled(stored: list[LevelLayout]) -> tuple[LevelLayout, ...]:
    """Add the levels that OpenSlide gets by decoding JPEGs at 1/2, 1/4 and 1/8 of their size.

    A level that can't be decoded at a smaller scale is averaged from the next finer one, if the
    sizes divide evenly.
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
    """Describe the level that the decoder makes from another at 1/`scale` of its size."""
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


def _properties(page: TiffPage) -> Metadata:
    """Return the values of the tags, under OpenSlide's names where it has them."""
    found: Metadata = {}
    for name, code in (
        ("SourceLens", SOURCE_LENS),
        ("XOffsetFromSlideCentre", X_OFFSET),
        ("YOffsetFromSlideCentre", Y_OFFSET),
    ):
        if code in page.tags:
            found[name] = f"{_number(page, code):.17g}"
    for name, code in (("Reference", REFERENCE), ("Barcode", BARCODE)):
        if text := _text(page, code):
            found[name] = text
    for record in _text(page, PROPERTIES).split("\r\n")[:MOST_FIELDS]:
        key, _, value = record.partition("=")
        if key and value:
            found[key] = value
    for name, value in (page.ndpi_tags or {}).items():
        number = isinstance(value, int | float) and math.isfinite(value)
        stated = value if number else _text(page, TIFF.NDPI_TAGS.get(name, 0)).strip()
        if name not in OMITTED_TAGS and (number or stated):
            found.setdefault(name, stated)
    return found
