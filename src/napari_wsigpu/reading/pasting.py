"""Copy parts of tiles to their positions in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.model.geometry import computed_once
from napari_wsigpu.native.tables import PART

if TYPE_CHECKING:
    from collections.abc import Sequence

    from napari_wsigpu.model.arrays import Array
    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.reading.plan import Pastes, ReadPlan

    # The pixels of each region.
    Targets = Sequence[Array] | Array

NO_PARTS = np.zeros(0, PART)


class Paste:
    """Canvas that copies parts of tiles to their positions in regions.

    Parameters
    ----------
    plan : ReadPlan
        The parts and their positions.
    regions : sequence of ndarray, shape (height, width, channels), or (height, width)
        Receives the pixels of each region.
    channel : int or None
        The only channel to copy; None for all.
    blank : number or ndarray
        Value shown in place of a tile that fails to decode.
    """

    def __init__(
        self, plan: ReadPlan, regions: Targets, channel: int | None, blank: float | Array
    ) -> None:
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

    def paste(self, tile: int, pixels: Array) -> None:
        """Copy the parts of the tile at an index in the plan."""
        if self._channel is not None:
            pixels = pixels[..., self._channel]
        regions = self._regions
        down, across = self._step
        for index in range(self._starts[tile], self._starts[tile + 1]):
            region, y, end_y, x, end_x, top, bottom, left, right = self._slices[index]
            regions[region][y:end_y, x:end_x] = pixels[top:bottom:down, left:right:across]

    def blank(self, tile: int) -> None:
        """Show the blank value in place of the tile at an index in the plan."""
        for index in range(self._starts[tile], self._starts[tile + 1]):
            region, y, end_y, x, end_x, *_ = self._slices[index]
            self._regions[region][y:end_y, x:end_x] = self._blank

    def parts(self) -> tuple[Array, int]:
        """Return the parts of the plan as records of the native core.

        Returns
        -------
        ndarray of PART
            One record per part.
        int
            Bytes from one pixel of a region to the next; 0 if the core can't paste into the
            regions.
        """
        if not self._pixel_bytes:
            return NO_PARTS, 0
        regions, pastes = self._regions, self._plan.pastes
        region = pastes.region
        pitches: Array | int
        if isinstance(regions, np.ndarray):
            firsts = regions.ctypes.data + regions.strides[0] * region
            pitches = regions.strides[1]
        else:
            # Each array has its own address and pitch.
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
        """Bytes from one pixel to the next; 0 if the core can't paste into the regions."""
        # The core pastes all channels of all pixels, into regions with one layout of pixels.
        whole = self._channel is None and self._plan.channels is None
        if not whole or self._step != (1, 1):
            return 0
        alike = isinstance(self._regions, np.ndarray)
        found = {_pixel_bytes(each) for each in (self._regions[:1] if alike else self._regions)}
        return found.pop() if len(found) == 1 else 0


class WholeTiles:
    """Canvas that collects whole tiles, cropped to the image, instead of pasting.

    Parameters
    ----------
    plan : ReadPlan
        The tiles.
    image : LevelLayout
        The image of the plan.

    Attributes
    ----------
    found : dict of (int, int) to ndarray
        The tiles by row and column.
    """

    def __init__(self, plan: ReadPlan, image: LevelLayout) -> None:
        self._image = image
        self._places = [(row, column) for row, column in plan.tiles.tolist()]
        self.found: dict[tuple[int, int], Array] = {}

    def paste(self, tile: int, pixels: Array) -> None:
        """Collect the tile at an index in the plan."""
        place = self._places[tile]
        rect = self._image.tile_rect(*place)
        self.found[place] = pixels[: rect.height, : rect.width]

    def blank(self, tile: int) -> None:
        """Leave out the tile at an index: it failed to decode."""

    def parts(self) -> tuple[Array, int]:
        """Return no parts, so that the core decodes whole tiles."""
        return NO_PARTS, 0


class NoPixels(WholeTiles):
    """Canvas that drops all pixels: whole tiles are decoded only to find damaged ones."""

    def paste(self, tile: int, pixels: Array) -> None:
        """Drop the pixels of a tile."""


def slices_of(pastes: Pastes, step: tuple[int, int]) -> list[tuple[int, ...]]:
    """Return (region, y, end_y, x, end_x, top, bottom, left, right) of each part."""
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


def _pixel_bytes(region: Array) -> int:
    """Return the bytes from one pixel to the next; 0 if the samples are not contiguous."""
    if region.ndim != 3 or min(region.strides) <= 0 or region.strides[2] != region.itemsize:
        return 0
    pixel = region.strides[1]
    # RGB pixels may be part of RGBA pixels, whose alpha the core sets to 255.
    return pixel if pixel in (region.shape[2] * region.itemsize, 4) else 0
