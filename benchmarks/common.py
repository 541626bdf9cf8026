"""Shared by the benchmarks: slides, verdicts, and a record of the machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.machine import environment
from benchmarks.synthetic import make_slide

if TYPE_CHECKING:
    from benchmarks.synthetic import Codec
    from napari_wsigpu import Slide

SLIDES = Path(__file__).parent / "slides"


def ensure_slide(folder: Path, side: int, codec: Codec, tile: int = 256) -> Path:
    """Return the path of a square slide, creating it if needed.

    The file is read once, so that it is in the page cache and no reader waits for a disk.
    """
    size = "" if tile == 256 else f"-{tile}"
    path = folder / f"{codec}-{side}{size}.svs"
    if not path.exists():
        print(f"Making {path.name} ...", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        make_slide(unfinished, side, side, tile, codec)
        unfinished.replace(path)
    with path.open("rb") as file:
        while file.read(1 << 24):
            pass
    return path


def verdict(passed: bool) -> str:
    """Return "PASS" or "FAIL"."""
    return "PASS" if passed else "FAIL"


def write_json(path: Path | None, figures: dict[str, Any]) -> None:
    """Write results and a record of the machine; do nothing without a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {"environment": environment(), **figures}
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def coarser_mpp(slide: Slide, factor: float) -> float:
    """Return a multiple of the pixel size of level 0; exit if the slide has none."""
    if slide.mpp is None:
        raise SystemExit(f"'{slide.path}' has no pixel size")
    return max(slide.mpp) * factor
