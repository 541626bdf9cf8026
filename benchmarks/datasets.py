"""Time data sets of PyTorch: ours beside those of other libraries, by the same loop.

Usage: ``python -m benchmarks.datasets [SLIDE] [--processes 2] [--devices cpu cuda] [--json OUT]``

Patches of ``--size`` pixels at ``--factor`` times the micrometres of level 0: a grid in order, the
same shuffled, and random places, in batches. Ours are a `PatchStream` by itself (threads) and, on
the CPU, `PatchStream` and `PatchDataset` in a ``DataLoader`` of so many processes; others read one
patch at a time in a ``DataLoader`` of as many processes, as their users write it, and cuCIM by its
own threads too. The loop takes each batch, on ``cuda`` as a tensor there, and adds one pixel of
each patch. Loaders are started, and their first batch is taken, before the clock runs. In each
round another one is first; other libraries read ``--peer-patches``. Beside patches a second stand
the milliseconds of processor time that one takes, of all processes, which other work on the machine
changes less. A slide is made where none is given.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks.common import SLIDES, ensure_slide, write_json
from benchmarks.dataset_readers import cucim_batches, peers
from napari_wsigpu import open_slide
from napari_wsigpu.bench import print_table
from napari_wsigpu.datasets import Patches
from napari_wsigpu.torch import PatchDataset, PatchStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    # Makes the loader of a turn.
    Maker = Callable[[], Iterator[Any]]

PLACES = ("in order", "shuffled", "at random places")
CHECKED = 32


def main() -> None:
    """Run it."""
    given = _arguments()
    multiprocessing.set_forkserver_preload(["benchmarks.dataset_readers"])
    path = given.slide or ensure_slide(given.folder, given.side, "jpeg")
    with open_slide(path) as slide:
        if slide.mpp is None:
            raise SystemExit(f"'{path}' does not say its micrometres a pixel")
        mpp = max(slide.mpp) * given.factor
    span = given.size * given.factor
    with open_slide(path) as slide:
        last = np.array(slide.dimensions) - span
    grid = Patches.grid([path], given.size, mpp=mpp)
    grid = grid[(grid.locations <= last).all(axis=1)][: given.patches]
    anywhere = np.random.default_rng(1).integers(last + 1, size=(len(grid), 2)).tolist()
    random = Patches.at({path: anywhere}, given.size, mpp=mpp)
    figures: dict[str, Any] = {"options": {k: str(v) for k, v in vars(given).items()}, "rows": []}
    for device in given.devices:
        for places in given.places:
            patches = random if places == PLACES[2] else grid
            found = makers(patches, given, device, shuffle=places == PLACES[1])
            figures["rows"] += compare(f"{device}, {places}", found, given, device)
    figures["differences"] = differences(grid, given)
    write_json(given.json, figures)


def makers(
    patches: Patches, given: argparse.Namespace, device: str, *, shuffle: bool
) -> dict[str, tuple[Maker, int]]:
    """Return what makes each loader, and how many batches it is asked for."""
    batch, processes = given.batch, given.processes
    indices = np.random.default_rng(0).permutation(len(patches)) if shuffle else None
    chosen = np.arange(len(patches)) if indices is None else indices
    places = [(x, y) for x, y in patches.locations[chosen].tolist()]
    whole = len(patches) // batch
    part = min(whole, max(2, given.peer_patches // batch))
    cpu = device == "cpu"
    context = "fork" if cpu else "forkserver"
    loading = {
        "num_workers": processes,
        "pin_memory": not cpu,
        "multiprocessing_context": context,
    }

    def stream(on: str) -> PatchStream:
        return PatchStream(patches, batch, shuffle=shuffle, device=on)

    def by_index() -> Iterator[Any]:
        data = PatchDataset(patches[chosen])
        return iter(DataLoader(data, batch, collate_fn=data.collate, **loading))

    found: dict[str, tuple[Maker, int]] = {"ours, threads": (lambda: iter(stream(device)), whole)}
    if cpu:
        found["ours, stream in processes"] = (
            lambda: iter(DataLoader(stream("cpu"), batch_size=None, **loading)),
            whole,
        )
        found["ours, by index in processes"] = by_index, whole
    if given.alone:
        return found
    for name, kind in peers().items():
        peer = kind(str(patches.paths[0]), places, given.size, given.factor)
        found[f"{name}, processes"] = (
            lambda peer=peer: iter(DataLoader(peer, batch, **loading)),  # type: ignore[misc]
            part,
        )
        if name == "cuCIM":
            found["cuCIM, threads"] = (
                lambda peer=peer: cucim_batches(  # type: ignore[misc]
                    peer, range(part * batch), batch, processes, device
                ),
                part,
            )
    return found


def compare(
    title: str, found: dict[str, tuple[Maker, int]], given: argparse.Namespace, device: str
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
            make, batches = found[name]
            try:
                rate, cost = timed(make, batches, device)
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


def timed(make: Maker, batches: int, device: str) -> tuple[float, float]:
    """Return patches a second that a loader hands out after its first batch, and CPU ms of each."""
    loader = make()
    total = torch.zeros((), dtype=torch.int64, device=device)
    total += use(next(loader), device)[0]
    begin, worked = time.perf_counter(), cpu_seconds()
    count = 0
    for batch in islice(loader, batches - 1):
        pixel, number = use(batch, device)
        total += pixel
        count += number
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


def differences(patches: Patches, given: argparse.Namespace) -> dict[str, int]:
    """Compare the first patches of others with ours; return the largest differences."""
    few = patches[:CHECKED]
    places = [(x, y) for x, y in few.locations.tolist()]
    ours, _ = next(iter(PatchStream(few, len(few))))
    found = {}
    for name, kind in {} if given.alone else peers().items():
        peer = kind(str(few.paths[0]), places, given.size, given.factor)
        theirs = torch.stack([peer[index][0] for index in range(len(few))])
        found[name] = int((ours.int() - theirs.int()).abs().max())
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
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    parser.add_argument("--devices", nargs="+", choices=("cpu", "cuda"), default=devices)
    parser.add_argument("--alone", action="store_true", help="leave the peers out")
    parser.add_argument("--folder", type=Path, default=SLIDES, help="where slides are made")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
