"""Layer axes along the planes of a stack, and the plane that a viewer shows."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.model.errors import PlaneError
from napari_wsigpu.reading.stack import StackLevel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from napari import Viewer
    from napari.layers import Layer

    from napari_wsigpu.display.planes import Position
    from napari_wsigpu.model.arrays import Array
    from napari_wsigpu.model.layout import Planes
    from napari_wsigpu.reading.level import LevelArray
    from napari_wsigpu.slide.slide import Slide
    from napari_wsigpu.viewer.layers.placement import Attributes


def same_level(plane: Slide, shown: LevelArray) -> LevelArray:
    """Return the level of a plane that corresponds to a level of another plane."""
    return plane.level_array(shown.number, shown.channel, tolerant=True)


def stacked(
    slide: Slide,
    levels: Sequence[LevelArray],
    of_plane: Callable[[Slide, LevelArray], LevelArray] = same_level,
    blank: float | Array | None = None,
) -> list[StackLevel]:
    """Add axes for a slide's planes to its levels.

    Parameters
    ----------
    slide : Slide
        The slide.
    levels : sequence of LevelArray
        Levels of the plane that the slide shows.
    of_plane : callable
        ``of_plane(plane, level)`` returns the level of a plane that corresponds to one of these.
    blank : int, float or ndarray, shape (channels,), optional
        Value of pixels in planes that the slide lacks; by default its background.
    """

    def level_of(shown: LevelArray, position: Position) -> LevelArray:
        plane = slide.plane(**dict(zip(slide.planes.names, position, strict=True)))
        found = of_plane(plane, shown)
        if found.shape != shown.shape:
            where = ", ".join(f"{name} = {at}" for name, at in zip(names, position, strict=True))
            raise PlaneError(
                f"The plane {where} of '{slide.path}' differs in size from the others; "
                "read it in a script with slide.plane."
            )
        return found

    names, sizes = slide.planes.names, tuple(slide.planes.sizes.values())
    blank = slide.displayed.background("stored") if blank is None else blank
    return [
        StackLevel(level, sizes, partial(level_of, level), _of_channel(blank, level))
        for level in levels
    ]


def _of_channel(value: float | Array, level: LevelArray) -> float | Array:
    """Return the part of a pixel value that a level shows: one channel, or all."""
    if level.channel is None:
        return value
    chosen: float | Array = np.broadcast_to(value, level.layout.channels)[level.channel]
    return chosen


def along_planes(planes: Planes, attributes: Attributes) -> Attributes:
    """Prepend the axes of planes to a flat layer's attributes."""
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


def show_plane(viewer: Viewer, layer: Layer, slide: Slide) -> None:
    """Move a viewer's sliders to the plane that the slide shows by default."""
    names = slide.planes.names
    at = {"z": slide.planes.z, "t": slide.planes.t}
    world = layer.data_to_world([*(at[name] for name in names), 0, 0])
    beyond = viewer.dims.ndim - layer.ndim
    for axis in range(len(names)):
        viewer.dims.set_point(beyond + axis, world[axis])


def shown_plane(viewer: Viewer, layer: Layer, slide: Slide) -> dict[str, int]:
    """Return the indices "z" and "t" of the plane that a viewer shows, if the slide has planes."""
    names = slide.planes.names
    if layer.ndim != len(names) + 2:
        return {}
    at = layer.world_to_data(viewer.dims.point)[: len(names)]
    return {
        name: int(np.clip(np.round(index), 0, slide.planes.sizes[name] - 1))
        for name, index in zip(names, at, strict=True)
    }
