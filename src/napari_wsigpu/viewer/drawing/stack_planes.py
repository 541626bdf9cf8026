"""Planes of a stack: the plane that a layer shows, and planes that are opened ahead."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from napari_wsigpu.display.available_tiles import AvailableTiles
from napari_wsigpu.display.composite_source import source_of
from napari_wsigpu.display.device_composite import DeviceComposite
from napari_wsigpu.display.device_picture import AvailableDeviceTiles
from napari_wsigpu.display.device_source import DeviceSource
from napari_wsigpu.display.planes import PlaneLoader, VolumeLoader
from napari_wsigpu.display.tile_priority import tiles_of_view
from napari_wsigpu.model.errors import SlideError
from napari_wsigpu.reading.stack import StackLevel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from napari.layers import Layer
    from napari.layers.utils._slice_input import _SliceInput as SliceInput
    from napari.layers.utils._slice_input import _ThickNDSlice as ThickNDSlice

    from napari_wsigpu.codecs.color import Color
    from napari_wsigpu.display.composite_source import CompositeSource
    from napari_wsigpu.display.drawing import View
    from napari_wsigpu.display.planes import Plane, Position
    from napari_wsigpu.display.source import DisplaySource
    from napari_wsigpu.model.arrays import Array
    from napari_wsigpu.reading.cache import TileKey
    from napari_wsigpu.reading.level import LevelArray
    from napari_wsigpu.slide.slide import Slide

    Source = DisplaySource | DeviceSource | CompositeSource

DrawnByDevice = DeviceSource | DeviceComposite  # the sources of a `DevicePicture`
MOST_VOLUME = 256 << 20


class ShownPlanes:
    """Opens the plane of a stack that a layer shows, and the planes that are likely next.

    Parameters
    ----------
    levels : sequence of StackLevel
        The layer's data; kept as an attribute.
    slide : Slide
        The slide that the layer shows.
    source_of : callable
        Returns the tile source for the slide and the levels of one plane.
    arrived : callable
        Called in any thread when a plane has been read.

    Attributes
    ----------
    color : str
        Color in the keys of the planes' tiles.
    """

    def __init__(
        self,
        levels: Sequence[StackLevel],
        slide: Slide,
        source_of: Callable[[Slide, list[LevelArray]], Source],
        arrived: Callable[[], None],
    ) -> None:
        self.levels = list(levels)
        self.color = shown_color(slide, levels[0])
        self._runtime = slide.runtime
        self._source_of = source_of
        self._arrived = arrived
        self._loader = PlaneLoader(self.levels, arrived)
        self._volume: VolumeLoader | None = None
        self._volume_of: tuple[int, Position, int] | None = None
        self._shown: Position | None = None
        self._previous: Position | None = None
        self._step: Position = ()
        self._ahead: dict[Position, _Ahead] = {}

    def plane(self, position: Position, until: float) -> Plane | None:
        """Return a plane, or None while it is being opened.

        Parameters
        ----------
        position : tuple of int
            Index of the plane along each axis of the stack.
        until : float
            Time of `time.perf_counter` until which to wait for the plane.

        Raises
        ------
        SlideError
            If the plane cannot be read.
        """
        if position != self._shown:
            last, self._previous = self._shown, self._shown
            self._shown = position
            self._step = () if last is None else _step(last, position)
            self._forget_ahead()
            self._request_planes()
        if self._volume is not None:
            self._volume.close()
            self._volume = self._volume_of = None
        return self._loader.get(position, until)

    def expect(self, view: View | None, most_bytes: int, *, at_rest: bool) -> None:
        """Open the planes that are likely next, and request their tiles for a view.

        While the user steps, the next plane in that direction is likely; at rest, all neighbors.
        """
        if at_rest:
            self._request_planes(at_rest=True)
        if view is None:
            return
        for position in self._next(at_rest=at_rest):
            try:
                plane = self._loader.get(position)
            except SlideError:
                continue  # reported if the user steps there
            if plane is None or position in self._ahead:
                continue
            slide: Any = plane.levels[0].slide
            ahead = self._ahead[position] = _Ahead(self._source_of(slide, plane.levels))
            tiles = available_tiles(ahead.source, slide, plane.levels, plane.overview)
            keys = tiles_of_view(tiles, view, most_bytes)
            most_bytes -= len(keys) * tiles.levels[view.level].tile_bytes
            self._runtime.fetcher.request(ahead, (), keys)

    def volume(self, displayed: Sequence[int], position: Position, level: int) -> VolumeLoader:
        """Return the volume of a level along the displayed axis, filled as planes are read.

        Parameters
        ----------
        displayed : sequence of int
            The layer's displayed axes, one of them along the planes.
        position : tuple of int
            Index along each axis of the stack; ignored along the displayed one.
        level : int
            Index in `levels`.
        """
        along = next(axis for axis in displayed if axis < len(position))
        fixed = (*position[:along], *position[along + 1 :])
        if self._volume is None or self._volume_of != (along, fixed, level):
            self.rest()
            if self._volume is not None:
                self._volume.close()
            stack = self.levels[level]
            planes = [(*fixed[:along], at, *fixed[along:]) for at in range(stack.sizes[along])]
            self._volume = VolumeLoader(stack, planes, MOST_VOLUME, self._arrived)
            self._volume_of = along, fixed, level
        return self._volume

    def rest(self) -> None:
        """Cancel all requests until a plane is shown again."""
        self._forget_ahead()
        self._shown = None
        self._loader.request(())

    def close(self) -> None:
        """Cancel all requests, and return once no read is in progress."""
        self._forget_ahead()
        self._loader.close()
        if self._volume is not None:
            self._volume.close()

    def _request_planes(self, *, at_rest: bool = False) -> None:
        planes = [self._shown, *self._next(at_rest=at_rest), self._previous]
        self._loader.request(list(dict.fromkeys(plane for plane in planes if plane is not None)))

    def _next(self, *, at_rest: bool) -> list[Position]:
        """Return the likely neighbors of the plane that is shown, most likely first."""
        at = self._shown
        if at is None:
            return []
        found = [self._step] if any(self._step) else []
        if at_rest:
            for axis in reversed(range(len(at))):
                found += [
                    tuple(sign * (axis == other) for other in range(len(at))) for sign in (1, -1)
                ]
        planes = [tuple(a + b for a, b in zip(at, step, strict=True)) for step in found]
        sizes = self.levels[0].sizes
        inside = [
            plane
            for plane in planes
            if all(0 <= index < size for index, size in zip(plane, sizes, strict=True))
        ]
        return list(dict.fromkeys(inside))

    def _forget_ahead(self) -> None:
        for ahead in self._ahead.values():
            self._runtime.fetcher.cancel(ahead)
        self._ahead.clear()


class _Ahead:
    """Receiver for tiles of a plane that is not shown yet; they are only cached."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def deliver(self, tiles: Mapping[TileKey, Array]) -> None:
        """Do nothing: the tiles are in the cache."""

    def fail(self, error: Exception) -> None:
        """Do nothing: the error is raised again when the plane is shown."""


def available_tiles(
    source: Source, slide: Slide, levels: Sequence[LevelArray], overview: Array
) -> AvailableTiles:
    """Return the index of a slide's decoded tiles, in the colors that are shown."""
    color, images = slide.display_color, [source.image_of(level) for level in levels]
    shown, channel = {number: layout for number, layout, _ in images}, images[0][2]
    common = source.slide, shown, overview, source.background(color), channel
    color = source.key_color(color)
    if isinstance(source, DrawnByDevice):
        return AvailableDeviceTiles(source.tiles, *common)
    return AvailableTiles(*common, slide.runtime.tiles, color)


def shown_color(slide: Slide, level: object) -> Color:
    """Return the color in the keys of the tiles that a layer with this level shows now."""
    composite = source_of(level)
    return (slide.displayed if composite is None else composite).key_color(slide.display_color)


class Cut(NamedTuple):
    """The part of a layer that a slice shows.

    Attributes
    ----------
    position : tuple of int
        Index of the plane along each axis of the stack; 0 along displayed axes.
    is_plane : bool
        Whether the slice shows one whole plane in two dimensions, perhaps transposed.
    is_volume : bool
        Whether the slice shows the planes of a stack in three dimensions.
    """

    position: Position
    is_plane: bool
    is_volume: bool


def cut_of(layer: Layer, slice_input: SliceInput, data_slice: ThickNDSlice) -> Cut:
    """Return the part of a layer that a slice shows."""
    base = layer.data[0]
    sizes = base.sizes if isinstance(base, StackLevel) else ()
    point = data_slice.point[: len(sizes)]
    position = tuple(0 if np.isnan(at) else int(np.round(at)) for at in point)
    inside = all(0 <= at < size for at, size in zip(position, sizes, strict=True))
    margins = np.nan_to_num([data_slice.margin_left, data_slice.margin_right])
    thin = layer.projection_mode == "none" or not margins.any()
    plane, displayed = {layer.ndim - 2, layer.ndim - 1}, set(slice_input.displayed)
    is_plane = slice_input.ndisplay == 2 and displayed == plane and thin and inside
    return Cut(position, is_plane, slice_input.ndisplay == 3 and bool(sizes) and plane < displayed)


def _step(last: Position, now: Position) -> Position:
    """Return the direction of a step along one axis; empty if several axes changed."""
    signs = tuple((b > a) - (b < a) for a, b in zip(last, now, strict=True))
    return signs if np.count_nonzero(signs) == 1 else ()


def forever() -> float:
    """Return a time of `time.perf_counter` that is never reached in practice."""
    return time.perf_counter() + 1e6
