"""Time a data set on one GPU and then on several, with a process per GPU, as training reads it.

Usage: ``python -m benchmarks.dataset_ranks SLIDE ... [--gpus 1 2] [--batch 256] [--json OUT]``

The patches have ``--size`` pixels at ``--factor`` times the pixel size of level 0, as a grid in
order. Passing one slide under several names makes a longer sweep, because each name counts as a
slide. Each rank reads its share into tensors on its GPU and adds one pixel of each patch. The clock
starts when all ranks have their first batch and stops when the last one finishes. The sum over all
ranks must equal that of a single one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common import coarser_mpp, write_json
from napari_wsigpu.cli.bench import print_table

if TYPE_CHECKING:
    from multiprocessing.queues import Queue
    from multiprocessing.synchronize import Barrier

# Local paths are irrelevant to the results.
LOCAL_PATHS = {"slides", "json"}


def read_share(
    rank: int, ranks: int, start: Barrier, results: Queue[tuple[float, float, int, int]], given: Any
) -> None:
    """Read the share of a rank; report its start, its end, the patches and the sum of pixels."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    import torch

    from napari_wsigpu import open_slide
    from napari_wsigpu.datasets import Patches
    from napari_wsigpu.datasets.torch import PatchStream

    with open_slide(given.slides[0]) as slide:
        mpp = coarser_mpp(slide, given.factor)
    grid = Patches.grid(given.slides, given.size, mpp=mpp)
    stream = PatchStream(grid, given.batch, device=given.device, rank=rank, world_size=ranks)
    total = torch.zeros((), dtype=torch.int64, device=given.device)
    count = 0
    batches = iter(stream)
    for number, (pixels, indices) in enumerate(batches):
        total += pixels[:, :, 0, 0].sum(dtype=torch.int64)
        if number == 0:
            start.wait()
            begin = time.perf_counter()
        else:
            count += len(indices)
    summed = int(total)  # waits for the device
    results.put((begin, time.perf_counter(), count, summed))
    stream.close()


def timed(ranks: int, given: argparse.Namespace) -> tuple[float, int]:
    """Return patches per second of all ranks together, and the sum of their pixels."""
    context = get_context("spawn")
    start = context.Barrier(ranks)
    results: Queue[tuple[float, float, int, int]] = context.Queue()
    processes = [
        context.Process(target=read_share, args=(rank, ranks, start, results, given))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    begins, ends, counts, sums = zip(*found, strict=True)
    return sum(counts) / (max(ends) - min(begins)), sum(sums)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("slides", type=Path, nargs="+")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--size", type=int, default=224, help="of patches")
    parser.add_argument("--factor", type=int, default=2, help="pixels of level 0 across one")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args()
    runs: dict[int, list[float]] = {number: [] for number in given.gpus}
    sums = set()
    for _ in range(given.rounds):
        for number, values in runs.items():
            rate, total = timed(number, given)
            values.append(round(rate, 1))
            sums.add(total)
    if len(sums) != 1:
        raise SystemExit(f"Ranks read other pixels together than one alone: {sorted(sums)}")
    medians = {number: statistics.median(values) for number, values in runs.items()}
    one = medians[min(medians)]
    rows = [[str(n), f"{rate:,.0f}", f"{rate / one:.2f}"] for n, rate in medians.items()]
    print_table("data set over GPUs", ["GPUs", "patches/s", "x"], rows)
    recorded = {name: str(value) for name, value in vars(given).items() if name not in LOCAL_PATHS}
    rows_json = [{"gpus": n, "values": runs[n], "median": medians[n]} for n in runs]
    write_json(given.json, {"options": recorded, "rows": rows_json})


if __name__ == "__main__":
    main()
