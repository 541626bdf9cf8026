"""The tile cache of the process, with cuCIM's interface."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import TYPE_CHECKING

from napari_wsigpu.model.errors import RegionError
from napari_wsigpu.slide.runtime import default

if TYPE_CHECKING:
    from collections.abc import Sequence

    from napari_wsigpu.compat.cucim.image import CuImage
    from napari_wsigpu.reading.cache import TileCache

MIB = 1 << 20
USUAL_TILE_BYTES = 256 * 256 * 3


def _tiles() -> TileCache:
    return default().tiles


class CacheType(IntEnum):
    """cuCIM's cache types."""

    NoCache = 0
    PerProcess = 1


class ImageCache:
    """The tile cache of the process, with cuCIM's interface.

    All slides share the cache, which has a capacity of 512 MB by default. As in cuCIM, this class
    reports no cache until `CuImage.cache` has configured it. Hits are not counted for the whole
    cache; see `Slide.stats`.
    """

    hit_count = 0
    miss_count = 0
    _set_up = False

    @classmethod
    def set_up(cls, memory_capacity: int) -> None:
        """Empty the cache and set its capacity in MiB; 0 turns it off."""
        _tiles().budget = 0
        _tiles().budget = memory_capacity * MIB
        cls._set_up = memory_capacity > 0

    @property
    def type(self) -> CacheType:
        """`CacheType.PerProcess` once the cache is configured."""
        return CacheType.PerProcess if self._set_up else CacheType.NoCache

    @property
    def config(self) -> dict[str, object]:
        """Settings of the cache; `memory_capacity` is in MiB."""
        name = ("nocache", "per_process")[self.type]
        return {"type": name, "memory_capacity": self.memory_capacity // MIB, "record_stat": False}

    @property
    def memory_size(self) -> int:
        """Bytes in use."""
        return _tiles().used if self._set_up else 0

    @property
    def memory_capacity(self) -> int:
        """Capacity in bytes."""
        return _tiles().budget if self._set_up else 0

    @property
    def free_memory(self) -> int:
        """Bytes that can be added without evicting a tile."""
        return self.memory_capacity - self.memory_size

    @property
    def size(self) -> int:
        """Bytes in use, as a number of tiles of 256 x 256 RGB pixels."""
        return self.memory_size // USUAL_TILE_BYTES

    @property
    def capacity(self) -> int:
        """Capacity, as a number of tiles of 256 x 256 RGB pixels."""
        return self.memory_capacity // USUAL_TILE_BYTES

    def reserve(self, memory_capacity: int, **_: object) -> None:
        """Enlarge the capacity to at least `memory_capacity` MiB, keeping the cached tiles."""
        _tiles().budget = max(_tiles().budget, memory_capacity * MIB)


def preferred_memory_capacity(
    img: CuImage | None = None,
    image_size: Sequence[int] | None = None,
    tile_size: Sequence[int] | None = None,
    patch_size: Sequence[int] | None = None,
    bytes_per_pixel: int = 3,
) -> int:
    """Return the MiB needed to cache all tiles under one row of patches across the slide."""
    if img is not None:
        image_size, tile_size = img.size("XY"), img.resolutions["level_tile_sizes"][0]
        bytes_per_pixel = img.shape[-1] * img.dtype.bits // 8
    if image_size is None:
        raise RegionError("Please specify 'image_size' parameter!")
    tile_width, tile_height = tile_size or (256, 256)
    columns = math.ceil(image_size[0] / tile_width)
    rows = 1 + math.ceil(((patch_size or (256, 256))[1] - 1) / tile_height)
    return math.ceil(columns * rows * tile_width * tile_height * bytes_per_pixel / MIB)
