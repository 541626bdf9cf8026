"""The executor: carry out read plans batch by batch, on the host or on a device."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from napari_wsigpu.model.geometry import computed_once
from napari_wsigpu.reading.plan import regions_with

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from napari_wsigpu.model.arrays import Integers, Mask
    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.reading.cache import TileKey
    from napari_wsigpu.reading.parts import SlideParts
    from napari_wsigpu.reading.plan import ReadOptions, ReadPlan


# The array, on the host or a device, that a backend pastes tiles onto.
Canvas = TypeVar("Canvas")


class Limits(NamedTuple):
    """Limits of one batch, and the number of batches in flight.

    A batch has at least one tile, whatever its size. `encoded_bytes` is None if unlimited.
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
        The image of the plan.
    tiles : ndarray of int64, shape (tiles,)
        Indices of the tiles in the plan.
    canvas : Canvas
        The array that the backend pastes the tiles onto.
    options : ReadOptions
        How to read them.
    """

    plan: ReadPlan
    image: LevelLayout
    tiles: Integers
    canvas: Canvas
    options: ReadOptions

    @computed_once
    def places(self) -> Integers:
        """Row and column of each tile, as an array of shape (tiles, 2)."""
        return self.plan.tiles[self.tiles]

    @property
    def kept(self) -> Mask:
        """Mask of the tiles to cache."""
        return self.options.kept(self.plan, self.image, self.tiles)

    def part(self, chosen: Integers | slice) -> Batch[Canvas]:
        """Return a batch of some of the tiles."""
        return Batch(self.plan, self.image, self.tiles[chosen], self.canvas, self.options)


@dataclass(frozen=True, eq=False)
class Decoding:
    """A batch in flight.

    Parameters
    ----------
    count : int
        Number of tiles that the backend took from the start of the batch: as many as fit into
        its memory.
    finish : callable
        Waits until all tiles are pasted; returns why tiles failed, by their index in the plan.
    cancel : callable
        Stops the batch; returns once no thread is reading or decoding it.
    """

    count: int
    finish: Callable[[], dict[int, str]]
    cancel: Callable[[], object]


class Backend(Protocol[Canvas]):
    """Decodes and pastes the tiles of one slide, on the host or on a device."""

    parts: SlideParts

    def limits(self, number: int) -> Limits:
        """Return the limits of batches of an image."""

    def paste_cached(self, plan: ReadPlan, canvas: Canvas, options: ReadOptions) -> Integers:
        """Paste the cached tiles of a plan; return the indices of the others."""

    def resolve(self, plan: ReadPlan, options: ReadOptions) -> ReadOptions:
        """Replace ``keep="recurring"`` with the decision whether to cache the tiles of a plan."""

    def start(self, batch: Batch[Canvas], *, more: bool) -> Decoding:
        """Read a batch and start to decode it.

        Parameters
        ----------
        batch : Batch
            The tiles.
        more : bool
            Whether other batches are in flight or follow. If not, a device may leave the decoding
            to the thread that waits for the batch.

        Raises
        ------
        MemoryError
            If there is no memory for any tile.
        """

    def average(
        self, plan: ReadPlan, tiles: Integers, canvas: Canvas, options: ReadOptions
    ) -> dict[TileKey, str]:
        """Compute missing tiles by averaging the finer level."""


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
        Decodes and pastes the tiles.
    plans : sequence of ReadPlan
        The result of `plan_regions`.
    canvas_of : callable
        Prepares the canvas of a plan just before the plan is carried out.
    options : ReadOptions
        How to read.

    Returns
    -------
    dict of TileKey to str
        Why tiles failed; these reasons are already logged.
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
        resolved = backend.resolve(plan, options)
        failed = _decode(backend, plan, absent[~computed], canvas, resolved)
        named = {parts.key(plan, tile): reason for tile, reason in failed.items()}
        if computed.any():
            named |= backend.average(plan, absent[computed], canvas, resolved)
        parts.log.record_failures(named, report=options.tolerant)
        failures |= named
    return failures


def check(
    parts: SlideParts, failures: dict[TileKey, str], plans: Sequence[ReadPlan], options: ReadOptions
) -> None:
    """Raise a `TileError` that names the failed tiles, unless the options tolerate them."""
    if failures and not options.tolerant:
        raise parts.log.error(failures, regions_with(plans, (key[1:4] for key in failures)))


def _decode(
    backend: Backend[Canvas], plan: ReadPlan, tiles: Integers, canvas: Canvas, options: ReadOptions
) -> dict[int, str]:
    """Decode and paste tiles; each batch is read while the previous one is decoded.

    Returns
    -------
    dict of int to str
        Why tiles failed, by their index in the plan.
    """
    if not len(tiles):
        return {}
    rest = tiles
    image, limits = backend.parts.images[plan.image], backend.limits(plan.image)
    # At least one tile, even if it exceeds the limit of pixel bytes.
    most = max(1, min(limits.tiles, limits.pixel_bytes // image.tile_bytes))
    most = -(-len(rest) // -(-len(rest) // most))  # equal batches
    failures: dict[int, str] = {}
    in_flight: deque[Decoding] = deque()
    try:
        while len(rest):
            options.cancellation.check()
            # The oldest batch must finish before another one may use memory.
            if len(in_flight) == limits.in_flight:
                failures |= in_flight.popleft().finish()
            some = rest[: _fitting(image, plan.tiles[rest[:most]], limits.encoded_bytes)]
            batch = Batch(plan, image, some, canvas, options)
            try:
                decoding = backend.start(batch, more=bool(in_flight) or len(some) < len(rest))
            except MemoryError:
                # Wait for memory that a batch in flight holds; if none does, try a smaller batch.
                if in_flight:
                    failures |= in_flight.popleft().finish()
                elif most > 1:
                    most //= 2
                else:
                    raise
            else:
                in_flight.append(decoding)
                rest = rest[decoding.count :]
        while in_flight:
            failures |= in_flight.popleft().finish()
    finally:
        # After an error, the caller frees its buffers, so no thread may still write to them.
        for decoding in in_flight:
            decoding.cancel()
    return failures


def _fitting(image: LevelLayout, places: Integers, encoded_bytes: int | None) -> int:
    """Return how many of the first tiles fit into `encoded_bytes`; at least one."""
    if encoded_bytes is None:
        return len(places)
    sizes = image.grid.byte_counts[:, places[:, 0], places[:, 1]].sum(axis=0)
    return max(1, int(np.searchsorted(np.cumsum(sizes), encoded_bytes, "right")))
