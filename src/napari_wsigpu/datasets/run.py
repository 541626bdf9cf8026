"""`Run`: the patches of an epoch in their order, by which tiles are kept that come again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.datasets.patches import SHOWN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.datasets.patches import Patches
    from napari_wsigpu.reading.uses import TileUses, Wanted
    from napari_wsigpu.slide.slide import Slide

# How much of the cache such tiles may take; displays have theirs there, too.
SHARE = 0.5
# So many patches of a plane are looked through at a time.
STRETCH = 1 << 16


class Run:
    """Patches that are read batch by batch. Safe under many threads.

    Parameters
    ----------
    patches : Patches
        All there are.
    batches : sequence of ndarray of int64
        The indices of those of each batch, each slide by slide and plane by plane.
    slides_at_once : int
        How many slides they are drawn from at a time.
    """

    def __init__(
        self, patches: Patches, batches: Sequence[NDArray[np.int64]], slides_at_once: int
    ) -> None:
        self._patches = patches
        self._slides_at_once = slides_at_once
        self._lock = threading.Lock()
        indices = np.concatenate([np.zeros(0, np.int64), *batches])
        planes = np.column_stack([patches.slides[indices], patches.planes[indices]])
        order = np.lexsort(planes.T[::-1])
        starts = np.diff(planes[order], axis=0, prepend=SHOWN - 1).any(axis=1)
        begins = [*np.flatnonzero(starts).tolist(), len(order)]
        # The patches of each plane in their order; for each patch, which plane and how many of its
        # patches come before.
        self._of_plane = [indices[order[begin:end]] for begin, end in pairwise(begins)]
        self._uses: OrderedDict[tuple[int, int], TileUses | None] = OrderedDict()
        self._planes, self._before = np.empty((2, len(order)), np.int64)
        self._planes[order] = np.cumsum(starts) - 1
        self._before[order] = np.arange(len(order)) - np.repeat(begins[:-1], np.diff(begins))

    def wanted(self, slide: Slide, place: int) -> Wanted | None:
        """Return what tells which tiles are wanted by patches that are read later.

        Parameters
        ----------
        slide : Slide
            The slide of those that are read now.
        place : int
            Place in the run of the first of them; they are of one plane.

        Returns
        -------
        callable or None
            As `Slide.read_batch` takes it.
        """
        plane, before = int(self._planes[place]), int(self._before[place])
        stretch, first = divmod(before, STRETCH)
        with self._lock:
            if (plane, stretch) not in self._uses:
                self._uses[plane, stretch] = self._uses_in(slide, plane, stretch)
                if len(self._uses) > 2 * self._slides_at_once:
                    self._uses.popitem(last=False)  # it was read, or will be looked through again
            uses = self._uses[plane, stretch]
        return None if uses is None else uses.after(first)

    def _uses_in(self, slide: Slide, plane: int, stretch: int) -> TileUses | None:
        patches = self._patches
        indices = self._of_plane[plane][stretch * STRETCH : (stretch + 1) * STRETCH]
        z, t = (None if each == SHOWN else each for each in patches.planes[indices[0]].tolist())
        return slide.tile_uses(
            [(x, y) for x, y in patches.locations[indices].tolist()],
            patches.size,
            patches.level,
            mpp=patches.mpp,
            room=int(slide.runtime.tiles.budget * SHARE / self._slides_at_once),
            z=z,
            t=t,
        )
