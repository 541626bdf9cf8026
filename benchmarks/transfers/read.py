"""``read``: a whole level, to the host and to the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.transfers import reading
from benchmarks.transfers.kvikio_process import KvikioModes
from benchmarks.transfers.plain_copy import plain_copy
from benchmarks.transfers.readers import as_ways, to_the_device, to_the_host
from benchmarks.transfers.timing import Case

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.transfers.reference import Region
    from benchmarks.transfers.session import Session
    from benchmarks.transfers.target import Target
    from benchmarks.transfers.timing import Absent, Way


def run(session: Session, path: Path, level: int, *, cold: bool) -> None:
    """Measure a level of a slide.

    Parameters
    ----------
    session : Session
        The run.
    path : Path
        The slide.
    level : int
        Index of the level.
    cold : bool
        Whether the file leaves the page cache before each read.
    """
    target = session.target(path, level, whole=True, cold=cold)
    regions = [target.whole] * (1 + session.rounds)
    temperature = "cold" if cold else "warm"
    found = ways_to_read(session, target)
    found["device"] += as_ways([plain_copy(target, session.stack)])
    for where, ways in found.items():
        session.run(
            region_case(f"whole level to the {where}, {temperature}", target, regions, ways)
        )


def ways_to_read(session: Session, target: Target) -> dict[str, list[Way | Absent]]:
    """Return all ways to read regions, to the host and to the device."""
    modes = KvikioModes(target.no_gpu, session.stack)
    by_kvikio = modes.ways(
        reading.read,
        lambda region: (target.path, target.level, region, target.cold),
        "" if target.raw else reading.KVIKIO_ONLY_RAW,
    )
    first, *others = as_ways(to_the_device(target, session.stack))
    return {
        "host": as_ways(to_the_host(target, session.stack)),
        "device": [first, *by_kvikio, *others],
    }


def region_case(
    name: str, target: Target, regions: Sequence[Region], ways: Sequence[Way | Absent]
) -> Case:
    """Return the case of reading some regions of one size."""
    size = target.size(regions[0])
    return Case(name, regions, ways, size, target.difference, target.tolerance)
