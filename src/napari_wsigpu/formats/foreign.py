"""Slides that are no TIFF files: named, so that their owner knows what to do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# How the names of their files end; that of a set of Hamamatsu's is one of a list.
ENDINGS = (".ndpis",)
HEAD = 1 << 16
OPENSLIDE = (
    "convert it to a pyramidal TIFF (vips tiffsave --tile --pyramid) or to OME-TIFF with QuPath, "
    "or open it with napari-wsi, which reads it by OpenSlide"
)


FOREIGN: tuple[tuple[str, Callable[[Path, bytes], bool], str], ...] = (
    ("a Zeiss CZI", lambda _, head: head.startswith(b"ZISRAWFILE"), OPENSLIDE),
)


def refusal(path: str, head: bytes) -> str | None:
    """Say whose slide a file is that is no TIFF, and what to do with it.

    Parameters
    ----------
    path : str
        The file.
    head : bytes
        Its first `HEAD` bytes.

    Returns
    -------
    str or None
        One sentence; None if it is no slide that is known.
    """
    for name, is_one, advice in FOREIGN:
        if is_one(Path(path), head):
            return f"'{path}' is {name} slide, which can't be read here; {advice}."
    return None
