"""`Order`: the reproducible order in which patches are put into batches."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.model.errors import RegionError

if TYPE_CHECKING:
    from napari_wsigpu.datasets.patches import Patches
    from napari_wsigpu.model.geometry import Integers


@dataclass(frozen=True)
class Order:
    """How patches are shuffled, grouped into batches, and distributed over shards.

    Each patch is in exactly one shard, unless `drop_last` leaves it out. A shard consists of
    consecutive batches, so that one process decodes the tiles that they share.

    Attributes
    ----------
    batch_size : int
        Number of patches per batch; the last batch may have fewer.
    shuffle : bool
        Whether to shuffle; the result depends only on `seed` and the epoch.
    seed : int
        Seed of the order.
    slides_at_once : int
        Number of slides from which the patches of a batch are drawn; up to twice as many are kept
        open. The slides themselves are shuffled first.
    drop_last : bool
        Whether to leave out patches so that all batches are full and all shards equally large.
    shard, shards : int
        Index of the shard and number of shards, such as the rank of a process and the world size.
    """

    batch_size: int = 256
    shuffle: bool = False
    seed: int = 0
    slides_at_once: int = 16
    drop_last: bool = False
    shard: int = 0
    shards: int = 1

    def __post_init__(self) -> None:
        least = {"batch_size": 1, "slides_at_once": 1, "shard": 0, "shards": 1, "seed": 0}
        for name, bound in least.items():
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or value < bound:
                raise RegionError(f"{name} is {value!r}; it must be a whole number >= {bound}.")
        if self.shard >= self.shards:
            which = f"Shard {self.shard} is out of range for {self.shards} shards"
            raise RegionError(f"{which}; count from 0.")

    def part(self, number: int, parts: int) -> Order:
        """Divide this shard further and return one of its parts."""
        return replace(self, shard=self.shard * parts + number, shards=self.shards * parts)

    def batches(self, patches: Patches) -> range:
        """Return the numbers of this shard's batches."""
        whole, rest = divmod(len(patches), self.batch_size)
        if self.drop_last:
            each = whole // self.shards
            return range(self.shard * each, (self.shard + 1) * each)
        count = whole + bool(rest)
        return range(self.shard * count // self.shards, (self.shard + 1) * count // self.shards)

    def indices(self, patches: Patches, epoch: int) -> Integers:
        """Return the indices of the patches of all shards, in the order of an epoch."""
        if not self.shuffle:
            return np.arange(len(patches))
        rng = np.random.default_rng([self.seed, epoch])
        # Shuffle the slides, take `slides_at_once` of them as a group, and shuffle within groups.
        turn = rng.permutation(len(patches.paths))
        group = turn[patches.slides] // self.slides_at_once
        shuffled = rng.permutation(len(patches))
        return shuffled[np.argsort(group[shuffled], kind="stable")]

    def batch(self, patches: Patches, indices: Integers, number: int) -> Integers:
        """Return the indices of the patches in a batch, sorted by slide."""
        start = number * self.batch_size
        return patches.sort_by_slide(indices[start : start + self.batch_size])

    def checksum(self, patches: Patches, indices: Integers) -> int:
        """Return a checksum that identifies this order of these patches."""
        common = len(patches.paths), patches.size, patches.level, patches.mpp
        crc = zlib.crc32(repr(common).encode())
        for column in (patches.slides, patches.locations, patches.planes, indices):
            crc = zlib.crc32(np.ascontiguousarray(column).data, crc)
        return crc
