"""Time single small regions, as a ``Dataset.__getitem__``, a tile server or a script reads them.

Usage: ``python -m benchmarks.single [SLIDE] [--rounds N] [--threads N] [--json OUT]``

Every reader reads the same cold regions of 256 x 256 and 512 x 512 pixels, one at a time: at
random unaligned positions, and in rows with a stride of 256 and of 128. Readers take turns, a
different one first in each round. Reported are the CPU time of the process per region (all
threads), the wall time, and regions per second of several threads. Each reader's pixels are
compared with whole tiles that imagecodecs decodes; "off by" is the largest difference.
"""

from __future__ import annotations

import argparse
import math
import random
import resource
import statistics
import time
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.common import SLIDES, ensure_slide, write_json
from benchmarks.patch_readers import FileTiles
from napari_wsigpu import native, open_slide
from napari_wsigpu.cli.bench import print_table
from napari_wsigpu.compat import openslide as compat

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Position = tuple[int, int]
    Read = Callable[[Position, int], NDArray[Any]]

SIDE, THREADED, CHECKED = 32768, 4096, 8
# Regions of one round. The first of several rows costs more, as its tiles are all new.
COUNT, SWEPT = 200, 1000


def readers(path: Path) -> dict[str, Read]:
    """Open the slide with every installed reader."""
    slide, same = open_slide(path, device="cpu"), compat.OpenSlide(path)
    found: dict[str, Read] = {
        "ours": lambda position, side: np.asarray(slide.read_region(position, (side, side))),
        "ours, compat.openslide": lambda position, side: np.asarray(
            same.read_region(position, 0, (side, side))
        ),
    }
    for name, module in (
        ("cuCIM", "cucim"),
        ("OpenSlide", "openslide"),
        ("tiffslide", "tiffslide"),
        ("FastSlide", "fastslide"),
    ):
        try:
            found[name] = _peer(import_module(module), name, str(path))
        except ImportError as error:
            print(f"Without {name}: {error}")
    return found


def _peer(module: Any, name: str, path: str) -> Read:
    if name == "cuCIM":
        image = module.CuImage(path)
        return lambda position, side: np.asarray(image.read_region(position, (side, side)))
    if name == "OpenSlide":
        slide = module.OpenSlide(path)
        return lambda position, side: np.asarray(slide.read_region(position, 0, (side, side)))
    if name == "tiffslide":
        slide = module.TiffSlide(path)
        return lambda position, side: np.asarray(
            slide.read_region(position, 0, (side, side), as_array=True)
        )
    slide = module.FastSlide.from_file_path(path)
    return lambda position, side: np.asarray(slide.read_region(position, 0, (side, side)).numpy())


def positions(way: str, side: int, extent: int, count: int, rng: random.Random) -> list[Position]:
    """Return the locations of one round; `way` is "random" or the stride of rows."""
    most = extent - side
    if way == "random":
        return [(rng.randrange(most), rng.randrange(most)) for _ in range(count)]
    step, x = int(way), rng.randrange(256)
    across = (most - x) // step
    y = rng.randrange(most - math.ceil(count / across) * step)  # all rows are on the slide
    return [(x + n % across * step, y + n // across * step) for n in range(count)]


def off_by(read: Read, path: Path, side: int, extent: int) -> int:
    """Return the largest difference of a reader's pixels from whole tiles."""
    tiles, rng = FileTiles(path, 1), random.Random(1)
    worst = 0
    for _ in range(CHECKED):
        x, y = rng.randrange(extent - side), rng.randrange(extent - side)
        found = read((x, y), side)[..., :3].astype(int)
        worst = max(worst, int(np.abs(found - tiles.patch((x, y), side, 1)).max()))
    return worst


def timed(read: Read, where: list[Position], side: int) -> tuple[float, float]:
    """Return CPU and wall time of one region in microseconds."""
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for position in where:
        read(position, side)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu / len(where) * 1e6, wall / len(where) * 1e6


def threaded(read: Read, where: list[Position], side: int, threads: int) -> float:
    """Return how many regions several threads read in a second, each its share of them."""

    def work(share: list[Position]) -> None:
        for position in share:
            read(position, side)

    # Not one task per region: passing them to the threads would take longer than reading.
    workers = [Thread(target=work, args=(where[number::threads],)) for number in range(threads)]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return len(where) / (time.perf_counter() - start)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("slide", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    path = asked.slide or ensure_slide(SLIDES, SIDE, "jpeg")
    with open_slide(path) as slide:
        extent = min(slide.dimensions)
    found, rng, rows = readers(path), random.Random(time.time_ns()), []
    for side, way in ((256, "random"), (512, "random"), (256, "256"), (256, "128")):
        times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in found}
        names = list(found)
        for number in range(asked.rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                count = COUNT if way == "random" else SWEPT
                cpu, wall = timed(found[name], positions(way, side, extent, count, rng), side)
                where = positions(way, side, extent, THREADED, rng)
                rate = threaded(found[name], where, side, asked.threads)
                times[name].append((cpu, wall, rate))
        for name, measured in times.items():
            cpu, wall, rate = (statistics.median(column) for column in zip(*measured, strict=True))
            rows.append(
                {
                    "reader": name,
                    "side": side,
                    "way": way,
                    "cpu us": round(cpu),
                    "wall us": round(wall),
                    f"{asked.threads} threads": round(rate),
                    "off by": off_by(found[name], path, side, extent),
                }
            )
        newest = rows[-len(found) :]
        heads = [head for head in newest[0] if head not in ("side", "way")]
        cells = [[str(row[head]) for head in heads] for row in newest]
        print_table(f"{side} x {side}, {way}", heads, cells)
    write_json(asked.json, {"native core": native.reason, "regions": rows})


if __name__ == "__main__":
    main()
