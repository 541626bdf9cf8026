"""Read batches of regions ahead of the caller."""

from __future__ import annotations

import atexit
import operator
import os
import random
import sys
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial
from itertools import accumulate, chain, islice, pairwise
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np

from napari_wsigpu.model.errors import RegionError, SlideError
from napari_wsigpu.reading.plan import NEVER, Cancellation, CancelledError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator


Item = TypeVar("Item")
Batch = TypeVar("Batch")

MAX_THREADS = 64
# Bytes of all batches that are ready or being read, including the caller's batch.
AHEAD_BYTES = 1 << 30


class Grouping(NamedTuple, Generic[Batch]):
    """How one call reads several batches, since a GPU needs more tiles than a small batch has.

    Attributes
    ----------
    most : int
        Largest number of batches per call.
    cut : callable
        ``cut(regions, start, stop)`` returns one batch from the regions that the call read.
    """

    most: int
    cut: Callable[[Batch, int, int], Batch]


# The flags of unfinished iterators, and the numbers of their slides.
_live: dict[Cancellation, int | None] = {}


def cancel_reads(slide: int | None = None) -> None:
    """Stop what iterators read ahead from a slide, or from all slides."""
    for cancellation, owner in list(_live.items()):
        if slide in (None, owner):
            cancellation.cancel()


# While Python exits, it joins the threads of pools, which first read all that waits for them. Only
# this function of the standard library, which isn't public, is called before.
getattr(threading, "_register_atexit", atexit.register)(cancel_reads)


def read_ahead(
    read: Callable[[list[Item], Cancellation], Batch],
    locations: Iterable[Item],
    *,
    batch_size: int | None,
    num_workers: int,
    prefetch_factor: int,
    batch_bytes: int = 0,
    grouping: Grouping[Batch] | None = None,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    slide: int | None = None,
) -> Generator[Batch, None, None]:
    """Read batches of regions ahead of the caller, in order or shuffled.

    Parameters
    ----------
    read : callable
        ``read(locations, cancellation)`` reads the regions of a batch.
    locations, batch_size, num_workers, prefetch_factor, shuffle, seed, drop_last
        As in `Slide.read_regions`; without a batch size, a batch has one location.
    batch_bytes : int
        Bytes of a batch. Batches read ahead are limited to `AHEAD_BYTES` in total, or to one batch
        if that is larger.
    grouping : Grouping, optional
        How one call reads several of the batches; by default, each call reads one.
    slide : int, optional
        Number of the slide, for `cancel_reads`.

    Yields
    ------
    object
        The result of `read` for each batch.

    Raises
    ------
    RegionError
        If an argument has the wrong type or is too small.
    """
    smallest = {"num_workers": (num_workers, 0), "prefetch_factor": (prefetch_factor, 0)}
    if batch_size is not None:
        smallest["batch_size"] = (batch_size, 1)
    for name, (value, least) in smallest.items():
        if not isinstance(value, int | np.integer) or value < least:
            raise RegionError(f"{name} is {value!r}; it must be a whole number >= {least}.")
    try:
        locations = list(locations) if shuffle else iter(locations)
    except TypeError:
        raise RegionError(
            f"locations is {locations!r}; it must hold the (x, y) of each region."
        ) from None
    if isinstance(locations, list):
        try:
            random.Random(operator.index(seed)).shuffle(locations)
        except TypeError:
            raise RegionError(f"seed is {seed!r}; it must be a whole number.") from None
    size = min(batch_size or 1, sys.maxsize)  # `islice` accepts no larger count
    batches = _batches(locations, size, drop_last=drop_last)
    num_workers, prefetch_factor = int(num_workers), int(prefetch_factor)
    ahead = min(num_workers * prefetch_factor, max(1, AHEAD_BYTES // max(1, batch_bytes) - 1))
    # The caller consumes one group while the next one is read.
    if grouping is not None:
        grouping = grouping._replace(most=max(1, min(grouping.most, (1 + ahead) // 2)))
        ahead = (1 + ahead) // grouping.most - 1
    return _ahead(read, batches, num_workers, 1 + ahead, grouping, slide)


def _ahead(
    read: Callable[[list[Item], Cancellation], Batch],
    batches: Iterator[list[Item]],
    workers: int,
    window: int,
    grouping: Grouping[Batch] | None,
    slide: int | None,
) -> Generator[Batch, None, None]:
    if not workers:
        yield from (read(batch, NEVER) for batch in batches)
        return
    groups = iter(lambda: list(islice(batches, grouping.most if grouping else 1)), [])
    # Passed to `read`, so that reads stop early once the caller closes the generator.
    ended, pid = Cancellation(), os.getpid()

    def read_group(
        group: list[list[Item]], cancellation: Cancellation
    ) -> deque[Batch | partial[Batch]]:
        cancellation.check()
        if grouping is None or len(group) == 1:
            return deque([read(group[0], cancellation)])
        try:
            regions = read(list(chain.from_iterable(group)), cancellation)
        except SlideError:
            # Some regions may be fine: read each batch when it is due, so that only bad ones raise.
            return deque(partial(read, batch, NEVER) for batch in group)
        edges = pairwise(accumulate(map(len, group), initial=0))
        return deque(grouping.cut(regions, start, stop) for start, stop in edges)

    with ThreadPoolExecutor(min(workers, MAX_THREADS), "wsigpu-ahead") as pool:
        # A group without a future is read by the caller's thread when it is due.
        waiting: deque[tuple[list[list[Item]], Future[deque[Batch | partial[Batch]]] | None]]
        waiting = deque()

        def submit(count: int) -> None:
            for group in islice(groups, count):
                future = None
                if os.getpid() == pid:  # threads don't survive fork
                    with suppress(RuntimeError):  # no more threads can be started
                        future = pool.submit(read_group, group, ended)
                waiting.append((group, future))

        try:
            _live[ended] = slide
            submit(window)
            while waiting:
                group, future = waiting.popleft()
                found = None
                if future is not None and os.getpid() == pid:
                    # Python exits, but this thread goes on; or the slide is closed.
                    with suppress(CancelledError):
                        found = future.result()
                if found is None:
                    found = read_group(group, NEVER)
                submit(1)
                while found:
                    regions = found.popleft()
                    yield regions() if isinstance(regions, partial) else regions
                    del regions  # the caller alone keeps the batch alive now
        finally:
            # Cancel before the pool is joined, so that its threads stop early.
            ended.cancel()
            _live.pop(ended, None)
            if os.getpid() == pid:
                for _, future in waiting:
                    if future is not None:
                        future.cancel()


def interleave(waiting: deque[Generator[Item, None, None]]) -> Generator[Item, None, None]:
    """Yield from the iterators round-robin while each reads ahead; close all at the end."""
    with ExitStack() as opened:
        for iterator in waiting:
            opened.enter_context(closing(iterator))
        while waiting:
            item = next(waiting[0], None)
            if item is None:
                waiting.popleft()
            else:
                yield item
                waiting.rotate(-1)


def _batches(locations: Iterable[Item], size: int, *, drop_last: bool) -> Iterator[list[Item]]:
    remaining = iter(locations)
    while batch := list(islice(remaining, size)):
        if len(batch) == size or not drop_last:
            yield batch
