"""Detection of truncated files: tiles that extend beyond the end of the file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from napari_wsigpu.model.arrays import Mask
    from napari_wsigpu.model.layout import LevelLayout, SlideFile, SlideLayout


def problem(layout: SlideLayout) -> str | None:
    """Return a sentence that counts the tiles beyond the end of the file, or None."""
    images = _stored(layout)
    ends = (int((image.grid.offsets + image.grid.byte_counts).max(initial=0)) for image in images)
    if len(layout.files) == 1 and all(end <= layout.file_size for end in ends):
        return None
    lost = sum(int(_beyond(image, layout.files).any(axis=0).sum()) for image in images)
    if not lost:
        return None
    total = sum(image.grid.rows * image.grid.columns for image in images)
    return (
        f"The file is truncated{_sizes(layout)}: {lost} of its {total} tiles "
        f"{'is' if lost == 1 else 'are'} missing; get a fresh copy of it."
    )


def reason(
    layout: SlideLayout, images: Mapping[int, LevelLayout], number: int, row: int, column: int
) -> str | None:
    """Return why a tile is missing if it lies beyond the end of the file; None if it does not.

    Parameters
    ----------
    layout : SlideLayout
        The slide.
    images : Mapping of int to LevelLayout
        Images of the slide by number; the result is None for any other number.
    number, row, column : int
        The tile.
    """
    image = images.get(number)
    if image is None or not _is_in_files(image):
        return None
    if not _beyond(image, layout.files, (slice(None), row, column)).any():
        return None
    return f"the file is truncated{_sizes(layout)}"


def _stored(layout: SlideLayout) -> list[LevelLayout]:
    """Return the images whose encoded tiles are in the slide's files."""
    levels = [image for level in layout.levels for image in level.stored]
    pictures = [item.image for item in layout.associated if item.data is None]
    return [image for image in (*levels, *pictures) if _is_in_files(image)]


def _is_in_files(image: LevelLayout) -> bool:
    return image.array is None and image.library is None


def _beyond(
    image: LevelLayout, files: Sequence[SlideFile], tiles: tuple[slice | int, ...] = ()
) -> Mask:
    """Return the mask of the tiles that extend beyond the end of the file in which they start."""
    offsets, counts = image.grid.offsets[tiles], image.grid.byte_counts[tiles]
    ends = np.cumsum([file.size for file in files])
    owners = np.searchsorted(ends[:-1], offsets, "right")
    return np.asarray((counts > 0) & (offsets + counts > ends[owners]))


def _sizes(layout: SlideLayout) -> str:
    """Return the actual and expected size of a slide's only file, in parentheses."""
    if len(layout.files) > 1:
        return ""
    grids = [image.grid for image in _stored(layout)]
    end = max(
        int((grid.offsets + grid.byte_counts)[grid.byte_counts > 0].max(initial=0))
        for grid in grids
    )
    return f" ({layout.file_size} of at least {end} bytes)"
