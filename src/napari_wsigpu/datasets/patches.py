"""`Patches`: an immutable list of regions in any number of slides."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Literal

import numpy as np

from napari_wsigpu.annotations.geojson import read_geojson
from napari_wsigpu.annotations.masks import rings_mask
from napari_wsigpu.model.errors import RegionError
from napari_wsigpu.model.geometry import Rect
from napari_wsigpu.slide.slide import check_plane, open_slide

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.model.arrays import Array
    from napari_wsigpu.model.geometry import Integers, Mask, Pair
    from napari_wsigpu.slide.slide import Slide

    Path = str | os.PathLike[str]
    # A GeoJSON file, a mask of the whole slide, or a function that returns such a mask.
    Area = Path | Array | Callable[[Slide], Array]
    PlaneChoice = int | Sequence[int] | Literal["all"] | None

# Outlines are rasterized to a mask with this number of pixels along a patch's shorter side; the
# mask's longer side is at most LARGEST_MASK.
MASK_PIXELS, LARGEST_MASK = 16, 8192
# Index along z or t that stands for the plane that a slide shows by default.
DEFAULT_PLANE = -1
# Tolerance for rounding errors in sums of fractions.
EDGE = 1e-6


@dataclass(frozen=True, eq=False)
class Patches:
    """Regions of one size in any number of slides. Immutable and picklable.

    Use `at` or `grid` to create it. Index it like an array to select some of the patches.

    Attributes
    ----------
    paths : tuple of str
        Paths of the slides.
    slides : ndarray of int64, shape (patches,)
        Index in `paths` of the slide of each patch.
    locations : ndarray of int64, shape (patches, 2)
        (x, y) of each upper left corner in pixels of level 0.
    planes : ndarray of int64, shape (patches, 2)
        Index (z, t) of the plane of each patch; -1 for the plane that the slide shows.
    size : tuple of int
        (width, height) in pixels of `level`, or in pixels at `mpp`.
    level : int
        Index of a level.
    mpp : float or None
        Micrometers per pixel, instead of a level.
    """

    paths: tuple[str, ...]
    slides: Integers
    locations: Integers
    planes: Integers
    size: Pair
    level: int = 0
    mpp: float | None = None

    @classmethod
    def at(
        cls,
        locations: Mapping[Path, Iterable[Pair]],
        size: int | Pair,
        *,
        level: int = 0,
        mpp: float | None = None,
        z: int | Sequence[int] | None = None,
        t: int | Sequence[int] | None = None,
    ) -> Patches:
        """Create patches at given locations of each slide.

        Parameters
        ----------
        locations : Mapping of path to iterable of tuple of int
            (x, y) of each upper left corner in pixels of level 0.
        size : int or tuple of int
            Side, or (width, height), in pixels of `level`, or in pixels at `mpp`.
        level, mpp
            As in `Slide.read_region`.
        z, t : int or sequence of int, optional
            Index of the plane, from 0. If there are several, each location is used in each plane.
            By default the plane that the slide shows. The first read checks that planes exist.

        Raises
        ------
        RegionError
            If locations are not pairs of integers, or the size or planes are not valid.
        """
        found = []
        planes = list(product(_numbers("z", z), _numbers("t", t)))
        try:
            given = {path: np.asarray(list(pairs)) for path, pairs in locations.items()}
        except (AttributeError, TypeError, ValueError):
            raise RegionError(
                "The locations are not a mapping of paths to pairs (x, y) of integers; pass "
                "{path: [(x, y), ...]}."
            ) from None
        for path, corners in given.items():
            if corners.size and (corners.dtype.kind not in "iu" or corners.shape[1:] != (2,)):
                path = os.fspath(path)
                raise RegionError(f"The locations for '{path}' are not pairs (x, y) of integers.")
            found.append(corners.reshape(-1, 2).astype(np.int64))
        return cls._of(list(locations), found, [planes] * len(found), size, level, mpp)

    @classmethod
    def grid(
        cls,
        paths: Path | Iterable[Path],
        size: int | Pair,
        *,
        level: int = 0,
        mpp: float | None = None,
        overlap: int = 0,
        inside: Mapping[Path, Area] | Callable[[Slide], Array] | None = None,
        share: float = 0.5,
        z: PlaneChoice = None,
        t: PlaneChoice = None,
    ) -> Patches:
        """Divide each slide into a grid, like `Slide.tiles`, and keep the patches in an area.

        Parameters
        ----------
        paths : path, or iterable of path
            Paths of the slides.
        size, level, mpp, overlap
            As in `Slide.tiles`.
        inside : Mapping of path to area, or callable, optional
            Area of each slide: a GeoJSON file, whose polygons and ellipses are used; a mask of
            shape (height, width) and any size that covers the whole slide; or a function that takes
            the slide and returns such a mask. Slides missing from the mapping are used completely.
        share : float
            Fraction of a patch that must be in the area, from 0 (any part) to 1 (all of it).
        z, t : int, sequence of int or "all", optional
            Index of the plane, from 0. If there are several, each gets the whole grid. By default
            the plane that the slide shows.

        Raises
        ------
        RegionError, LevelError, PlaneError
            If the grid, an area or a plane is not valid.
        SlideError
            If a slide or GeoJSON file cannot be read.
        """
        names = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
        found, planes = [], []
        areas = {} if inside is None or callable(inside) else _by_name(inside, names)
        for path in names:
            with open_slide(path) as slide:
                planes.append(_planes_of(slide, z, t))
                corners = slide.tile_locations(size, level=level, mpp=mpp, overlap=overlap)
                area = inside if callable(inside) else areas.get(os.fspath(path))
                if area is not None:
                    spans = _spans(slide, _pair(size), level, mpp)
                    mask = _mask(area, slide, min(spans))
                    shares = _shares(mask, slide, corners, spans)
                    corners = corners[shares >= max(share, EDGE) - EDGE / 2]
            found.append(corners)
        return cls._of(names, found, planes, size, level, mpp)

    @classmethod
    def _of(
        cls,
        paths: Sequence[Path],
        locations: Sequence[Integers],
        planes: Sequence[Sequence[Pair]],
        size: int | Pair,
        level: int,
        mpp: float | None,
    ) -> Patches:
        """Repeat the locations of each slide in each of its planes."""
        pairs = list(zip(locations, planes, strict=True))
        none = np.empty((0, 2), np.int64)
        return cls(
            tuple(os.fspath(path) for path in paths),
            np.repeat(np.arange(len(paths)), [len(found) * len(each) for found, each in pairs]),
            np.concatenate([none, *(np.tile(found, (len(each), 1)) for found, each in pairs)]),
            np.concatenate([none, *(np.repeat(each, len(found), 0) for found, each in pairs)]),
            _pair(size),
            level,
            mpp,
        )

    def plane_of(self, index: int) -> tuple[int | None, int | None]:
        """Return the arguments z and t that select the plane of a patch."""
        z, t = self.planes[index].tolist()
        return None if z == DEFAULT_PLANE else z, None if t == DEFAULT_PLANE else t

    def sort_by_slide(self, indices: Integers) -> Integers:
        """Sort indices by slide, then by plane."""
        z, t = self.planes[indices].T
        return indices[np.lexsort((t, z, self.slides[indices]))]

    def __len__(self) -> int:
        return len(self.slides)

    def __getitem__(self, chosen: slice | Sequence[int] | Array) -> Patches:
        """Return some of the patches, selected by a slice, a mask or indices.

        Raises
        ------
        RegionError
            If this is something else, such as a single index, or no patch has an index.
        """
        names = "slides", "locations", "planes"
        with suppress(IndexError):
            columns = {name: getattr(self, name)[chosen] for name in names}
            if columns["slides"].ndim == 1:
                return replace(self, **columns)
        raise RegionError(
            f"{chosen!r} selects none of the {len(self)} patches; use a slice, such as "
            "patches[3:4], a mask or indices."
        )

    def __repr__(self) -> str:
        width, height = self.size
        at = f"level {self.level}" if self.mpp is None else f"{self.mpp:g} µm per pixel"
        return f"<Patches {len(self)} of {width} x {height} at {at} from {len(self.paths)} slides>"


def _by_name(areas: Mapping[Path, Area], paths: Sequence[Path]) -> dict[str, Area]:
    """Return the areas by path, as strings, and check that each path is one of `paths`."""
    found = {os.fspath(path): area for path, area in areas.items()}
    unknown = sorted(found.keys() - {os.fspath(path) for path in paths})
    if unknown:
        raise RegionError(
            f"An area is given for '{unknown[0]}', which is not one of the slides; use the same "
            "paths for both."
        )
    return found


def _numbers(axis: str, choice: int | Sequence[int] | None) -> list[int]:
    """Return the chosen planes along an axis, without duplicates."""
    if choice is None:
        return [DEFAULT_PLANE]
    found = list(choice) if isinstance(choice, Iterable) else [choice]
    if not found or any(not isinstance(each, int | np.integer) or each < 0 for each in found):
        raise RegionError(f"{axis} is {choice!r}; it must consist of whole numbers >= 0.")
    return list(dict.fromkeys(int(each) for each in found))


def _planes_of(slide: Slide, z: PlaneChoice, t: PlaneChoice) -> list[Pair]:
    """Return (z, t) of the chosen planes of a slide."""
    along = []
    for axis, choice, size in (("z", z, slide.planes.size_z), ("t", t, slide.planes.size_t)):
        numbers = list(range(size)) if choice == "all" else _numbers(axis, choice)
        for number in numbers:
            if number != DEFAULT_PLANE:
                check_plane(slide.path, axis, number, size)
        along.append(numbers)
    return list(product(along[0], along[1]))


def _pair(size: int | Sequence[int]) -> Pair:
    sides = list(size) if isinstance(size, Iterable) else [size, size]
    if len(sides) != 2 or not all(
        isinstance(side, int | np.integer) and side > 0 for side in sides
    ):
        raise RegionError(f"The patch size is {size!r}; pass one side, or (width, height).")
    return int(sides[0]), int(sides[1])


def _spans(slide: Slide, size: Pair, level: int, mpp: float | None) -> tuple[float, float]:
    """Return the width and height of a patch in pixels of level 0."""
    if mpp is None:
        return size[0] * slide.level_downsamples[level], size[1] * slide.level_downsamples[level]
    assert slide.mpp is not None, "checked when the grid was made"
    return size[0] * mpp / slide.mpp[0], size[1] * mpp / slide.mpp[1]


def _mask(area: Area, slide: Slide, span: float) -> Mask:
    """Return an area as a mask of any size; it covers the whole slide."""
    if callable(area):
        area = area(slide)
    if isinstance(area, np.ndarray):
        if area.ndim != 2 or not area.size:
            shape = f"The mask of '{slide.path}' has the shape {area.shape}"
            raise RegionError(f"{shape}; it needs two dimensions.")
        return area > 0
    width, height = slide.dimensions
    downsample = max(1.0, span / MASK_PIXELS, max(width, height) / LARGEST_MASK)
    rect = Rect(0, 0, max(1, round(height / downsample)), max(1, round(width / downsample)))
    mask = np.zeros((rect.height, rect.width), np.bool_)
    for item in read_geojson(area):
        if item.kind in ("polygon", "ellipse"):
            mask |= rings_mask(item.rings, rect, downsample)
    return mask


def _shares(
    mask: Mask, slide: Slide, corners: Integers, spans: tuple[float, float]
) -> NDArray[np.float64]:
    """Return the fraction of each patch, as far as it is on the slide, that is in an area."""
    # Summed-area table: the sum over a rectangle is a combination of the values at its corners.
    sums = np.zeros((mask.shape[0] + 1, mask.shape[1] + 1))
    np.cumsum(np.cumsum(mask, axis=0), axis=1, out=sums[1:, 1:])
    edges: list[NDArray[np.float64]] = []
    for axis, (count, extent) in enumerate(zip(mask.shape[::-1], slide.dimensions, strict=True)):
        start = corners[:, axis].astype(np.float64)
        ends = start, start + spans[axis]
        edges += [np.clip(end * (count / extent), 0, count) for end in ends]
    left, right, top, bottom = edges
    held = _above(sums, bottom, right) - _above(sums, top, right)
    held -= _above(sums, bottom, left) - _above(sums, top, left)
    shares: NDArray[np.float64] = held / np.maximum((bottom - top) * (right - left), 1e-9)
    return shares


def _above(
    sums: NDArray[np.float64], y: NDArray[np.float64], x: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the area of a mask above and left of points, interpolated within pixels."""
    row = np.minimum(y.astype(np.int64), sums.shape[0] - 2)
    column = np.minimum(x.astype(np.int64), sums.shape[1] - 2)
    down, across = y - row, x - column
    upper = sums[row, column] * (1 - across) + sums[row, column + 1] * across
    lower = sums[row + 1, column] * (1 - across) + sums[row + 1, column + 1] * across
    area: NDArray[np.float64] = upper * (1 - down) + lower * down
    return area
