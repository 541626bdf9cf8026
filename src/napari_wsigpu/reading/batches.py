"""Batches of regions, read ahead of the one who asks for them."""

from __future__ import annotations

import operator
import os
import random
import sys
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from itertools import accumulate, chain, islice, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from napari_wsigpu.model.errors import RegionError, SlideError
from napari_wsigpu.reading.plan import NEVER, Cancellation

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator


Item = TypeVar("Item")

MOST_THREADS = 64
# What batches may hold that are ready or being read, the one that is handed out included.
AHEAD_BYTES = 1 << 30


class Together(NamedTuple):
    """How batches are read by one call, as a GPU needs more tiles than a small batch has.

    Attributes
    ----------
    most : int
        How many of them, at most.
    cut : callable
        ``cut(regions, begin, end)``: a batch, from what is read of all regions.
    """

    most: int
    cut: Callable[[Any, int, int], Any]


APART = Together(1, lambda regions, begin, end: regions)


def read_ahead(
    read: Callable[[list[Item], Cancellation], Any],
    locations: Iterable[Item],
    *,
    batch_size: int | None,
    num_workers: int,
    prefetch_factor: int,
    batch_bytes: int = 0,
    together: Together = APART,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
) -> Generator[Any, None, None]:
    """Read batches of regions in order, or in shuffled order, ahead of the caller.

    Parameters
    ----------
    read : callable
        Reads the regions at the locations of a batch, and stops if its `Cancellation` says so.
    locations, batch_size, num_workers, prefetch_factor, shuffle, seed, drop_last
        As in `Slide.read_regions`; without a batch size, a batch has one location.
    batch_bytes : int
        Memory of a batch: fewer are read ahead than asked if they would take more than
        `AHEAD_BYTES`, but always one.
    together : Together
        How many of the batches that are read ahead one call reads.

    Yields
    ------
    array
        What `read` returns.

    Raises
    ------
    RegionError
        If a number is not a whole one of at least 0 (`batch_size`: 1).
    """
    smallest = {"num_workers": (num_workers, 0), "prefetch_factor": (prefetch_factor, 0)}
    if batch_size is not None:
        smallest["batch_size"] = (batch_size, 1)
    for name, (value, least) in smallest.items():
        if not isinstance(value, int | np.integer) or value < least:
            raise RegionError(f"{name} is {value!r}; it has to be a whole number >= {least}.")
    try:
        locations = list(locations) if shuffle else iter(locations)
    except TypeError:
        raise RegionError(
            f"locations is {locations!r}; it has to hold the (x, y) of each region."
        ) from None
    if isinstance(locations, list):
        try:
            random.Random(operator.index(seed)).shuffle(locations)
        except TypeError:
            raise RegionError(f"seed is {seed!r}; it has to be a whole number.") from None
    size = min(batch_size or 1, sys.maxsize)
    batches = _batches(locations, size, drop_last=drop_last)
    ahead = min(num_workers * prefetch_factor, max(1, AHEAD_BYTES // max(1, batch_bytes) - 1))
    # One group is read while the one before it is handed out.
    most = max(1, min(together.most, (1 + ahead) // 2))
    return _ahead(read, batches, num_workers, (1 + ahead) // most, together._replace(most=most))


def _ahead(
    read: Callable[[list[Item], Cancellation], Any],
    batches: Iterator[list[Item]],
    workers: int,
    window: int,
    together: Together,
) -> Generator[Any, None, None]:
    if not workers:
        yield from (read(batch, NEVER) for batch in batches)
        return
    groups = iter(lambda: list(islice(batches, together.most)), [])
    ended, process = Cancellation(), os.getpid()

    def read_group(group: list[list[Item]]) -> deque[Any]:
        if len(group) == 1:
            return deque([read(group[0], ended)])
        try:
            regions = read(list(chain.from_iterable(group)), ended)
        except SlideError:
            # Each batch is read, and may fail, when its turn comes.
            return deque(partial(read, batch, ended) for batch in group)
        edges = pairwise(accumulate(map(len, group), initial=0))
        return deque(together.cut(regions, begin, end) for begin, end in edges)

    with ThreadPoolExecutor(min(workers, MOST_THREADS), "wsigpu-ahead") as pool:
        waiting: deque[tuple[list[list[Item]], Future[deque[Any]]]] = deque()

        def submit(count: int) -> None:
            for group in islice(groups, count):
                waiting.append((group, pool.submit(read_group, group)))

        try:
            submit(window)
            while waiting:
                group, future = waiting.popleft()
                if os.getpid() == process:
                    found = future.result()
                    submit(1)
                else:  # a forked child has none of the threads: it reads as the batches are wanted
                    found = read_group(group)
                    waiting += [(group, Future()) for group in islice(groups, 1)]
                while found:
                    regions = found.popleft()
                    yield regions() if isinstance(regions, partial) else regions
                    del regions
        finally:
            ended.cancel()
            if os.getpid() == process:
                for _, future in waiting:
                    future.cancel()


def in_turn(waiting: deque[Generator[Item, None, None]]) -> Generator[Item, None, None]:
    """Yield from iterators alternately, while all of them read on; close them with this one."""
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
