"""``viewport``: random, unaligned regions, each read for the first time."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from benchmarks.transfers.read import region_case, ways_to_read
from benchmarks.transfers.reference import Region

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.transfers.session import Session
    from benchmarks.transfers.target import Target


def run(session: Session, path: Path, sizes: Sequence[int], *, cold: bool) -> None:
    """Measure square regions of level 0.

    Parameters
    ----------
    session : Session
        The run.
    path : Path
        The slide.
    sizes : sequence of int
        Their sides; those that level 0 is too small for are left out, which is said.
    cold : bool
        Whether the file leaves the page cache before each read.
    """
    target = session.target(path, 0, whole=False, cold=cold)
    ways = ways_to_read(session, target)
    for size in sizes:
        if size > min(target.image.width, target.image.height):
            session.leave_out(f"{size} x {size}", "level 0 is smaller")
            continue
        regions = places(target, size, 1 + session.rounds)
        for where, found in ways.items():
            name = f"{size} x {size} to the {where}, {'cold file' if cold else 'warm file'}"
            session.run(region_case(name, target, regions, found))


def places(target: Target, size: int, count: int) -> list[Region]:
    """Return random places, the same ones for a size each time."""
    choose = random.Random(size)
    right, bottom = target.image.width - size, target.image.height - size
    return [
        Region(choose.randint(0, right), choose.randint(0, bottom), size, size)
        for _ in range(count)
    ]
