"""`DeviceSource`: a slide, as displays see it that draw on the GPU that decodes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from napari_wsigpu.codecs.color import Color, ColorTable
    from napari_wsigpu.display.source import DisplaySource
    from napari_wsigpu.reading.cache import TileKey
    from napari_wsigpu.reading.on_device import TilesOnDevice

    Tile = tuple[int, int]


@dataclass(eq=False, repr=False)
class DeviceSource:
    """Whole tiles of a slide in the memory of a device, and what it costs to have them.

    Parameters
    ----------
    host : DisplaySource
        The same for displays that draw on the host.
    tiles : TilesOnDevice
        Where the tiles are; kept as an attribute.
    read : callable
        As `TilesOnDevice.read`, while the slide is open.
    table : callable
        Returns the table that converts pixels to a `Color`, None where they are as stored.
    """

    _host: DisplaySource
    tiles: TilesOnDevice
    _read: Callable[[int, Sequence[Tile]], set[Tile]]
    table: Callable[[Color], ColorTable | None]
    # How many times as long it takes to read tiles while a frame is drawn: a GPU is told what to do
    # in a few hundred short steps, and the interpreter may have another thread go on for 5 ms after
    # each.
    slowed: ClassVar[float] = 3.0

    @property
    def clearings(self) -> int:
        """How often the slide's tiles were dropped."""
        return self._host.clearings

    @property
    def least_batch(self) -> int:
        """How many tiles are worth a read of its own."""
        return self._host.least_batch

    def parts_of(self, level: int) -> int:
        """Return how many stored tiles are decoded for one tile of a level."""
        return self._host.parts_of(level)

    def number(self, color: Color) -> int:
        """Return the slide's number in the keys of tiles: colours are made when they are drawn."""
        return self._host.number("stored")

    def background(self, color: Color) -> Any:
        """Return the value of pixels that the file does not hold, in these colours."""
        return self._host.background(color)

    def count_shown(self, asked: int, at_hand: int) -> None:
        """Count the tiles of a display's new view, and those that were at hand for it."""
        self._host.count_shown(asked, at_hand)

    def read_tiles(self, keys: Sequence[TileKey]) -> dict[TileKey, bool]:
        """Decode whole tiles of one level to the device.

        Returns
        -------
        dict of TileKey to bool
            Whether each is there; one that failed shows the background.

        Raises
        ------
        DeviceError, SlideError
            As in `DisplaySource.read_tiles`.
        """
        tiles = {(key.row, key.column): key for key in keys}
        failed = self._read(keys[0].level, list(tiles))
        return {key: tile not in failed for tile, key in tiles.items()}
