"""Time the reads of a training loop: random patches, grids, and patches at a resolution.

Usage: ``python -m benchmarks.patches [SLIDE] [--parts PART ...] [--devices cpu cuda] [--json OUT]``

The parts, all by default:

- random: patches at random, unaligned positions of level 0, in batches of several sizes;
- grid: a whole level with `Slide.tiles`, as stored and at twice its pixel size;
- mpp: random patches at twice the slide's pixel size.

Readers take turns, a different one first in each round. All read the same positions in a round, and
other positions in the next one. OpenSlide and FastSlide read a quarter of them, and every peer
reads only a part of a grid. Before each turn our caches are cleared, and peers open the slide
again. Rented machines share their cores: "loop ms" is the time of 100 000 empty iterations in
Python next to a reader's turn, and "load" in the JSON file is the system's load after it. "Decode
alone" decodes the tiles with imagecodecs and pastes nothing. Without a slide, one is made; a slide
that you pass has to be a tiled RGB TIFF file.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import time
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.common import SLIDES, ensure_slide, write_json
from benchmarks.patch_readers import FileTiles, peers, regions, tiles
from napari_wsigpu import open_slide
from napari_wsigpu.cli.bench import print_table
from napari_wsigpu.cli.doctor import find_driver

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.patch_readers import Position, Reader
    from napari_wsigpu import Slide

Rows = list[dict[str, Any]]

FACTOR, MPP_SIZE = 2, 224
GRID_SIZE, GRID_BATCH = 256, 256
SLOW = ("OpenSlide", "FastSlide")
CHECKED = 64
MB = 1 << 20


class Bench:
    """A slide that is open on each device, and the options.

    Parameters
    ----------
    path : Path
        The slide.
    given : argparse.Namespace
        The command line.
    opened : ExitStack
        Closes the slides.
    """

    def __init__(self, path: Path, args: argparse.Namespace, opened: ExitStack) -> None:
        self.path, self.args = path, args
        self.files = FileTiles(path, args.threads)
        self.ways: dict[str, tuple[Slide, str]] = {}
        for device in args.devices:
            slide = opened.enter_context(open_slide(path, device, args.threads))
            if device != "cpu":
                self.ways["ours, to device"] = slide, device
            self.ways["ours, CPU" if device == "cpu" else "ours, GPU to host"] = slide, "cpu"
            self.slide = slide
        self.mpp = self.slide.mpp[0] * FACTOR if self.slide.mpp else None

    def others(self, side: int, span: int) -> dict[str, Reader]:
        """Return the peers (slow ones read a quarter of the positions) and decoding alone."""
        found = {} if self.args.alone else peers(self.path, self.args.threads, side, span)
        for name in SLOW:
            if name in found:
                found[name] = partial(first_quarter, found[name])
        return {**found, "(decode alone)": self.files.alone(span)}

    def positions(self, span: int, seed: int) -> list[Position]:
        """Return random upper left corners."""
        choose, (width, height) = random.Random(seed), self.slide.dimensions
        return [
            (choose.randrange(width - span), choose.randrange(height - span))
            for _ in range(self.args.patches)
        ]

    def compare(
        self, title: str, readers: dict[str, Reader], rounds: Sequence[Sequence[Position]]
    ) -> Rows:
        """Time one reader after another at the positions of each round, in patches per second."""
        rows: dict[str, dict[str, Any]] = {}
        for name, reader in readers.items():
            try:
                reader(rounds[0][: max(self.args.batch)])()
                rows[name] = {"reader": name, "median": 0, "values": [], "loop_ms": [], "load": []}
            except Exception as error:  # a failing reader must not stop the others
                print(f"MISSING {title}, {name}: {error!r}", flush=True)
        for number, positions in enumerate(rounds):
            names = list(rows)
            turn = number % len(names)
            for name in (*names[turn:], *names[:turn]):
                work = readers[name](positions)
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
        """Compare a batch from each of our backends with tifffile and imagecodecs."""
        positions = self.positions(side * factor, 0)[:CHECKED]
        expected = np.stack([self.files.patch(position, side, factor) for position in positions])
        found: Rows = []
        for name, (slide, device) in self.ways.items():
            slide.clear_cache()
            read = slide.read_regions(
                positions, (side, side), batch_size=CHECKED, device=device, mpp=mpp
            )
            pixels = next(iter(read))
            pixels = pixels if isinstance(pixels, np.ndarray) else pixels.get()
            apart = np.abs(pixels.astype(np.int16) - expected)
            share = float(np.mean(apart > 0))
            found.append({"reader": name, "max": int(apart.max()), "share": round(share, 6)})
            print(
                f"{name}, {side} x {side}: differs by {apart.max()} at most, {share:.3%} of samples"
            )
        return found


def first_quarter(reader: Reader, positions: Sequence[Position]) -> Callable[[], int]:
    """Wrap a reader so that it reads a quarter of the positions."""
    return reader(positions[: -(-len(positions) // 4)])


def loop_ms() -> float:
    """Return the milliseconds of an empty Python loop, as a measure of the available CPU."""

    def once() -> float:
        begin = time.perf_counter()
        for _ in range(100_000):
            pass
        return (time.perf_counter() - begin) * 1e3

    return min(once() for _ in range(3))


def show(title: str, unit: str, rows: Rows) -> None:
    """Print medians, all values, and the times of the loop."""
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
    for side in bench.args.size:
        readers = {
            f"{name}, batch {batch}": regions(slide, device, side, batch)
            for batch in bench.args.batch
            for name, (slide, device) in bench.ways.items()
        }
        rounds = [bench.positions(side, seed) for seed in range(bench.args.rounds)]
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
        positions = [(x, y) for y, x in corners]
        inside = [(x, y) for x, y in positions if x + span <= width and y + span <= height]

        def in_part(
            reader: Reader, positions: Sequence[Position], own: Sequence[Position] = inside
        ) -> Any:
            return reader(own[: min(len(positions), bench.args.patches)])

        readers: dict[str, Reader] = {
            name: tiles(slide, device, side, GRID_BATCH, mpp)
            for name, (slide, device) in bench.ways.items()
        }
        others = bench.others(side, span)
        readers |= {name: partial(in_part, reader) for name, reader in others.items()}
        rows = bench.compare(f"A grid of {side}, {mpp=}", readers, [positions] * bench.args.rounds)
        found.append({"size": side, "mpp": mpp, "batch": GRID_BATCH, "readers": rows})
    return found


def at_resolution(bench: Bench) -> Rows:
    """Time random patches at a coarser resolution."""
    span = MPP_SIZE * FACTOR
    readers = {
        name: regions(slide, device, MPP_SIZE, GRID_BATCH, bench.mpp)
        for name, (slide, device) in bench.ways.items()
    }
    rounds = [bench.positions(span, seed) for seed in range(bench.args.rounds)]
    title = f"{MPP_SIZE} x {MPP_SIZE} at random, at {bench.mpp} micrometres a pixel"
    rows = bench.compare(title, readers | bench.others(MPP_SIZE, span), rounds)
    exact = bench.differences(MPP_SIZE, FACTOR, bench.mpp)
    return [
        {"size": MPP_SIZE, "mpp": bench.mpp, "batch": GRID_BATCH, "readers": rows, "exact": exact}
    ]


PARTS = {"random": at_random, "grid": grid, "mpp": at_resolution}


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
    args = parser.parse_args()
    path = args.slide or ensure_slide(args.folder, args.side, "jpeg")
    figures: dict[str, Any] = {"threads": args.threads, "patches": args.patches}
    with ExitStack() as opened:
        bench = Bench(path, args, opened)
        figures["slide"] = bench.slide.dimensions
        for part in args.parts:
            figures[part] = PARTS[part](bench)
            write_json(args.json, figures)


if __name__ == "__main__":
    main()
