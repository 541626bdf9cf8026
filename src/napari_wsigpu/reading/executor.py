"""The executor: carries read plans out, batch by batch, on the host or on a device."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from napari_wsigpu.reading.plan import regions_with

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.reading.cache import TileKey
    from napari_wsigpu.reading.parts import SlideParts
    from napari_wsigpu.reading.plan import ReadOptions, ReadPlan

    Integers = NDArray[np.int64]

# Where a backend pastes tiles.
Canvas = TypeVar("Canvas")


class Limits(NamedTuple):
    """Largest batch of a level's tiles, and how many batches are in flight.

    A batch has at least one tile, whatever its size. `encoded_bytes` may be None: no limit.
    """

    tiles: int
    encoded_bytes: int | None
    pixel_bytes: int
    in_flight: int


@dataclass(frozen=True, eq=False)
class Batch(Generic[Canvas]):
    """Tiles of a plan that are read and decoded together.

    Attributes
    ----------
    plan : ReadPlan
        The plan.
    image : LevelLayout
        Its image.
    tiles : ndarray of int64, shape (tiles,)
        Indices of the tiles in the plan.
    canvas
        Where the backend pastes them.
    options : ReadOptions
        How to read them.
    """

    plan: ReadPlan
    image: LevelLayout
    tiles: Integers
    canvas: Canvas
    options: ReadOptions

    @property
    def places(self) -> Integers:
        """Row and column of each tile, shape (tiles, 2)."""
        return self.plan.tiles[self.tiles]

    @property
    def kept(self) -> NDArray[np.bool_]:
        """Mask of the tiles that stay in the cache."""
        return self.options.kept(self.plan, self.image, self.tiles)

    def part(self, chosen: Integers | slice) -> Batch[Canvas]:
        """Return a batch of some of the tiles."""
        return Batch(self.plan, self.image, self.tiles[chosen], self.canvas, self.options)


@dataclass(frozen=True, eq=False)
class Decoding:
    """A batch that a backend is decoding.

    Parameters
    ----------
    count : int
        Number of its tiles: the first ones of the batch, as many as there was memory for.
    finish : callable
        Waits until all tiles are pasted; returns why some failed, by their index in the plan.
    cancel : callable
        Returns as soon as nothing is read or decoded any more.
    """

    count: int
    finish: Callable[[], dict[int, str]]
    cancel: Callable[[], object]


class Backend(Protocol[Canvas]):
    """Decodes and pastes the tiles of one slide: on the host, or on a device."""

    parts: SlideParts

    def limits(self, number: int) -> Limits:
        """Return the limits for the tiles of an image."""

    def paste_cached(self, plan: ReadPlan, canvas: Canvas, options: ReadOptions) -> Integers:
        """Paste the tiles of a plan that are in the cache; return the indices of the others."""

    def resolve(self, plan: ReadPlan, options: ReadOptions) -> ReadOptions:
        """Return options that say whether recurring tiles are kept."""

    def begin(self, batch: Batch[Canvas], *, more: bool) -> Decoding:
        """Read a batch and start decoding it.

        Parameters
        ----------
        batch : Batch
            The tiles.
        more : bool
            Whether another batch is in flight or follows, so that decoding must not block.

        Raises
        ------
        MemoryError
            If there is no memory for any tile.
        """

    def average(
        self, plan: ReadPlan, tiles: Integers, canvas: Canvas, options: ReadOptions
    ) -> dict[TileKey, str]:
        """Compute tiles that the file lacks from the finer level."""

    def timed(self, canvas: Canvas, image: LevelLayout, tiles: int, started: float) -> None:
        """Record that so many tiles were decoded since `time.perf_counter` was `started`."""


def execute(
    backend: Backend[Canvas],
    plans: Sequence[ReadPlan],
    canvas_of: Callable[[ReadPlan], Canvas],
    options: ReadOptions,
) -> dict[TileKey, str]:
    """Carry plans out in order: paste cached tiles, then decode and paste the others.

    Parameters
    ----------
    backend : Backend
        What decodes and pastes.
    plans : sequence of ReadPlan
        As `plan_regions` makes them.
    canvas_of : callable
        Prepares the canvas of a plan, when its turn comes.
    options : ReadOptions
        How to read.

    Returns
    -------
    dict of TileKey to str
        Why tiles failed; all are in the log.
    """
    parts = backend.parts
    failures: dict[TileKey, str] = {}
    for plan in plans:
        canvas = canvas_of(plan)
        absent = backend.paste_cached(plan, canvas, options)
        blank = len(plan.blanks)
        parts.log.count(
            tiles_asked=len(plan.tiles) + blank,
            cache_hits=len(plan.tiles) - len(absent),
            background=blank,
        )
        computed = plan.computed[absent]
        how = backend.resolve(plan, options)
        failed = _decode(backend, plan, absent[~computed], canvas, how)
        named = {parts.key(plan, tile): reason for tile, reason in failed.items()}
        if computed.any():
            named |= backend.average(plan, absent[computed], canvas, how)
        parts.log.note(named, report=options.tolerant)
        failures |= named
    return failures


def check(
    parts: SlideParts,
    failures: dict[TileKey, str],
    plans: Sequence[ReadPlan],
    options: ReadOptions,
) -> None:
    """Raise a `TileError` that names failed tiles, unless the options tolerate them."""
    if failures and not options.tolerant:
        raise parts.log.error(failures, regions_with(plans, (key[1:] for key in failures)))


def _decode(
    backend: Backend[Canvas],
    plan: ReadPlan,
    tiles: Integers,
    canvas: Canvas,
    options: ReadOptions,
) -> dict[int, str]:
    """Decode and paste tiles: a batch is read while the one before it is decoded.

    Returns
    -------
    dict of int to str
        Why tiles failed, by their index in the plan.
    """
    if not len(tiles):
        return {}
    started, rest = time.perf_counter(), tiles
    image, limits = backend.parts.images[plan.image], backend.limits(plan.image)
    most = max(1, min(limits.tiles, limits.pixel_bytes // image.tile_bytes))
    most = -(-len(rest) // -(-len(rest) // most))  # batches of one size
    failures: dict[int, str] = {}
    flying: deque[Decoding] = deque()
    try:
        while len(rest):
            options.cancellation.check()
            if len(flying) == limits.in_flight:
                failures |= flying.popleft().finish()
            some = rest[: _fitting(image, plan.tiles[rest[:most]], limits.encoded_bytes)]
            batch = Batch(plan, image, some, canvas, options)
            try:
                decoding = backend.begin(batch, more=bool(flying) or len(some) < len(rest))
            except MemoryError:
                # The batches in flight hold memory; without any, a smaller batch may fit.
                if flying:
                    failures |= flying.popleft().finish()
                elif most > 1:
                    most //= 2
                else:
                    raise
            else:
                flying.append(decoding)
                rest = rest[decoding.count :]
        while flying:
            failures |= flying.popleft().finish()
    finally:
        for decoding in flying:
            decoding.cancel()
    backend.timed(canvas, image, len(tiles), started)
    return failures


def _fitting(image: LevelLayout, places: Integers, encoded_bytes: int | None) -> int:
    """Return how many of the first tiles have at most so many encoded bytes; at least one."""
    if encoded_bytes is None:
        return len(places)
    sizes = image.grid.byte_counts[:, places[:, 0], places[:, 1]].sum(axis=0)
    return max(1, int(np.searchsorted(np.cumsum(sizes), encoded_bytes, "right")))
