"""What the benchmarks share: slides, verdicts, and a record of the machine."""

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
    """Return a square slide, made if it is not there yet.

    Its bytes are then in the operating system's page cache, so that no reader waits for a disk.
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
    """Return the word for a target that is met or missed."""
    return "PASS" if passed else "FAIL"


def write_json(path: Path | None, figures: dict[str, Any]) -> None:
    """Write the figures with their environment; do nothing without a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {"environment": environment(), **figures}
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def coarser_mpp(slide: Slide, factor: float) -> float:
    """Return so many times the micrometres of a pixel of level 0; end where it has none."""
    if slide.mpp is None:
        raise SystemExit(f"'{slide.path}' does not say its micrometres a pixel")
    return max(slide.mpp) * factor
