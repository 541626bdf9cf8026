"""What of a TIFF file is no tile of a level: a tile that reaches into it can't be copied.

A damaged byte count may end a tile far behind its pixels, in a text that names a patient or in the
label. Decoders don't look there, but a copy would take it along.
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

# Bytes of a value of each type.
SIZES = {
    **dict.fromkeys((1, 2, 6, 7), 1),
    **dict.fromkeys((3, 8), 2),
    **dict.fromkeys((4, 9, 11, 13), 4),
    **dict.fromkeys((5, 10, 12, 16, 17, 18), 8),
}
SUBIMAGES = int(Tag.SUB_IFDS)


class Elsewhere:
    """Finds directories, values of tags, label and macro in files that are TIFF, once for each."""

    def __init__(self) -> None:
        self._found: dict[tuple[SlideFile, ...], _Ranges] = {}

    def is_reached(self, slide: Slide, grid: TileGrid) -> bool:
        """Whether any tile of a slide's level has a byte there.

        Raises
        ------
        SlideError
            If the file can't be read.
        """
        files = slide.layout.files
        if files not in self._found:
            self._found[files] = _ranges_of(slide)
        begins, ends = self._found[files]
        stored = grid.byte_counts > 0
        first, past = grid.offsets[stored], (grid.offsets + grid.byte_counts)[stored]
        return bool((ends[np.searchsorted(begins, past) - 1] > first).any())


class _Ranges(NamedTuple):
    """Ranges of bytes, in the order of their begins, and the last end of each and those before."""

    begins: NDArray[np.int64]
    ends: NDArray[np.int64]


def _ranges_of(slide: Slide) -> _Ranges:
    found = [(-1, 0)]  # before all tiles
    begin = 0
    for file in slide.layout.files:
        found += [
            (begin + first, begin + first + length)
            for first, length in _ranges(_reader(slide, begin, file.size))
            if 0 < length <= file.size - first
        ]
        begin += file.size
    for item in slide.layout.associated:
        if item.name in PRIVATE_IMAGES and item.data is None:
            offsets, counts = item.image.grid.offsets.ravel(), item.image.grid.byte_counts.ravel()
            found += zip(offsets.tolist(), (offsets + counts).tolist(), strict=True)
    begins, ends = np.array(sorted(found), np.int64).T
    return _Ranges(begins, np.maximum.accumulate(ends))


def _reader(slide: Slide, begin: int, whole: int) -> Read:
    """Return what reads one of a slide's files: at most so many bytes from an offset."""

    def read(offset: int, size: int) -> bytes:
        size = min(size, whole - offset)
        return bytes(slide.read_bytes([(begin + offset, size)])[0]) if size > 0 else b""

    return read


def _ranges(read: Read) -> Iterator[tuple[int, int]]:
    """Yield the offset and length of each directory and of each value that lies outside of one."""
    head = read(0, 16)
    if not head.startswith(TIFF_MAGIC):
        return
    order: Order = "little" if head.startswith(b"II") else "big"
    number, room = (8, 8) if 43 in head[2:4] else (2, 4)
    entry = struct.Struct(f"{'<' if order == 'little' else '>'}HH{'Q8s' if room == 8 else 'I4s'}")

    def numbers(data: bytes, size: int) -> list[int]:
        parts = range(0, len(data) // size * size, size)
        return [int.from_bytes(data[at : at + size], order) for at in parts]

    waiting, seen = numbers(head[room:][:room], room), set[int]()
    while waiting and len(seen) < limits.images:
        place = waiting.pop()
        count = int.from_bytes(read(place, number), order)
        if place in seen or not 0 < count <= MOST_TAGS:
            continue
        seen.add(place)
        data = read(place + number, count * entry.size + room)
        yield place, number + len(data)
        entries = data[: count * entry.size]
        waiting += numbers(data[len(entries) :], room)
        for code, kind, values, value in entry.iter_unpack(
            entries[: len(entries) // entry.size * entry.size]
        ):
            size = SIZES.get(kind, 1)
            if values * size > room:
                [at] = numbers(value, room)
                yield at, values * size
                value = read(at, min(values, limits.subimages) * size) if code == SUBIMAGES else b""
            if code == SUBIMAGES:
                waiting += numbers(value[: values * size], size)
