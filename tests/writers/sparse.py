"""Slides of a gigabyte that take little room and time: most tiles of level 0 are holes."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tests.writers import slides

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

TILE, STRIDE = 256, 16 << 10
DISTINCT = 8
SHORT, LONG, LONG8, ASCII = 3, 4, 16, 2
FORMATS = {SHORT: "H", LONG: "I", LONG8: "Q"}


class Level(NamedTuple):
    """One level: its size, and where its tiles begin."""

    side: int
    data: int

    @property
    def tiles(self) -> int:
        return math.ceil(self.side / TILE) ** 2


def write(path: Path, side: int = 65536, *, in_front: bool = False, step: int = 4) -> Path:
    """Write a BigTIFF in JPEG as Aperio's software does, or with all that is no tile in front.

    The tiles of all levels but the first are there; of that only those of its first rows.
    """
    sides = [side]
    while sides[-1] // step >= 1024:
        sides.append(sides[-1] // step)
    encoded = [_jpeg(slides.picture(TILE, TILE)[:, ::sign] // shade)
               for sign in (1, -1) for shade in range(1, 1 + DISTINCT // 2)]  # fmt: skip
    assert max(map(len, encoded)) <= STRIDE
    header = 16
    size = sum(len(_page(Level(side, 0), encoded, 0, 0)) for side in sides) if in_front else 0
    place = header + size
    levels = []
    pages: list[int] = []
    for side in sides:
        level = Level(side, place)
        levels.append(level)
        place += level.tiles * STRIDE
        if not in_front:
            pages.append(place)
            place += len(_page(level, encoded, 0, 0))
    if in_front:
        at = header
        for level in levels:
            pages.append(at)
            at += len(_page(level, encoded, 0, 0))
    with path.open("wb") as file:
        file.write(struct.pack("<2sHHHQ", b"II", 43, 8, 0, pages[0]))
        for index, (level, at) in enumerate(zip(levels, pages, strict=True)):
            file.seek(at)
            following = pages[index + 1] if index + 1 < len(pages) else 0
            file.write(_page(level, encoded, at, following))
            for tile in range(level.tiles if index else 4 * (level.side // TILE)):
                file.seek(level.data + tile * STRIDE)
                file.write(encoded[_kind(tile)])
        file.truncate(max(place, file.tell()))
    return path


def _kind(tile: int) -> int:
    """Return which of the distinct tiles one is."""
    return (tile + tile // 7) % DISTINCT


def _jpeg(tile: NDArray[Any]) -> bytes:
    return slides.jpeg(tile, outcolorspace="YCBCR", subsampling="420", level=50)


def _page(level: Level, encoded: list[bytes], at: int, following: int) -> bytes:
    """Return an IFD with its values behind it."""
    offsets = level.data + STRIDE * np.arange(level.tiles, dtype=np.uint64)
    description = f"Aperio Image Library v12\r\n{level.side}x{level.side}|AppMag = 40|MPP = 0.25"
    tags: list[tuple[int, int, Any]] = [
        (256, LONG, (level.side,)),
        (257, LONG, (level.side,)),
        (258, SHORT, (8, 8, 8)),
        (259, SHORT, (7,)),
        (262, SHORT, (6,)),
        (270, ASCII, description.encode() + b"\0"),
        (277, SHORT, (3,)),
        (322, LONG, (TILE,)),
        (323, LONG, (TILE,)),
        (324, LONG8, offsets.tolist()),
        (325, LONG, [len(encoded[_kind(tile)]) for tile in range(level.tiles)]),
        (530, SHORT, (2, 2)),
    ]
    entries, values = b"", b""
    start = at + 8 + 20 * len(tags) + 8
    for code, kind, content in tags:
        data = (
            content if kind == ASCII else struct.pack(f"<{len(content)}{FORMATS[kind]}", *content)
        )
        entries += struct.pack("<HHQ", code, kind, len(content))
        if len(data) > 8:
            entries += struct.pack("<Q", start + len(values))
            values += data + bytes(-len(data) % 2)
        else:
            entries += data.ljust(8, b"\0")
    return struct.pack("<Q", len(tags)) + entries + struct.pack("<Q", following) + values
