"""`TilesAtHand`: which pixels of a slide a display can show without waiting."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.reading.cache import TileKey
from napari_wsigpu.reading.mosaic import touches
from napari_wsigpu.reading.plan import tile_rect

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from numpy.typing import NDArray

    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.reading.cache import TileCache

    Tile = tuple[int, int]


@dataclass(eq=False, repr=False)
class TilesAtHand:
    """The tiles of a slide that are decoded or need not be, in a display's colours and channel.

    Parameters
    ----------
    slide : int
        Number of the slide in the keys of its tiles, in the colours that are shown.
    levels : Mapping of int to LevelLayout
        The levels of the display by their numbers, finest first.
    overview : ndarray
        All pixels of the coarsest level; kept as an attribute.
    blank : int, float or ndarray, shape (channels,)
        Value of pixels that the file does not hold.
    channel : int or None
        The channel that is shown; None for all.
    cache : TileCache
        Where decoded tiles are.

    Attributes
    ----------
    slide : int
        As given.
    numbers : list of int
        The levels' numbers in keys; everywhere else a level is an index in `levels`.
    levels : list of LevelLayout
        The levels, finest first.
    blank, channel
        As given.
    """

    slide: int
    _by_number: Mapping[int, LevelLayout]
    overview: NDArray[Any]
    blank: Any
    channel: int | None
    _cache: TileCache
    _touched: dict[tuple[int, int, int], bool] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.numbers = list(self._by_number)
        self.levels = list(self._by_number.values())

    def key_of(self, level: int, row: int, column: int) -> TileKey:
        """Name a tile."""
        return TileKey(self.slide, self.numbers[level], row, column)

    def useful(
        self, landed: Iterable[TileKey], level: int, missing: Collection[Tile]
    ) -> list[TileKey]:
        """Return those of decoded tiles that better a view of a level: missing ones, or others."""
        numbers, own = self.numbers[max(0, level - 1) :], self.numbers[level]
        return [
            key
            for key in landed
            if key.slide == self.slide
            and key.level in numbers
            and (key.level != own or (key.row, key.column) in missing)
        ]

    def shown(self, tile: NDArray[Any]) -> NDArray[Any]:
        """Return what the display shows of a decoded tile."""
        return tile if self.channel is None else tile[..., self.channel]

    def get(self, level: int, row: int, column: int) -> NDArray[Any] | None:
        """Return the pixels of a tile if they are known now, as the display shows them."""
        tile = self._cache.get(self.key_of(level, row, column))
        if tile is not None:
            return self.shown(tile)
        if self._is_blank(level, row, column):
            image = self.levels[level]
            shape = (image.grid.tile_height, image.grid.tile_width, image.channels)
            return self.shown(np.broadcast_to(np.asarray(self.blank, image.dtype), shape))
        return None

    def _is_blank(self, level: int, row: int, column: int) -> bool:
        """Whether a tile is known to be background without decoding anything."""
        image = self.levels[level]
        if image.parts:
            place = level, row, column
            if place not in self._touched:
                self._touched[place] = touches(image, tile_rect(image, row, column))
            return not self._touched[place]
        return image.missing == "background" and not image.grid.byte_counts[:, row, column].any()


@dataclass(eq=False, repr=False)
class Hand:
    """Tiles that were found at hand during one composition, so that none is looked up twice."""

    _at_hand: TilesAtHand
    _landed: Mapping[TileKey, NDArray[Any]]
    _tiles: dict[tuple[int, Tile], NDArray[Any] | None] = field(default_factory=dict)

    def tile(self, level: int, tile: Tile) -> NDArray[Any] | None:
        """Return a tile's pixels, or None if it is not at hand."""
        place = level, tile
        if place not in self._tiles:
            pixels = self._landed.get(self._at_hand.key_of(level, *tile))
            self._tiles[place] = self._at_hand.get(level, *tile) if pixels is None else pixels
        return self._tiles[place]
