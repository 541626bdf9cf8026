"""What the inspector says of a slide, as plain text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from napari_wsigpu.formats.compression import compression_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from napari_wsigpu.slide import Slide


TIMES = "\N{MULTIPLICATION SIGN}"


class LevelFacts(NamedTuple):
    """One row of the table of levels."""

    level: str
    size: str
    downsample: str
    tile: str
    compression: str


def title(slide: Slide) -> str:
    """Return the slide's file name."""
    return Path(slide.path).name


def facts(slide: Slide) -> list[tuple[str, str]]:
    """Return (name, value) of what people look for first."""
    width, height = slide.dimensions
    layout = slide.layout
    count = len(slide.channels)
    kind = "RGB" if layout.rgb else f"{count} channel{'' if count == 1 else 's'}"
    found = [
        ("Vendor", slide.vendor),
        ("Dimensions", f"{width:,} {TIMES} {height:,} px"),
        ("Pixels", f"{width * height / 1e6:,.1f} million, {kind}, {slide.levels[0].dtype}"),
        ("Objective", "not given" if slide.objective is None else f"{slide.objective:g}{TIMES}"),
    ]
    if slide.mpp is None:
        found.append(("Pixel size", "not given"))
    else:
        x, y = slide.mpp
        size = f"{x:.4g}" if x == y else f"{x:.4g} {TIMES} {y:.4g}"
        found.append(("Pixel size", f"{size} µm"))
        found.append(("Extent", f"{_length(width * x)} {TIMES} {_length(height * y)}"))
    if slide.associated_images:
        found.append(("Associated images", ", ".join(slide.associated_images)))
    if layout.hidden_planes:
        found.append(("Further planes", f"{layout.hidden_planes}, not shown"))
    failed = slide.stats()["failed"]
    if failed:
        found.append(("Damaged tiles", f"{failed}, shown as background"))
    return found


def level_facts(slide: Slide) -> list[LevelFacts]:
    """Return a row for each level, computed ones included."""
    base = slide.pyramid[0]
    rows = []
    for index, level in enumerate(slide.pyramid):
        compression = compression_name(level.encoding.compression)
        rows.append(
            LevelFacts(
                str(index),
                f"{level.width:,} {TIMES} {level.height:,}",
                f"{level.downsample(base):.4g}",
                ""
                if level.computed
                else f"{level.grid.tile_width} {TIMES} {level.grid.tile_height}",
                "computed" if level.computed else compression,
            )
        )
    return rows


def flatten(metadata: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted name, text) of each leaf of nested metadata."""
    for key, value in metadata.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            for index, item in enumerate(value):
                yield from flatten({str(index): item}, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", "" if value is None else str(value)


def _length(micrometres: float) -> str:
    return f"{micrometres / 1e3:.2f} mm" if micrometres >= 1e3 else f"{micrometres:.1f} µm"
