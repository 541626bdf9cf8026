"""Writes Olympus slides: the tags of a .vsi file, and tiles in .ets files."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

RAW, JPEG, JPEG_2000 = 0, 2, 3
BLOCK = 1 << 28  # a tag that holds others
NUMBERED = 1 << 27
INLINE = 1 << 30


class Tile(NamedTuple):
    """An encoded tile, and its coordinates: column, row, further ones, and level if any."""

    coordinates: Sequence[int]
    data: bytes


def ets(
    path: Path,
    tiles: Sequence[Tile],
    size: tuple[int, int],
    *,
    compression: int = JPEG,
    samples: int = 3,
    kind: int = 2,
    color: int = 4,
    pyramid: bool = True,
) -> None:
    """Write the tiles of a picture, of that (width, height)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    dimensions = len(tiles[0].coordinates)
    inner = struct.pack("<4s9I", b"ETS\0", 3, kind, samples, color, compression, 90, *size, 1)
    inner += bytes(4 * 27) + struct.pack("<II", 0, int(pyramid)) + bytes(72)
    content = bytearray(64) + inner
    table = b""
    for tile in tiles:
        table += struct.pack(
            f"<I{dimensions}iqII", dimensions, *tile.coordinates, len(content), len(tile.data), 0
        )
        content += tile.data
    content[:64] = struct.pack(
        "<4sIIIQIIQIIQII", b"SIS\0", 64, 2, dimensions, 64, len(inner), 0, len(content),
        len(tiles), 0, 0, 0, 0,
    )  # fmt: skip
    path.write_bytes(content + table)


def block(tags: Sequence[tuple[int, bytes]]) -> bytes:
    """Write tags: each is what precedes its distance to the next one, and what follows it."""
    content = b""
    begins = [24]
    for _, tag in tags:
        begins.append(begins[-1] + len(tag))
    for index, (_, tag) in enumerate(tags):
        following = begins[index + 1] if index + 1 < len(tags) else 0
        content += tag[:8] + struct.pack("<i", following) + tag[12:]
    return struct.pack("<HHIqII", 24, 21321, 1, 24, len(tags), 0) + content


def tag(number: int, kind: int, data: bytes, second: int | None = None) -> tuple[int, bytes]:
    """Write a tag with its data."""
    kind |= 0 if second is None else NUMBERED
    more = b"" if second is None else struct.pack("<i", second)
    return number, struct.pack("<IiiI", kind, number, 0, len(data)) + more + data


def whole(number: int, value: int) -> tuple[int, bytes]:
    return number, struct.pack("<IiiI", INLINE | 5, number, 0, value)


def real(number: int, value: float) -> tuple[int, bytes]:
    return tag(number, 10, struct.pack("<d", value))


def tree(number: int, *tags: tuple[int, bytes], second: int | None = None) -> tuple[int, bytes]:
    """Write a tag that holds others."""
    return tag(number, BLOCK | (1 if second is None else 0), block(tags), second)


def text(number: int, value: str) -> tuple[int, bytes]:
    return tag(number, 8192, (value + "\0").encode("utf-16-le"))


def image(
    size: tuple[int, int],
    dimensions: Sequence[int] = (),
    names: Sequence[str] = (),
    kind: int = 0,
    *,
    origin: tuple[int, int] = (0, 0),
    number: int = 0,
    times: Sequence[float] = (),
    boundary: Sequence[float] = (),
) -> tuple[int, bytes]:
    """Write what is said of a picture: its size, what further coordinates mean, channels' names.

    `boundary` is written as doubles, instead of the size as integers.
    """
    described = []
    for index, meaning in enumerate(dimensions):
        step = tree(2013, text(268435456, "10^-9m^1"), real(268435458, -1500.0))
        parameters = [tree(2008, whole(2023, meaning), *[step] * (meaning == 1), second=0)]
        if meaning == 4:
            parameters = [
                tree(2008, whole(2023, meaning), text(2419, name), second=number)
                for number, name in enumerate(names)
            ]
        described.append(tree(2007, *parameters, second=index))
    frame = tree(
        2018,
        tag(2053, 262, struct.pack("<4d", *boundary))
        if boundary
        else tag(2053, 259, struct.pack("<4i", 0, 0, *size)),
        tag(2410, 8199, struct.pack("<2i", *origin)),
        (20005, struct.pack("<IiiI", INLINE | 12, 20005, 0, 1)),
    )
    stack = tree(
        2005,
        tag(2019, 260, struct.pack("<2d", 0.25, 0.26)),
        text(2020, "10^-6m^1"),
        whole(2074, kind),
        tree(2043, real(120060, 20.0)),
    )
    frames = [
        tree(2006, tree(2017, text(268435456, "10^-3s^1"), real(268435458, time))) for time in times
    ]
    taken = [
        tree(2002, *((frame,) if index == 0 else ()), *frames[index : index + 1], second=index)
        for index in range(max(1, len(frames)))
    ]
    return tree(2001, *taken, stack, *described, second=number)


def vsi(path: Path, *images: tuple[int, bytes]) -> None:
    """Write the file of tags, which is a TIFF of a page with one pixel, too."""
    document = tree(2, text(11, "patient.vsi"), text(15, "Dr Who"), text(34, "cellSens"))
    tags = block([document, tree(2000, *images, second=0)])
    page = 8 + len(tags)
    fields = [(256, 4, 1), (257, 4, 1), (258, 3, 8), (259, 3, 1), (262, 3, 1), (273, 4, 0)]
    fields += [(277, 3, 1), (278, 4, 1), (279, 4, 1)]
    entries = b"".join(struct.pack("<HHII", code, kind, 1, value) for code, kind, value in fields)
    head = struct.pack("<2sHI", b"II", 42, page)
    path.write_bytes(head + tags + struct.pack("<H", len(fields)) + entries + bytes(4))
