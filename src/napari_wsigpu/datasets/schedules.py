"""`EpochSchedules`: the tiles that later patches of an epoch need, to keep them cached."""

from __future__ import annotations

import threading
from collections import OrderedDict
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.datasets.patches import DEFAULT_PLANE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from napari_wsigpu.datasets.patches import Patches
    from napari_wsigpu.model.geometry import Integers
    from napari_wsigpu.reading.tile_schedule import TileSchedule, UpcomingTiles
    from napari_wsigpu.slide.slide import Slide

# Fraction of the cache for tiles that are needed again; displays use the cache too.
SHARE = 0.5
# Number of patches of a plane that one schedule covers.
STRETCH = 1 << 16


class EpochSchedules:
    """Tile schedules for the patches of an epoch, which are read batch by batch. Thread-safe.

    Parameters
    ----------
    patches : Patches
        All patches.
    batches : sequence of ndarray of int64
        Indices of the patches of each batch, sorted by slide and plane.
    slides_at_once : int
        Number of slides that the patches of a batch are drawn from.
    """

    def __init__(self, patches: Patches, batches: Sequence[Integers], slides_at_once: int) -> None:
        self._patches = patches
        self._slides_at_once = slides_at_once
        self._lock = threading.Lock()
        indices = np.concatenate([np.zeros(0, np.int64), *batches])
        planes = np.column_stack([patches.slides[indices], patches.planes[indices]])
        order = np.lexsort(planes.T[::-1])
        is_first = np.diff(planes[order], axis=0, prepend=DEFAULT_PLANE - 1).any(axis=1)
        bounds = [*np.flatnonzero(is_first).tolist(), len(order)]
        # The indices of each plane's patches in reading order. For each position in the epoch, the
        # number of the patch's plane, and how many patches of that plane come before.
        self._of_plane = [indices[order[start:end]] for start, end in pairwise(bounds)]
        self._planes, self._before = np.empty((2, len(order)), np.int64)
        self._planes[order] = np.cumsum(is_first) - 1
        self._before[order] = np.arange(len(order)) - np.repeat(bounds[:-1], np.diff(bounds))
        # Schedules by plane and stretch, created when they are first needed. The lock keeps two
        # threads from creating the same one.
        self._schedules: OrderedDict[tuple[int, int], TileSchedule | None] = OrderedDict()

    def after(self, slide: Slide, position: int) -> UpcomingTiles | None:
        """Return the tiles needed by the patches from a position in the epoch onward.

        Parameters
        ----------
        slide : Slide
            The slide of the patches that are read now.
        position : int
            Position in the epoch of the first of these patches, which are all on one plane.

        Returns
        -------
        UpcomingTiles or None
            The argument `wanted` of `Slide.read_batch`.
        """
        plane, before = int(self._planes[position]), int(self._before[position])
        stretch, first = divmod(before, STRETCH)
        with self._lock:
            if (plane, stretch) not in self._schedules:
                self._schedules[plane, stretch] = self._make_schedule(slide, plane, stretch)
                if len(self._schedules) > 2 * self._slides_at_once:
                    # The oldest schedule is used up, or will be made again when it is needed.
                    self._schedules.popitem(last=False)
            schedule = self._schedules[plane, stretch]
        return None if schedule is None else schedule.after(first)

    def _make_schedule(self, slide: Slide, plane: int, stretch: int) -> TileSchedule | None:
        patches = self._patches
        indices = self._of_plane[plane][stretch * STRETCH : (stretch + 1) * STRETCH]
        z, t = patches.plane_of(indices[0])
        return slide.tile_uses(
            [(x, y) for x, y in patches.locations[indices].tolist()],
            patches.size,
            patches.level,
            mpp=patches.mpp,
            room=int(slide.runtime.tiles.budget * SHARE / self._slides_at_once),
            z=z,
            t=t,
        )
