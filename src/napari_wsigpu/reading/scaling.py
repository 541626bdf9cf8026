"""Regions at a resolution that no level has: read finer, and averaged to the size wanted."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from napari_wsigpu.errors import RegionError
from napari_wsigpu.gpu.device import AVERAGED_TYPES
from napari_wsigpu.reading.average import EDGE, resample_area
from napari_wsigpu.reading.plan import Regions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.layout import LevelLayout
    from napari_wsigpu.reading.plan import Wish
    from napari_wsigpu.reading.reader import RegionReader

FINER_BYTES = 256 << 20
# What one region may take for finer pixels, and pixels that it may reach over.
LARGEST_FINER, FARTHEST = 2 << 30, 1 << 40
# A level whose pixels are so little larger or smaller than asked is taken as it is.
NEAR = 1e-3


class Target(NamedTuple):
    """What regions are read from.

    Attributes
    ----------
    level : int
        Number of a level.
    scale : tuple of (float, float)
        How many of its pixels one that is wanted spans, down and across.
    """

    level: int
    scale: tuple[float, float] = (1.0, 1.0)

    @property
    def exact(self) -> bool:
        """Whether the level's own pixels are wanted."""
        return self.scale == (1.0, 1.0)

    def finer(self, regions: Regions) -> Regions:
        """Return what of the level lies under regions, whose sizes are in pixels wanted."""
        (height, width), (down, across) = regions.shapes[0], self.scale
        size = math.ceil(height * down - EDGE), math.ceil(width * across - EDGE)
        if max(size) > FARTHEST:
            raise RegionError(
                f"A region of {width} x {height} pixels would reach over {max(size):.3g} pixels of "
                f"level {self.level}; use a smaller one, or a smaller mpp."
            )
        return Regions.alike(regions.tops, regions.lefts, *size)


def find_target(
    path: str, mpp: float, finest: tuple[float, float] | None, downsamples: Sequence[float]
) -> Target:
    """Choose the coarsest level that is at least as fine as asked.

    Parameters
    ----------
    path : str
        The slide's, for messages.
    mpp : float
        Micrometres that one pixel is to span.
    finest : tuple of (float, float) or None
        What one pixel of level 0 spans, (x, y).
    downsamples : sequence of float
        How many pixels of level 0 one of each level spans.

    Raises
    ------
    RegionError
        If the slide does not say what a pixel spans, or has none that small.
    """
    if finest is None:
        raise RegionError(
            f"'{path}' does not say how many micrometres a pixel spans, so mpp can't be used; "
            "use level."
        )
    if not isinstance(mpp, int | float | np.number) or not 0 < mpp < math.inf:
        raise RegionError(f"mpp is {mpp!r}; it has to be a number of micrometres above 0.")
    found: Target | None = None
    for level, downsample in enumerate(downsamples):
        x, y = (mpp / (each * downsample) for each in finest)
        if min(x, y) >= 1 - NEAR:
            found = Target(level, (_unless_near(y), _unless_near(x)))
    if found is None:
        raise RegionError(
            f"A pixel of '{path}' spans {max(finest):g} µm at least, so there is none of "
            f"{mpp:g} µm; use a larger mpp."
        )
    return found


def _unless_near(scale: float) -> float:
    nearest = round(scale)
    return float(nearest) if abs(scale - nearest) < NEAR * nearest else scale


class ScaledReader:
    """Reads regions of a target.

    Parameters
    ----------
    reader : RegionReader
        What reads the level's own pixels.
    target : Target
        What is wanted.
    image : LevelLayout
        The level.
    """

    def __init__(self, reader: RegionReader, target: Target, image: LevelLayout) -> None:
        self._reader = reader
        self._target = target
        self._extent = image.height, image.width
        self._channels = image.channels
        self._dtype = image.dtype

    def read(self, regions: Regions, wish: Wish) -> NDArray[Any]:
        """Read regions to the host; see `RegionReader.read`.

        Parameters
        ----------
        regions : Regions
            Their corners in the level's pixels, their sizes in pixels wanted.
        wish : Wish
            How.
        """
        target = self._target
        if target.exact:
            return self._reader.read(target.level, regions, wish)
        by_device = self._reader.offload.device.startswith("cuda")
        if (
            by_device
            and self._dtype.name in AVERAGED_TYPES
            and not self._is_large(target.finer(regions))
        ):
            averaged = self.read_to_device(regions, "cuda", None, None, wish)
            return self._reader.fetch(averaged, "cuda")
        size = regions.shapes[0]
        try:
            pixels = np.empty((len(regions), *size, self._channels), self._dtype)
        except (MemoryError, ValueError):
            raise RegionError(
                f"{len(regions)} regions of {size[1]} x {size[0]} pixels don't fit into memory; "
                "read fewer or smaller ones."
            ) from None
        for first, part in self._parts(regions):
            if self._is_large(part):
                self._read_large(part, pixels[first], wish)
                continue
            finer = self._reader.read(target.level, part, wish)
            pixels[first : first + len(part)] = resample_area(finer, size, target.scale)
        return pixels

    def _read_large(self, region: Regions, pixels: NDArray[Any], wish: Wish) -> None:
        """Read a region whose finer pixels are many, without those below and right of the level."""
        level, scale = self._target.level, self._target.scale
        size, corner = [], region.corners[0]
        for start, count, extent, step in zip(
            corner, pixels.shape[:2], self._extent, scale, strict=True
        ):
            size.append(min(count, max(0, math.ceil((extent - start) / step - EDGE))))
        bottom, right = (np.array([extent]) for extent in self._extent)
        outside = Regions.alike(bottom, right, 1, 1)
        pixels[...] = self._reader.read(level, outside, wish)[0]
        if not all(size):
            return
        part = Regions.alike(region.tops, region.lefts, *size)
        finer = self._target.finer(part)
        needed = self._bytes_of_one(finer)
        if needed > LARGEST_FINER:
            raise RegionError(
                f"A region of {pixels.shape[1]} x {pixels.shape[0]} pixels needs "
                f"{needed >> 20} MiB of level {level} to average; use a smaller one or mpp."
            )
        found = resample_area(self._reader.read(level, finer, wish), tuple(size), scale)
        pixels[: size[0], : size[1]] = found[0]

    def _is_large(self, finer: Regions) -> bool:
        """Whether the finer pixels of one region alone are more than are read at once."""
        return self._bytes_of_one(finer) > FINER_BYTES

    def _bytes_of_one(self, finer: Regions) -> int:
        return math.prod(finer.shapes[0]) * self._channels * self._dtype.itemsize

    def read_to_device(
        self, regions: Regions, device: str, out: Any, stream: Any, wish: Wish
    ) -> Any:
        """Read regions to a device; see `read` and `RegionReader.read_to_device`."""
        target, reader = self._target, self._reader
        if target.exact:
            return reader.read_to_device(target.level, regions, device, out, stream, wish)
        shape = len(regions), *regions.shapes[0], self._channels
        pixels: Any = None if out is None else out.reshape(shape)
        if self._dtype.name not in AVERAGED_TYPES or self._is_large(target.finer(regions)):
            return reader.send(self.read(regions, wish), device, pixels, stream)
        if pixels is None:
            pixels = reader.empty_on(device, shape, self._dtype)
        for first, part in self._parts(regions):
            finer = reader.read_to_device(target.level, part, device, None, stream, wish)
            reader.average_on(
                device, finer, pixels[first : first + len(part)], target.scale, stream
            )
        return pixels

    def _parts(self, regions: Regions) -> Iterator[tuple[int, Regions]]:
        """Yield as many regions at once as their finer pixels fit into memory, and the first's."""
        finer = self._target.finer(regions)
        height, width = finer.shapes[0]
        most = max(1, FINER_BYTES // max(1, self._bytes_of_one(finer)))
        for first in range(0, len(regions), most):
            chosen = slice(first, first + most)
            yield first, Regions.alike(finer.tops[chosen], finer.lefts[chosen], height, width)
