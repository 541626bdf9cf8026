"""Time what a training loop asks for: random patches, grids, and patches at a resolution.

Usage: ``python -m benchmarks.patches [SLIDE] [--parts PART ...] [--devices cpu cuda] [--json OUT]``

The parts, all by default:

- random: patches at random, unaligned places of level 0, in batches of several sizes;
- grid: a whole level by `Slide.tiles`, as it is stored and at twice its micrometres a pixel;
- mpp: random patches at twice the slide's micrometres a pixel;
- view: 54 whole tiles, as a display asks for them, beside one region of the same area;
- memory: how far memory of the host and of the device grows while a level is swept.

Readers take turns, another one first in each round, all at the same places, and at other places
each round; OpenSlide and FastSlide read a quarter of them, and of a grid every peer reads a part.
Before each turn our caches are cleared, and peers open the slide anew. Cores of rented machines are
shared: "loop ms" is what 100 000 empty turns of a loop in Python took beside a reader's turn, and
"load" in the JSON file is the system's after it. "Decode alone" has imagecodecs decode the tiles,
and pastes nothing. A slide is made where none is given; a slide that is has to be a tiled TIFF file
in RGB.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.common import SLIDES, ensure_slide, write_json
from benchmarks.patch_readers import FileTiles, peers, regions, tiles
from napari_wsigpu import open_slide
from napari_wsigpu.cli.bench import print_table
from napari_wsigpu.cli.doctor import find_driver
from napari_wsigpu.reading.cache import TileKey

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.patch_readers import Place, Reader
    from napari_wsigpu import Slide

Rows = list[dict[str, Any]]

FACTOR, MPP_SIZE = 2, 224
GRID_SIZE, GRID_BATCH = 256, 256
SLOW = ("OpenSlide", "FastSlide")
CHECKED = 64
VIEW, VIEWS = (6, 9), 20
SMALL_SIDE = 16384
MEMORY_BATCHES = (256, 1024)
SAMPLE_SECONDS = 0.005
MB = 1 << 20


class Bench:
    """A slide that is open on each device, and the command line.

    Parameters
    ----------
    path : Path
        The slide.
    given : argparse.Namespace
        The command line.
    opened : ExitStack
        Closes the slides.
    """

    def __init__(self, path: Path, given: argparse.Namespace, opened: ExitStack) -> None:
        self.path, self.given = path, given
        self.files = FileTiles(path, given.threads)
        self.ways: dict[str, tuple[Slide, str]] = {}
        for device in given.devices:
            slide = opened.enter_context(open_slide(path, device, given.threads))
            if device != "cpu":
                self.ways["ours, to device"] = slide, device
            self.ways["ours, CPU" if device == "cpu" else "ours, GPU to host"] = slide, "cpu"
            self.slide = slide
        self.mpp = self.slide.mpp[0] * FACTOR if self.slide.mpp else None

    def others(self, side: int, span: int) -> dict[str, Reader]:
        """Return peers, of which slow ones read a quarter of the places, and decoders alone."""
        found = {} if self.given.alone else peers(self.path, self.given.threads, side, span)
        for name in SLOW:
            if name in found:
                found[name] = partial(first_quarter, found[name])
        return {**found, "(decode alone)": self.files.alone(span)}

    def places(self, span: int, seed: int) -> list[Place]:
        """Return random upper left corners."""
        choose, (width, height) = random.Random(seed), self.slide.dimensions
        return [
            (choose.randrange(width - span), choose.randrange(height - span))
            for _ in range(self.given.patches)
        ]

    def compare(
        self, title: str, readers: dict[str, Reader], rounds: Sequence[Sequence[Place]]
    ) -> Rows:
        """Time readers in turn, at the places of each round; return patches a second."""
        rows: dict[str, dict[str, Any]] = {}
        for name, reader in readers.items():
            try:
                reader(rounds[0][: max(self.given.batch)])()
                rows[name] = {"reader": name, "median": 0, "values": [], "loop_ms": [], "load": []}
            except Exception as error:  # a reader that can't do it does not end the others' turns
                print(f"MISSING {title}, {name}: {error!r}", flush=True)
        for number, places in enumerate(rounds):
            names = list(rows)
            turn = number % len(names)
            for name in (*names[turn:], *names[:turn]):
                work = readers[name](places)
                gc.collect()
                before = loop_ms()
                begin = time.perf_counter()
                count = work()
                seconds = time.perf_counter() - begin
                rows[name]["values"].append(round(count / seconds, 1))
                rows[name]["loop_ms"].append(round((before + loop_ms()) / 2, 2))
                rows[name]["load"].append(round(os.getloadavg()[0], 1))
        found = list(rows.values())
        for row in found:
            row["median"] = statistics.median(row["values"])
        show(title, "patches/s", found)
        return found

    def differences(self, side: int, factor: int, mpp: float | None) -> Rows:
        """Compare a batch by each of our ways with the same by tifffile and imagecodecs."""
        places = self.places(side * factor, 0)[:CHECKED]
        expected = np.stack([self.files.patch(place, side, factor) for place in places])
        found: Rows = []
        for name, (slide, device) in self.ways.items():
            slide.clear_cache()
            read = slide.read_regions(
                places, (side, side), batch_size=CHECKED, device=device, mpp=mpp
            )
            pixels = next(iter(read))
            pixels = pixels if device == "cpu" else pixels.get()
            apart = np.abs(pixels.astype(np.int16) - expected)
            share = float(np.mean(apart > 0))
            found.append({"reader": name, "max": int(apart.max()), "share": round(share, 6)})
            print(
                f"{name}, {side} x {side}: differs by {apart.max()} at most, {share:.3%} of samples"
            )
        return found


def first_quarter(reader: Reader, places: Sequence[Place]) -> Callable[[], int]:
    """Have a reader read a quarter of the places."""
    return reader(places[: -(-len(places) // 4)])


def loop_ms() -> float:
    """Return the milliseconds of an empty loop in Python: how much of a core is ours just now."""

    def once() -> float:
        begin = time.perf_counter()
        for _ in range(100_000):
            pass
        return (time.perf_counter() - begin) * 1e3

    return min(once() for _ in range(3))


def show(title: str, unit: str, rows: Rows) -> None:
    """Print medians, all values, and what the loop took."""
    cells = [
        (
            row["reader"],
            f"{row['median']:,.1f}",
            " ".join(f"{value:,.1f}" for value in row["values"][:5]),
            f"{statistics.median(row['loop_ms']):.2f}",
        )
        for row in rows
    ]
    print_table(title, ("reader", unit, "all", "loop ms"), cells)


def at_random(bench: Bench) -> Rows:
    """Time random patches, in batches of several sizes."""
    found: Rows = []
    for side in bench.given.size:
        readers = {
            f"{name}, batch {batch}": regions(slide, device, side, batch)
            for batch in bench.given.batch
            for name, (slide, device) in bench.ways.items()
        }
        rounds = [bench.places(side, seed) for seed in range(bench.given.rounds)]
        title = f"{side} x {side} at random"
        rows = bench.compare(title, readers | bench.others(side, side), rounds)
        found.append({"size": side, "readers": rows, "exact": bench.differences(side, 1, None)})
    return found


def grid(bench: Bench) -> Rows:
    """Time a whole level as a grid; peers read a part of it."""
    found: Rows = []
    for side, factor in ((GRID_SIZE, 1), (MPP_SIZE, FACTOR)):
        span, mpp = side * factor, bench.mpp if factor > 1 else None
        width, height = bench.slide.dimensions
        corners = product(range(0, height, span), range(0, width, span))
        places = [(x, y) for y, x in corners]
        inside = [(x, y) for x, y in places if x + span <= width and y + span <= height]

        def in_part(reader: Reader, given: Sequence[Place], own: Sequence[Place] = inside) -> Any:
            return reader(own[: min(len(given), bench.given.patches)])

        readers: dict[str, Reader] = {
            name: tiles(slide, device, side, GRID_BATCH, mpp)
            for name, (slide, device) in bench.ways.items()
        }
        others = bench.others(side, span)
        readers |= {name: partial(in_part, reader) for name, reader in others.items()}
        rows = bench.compare(f"A grid of {side}, {mpp=}", readers, [places] * bench.given.rounds)
        found.append({"size": side, "mpp": mpp, "batch": GRID_BATCH, "readers": rows})
    return found


def at_resolution(bench: Bench) -> Rows:
    """Time random patches of averages."""
    span = MPP_SIZE * FACTOR
    readers = {
        name: regions(slide, device, MPP_SIZE, GRID_BATCH, bench.mpp)
        for name, (slide, device) in bench.ways.items()
    }
    rounds = [bench.places(span, seed) for seed in range(bench.given.rounds)]
    title = f"{MPP_SIZE} x {MPP_SIZE} at random, at {bench.mpp} micrometres a pixel"
    rows = bench.compare(title, readers | bench.others(MPP_SIZE, span), rounds)
    exact = bench.differences(MPP_SIZE, FACTOR, bench.mpp)
    return [
        {"size": MPP_SIZE, "mpp": bench.mpp, "batch": GRID_BATCH, "readers": rows, "exact": exact}
    ]


def view(bench: Bench) -> Rows:
    """Time whole tiles beside a region of the same area, both to the host."""
    level, (down, across) = bench.slide.layout.levels[0].grid, VIEW
    width, height = across * level.tile_width, down * level.tile_height

    def whole(slide: Slide, row: int, column: int) -> None:
        places = product(range(row, row + down), range(column, column + across))
        number = slide.displayed.number("stored")
        slide.displayed.read_tiles([TileKey(number, 0, y, x) for y, x in places])

    def region(slide: Slide, row: int, column: int) -> None:
        slide.read_region((column * level.tile_width, row * level.tile_height), (width, height))

    found: Rows = [
        {"reader": f"{name}, {way.__name__}", "read": partial(way, slide), "slide": slide}
        | {"values": [], "loop_ms": []}
        for name, (slide, device) in bench.ways.items()
        if device == "cpu"
        for way in (whole, region)
    ]
    choose = random.Random(0)
    for number in range(-2, VIEWS * bench.given.rounds):
        place = choose.randrange(level.rows - down), choose.randrange(level.columns - across)
        for row in found if number % 2 else reversed(found):
            row["slide"].clear_cache()
            loop = loop_ms()
            begin = time.perf_counter()
            row["read"](*place)
            milliseconds = (time.perf_counter() - begin) * 1e3
            if number >= 0:
                row["values"].append(round(milliseconds, 3))
                row["loop_ms"].append(round(loop, 2))
    for row in found:
        del row["read"], row["slide"]
        row["median"] = statistics.median(row["values"])
    show(f"{down * across} tiles, or {width} x {height}", "median ms", found)
    return found


def memory(bench: Bench) -> Rows:
    """Weigh sweeps over a small and a large slide, each in a fresh process."""
    small = ensure_slide(bench.given.folder, SMALL_SIDE, "jpeg")
    found: Rows = []
    for path, device, batch in product((small, bench.path), bench.given.devices, MEMORY_BATCHES):
        with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
            grown = fresh.submit(sweep, path, device, batch, bench.given.threads).result()
        slide = "small" if path == small else "large"
        found.append({"slide": slide, "device": device, "batch": batch, **grown})
    cells = [tuple(str(value) for value in row.values()) for row in found]
    heads = ("slide", "device", "batch", "patches", "host MB", "device MB")
    print_table("Growth of memory while a level is swept, at most", heads, cells)
    return found


def sweep(path: Path, device: str, batch: int, threads: int) -> dict[str, int]:
    """Sweep a level in this process; return how far memory grew above the open slide, in MiB."""
    weigh: Callable[[], tuple[int, int]] = lambda: (resident(), 0)  # noqa: E731
    if device != "cpu":
        import cupy

        weigh = lambda: (resident(), -cupy.cuda.runtime.memGetInfo()[0])  # noqa: E731
    peaks, over = [0, 0], threading.Event()
    with open_slide(path, device, threads) as slide:
        start = weigh()

        def watch() -> None:
            while not over.wait(SAMPLE_SECONDS):
                peaks[:] = (
                    max(a, now - then) for a, now, then in zip(peaks, weigh(), start, strict=True)
                )

        watcher = threading.Thread(target=watch)
        watcher.start()
        count = sum(
            len(pixels) for pixels, _ in slide.tiles(GRID_SIZE, batch_size=batch, device=device)
        )
        over.set()
        watcher.join()
    return {"patches": count, "host_mb": peaks[0] // MB, "device_mb": peaks[1] // MB}


def resident() -> int:
    """Return the bytes of this process that are resident, where the system is Linux."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


PARTS = {"random": at_random, "grid": grid, "mpp": at_resolution, "view": view, "memory": memory}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Measure patches, as a training loop asks for.")
    parser.add_argument("slide", type=Path, nargs="?", help="by default one is made")
    parser.add_argument("--side", type=int, default=65536, help="of the slide that is made")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--size", type=int, nargs="+", default=[256, 512], help="of patches")
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--patches", type=int, default=8192, help="how many in each turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    devices = ["cpu", "cuda"] if find_driver().devices else ["cpu"]
    parser.add_argument("--devices", nargs="+", choices=("cpu", "cuda"), default=devices)
    parser.add_argument("--alone", action="store_true", help="leave the peers out")
    parser.add_argument("--folder", type=Path, default=SLIDES, help="where slides are made")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args()
    path = given.slide or ensure_slide(given.folder, given.side, "jpeg")
    figures: dict[str, Any] = {"threads": given.threads, "patches": given.patches}
    with ExitStack() as opened:
        bench = Bench(path, given, opened)
        figures["slide"] = bench.slide.dimensions
        for part in given.parts:
            figures[part] = PARTS[part](bench)
            write_json(given.json, figures)


if __name__ == "__main__":
    main()
