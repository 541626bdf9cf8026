"""Where in host memory the parts of tiles go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.model.geometry import computed_once
from napari_wsigpu.native.tables import PART
from napari_wsigpu.reading.plan import tile_rect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.reading.plan import Pastes, ReadPlan

    # Where the pixels of each region go.
    Targets = Sequence[NDArray[Any]] | NDArray[Any]

NO_PARTS = np.zeros(0, PART)


class Paste:
    """Copies parts of tiles to their positions in regions.

    Parameters
    ----------
    plan : ReadPlan
        Which parts go where.
    regions : sequence of ndarray, shape (height, width, channels), or (height, width)
        The pixels of each region.
    channel : int or None
        The only channel to copy.
    blank : int or float
        Value shown in place of a tile that can't be decoded.
    """

    def __init__(self, plan: ReadPlan, regions: Targets, channel: int | None, blank: Any) -> None:
        self._plan = plan
        self._regions = regions
        self._channel = channel
        self._blank = blank
        self._step = plan.regions.step

    @computed_once
    def _slices(self) -> list[tuple[int, ...]]:
        return slices_of(self._plan.pastes, self._step)

    @computed_once
    def _starts(self) -> list[int]:
        starts: list[int] = self._plan.starts.tolist()
        return starts

    def take(self, tile: int, pixels: NDArray[Any]) -> None:
        """Copy the parts of a tile, by its index in the plan."""
        if self._channel is not None:
            pixels = pixels[..., self._channel]
        regions = self._regions
        down, across = self._step
        for index in range(self._starts[tile], self._starts[tile + 1]):
            region, y, end_y, x, end_x, top, bottom, left, right = self._slices[index]
            regions[region][y:end_y, x:end_x] = pixels[top:bottom:down, left:right:across]

    def fill(self, tile: int) -> None:
        """Show the blank value in place of a tile."""
        for index in range(self._starts[tile], self._starts[tile + 1]):
            region, y, end_y, x, end_x, *_ = self._slices[index]
            self._regions[region][y:end_y, x:end_x] = self._blank

    def parts(self) -> tuple[NDArray[Any], int]:
        """Describe all pastes to the native core.

        Returns
        -------
        ndarray of PART
            One entry a paste of the plan.
        int
            Bytes from one pixel of a region to the next; 0 if the core can't paste there, as
            pixels are left out or don't lie in rows.
        """
        if not self._pixel_bytes:
            return NO_PARTS, 0
        regions, pastes = self._regions, self._plan.pastes
        region: Any = pastes.region
        if isinstance(regions, np.ndarray):
            firsts: Any = regions.ctypes.data + regions.strides[0] * region
            pitches: Any = regions.strides[1]
        else:
            addresses = np.array([each.ctypes.data for each in regions], np.int64)
            firsts = addresses[region]
            pitches = np.array([each.strides[0] for each in regions], np.int64)[region]
        parts = np.empty(len(pastes), PART)
        parts["target"] = firsts + pastes.y * pitches + pastes.x * self._pixel_bytes
        parts["pitch"] = pitches
        parts["left"], parts["top"] = pastes.left, pastes.top
        parts["width"], parts["height"] = pastes.width, pastes.height
        return parts, self._pixel_bytes

    @property
    def _pixel_bytes(self) -> int:
        """Bytes from one pixel to the next, 0 if regions differ or have no such rows."""
        whole = self._channel is None and self._plan.channels is None
        if not whole or self._step != (1, 1):
            return 0
        alike = isinstance(self._regions, np.ndarray)
        found = {_pixel_bytes(each) for each in (self._regions[:1] if alike else self._regions)}
        return found.pop() if len(found) == 1 else 0


class WholeTiles:
    """Collects whole tiles, cut to their image, for those who paste them.

    Parameters
    ----------
    plan : ReadPlan
        The tiles.
    image : LevelLayout
        Their image.

    Attributes
    ----------
    found : dict of (int, int) to ndarray
        Each tile by row and column.
    """

    def __init__(self, plan: ReadPlan, image: LevelLayout) -> None:
        self._image = image
        self._places = [(row, column) for row, column in plan.tiles.tolist()]
        self.found: dict[tuple[int, int], NDArray[Any]] = {}

    def take(self, tile: int, pixels: NDArray[Any]) -> None:
        """Hold a tile, by its index in the plan."""
        place = self._places[tile]
        rect = tile_rect(self._image, *place)
        self.found[place] = pixels[: rect.height, : rect.width]

    def fill(self, tile: int) -> None:
        """Leave out a tile that can't be decoded."""

    def parts(self) -> tuple[NDArray[Any], int]:
        """Say that nothing is pasted."""
        return NO_PARTS, 0


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


def _pixel_bytes(region: NDArray[Any]) -> int:
    """Bytes from one pixel to the next of a region whose rows and samples follow each other."""
    if region.ndim != 3 or min(region.strides) <= 0 or region.strides[2] != region.itemsize:
        return 0
    pixel = region.strides[1]
    # Rows of RGBA may hold RGB pixels, whose alpha the core sets.
    return pixel if pixel in (region.shape[2] * region.itemsize, 4) else 0
