"""Where in host memory the parts of tiles go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.codecs.cpu import Parts
from napari_wsigpu.model.geometry import computed_once

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.reading.plan import Pastes, ReadPlan

    Integers = NDArray[np.int64]
    # Where the pixels of each region go.
    Targets = Sequence[NDArray[Any]] | NDArray[Any]


class Paste:
    """Copies parts of tiles to their places in regions.

    Parameters
    ----------
    plan : ReadPlan
        Which parts go where.
    regions : sequence of ndarray, shape (height, width, channels), or (height, width)
        The pixels of each.
    channel : int or None
        The only one that is wanted.
    blank : int or float
        What is shown where a tile can't be decoded.
    """

    def __init__(self, plan: ReadPlan, regions: Targets, channel: int | None, blank: Any) -> None:
        self._plan = plan
        self._regions = regions
        self._slices = slices_of(plan.pastes, plan.regions.step)
        self._starts = plan.starts.tolist()
        self._channel = channel
        self._blank = blank
        self._step = plan.regions.step

    def take(self, tile: int, pixels: NDArray[Any]) -> None:
        """Copy what is wanted of a tile, by its index in the plan."""
        if self._channel is not None:
            pixels = pixels[..., self._channel]
        regions = self._regions
        down, across = self._step
        for index in range(self._starts[tile], self._starts[tile + 1]):
            region, y, end_y, x, end_x, top, bottom, left, right = self._slices[index]
            regions[region][y:end_y, x:end_x] = pixels[top:bottom:down, left:right:across]

    def fill(self, tile: int) -> None:
        """Show one value in place of a tile."""
        for index in range(self._starts[tile], self._starts[tile + 1]):
            region, y, end_y, x, end_x, *_ = self._slices[index]
            self._regions[region][y:end_y, x:end_x] = self._blank

    def parts(self, tiles: Integers) -> Parts | None:
        """Return what is wanted of tiles; None if pixels can't be put there as they are decoded."""
        if self._rows is None:
            return None
        firsts, strides, pixel = self._rows
        starts, pastes = self._plan.starts, self._plan.pastes
        begin = starts[tiles]
        region = pastes.region[begin]
        rows = strides[region]
        return Parts(
            starts[tiles + 1] - begin == 1,
            firsts[region] + pastes.y[begin] * rows + pastes.x[begin] * pixel,
            rows,
            pastes.top[begin],
            pastes.left[begin],
            pastes.height[begin],
            pastes.width[begin],
        )

    @computed_once
    def _rows(self) -> tuple[Integers, Integers, int] | None:
        """Address, bytes a row and bytes a pixel of each region; None if it has no such rows."""
        regions = self._regions
        alike = isinstance(regions, np.ndarray)
        if self._channel is not None or self._step != (1, 1) or not len(regions):
            return None
        for region in regions[:1] if alike else regions:
            in_rows = region.strides[0] > 0 and region.strides[1:] == (region.shape[2], 1)
            if region.dtype != np.uint8 or not in_rows:
                return None
        if isinstance(regions, np.ndarray):
            firsts = regions.ctypes.data + regions.strides[0] * np.arange(len(regions))
            strides = np.full(len(regions), regions.strides[1])
        else:
            firsts = np.array([region.ctypes.data for region in regions], np.int64)
            strides = np.array([region.strides[0] for region in regions], np.int64)
        return firsts, strides, regions[0].shape[2]


def slices_of(pastes: Pastes, step: tuple[int, int]) -> list[tuple[int, ...]]:
    """Return (region, y, end, x, end, top, bottom, left, right) of each paste."""
    columns = (
        pastes.region,
        pastes.y,
        pastes.y + pastes.height,
        pastes.x,
        pastes.x + pastes.width,
        pastes.top,
        pastes.top + (pastes.height - 1) * step[0] + 1,
        pastes.left,
        pastes.left + (pastes.width - 1) * step[1] + 1,
    )
    return list(zip(*(column.tolist() for column in columns), strict=True))
