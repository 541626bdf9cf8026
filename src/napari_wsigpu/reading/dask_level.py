"""Levels as Dask arrays; their tasks can run in any process."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.model.errors import RegionError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import dask.array

    from napari_wsigpu.model.arrays import AnyArray
    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.reading.level import LevelArray, LevelOwner, PackedOwner

CHUNK_BYTES = 32 << 20


def dask_array(
    level: LevelArray, tiles: int | None, device: str, stack: Mapping[str, int]
) -> dask.array.Array:
    """Return a level as a Dask array, in one plane or in all planes of a stack.

    Parameters
    ----------
    level : LevelArray
        The level.
    tiles, device
        As in `LevelArray.to_dask`.
    stack : Mapping of str to int
        Number of planes along "t" and "z"; these axes come first.
    """
    try:
        import dask.array
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "to_dask requires Dask, which is not installed; run pip install dask[array]."
        ) from error
    if tiles is not None and (not isinstance(tiles, int | np.integer) or tiles < 1):
        raise RegionError(f"tiles is {tiles!r}; it must be a whole number >= 1.")
    pixel_bytes = level.dtype.itemsize * math.prod(level.shape[2:])
    down, across = (tiles, tiles) if tiles else tiles_per_chunk(level.layout, pixel_bytes)
    grid = level.layout.grid
    size = (down * grid.tile_height, across * grid.tile_width, *level.shape[2:])
    chunks = (*[1] * len(stack), *map(min, size, level.shape))
    nothing = np.empty(0, level.dtype) if device == "cpu" else level.read(np.s_[:0, :0], device)
    # asarray=False: chunks on a device are CuPy arrays.
    return dask.array.from_array(
        DaskLevel(level, device, stack), chunks, asarray=False, fancy=False, meta=nothing
    )


class DaskLevel:
    """The picklable array-like that the tasks of a Dask array slice.

    In the process that created it, it reads from the open slide. A pickled copy holds the packed
    slide instead. A process that unpickles it opens the slide on the first read, once for all
    levels and tasks, and opens each plane when it is first read.

    Parameters
    ----------
    level : LevelArray
        The level.
    device : str
        Where to put the chunks: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
    stack : Mapping of str to int, optional
        As in `dask_array`.

    Attributes
    ----------
    shape, dtype, ndim
        As in NumPy; the axes of the stack come first.
    """

    def __init__(
        self, level: LevelArray, device: str, stack: Mapping[str, int] | None = None
    ) -> None:
        from dask.base import tokenize

        self._stack = dict(stack or {})
        self.shape = (*self._stack.values(), *level.shape)
        self.dtype = level.dtype
        self.ndim = len(self.shape)
        self._token = tokenize(level, device, *self._stack)
        self._source = level.number, level.channel, level.tolerant
        self._device = device
        self._level: LevelArray | None = level
        self._packed: PackedOwner | None = None

    def __getitem__(self, key: object) -> AnyArray:
        """Return the pixels at `key` on the device, as `LevelArray.read` does."""
        if self._level is not None:
            return self._read(self._level.slide, key)
        assert self._packed is not None
        with self._packed.use() as slide:
            return self._read(slide, key)

    def _read(self, slide: LevelOwner, key: object) -> AnyArray:
        number, channel, tolerant = self._source
        if not self._stack:
            level = self._level or slide.level_array(number, channel, tolerant=tolerant)
            return level.read(key, self._device)
        key = key if isinstance(key, tuple) else (key,)
        at, inner = key[: len(self._stack)], key[len(self._stack) :]
        indices = [range(size)[index] for index, size in zip(at, self._stack.values(), strict=True)]
        spans = [each if isinstance(each, range) else range(each, each + 1) for each in indices]
        plane = {  # a chunk is in one plane; an index may select nothing of it
            axis: span[0] if span else 0 for axis, span in zip(self._stack, spans, strict=True)
        }
        pixels = slide.plane(**plane).level_array(number, channel).read(inner, self._device)
        lengths = tuple(slice(len(each)) for each in indices if isinstance(each, range))
        return pixels[(np.newaxis,) * len(lengths)][lengths]

    def __getstate__(self) -> dict[str, object]:
        if self._packed is None:
            assert self._level is not None
            self._packed = self._level.slide.packed(self._device)
        return self.__dict__ | {"_level": None}

    def __dask_tokenize__(self) -> tuple[str, str]:
        return "DaskLevel", self._token


def tiles_per_chunk(level: LevelLayout, pixel_bytes: int) -> tuple[int, int]:
    """Return the number of tiles, down and across, in a chunk of about `CHUNK_BYTES`.

    The chunk has at least one tile and is as square as whole tiles allow.
    """
    grid = level.grid
    side = math.isqrt(CHUNK_BYTES // pixel_bytes)
    across = min(max(1, side // grid.tile_width), math.ceil(level.width / grid.tile_width))
    width = min(across * grid.tile_width, level.width)
    return max(1, CHUNK_BYTES // (width * grid.tile_height * pixel_bytes)), across
