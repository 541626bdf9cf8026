"""Which plane of a stack a layer's slice shows, and which are at hand when it steps on."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_wsigpu.display.at_hand import TilesAtHand
from napari_wsigpu.display.device_picture import DeviceTilesAtHand
from napari_wsigpu.display.device_source import DeviceSource
from napari_wsigpu.display.planes import PlaneLoader, VolumeLoader
from napari_wsigpu.display.wanted import tiles_of_view
from napari_wsigpu.model.errors import PlaneError, SlideError
from napari_wsigpu.reading.stack import StackLevel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from napari import Viewer
    from napari.layers import Layer
    from numpy.typing import NDArray

    from napari_wsigpu.display.drawing import View
    from napari_wsigpu.display.planes import Plane, Position
    from napari_wsigpu.display.source import DisplaySource
    from napari_wsigpu.model.layout import Planes
    from napari_wsigpu.reading.cache import TileKey
    from napari_wsigpu.reading.level import LevelArray
    from napari_wsigpu.slide.slide import Slide

    Source = DisplaySource | DeviceSource

MOST_VOLUME = 256 << 20


class ShownPlanes:
    """The planes of a layer's stack that are shown, or are likely to be next.

    Parameters
    ----------
    levels : sequence of StackLevel
        The layer's data; kept as an attribute.
    slide : Slide
        What the layer shows.
    source_of : callable
        Returns what has the tiles of a plane where they are drawn, of its slide and levels.
    landed : callable
        Called by any thread when a plane has come.

    Attributes
    ----------
    color : str
        The slide's `display_color`, which planes were read in.
    """

    def __init__(
        self,
        levels: Sequence[StackLevel],
        slide: Slide,
        source_of: Callable[[Slide, list[LevelArray]], Source],
        landed: Callable[[], None],
    ) -> None:
        self.levels = list(levels)
        self.color = slide.display_color
        self._runtime = slide.runtime
        self._source_of = source_of
        self._landed = landed
        self._loader = PlaneLoader(self.levels, landed)
        self._volume: VolumeLoader | None = None
        self._volume_of: Any = None
        self._at: Position | None = None
        self._before: Position | None = None
        self._step: Position = ()
        self._ahead: dict[Position, _Ahead] = {}

    def plane(self, position: Position, until: float) -> Plane | None:
        """Return a plane that is to be shown, None while it is opened.

        Parameters
        ----------
        position : tuple of int
            The plane.
        until : float
            By `time.perf_counter`, how long to wait for it.

        Raises
        ------
        SlideError
            If it can't be read.
        """
        if position != self._at:
            last, self._before = self._at, self._at
            self._at = position
            self._step = () if last is None else _step(last, position)
            self._forget_ahead()
            self._want()
        if self._volume is not None:
            self._volume.close()
            self._volume = self._volume_of = None
        return self._loader.get(position, until)

    def expect(self, view: View | None, most_bytes: int, *, at_rest: bool) -> None:
        """Open the planes that are likely next, and have what a view needs of them fetched.

        These are the next one in the direction of the last step; at rest, all beside this one.
        """
        if at_rest:
            self._want(at_rest=True)
        if view is None:
            return
        for position in self._next(at_rest=at_rest):
            try:
                plane = self._loader.get(position)
            except SlideError:
                continue  # whoever steps there is told
            if plane is None or position in self._ahead:
                continue
            slide: Any = plane.levels[0].slide
            ahead = self._ahead[position] = _Ahead(self._source_of(slide, plane.levels))
            tiles = tiles_at_hand(ahead.source, slide, plane.levels, plane.overview)
            keys = tiles_of_view(tiles, view, most_bytes)
            most_bytes -= len(keys) * tiles.levels[view.level].tile_bytes
            self._runtime.fetcher.want(ahead, (), keys)

    def volume(self, displayed: Sequence[int], position: Position, level: int) -> VolumeLoader:
        """Return all planes of a level along the axis that is displayed, as far as they are read.

        Parameters
        ----------
        displayed : sequence of int
            The layer's axes that are displayed, one of them along the planes.
        position : tuple of int
            Where the volume lies along the others.
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
            self._volume = VolumeLoader(stack, planes, MOST_VOLUME, self._landed)
            self._volume_of = along, fixed, level
        return self._volume

    def rest(self) -> None:
        """Want no planes until one is shown again."""
        self._forget_ahead()
        self._at = None
        self._loader.want(())

    def close(self) -> None:
        """Want nothing any more, and return once nothing is read."""
        self._forget_ahead()
        self._loader.close()
        if self._volume is not None:
            self._volume.close()

    def _want(self, *, at_rest: bool = False) -> None:
        planes = [self._at, *self._next(at_rest=at_rest), self._before]
        self._loader.want(list(dict.fromkeys(plane for plane in planes if plane is not None)))

    def _next(self, *, at_rest: bool) -> list[Position]:
        """Return the planes beside the one that is shown, the likeliest first."""
        at = self._at
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
            if all(0 <= place < size for place, size in zip(plane, sizes, strict=True))
        ]
        return list(dict.fromkeys(inside))

    def _forget_ahead(self) -> None:
        for ahead in self._ahead.values():
            self._runtime.fetcher.forget(ahead)
        self._ahead.clear()


class _Ahead:
    """A display that nobody sees: has tiles of a plane decoded before it is shown."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def land(self, tiles: Mapping[TileKey, NDArray[Any]]) -> None:
        """Leave them in the cache."""

    def fail(self, error: Exception) -> None:
        """Leave it to whoever shows the plane."""


def stacked(
    slide: Slide, levels: Sequence[LevelArray], image_of: Callable[[Slide], Slide] | None = None
) -> list[StackLevel]:
    """Return levels with axes for the planes of a slide.

    Parameters
    ----------
    slide : Slide
        The slide.
    levels : sequence of LevelArray
        Levels of the plane that it shows.
    image_of : callable, optional
        Returns the image that they are of, for each plane; by default the plane itself.
    """

    def level_of(shown: LevelArray, position: Position) -> LevelArray:
        plane = slide.plane(**dict(zip(slide.planes.names, position, strict=True)))
        image = plane if image_of is None else image_of(plane)
        found = image.level_array(shown.number, shown.channel, tolerant=True)
        if found.shape != shown.shape:
            where = ", ".join(f"{name} = {at}" for name, at in zip(names, position, strict=True))
            raise PlaneError(
                f"The plane {where} of '{slide.path}' has another size than the others; "
                "read it in a script by slide.plane."
            )
        return found

    names, sizes = slide.planes.names, tuple(slide.planes.sizes.values())
    blank = 0 if image_of is not None else slide.displayed.background("stored")
    return [
        StackLevel(level, sizes, partial(level_of, level), _of_channel(blank, level))
        for level in levels
    ]


def _of_channel(value: Any, level: LevelArray) -> Any:
    """Return a pixel's value in the channel that a level shows, or in all."""
    if level.channel is None:
        return value
    return np.broadcast_to(value, level.layout.channels)[level.channel]


def along_planes(planes: Planes, attributes: dict[str, Any]) -> dict[str, Any]:
    """Return a layer's attributes with those of axes along planes before its own."""
    if not planes.names:
        return attributes
    steps = {"t": planes.time_step, "z": planes.z_spacing}
    units = {"t": "second", "z": "micrometer"}
    known = [name for name in planes.names if steps[name]]
    if known or "units" in attributes:
        of_pixels = attributes.get("units", ("pixel", "pixel"))
        of_planes = (units[name] if name in known else "pixel" for name in planes.names)
        attributes = attributes | {"units": (*of_planes, *of_pixels)}
    return attributes | {
        "scale": (*(steps[name] or 1.0 for name in planes.names), *attributes["scale"]),
        "translate": (
            *(planes.starts.get(name, 0.0) if steps[name] else 0.0 for name in planes.names),
            *attributes["translate"],
        ),
        "axis_labels": (*planes.names, *attributes["axis_labels"]),
    }


def tiles_at_hand(
    source: Source, slide: Slide, levels: Sequence[LevelArray], overview: NDArray[Any]
) -> TilesAtHand:
    """Return which tiles of a slide are where they are drawn, in the colours that are shown."""
    color, shown = slide.display_color, {level.number: level.layout for level in levels}
    common = source.number(color), shown, overview, source.background(color), levels[0].channel
    if isinstance(source, DeviceSource):
        return DeviceTilesAtHand(source.tiles, *common)
    return TilesAtHand(*common, slide.runtime.tiles)


def position_of(data_slice: Any, levels: Sequence[Any]) -> Position:
    """Return which plane is sliced; along axes that are displayed, the first one."""
    sizes = levels[0].sizes if isinstance(levels[0], StackLevel) else ()
    point = data_slice.point[: len(sizes)]
    return tuple(0 if np.isnan(at) else int(np.round(at)) for at in point)


def is_one_plane(layer: Layer, slice_input: Any, data_slice: Any) -> bool:
    """Whether a slice of a layer shows one plane of a slide, flat; it may be transposed."""
    margins = np.nan_to_num([data_slice.margin_left, data_slice.margin_right])
    thick = layer.projection_mode != "none" and margins.any()
    last = {layer.ndim - 2, layer.ndim - 1}
    return slice_input.ndisplay == 2 and not thick and set(slice_input.displayed) == last


def is_volume(layer: Layer, slice_input: Any) -> bool:
    """Whether a slice of a layer shows planes of a stack in three dimensions."""
    in_space = slice_input.ndisplay == 3 and isinstance(layer.data[0], StackLevel)
    return in_space and {layer.ndim - 2, layer.ndim - 1} < set(slice_input.displayed)


def is_inside(position: Position, levels: Sequence[Any]) -> bool:
    """Whether there is such a plane."""
    sizes = levels[0].sizes if position else ()
    return all(0 <= at < size for at, size in zip(position, sizes, strict=True))


def show_plane(viewer: Viewer, layer: Layer, slide: Slide) -> None:
    """Move a viewer's sliders to the plane that a slide shows by itself."""
    names = slide.planes.names
    at = {"z": slide.planes.z, "t": slide.planes.t}
    world = layer.data_to_world([*(at[name] for name in names), 0, 0])
    beyond = viewer.dims.ndim - layer.ndim
    for axis in range(len(names)):
        viewer.dims.set_point(beyond + axis, world[axis])


def shown_plane(viewer: Viewer, layer: Layer, slide: Slide) -> dict[str, int]:
    """Return where a viewer's sliders are, as "z" and "t" of the slide; nothing without planes."""
    names = slide.planes.names
    if layer.ndim != len(names) + 2:
        return {}
    at = layer.world_to_data(viewer.dims.point)[: len(names)]
    return {
        name: int(np.clip(np.round(place), 0, slide.planes.sizes[name] - 1))
        for name, place in zip(names, at, strict=True)
    }


def _step(last: Position, now: Position) -> Position:
    """Return the direction of a step along one axis; nothing where it was no step."""
    moved = tuple(b - a for a, b in zip(last, now, strict=True))
    return tuple(map(_sign, moved)) if np.count_nonzero(moved) == 1 else ()


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)


def forever() -> float:
    """Return a time that does not come, by `time.perf_counter`."""
    return time.perf_counter() + 1e6
