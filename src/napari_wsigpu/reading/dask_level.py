"""`DaskLevel`: a level as the tasks of a Dask array read it, in whatever process they run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from napari_wsigpu.layout import LevelLayout
    from napari_wsigpu.reading.level import LevelArray, PackedOwner

CHUNK_BYTES = 32 << 20


class DaskLevel:
    """What a Dask array slices: picklable, with all that another process needs.

    Where it was made it reads through the slide that is open there. Pickled it holds the slide
    packed; a process that unpickles it opens the slide when it first reads, once for all levels
    and tasks.

    Parameters
    ----------
    level : LevelArray
        The level.
    device : str
        Where chunks shall be: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.

    Attributes
    ----------
    shape, dtype, ndim
        Those of the level.
    """

    def __init__(self, level: LevelArray, device: str) -> None:
        from dask.base import tokenize

        self.shape = level.shape
        self.dtype = level.dtype
        self.ndim = level.ndim
        self._token = tokenize(level, device)
        self._place = level.number, level.channel, level.tolerant
        self._device = device
        self._level: LevelArray | None = level
        self._packed: PackedOwner | None = None

    def __getitem__(self, key: Any) -> Any:
        """Return the pixels at `key` on the device, as `LevelArray.read` does."""
        if self._level is not None:
            return self._level.read(key, self._device)
        assert self._packed is not None
        number, channel, tolerant = self._place
        with self._packed.use() as slide:
            return slide.level_array(number, channel, tolerant=tolerant).read(key, self._device)

    def __getstate__(self) -> dict[str, Any]:
        if self._packed is None:
            assert self._level is not None
            self._packed = self._level.slide.packed(self._device)
        return self.__dict__ | {"_level": None}

    def __dask_tokenize__(self) -> tuple[str, str]:
        return "DaskLevel", self._token


def tiles_a_chunk(level: LevelLayout, pixel_bytes: int) -> tuple[int, int]:
    """Return how many tiles hold about `CHUNK_BYTES` of pixels, down and across.

    They make up a chunk as square as whole tiles allow; at least one tile.
    """
    grid = level.grid
    side = math.isqrt(CHUNK_BYTES // pixel_bytes)
    across = min(max(1, side // grid.tile_width), math.ceil(level.width / grid.tile_width))
    width = min(across * grid.tile_width, level.width)
    return max(1, CHUNK_BYTES // (width * grid.tile_height * pixel_bytes)), across
