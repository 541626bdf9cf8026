"""Time batches of training patches at twice the pixel size of level 0, as PyTorch tensors.

Usage: ``python -m benchmarks.datasets [SLIDE] [--devices cpu cuda] [--json OUT]``

The patches are a grid, in order and shuffled, and random positions. Our `PatchStream` reads them in
this process; on the CPU, `PatchStream` and `PatchDataset` also run in a ``DataLoader`` with worker
processes. Other libraries use as many processes, as `benchmarks.dataset_readers` describes, and
cuCIM also its own threads. The loop takes each batch (a device tensor on ``cuda``) and adds one
pixel of each patch. On ``cuda`` the pixels of other libraries are averaged either by their
processes or by the GPU, which then receives all pixels of level 0.

The clock starts after the processes have started and each first batch has arrived. A different
loader is first in each round. Other libraries read ``--peer-patches``, or as many as ``--limit``
seconds allow. Next to patches per second, the table shows the CPU time per patch in all processes,
which depends less on other work on the machine. Without a slide, one is made.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks.common import SLIDES, coarser_mpp, ensure_slide, write_json
from benchmarks.dataset_readers import Workers, cucim_batches, peers
from napari_wsigpu import open_slide
from napari_wsigpu.cli.bench import print_table
from napari_wsigpu.datasets import Patches
from napari_wsigpu.datasets.torch import PatchDataset, PatchStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from benchmarks.dataset_readers import Peer

    # Creates the loader of a turn.
    Maker = Callable[[], Iterator[Any]]

PLACES = ("in order", "shuffled", "at random places")
CHECKED = 32
# Local paths are irrelevant to the results.
LOCAL_PATHS = {"slide", "folder", "json"}


def main() -> None:
    """Run the command line."""
    args = _arguments()
    path = args.slide or ensure_slide(args.folder, args.side, "jpeg")
    kinds = {} if args.alone else peers()
    readers = {name: kind(str(path), args.size, args.factor) for name, kind in kinds.items()}
    # Fork before CUDA is initialized: a forked process cannot use it.
    workers = {
        name: Workers(reader, args.batch, args.processes) for name, reader in readers.items()
    }
    try:
        measure(path, args, readers, workers)
    finally:
        for each in workers.values():
            each.close()


def measure(
    path: Path, args: argparse.Namespace, readers: dict[str, Peer], workers: dict[str, Workers]
) -> None:
    """Time all loaders on all sets of positions; write the results."""
    with open_slide(path) as slide:
        mpp = coarser_mpp(slide, args.factor)
        last = np.array(slide.dimensions) - args.size * args.factor
    grid = Patches.grid([path], args.size, mpp=mpp)
    grid = grid[(grid.locations <= last).all(axis=1)][: args.patches]
    anywhere = np.random.default_rng(1).integers(last + 1, size=(len(grid), 2)).tolist()
    random = Patches.at({path: anywhere}, args.size, mpp=mpp)
    options = {name: str(value) for name, value in vars(args).items() if name not in LOCAL_PATHS}
    figures: dict[str, Any] = {"options": options, "rows": []}
    devices = args.devices or (["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
    for device in devices:
        for positions in args.positions:
            patches = random if positions == PLACES[2] else grid
            shuffle = positions == PLACES[1]
            chosen = np.arange(len(patches))
            if shuffle:
                chosen = np.random.default_rng(0).permutation(chosen)
            found = our_makers(patches, chosen, args, device, shuffle=shuffle)
            theirs = patches.locations[chosen[: args.peer_patches]].tolist()
            found |= their_makers(theirs, args, device, readers, workers)
            figures["rows"] += compare(f"{device}, {positions}", found, args, device)
    figures["differences"] = differences(grid, readers)
    write_json(args.json, figures)


def our_makers(
    patches: Patches,
    chosen: NDArray[np.int64],
    args: argparse.Namespace,
    device: str,
    *,
    shuffle: bool,
) -> dict[str, Maker]:
    """Return the factories of our loaders."""

    def stream(on: str) -> PatchStream:
        return PatchStream(patches, args.batch, shuffle=shuffle, device=on)

    if device != "cpu":
        return {"ours, threads": lambda: iter(stream(device))}
    loading = {"num_workers": args.processes, "multiprocessing_context": "fork"}
    data = PatchDataset(patches[chosen])
    return {
        "ours, threads": lambda: iter(stream("cpu")),
        "ours, stream in processes": lambda: iter(
            DataLoader(stream("cpu"), batch_size=None, **loading)
        ),
        "ours, by index in processes": lambda: iter(
            DataLoader(data, args.batch, collate_fn=data.collate, **loading)
        ),
    }


def their_makers(
    positions: Sequence[tuple[int, int]],
    args: argparse.Namespace,
    device: str,
    readers: dict[str, Peer],
    workers: dict[str, Workers],
) -> dict[str, Maker]:
    """Return the factories of the other libraries' loaders."""
    found: dict[str, Maker] = {}
    for name, by in workers.items():
        found[f"{name}, processes"] = partial(by.batches, positions, device, there=False)
        if device != "cpu":
            found[f"{name}, processes, averaged there"] = partial(
                by.batches, positions, device, there=True
            )
    if "cuCIM" in readers:
        found["cuCIM, threads"] = partial(
            cucim_batches, readers["cuCIM"], positions, args.batch, args.processes, device
        )
    return found


def compare(
    title: str, found: dict[str, Maker], args: argparse.Namespace, device: str
) -> list[dict[str, Any]]:
    """Time loaders alternately; return patches per second of each."""
    rows: dict[str, dict[str, Any]] = {
        name: {"case": title, "loader": name, "values": [], "cpu_ms": []} for name in found
    }
    names = list(found)
    for number in range(args.rounds):
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            if number >= args.peer_rounds and "ours" not in name:
                continue
            try:
                rate, cost = timed(found[name], args.limit, device)
            except Exception as error:  # a failing loader must not stop the others
                print(f"MISSING {title}, {name}: {error!r}", flush=True)
            else:
                rows[name]["values"].append(round(rate, 1))
                rows[name]["cpu_ms"].append(round(cost, 3))
    measured = [row for row in rows.values() if row["values"]]
    for row in measured:
        row["median"] = statistics.median(row["values"])
        row["median_cpu_ms"] = statistics.median(row["cpu_ms"])
    others = [row for row in measured if "ours" not in row["loader"]]
    best = max((row["median"] for row in others), default=0)
    least = min((row["median_cpu_ms"] for row in others), default=0)
    cells = [
        [
            row["loader"],
            f"{row['median']:,.0f}",
            f"{row['median'] / best:.2f}" if best else "-",
            f"{row['median_cpu_ms']:.2f}",
            f"{least / row['median_cpu_ms']:.2f}" if least else "-",
        ]
        for row in measured
    ]
    print_table(title, ["loader", "patches/s", "x best peer", "CPU ms a patch", "x"], cells)
    return measured


def timed(make: Maker, limit: float, device: str) -> tuple[float, float]:
    """Return patches per second after a loader's first batch, and CPU milliseconds per patch.

    The clock stops at its last batch, or at the first one after the limit.
    """
    loader = make()
    total = torch.zeros((), dtype=torch.int64, device=device)
    total += use(next(loader), device)[0]
    begin, worked = time.perf_counter(), cpu_seconds()
    count = 0
    for batch in loader:
        pixel, number = use(batch, device)
        total += pixel
        count += number
        if time.perf_counter() - begin > limit:
            break
    if device != "cpu":
        torch.cuda.synchronize()
    seconds, worked = time.perf_counter() - begin, cpu_seconds() - worked
    close = getattr(loader, "close", None)
    if close is not None:
        close()
    return count / seconds, worked / count * 1e3


def cpu_seconds() -> float:
    """Return the CPU time of this process and its children, including finished ones."""
    ticks = 0
    for child in multiprocessing.active_children():
        # utime and stime are fields 14 and 15; the name in parentheses may contain spaces.
        fields = Path(f"/proc/{child.pid}/stat").read_text("utf-8").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    ended = os.times()
    ended_seconds = ended.children_user + ended.children_system
    return time.process_time() + ended_seconds + ticks / os.sysconf("SC_CLK_TCK")


def use(batch: Any, device: str) -> tuple[Tensor, int]:
    """Move a batch to a device; return the sum of one pixel per patch, and their number."""
    pixels = batch if isinstance(batch, torch.Tensor) else batch[0]
    pixels = pixels.to(device, non_blocking=True)
    return pixels[:, :, 0, 0].sum(dtype=torch.int64), len(pixels)


def differences(patches: Patches, readers: dict[str, Peer]) -> dict[str, int]:
    """Compare the peers' first patches with ours; return the largest differences."""
    few = patches[:CHECKED]
    stream = PatchStream(few, len(few))
    ours = next(iter(stream))[0].permute(0, 2, 3, 1).numpy().astype(int)
    found = {}
    for name, peer in readers.items():
        theirs = np.stack([peer.patch(position) for position in few.locations.tolist()])
        found[name] = int(np.abs(ours - theirs).max())
    print_table(
        "largest difference from ours", ["reader", ""], [[k, str(v)] for k, v in found.items()]
    )
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("slide", type=Path, nargs="?", help="by default one is made")
    parser.add_argument("--side", type=int, default=32768, help="of the slide that is made")
    parser.add_argument("--size", type=int, default=224, help="of patches")
    parser.add_argument("--factor", type=int, default=2, help="pixels of level 0 across one")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--patches", type=int, default=1 << 20, help="take only so many")
    parser.add_argument("--positions", nargs="+", choices=PLACES, default=PLACES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-rounds", type=int, default=99, help="at most")
    parser.add_argument("--peer-patches", type=int, default=2048)
    parser.add_argument("--limit", type=float, default=60, help="seconds of each turn, at most")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--devices", nargs="+", choices=("cpu", "cuda"), help="by default all")
    parser.add_argument("--alone", action="store_true", help="leave the peers out")
    parser.add_argument("--folder", type=Path, default=SLIDES, help="where slides are made")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
