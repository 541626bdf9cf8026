"""Time the opening of a slide, and weigh the memory of walking over it.

Usage: ``python -m benchmarks.opening [--budget-mb 256 --folder DIR --json FILE]``
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.common import SLIDES, ensure_slide, verdict, write_json
from napari_wsigpu import open_slide
from napari_wsigpu.cli.bench import print_table
from napari_wsigpu.slide import runtime

if TYPE_CHECKING:
    from collections.abc import Callable

    Opener = Callable[[Path], Any]

OURS = "napari-wsigpu"
TARGETS_MS = {32768: 10.0, 65536: 25.0}
TIMES = 10
WIDTH, HEIGHT = 1536, 1024
VIEWPORTS = 500
MEMORY_MARGIN_MB = 100
MB = 1 << 20


def find_openers() -> tuple[dict[str, Opener], dict[str, str]]:
    """Import every reader; say of the others why they are not measured."""
    openers: dict[str, Opener] = {OURS: open_slide}
    missing: dict[str, str] = {}
    peers: dict[str, tuple[str, Callable[[Any], Opener]]] = {
        "OpenSlide": ("openslide", lambda module: module.OpenSlide),
        "tiffslide": ("tiffslide", lambda module: module.TiffSlide),
        "FastSlide": ("fastslide", lambda module: module.FastSlide.from_file_path),
    }
    for name, (module, opener) in peers.items():
        try:
            openers[name] = opener(import_module(module))
        except ImportError as error:
            missing[name] = f"not installed ({error})"
    return openers, missing


def time_opening(openers: dict[str, Opener], path: Path) -> dict[str, list[tuple[float, float]]]:
    """Return milliseconds until each reader knows the levels, and until it read a tile.

    Some readers parse the tables of tiles at the first read only.
    """
    milliseconds: dict[str, list[tuple[float, float]]] = {name: [] for name in openers}
    for _ in range(1 + TIMES):
        for name, opener in openers.items():
            begin = time.perf_counter()
            slide = opener(path)
            levels = slide.level_dimensions
            opened = time.perf_counter()
            read_tile(name, slide)
            read = time.perf_counter()
            milliseconds[name].append(((opened - begin) * 1e3, (read - begin) * 1e3))
            slide.close()
            del slide, levels
    return milliseconds


def read_tile(name: str, slide: Any) -> None:
    """Read the first tile of level 0."""
    if name == OURS:
        slide.read_region((0, 0), (256, 256))
    else:
        slide.read_region((0, 0), 0, (256, 256))


def walk(path: Path, budget: int) -> int:
    """Return by how many bytes this process grows at most while viewports are read.

    Parameters
    ----------
    path : Path
        The slide.
    budget : int
        Bytes that the cache of decoded tiles may hold.
    """
    runtime.default().tiles.budget = budget
    process = psutil.Process()
    choose = random.Random(0)
    with open_slide(path, device="cpu") as slide:
        before = process.memory_info().rss
        largest = before
        width, height = slide.dimensions
        for _ in range(VIEWPORTS):
            x, y = choose.randrange(width - WIDTH), choose.randrange(height - HEIGHT)
            pixels = slide.levels[0][y : y + HEIGHT, x : x + WIDTH]
            largest = max(largest, process.memory_info().rss)
            del pixels
    return int(largest - before)


def measure_opening(folder: Path) -> dict[str, Any]:
    """Measure every slide and reader, and print the table."""
    openers, missing = find_openers()
    figures: dict[str, Any] = {}
    rows = []
    for side, target_ms in TARGETS_MS.items():
        for name, times in time_opening(openers, ensure_slide(folder, side, "jpeg")).items():
            first, *later = (opened for opened, _ in times)
            first_tile, *later_tiles = (read for _, read in times)
            figure = {
                "first_ms": first,
                "median_ms": statistics.median(later),
                "max_ms": max(later),
                "first_tile_ms": first_tile,
                "median_tile_ms": statistics.median(later_tiles),
            }
            target = target_ms if name == OURS else None
            result = None if target is None else verdict(figure["median_ms"] <= target)
            figures.setdefault(str(side), {})[name] = {
                **{key: round(value, 2) for key, value in figure.items()},
                "target_ms": target,
                "verdict": result,
            }
            cells = [f"{value:.1f}" for value in figure.values()]
            goal = "" if target is None else f"{target:g}"
            rows.append([f"{side} x {side}  {name}", *cells, goal, result or ""])
    heads = ["opening", "first ms", "median", "max", "+ tile, first", "median", "target", "verdict"]
    print_table(f"Opening until the levels are known, {TIMES} times", heads, rows)
    for name, why in missing.items():
        print(f"MISSING {name}: {why}")
    return {"slides": figures, "missing": missing}


def measure_memory(path: Path, budget_mb: int) -> dict[str, Any]:
    """Walk over a slide in a fresh process, and print how it grew."""
    with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
        growth_mb = fresh.submit(walk, path, budget_mb * MB).result() / MB
    limit_mb = budget_mb + MEMORY_MARGIN_MB
    result = verdict(growth_mb <= limit_mb)
    heads = ["memory", "budget MB", "growth MB", "limit MB", "verdict"]
    row = [path.name, str(budget_mb), f"{growth_mb:.0f}", str(limit_mb), result]
    print_table(f"Resident memory over {VIEWPORTS} random viewports", heads, [row])
    return {
        "viewports": VIEWPORTS,
        "budget_mb": budget_mb,
        "growth_mb": round(growth_mb, 1),
        "limit_mb": limit_mb,
        "verdict": result,
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Time opening, weigh walking.")
    parser.add_argument("--budget-mb", type=int, default=256, help="for decoded tiles")
    parser.add_argument("--folder", type=Path, default=SLIDES, help="where the slides are kept")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args()
    opening = measure_opening(given.folder)
    memory = measure_memory(ensure_slide(given.folder, 32768, "jpeg"), given.budget_mb)
    write_json(given.json, {"opening": opening, "memory": memory})


if __name__ == "__main__":
    main()
