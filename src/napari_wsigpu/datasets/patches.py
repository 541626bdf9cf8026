"""`Patches`: which regions of which slides a data set has."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from napari_wsigpu.annotations.geojson import read_geojson
from napari_wsigpu.annotations.masks import inside as within_rings
from napari_wsigpu.model.errors import RegionError
from napari_wsigpu.model.geometry import Rect
from napari_wsigpu.slide.slide import check_plane, open_slide

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.slide.slide import Slide

    Path = str | os.PathLike[str]
    # A GeoJSON file, a mask of the whole slide, or what makes one.
    Area = Path | NDArray[Any] | Callable[[Slide], NDArray[Any]]
    Which = int | Sequence[int] | Literal["all"] | None

# So many pixels of a mask of outlines lie across a patch, and across the mask at most.
MASK_PIXELS, LARGEST_MASK = 16, 8192
# The place along z or t of patches of the plane that a slide shows, whichever that is.
SHOWN = -1
# What sums of fractions may be off by.
EDGE = 1e-6


@dataclass(frozen=True, eq=False)
class Patches:
    """Regions of one size, of any number of slides. Immutable, and can be pickled.

    Made by `at` or `grid`. To choose some of them is to index it, as an array.

    Attributes
    ----------
    paths : tuple of str
        The slides.
    slides : ndarray of int64, shape (patches,)
        Which of these each patch is of.
    locations : ndarray of int64, shape (patches, 2)
        (x, y) of each upper left corner in pixels of level 0.
    planes : ndarray of int64, shape (patches, 2)
        (z, t) of the plane that each is of; -1 where it is the one that the slide shows.
    size : tuple of int
        (width, height) in pixels of `level`, or of `mpp`.
    level : int
        Index of a level.
    mpp : float or None
        Micrometres a pixel, instead of a level.
    """

    paths: tuple[str, ...]
    slides: NDArray[np.int64]
    locations: NDArray[np.int64]
    planes: NDArray[np.int64]
    size: tuple[int, int]
    level: int = 0
    mpp: float | None = None

    @classmethod
    def at(
        cls,
        locations: Mapping[Path, Iterable[tuple[int, int]]],
        size: int | tuple[int, int],
        *,
        level: int = 0,
        mpp: float | None = None,
        z: int | Sequence[int] | None = None,
        t: int | Sequence[int] | None = None,
    ) -> Patches:
        """List patches by the locations in each slide.

        Parameters
        ----------
        locations : Mapping of path to iterable of tuple of int
            (x, y) of each upper left corner in pixels of level 0.
        size : int or tuple of int
            Side, or (width, height), in pixels of `level`, or of `mpp`.
        level, mpp
            As in `Slide.read_region`.
        z, t : int or sequence of int, optional
            Which planes, counted from 0: of several, each has all locations. By default the one
            that the slide shows. Slides that lack one are told when they are read.

        Raises
        ------
        RegionError
            If locations are not pairs of whole numbers, or planes are not whole numbers.
        """
        found = []
        planes = list(product(_numbers("z", z), _numbers("t", t)))
        for path, places in locations.items():
            corners = np.asarray(list(places))
            if corners.size and (corners.dtype.kind not in "iu" or corners.shape[1:] != (2,)):
                raise RegionError(
                    f"The locations in '{os.fspath(path)}' are not pairs (x, y) of whole numbers."
                )
            found.append(corners.reshape(-1, 2).astype(np.int64))
        return cls._of(list(locations), found, [planes] * len(found), size, level, mpp)

    @classmethod
    def grid(
        cls,
        paths: Iterable[Path],
        size: int | tuple[int, int],
        *,
        level: int = 0,
        mpp: float | None = None,
        overlap: int = 0,
        inside: Mapping[Path, Area] | Callable[[Slide], NDArray[Any]] | None = None,
        share: float = 0.5,
        z: Which = None,
        t: Which = None,
    ) -> Patches:
        """Lay a grid over each slide, as `Slide.tiles` does, and keep what lies in an area.

        Parameters
        ----------
        paths : iterable of path
            The slides.
        size, level, mpp, overlap
            As in `Slide.tiles`.
        inside : Mapping of path to area, or callable, optional
            The area of each slide: a GeoJSON file, whose polygons and ellipses count; a mask of
            any size, of shape (height, width), that lies over the whole slide; or what returns
            such a mask of a slide. Slides that are not in the mapping are taken whole.
        share : float
            How much of a patch has to lie in the area, from 0 (any) to 1 (all of it).
        z, t : int, sequence of int or "all", optional
            Which planes, counted from 0: of several, each has the whole grid. By default the one
            that the slide shows.

        Raises
        ------
        RegionError, LevelError, PlaneError
            If the grid, an area or a plane can't be.
        SlideError
            If a slide or GeoJSON file can't be read.
        """
        names, found, planes = list(paths), [], []
        areas = {} if inside is None or callable(inside) else _by_name(inside, names)
        for path in names:
            with open_slide(path) as slide:
                planes.append(_planes_of(slide, z, t))
                corners = slide.tile_locations(size, level=level, mpp=mpp, overlap=overlap)
                area = inside if callable(inside) else areas.get(os.fspath(path))
                if area is not None:
                    spans = _spans(slide, _pair(size), level, mpp)
                    mask = _mask(area, slide, min(spans))
                    corners = corners[
                        _shares(mask, slide, corners, spans) >= max(share, EDGE) - EDGE / 2
                    ]
            found.append(corners)
        return cls._of(names, found, planes, size, level, mpp)

    @classmethod
    def _of(
        cls,
        paths: Sequence[Path],
        locations: Sequence[NDArray[np.int64]],
        planes: Sequence[Sequence[tuple[int, int]]],
        size: int | tuple[int, int],
        level: int,
        mpp: float | None,
    ) -> Patches:
        """Make patches at all locations in each of the planes of each slide, plane by plane."""
        pairs = list(zip(locations, planes, strict=True))
        none = np.empty((0, 2), np.int64)
        return cls(
            tuple(os.fspath(path) for path in paths),
            np.repeat(np.arange(len(paths)), [len(places) * len(each) for places, each in pairs]),
            np.concatenate([none, *(np.tile(places, (len(each), 1)) for places, each in pairs)]),
            np.concatenate([none, *(np.repeat(each, len(places), 0) for places, each in pairs)]),
            _pair(size),
            level,
            mpp,
        )

    def in_turn(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return indices slide by slide, and plane by plane of each."""
        z, t = self.planes[indices].T
        return indices[np.lexsort((t, z, self.slides[indices]))]

    def __len__(self) -> int:
        return len(self.slides)

    def __getitem__(self, chosen: Any) -> Patches:
        """Return some of them, by a slice, a mask or indices."""
        return replace(
            self,
            slides=self.slides[chosen],
            locations=self.locations[chosen],
            planes=self.planes[chosen],
        )

    def __repr__(self) -> str:
        width, height = self.size
        at = f"level {self.level}" if self.mpp is None else f"{self.mpp:g} µm a pixel"
        return f"<Patches {len(self)} of {width} x {height} at {at} from {len(self.paths)} slides>"


def _by_name(areas: Mapping[Path, Area], paths: Sequence[Path]) -> dict[str, Area]:
    """Return areas by the paths of their slides as text."""
    found = {os.fspath(path): area for path, area in areas.items()}
    strange = sorted(found.keys() - {os.fspath(path) for path in paths})
    if strange:
        raise RegionError(
            f"An area is of '{strange[0]}', which is none of the slides; use a path of theirs."
        )
    return found


def _numbers(axis: str, which: int | Sequence[int] | None) -> list[int]:
    """Return the planes along an axis that are meant, each once."""
    if which is None:
        return [SHOWN]
    found = list(which) if isinstance(which, Iterable) else [which]
    if not found or any(not isinstance(each, int | np.integer) or each < 0 for each in found):
        raise RegionError(f"{axis} is {which!r}; it has to be whole numbers from 0 on.")
    return list(dict.fromkeys(int(each) for each in found))


def _planes_of(slide: Slide, z: Which, t: Which) -> list[tuple[int, int]]:
    """Return (z, t) of the planes of a slide that are meant."""
    along = []
    for axis, which, size in (("z", z, slide.planes.size_z), ("t", t, slide.planes.size_t)):
        numbers = list(range(size)) if which == "all" else _numbers(axis, which)
        for number in numbers:
            if number != SHOWN:
                check_plane(slide.path, axis, number, size)
        along.append(numbers)
    return list(product(along[0], along[1]))


def _pair(size: Any) -> tuple[int, int]:
    sides = list(size) if isinstance(size, Iterable) else [size, size]
    if len(sides) != 2 or not all(
        isinstance(side, int | np.integer) and side > 0 for side in sides
    ):
        raise RegionError(
            f"The size of patches is {size!r}; give their side in pixels, or (width, height)."
        )
    return int(sides[0]), int(sides[1])


def _spans(
    slide: Slide, size: tuple[int, int], level: int, mpp: float | None
) -> tuple[float, float]:
    """Return how many pixels of level 0 a patch spans, across and down."""
    if mpp is None:
        return size[0] * slide.level_downsamples[level], size[1] * slide.level_downsamples[level]
    assert slide.mpp is not None, "or the grid could not be laid"
    return size[0] * mpp / slide.mpp[0], size[1] * mpp / slide.mpp[1]


def _mask(area: Area, slide: Slide, span: float) -> NDArray[np.bool_]:
    """Return which parts of a slide are an area, as a mask of any size over all of it."""
    if callable(area):
        area = area(slide)
    if isinstance(area, np.ndarray):
        if area.ndim != 2 or not area.size:
            raise RegionError(f"A mask of '{slide.path}' has the shape {area.shape}; it needs two.")
        return area > 0
    width, height = slide.dimensions
    downsample = max(1.0, span / MASK_PIXELS, max(width, height) / LARGEST_MASK)
    rect = Rect(0, 0, max(1, round(height / downsample)), max(1, round(width / downsample)))
    mask = np.zeros((rect.height, rect.width), np.bool_)
    for item in read_geojson(area):
        if item.kind in ("polygon", "ellipse"):
            mask |= within_rings(item.rings, rect, downsample)
    return mask


def _shares(
    mask: NDArray[np.bool_], slide: Slide, corners: NDArray[np.int64], spans: tuple[float, float]
) -> NDArray[np.float64]:
    """Return how much of each patch, of what lies on the slide, is in an area."""
    sums = np.zeros((mask.shape[0] + 1, mask.shape[1] + 1))
    np.cumsum(np.cumsum(mask, axis=0), axis=1, out=sums[1:, 1:])
    edges: list[NDArray[np.float64]] = []
    for axis, (count, extent) in enumerate(zip(mask.shape[::-1], slide.dimensions, strict=True)):
        begin = corners[:, axis].astype(np.float64)
        ends = begin, begin + spans[axis]
        edges += [np.clip(end * (count / extent), 0, count) for end in ends]
    left, right, top, bottom = edges
    held = _above(sums, bottom, right) - _above(sums, top, right)
    held -= _above(sums, bottom, left) - _above(sums, top, left)
    shares: NDArray[np.float64] = held / np.maximum((bottom - top) * (right - left), 1e-9)
    return shares


def _above(
    sums: NDArray[np.float64], y: NDArray[np.float64], x: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the area of a mask above and left of points, which may lie within pixels."""
    row = np.minimum(y.astype(np.int64), sums.shape[0] - 2)
    column = np.minimum(x.astype(np.int64), sums.shape[1] - 2)
    down, across = y - row, x - column
    upper = sums[row, column] * (1 - across) + sums[row, column + 1] * across
    lower = sums[row + 1, column] * (1 - across) + sums[row + 1, column + 1] * across
    area: NDArray[np.float64] = upper * (1 - down) + lower * down
    return area
