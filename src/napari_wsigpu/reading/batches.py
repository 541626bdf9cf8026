"""Regions read ahead of the one who asks for them, one by one or in batches."""

from __future__ import annotations

import random
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.errors import RegionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Location = tuple[int, int]

MOST_THREADS = 64


def read_ahead(
    read: Callable[[Location], Any],
    locations: Iterable[Location],
    *,
    batch_size: int | None,
    num_workers: int,
    prefetch_factor: int,
    shuffle: bool,
    seed: int,
    drop_last: bool,
    room: Callable[[int], Any] | None = None,
) -> Iterator[Any]:
    """Read regions in order, or in shuffled order, ahead of the caller.

    Parameters
    ----------
    read : callable
        Reads the region at a location.
    locations, batch_size, num_workers, prefetch_factor, shuffle, seed, drop_last
        As in `Slide.read_regions`.
    room : callable, optional
        Gives an array for a batch of so many regions; by default they are stacked.

    Yields
    ------
    array
        A region, or a stack of them.

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
    if shuffle:
        locations = list(locations)
        random.Random(seed).shuffle(locations)
    size = batch_size or 1
    batches = _batches(locations, size, drop_last=drop_last and batch_size is not None)

    def read_batch(batch: list[Location]) -> Any:
        if batch_size is None:
            return read(batch[0])
        if room is None:
            return _stacked([read(location) for location in batch])
        stack = room(len(batch))
        for place, location in enumerate(batch):
            stack[place] = read(location)
        return stack

    return _ahead(read_batch, batches, num_workers, 1 + num_workers * prefetch_factor)


def _ahead(
    read: Callable[[list[Location]], Any],
    batches: Iterator[list[Location]],
    workers: int,
    window: int,
) -> Iterator[Any]:
    if not workers:
        yield from map(read, batches)
        return
    with ThreadPoolExecutor(min(workers, MOST_THREADS), "wsigpu-ahead") as pool:
        waiting: list[Future[Any]] = []
        try:
            waiting += [pool.submit(read, batch) for batch in islice(batches, window)]
            while waiting:
                regions = waiting.pop(0).result()
                waiting += [pool.submit(read, batch) for batch in islice(batches, 1)]
                yield regions
        finally:
            for future in waiting:
                future.cancel()


def _batches(
    locations: Iterable[Location], size: int, *, drop_last: bool
) -> Iterator[list[Location]]:
    remaining = iter(locations)
    while batch := list(islice(remaining, size)):
        if len(batch) == size or not drop_last:
            yield batch


def _stacked(regions: list[Any]) -> Any:
    """Stack CuPy arrays; the batch is whole when it is handed out."""
    if isinstance(regions[0], np.ndarray):
        return np.stack(regions)
    import cupy

    with regions[0].device:
        stacked = cupy.stack(regions)
        cupy.cuda.get_current_stream().synchronize()
    return stacked
