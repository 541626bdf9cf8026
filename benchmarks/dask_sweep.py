"""Process a folder of slides with more and more Dask workers, on the CPU or on GPUs.

Usage: ``python -m benchmarks.dask_sweep [cpu] [gpu] [--quick] [--json OUT]``; cpu by default

Every tile of level 0 of every slide is decoded, and its stains are measured where it was decoded,
as in ``examples/tissue_and_stain.py``; only one row of results per chunk comes back. Each worker is
a process with one thread: 1 and 2 workers on the CPU; 1, 2 and 4 on GPUs, each with its own GPU.
The numbers of workers alternate, a different one first in each round, each time in a fresh cluster
whose workers have processed one chunk before the clock starts. The time includes opening the
slides, building and sending their graphs, and collecting the results, which must be the same for
every cluster.

The slides are one file under many names, so that a long sweep needs little disk space; everything
treats each name as a separate slide.
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
from tissue_and_stain import SETTINGS, measured, start_gpu_cluster

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

START_SECONDS = 180
PACKAGES = ("dask", "distributed", "cupy-cuda12x", "cupy-cuda13x", "nvidia-nvimgcodec-cu12")


class Part(NamedTuple):
    """The slides, the numbers of workers, and the required speed-up of the largest number."""

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
    args = parser.parse_args()
    if not set(args.parts) <= set(PARTS):
        parser.error(f"parts are {', '.join(PARTS)}")
    dask.config.set(SETTINGS | {"distributed.comm.timeouts.connect": f"{START_SECONDS}s"})
    figures: dict[str, Any] = {"packages": versions()}
    for name in args.parts or ["cpu"]:
        part = (QUICK if args.quick else PARTS)[name]
        part = part._replace(
            workers=tuple(args.workers or part.workers), slides=args.slides or part.slides
        )
        paths = many_slides(args.folder, part, args.tile)
        for rounds_done in sweep_in_turns(part, paths, 1 if args.quick else args.rounds):
            figures[name] = rounds_done
            write_json(args.json, figures)
        report(name, part, figures[name], timed=not args.quick)


def many_slides(folder: Path, part: Part, tile: int) -> list[Path]:
    """Return the paths of the slides and one for the warm-up, all links to one file."""
    source = ensure_slide(folder, part.side, "jpeg", tile)
    names = folder / "sweep" / source.stem
    names.mkdir(parents=True, exist_ok=True)
    paths = [names / f"{number}.svs" for number in range(part.slides + 1)]
    for path in paths:
        path.unlink(missing_ok=True)
        path.hardlink_to(source)
    return paths


def sweep_in_turns(part: Part, paths: Sequence[Path], rounds: int) -> Any:
    """Yield the results after each round."""
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
    """Process the slides once with a cluster of that many workers."""
    with ExitStack() as stack:
        if part.device == "cpu":
            cluster: Any = LocalCluster(
                n_workers=count, threads_per_worker=1, memory_limit=0, dashboard_address=":0"
            )
        else:
            cluster = start_gpu_cluster(count, memory_limit=0)
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
    """Return the CPU time of this process."""
    return sum(os.times()[:2])


def work(part: Part, paths: Sequence[Path]) -> Iterator[dask.array.Array]:
    """Yield an array per slide with a row of four means per chunk."""
    for path in paths:
        with open_slide(path, "cpu" if part.device == "cpu" else "auto") as slide:
            level = slide.levels[0]
            tile = level.chunks[:2]
            stains = measured(level.to_dask(part.tiles, part.device), tile)
        ones = tuple((1,) * blocks for blocks in stains.numblocks[:2])
        yield stains.map_blocks(mean_of_tiles, chunks=(*ones, (4,)), meta=np.empty((0, 0, 0)))


def mean_of_tiles(figures: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean over tiles, shape (1, 1, 4)."""
    mean: NDArray[np.float64] = figures.mean((0, 1), keepdims=True)
    return mean


def report(name: str, part: Part, found: dict[str, Any], *, timed: bool) -> None:
    """Print the results, and whether they meet the target if the run was long enough."""
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
    """Return the versions of additional packages."""
    return {
        item.metadata["Name"]: item.version
        for item in metadata.distributions()
        if item.metadata["Name"] in PACKAGES
    }


if __name__ == "__main__":
    main()
