"""Several ways to do the same work, timed in turn."""

from __future__ import annotations

import gc
import logging
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks.transfers.interrupt import late_interrupt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

logger = logging.getLogger(__name__)


class Way(NamedTuple):
    """One way to do a piece of work.

    Attributes
    ----------
    name : str
        Its name.
    seconds : callable
        Does the work on one item, and returns how long that took.
    pixels : callable
        Does it likewise, and returns on the host what came of it.
    peer : bool
        Whether others wrote it, so that its failures are not ours.
    """

    name: str
    seconds: Callable[[Any], float]
    pixels: Callable[[Any], NDArray[Any]]
    peer: bool = False


class Absent(NamedTuple):
    """A way that this machine lacks, or that the work doesn't suit."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Case:
    """Work that several ways can do.

    Attributes
    ----------
    name : str
        Its name.
    items : sequence
        What is worked on: the first item to warm up and to check pixels, then one a round.
    ways : sequence of Way or Absent
        Who does it.
    size : int
        Decoded bytes of one item.
    difference : callable
        Given an item and pixels, returns their largest difference from the right ones.
    tolerance : float
        The largest difference that is not wrong.
    """

    name: str
    items: Sequence[Any]
    ways: Sequence[Way | Absent]
    size: int
    difference: Callable[[Any, NDArray[Any]], float]
    tolerance: float = 0


@dataclass(frozen=True, slots=True)
class Row:
    """What came of one way; its times and rate are None where `missing` says why.

    Attributes
    ----------
    case, way : str
        Names.
    median_ms, best_ms : float or None
        Milliseconds an item, over all rounds.
    megabytes_a_second : float or None
        Decoded bytes in the median time.
    largest_difference : float or None
        From the right pixels.
    wrong : bool
        Whether the pixels are wrong, or a way of ours failed.
    missing : str
        Why there is no time.
    """

    case: str
    way: str
    median_ms: float | None = None
    best_ms: float | None = None
    megabytes_a_second: float | None = None
    largest_difference: float | None = None
    wrong: bool = False
    missing: str = ""


def way(
    name: str,
    work: Callable[[Any], Any],
    prepare: Callable[[], object] = lambda: None,
    host: Callable[[Any], NDArray[Any]] = np.asarray,
    *,
    peer: bool = False,
) -> Way:
    """Return a way that is timed in this process.

    Parameters
    ----------
    name : str
        Its name.
    work : callable
        Does the work on one item; this is timed.
    prepare : callable
        Called before, untimed.
    host : callable
        Makes pixels on the host of what `work` returns.
    peer : bool
        Whether others wrote it.
    """

    def seconds(item: Any) -> float:
        prepare()
        begin = time.perf_counter()
        result = work(item)
        taken = time.perf_counter() - begin
        del result
        return taken

    def pixels(item: Any) -> NDArray[Any]:
        prepare()
        return host(work(item))

    return Way(name, seconds, pixels, peer)


def measure(case: Case) -> list[Row]:
    """Check every way's pixels, then time all in turn; another one is first each round.

    Ctrl-C waits for what is being done: others' threads would go on with it.

    Returns
    -------
    list of Row
        One a way, in their order.
    """
    rows: dict[str, Row] = {}
    ready: list[Way] = []
    for each in case.ways:
        if isinstance(each, Absent):
            rows[each.name] = Row(case.name, each.name, missing=f"not here: {each.reason}")
            continue
        rows[each.name] = checked = _check(case, each)
        if not checked.missing:
            ready.append(each)
    seconds: dict[str, list[float]] = {each.name: [] for each in ready}
    gc.collect()
    for turn, item in enumerate(case.items[1:]):
        first = turn % max(1, len(ready))
        for each in ready[first:] + ready[:first]:
            with late_interrupt():
                seconds[each.name].append(each.seconds(item))
    return [_timed(case, row, seconds.get(row.way, [])) for row in rows.values()]


def _check(case: Case, each: Way) -> Row:
    item = case.items[0]
    try:
        with late_interrupt():
            difference = case.difference(item, each.pixels(item))
    except Exception as error:  # a way that fails is a row, and the others go on
        logger.debug("%s failed", each.name, exc_info=True)
        reason = " ".join(str(error).split()) or type(error).__name__
        return Row(case.name, each.name, wrong=not each.peer, missing=f"failed: {reason}")
    wrong = not difference <= case.tolerance
    return Row(case.name, each.name, largest_difference=difference, wrong=wrong)


def _timed(case: Case, row: Row, seconds: Sequence[float]) -> Row:
    if not seconds:
        return row
    median = statistics.median(seconds)
    return Row(
        row.case,
        row.way,
        round(median * 1e3, 3),
        round(min(seconds) * 1e3, 3),
        round(case.size / 1e6 / median, 1),
        row.largest_difference,
        row.wrong,
    )
