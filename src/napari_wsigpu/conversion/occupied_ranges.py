"""Byte ranges of a TIFF file that hold metadata or private images instead of tiles.

A damaged byte count may extend a tile far beyond its data, into text that names a patient or into
the label image. Decoders ignore those bytes, but a copy would include them, so tiles that overlap
such a range are encoded again.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from napari_wsigpu.formats.tiff.claims import MOST_TAGS
from napari_wsigpu.model.limits import limits
from napari_wsigpu.model.privacy import PRIVATE_IMAGES
from napari_wsigpu.model.tags import TIFF_MAGIC, Tag

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from napari_wsigpu.model.layout import SlideFile, TileGrid
    from napari_wsigpu.slide.slide import Slide

    Read = Callable[[int, int], bytes]
    Order = Literal["little", "big"]

# Bytes per value of each TIFF field type (TIFF 6.0, section 2; 13 and 16 to 18 from extensions).
SIZES = {
    **dict.fromkeys((1, 2, 6, 7), 1),
    **dict.fromkeys((3, 8), 2),
    **dict.fromkeys((4, 9, 11, 13), 4),
    **dict.fromkeys((5, 10, 12, 16, 17, 18), 8),
}
SUBIMAGES = int(Tag.SUB_IFDS)


class OccupiedRanges:
    """Locates directories, tag values, label and macro in TIFF files, and caches them per slide."""

    def __init__(self) -> None:
        self._found: dict[tuple[SlideFile, ...], _Ranges] = {}

    def overlap(self, slide: Slide, grid: TileGrid) -> bool:
        """Whether any tile of a level overlaps one of these ranges.

        Raises
        ------
        SlideError
            If the file cannot be read.
        """
        files = slide.layout.files
        if files not in self._found:
            self._found[files] = _ranges_of(slide)
        starts, ends = self._found[files]
        stored = grid.byte_counts > 0
        first, past = grid.offsets[stored], (grid.offsets + grid.byte_counts)[stored]
        # `ends` are running maxima, so only the last range that starts before the end of a tile
        # needs to be checked.
        return bool((ends[np.searchsorted(starts, past) - 1] > first).any())


class _Ranges(NamedTuple):
    """Byte ranges sorted by start; `ends[i]` is the largest end of the ranges 0 to i."""

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


def _ranges_of(slide: Slide) -> _Ranges:
    found = [(-1, 0)]  # sentinel before all tiles, so that each search finds a range
    base = 0
    for file in slide.layout.files:
        found += [
            (base + first, base + first + length)
            for first, length in _ranges(_reader(slide, base, file.size))
            if 0 < length <= file.size - first
        ]
        base += file.size
    for item in slide.layout.associated:
        if item.name in PRIVATE_IMAGES and item.data is None:
            offsets, counts = item.image.grid.offsets.ravel(), item.image.grid.byte_counts.ravel()
            found += zip(offsets.tolist(), (offsets + counts).tolist(), strict=True)
    starts, ends = np.array(sorted(found), np.int64).T
    return _Ranges(starts, np.maximum.accumulate(ends))


def _reader(slide: Slide, base: int, file_size: int) -> Read:
    """Return a function that reads up to `size` bytes at an offset of one of the slide's files."""

    def read(offset: int, size: int) -> bytes:
        size = min(size, file_size - offset)
        return bytes(slide.read_bytes([(base + offset, size)])[0]) if size > 0 else b""

    return read


def _ranges(read: Read) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) of each directory, and of each tag value stored outside it."""
    head = read(0, 16)
    if not head.startswith(TIFF_MAGIC):
        return
    order: Order = "little" if head.startswith(b"II") else "big"
    # Entry counts and offsets have 8 bytes each in BigTIFF (version 43), 2 and 4 bytes in TIFF.
    count_size, room = (8, 8) if 43 in head[2:4] else (2, 4)
    entry = struct.Struct(f"{'<' if order == 'little' else '>'}HH{'Q8s' if room == 8 else 'I4s'}")

    def numbers(data: bytes, size: int) -> list[int]:
        parts = range(0, len(data) // size * size, size)
        return [int.from_bytes(data[at : at + size], order) for at in parts]

    waiting, seen = numbers(head[room:][:room], room), set[int]()
    while waiting and len(seen) < limits.images:
        directory = waiting.pop()
        count = int.from_bytes(read(directory, count_size), order)
        if directory in seen or not 0 < count <= MOST_TAGS:
            continue
        seen.add(directory)
        data = read(directory + count_size, count * entry.size + room)
        yield directory, count_size + len(data)
        entries = data[: count * entry.size]
        waiting += numbers(data[len(entries) :], room)
        whole = entries[: len(entries) // entry.size * entry.size]
        for code, kind, values, value in entry.iter_unpack(whole):
            size = SIZES.get(kind, 1)
            if values * size > room:
                [at] = numbers(value, room)
                yield at, values * size
                value = read(at, min(values, limits.subimages) * size) if code == SUBIMAGES else b""
            if code == SUBIMAGES:
                waiting += numbers(value[: values * size], size)
