"""Slides that are no TIFF files: named, so that their owner knows what to do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# How the names of their files end; that of a set of Hamamatsu's is one of a list.
ENDINGS = (".ndpis", ".svslide", ".vms", ".vmu")
HEAD = 1 << 16
SQLITE = b"SQLite format 3\0"
OPENSLIDE = (
    "convert it to a pyramidal TIFF (vips tiffsave --tile --pyramid) or to OME-TIFF with QuPath, "
    "or open it with napari-wsi, which reads it by OpenSlide"
)


FOREIGN: tuple[tuple[str, Callable[[Path, bytes], bool], str], ...] = (
    (
        "a Hamamatsu VMS",
        lambda _, head: b"[Virtual Microscope Specimen]" in head,
        OPENSLIDE,
    ),
    (
        "a Hamamatsu VMU",
        lambda _, head: b"[Uncompressed Virtual Microscope Specimen]" in head,
        OPENSLIDE,
    ),
    (
        "a Sakura",
        lambda path, head: (
            head.startswith(SQLITE)
            and (path.suffix.lower() == ".svslide" or b"SVSlideDataXPO" in head)
        ),
        OPENSLIDE,
    ),
    ("a Zeiss CZI", lambda _, head: head.startswith(b"ZISRAWFILE"), OPENSLIDE),
    (
        "a Philips iSyntax",
        lambda _, head: b'ObjectType="DPUfsImport"' in head,
        "export it as TIFF with Philips' software",
    ),
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
