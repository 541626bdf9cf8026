"""The validated options of a conversion."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from napari_wsigpu.codecs.color import is_srgb
from napari_wsigpu.model.errors import ConversionError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import ArrayLike

    from napari_wsigpu.codecs.color import Color
    from napari_wsigpu.model.composite import Composite

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
DEFAULT_IN_ZARR: Compression = "zstd"
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
    """The options of `convert` that determine the contents of the result."""

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
    lossless: bool = False
    composite: Composite | None = None

    def __post_init__(self) -> None:
        allowed = COMPRESSIONS[self.kind]
        if self.compression is not None and self.compression not in allowed:
            names = {"tiff": "TIFF", "ome-tiff": "OME-TIFF", "ome-zarr": "OME-Zarr", "png": "PNG"}
            raise ConversionError(
                f"{names[self.kind]} does not support the compression {self.compression!r}; "
                f"use {' or '.join(', '.join(allowed).rsplit(', ', 1))}."
            )
        for name, (least, most) in BOUNDS.items():
            number = checked_number(name, getattr(self, name), least, most)
            object.__setattr__(self, name, number)
        if self.tile_size is not None and self.tile_size % TILE_UNIT:
            raise ConversionError(f"tile_size {self.tile_size} is not a multiple of {TILE_UNIT}.")
        if self.shard is not None and self.kind != "ome-zarr":
            raise ConversionError("Only OME-Zarr has shards; choose a target that ends in .zarr.")
        if self.kind == "png" and (self.tile_size, self.levels, self.quality) != (None,) * 3:
            raise ConversionError("PNG files have no tiles, levels or quality; omit these options.")
        if self.quality is not None and self.compression != "jpeg":
            raise ConversionError(
                "quality applies to JPEG only; choose the compression 'jpeg' (TIFF and OME-TIFF) "
                "or omit quality."
            )
        if self.composite is not None and self.kind != "png":
            raise ConversionError(
                "Only PNG files hold a composite; choose a target that ends in .png."
            )
        if self.lossless and self.compression == "jpeg":
            raise ConversionError("JPEG is not lossless; choose another compression.")
        object.__setattr__(self, "private", bool(self.private))
        object.__setattr__(self, "lossless", bool(self.lossless))
        is_srgb(self.color)
        if self.region is not None:
            object.__setattr__(self, "region", _checked_region(self.region))
        if self.outline is not None:
            object.__setattr__(self, "outline", _checked_outline(self.outline))


def kind_of(target: Path) -> Kind:
    """Return the file format that a target's name selects.

    Raises
    ------
    ConversionError
        If the name has no known suffix.
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
        f"The name '{target.name}' does not select a format; "
        "use one that ends in .tif, .tiff, .ome.tif, .zarr or .png."
    )


def checked_number(name: str, value: int | None, least: int, most: int) -> int | None:
    """Return an option as a Python int.

    Raises
    ------
    ConversionError
        If it is not an integer from `least` to `most`.
    """
    if value is None:
        return None
    try:
        number = operator.index(value)
        if not isinstance(value, bool) and least <= number <= most:
            return number
    except TypeError:
        pass
    raise ConversionError(f"{name} must be an integer from {least} to {most}, not {value!r}.")


def _checked_outline(outline: Sequence[ArrayLike]) -> Outline:
    """Return the rings of an outline as tuples of Python floats."""
    try:
        rings = [np.asarray(ring, np.float64) for ring in outline]
    except (TypeError, ValueError):
        rings = []
    if not rings or any(
        ring.ndim != 2 or ring.shape[1] != 2 or len(ring) < 3 or not np.isfinite(ring).all()
        for ring in rings
    ):
        raise ConversionError(
            "The outline is not a sequence of rings; pass three or more vertices (x, y) per ring."
        )
    return tuple(tuple((x, y) for x, y in ring.tolist()) for ring in rings)


def _checked_region(region: Region) -> Region:
    """Return a region as Python ints."""
    try:
        x, y, width, height = (operator.index(value) for value in region)
    except (TypeError, ValueError):
        raise ConversionError(
            f"The region {region!r} is not four integers; pass x, y, width and height."
        ) from None
    if min(width, height) < 1:
        raise ConversionError(f"A region of {width} x {height} pixels is empty; enlarge it.")
    return x, y, width, height
