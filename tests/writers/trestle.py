"""Trestle TIFF files that the tests write themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.writers import tiffbytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

TEXT = (
    "Background Color=E6E6E6;White Balance=1.3 ;Objective Power=20; Image Size = 1x1=2;"
    "Empty=;no pair;JPEG Quality=80"
)


def write(
    path: Path,
    levels: Sequence[NDArray[Any]],
    overlaps: str | None = None,
    *,
    text: str | bytes = TEXT,
    mpp: float | None = 0.4,
    software: str = "MedScan 3.1",
    tile: tuple[int, int] = (32, 48),
) -> Path:
    """Write stored levels; their tiles overlap as `overlaps` says."""
    if overlaps is not None and isinstance(text, str):
        text += f";OverlapsXY={overlaps}"
    more: dict[int, tuple[int, Any]] = {
        305: (tiffbytes.ASCII, software),
        272: (tiffbytes.ASCII, "MedMicro"),
        306: (tiffbytes.ASCII, "2005:07:21 10:11:12"),
    }
    if mpp is not None:
        more |= {282: (tiffbytes.RATIONAL, mpp), 283: (tiffbytes.RATIONAL, mpp * 2)}
    pages = [
        tiffbytes.page(
            pixels, tiffbytes.deflate, compression=8, tile=tile, description=text, more=more
        )
        for pixels in levels
    ]
    return tiffbytes.write(path, pages)
