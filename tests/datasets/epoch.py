"""A program that records the patches of an epoch and resumes after it was killed."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from napari_wsigpu.datasets import Order, PatchBatches, Patches

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BATCH, SECONDS = 3, 0.05


def patches_of(paths: Sequence[str]) -> Patches:
    """Return the dataset that all runs use."""
    return Patches.grid(paths, 24, mpp=0.998)


def lines_of(log: Path) -> list[dict[str, Any]]:
    """Return the recorded batches, each with the state after it, without a truncated last line."""
    text = log.read_text("utf-8") if log.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def batches_of(
    kind: str, paths: Sequence[str], rank: int, ranks: int, meeting: Path, state: Any
) -> Iterator[tuple[list[int], Any]]:
    """Yield the indices of each batch, and the state from which to continue after it.

    Ranks of PyTorch meet by a file, which is a new one after they were killed.
    """
    patches = patches_of(paths)
    source: Any
    if kind == "arrays":
        source = PatchBatches(patches, Order(BATCH, shuffle=True, shard=rank, shards=ranks))
    else:
        import torch.distributed

        from napari_wsigpu.datasets.torch import PatchStream

        store = torch.distributed.FileStore(str(meeting), ranks)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        source = PatchStream(patches, BATCH, shuffle=True)
        if kind == "workers":
            from torchdata.stateful_dataloader import StatefulDataLoader

            source = StatefulDataLoader(source, batch_size=None, num_workers=2)
    if state is not None:
        source.load_state_dict(state)
    for _, indices in source:
        yield indices.tolist(), source.state_dict()


def main(kind: str, rank: str, ranks: str, log: str, *paths: str) -> None:
    """Iterate over the epoch."""
    done = lines_of(Path(log))
    state = done[-1]["state"] if done else None
    Path(log).write_text("".join(json.dumps(line) + "\n" for line in done), "utf-8")
    meeting = Path(log).with_name("again" if done else "first")
    with Path(log).open("a", encoding="utf-8") as notes:
        for indices, after in batches_of(kind, paths, int(rank), int(ranks), meeting, state):
            notes.write(json.dumps({"indices": indices, "state": after}) + "\n")
            notes.flush()
            time.sleep(SECONDS)


if __name__ == "__main__":
    main(*sys.argv[1:])
