"""Trestle MedScan: every page is a level, whose tiles may overlap."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.formats.fields import LONGEST_TEXT, positive_number
from napari_wsigpu.formats.tiff import tiff
from napari_wsigpu.model.layout import LevelLayout, Part, Pieces, SlideFile, SlideLayout
from napari_wsigpu.model.tags import Tag

if TYPE_CHECKING:
    from tifffile import TiffFile, TiffPage


def probe(file: TiffFile) -> bool:
    """Whether MedScan wrote the file, all of whose pages are tiled."""
    first = file.pages.first
    return (
        first.software.startswith("MedScan")
        and bool(tiff.text_tag(first, Tag.DESCRIPTION))
        and all(page.aspage().is_tiled for page in file.pages)
    )


def parse(file: TiffFile, source: SlideFile) -> SlideLayout:
    """Describe a Trestle slide."""
    pages = tiff.pages(file)
    first = pages[0]
    fields = parse_description(tiff.text_tag(first, Tag.DESCRIPTION))
    problems: list[str] = []
    overlaps = _overlaps(fields.get("OverlapsXY", ""), problems)
    overlaps += [(0, 0)] * (len(pages) - len(overlaps))
    levels: list[LevelLayout] = []
    for page, overlap in zip(pages, overlaps, strict=False):
        level = _level(tiff.page_level(page, source.path), overlap, problems)
        finest = levels[0] if levels else level
        if (level.channels, level.dtype) != (finest.channels, finest.dtype):
            problems.append("A level of other channels or another sample type is left out.")
        else:
            levels.append(level)
    levels.sort(key=lambda level: -level.width * level.height)
    layout = tiff.slide_layout(source, "trestle", levels, first, fields, problems=problems)
    return replace(
        layout,
        background=_background(fields.get("Background Color"), levels[0]),
        mpp=_mpp(first),
        objective=positive_number(fields.get("Objective Power")),
        scanner=layout.metadata["tiff"].get("Model"),
    )


def parse_description(description: str) -> dict[str, str]:
    """Return each ``key=value`` of an ImageDescription; the last of equal keys counts."""
    pairs = (part.split("=", 1) for part in description.split(";") if "=" in part)
    return {key.strip()[:LONGEST_TEXT]: value.strip()[:LONGEST_TEXT] for key, value in pairs}


def _overlaps(text: str, problems: list[str]) -> list[tuple[int, int]]:
    """Return by how many pixels the tiles of each level overlap, (x, y)."""
    words = text.split()
    numbers = [int(word) if word.isascii() and word.isdigit() else -1 for word in words]
    if -1 in numbers:
        problems.append("An overlap of the slide's tiles is no number; it is taken as 0.")
    numbers = [max(0, value) for value in numbers]
    return list(zip(numbers[::2], numbers[1::2], strict=False))


def _level(stored: LevelLayout, overlap: tuple[int, int], problems: list[str]) -> LevelLayout:
    """Let each tile cover the edge of those to the left of and above it."""
    grid = stored.grid
    if overlap == (0, 0):
        return stored
    if overlap[0] >= grid.tile_width or overlap[1] >= grid.tile_height:
        problems.append(
            "The tiles of a level are said to overlap by more than their size; they are shown "
            "side by side."
        )
        return stored
    columns = _pieces(stored.width, grid.tile_width, overlap[0])
    rows = _pieces(stored.height, grid.tile_height, overlap[1])
    return LevelLayout.mosaic(columns.end, rows.end, [Part(stored, rows, columns)])


def _pieces(length: int, tile: int, overlap: int) -> Pieces:
    index = np.arange(math.ceil(length / tile), dtype=np.int64)
    return Pieces(index * (tile - overlap), index * tile, length - (len(index) - 1) * overlap)


def _mpp(page: TiffPage) -> tuple[float, float] | None:
    """Read the resolution tags, which hold micrometres a pixel here."""
    x, y = (tiff.number_tag(page, code) or 0 for code in (Tag.X_RESOLUTION, Tag.Y_RESOLUTION))
    return (x, y) if min(x, y) > 0 else None


def _background(text: str | None, level: LevelLayout) -> float:
    """Return the brightness of a colour given as hexadecimal digits, if it is a gray one."""
    most = tiff.background(level)
    try:
        color = int((text or "")[:16], 16)
    except ValueError:
        return most
    red, green, blue = (color >> shift & 0xFF for shift in (16, 8, 0))
    return red if red == green == blue and most == 255 else most
