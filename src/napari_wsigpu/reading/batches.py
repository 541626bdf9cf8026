"""Batches of regions, read ahead of the one who asks for them."""

from __future__ import annotations

import operator
import random
import sys
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from napari_wsigpu.model.errors import RegionError
from napari_wsigpu.reading.plan import NEVER, Cancellation

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator


Item = TypeVar("Item")

MOST_THREADS = 64
# What batches may hold that are ready or being read, the one that is handed out included.
AHEAD_BYTES = 1 << 30


def read_ahead(
    read: Callable[[list[Item], Cancellation], Any],
    locations: Iterable[Item],
    *,
    batch_size: int | None,
    num_workers: int,
    prefetch_factor: int,
    batch_bytes: int = 0,
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
    return _ahead(read, batches, num_workers, 1 + ahead)


def _ahead(
    read: Callable[[list[Item], Cancellation], Any],
    batches: Iterator[list[Item]],
    workers: int,
    window: int,
) -> Generator[Any, None, None]:
    if not workers:
        yield from (read(batch, NEVER) for batch in batches)
        return
    ended = Cancellation()
    with ThreadPoolExecutor(min(workers, MOST_THREADS), "wsigpu-ahead") as pool:
        waiting: deque[Future[Any]] = deque()
        try:
            waiting += [pool.submit(read, batch, ended) for batch in islice(batches, window)]
            while waiting:
                regions = waiting.popleft().result()
                waiting += [pool.submit(read, batch, ended) for batch in islice(batches, 1)]
                yield regions
        finally:
            ended.cancel()
            for future in waiting:
                future.cancel()


def in_turn(iterators: Iterable[Generator[Item, None, None]]) -> Generator[Item, None, None]:
    """Yield from some iterators in turn, which all go on meanwhile; close them with this one."""
    return _in_turn(deque(iterators))


def _in_turn(waiting: deque[Generator[Item, None, None]]) -> Generator[Item, None, None]:
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
