"""Mosaics: levels composed of images, or parts of images, on a background."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from napari_wsigpu.model.geometry import Rect
    from napari_wsigpu.model.layout import LevelLayout


class NamedPart(NamedTuple):
    """An image in a mosaic, and its name for messages."""

    name: str
    image: LevelLayout


def parts_of(pyramid: Sequence[LevelLayout]) -> Mapping[int, NamedPart]:
    """Return the images of all mosaics, numbered after the levels."""
    found: list[NamedPart] = []
    for index, level in enumerate(pyramid):
        if level.parts:
            images = level.stored
            several = len(images) > 1
            for count, image in enumerate(images):
                name = f"level {index}, part {count}" if several else f"level {index}"
                found.append(NamedPart(name, image))
    return dict(enumerate(found, len(pyramid)))


def touches(mosaic: LevelLayout, rect: Rect) -> bool:
    """Return whether any image of a mosaic touches a region."""
    return any(part.touches(rect) for part in mosaic.parts)
