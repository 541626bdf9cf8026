"""`DeviceSource`: the tiles of a slide for displays that draw on the GPU that decodes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from napari_wsigpu.display.source import HostedSource
from napari_wsigpu.reading.plan import NEVER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from napari_wsigpu.codecs.color import Color, ColorTable
    from napari_wsigpu.model.arrays import Array
    from napari_wsigpu.reading.cache import TileKey
    from napari_wsigpu.reading.on_device import TilesOnDevice
    from napari_wsigpu.reading.plan import Cancellation

    Tile = tuple[int, int]


@dataclass(eq=False, repr=False)
class DeviceSource(HostedSource):
    """Reads whole tiles of a slide to device memory, and estimates the cost of reading them.

    Parameters
    ----------
    host : DisplaySource
        The source for displays that draw on the host.
    tiles : TilesOnDevice
        The tiles in device memory; kept as an attribute.
    read : callable
        `TilesOnDevice.read`, guarded against closing the slide during a read.
    table : callable
        Returns the table that converts pixels to a `Color`; None for stored pixels.
    """

    tiles: TilesOnDevice
    _read: Callable[[int, Sequence[Tile]], set[Tile]]
    table: Callable[[Color], ColorTable | None]
    # Factor by which drawing a frame slows down reads: decoding submits a few hundred short steps
    # to the GPU, and after each the drawing thread may hold the GIL for 5 ms.
    slowed: ClassVar[float] = 3.0

    def key_color(self, color: Color) -> Color:
        """Return the color in the keys of tiles that are shown in a color."""
        return color

    def background(self, color: Color) -> float | Array:
        """Return the value of pixels that the file does not hold, in a color."""
        return self._host.background(color)

    def read_tiles(
        self, keys: Sequence[TileKey], cancellation: Cancellation = NEVER
    ) -> dict[TileKey, bool]:
        """Decode whole tiles of one level to the device, which takes too little time to stop it.

        Returns
        -------
        dict of TileKey to bool
            Whether each tile is in device memory; failed tiles must be hatched.

        Raises
        ------
        DeviceError, SlideError
            As in `DisplaySource.read_tiles`.
        """
        cancellation.check()
        tiles = {(key.row, key.column): key for key in keys}
        failed = self._read(keys[0].image, list(tiles))
        return {key: tile not in failed for tile, key in tiles.items()}
