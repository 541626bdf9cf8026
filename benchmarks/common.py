"""What the benchmarks share: slides, tables, verdicts, and a record of the machine."""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from make_slide import make_slide

if TYPE_CHECKING:
    from collections.abc import Sequence

    from make_slide import Codec

SLIDES = Path(__file__).parent / "slides"
PACKAGES = (
    "napari-wsigpu",
    "fastslide",
    "imagecodecs",
    "napari",
    "napari-wsi",
    "numpy",
    "openslide-bin",
    "openslide-python",
    "tifffile",
    "tiffslide",
    "zarr",
)


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


def environment() -> dict[str, Any]:
    """Describe the machine and the versions of what is measured; JSON-serialisable."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gb": round(_memory_bytes() / 1e9, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def verdict(passed: bool) -> str:
    """Return the word for a target that is met or missed."""
    return "PASS" if passed else "FAIL"


def print_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of text: the first column to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    print(f"\n{title}")
    for row in (heads, ["-" * width for width in widths], *rows):
        first, *others = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]
        print("  ".join(cells).rstrip())


def write_json(path: Path | None, figures: dict[str, Any]) -> None:
    """Write the figures with their environment; do nothing without a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {"environment": environment(), **figures}
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
