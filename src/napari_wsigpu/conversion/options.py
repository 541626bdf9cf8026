"""What somebody asks of a conversion, checked."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from napari_wsigpu.codecs.color import wants_srgb
from napari_wsigpu.model.errors import ConversionError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from napari_wsigpu.codecs.color import Color

Kind = Literal["tiff", "ome-tiff", "ome-zarr", "png"]
Compression = Literal["raw", "jpeg", "deflate", "zstd", "lz4"]
Region = tuple[int, int, int, int]
Outline = tuple[tuple[tuple[float, float], ...], ...]

COMPRESSIONS: dict[Kind, tuple[str, ...]] = {
    "tiff": ("raw", "jpeg", "deflate", "zstd"),
    "ome-tiff": ("raw", "jpeg", "deflate", "zstd"),
    "ome-zarr": ("raw", "zstd", "lz4"),
    "png": ("deflate",),
}
DEFAULT_QUALITY = 90
TILE_UNIT, LARGEST_TILE = 16, 4096
BOUNDS = {
    "quality": (1, 100),
    "levels": (1, 64),
    "level": (0, 1 << 16),
    "tile_size": (TILE_UNIT, LARGEST_TILE),
    "shard": (1, 64),
    "z": (0, 1 << 31),
    "t": (0, 1 << 31),
}


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `convert` that decide what is written; see there."""

    kind: Kind
    compression: Compression | None = None
    tile_size: int | None = None
    levels: int | None = None
    region: Region | None = None
    level: int = 0
    quality: int | None = None
    private: bool = False
    shard: int | None = None
    color: Color = "stored"
    outline: Outline | None = None
    z: int | None = None
    t: int | None = None

    def __post_init__(self) -> None:
        allowed = COMPRESSIONS[self.kind]
        if self.compression is not None and self.compression not in allowed:
            names = {"tiff": "TIFF", "ome-tiff": "OME-TIFF", "ome-zarr": "OME-Zarr", "png": "PNG"}
            raise ConversionError(
                f"{names[self.kind]} is not written with the compression {self.compression!r}; "
                f"use {' or '.join(', '.join(allowed).rsplit(', ', 1))}."
            )
        for name, (least, most) in BOUNDS.items():
            number = checked_number(name, getattr(self, name), least, most)
            object.__setattr__(self, name, number)
        if self.tile_size is not None and self.tile_size % TILE_UNIT:
            raise ConversionError(
                f"tile_size is {self.tile_size}; it has to be a multiple of {TILE_UNIT}."
            )
        if self.shard is not None and self.kind != "ome-zarr":
            raise ConversionError("Shards are for OME-Zarr; give the target a name in '.zarr'.")
        if self.kind == "png" and (self.tile_size, self.levels, self.quality) != (None,) * 3:
            raise ConversionError("A PNG file has no tiles, levels or quality; leave these out.")
        if self.quality is not None and self.compression != "jpeg":
            raise ConversionError(
                "A quality is of JPEG only; choose the compression 'jpeg', which TIFF and OME-TIFF "
                "can have, or give no quality."
            )
        object.__setattr__(self, "private", bool(self.private))
        wants_srgb(self.color)
        if self.region is not None:
            object.__setattr__(self, "region", _checked_region(self.region))
        if self.outline is not None:
            object.__setattr__(self, "outline", _checked_outline(self.outline))


def kind_of(target: Path) -> Kind:
    """Tell by its name what a target shall be.

    Raises
    ------
    ConversionError
        If the name ends in none of those that are known.
    """
    name = target.name.lower()
    if name.endswith((".ome.tif", ".ome.tiff")):
        return "ome-tiff"
    if name.endswith((".tif", ".tiff")):
        return "tiff"
    if name.endswith(".zarr"):
        return "ome-zarr"
    if name.endswith(".png"):
        return "png"
    raise ConversionError(
        f"What '{target.name}' shall be can't be told from its name; "
        "end it in .tif, .tiff, .ome.tif, .zarr or .png."
    )


def checked_number(name: str, value: int | None, least: int, most: int) -> int | None:
    """Return an option as Python's own number; refuse what is no whole one within bounds."""
    if value is None:
        return None
    try:
        number = operator.index(value)
        if not isinstance(value, bool) and least <= number <= most:
            return number
    except TypeError:
        pass
    raise ConversionError(
        f"{name} is {value!r}; it has to be a whole number from {least} to {most}."
    )


def _checked_outline(outline: Sequence[Any]) -> Outline:
    """Return rings in Python's own numbers."""
    try:
        rings = [np.asarray(ring, np.float64) for ring in outline]
    except (TypeError, ValueError):
        rings = []
    if not rings or any(
        ring.ndim != 2 or ring.shape[1] != 2 or len(ring) < 3 or not np.isfinite(ring).all()
        for ring in rings
    ):
        raise ConversionError(
            "The outline is no sequence of rings; give (x, y) of three corners or more for each."
        )
    return tuple(tuple((x, y) for x, y in ring.tolist()) for ring in rings)


def _checked_region(region: Region) -> Region:
    """Return a region in Python's own whole numbers."""
    try:
        x, y, width, height = (operator.index(value) for value in region)
    except (TypeError, ValueError):
        raise ConversionError(
            f"The region {region!r} is not four whole numbers; give x, y, width and height."
        ) from None
    if min(width, height) < 1:
        raise ConversionError(
            f"A region of {width} x {height} pixels holds nothing; give a larger one."
        )
    return x, y, width, height
