"""Sweep a folder of slides with more and more Dask workers, on the CPU or on GPUs.

Usage: ``python -m benchmarks.dask_sweep [cpu] [gpu] [--quick] [--json OUT]``; cpu by default

Every tile of level 0 of every slide is decoded and its stains are measured, as
``examples/tissue_and_stain.py`` does, where it was decoded; only one row of figures a chunk comes
back. Each worker is a process of one thread: 1 and 2 for the CPU, 1, 2 and 4 for GPUs, each with a
GPU of its own. Numbers of workers take turns, another one first in each round, each time with
a fresh cluster that has read and measured a chunk in each worker before the clock starts. The clock
includes opening the slides, making their graphs, sending each when it is made, and collecting the
figures. All have to be the same figures.

The slides are one file under many names, so that a long sweep needs little disk; each name is a
slide of its own for all that decodes it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import dask
import numpy as np
from distributed import Client, LocalCluster

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from benchmarks.common import SLIDES, ensure_slide, verdict, write_json
from napari_wsigpu import open_slide
from napari_wsigpu.cli.bench import print_table
from tissue_and_stain import SETTINGS, measured, one_worker_a_gpu

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

START_SECONDS = 180
PACKAGES = ("dask", "distributed", "cupy-cuda12x", "cupy-cuda13x", "nvidia-nvimgcodec-cu12")


class Part(NamedTuple):
    """What is swept, by how many workers, and by what factor the most have to be faster."""

    device: str
    workers: tuple[int, ...]
    target: float
    side: int
    slides: int
    tiles: int


PARTS = {
    "cpu": Part("cpu", (1, 2), 1.7, side=8192, slides=12, tiles=8),
    "gpu": Part("cuda", (1, 2, 4), 3.4, side=65536, slides=12, tiles=32),
}
QUICK = {
    "cpu": Part("cpu", (1, 2), 1.7, side=4096, slides=2, tiles=4),
    "gpu": Part("cuda", (1, 2, 4), 3.4, side=32768, slides=4, tiles=32),
}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Sweep a folder with more and more workers.")
    parser.add_argument("parts", nargs="*", metavar="cpu|gpu")
    parser.add_argument("--quick", action="store_true", help="little work, one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", help="instead of 1 2, or 1 2 4")
    parser.add_argument("--slides", type=int, help="how many")
    parser.add_argument("--tile", type=int, default=256, help="side of the slides' tiles")
    parser.add_argument("--folder", type=Path, default=SLIDES, help="where slides are made")
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args()
    if not set(given.parts) <= set(PARTS):
        parser.error(f"parts are {', '.join(PARTS)}")
    dask.config.set(SETTINGS | {"distributed.comm.timeouts.connect": f"{START_SECONDS}s"})
    figures: dict[str, Any] = {"packages": versions()}
    for name in given.parts or ["cpu"]:
        part = (QUICK if given.quick else PARTS)[name]
        part = part._replace(
            workers=tuple(given.workers or part.workers), slides=given.slides or part.slides
        )
        paths = many_slides(given.folder, part, given.tile)
        for rounds_done in sweep_in_turns(part, paths, 1 if given.quick else given.rounds):
            figures[name] = rounds_done
            write_json(given.json, figures)
        report(name, part, figures[name], timed=not given.quick)


def many_slides(folder: Path, part: Part, tile: int) -> list[Path]:
    """Return paths of as many slides as wanted, and one to warm up with: links of one file."""
    source = ensure_slide(folder, part.side, "jpeg", tile)
    names = folder / "sweep" / source.stem
    names.mkdir(parents=True, exist_ok=True)
    paths = [names / f"{number}.svs" for number in range(part.slides + 1)]
    for path in paths:
        path.unlink(missing_ok=True)
        path.hardlink_to(source)
    return paths


def sweep_in_turns(part: Part, paths: Sequence[Path], rounds: int) -> Any:
    """Yield what is known after each round."""
    runs: dict[int, list[dict[str, Any]]] = {count: [] for count in part.workers}
    expected: list[NDArray[np.float64]] = []
    difference = 0.0
    for turn in range(rounds):
        first = turn % len(part.workers)
        for count in (*part.workers[first:], *part.workers[:first]):
            run, found = one_sweep(part, paths, count)
            runs[count].append(run)
            print(f"{part.device}, {count} worker(s): {run['seconds']:.2f} s", flush=True)
            expected = expected or found
            pairs = zip(expected, found, strict=True)
            difference = max(difference, *(float(abs(old - new).max()) for old, new in pairs))
        seconds = {
            count: statistics.median(run["seconds"] for run in done) for count, done in runs.items()
        }
        yield {
            **part._asdict(),
            "pixels": part.slides * part.side**2,
            "rounds": turn + 1,
            "runs": runs,
            "seconds": seconds,
            "speedup": {count: seconds[part.workers[0]] / took for count, took in seconds.items()},
            "largest_difference": difference,
        }


def one_sweep(
    part: Part, paths: Sequence[Path], count: int
) -> tuple[dict[str, Any], list[NDArray[np.float64]]]:
    """Sweep the slides once with a cluster of that many workers."""
    with ExitStack() as stack:
        if part.device == "cpu":
            cluster: Any = LocalCluster(
                n_workers=count, threads_per_worker=1, memory_limit=0, dashboard_address=":0"
            )
        else:
            cluster = one_worker_a_gpu(count, memory_limit=0)
        stack.enter_context(cluster)
        client = stack.enter_context(Client(cluster, timeout=START_SECONDS))
        client.wait_for_workers(count, timeout=START_SECONDS)
        addresses = list(client.scheduler_info(n_workers=-1)["workers"])
        [warm] = work(part, paths[-1:])
        warming = [
            client.compute(warm.blocks[0, number % warm.numblocks[1]], workers=[address])
            for number, address in enumerate(addresses)
        ]
        for future in warming:
            future.result(timeout=START_SECONDS)
        del warming, future
        load = os.getloadavg()[0]
        before = sum(client.run(cpu_seconds).values())
        begin = time.perf_counter()
        found = client.gather([client.compute(stains) for stains in work(part, paths[:-1])])
        seconds = time.perf_counter() - begin
        busy = sum(client.run(cpu_seconds).values()) - before
    return {"seconds": seconds, "cpu_seconds_of_workers": busy, "load_before": load}, found


def cpu_seconds() -> float:
    """Return for how long this process has kept cores busy."""
    return sum(os.times()[:2])


def work(part: Part, paths: Sequence[Path]) -> Iterator[dask.array.Array]:
    """Yield an array for each slide: a row of four mean figures for each chunk."""
    for path in paths:
        with open_slide(path, "cpu" if part.device == "cpu" else "auto") as slide:
            level = slide.levels[0]
            tile = level.chunks[:2]
            stains = measured(level.to_dask(part.tiles, part.device), tile)
        ones = tuple((1,) * blocks for blocks in stains.numblocks[:2])
        yield stains.map_blocks(mean_of_tiles, chunks=(*ones, (4,)), meta=np.empty((0, 0, 0)))


def mean_of_tiles(figures: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean of the figures of tiles, shape (1, 1, 4)."""
    mean: NDArray[np.float64] = figures.mean((0, 1), keepdims=True)
    return mean


def report(name: str, part: Part, found: dict[str, Any], *, timed: bool) -> None:
    """Print what was measured, and whether it is enough where it took long enough to tell."""
    rows = [
        (
            str(count),
            f"{seconds:.2f} s",
            f"{found['pixels'] / seconds / 1e9:.2f} GP/s",
            f"{found['speedup'][count]:.2f}",
        )
        for count, seconds in found["seconds"].items()
    ]
    heads = ("workers", "median", "rate", "speed-up")
    print_table(f"{name}: {part.slides} slides of {part.side} x {part.side}", heads, rows)
    same = verdict(found["largest_difference"] == 0)
    print(f"the same figures: {same} (largest difference {found['largest_difference']:g})")
    most = PARTS[name].workers[-1]
    if timed and most in found["speedup"]:
        reached = found["speedup"][most]
        print(f"{most} workers >= {part.target} x: {verdict(reached >= part.target)}")


def versions() -> dict[str, str]:
    """Return the versions of what was used beside the usual packages."""
    return {
        item.metadata["Name"]: item.version
        for item in metadata.distributions()
        if item.metadata["Name"] in PACKAGES
    }


if __name__ == "__main__":
    main()
