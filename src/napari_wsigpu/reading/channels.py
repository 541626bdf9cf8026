"""Read selected channels of a slide without decoding others that the file stores separately."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from napari_wsigpu.model.appearance import channel_colors, contrast_limits
from napari_wsigpu.model.composite import WHITE, ChannelStyle, Composite
from napari_wsigpu.reading.cache import TileKey
from napari_wsigpu.reading.plan import NEVER, ReadOptions, Regions
from napari_wsigpu.storage.source import can_address_channels, image_of_channel

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from typing import TypeVar

    from napari_wsigpu.model.arrays import Array
    from napari_wsigpu.model.layout import Channel, LevelLayout, PyramidLevel
    from napari_wsigpu.reading.log import TileLog
    from napari_wsigpu.reading.plan import Cancellation
    from napari_wsigpu.reading.reader import RegionReader

    Result = TypeVar("Result")
    Tile = tuple[int, int]

FOR_DISPLAYS = ReadOptions(tolerant=True)
# Viewers initially show at most this many channels; more are hard to tell apart.
MOST_VISIBLE = 4


def composite_of(
    named: Sequence[Channel],
    overview: Callable[[int], Array],
    channels: Sequence[int] | None,
    settings: Composite | None,
) -> Composite:
    """Return settings that show some channels, each with a window; see `Slide.composite`."""
    if settings is None:
        settings = Composite(
            tuple(
                ChannelStyle(channel.name, color or WHITE, channel.window)
                for channel, color in zip(named, channel_colors(named), strict=True)
            )
        )
        if channels is None:
            marked = [number for number, each in enumerate(named) if each.visible]
            channels = (marked or range(len(named)))[:MOST_VISIBLE]
    if channels is not None:
        settings = settings.showing(channels)
    for number in settings.visible:
        style = settings.channels[number]
        if style.window is None:
            window = contrast_limits(overview(number))
            settings = settings.styled(number, replace(style, window=window))
    return settings


def channel_levels(
    pyramid: Iterable[PyramidLevel], first: int
) -> dict[tuple[int, int], PyramidLevel]:
    """Return the levels of each channel as separate images.

    Parameters
    ----------
    pyramid : iterable of PyramidLevel
        The slide's levels.
    first : int
        Number of the first of these images.

    Returns
    -------
    dict of (int, int) to PyramidLevel
        Keyed by (level number, channel). Empty for slides of few channels, and if the file stores
        several channels in one tile: reading one of them would decode the others too.
    """
    levels = list(pyramid)
    if levels[0].layout.channels <= MOST_VISIBLE:
        return {}  # all are visible as a rule, and every slide would take longer to open
    separate = all(_is_separate(level.layout) for level in levels)
    arrays = all(level.layout.computed or can_address_channels(level.layout) for level in levels)
    if not (separate or arrays):
        return {}
    keys = [(level, each) for each in range(levels[0].layout.channels) for level in levels]
    numbers = {(level.number, each): first + at for at, (level, each) in enumerate(keys)}
    found = {}
    for level, channel in keys:
        key = level.number, channel
        finer = None if level.finer is None else numbers[level.finer, channel]
        of_array = level.layout.array is not None and not level.layout.computed
        image = (image_of_channel if of_array else _of_channel)(level.layout, channel)
        found[key] = level._replace(number=numbers[key], layout=image, finer=finer)
    return found


def image_of(
    images: Mapping[tuple[int, int], PyramidLevel], number: int, channel: int | None
) -> tuple[int, int | None]:
    """Return the number of the image that holds a channel (None: all), and the channel in it.

    The image is `number`, unless it is a level whose channels are separate `images`.
    """
    own = None if channel is None else images.get((number, channel))
    return (number, channel) if own is None else (own.number, 0)


def _is_separate(level: LevelLayout) -> bool:
    """Whether each channel of a level is computed, or has its own tiles in the file."""
    separate = level.encoding.samples == 1 and level.grid.planes == level.channels > 1
    plain = not level.parts and level.library is None and level.encoding.jpeg_header is None
    return level.channels > 1 and (level.computed or (separate and plain))


def _of_channel(level: LevelLayout, channel: int) -> LevelLayout:
    if level.computed:
        return replace(level, channels=1)
    grid, encoding, own = level.grid, level.encoding, slice(channel, channel + 1)
    grid = replace(grid, offsets=grid.offsets[own], byte_counts=grid.byte_counts[own])
    if len(encoding.jpeg_tables) > 1:
        encoding = replace(encoding, jpeg_tables=encoding.jpeg_tables[own])
    return replace(level, channels=1, grid=grid, encoding=encoding)


@dataclass(frozen=True, eq=False)
class ChannelReader:
    """Reads some channels of a slide for displays.

    Parameters
    ----------
    slide : int
        Number of the open slide in the keys of its tiles.
    finest : LevelLayout
        The finest level; kept as an attribute.
    images : Mapping of (int, int) to PyramidLevel
        The images of single channels; see `channel_levels`.
    reader : RegionReader
        Reads the slide's images.
    log : TileLog
        Knows which tiles are damaged.
    guarded : callable
        Runs a function while keeping the slide open; kept as an attribute.
    """

    _slide: int
    finest: LevelLayout
    _images: Mapping[tuple[int, int], PyramidLevel]
    _reader: RegionReader
    _log: TileLog
    guarded: Callable[[Callable[[], Result]], Result]

    def bytes_per_pixel(self, channels: Sequence[int]) -> int:
        """Return how many bytes the cached tiles of some channels take for each pixel."""
        stored = self.finest
        return stored.dtype.itemsize * (len(channels) if self._images else stored.channels)

    def image_of(self, number: int, channel: int | None) -> tuple[int, int | None]:
        """Return the image that holds a channel of a level; see the function `image_of`."""
        return image_of(self._images, number, channel)

    def region(
        self,
        number: int,
        regions: Regions,
        channels: Sequence[int],
        options: ReadOptions = FOR_DISPLAYS,
    ) -> list[Array]:
        """Return a region of a level, one array of shape (height, width) per channel.

        Raises
        ------
        TileError
            If a tile is damaged and the options are not tolerant.
        SlideError
            If the file can't be read.
        """
        found: list[Array] = []
        for image, shown in self.sources(number, channels):
            pixels = self.guarded(partial(self._reader.read, image, regions, options))[0]
            found += (pixels[..., channel] for channel in shown)
        return found

    def tiles(
        self,
        number: int,
        tiles: Collection[Tile],
        channels: Sequence[int],
        cancellation: Cancellation = NEVER,
    ) -> tuple[dict[Tile, list[Array]], set[Tile]]:
        """Return whole tiles of a level, one array per channel, and which tiles are damaged.

        Raises
        ------
        DeviceError, SlideError
            As in `RegionReader.read_tiles`.
        """
        found: dict[Tile, list[Array]] = {tile: [] for tile in tiles}
        damaged: set[Tile] = set()
        sources = self.sources(number, channels)
        images = [image for image, _ in sources]
        one = partial(self._reader.read_tiles, tiles=tiles, cancellation=cancellation)
        read = self.each(images, one)
        for (image, shown), pixels in zip(sources, read, strict=True):
            for tile in tiles:
                found[tile] += (pixels[tile][..., channel] for channel in shown)
                if self._log.has_failed(TileKey(self._slide, image, *tile)):
                    damaged.add(tile)
        return found, damaged

    def each(self, images: Sequence[int], read: Callable[[int], Result]) -> list[Result]:
        """Call ``read(image)`` for several of the slide's images, concurrently."""
        return self.guarded(lambda: self._reader.each(images, read))

    def cached_tiles(
        self, number: int, tiles: Collection[Tile], channels: Sequence[int]
    ) -> dict[Tile, list[Array]]:
        """Return the whole tiles whose channels are all cached, one array per channel."""
        found: dict[Tile, list[Array]] = {tile: [] for tile in tiles}
        for image, shown in self.sources(number, channels):
            pixels = self._reader.cached_tiles(image, list(found))
            found = {
                tile: [*found[tile], *(pixels[tile][..., channel] for channel in shown)]
                for tile in pixels
            }
        return found

    def sources(self, number: int, channels: Sequence[int]) -> list[tuple[int, Sequence[int]]]:
        """Return the numbers of the images that hold some channels, and the channels in each."""
        if not self._images:
            return [(number, channels)] if channels else []
        return [(self._images[number, channel].number, (0,)) for channel in channels]
