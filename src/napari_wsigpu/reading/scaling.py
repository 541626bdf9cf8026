"""Read regions at resolutions between levels: read a finer level and average it."""

from __future__ import annotations

import math
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.gpu.device.interfaces import AVERAGED_TYPES
from napari_wsigpu.model.errors import RegionError
from napari_wsigpu.reading.average import EDGE, resample_area, source_span
from napari_wsigpu.reading.plan import NO_LOCK, Regions
from napari_wsigpu.storage.buffers import copy_into

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from napari_wsigpu.model.arrays import AnyArray, Array, DeviceArray, Mask
    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.reading.device import AnyStream
    from napari_wsigpu.reading.plan import ReadOptions
    from napari_wsigpu.reading.reader import RegionReader

# Limits in bytes: finer pixels to read at once, and finer pixels to average into one result pixel.
FINER_BYTES, LARGEST_FINER = 256 << 20, 256 << 20
# Maximum number of pixels of the coarsest level that a result pixel may span along an axis, since
# averaging reads every one of them.
LARGEST_SCALE = 1 << 15
# Bytes averaged at once on the host. `RegionMemory` keeps buffers of this size; allocating a
# new one for each batch of 256 patches took a quarter of the time.
KEPT_FINER_BYTES = 32 << 20
# Largest side of a region in pixels of the level.
MAX_SPAN = 1 << 40
# Relative difference in pixel size below which a level is read without resampling.
NEAR = 1e-3


class Target(NamedTuple):
    """The level that regions are read from, and its scale.

    Attributes
    ----------
    level : int
        Number of the level.
    scale : tuple of (float, float)
        Number of level pixels that a result pixel spans, down and across.
    """

    level: int
    scale: tuple[float, float] = (1.0, 1.0)

    @property
    def exact(self) -> bool:
        """Whether the level is read without resampling."""
        return self.scale == (1.0, 1.0)

    def finer(self, regions: Regions) -> Regions:
        """Return the regions of the level under regions whose sizes are in result pixels.

        Raises
        ------
        RegionError
            If a region would span more than `MAX_SPAN` pixels.
        """
        (height, width), (down, across) = regions.shapes[0], self.scale
        size = source_span(0, height, down)[1], source_span(0, width, across)[1]
        if max(size) > MAX_SPAN:
            raise RegionError(
                f"A region of {width} x {height} pixels would span {max(size):.3g} pixels of "
                f"level {self.level}; use a smaller one, or a smaller mpp."
            )
        return Regions.alike(regions.tops, regions.lefts, *size)


def find_target(
    path: str, mpp: float, finest: tuple[float, float] | None, downsamples: Sequence[float]
) -> Target:
    """Choose the coarsest level that is at least as fine as a resolution.

    Parameters
    ----------
    path : str
        Path of the slide, for messages.
    mpp : float
        Micrometers per result pixel.
    finest : tuple of (float, float) or None
        Micrometers per pixel of level 0, (x, y).
    downsamples : sequence of float
        Pixels of level 0 that a pixel of each level spans.

    Raises
    ------
    RegionError
        If the pixel size of the slide is unknown, or `mpp` is invalid, too small or too large.
    """
    if finest is None:
        raise RegionError(
            f"mpp can't be used because the pixel size of '{path}' is unknown; use level."
        )
    if not isinstance(mpp, int | float | np.number) or not 0 < mpp < math.inf:
        raise RegionError(f"mpp is {mpp!r}; it must be a number of micrometers greater than 0.")
    found: Target | None = None
    for level, downsample in enumerate(downsamples):
        x, y = (mpp / (each * downsample) for each in finest)
        if min(x, y) >= 1 - NEAR:
            found = Target(level, (_unless_near(y), _unless_near(x)))
    if found is None:
        raise RegionError(
            f"mpp {mpp:g} is finer than the pixels of '{path}', which span {max(finest):g} µm; "
            "use a larger mpp."
        )
    if max(found.scale) > LARGEST_SCALE:
        raise RegionError(
            f"A pixel of {mpp:g} µm would span {max(found.scale):.3g} pixels of level "
            f"{found.level} of '{path}', whose pixels at level 0 are {finest[0]:g} x "
            f"{finest[1]:g} µm; use a smaller mpp."
        )
    return found


def _unless_near(scale: float) -> float:
    """Return a scale, or the nearest whole number if their relative difference is below `NEAR`."""
    nearest = round(scale)
    return float(nearest) if abs(scale - nearest) < NEAR * nearest else scale


def _submitted(pool: ThreadPoolExecutor, task: Callable[[], None]) -> Future[None] | None:
    """Run a task in a pool; if its thread can't be started, run it here and return None."""
    try:
        return pool.submit(task)
    except RuntimeError:
        task()
        return None


class RegionPart(NamedTuple):
    """The part of the regions that is averaged in one step.

    Attributes
    ----------
    place : tuple of slice
        The regions, rows and columns of the result.
    shape : tuple of (int, int, int)
        Number of regions, rows and columns.
    finer : Regions
        The regions of the level under this part.
    past : int
        Number of regions known to be complete once this part is read.
    """

    place: tuple[slice, slice, slice]
    shape: tuple[int, int, int]
    finer: Regions
    past: int

    @property
    def first(self) -> tuple[int, int]:
        """Row and column of the first result pixel."""
        return self.place[1].start, self.place[2].start

    def options_for(self, options: ReadOptions) -> ReadOptions:
        """Return the options for this part, without the lock, which spans all parts."""
        return replace(options, regions_done=self.past, lock=NO_LOCK)


@dataclass(frozen=True, eq=False)
class ScaledReader:
    """Reads regions of a target, resampled if necessary.

    Parameters
    ----------
    reader : RegionReader
        Reads the level without resampling.
    target : Target
        The level and the scale.
    image : LevelLayout
        The level.
    """

    _reader: RegionReader
    _target: Target
    _image: LevelLayout

    def read(self, regions: Regions, options: ReadOptions, out: Array | None = None) -> Array:
        """Read regions to the host; see `RegionReader.read`.

        Parameters
        ----------
        regions : Regions
            Regions with corners in level pixels and sizes in result pixels.
        options : ReadOptions
            How to read.
        out : ndarray, optional
            Receives the pixels.
        """
        target, image = self._target, self._image
        if target.exact:
            return self._reader.read(target.level, regions, options, out)
        (height, width), large = regions.shapes[0], self._is_large(regions)
        by_device = self._averages_on_devices and self._reader.offload.device.startswith("cuda")
        if by_device and not large:
            averaged = self.read_to_device(regions, "cuda", None, None, options)
            return copy_into(out, self._reader.backend("cuda").fetch(averaged))
        try:
            shape = len(regions), height, width, image.channels
            pixels = np.empty(shape, image.dtype) if out is None else out
        except (MemoryError, ValueError):
            raise RegionError(
                f"{len(regions)} regions of {width} x {height} pixels don't fit into memory; "
                "read fewer or smaller ones."
            ) from None
        # The parts of large regions leave out the area outside the level.
        if large:
            pixels[...] = self._outside(options)
        if not by_device:
            self._average_on_host(regions, pixels, options)
            return pixels
        backend = self._reader.backend("cuda")
        for part in self._split(regions):
            averaged = backend.empty((*part.shape, image.channels), image.dtype)
            self._average_on("cuda", part, averaged, None, part.options_for(options))
            pixels[part.place] = backend.fetch(averaged)
        return pixels

    def _average_on_host(self, regions: Regions, pixels: Array, options: ReadOptions) -> None:
        """Average each part in another thread while the next one is decoded."""
        done: tuple[RegionPart, Array] | None = None
        averaged: Future[None] | None = None
        with options.lock, ThreadPoolExecutor(1, "wsigpu-average") as pool:
            for part in self._split(regions, KEPT_FINER_BYTES):
                if done is not None:
                    averaged = _submitted(pool, partial(self._average, *done, pixels))
                finer = self._reader.read(self._target.level, part.finer, part.options_for(options))
                # Waiting here limits memory to the finer pixels of two parts.
                if averaged is not None:
                    averaged.result()
                done = part, finer
        # Without holding the lock: the next reader may start while the last part is averaged.
        if done is not None:
            self._average(*done, pixels)

    def _average(self, part: RegionPart, finer: Array, pixels: Array) -> None:
        target = pixels[part.place]
        resample_area(finer, part.shape[1:], self._target.scale, part.first, target)

    def held(self, regions: Regions) -> Mask:
        """Return the mask of pixels that the file holds at least in part; see `find_held`."""
        target = self._target
        if target.exact:
            return self._reader.held(target.level, regions)
        height, width = regions.shapes[0]
        found = np.zeros((len(regions), height, width), np.bool_)
        for part in self._split(regions):
            shares = self._reader.held(target.level, part.finer)[..., None].astype(np.float32)
            averaged = resample_area(shares, part.shape[1:], target.scale, part.first)
            found[part.place] = averaged[..., 0] > 0
        return found

    def read_to_device(
        self,
        regions: Regions,
        device: str,
        out: DeviceArray,
        stream: AnyStream,
        options: ReadOptions,
    ) -> AnyArray:
        """Read regions to a device; see `read` and `RegionReader.read_to_device`."""
        target, reader = self._target, self._reader
        if target.exact:
            return reader.read_to_device(target.level, regions, device, out, stream, options)
        backend, image = reader.backend(device), self._image
        shape = len(regions), *regions.shapes[0], image.channels
        pixels: DeviceArray = None if out is None else out.reshape(shape)
        if not self._averages_on_devices:
            return backend.send(self.read(regions, options), pixels, stream)
        if pixels is None:
            pixels = backend.empty(shape, image.dtype)
        if self._is_large(regions):
            from napari_wsigpu.reading.device import fill_channels

            values = self._outside(options).tolist()
            backend.work(partial(fill_channels, backend.device, pixels, values), stream)
        for part in self._split(regions):
            self._average_on(device, part, pixels[part.place], stream, part.options_for(options))
        return pixels

    def _average_on(
        self,
        device: str,
        part: RegionPart,
        pixels: DeviceArray,
        stream: AnyStream,
        options: ReadOptions,
    ) -> None:
        target, reader = self._target, self._reader
        finer = reader.read_to_device(target.level, part.finer, device, None, stream, options)
        backend = reader.backend(device)
        average = backend.device.average_area
        backend.work(partial(average, finer, pixels, target.scale, part.first), stream)

    @property
    def _averages_on_devices(self) -> bool:
        return self._image.dtype.name in AVERAGED_TYPES

    def _is_large(self, regions: Regions) -> bool:
        """Return whether the finer pixels of a single region exceed `FINER_BYTES`."""
        return self._bytes_of(*self._target.finer(regions).shapes[0]) > FINER_BYTES

    def _bytes_of(self, height: int, width: int) -> int:
        """Return the number of bytes in `height` x `width` pixels of the level."""
        return height * width * self._image.channels * self._image.dtype.itemsize

    def _outside(self, options: ReadOptions) -> Array:
        """Return the samples of a pixel outside the level."""
        bottom, right = (np.array([extent]) for extent in (self._image.height, self._image.width))
        outside = self._reader.read(self._target.level, Regions.alike(bottom, right, 1, 1), options)
        return outside.reshape(-1)

    def _split(self, regions: Regions, most_bytes: int = FINER_BYTES) -> Iterator[RegionPart]:
        """Split regions into parts whose finer pixels fit into `most_bytes`.

        A part is several whole regions, or a piece of one large region; such pieces leave out the
        area outside the level.
        """
        finer, (height, width) = self._target.finer(regions), regions.shapes[0]
        if not self._is_large(regions):
            most = max(1, most_bytes // max(1, self._bytes_of(*finer.shapes[0])))
            for first in range(0, len(regions), most):
                chosen = slice(first, first + most)
                under = Regions.alike(finer.tops[chosen], finer.lefts[chosen], *finer.shapes[0])
                place = chosen, slice(0, height), slice(0, width)
                yield RegionPart(place, (len(under), height, width), under, first + len(under))
            return
        for number, corner in enumerate(regions.corners):
            yield from self._split_large(number, corner, (height, width))

    def _split_large(
        self, number: int, corner: tuple[int, int], size: tuple[int, int]
    ) -> Iterator[RegionPart]:
        """Split a large region into groups of rows; split rows only if one of them is too large."""
        (down, across), (top, left) = self._target.scale, corner
        rows = _on_level(top, size[0], self._image.height, down)
        columns = _on_level(left, size[1], self._image.width, across)
        one = self._bytes_of(math.ceil(down), math.ceil(across))
        if one > LARGEST_FINER:
            raise RegionError(
                f"A pixel of this region would average {one >> 20} MiB of level "
                f"{self._target.level}; use a smaller mpp."
            )
        room = FINER_BYTES / self._bytes_of(1, 1)
        wide = _most(room / (math.ceil(down) + 1), across)
        high = _most(room / (min(wide, len(columns)) * across + 1), down)
        for y in range(rows.start, rows.stop, high):
            for x in range(columns.start, columns.stop, wide):
                shape = 1, min(high, rows.stop - y), min(wide, columns.stop - x)
                (begin_y, height), (begin_x, width) = (
                    source_span(y, shape[1], down),
                    source_span(x, shape[2], across),
                )
                place = slice(number, number + 1), slice(y, y + shape[1]), slice(x, x + shape[2])
                corners = np.array([top + begin_y]), np.array([left + begin_x])
                yield RegionPart(place, shape, Regions.alike(*corners, height, width), number)


def _on_level(start: int, count: int, extent: int, scale: float) -> range:
    """Return the result pixels along one axis that lie at least partly on the level."""
    first = max(0, math.floor(EDGE - start / scale))
    return range(first, max(first, min(count, math.ceil((extent - start) / scale - EDGE))))


def _most(room: float, scale: float) -> int:
    """Return how many result pixels, at least one, span fewer than `room` finer pixels."""
    return max(1, int((room - 1) / scale))
