"""Properties of a slide's layout as text."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from napari_wsigpu.codecs.compressions import storage_name
from napari_wsigpu.storage.remote.url import file_name

if TYPE_CHECKING:
    from napari_wsigpu.model.layout import LevelLayout, SlideLayout

TIMES = "\N{MULTIPLICATION SIGN}"
NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"
NOT_GIVEN = "not given"


def html_table(layout: SlideLayout) -> str:
    """Return a compact HTML table for notebooks, without private metadata."""
    stored = [level for level in layout.levels if is_stored(level)]
    rows = {
        "Name": file_name(layout.path),
        "Dimensions": dimensions(layout),
        "MPP": mpp(layout),
        "Levels": "; ".join(format_size(level.width, level.height) for level in layout.levels),
        "Compression": ", ".join(dict.fromkeys(map(storage_name, stored))),
    }
    cells = (f"<tr><th>{name}</th><td>{escape(text)}</td></tr>" for name, text in rows.items())
    return f"<table>{''.join(cells)}</table>"


def dimensions(layout: SlideLayout) -> str:
    """Format the size of level 0."""
    base = layout.levels[0]
    return unbroken(f"{base.width:,} {TIMES} {base.height:,} px")


def mpp(layout: SlideLayout) -> str:
    """Format the pixel size of level 0."""
    if layout.mpp is None:
        return NOT_GIVEN
    x, y = layout.mpp
    return unbroken(f"{x:.4g} µm/px" if x == y else f"{x:.4g} {TIMES} {y:.4g} µm/px")


def is_stored(level: LevelLayout) -> bool:
    """Whether the file stores the level, so that it is neither computed nor scaled by a decoder."""
    return not level.computed and level.encoding.jpeg_scale == 1


def format_size(width: int, height: int) -> str:
    """Format a size that may be wrapped after the multiplication sign."""
    return f"{width:,}{NO_BREAK_SPACE}{TIMES} {height:,}"


def unbroken(text: str) -> str:
    """Replace all spaces by no-break spaces."""
    return text.replace(" ", NO_BREAK_SPACE)
