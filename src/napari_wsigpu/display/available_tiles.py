"""`AvailableTiles`: the tiles of a slide that a display can show without waiting."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.reading.cache import TileKey
from napari_wsigpu.reading.mosaic import touches

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from napari_wsigpu.codecs.color import Color
    from napari_wsigpu.model.arrays import Array
    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.reading.cache import TileCache

    Tile = tuple[int, int]


@dataclass(eq=False, repr=False)
class AvailableTiles:
    """The decoded and the blank tiles of a slide, in the color and channel of a display.

    Parameters
    ----------
    slide : int
        Number of the slide in the keys of its tiles.
    levels : Mapping of int to LevelLayout
        The levels that the display shows, by their numbers, finest first.
    overview : ndarray
        All pixels of the coarsest level; kept as an attribute.
    blank : int, float or ndarray, shape (channels,)
        Value of pixels that the file does not hold.
    channel : int or None
        The channel to show; None for all.
    cache : TileCache
        Holds decoded tiles.
    color : str
        Color in the keys of the displayed tiles; see `TileKey`.

    Attributes
    ----------
    slide, color
        As given.
    numbers : list of int
        Number of each level in tile keys; everywhere else, a level is an index in `levels`.
    levels : list of LevelLayout
        The levels, finest first.
    overview, blank, channel
        As given.
    """

    slide: int
    _by_number: Mapping[int, LevelLayout]
    overview: Array
    blank: float | Array
    channel: int | None
    _cache: TileCache
    color: Color = "stored"
    _touched: dict[tuple[int, int, int], bool] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.numbers = list(self._by_number)
        self.levels = list(self._by_number.values())

    def key_of(self, level: int, row: int, column: int) -> TileKey:
        """Return the key of a tile."""
        return TileKey(self.slide, self.numbers[level], row, column, self.color)

    def useful(
        self, decoded: Iterable[TileKey], level: int, missing: Collection[Tile]
    ) -> list[TileKey]:
        """Return the decoded tiles that improve a view of a level.

        These are missing tiles of the level, and tiles of the next finer and of coarser levels.
        """
        numbers, own = self.numbers[max(0, level - 1) :], self.numbers[level]
        return [
            key
            for key in decoded
            if (key.slide, key.color) == (self.slide, self.color)
            and key.image in numbers
            and (key.image != own or (key.row, key.column) in missing)
        ]

    def shown(self, tile: Array) -> Array:
        """Return the channels of a decoded tile that the display shows."""
        return tile if self.channel is None else tile[..., self.channel]

    def get(self, level: int, row: int, column: int) -> Array | None:
        """Return the pixels of a tile as the display shows them; None if it must be decoded."""
        tile = self._cache.get(self.key_of(level, row, column))
        if tile is not None:
            return self.shown(tile)
        if self._is_blank(level, row, column):
            image = self.levels[level]
            shape = (image.grid.tile_height, image.grid.tile_width, image.channels)
            return self.shown(np.broadcast_to(np.asarray(self.blank, image.dtype), shape))
        return None

    def _is_blank(self, level: int, row: int, column: int) -> bool:
        """Return whether a tile is known to be background without decoding it."""
        image = self.levels[level]
        if image.parts:
            place = level, row, column
            # Testing all images of a mosaic is slow, so results are remembered.
            if place not in self._touched:
                self._touched[place] = touches(image, image.tile_rect(row, column))
            return not self._touched[place]
        return bool(self._is_lacking(level, row, column))

    def _is_lacking(self, level: int, rows: Any, columns: Any) -> Any:
        """Return whether the file lacks a tile, or a mask for arrays; no level replaces them."""
        image = self.levels[level]
        stored = image.grid.byte_counts[:, rows, columns].any(axis=0)
        return (image.missing == "background") & ~stored


@dataclass(eq=False, repr=False)
class TileLookup:
    """Finds tiles during one composition, and looks each up only once."""

    _available: AvailableTiles
    _decoded: Mapping[TileKey, Array]
    _tiles: dict[tuple[int, Tile], Array | None] = field(default_factory=dict)

    def tile(self, level: int, tile: Tile) -> Array | None:
        """Return the pixels of a tile; None if it is not available."""
        place = level, tile
        if place not in self._tiles:
            pixels = self._decoded.get(self._available.key_of(level, *tile))
            self._tiles[place] = self._available.get(level, *tile) if pixels is None else pixels
        return self._tiles[place]
