"""Composites of a slide's channels for displays that draw on the GPU that decodes them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakKeyDictionary

import numpy as np

from napari_wsigpu.display.compose import colors_of, has_table, shades_of
from napari_wsigpu.display.composite_source import CompositeSource, rgb_layout
from napari_wsigpu.display.device_source import DeviceSource
from napari_wsigpu.gpu.device.kernel_tables import PLANE
from napari_wsigpu.reading.device import tile_format
from napari_wsigpu.reading.on_device import DrawableTiles
from napari_wsigpu.reading.plan import NEVER

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from napari_wsigpu.codecs.color import Color
    from napari_wsigpu.gpu.device.interfaces import Stream
    from napari_wsigpu.gpu.transfer.device_tiles import Reserved
    from napari_wsigpu.model.arrays import DeviceArray, Integers, Mask
    from napari_wsigpu.model.composite import ChannelStyle, Composite
    from napari_wsigpu.model.layout import LevelLayout
    from napari_wsigpu.reading.cache import TileKey
    from napari_wsigpu.reading.channels import ChannelReader
    from napari_wsigpu.reading.plan import Cancellation

    Tile = tuple[int, int]
    # Colors of a channel's values on the device, the first value, and the number of further ones.
    Colors = tuple[DeviceArray, int, int]

MOST_IMAGES = 1 << 32

_made: WeakKeyDictionary[CompositeSource, DeviceComposite] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class ComposedTiles(DrawableTiles):
    """The tiles of a composite with fixed settings in device memory, as 8-bit RGB.

    Parameters
    ----------
    backend, color
        As in `DrawableTiles`.
    channels : ChannelReader
        Knows which images hold the channels; kept as an attribute.
    settings : Composite
        How to show the channels; kept as an attribute.
    version : int
        Distinguishes these tiles from those of other settings; kept as an attribute.
    shades : device array of uint8
        See `CudaDevice.compose`; kept as an attribute.
    colors : Mapping of ChannelStyle to Colors
        The colors of each visible channel; kept as an attribute.
    """

    channels: ChannelReader
    settings: Composite
    version: int
    shades: DeviceArray
    colors: dict[ChannelStyle, Colors]
    _composed: set[int] = field(default_factory=set, init=False)  # numbers of levels

    def _image(self, number: int) -> LevelLayout:
        return rgb_layout(self._parts.images[number])

    def _key(self, number: int) -> int:
        return -1 - (self.version * MOST_IMAGES + number)  # the slide's own images start from 0

    def ready(self, number: int, tiles: Integers) -> Mask:
        """Return the mask of the tiles that can be drawn, after composing those that can be."""
        here = self.decoded(number, tiles)
        if not here.all():
            here[~here] = self.compose(number, tiles[~here])
        return here

    def compose(self, number: int, tiles: Integers) -> Mask:
        """Compose those tiles of a level whose channels are in device memory.

        Parameters
        ----------
        number : int
            Number of the level.
        tiles : ndarray of int64, shape (tiles, 2)
            Row and column of each tile.

        Returns
        -------
        ndarray of bool, shape (tiles,)
            Which tiles are composed.
        """
        parts, visible = self._parts, self.settings.visible
        sources = self.channels.sources(number, visible)
        planes, ready = np.zeros((len(tiles), len(visible)), PLANE), np.ones(len(tiles), np.bool_)
        pinned: list[Reserved] = []
        column = 0
        try:
            for image, channels in sources:
                reserved, here = self.backend.tiles.find(parts.number, image, tiles)
                if reserved is None:
                    return here
                pinned.append(reserved)
                ready &= here
                skipped = np.array(channels) * parts.images[image].dtype.itemsize
                part = slice(column, column := column + len(channels))
                planes["source"][here, part] = reserved.slots.addresses[:, None] + skipped
            if visible:
                shown = [self.colors[self.settings.channels[index]] for index in visible]
                colors, planes["low"], planes["last"] = zip(*shown, strict=True)
                planes["colors"] = [self.device.address(each) for each in colors]
            planes, composed = planes[ready], tiles[ready]
            stored = tile_format(parts.images[sources[0][0] if sources else number])

            def write(addresses: Integers, part: slice, stream: Stream) -> None:
                self.device.compose(planes[part], stored, self.shades, addresses, stream)

            self._composed.add(number)
            self._keep(number, composed, write)
        finally:
            for reserved in pinned:
                self.backend.tiles.unpin(reserved)
        return ready

    def forget(self) -> None:
        """Drop the tiles."""
        for number in [*self._composed]:  # another thread may still compose tiles
            self.backend.tiles.forget(self._parts.number, self._key(number))


@dataclass(eq=False, repr=False)
class DeviceComposite(CompositeSource):
    """Composes tiles on the device that decodes their channels, which stay there as stored.

    Parameters
    ----------
    host, view, channels, cache
        As in `CompositeSource`.
    stored : DeviceSource
        The tiles of the channels; kept as an attribute.
    """

    stored: DeviceSource
    _tiles: ComposedTiles | None = field(default=None, init=False)
    # Held while tiles of new settings replace the others.
    _renewing: threading.Lock = field(default_factory=threading.Lock, init=False)
    slowed: ClassVar[float] = DeviceSource.slowed

    @property
    def tiles(self) -> ComposedTiles:
        """The tiles of the current settings in device memory."""
        settings, color, version = self.view.state
        with self._renewing:
            before = self._tiles
            if before is not None and before.version == version:
                return before
            backend = self.stored.tiles.backend
            known, colors = {} if before is None else before.colors, {}
            for style in (settings.channels[index] for index in settings.visible):
                table, low = colors_of(style, backend.parts.images[0].dtype.itemsize)
                colors[style] = known.get(style) or (backend.send(table), low, len(table) - 1)
            if before is not None and before.settings.inverted == settings.inverted:
                shades = before.shades
            else:
                shades = backend.send(shades_of(inverted=settings.inverted))
            self._tiles = ComposedTiles(
                backend, color, self.channels, settings, version, shades, colors
            )
            if before is not None:
                before.forget()
            return self._tiles

    def table(self, _: Color) -> None:
        """Return no table, as composites are in sRGB already."""

    def read_tiles(  # type: ignore[override]
        self, keys: Sequence[TileKey], cancellation: Cancellation = NEVER
    ) -> dict[TileKey, bool]:
        """Decode the channels of whole tiles of one level, and compose the tiles.

        Returns
        -------
        dict of TileKey to bool
            Whether each tile is in device memory; those that are damaged in any channel must be
            hatched.

        Raises
        ------
        DeviceError, SlideError
            As in `DisplaySource.read_tiles`.
        """
        places = [(key.row, key.column) for key in keys]
        number, composed, stored = keys[0].image, self.tiles, self.stored.tiles
        sources = self.channels.sources(number, composed.settings.visible)
        images, failed = [image for image, _ in sources], set[tuple[int, int]]()
        if images:
            self.channels.guarded(partial(stored.decode, images, places))
        cancellation.check()
        which = np.array(places, np.int64)
        images = [image for image in images if not stored.decoded(image, which).all()]
        if images:
            failed.update(*self.channels.each(images, partial(stored.read, places=places)))
        succeeded = [place not in failed for place in places]
        composed.compose(number, which[succeeded])
        return dict(zip(keys, succeeded, strict=True))

    def _decoded(self, number: int, tiles: Collection[Tile]) -> Collection[Tile]:
        """Return the tiles whose visible channels are all in device memory."""
        places = np.array([*tiles], np.int64).reshape(-1, 2)
        for image, _ in self.channels.sources(number, self.view.settings.visible):
            places = places[self.stored.tiles.decoded(image, places)]
        return [(row, column) for row, column in places.tolist()]


def on_device(composite: CompositeSource, stored: DeviceSource) -> DeviceComposite | None:
    """Return the source for displays of a composite that draw on a device; None if they can't."""
    if not has_table(stored.tiles.backend.parts.images[0].dtype):
        return None
    found = _made.get(composite)
    if found is None or found.stored is not stored:
        found = _made[composite] = DeviceComposite(*composite.arguments, stored)
    return found
