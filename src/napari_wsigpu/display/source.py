"""`DisplaySource`: a slide, as displays see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.color import Color, ColorTable
    from napari_wsigpu.model.layout import PyramidLevel, SlideLayout
    from napari_wsigpu.reading.cache import TileKey
    from napari_wsigpu.reading.log import TileLog

    Tiles = dict[tuple[int, int], NDArray[Any]]
    ReadTiles = Callable[[int, Collection[tuple[int, int]], ColorTable | None], Tiles]

REMOTE_BATCH = 64


@dataclass(eq=False, repr=False)
class DisplaySource:
    """Whole tiles of a slide in the colours that are shown, and what it costs to have them.

    Parameters
    ----------
    slide : int
        Number of the open slide, for the keys of its tiles.
    layout : SlideLayout
        The slide.
    pyramid : sequence of PyramidLevel
        The levels that displays show.
    table : callable
        Returns the table that converts pixels to a `Color`, None where they are as stored.
    read : callable
        As `RegionReader.read_tiles`, while the slide is open.
    log : TileLog
        What counts tiles.

    Attributes
    ----------
    slowed : float
        How many times as long it takes to read tiles while a frame is drawn.
    clearings : int
        How often the slide's tiles were dropped; displays decode what they show again then.
    """

    _slide: int
    _layout: SlideLayout
    _pyramid: Sequence[PyramidLevel]
    _table: Callable[[Color], ColorTable | None]
    _read: ReadTiles
    _log: TileLog
    clearings: int = 0
    slowed: ClassVar[float] = 1.0

    def number(self, color: Color) -> int:
        """Return the slide's number in the keys of tiles in these colours."""
        return self._slide if color == "stored" else ~self._slide

    def background(self, color: Color) -> Any:
        """Return the value of pixels that the file does not hold, in these colours."""
        table = self._table(color)
        if table is None:
            return self._layout.background
        return table.background(self._layout.background, self._layout.levels[0].channels)

    def read_tiles(self, keys: Sequence[TileKey]) -> dict[TileKey, NDArray[Any]]:
        """Decode whole tiles of one level: those that fail show the background.

        Parameters
        ----------
        keys : sequence of TileKey
            Tiles of this slide, all of one level and in the same colours.

        Returns
        -------
        dict of TileKey to ndarray, shape (height, width, channels)
            Cut to the level. All but failed ones are in the cache now.

        Raises
        ------
        DeviceError
            If the device that shall decode them fails.
        SlideError
            If the file or its server doesn't give their bytes, or the slide was closed.
        """
        first = keys[0]
        tiles = {(key.row, key.column): key for key in keys}
        table = self._table("stored" if first.slide >= 0 else "srgb")
        found = self._read(first.level, tiles, table)
        return {key: found[tile] for tile, key in tiles.items()}

    @property
    def least_batch(self) -> int:
        """How many tiles are worth a read of its own: many where each read is a request."""
        return 1 if self._layout.remote is None else REMOTE_BATCH

    def parts_of(self, level: int) -> int:
        """Return how many stored tiles are decoded for one tile of a level."""
        levels = {each.number: each for each in self._pyramid}
        below, own = levels[level], levels[level].layout
        while below.layout.computed and below.finer is not None:
            below = levels[below.finer]
        stored = below.layout
        shrunk = stored.width * stored.height / (own.width * own.height)
        pixels = own.grid.tile_width * own.grid.tile_height * shrunk
        return max(1, round(pixels / (stored.grid.tile_width * stored.grid.tile_height)))

    def count_shown(self, asked: int, at_hand: int) -> None:
        """Count the tiles of a display's new view, and those that were at hand for it."""
        self._log.count(tiles_asked=asked, cache_hits=at_hand)
