"""Trestle MedScan: every page is a level, whose tiles may overlap."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.formats.fields import LONGEST_TEXT, gray, pairs, positive_number
from napari_wsigpu.formats.tiff import tiff
from napari_wsigpu.model.layout import AxisMapping, LevelLayout, Part, SlideFile, SlideLayout
from napari_wsigpu.model.tags import Tag

if TYPE_CHECKING:
    from tifffile import TiffFile, TiffPage


def probe(file: TiffFile) -> bool:
    """Whether MedScan wrote the file, and all of its pages are tiled."""
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
    found = pairs(tiff.text_tag(first, Tag.DESCRIPTION).split(";"))
    fields = {key[:LONGEST_TEXT]: value[:LONGEST_TEXT] for key, value in found.items()}
    problems: list[str] = []
    overlaps = _overlaps(fields.get("OverlapsXY", ""), problems)
    overlaps += [(0, 0)] * (len(pages) - len(overlaps))
    levels: list[LevelLayout] = []
    for page, overlap in zip(pages, overlaps, strict=False):
        level = _level(tiff.page_level(page, source.path), overlap, problems)
        finest = levels[0] if levels else level
        if (level.channels, level.dtype) != (finest.channels, finest.dtype):
            problems.append("A level with different channels or sample type is left out.")
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


def _overlaps(text: str, problems: list[str]) -> list[tuple[int, int]]:
    """Return the overlap of the tiles of each level in pixels, (x, y)."""
    words = text.split()
    numbers = [int(word) if word.isascii() and word.isdigit() else -1 for word in words]
    if -1 in numbers:
        problems.append("An overlap of the slide's tiles is not a number; 0 is used.")
    numbers = [max(0, value) for value in numbers]
    return list(zip(numbers[::2], numbers[1::2], strict=False))


def _level(stored: LevelLayout, overlap: tuple[int, int], problems: list[str]) -> LevelLayout:
    """Arrange overlapping tiles, each of which covers the edge of its left and upper neighbors."""
    grid = stored.grid
    if overlap == (0, 0):
        return stored
    if overlap[0] >= grid.tile_width or overlap[1] >= grid.tile_height:
        problems.append(
            "The overlap of a level's tiles is larger than the tiles; they are shown side by side."
        )
        return stored
    columns = _axis_mapping(stored.width, grid.tile_width, overlap[0])
    rows = _axis_mapping(stored.height, grid.tile_height, overlap[1])
    return LevelLayout.mosaic(columns.end, rows.end, [Part(stored, rows, columns)])


def _axis_mapping(length: int, tile: int, overlap: int) -> AxisMapping:
    index = np.arange(math.ceil(length / tile), dtype=np.int64)
    return AxisMapping(index * (tile - overlap), index * tile, length - (len(index) - 1) * overlap)


def _mpp(page: TiffPage) -> tuple[float, float] | None:
    """Read the resolution tags, in which MedScan writes micrometers per pixel."""
    x, y = (tiff.number_tag(page, code) or 0 for code in (Tag.X_RESOLUTION, Tag.Y_RESOLUTION))
    return (x, y) if min(x, y) > 0 else None


def _background(text: str | None, level: LevelLayout) -> float:
    """Return the brightness of a hexadecimal color; the default background if it is not gray."""
    most = tiff.background(level)
    try:
        color = int((text or "")[:16], 16)
    except ValueError:
        return most
    return gray(color, most) if most == 255 else most
