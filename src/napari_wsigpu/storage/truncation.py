"""Tiles that lie, by what a slide says, beyond the end of its file: a copy that was cut off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from napari_wsigpu.model.layout import LevelLayout, SlideFile, SlideLayout


def problem(layout: SlideLayout) -> str | None:
    """Say that tiles of a slide lie beyond the end of its file; None if none does."""
    images = _stored(layout)
    ends = (int((image.grid.offsets + image.grid.byte_counts).max(initial=0)) for image in images)
    if len(layout.files) == 1 and all(end <= layout.file_size for end in ends):
        return None
    lost = sum(int(_beyond(image, layout.files).any(axis=0).sum()) for image in images)
    if not lost:
        return None
    whole = sum(image.grid.rows * image.grid.columns for image in images)
    return (
        f"The file is cut off{_figures(layout)}, so that {lost} of its {whole} tiles can't be "
        "shown; get a fresh copy of it."
    )


def reason(
    layout: SlideLayout, images: Mapping[int, LevelLayout], number: int, row: int, column: int
) -> str | None:
    """Say that a tile of one of a slide's images lies beyond the file's end; None if it does not.

    Parameters
    ----------
    layout : SlideLayout
        The slide.
    images : Mapping of int to LevelLayout
        Its images by their number; of others nothing is said.
    number, row, column : int
        The tile.
    """
    image = images.get(number)
    if image is None or not _lies_in_files(image):
        return None
    if not _beyond(image, layout.files, (slice(None), row, column)).any():
        return None
    return f"the file is cut off{_figures(layout)}"


def _stored(layout: SlideLayout) -> list[LevelLayout]:
    """Return the images that lie encoded in the slide's files."""
    levels = [image for level in layout.levels for image in level.stored]
    pictures = [item.image for item in layout.associated if item.data is None]
    return [image for image in (*levels, *pictures) if _lies_in_files(image)]


def _lies_in_files(image: LevelLayout) -> bool:
    return image.array is None and image.library is None


def _beyond(image: LevelLayout, files: Sequence[SlideFile], which: Any = ...) -> NDArray[np.bool_]:
    """Whether each segment reaches beyond the end of the file in which it begins."""
    offsets, counts = image.grid.offsets[which], image.grid.byte_counts[which]
    ends = np.cumsum([file.size for file in files])
    owners = np.searchsorted(ends[:-1], offsets, "right")
    return np.asarray((counts > 0) & (offsets + counts > ends[owners]))


def _figures(layout: SlideLayout) -> str:
    """Return how much of the only file is there."""
    if len(layout.files) > 1:
        return ""
    grids = [image.grid for image in _stored(layout)]
    end = max(
        int((grid.offsets + grid.byte_counts)[grid.byte_counts > 0].max(initial=0))
        for grid in grids
    )
    return f" ({layout.file_size} of at least {end} bytes are there)"
