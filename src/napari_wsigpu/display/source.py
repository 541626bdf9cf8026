"""`DisplaySource`: the tiles of a slide for displays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from napari_wsigpu.reading.cache import TileKey
from napari_wsigpu.reading.channels import image_of
from napari_wsigpu.reading.plan import NEVER

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from napari_wsigpu.codecs.color import Color, ColorTable
    from napari_wsigpu.model.arrays import Array, DType
    from napari_wsigpu.model.layout import LevelLayout, PyramidLevel, SlideLayout
    from napari_wsigpu.reading.level import LevelArray
    from napari_wsigpu.reading.log import TileLog
    from napari_wsigpu.reading.plan import Cancellation

    Tiles = dict[tuple[int, int], Array]
    ReadTiles = Callable[[int, Collection[tuple[int, int]], ColorTable | None, Cancellation], Tiles]

REMOTE_BATCH = 64
HATCH_PERIOD, HATCH_WIDTH = 32, 6  # pixels


@dataclass(eq=False, repr=False)
class DisplaySource:
    """Reads whole tiles of a slide for displays, and estimates the cost of reading them.

    Parameters
    ----------
    slide : int
        Number of the open slide in the keys of its tiles; kept as an attribute.
    layout : SlideLayout
        Description of the slide.
    pyramid : sequence of PyramidLevel
        The levels that displays show.
    table : callable
        Returns the table that converts pixels to a `Color`; None for stored pixels.
    read : callable
        `RegionReader.read_tiles`, guarded against closing the slide during a read.
    log : TileLog
        Counts tiles.
    by_channel : Mapping of (int, int) to PyramidLevel
        The images of single channels; see `channel_levels`.

    Attributes
    ----------
    slowed : float
        Factor by which drawing a frame slows down concurrent reads.
    clearings : int
        Number of times that the slide's tiles were dropped; displays then decode theirs again.
    """

    slide: int
    _layout: SlideLayout
    _pyramid: Sequence[PyramidLevel]
    _table: Callable[[Color], ColorTable | None]
    _read: ReadTiles
    _log: TileLog
    _by_channel: Mapping[tuple[int, int], PyramidLevel]
    clearings: int = 0
    slowed: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        images = *self._pyramid, *self._by_channel.values()
        self._levels = {each.number: each for each in images}

    def key_color(self, color: Color) -> Color:
        """Return the color in the keys of tiles that are shown in a color."""
        return color

    def image_of(self, level: LevelArray) -> tuple[int, LevelLayout, int | None]:
        """Return the number and layout of the image with a level's pixels, and the channel in it.

        A channel that the file stores apart is an image of its own.
        """
        number, channel = image_of(self._by_channel, level.number, level.channel)
        # The level itself may be one that the pyramid leaves out.
        layout = level.layout if number == level.number else self._levels[number].layout
        return number, layout, channel

    def background(self, color: Color) -> float | Array:
        """Return the value of pixels that the file does not hold, in a color."""
        table = self._table(color)
        if table is None:
            return self._layout.background
        return table.background(self._layout.background, self._layout.levels[0].channels)

    def read_tiles(
        self, keys: Sequence[TileKey], cancellation: Cancellation = NEVER
    ) -> dict[TileKey, Array]:
        """Decode whole tiles of one level; tiles that fail are hatched.

        Parameters
        ----------
        keys : sequence of TileKey
            Tiles of this slide, all of one level and one color.
        cancellation : Cancellation
            Stops the read, which then raises a `CancelledError`.

        Returns
        -------
        dict of TileKey to ndarray, shape (height, width, channels)
            The tiles, cut to the level. All but failed ones are also cached.

        Raises
        ------
        DeviceError
            If the chosen device fails.
        SlideError
            If the tiles can't be read from the file or server, or the slide is closed.
        """
        first = keys[0]
        tiles = {(key.row, key.column): key for key in keys}
        table = self._table(first.color)
        found = self._read(first.image, tiles, table, cancellation)
        background = self.background(first.color)
        return {
            key: self._hatched_if_damaged(key, found[tile], background)
            for tile, key in tiles.items()
        }

    def _hatched_if_damaged(self, key: TileKey, pixels: Array, background: float | Array) -> Array:
        """Return a tile, hatched if damaged; readers fill damaged tiles with the background."""
        # A tile that failed earlier may have been decoded since.
        damaged = self._log.has_failed(key._replace(color="stored"))
        if damaged and (pixels == np.asarray(background, pixels.dtype)).all():
            return hatched(pixels.shape, background, pixels.dtype)
        return pixels

    @property
    def has_failures(self) -> bool:
        """Whether any tile has failed to decode."""
        return self._log.has_failed()

    def hatch(self, level: int, pixels: Array, background: float | Array) -> Array:
        """Return a whole level with its damaged tiles hatched, as `read_tiles` returns them."""
        if not self.has_failures:
            return pixels
        layout = self._levels[level].layout
        found = pixels
        for row, column in np.ndindex(layout.grid.rows, layout.grid.columns):
            rect = layout.tile_rect(row, column)
            area = slice(rect.top, rect.bottom), slice(rect.left, rect.right)
            part = pixels[area]
            key = TileKey(self.slide, level, row, column)
            shown = self._hatched_if_damaged(key, part, background)
            if shown is not part:
                found = pixels.copy() if found is pixels else found
                found[area] = shown
        return found

    @property
    def least_batch(self) -> int:
        """Smallest batch worth reading: many tiles if each read is a request to a server."""
        return 1 if self._layout.remote is None else REMOTE_BATCH

    @property
    def least_view_batch(self) -> int:
        """Smallest batch of tiles on screen that is worth reading."""
        return self.least_batch

    def parts_of(self, level: int) -> int:
        """Return the number of stored tiles that are decoded for one tile of a level."""
        levels = self._levels
        below, own = levels[level], levels[level].layout
        # Computed levels are averaged from the next finer level, down to a stored one.
        while below.layout.computed and below.finer is not None:
            below = levels[below.finer]
        stored = below.layout
        shrunk = stored.width * stored.height / (own.width * own.height)
        pixels = own.grid.tile_width * own.grid.tile_height * shrunk
        return max(1, round(pixels / (stored.grid.tile_width * stored.grid.tile_height)))

    def overview_tiles(self) -> tuple[int, list[tuple[int, int]]]:
        """Return the number of the coarsest level, and the row and column of each of its tiles."""
        number, layout, *_ = self._pyramid[-1]
        return number, [*np.ndindex(layout.grid.rows, layout.grid.columns)]

    def tile_shape(self, key: TileKey) -> tuple[int, int]:
        """Return the height and width of a tile cropped to its level."""
        _, _, height, width = self._levels[key.image].layout.tile_rect(key.row, key.column)
        return height, width

    def count_shown(self, needed: int, available: int) -> None:
        """Count the tiles of a display's new view and how many of them were available."""
        self._log.count(tiles_asked=needed, cache_hits=available)


@dataclass(eq=False, repr=False)
class HostedSource:
    """A source that delivers a slide's tiles in another form than its `DisplaySource`.

    Parameters
    ----------
    host : DisplaySource
        The source of the slide's own tiles.
    """

    _host: DisplaySource

    @property
    def clearings(self) -> int:
        """Number of times that the slide's tiles were dropped."""
        return self._host.clearings

    def image_of(self, level: LevelArray) -> tuple[int, LevelLayout, int | None]:
        """Return the image with a level's pixels; see `DisplaySource.image_of`."""
        return self._host.image_of(level)

    def hatch(self, level: int, pixels: Array, background: float | Array) -> Array:
        """Return a whole level with its damaged tiles hatched."""
        return self._host.hatch(level, pixels, background)

    @property
    def least_batch(self) -> int:
        """Smallest batch worth reading."""
        return self._host.least_batch

    @property
    def least_view_batch(self) -> int:
        """Smallest batch of tiles on screen that is worth reading."""
        return self.least_batch

    def parts_of(self, level: int) -> int:
        """Return the number of stored tiles that are decoded for one tile of a level."""
        return self._host.parts_of(level)

    @property
    def slide(self) -> int:
        """Number of the slide in the keys of its tiles."""
        return self._host.slide

    def count_shown(self, needed: int, available: int) -> None:
        """Count the tiles of a display's new view and how many of them were available."""
        self._host.count_shown(needed, available)


def hatched(shape: tuple[int, ...], background: float | Array, dtype: DType) -> Array:
    """Return diagonal lines on the background, in place of a damaged tile."""
    ground = np.broadcast_to(np.asarray(background, dtype), shape)
    brightest = np.iinfo(dtype).max if dtype.kind in "iu" else 1
    line = np.where(ground > 0, ground // 2, brightest)
    rows, columns = np.ogrid[: shape[0], : shape[1]]
    on_line = (rows + columns) % HATCH_PERIOD < HATCH_WIDTH
    on_line = on_line.reshape(*on_line.shape, *[1] * (len(shape) - 2))
    return np.where(on_line, line, ground).astype(dtype)
