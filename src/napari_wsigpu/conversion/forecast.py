"""`Forecast`: the tiles that a conversion will write, and their estimated size."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.codecs.compressions import compression_name
from napari_wsigpu.conversion.coding import encoder
from napari_wsigpu.conversion.conversion_plan import segments_of
from napari_wsigpu.conversion.options import DEFAULT_IN_ZARR
from napari_wsigpu.conversion.zarr_target import chunk_encoder
from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.model.units import byte_size
from napari_wsigpu.reading.average import area_average

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from napari_wsigpu.conversion.conversion_plan import Plan, PlannedLevel
    from napari_wsigpu.conversion.options import Kind, Options
    from napari_wsigpu.model.arrays import Array
    from napari_wsigpu.slide.slide import Slide

SAMPLES = 9  # tiles encoded to estimate the size of a level
FORMATS: dict[Kind, str] = {
    "tiff": "TIFF",
    "ome-tiff": "OME-TIFF",
    "ome-zarr": "OME-Zarr",
    "png": "PNG",
}


@dataclass(frozen=True, slots=True)
class Forecast:
    """The tiles that a conversion will write, and their estimated size.

    Attributes
    ----------
    kind : {"tiff", "ome-tiff", "ome-zarr", "png"}
        The file format.
    width, height, levels, planes : int
        Size of the finest level in pixels, levels per plane, and planes along z and t.
    copied, encoded : dict of str to int
        Number of tiles that are copied and encoded, by compression.
    size : int
        Estimated size of all tiles in bytes: sizes of copied tiles are added up if the source
        states them; all other sizes are extrapolated from samples.
    source_size : int or None
        Size of the source in bytes; None if it is not a single local file.
    """

    kind: Kind
    width: int
    height: int
    levels: int
    planes: int
    copied: dict[str, int]
    encoded: dict[str, int]
    size: int
    source_size: int | None

    def __str__(self) -> str:
        several = f", {self.planes} planes" if self.planes > 1 else ""
        tiles = [f"{count} tiles copied ({name})" for name, count in self.copied.items()]
        tiles += [f"{count} tiles encoded ({name})" for name, count in self.encoded.items()]
        source = "" if self.source_size is None else f" from {byte_size(self.source_size)}"
        return (
            f"{FORMATS[self.kind]} of about {byte_size(_two_digits(self.size))}{source}: "
            f"{self.width} x {self.height} pixels, "
            f"{self.levels} level{'s' if self.levels > 1 else ''}{several}; {', '.join(tiles)}"
        )


def forecast(slide: Slide, plan: Plan, options: Options) -> Forecast:
    """Forecast the result of a plan; a few tiles are encoded to estimate its size."""
    levels = plan.levels[:1] if options.kind == "png" else plan.levels
    copied: dict[str, int] = {}
    encoded: dict[str, int] = {}
    rates: list[float] = []  # bytes per tile of the levels of the first plane
    size = 0.0
    for index, level in enumerate(levels):
        tiles = np.argwhere(~plan.blank_tiles(index))
        counts, name = copied if level.copied else encoded, _compression(level, options)
        counts[name] = counts.get(name, 0) + len(tiles)
        if level.copied:
            size += _copied_size(slide, level, tiles)
        if index < plan.levels_per_plane:
            # Averages of averages compress about as well as the averages themselves.
            again = level.halved and levels[index - 1].halved
            rates.append(rates[-1] if again else _tile_rate(slide, plan, index, tiles, options))
        if not level.copied:
            size += rates[index % plan.levels_per_plane] * len(tiles)
    path = Path(slide.path)
    return Forecast(
        options.kind,
        levels[0].width,
        levels[0].height,
        max(len(levels) // len(plan.planes), 1),
        len(plan.planes),
        copied,
        encoded,
        round(size),
        path.stat().st_size if path.is_file() else None,
    )


def _tile_rate(
    slide: Slide, plan: Plan, index: int, tiles: NDArray[np.intp], options: Options
) -> float:
    """Return the mean encoded size of a sample of a level's tiles; 0 if the level is copied."""
    level = plan.levels[index]
    if level.copied or not len(tiles):
        return 0.0
    factor = 2 if level.halved else 1
    source = plan.levels[index - 1] if level.halved else level
    array = slide.plane(level.plane.z, level.plane.t).level_array(source.source.number)
    sizes = []
    for row, column in _samples(tiles).tolist():
        top, bottom = _span(row, level.tile_height, factor, source.window.top, source.height)
        left, right = _span(column, level.tile_width, factor, source.window.left, source.width)
        try:
            pixels = array[top:bottom, left:right]
        except SlideError:
            continue  # the conversion itself reports the tile
        if level.halved:
            pixels = area_average(pixels, 2, 2)
        missing = level.tile_height - pixels.shape[0], level.tile_width - pixels.shape[1]
        pixels = np.pad(pixels, ((0, missing[0]), (0, missing[1]), (0, 0)), mode="edge")
        sizes.append(_encoded_size(level, pixels, options))
    return sum(sizes) / max(len(sizes), 1)


def _copied_size(slide: Slide, level: PlannedLevel, tiles: NDArray[np.intp]) -> float:
    """Return the size of the tiles of a copied level, extrapolated if the source has no sizes."""
    is_exact = slide.layout.has_tile_sizes
    picked = tiles if is_exact else _samples(tiles)
    ranges = segments_of(level, [(row, column) for row, column in picked.tolist()])
    if is_exact:
        return float(ranges[1].sum())
    offsets, counts = ranges.reshape(2, -1).tolist()
    plane = slide.plane(level.plane.z, level.plane.t)
    found = plane.read_bytes(list(zip(offsets, counts, strict=True)))
    return sum(map(len, found)) / max(len(picked), 1) * len(tiles)


def _samples(tiles: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return at most `SAMPLES` tiles, evenly spread over all of them."""
    picked = np.linspace(0, len(tiles) - 1, min(SAMPLES, len(tiles))).round().astype(int)
    return np.take(tiles, picked, axis=0)


def _span(tile: int, side: int, factor: int, start: int, length: int) -> tuple[int, int]:
    """Return the (start, end) of the source pixels of a row or column of tiles."""
    first = tile * side * factor
    return start + first, start + min(first + side * factor, length)


def _encoded_size(level: PlannedLevel, pixels: Array, options: Options) -> int:
    if level.coding is None:
        encode = chunk_encoder(options.compression or DEFAULT_IN_ZARR)
        return len(encode(np.ascontiguousarray(np.moveaxis(pixels, 2, 0)).tobytes()))
    encode_tile = encoder(level.coding, pixels.dtype)
    parts = np.split(pixels, level.planes, axis=2)
    return sum(len(encode_tile(np.ascontiguousarray(part))) for part in parts)


def _compression(level: PlannedLevel, options: Options) -> str:
    if level.coding is None:
        return options.compression or DEFAULT_IN_ZARR
    return compression_name(level.coding.compression)


def _two_digits(count: int) -> int:
    """Round to two significant digits; an estimate is no more precise than that."""
    return int(float(f"{count:.2g}"))
