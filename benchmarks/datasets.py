"""Time batches of patches for training, at twice the micrometres a pixel, into PyTorch's tensors.

Usage: ``python -m benchmarks.datasets [SLIDE] [--devices cpu cuda] [--json OUT]``

A grid of patches, in order and shuffled, and random places: by our `PatchStream` in this process,
and on the CPU by `PatchStream` and `PatchDataset` in a ``DataLoader`` of so many processes; by
others as `benchmarks.dataset_readers` says, with as many processes, and by cuCIM's own threads too.
The loop takes each batch, on ``cuda`` as a tensor there, and adds one pixel of each patch. There
others' pixels are averaged by the processes, or by the GPU, which is given all pixels of level 0.
Processes are started, and each first batch is taken, before the clock runs. In each round another
one is first; other libraries read ``--peer-patches``, or what they read in ``--limit`` seconds.
Beside patches a second stand the milliseconds of processor time that one takes, of all processes,
which other work on the machine changes less. A slide is made where none is given.
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

    # Makes the loader of a turn.
    Maker = Callable[[], Iterator[Any]]

PLACES = ("in order", "shuffled", "at random places")
CHECKED = 32
# Paths of the machine say nothing of the figures.
UNTOLD = {"slide", "folder", "json"}


def main() -> None:
    """Run it."""
    given = _arguments()
    path = given.slide or ensure_slide(given.folder, given.side, "jpeg")
    kinds = {} if given.alone else peers()
    readers = {name: kind(str(path), given.size, given.factor) for name, kind in kinds.items()}
    # Forked before anything touches CUDA, which a forked process can't use.
    workers = {
        name: Workers(reader, given.batch, given.processes) for name, reader in readers.items()
    }
    try:
        measure(path, given, readers, workers)
    finally:
        for each in workers.values():
            each.close()


def measure(
    path: Path, given: argparse.Namespace, readers: dict[str, Peer], workers: dict[str, Workers]
) -> None:
    """Time all loaders at all places; write the figures."""
    with open_slide(path) as slide:
        mpp = coarser_mpp(slide, given.factor)
        last = np.array(slide.dimensions) - given.size * given.factor
    grid = Patches.grid([path], given.size, mpp=mpp)
    grid = grid[(grid.locations <= last).all(axis=1)][: given.patches]
    anywhere = np.random.default_rng(1).integers(last + 1, size=(len(grid), 2)).tolist()
    random = Patches.at({path: anywhere}, given.size, mpp=mpp)
    options = {name: str(value) for name, value in vars(given).items() if name not in UNTOLD}
    figures: dict[str, Any] = {"options": options, "rows": []}
    devices = given.devices or (["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
    for device in devices:
        for places in given.places:
            patches = random if places == PLACES[2] else grid
            shuffle = places == PLACES[1]
            chosen = np.arange(len(patches))
            if shuffle:
                chosen = np.random.default_rng(0).permutation(chosen)
            found = our_makers(patches, chosen, given, device, shuffle=shuffle)
            theirs = patches.locations[chosen[: given.peer_patches]].tolist()
            found |= their_makers(theirs, given, device, readers, workers)
            figures["rows"] += compare(f"{device}, {places}", found, given, device)
    figures["differences"] = differences(grid, readers)
    write_json(given.json, figures)


def our_makers(
    patches: Patches,
    chosen: NDArray[np.int64],
    given: argparse.Namespace,
    device: str,
    *,
    shuffle: bool,
) -> dict[str, Maker]:
    """Return what makes each of our loaders."""

    def stream(on: str) -> PatchStream:
        return PatchStream(patches, given.batch, shuffle=shuffle, device=on)

    if device != "cpu":
        return {"ours, threads": lambda: iter(stream(device))}
    loading = {"num_workers": given.processes, "multiprocessing_context": "fork"}
    data = PatchDataset(patches[chosen])
    return {
        "ours, threads": lambda: iter(stream("cpu")),
        "ours, stream in processes": lambda: iter(
            DataLoader(stream("cpu"), batch_size=None, **loading)
        ),
        "ours, by index in processes": lambda: iter(
            DataLoader(data, given.batch, collate_fn=data.collate, **loading)
        ),
    }


def their_makers(
    places: Sequence[tuple[int, int]],
    given: argparse.Namespace,
    device: str,
    readers: dict[str, Peer],
    workers: dict[str, Workers],
) -> dict[str, Maker]:
    """Return what makes each of others' loaders."""
    found: dict[str, Maker] = {}
    for name, by in workers.items():
        found[f"{name}, processes"] = partial(by.batches, places, device, there=False)
        if device != "cpu":
            found[f"{name}, processes, averaged there"] = partial(
                by.batches, places, device, there=True
            )
    if "cuCIM" in readers:
        found["cuCIM, threads"] = partial(
            cucim_batches, readers["cuCIM"], places, given.batch, given.processes, device
        )
    return found


def compare(
    title: str, found: dict[str, Maker], given: argparse.Namespace, device: str
) -> list[dict[str, Any]]:
    """Time loaders in turn; return patches a second of each."""
    rows: dict[str, dict[str, Any]] = {
        name: {"case": title, "loader": name, "values": [], "cpu_ms": []} for name in found
    }
    names = list(found)
    for number in range(given.rounds):
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            if number >= given.peer_rounds and "ours" not in name:
                continue
            try:
                rate, cost = timed(found[name], given.limit, device)
            except Exception as error:  # who can't do it does not end the others' turns
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
    """Return patches a second that a loader hands out after its first batch, and CPU ms of each.

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
    """Return the processor time of this process and its children, those that ended included."""
    ticks = 0
    for child in multiprocessing.active_children():
        # Behind the name in parentheses: utime and stime are fields 14 and 15 of all.
        fields = Path(f"/proc/{child.pid}/stat").read_text("utf-8").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    ended = os.times()
    ended_seconds = ended.children_user + ended.children_system
    return time.process_time() + ended_seconds + ticks / os.sysconf("SC_CLK_TCK")


def use(batch: Any, device: str) -> tuple[Tensor, int]:
    """Have a batch on a device; return the sum of one pixel of each patch, and their number."""
    pixels = batch if isinstance(batch, torch.Tensor) else batch[0]
    pixels = pixels.to(device, non_blocking=True)
    return pixels[:, :, 0, 0].sum(dtype=torch.int64), len(pixels)


def differences(patches: Patches, readers: dict[str, Peer]) -> dict[str, int]:
    """Compare the first patches of others with ours; return the largest differences."""
    few = patches[:CHECKED]
    stream = PatchStream(few, len(few))
    ours = next(iter(stream))[0].permute(0, 2, 3, 1).numpy().astype(int)
    found = {}
    for name, peer in readers.items():
        theirs = np.stack([peer.patch(place) for place in few.locations.tolist()])
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
    parser.add_argument("--places", nargs="+", choices=PLACES, default=PLACES)
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
