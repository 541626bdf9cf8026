"""Find the pixels of regions that the file holds, from plans alone, without reading tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.reading.averages import factors
from napari_wsigpu.reading.plan import Regions
from napari_wsigpu.reading.planning import plan_regions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from napari_wsigpu.model.arrays import Mask
    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.reading.plan import Pastes


def find_held(
    number: int, images: Mapping[int, LevelLayout], finer: Mapping[int, int], regions: Regions
) -> Mask:
    """Find which pixels of regions come from the file; the others show the background.

    Parameters
    ----------
    number : int
        Number of the image.
    images : Mapping of int to LevelLayout
        All images of the slide.
    finer : Mapping of int to int
        Number of the finer level that each computed level is averaged from.
    regions : Regions
        Regions of one size.

    Returns
    -------
    ndarray of bool, shape (regions, height, width)
        True where the file holds the pixel, or any of the finer pixels that it averages.
    """
    held = np.zeros((len(regions), *regions.shapes[0]), np.bool_)
    for plan in plan_regions(number, images, regions):
        # A missing tile of an image in a mosaic hides the images below it.
        for window in _windows(held, plan.blanks):
            window[...] = False
        computed = plan.computed[plan.pastes.tile]
        for window in _windows(held, plan.pastes[~computed]):
            window[...] = True
        pastes = plan.pastes[computed]
        if not len(pastes):
            continue
        image, below = images[plan.image], images[finer[plan.image]]
        down, across = factors(image, below)
        grid, places = image.grid, plan.tiles[pastes.tile]
        tops = (places[:, 0] * grid.tile_height + pastes.top) * down
        lefts = (places[:, 1] * grid.tile_width + pastes.left) * across
        for index, window in enumerate(_windows(held, pastes)):
            height, width = window.shape
            under = Regions.alike(
                tops[index : index + 1], lefts[index : index + 1], height * down, width * across
            )
            found = find_held(finer[plan.image], images, finer, under)
            blocks = found.reshape(height, down, width, across)
            window[...] = blocks.any(axis=(1, 3))
    return held


def _windows(held: Mask, pastes: Pastes) -> list[Mask]:
    """Return the view of the mask that each part covers."""
    columns = (pastes.region, pastes.y, pastes.x, pastes.height, pastes.width)
    return [
        held[region, y : y + height, x : x + width]
        for region, y, x, height, width in zip(*(each.tolist() for each in columns), strict=True)
    ]
