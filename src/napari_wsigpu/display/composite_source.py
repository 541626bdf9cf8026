"""Composites of a slide's channels for displays: their settings, tiles and levels."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field, replace
from itertools import count, groupby
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np

from napari_wsigpu.display.compose import compose
from napari_wsigpu.display.source import DisplaySource, HostedSource, hatched
from napari_wsigpu.model.channel_groups import group_of
from napari_wsigpu.model.errors import UnsupportedArrayError
from napari_wsigpu.model.geometry import Rect
from napari_wsigpu.reading.level import LevelArray
from napari_wsigpu.reading.plan import NEVER, Regions
from napari_wsigpu.reading.stack import StackLevel

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from typing import NoReturn

    from numpy.typing import NDArray

    from napari_wsigpu.codecs.color import Color
    from napari_wsigpu.model.arrays import Array
    from napari_wsigpu.model.channel_groups import ChannelGroup
    from napari_wsigpu.model.composite import Composite
    from napari_wsigpu.model.geometry import Span
    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.reading.cache import TileCache, TileKey
    from napari_wsigpu.reading.channels import ChannelReader
    from napari_wsigpu.reading.plan import Cancellation

    Tile = tuple[int, int]

RGB = 3
# Size of a pixel's sums, and the share of the cache's budget that sums may take in addition to it.
SUMS_BYTES, PART_OF_BUDGET = 16, 4
# Fewer visible channels are composed in less time than sums are read and written.
MANY_CHANNELS = 8
CHANNEL_TILES = 1280  # tiles of single channels, which two cores decode in 0.4 s
_versions = count()


class CompositeView:
    """The composite of a slide that viewers show, shared by all its levels and planes.

    Parameters
    ----------
    settings : Composite
        How to show the channels.

    Attributes
    ----------
    groups : list of ChannelGroup
        Groups of channels that the user has defined or opened.
    initial : ChannelGroup
        The channels of the first settings.
    chosen : int or None
        Number of the group that the user has chosen last.
    """

    def __init__(self, settings: Composite) -> None:
        self.settings = settings
        self.groups: list[ChannelGroup] = []
        self.initial = group_of(settings, "as in the file")
        self.chosen: int | None = None

    @property
    def settings(self) -> Composite:
        """How to show the channels. A layer composes its tiles again when it is refreshed."""
        return self.state[0]

    @settings.setter
    def settings(self, settings: Composite) -> None:
        # One assignment, because the fetcher's thread reads all. The string distinguishes tiles of
        # different settings in the cache, which only compares it.
        version = next(_versions)
        self.state = settings, cast("Color", f"composite {version}"), version


@dataclass(eq=False, repr=False)
class CompositeSource(HostedSource):
    """Composes tiles for displays. The tiles of the channels stay in the cache as stored.

    Parameters
    ----------
    host : DisplaySource
        The source of the slide's own tiles.
    view : CompositeView
        The composite; kept as an attribute.
    channels : ChannelReader
        Reads the channels; kept as an attribute.
    cache : TileCache
        Receives the composed tiles.
    """

    view: CompositeView
    channels: ChannelReader
    _cache: TileCache
    # Sums of tiles that were composed last, and their composites. Guarded by `_composing`, which is
    # held while a tile is composed, because that changes its sums.
    _sums: dict[TileKey, tuple[Composite, NDArray[np.float32]]] = field(
        default_factory=dict, init=False
    )
    _composing: threading.Lock = field(default_factory=threading.Lock, init=False)
    _cleared: int = field(default=0, init=False)  # `clearings` when the sums were last cleared
    slowed: ClassVar[float] = DisplaySource.slowed

    @property
    def arguments(self) -> tuple[DisplaySource, CompositeView, ChannelReader, TileCache]:
        """The arguments that this source was made with."""
        return self._host, self.view, self.channels, self._cache

    def image_of(self, level: LevelArray) -> tuple[int, LevelLayout, int | None]:
        """Return the number and layout of a composite's level, and the component that it shows."""
        return level.number, level.layout, level.channel

    def key_color(self, _: Color) -> Color:
        """Return the color in the keys of composed tiles."""
        return self.view.state[1]

    @property
    def weight(self) -> float:
        """Bytes that the cache holds for each byte of a composed tile."""
        return 1 + self.channels.bytes_per_pixel(self.view.settings.visible) / RGB

    @property
    def least_view_batch(self) -> int:
        """Smallest batch of tiles on screen: decoding few tiles per channel leaves cores idle."""
        return max(self.least_batch, CHANNEL_TILES // max(1, len(self.view.settings.visible)))

    def background(self, _: Color) -> Array:
        """Return the color of pixels that the file does not hold."""
        settings, dtype = self.view.settings, self.channels.finest.dtype
        blank = np.full((1, 1), self._host.background("stored"), dtype)
        color: Array = compose([blank] * len(settings.visible), settings, blank.shape)[0, 0]
        return color

    def read(self, level: LevelArray, rows: Span, columns: Span, channel: int | None) -> Array:
        """Compose a region of a level; return one of red, green and blue, or all."""
        settings, shape = self.view.settings, (rows.length, columns.length)
        if level.shape[:2] == shape:
            pixels = self._whole(level, settings)
        else:
            regions = Regions.slice(rows, columns)
            pixels = compose(
                self.channels.region(level.number, regions, settings.visible), settings, shape
            )
        return pixels if channel is None else pixels[..., channel]

    def _whole(self, level: LevelArray, settings: Composite) -> Array:
        """Compose a level tile by tile, as copying all channels first would take twice as long."""
        layout, grid = level.layout, level.layout.grid
        whole = Rect(0, 0, layout.height, layout.width)
        places = [*np.ndindex(grid.rows, grid.columns)]
        tiles, _ = self.channels.tiles(level.number, places, settings.visible)
        pixels = np.empty((*level.shape[:2], RGB), np.uint8)
        for tile, channels in tiles.items():
            rect = layout.tile_rect(*tile)
            shape = rect.height, rect.width
            pixels[whole.slices(rect)] = compose(channels, settings, shape)
        return pixels

    def values(self, number: int, row: int, column: int) -> list[tuple[str, float]]:
        """Return the name and stored value of each visible channel at a pixel of a level."""
        settings = self.view.settings
        pixel = Regions.one(Rect(row, column, 1, 1))
        channels = self.channels.region(number, pixel, settings.visible)
        names = (settings.channels[index].name for index in settings.visible)
        return [(name, pixels.item()) for name, pixels in zip(names, channels, strict=True)]

    def compose_cached(self, keys: Sequence[TileKey]) -> dict[TileKey, Array]:
        """Compose the tiles of one level whose visible channels are all cached."""
        settings, color, _ = self.view.state
        tiles = {(key.row, key.column): key for key in keys if key.color == color}
        if not tiles:
            return {}
        composed = {}
        found = self.channels.cached_tiles(keys[0].image, tiles, settings.visible)
        for tile, channels in found.items():
            key = tiles[tile]
            pixels = self._compose(key, channels, settings)
            self._cache.put(key, pixels)
            composed[key] = pixels
        return composed

    def undecoded(self, keys: Sequence[TileKey]) -> list[TileKey]:
        """Return the tiles of which a visible channel is not cached."""
        decoded: set[TileKey] = set()
        for image, alike in groupby(keys, lambda key: key.image):
            tiles = {(key.row, key.column): key for key in alike}
            decoded.update(map(tiles.__getitem__, self._decoded(image, tiles)))
        return [key for key in keys if key not in decoded]

    def _decoded(self, number: int, tiles: Collection[Tile]) -> Collection[Tile]:
        """Return the tiles whose visible channels are all cached."""
        return self.channels.cached_tiles(number, tiles, self.view.settings.visible)

    def read_tiles(
        self, keys: Sequence[TileKey], cancellation: Cancellation = NEVER
    ) -> dict[TileKey, Array]:
        """Compose whole tiles of one level. A tile that is damaged in any channel is hatched.

        Raises
        ------
        SlideError
            As in `DisplaySource.read_tiles`.
        """
        settings, color, _ = self.view.state
        tiles = {(key.row, key.column): key for key in keys}
        # A changed composite needs the overview's channels; looking them up keeps them cached.
        self.channels.cached_tiles(*self._host.overview_tiles(), settings.visible)
        found, damaged = self.channels.tiles(keys[0].image, tiles, settings.visible, cancellation)
        composed = {}
        for tile, key in tiles.items():
            pixels = self._compose(key, found[tile], settings)
            if tile in damaged:
                pixels = hatched(pixels.shape, self.background(color), pixels.dtype)
                self._forget_sums(key)  # the missing channel may be read next time
            elif key.color == color:  # otherwise the settings have just been changed
                self._cache.put(key, pixels)
            composed[key] = pixels
        return composed

    def _compose(self, key: TileKey, channels: Sequence[Array], settings: Composite) -> Array:
        """Compose a tile, and keep its sums, to which the next change of a channel is added."""
        height, width = shape = self._host.tile_shape(key)
        place, cropped = key._replace(color="stored"), [each[:height, :width] for each in channels]
        if len(channels) < MANY_CHANNELS:
            self._forget_sums()
            return compose(cropped, settings, shape)
        size = math.prod(shape) * SUMS_BYTES
        with self._composing:
            if self._cleared != self.clearings:
                self._cleared = self.clearings
                self._sums.clear()
            before, sums = self._sums.pop(place, (None, None))
            if sums is None:
                sums = np.empty((*shape, 4), np.float32)
            pixels = compose(cropped, settings, shape, sums, before)
            self._sums[place] = settings, sums
            # Tiles of a level differ in size at its edges only.
            while len(self._sums) * size > self._cache.budget // PART_OF_BUDGET:
                del self._sums[next(iter(self._sums))]
        return pixels

    def _forget_sums(self, key: TileKey | None = None) -> None:
        """Drop the sums of a tile, or of all tiles."""
        if self._sums:
            with self._composing:
                if key is None:
                    self._sums.clear()
                else:
                    self._sums.pop(key._replace(color="stored"), None)


class CompositeLevel(LevelArray):
    """A level of a composite: RGB pixels with 8 bits per sample.

    Parameters
    ----------
    stored : LevelArray
        The level of the slide.
    source : CompositeSource
        The composite; kept as an attribute.
    channel : int, optional
        Show only red (0), green (1) or blue (2), as a two-dimensional array.
    """

    def __init__(
        self, stored: LevelArray, source: CompositeSource, channel: int | None = None
    ) -> None:
        self.source = source
        self._stored = stored

        def read(rows: Span, columns: Span, channel: int | None) -> Array:
            return source.read(stored, rows, columns, channel)

        layout = rgb_layout(stored.layout)
        super().__init__(layout, read, stored.slide, stored.number, channel, tolerant=True)

    def _of_channel(self, channel: int) -> LevelArray:
        return CompositeLevel(self._stored, self.source, channel)

    def to_dask(self, tiles: int | None = None, device: str = "cpu") -> NoReturn:
        """Raise an error: the composite may change before the tasks run."""
        self.__reduce__()

    def __reduce__(self) -> NoReturn:
        raise UnsupportedArrayError(
            f"A composite of '{self.slide.path}' exists only in this process; use the slide's "
            "`levels`, whose pixels are as stored."
        )


def source_of(level: object) -> CompositeSource | None:
    """Return the source of the composite that a level or stack shows; None if it shows none."""
    shown = level.shown if isinstance(level, StackLevel) else level
    return shown.source if isinstance(shown, CompositeLevel) else None


def rgb_layout(stored: LevelLayout) -> LevelLayout:
    """Return the layout of a level's composite: the same tiles, with other samples."""
    return replace(stored, channels=RGB, encoding=replace(stored.encoding, dtype="uint8"))
