"""`Patches`: which regions of which slides a data set has."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.annotations.geojson import read_geojson
from napari_wsigpu.annotations.masks import inside as within_rings
from napari_wsigpu.errors import RegionError
from napari_wsigpu.geometry import Rect
from napari_wsigpu.slide import open_slide

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.slide import Slide

    Path = str | os.PathLike[str]
    # A GeoJSON file, a mask of the whole slide, or what makes one.
    Area = Path | NDArray[Any] | Callable[[Slide], NDArray[Any]]

# So many pixels of a mask of outlines lie across a patch, and across the mask at most.
MASK_PIXELS, LARGEST_MASK = 16, 8192
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

        Raises
        ------
        RegionError
            If locations are not pairs of whole numbers.
        """
        found = []
        for path, places in locations.items():
            corners = np.asarray(list(places))
            if corners.size and (corners.dtype.kind not in "iu" or corners.shape[1:] != (2,)):
                raise RegionError(
                    f"The locations in '{os.fspath(path)}' are not pairs (x, y) of whole numbers."
                )
            found.append(corners.reshape(-1, 2).astype(np.int64))
        return cls._of(list(locations), found, size, level, mpp)

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

        Raises
        ------
        RegionError, LevelError
            If the grid or an area can't be.
        SlideError
            If a slide or GeoJSON file can't be read.
        """
        names, found = [], []
        for path in paths:
            with open_slide(path) as slide:
                corners = slide.tile_locations(size, level=level, mpp=mpp, overlap=overlap)
                area = inside if inside is None or callable(inside) else inside.get(path)
                if area is not None:
                    spans = _spans(slide, _pair(size), level, mpp)
                    mask = _mask(area, slide, min(spans))
                    corners = corners[
                        _shares(mask, slide, corners, spans) >= max(share, EDGE) - EDGE / 2
                    ]
            names.append(path)
            found.append(corners)
        return cls._of(names, found, size, level, mpp)

    @classmethod
    def _of(
        cls,
        paths: Sequence[Path],
        locations: Sequence[NDArray[np.int64]],
        size: int | tuple[int, int],
        level: int,
        mpp: float | None,
    ) -> Patches:
        slides = np.repeat(np.arange(len(paths)), [len(each) for each in locations])
        joined = np.concatenate([np.empty((0, 2), np.int64), *locations])
        names = tuple(os.fspath(path) for path in paths)
        return cls(names, slides, joined, _pair(size), level, mpp)

    def __len__(self) -> int:
        return len(self.slides)

    def __getitem__(self, chosen: Any) -> Patches:
        """Return some of them, by a slice, a mask or indices."""
        return replace(self, slides=self.slides[chosen], locations=self.locations[chosen])

    def __repr__(self) -> str:
        width, height = self.size
        at = f"level {self.level}" if self.mpp is None else f"{self.mpp:g} µm a pixel"
        return f"<Patches {len(self)} of {width} x {height} at {at} from {len(self.paths)} slides>"


def _pair(size: Any) -> tuple[int, int]:
    width, height = (size, size) if hasattr(size, "__index__") else size
    return int(width), int(height)


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
