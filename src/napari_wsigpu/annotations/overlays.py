"""Patch values, such as attention scores, as a small image over a slide.

CLAM and TRIDENT store the upper left corners of patches as ``coords``, in pixels of level 0. The
attributes of ``coords`` give the patch size, except in CLAM's files of attention scores, which have
no attributes.
"""

from __future__ import annotations

import math
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from napari_wsigpu.model.errors import (
    AnnotationError,
    MissingPackageError,
    file_error,
)
from napari_wsigpu.model.limits import limits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import h5py
    from numpy.typing import ArrayLike, NDArray

    # Side of a square, or (width, height).
    Size = float | tuple[float, float]

COORDS, SCORES = "coords", "attention_scores"
SIZES = "patch_size_level0", "patch_size", "patch_level", "downsample"
MOST_CELLS = 1 << 24
MAX_COORDINATE = 1e9
MOST_SIDE = 1e6  # pixels of level 0


class SlideSize(Protocol):
    """The parts of a slide that an overlay needs: its size and the downsample of each level."""

    @property
    def dimensions(self) -> tuple[int, int]:
        """(width, height) of level 0."""

    @property
    def level_downsamples(self) -> Sequence[float]:
        """Pixels of level 0 per pixel of each level."""


class Overlay(NamedTuple):
    """A small image over a slide.

    Attributes
    ----------
    image : ndarray of float32, shape (rows, columns)
        Values; NaN where there is no patch.
    scale : tuple of float
        (x, y) size of a pixel of `image`, in pixels of level 0.
    translate : tuple of float
        (x, y) of the upper left corner of `image`, in pixels of level 0.
    """

    image: NDArray[np.float32]
    scale: tuple[float, float]
    translate: tuple[float, float]


class Patches(NamedTuple):
    """Patches of a slide: the arguments of `overlay`.

    Attributes
    ----------
    coords : ndarray of float, shape (patches, 2)
        (x, y) of the upper left corners in pixels of level 0.
    values : ndarray of float, shape (patches,)
        The score of each patch; 1 if the file has no scores.
    size : tuple of float
        (width, height) of a patch in pixels of level 0.
    """

    coords: NDArray[np.float64]
    values: NDArray[np.float64]
    size: tuple[float, float]


def overlay(slide: SlideSize, coords: ArrayLike, values: ArrayLike, size: Size) -> Overlay:
    """Draw patch values as an image.

    If all patches lie on one grid, an image pixel is a cell of that grid. Otherwise, pixels are
    as small as the positions require, up to 16 million of them. Where patches overlap, their values
    are averaged.

    Parameters
    ----------
    slide : Slide
        The slide that the patches belong to.
    coords : array_like, shape (patches, 2)
        (x, y) of the upper left corners in pixels of level 0.
    values : array_like, shape (patches,)
        One number per patch. Patches whose value is NaN are left out.
    size : float or tuple of float
        Side, or (width, height), of a patch in pixels of level 0.

    Raises
    ------
    AnnotationError
        If the arguments are inconsistent, or no patch is on the slide.

    Examples
    --------
    >>> image, scale, translate = overlay(slide, coords, scores, 512)  # doctest: +SKIP
    """
    corners, numbers, size = _checked(coords, values, size)
    extent, sides = np.array(slide.dimensions), np.array(size)
    seen = np.isfinite(numbers) & np.all((corners < extent) & (corners + sides > 0), axis=1)
    if not seen.any():
        width, height = slide.dimensions
        raise AnnotationError(
            f"None of the {len(corners):,} patches overlap the slide ({width:,} x {height:,} "
            "pixels); check that they belong to this slide and that their coordinates are in "
            "pixels of level 0."
        )
    corners, numbers = corners[seen], numbers[seen]
    first = corners.min(axis=0)
    cell = _cell(corners - first, sides)
    start = np.round((corners - first) / cell).astype(np.int64)
    stop = start + np.maximum(np.round(sides / cell).astype(np.int64), 1)
    columns, rows = stop.max(axis=0).tolist()
    # Mark only the corners of patches and take cumulative sums: the time then doesn't depend on the
    # patch size.
    sums, counts = np.zeros((rows + 1, columns + 1)), np.zeros((rows + 1, columns + 1), np.int32)
    for y, x, sign in ((start, start, 1), (start, stop, -1), (stop, start, -1), (stop, stop, 1)):
        at = y[:, 1], x[:, 0]
        np.add.at(sums, at, sign * numbers)
        np.add.at(counts, at, sign)
    for each in (sums, counts):
        for axis in (0, 1):
            np.cumsum(each, axis=axis, out=each)
    image = np.full(sums.shape, np.nan, np.float32)
    np.divide(sums, counts, out=image, where=counts > 0, casting="same_kind")
    (x, y), (width, height) = first.tolist(), cell.tolist()
    return Overlay(image[:-1, :-1], (width, height), (x, y))


def read_patches(path: str | os.PathLike[str], slide: SlideSize) -> Patches:
    """Read the patches of a slide from an HDF5 file written by CLAM or TRIDENT.

    Parameters
    ----------
    path : str or PathLike
        A file with the dataset ``coords``, and ``attention_scores`` if it holds scores. If no
        attribute states the patch size, the most frequent distance between neighbors is used.
    slide : Slide
        The slide that the patches belong to.

    Raises
    ------
    AnnotationError
        If the file is damaged, or lacks coordinates or the patch size.
    MissingPackageError
        If h5py is not installed.
    SlideError
        If the file cannot be read.
    """
    name = os.fspath(path)
    if not name:
        raise file_error(name, FileNotFoundError())
    try:
        import h5py
    except ImportError:
        raise MissingPackageError(
            f"Reading '{name}' requires h5py, which is not installed; "
            'run pip install "napari-wsigpu[heatmaps]".'
        ) from None
    try:
        if not stat.S_ISREG(Path(name).stat().st_mode):  # opening a pipe would block
            raise AnnotationError(f"'{name}' is not a regular file; choose an HDF5 file.")
        Path(name).open("rb").close()
    except OSError as error:
        raise file_error(name, error) from error
    try:
        with h5py.File(name, "r") as file:
            return _patches(file, slide)
    except AnnotationError as error:
        raise AnnotationError(f"'{name}' can't be shown: {error}") from error
    # h5py raises errors of many classes for damaged files.
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError) as error:
        raise AnnotationError(
            f"'{name}' can't be read as HDF5 ({error}); write the file again."
        ) from error


def has_scores(path: str | os.PathLike[str]) -> bool:
    """Whether a file that `read_patches` has read holds scores."""
    import h5py

    with h5py.File(os.fspath(path), "r") as file:
        return SCORES in file


def _patches(file: h5py.File, slide: SlideSize) -> Patches:
    coords, scores = _dataset(file, COORDS), _dataset(file, SCORES)
    if coords is None:
        raise AnnotationError(
            "it has no dataset 'coords'; choose a file of patches or attention scores written by "
            "CLAM or TRIDENT."
        )
    for each in (coords, scores):
        if each is not None and each.size > 2 * limits.objects:
            raise AnnotationError(f"it holds too many patches: {limits.advice('objects')}.")
    corners = _corners(coords)
    size = _stated_size(coords.attrs, slide) or _spacing(corners)
    if size is None:
        raise AnnotationError(
            "it doesn't state the patch size, which can't be derived from the positions either; "
            "pass the size to `overlay`."
        )
    return _checked(corners, np.ones(len(corners)) if scores is None else scores, size)


def _dataset(file: h5py.File, key: str) -> h5py.Dataset | None:
    """Return a numeric dataset stored in the file itself; None if the name does not exist.

    Links, external storage and virtual datasets are refused: reading a file must not open others.
    """
    import h5py

    link = file.get(key, getlink=True)
    if link is None:
        return None
    found = file[key] if isinstance(link, h5py.HardLink) else None
    if not isinstance(found, h5py.Dataset) or found.external or found.is_virtual:
        raise AnnotationError(
            f"'{key}' is not a dataset stored in this file; write its data into the file."
        )
    if found.dtype.kind not in "iuf":
        raise AnnotationError(f"its dataset '{key}' is not numeric; choose another file.")
    return found


def _stated_size(attributes: Mapping[str, ArrayLike], slide: SlideSize) -> Size | None:
    """Return the size of a patch in pixels of level 0, if attributes state it."""
    stated = {key: np.ravel(attributes[key]).astype(float) for key in SIZES if key in attributes}
    factor = np.ones(1)
    size = stated.get("patch_size_level0")
    if size is None:
        size = stated.get("patch_size")
        level, downsamples = int(stated.get("patch_level", np.zeros(1))[0]), slide.level_downsamples
        known = downsamples[level] if 0 <= level < len(downsamples) else math.nan
        factor = stated.get("downsample", np.array([known]))
    if size is None:
        return None
    width, height = (np.resize(size, 2) * np.resize(factor, 2)).tolist()
    return width, height


def _spacing(corners: NDArray[np.float64]) -> Size | None:
    """Return the most frequent distance between neighbors in a row or column, or None."""
    found = []
    for along, across in ((0, 1), (1, 0)):
        step = np.diff(corners[np.lexsort((corners[:, along], corners[:, across]))], axis=0)
        found.append(step[(step[:, across] == 0) & (step[:, along] > 0), along])
    steps, counts = np.unique(np.concatenate(found), return_counts=True)
    return float(steps[counts.argmax()]) if len(steps) else None


def _checked(coords: ArrayLike, values: ArrayLike, size: Size) -> Patches:
    corners, numbers = _corners(coords), np.asarray(values, np.float64)
    if numbers.size != len(corners):
        raise AnnotationError(
            f"There are {numbers.size:,} values for {len(corners):,} patches; pass one value per "
            "patch."
        )
    width, height = np.resize(size, 2).tolist()
    if not (1 <= width <= MOST_SIDE and 1 <= height <= MOST_SIDE):
        raise AnnotationError(
            f"A patch size of {width:g} x {height:g} pixels is not valid; pass the size in pixels "
            "of level 0."
        )
    return Patches(corners, np.ravel(numbers), (width, height))


def _corners(coords: ArrayLike) -> NDArray[np.float64]:
    corners = np.asarray(coords, np.float64)
    if corners.ndim == 3 and len(corners) == 1:  # a batch of one slide
        corners = corners[0]
    if corners.ndim != 2 or corners.shape[1] != 2 or not len(corners):
        raise AnnotationError(
            f"The patch coordinates have shape {corners.shape}; pass an array of shape "
            "(patches, 2)."
        )
    if not np.all(np.abs(corners) < MAX_COORDINATE):
        raise AnnotationError(
            "A patch coordinate is not finite or is too large for a slide; correct the coordinates."
        )
    return corners


def _cell(offsets: NDArray[np.float64], sides: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the (width, height) of the largest cell that divides all positions and sides.

    If the image would have more than `MOST_CELLS` cells, the cell is enlarged; it still divides the
    sides, but positions are rounded to it.
    """
    whole = np.concatenate([offsets, [sides]]).round().astype(np.int64)
    cell = np.maximum(np.gcd.reduce(whole, axis=0), 1).astype(np.float64)
    count = float(np.prod((offsets.max(axis=0) + sides) / cell))
    factor = max(1.0, math.sqrt(count / MOST_CELLS) * (1 + 1e-3))
    return np.asarray(sides / np.maximum(np.floor(sides / (cell * factor)), 1))
