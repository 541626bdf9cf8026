"""Time a viewport as it is stored and in sRGB, beside LittleCMS on the same pixels.

Usage: ``python -m benchmarks.color [--rounds 30 --folder DIR --json FILE]``

The slides have no ICC profile, so they are given one: that of Adobe RGB.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import imagecodecs
import numpy as np

from benchmarks.common import SLIDES, ensure_slide, verdict, write_json
from benchmarks.viewport import HEIGHT, SIDES, WIDTH
from napari_wsigpu.cli.bench import print_table
from napari_wsigpu.formats.describe import describe
from napari_wsigpu.slide.slide import Slide

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from benchmarks.synthetic import Codec

    Way = Callable[[int, int], float]

PROFILE: bytes = imagecodecs.cms_profile("adobergb")
SRGB: bytes = imagecodecs.cms_profile("srgb")
STEP = 256
MOST_COST = 1.1
COLORS = ("stored", "srgb")


def open_profiled(path: Path, device: str) -> Slide:
    """Open a slide that has no profile with one."""
    return Slide(replace(describe(path), icc=PROFILE), device)


def little_cms(pixels: NDArray[Any]) -> NDArray[Any]:
    """Convert pixels by LittleCMS alone."""
    converted: NDArray[Any] = imagecodecs.cms_transform(
        pixels, PROFILE, SRGB, colorspace="rgb", outcolorspace="rgb"
    )
    return converted


def little_cms_twice(pixels: NDArray[Any]) -> NDArray[Any]:
    """Do so in two threads."""
    with ThreadPoolExecutor(2) as pool:
        return np.concatenate([*pool.map(little_cms, np.array_split(pixels, 2))])


def ways(slide: Slide) -> dict[str, Way]:
    """Return what is timed: seconds of a viewport at (x, y)."""

    def region(color: Any, x: int, y: int) -> Any:
        return slide.read_region((x, y), (WIDTH, HEIGHT), color=color)

    def cold(color: str, x: int, y: int) -> float:
        slide.clear_cache()
        return timed(partial(region, color, x, y))

    def warm(color: str, x: int, y: int) -> float:
        region(color, x, y)
        return timed(partial(region, color, x, y))

    def step(color: str, x: int, y: int) -> float:
        slide.clear_cache()
        region(color, x, y)
        return timed(partial(region, color, x + STEP, y))

    def alone(convert: Callable[[Any], Any], x: int, y: int) -> float:
        return timed(partial(convert, region("stored", x, y)))

    reads: dict[str, Any] = {"cold": cold, f"moved by {STEP}": step, "warm": warm}
    timings: dict[str, Way] = {
        f"{name}, {color}": partial(read, color) for name, read in reads.items() for color in COLORS
    }
    timings["LittleCMS alone"] = partial(alone, little_cms)
    timings["LittleCMS alone, 2 threads"] = partial(alone, little_cms_twice)
    return timings


def timed(work: Callable[[], object]) -> float:
    """Return seconds."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measure(path: Path, codec: Codec, rounds: int) -> dict[str, Any]:
    """Measure one slide and print its table."""
    choose = random.Random(0)
    side = SIDES[codec]
    with open_profiled(path, "cpu") as slide:
        making = timed(lambda: slide.read_region((0, 0), (1, 1), color="srgb"))
        stored = slide.read_region((side // 2, side // 2), (WIDTH, HEIGHT))
        shown = slide.read_region((side // 2, side // 2), (WIDTH, HEIGHT), color="srgb")
        difference = int(np.abs(shown.astype(int) - little_cms(stored)).max())
        timings = ways(slide)
        seconds: dict[str, list[float]] = {name: [] for name in timings}
        for turn in range(rounds + 1):
            x, y = choose.randrange(side - WIDTH - STEP), choose.randrange(side - HEIGHT)
            names = list(timings)
            choose.shuffle(names)
            for name in names:
                taken = timings[name](x, y)
                if turn:
                    seconds[name].append(taken)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    figures: dict[str, Any] = {}
    for name, median in medians.items():
        base = medians.get(name.replace("srgb", "stored")) if name.endswith("srgb") else None
        cost = None if base is None else median / base
        figures[name] = {
            "median_ms": round(median * 1e3, 3),
            "fastest_ms": round(min(seconds[name]) * 1e3, 3),
            "srgb_by_stored": None if cost is None else round(cost, 2),
            "verdict": None if cost is None else verdict(cost <= MOST_COST),
        }
    rows = [
        [name, *("" if value is None else str(value) for value in row.values())]
        for name, row in figures.items()
    ]
    title = f"{codec}, {side} x {side}: one viewport of {WIDTH} x {HEIGHT}"
    print_table(title, ["way", "median ms", "fastest ms", "srgb / stored", "<= 1.1"], rows)
    print(f"the table is made in {making * 1e3:.0f} ms; largest difference: {difference}")
    return {
        "slide_side": side,
        "rounds": rounds,
        "table_ms": round(making * 1e3, 1),
        "largest_difference_from_littlecms": difference,
        "ways": figures,
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Time viewports in sRGB.")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--folder", type=Path, default=SLIDES, help="where the slides are kept")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args()
    figures = {}
    for codec, side in SIDES.items():
        path = ensure_slide(given.folder, side, codec)
        figures[codec] = measure(path, codec, given.rounds)
    write_json(given.json, {"viewport": [WIDTH, HEIGHT], "codecs": figures})


if __name__ == "__main__":
    main()
