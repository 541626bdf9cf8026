"""`Order`: in which order patches come, batch by batch, the same wherever it is asked."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.model.errors import RegionError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from napari_wsigpu.datasets.patches import Patches


@dataclass(frozen=True)
class Order:
    """How patches are shuffled, put into batches, and shared out.

    All shards together have each patch once. Each has a run of neighbouring batches, so that
    stored tiles that these share are decoded in one place.

    Attributes
    ----------
    batch_size : int
        How many patches a batch has; the last one may have fewer.
    shuffle : bool
        Whether to shuffle, by `seed` and the epoch alone.
    seed : int
        Seed of the order.
    slides_at_once : int
        From how many slides, which are shuffled first, the patches of a batch are drawn; so many
        are kept open.
    drop_last : bool
        Leave out patches so that all batches are full and all shards have as many.
    shard, shards : int
        Which of how many parts is wanted: the rank of a process among all of them.
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
                raise RegionError(f"{name} is {value!r}; it has to be a whole number >= {bound}.")
        if self.shard >= self.shards:
            raise RegionError(f"There is no shard {self.shard} of {self.shards}; count from 0.")

    def part(self, number: int, parts: int) -> Order:
        """Return the order of one of the parts that this shard is shared out to."""
        return replace(self, shard=self.shard * parts + number, shards=self.shards * parts)

    def batches(self, patches: Patches) -> range:
        """Return the numbers of this shard's batches among all."""
        whole, rest = divmod(len(patches), self.batch_size)
        if self.drop_last:
            each = whole // self.shards
            return range(self.shard * each, (self.shard + 1) * each)
        count = whole + bool(rest)
        return range(self.shard * count // self.shards, (self.shard + 1) * count // self.shards)

    def indices(self, patches: Patches, epoch: int) -> NDArray[np.int64]:
        """Return the indices of all patches in their order, those of all shards."""
        if not self.shuffle:
            return np.arange(len(patches))
        rng = np.random.default_rng([self.seed, epoch])
        # The place of each slide in the order of slides, and with it each patch's group.
        turn = rng.permutation(len(patches.paths))
        group = turn[patches.slides] // self.slides_at_once
        shuffled = rng.permutation(len(patches))
        return shuffled[np.argsort(group[shuffled], kind="stable")]

    def batch(self, patches: Patches, indices: NDArray[np.int64], number: int) -> NDArray[np.int64]:
        """Return the indices of a batch by its number, slide by slide."""
        return patches.in_turn(indices[number * self.batch_size : (number + 1) * self.batch_size])

    def checksum(self, patches: Patches, indices: NDArray[np.int64]) -> int:
        """Return a number that tells this order of these patches from others."""
        sum_of = zlib.crc32(
            repr((len(patches.paths), patches.size, patches.level, patches.mpp)).encode()
        )
        for column in (patches.slides, patches.locations, patches.planes, indices):
            sum_of = zlib.crc32(np.ascontiguousarray(column).data, sum_of)
        return sum_of
