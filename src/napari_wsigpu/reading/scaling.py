"""Regions at a resolution that no level has: read finer, and averaged to the size wanted."""

from __future__ import annotations

import math
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from napari_wsigpu.gpu.device.device import AVERAGED_TYPES
from napari_wsigpu.model.errors import RegionError
from napari_wsigpu.reading.average import EDGE, resample_area, source_span
from napari_wsigpu.reading.device import fill_channels
from napari_wsigpu.reading.plan import NO_TURN, Regions
from napari_wsigpu.storage.buffers import into

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.reading.plan import ReadOptions
    from napari_wsigpu.reading.reader import RegionReader

# What is read at once to be averaged, and the most that one pixel may be the average of.
FINER_BYTES, LARGEST_FINER = 256 << 20, 256 << 20
# How many pixels of the coarsest level one may span along an axis: each is looked at in turn.
LARGEST_SCALE = 1 << 15
# What is averaged together on the host: memory that `RegionMemory` keeps. To fetch it anew for each
# batch of 256 patches took a quarter of the time.
KEPT_FINER_BYTES = 32 << 20
# Pixels that a region may reach over.
FARTHEST = 1 << 40
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
        size = source_span(0, height, down)[1], source_span(0, width, across)[1]
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
    if max(found.scale) > LARGEST_SCALE:
        raise RegionError(
            f"A pixel of {mpp:g} µm would span {max(found.scale):.3g} pixels of level "
            f"{found.level} of '{path}', which says that one of these spans {finest[0]:g} x "
            f"{finest[1]:g} µm at level 0; use a smaller mpp."
        )
    return found


def _unless_near(scale: float) -> float:
    nearest = round(scale)
    return float(nearest) if abs(scale - nearest) < NEAR * nearest else scale


class Piece(NamedTuple):
    """As much of regions as is averaged at once.

    Attributes
    ----------
    place : tuple of slice
        Which of the regions, and which rows and columns of each.
    shape : tuple of (int, int, int)
        How many of each.
    finer : Regions
        What of the level lies under them.
    past : int
        How many regions are read whole, once these are.
    """

    place: tuple[slice, slice, slice]
    shape: tuple[int, int, int]
    finer: Regions
    past: int

    @property
    def first(self) -> tuple[int, int]:
        """Row and column of the first pixel."""
        return self.place[1].start, self.place[2].start

    def part_of(self, options: ReadOptions) -> ReadOptions:
        """Return the options of all regions for these alone."""
        return replace(options, past=self.past, turn=NO_TURN)


@dataclass(frozen=True, eq=False)
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

    _reader: RegionReader
    _target: Target
    _image: LevelLayout

    def read(
        self, regions: Regions, options: ReadOptions, out: NDArray[Any] | None = None
    ) -> NDArray[Any]:
        """Read regions to the host; see `RegionReader.read`.

        Parameters
        ----------
        regions : Regions
            Their corners in the level's pixels, their sizes in pixels wanted.
        options : ReadOptions
            How.
        out : ndarray, optional
            Where to put them.
        """
        target, image = self._target, self._image
        if target.exact:
            return self._reader.read(target.level, regions, options, out)
        (height, width), large = regions.shapes[0], self._is_large(regions)
        by_device = self._averages_on_devices and self._reader.offload.device.startswith("cuda")
        if by_device and not large:
            averaged = self.read_to_device(regions, "cuda", None, None, options)
            return into(out, self._reader.backend("cuda").fetch(averaged))
        try:
            shape = len(regions), height, width, image.channels
            pixels = np.empty(shape, image.dtype) if out is None else out
        except (MemoryError, ValueError):
            raise RegionError(
                f"{len(regions)} regions of {width} x {height} pixels don't fit into memory; "
                "read fewer or smaller ones."
            ) from None
        if large:
            pixels[...] = self._outside(options)
        if not by_device:
            self._average_on_host(regions, pixels, options)
            return pixels
        backend = self._reader.backend("cuda")
        for piece in self._pieces(regions):
            averaged = backend.empty((*piece.shape, image.channels), image.dtype)
            self._average_on("cuda", piece, averaged, None, piece.part_of(options))
            pixels[piece.place] = backend.fetch(averaged)
        return pixels

    def _average_on_host(
        self, regions: Regions, pixels: NDArray[Any], options: ReadOptions
    ) -> None:
        """Average each piece while the next one is decoded."""
        done: tuple[Piece, NDArray[Any]] | None = None
        averaged: Future[None] | None = None
        with options.turn, ThreadPoolExecutor(1, "wsigpu-average") as pool:
            for piece in self._pieces(regions, KEPT_FINER_BYTES):
                if done is not None:
                    averaged = pool.submit(self._average, *done, pixels)
                finer = self._reader.read(self._target.level, piece.finer, piece.part_of(options))
                if averaged is not None:
                    averaged.result()
                done = piece, finer
        if done is not None:
            self._average(*done, pixels)

    def _average(self, piece: Piece, finer: NDArray[Any], pixels: NDArray[Any]) -> None:
        part = pixels[piece.place]
        resample_area(finer, piece.shape[1:], self._target.scale, piece.first, part)

    def held(self, regions: Regions) -> NDArray[np.bool_]:
        """Find which pixels of regions the file holds, at least in part; see `find_held`."""
        target = self._target
        if target.exact:
            return self._reader.held(target.level, regions)
        height, width = regions.shapes[0]
        found = np.zeros((len(regions), height, width), np.bool_)
        for piece in self._pieces(regions):
            shares = self._reader.held(target.level, piece.finer)[..., None].astype(np.float32)
            averaged = resample_area(shares, piece.shape[1:], target.scale, piece.first)
            found[piece.place] = averaged[..., 0] > 0
        return found

    def read_to_device(
        self, regions: Regions, device: str, out: Any, stream: Any, options: ReadOptions
    ) -> Any:
        """Read regions to a device; see `read` and `RegionReader.read_to_device`."""
        target, reader = self._target, self._reader
        if target.exact:
            return reader.read_to_device(target.level, regions, device, out, stream, options)
        backend, image = reader.backend(device), self._image
        shape = len(regions), *regions.shapes[0], image.channels
        pixels: Any = None if out is None else out.reshape(shape)
        if not self._averages_on_devices:
            return backend.send(self.read(regions, options), pixels, stream)
        if pixels is None:
            pixels = backend.empty(shape, image.dtype)
        if self._is_large(regions):
            values = self._outside(options).tolist()
            backend.work(partial(fill_channels, backend.device, pixels, values), stream)
        for piece in self._pieces(regions):
            self._average_on(device, piece, pixels[piece.place], stream, piece.part_of(options))
        return pixels

    def _average_on(
        self, device: str, piece: Piece, pixels: Any, stream: Any, options: ReadOptions
    ) -> None:
        target, reader = self._target, self._reader
        finer = reader.read_to_device(target.level, piece.finer, device, None, stream, options)
        backend = reader.backend(device)
        average = backend.device.average_area
        backend.work(partial(average, finer, pixels, target.scale, piece.first), stream)

    @property
    def _averages_on_devices(self) -> bool:
        return self._image.dtype.name in AVERAGED_TYPES

    def _is_large(self, regions: Regions) -> bool:
        """Whether the finer pixels of one region alone are more than are read at once."""
        return self._bytes_of(*self._target.finer(regions).shapes[0]) > FINER_BYTES

    def _bytes_of(self, height: int, width: int) -> int:
        return height * width * self._image.channels * self._image.dtype.itemsize

    def _outside(self, options: ReadOptions) -> NDArray[Any]:
        """Return the samples of a pixel beyond the level."""
        below, beside = (np.array([extent]) for extent in (self._image.height, self._image.width))
        outside = self._reader.read(self._target.level, Regions.alike(below, beside, 1, 1), options)
        return outside.reshape(-1)

    def _pieces(self, regions: Regions, together: int = FINER_BYTES) -> Iterator[Piece]:
        """Cut regions into pieces whose finer pixels fit into memory.

        Those are whole regions, as many as have so many bytes together, or parts of one; of large
        ones, what lies beyond the level is left out.
        """
        finer, (height, width) = self._target.finer(regions), regions.shapes[0]
        if not self._is_large(regions):
            most = max(1, together // max(1, self._bytes_of(*finer.shapes[0])))
            for first in range(0, len(regions), most):
                chosen = slice(first, first + most)
                under = Regions.alike(finer.tops[chosen], finer.lefts[chosen], *finer.shapes[0])
                place = chosen, slice(0, height), slice(0, width)
                yield Piece(place, (len(under), height, width), under, first + len(under))
            return
        for number, corner in enumerate(regions.corners):
            yield from self._parts(number, corner, (height, width))

    def _parts(
        self, number: int, corner: tuple[int, int], size: tuple[int, int]
    ) -> Iterator[Piece]:
        """Cut a large region into rows of pixels, and these only if one row is large."""
        (down, across), (top, left) = self._target.scale, corner
        rows = _on_level(top, size[0], self._image.height, down)
        columns = _on_level(left, size[1], self._image.width, across)
        one = self._bytes_of(math.ceil(down), math.ceil(across))
        if one > LARGEST_FINER:
            raise RegionError(
                f"A pixel of this region is the mean of {one >> 20} MiB of level "
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
                yield Piece(place, shape, Regions.alike(*corners, height, width), number)


def _on_level(start: int, count: int, extent: int, scale: float) -> range:
    """Return which pixels of a region lie on the level along one axis, in part at least."""
    first = max(0, math.floor(EDGE - start / scale))
    return range(first, max(first, min(count, math.ceil((extent - start) / scale - EDGE))))


def _most(room: float, scale: float) -> int:
    """Return how many pixels, and one at least, span less than so many finer ones and one."""
    return max(1, int((room - 1) / scale))
