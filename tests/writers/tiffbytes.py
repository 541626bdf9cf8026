"""TIFF files written byte by byte: any tag, any lie, any encoded segment."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

BYTE, ASCII, SHORT, LONG, RATIONAL, UNDEFINED, SLONG, FLOAT, LONG8 = 1, 2, 3, 4, 5, 7, 9, 11, 16
FORMATS = {SHORT: "H", LONG: "I", SLONG: "i", FLOAT: "f", LONG8: "Q"}
SAMPLE_FORMAT = {"u": 1, "i": 2, "f": 3}


@dataclass
class Page:
    """Tags of one image (number: (type, values)), its encoded segments and its SubIFDs."""

    tags: dict[int, tuple[int, Any]]
    segments: Sequence[bytes]
    subifds: Sequence[Page] = field(default_factory=list)


def tiles(
    pixels: NDArray[Any], size: tuple[int, int], *, cut: bool = False
) -> Iterator[NDArray[Any]]:
    """Cut (height, width, samples) into tiles; edge tiles repeat the last pixels, or are cut."""
    height, width = pixels.shape[:2]
    for y in range(0, height, size[0]):
        for x in range(0, width, size[1]):
            tile = pixels[y : y + size[0], x : x + size[1]]
            if not cut:
                missing = (size[0] - tile.shape[0], size[1] - tile.shape[1])
                tile = np.pad(tile, ((0, missing[0]), (0, missing[1]), (0, 0)), "edge")
            yield np.ascontiguousarray(tile)


def deflate(tile: NDArray[Any]) -> bytes:
    """Encode a tile losslessly, as libtiff reads it too."""
    return zlib.compress(tile.tobytes())


def page(
    pixels: NDArray[Any],
    encode: Callable[[NDArray[Any]], bytes],
    *,
    compression: int = 1,
    photometric: int = 2,
    tile: tuple[int, int] | None = (32, 48),
    rows_per_strip: int = 0,
    planar: bool = False,
    cut_edges: bool = False,
    missing: Collection[int] = (),
    description: str | bytes = "",
    subfile_type: int = 0,
    subifds: Sequence[Page] = (),
    more: dict[int, tuple[int, Any]] | None = None,
) -> Page:
    """Encode a picture of shape (height, width, samples) as tiles, or strips if `tile` is None."""
    height, width, samples = pixels.shape
    size = tile or (rows_per_strip or height, width)
    planes = [pixels[..., i : i + 1] for i in range(samples)] if planar else [pixels]
    parts = [part for plane in planes for part in tiles(plane, size, cut=cut_edges or not tile)]
    segments = [b"" if index in missing else encode(part) for index, part in enumerate(parts)]
    tags: dict[int, tuple[int, Any]] = {
        254: (LONG, subfile_type),
        256: (LONG, width),
        257: (LONG, height),
        258: (SHORT, (8 * pixels.dtype.itemsize,) * samples),
        259: (SHORT, compression),
        262: (SHORT, photometric),
        277: (SHORT, samples),
        284: (SHORT, 2 if planar else 1),
        339: (SHORT, (SAMPLE_FORMAT[pixels.dtype.kind],) * samples),
    }
    if description:
        tags[270] = (ASCII, description)
    extra = samples - (3 if photometric in (2, 6) else 1)
    if extra > 0:
        tags[338] = (SHORT, (0,) * extra)
    tags |= {322: (LONG, size[1]), 323: (LONG, size[0])} if tile else {278: (LONG, size[0])}
    return Page(tags | (more or {}), segments, subifds)


def write(
    path: Path, pages: Sequence[Page], *, byteorder: str = "<", bigtiff: bool = False
) -> Path:
    """Write pages one after another as the main chain of a file."""
    writer = _Writer(byteorder, bigtiff=bigtiff)
    place = 8 if bigtiff else 4
    for item in pages:
        place = writer.add(item, place)
    path.write_bytes(writer.data)
    return path


class _Writer:
    def __init__(self, byteorder: str, *, bigtiff: bool) -> None:
        self.byteorder = byteorder
        self.bigtiff = bigtiff
        self.data = bytearray(b"II" if byteorder == "<" else b"MM")
        self.data += self.pack("HHH", 43, 8, 0) if bigtiff else self.pack("H", 42)
        self.data += self.offset(0)

    def pack(self, fmt: str, *values: int) -> bytes:
        return struct.pack(self.byteorder + fmt, *values)

    def offset(self, value: int) -> bytes:
        return self.pack("Q" if self.bigtiff else "I", value)

    def append(self, data: bytes) -> int:
        self.data += b"\0" * (len(self.data) % 2)
        place = len(self.data)
        self.data += data
        return place

    def add(self, item: Page, link: int) -> int:
        """Append a page, write its place at `link`, and return where to link the next."""
        tags = dict(item.tags)
        places, counts = (324, 325) if 322 in tags else (273, 279)
        kind = LONG8 if self.bigtiff else LONG
        offsets = [self.append(segment) if segment else 0 for segment in item.segments]
        tags.setdefault(places, (kind, offsets))
        tags.setdefault(counts, (kind, [len(segment) for segment in item.segments]))
        if item.subifds:
            tags[330] = (kind, [0] * len(item.subifds))
        subifd_links: list[int] = []
        room, entries = (8, b"") if self.bigtiff else (4, b"")
        for code, (dtype, values) in sorted(tags.items()):
            count, encoded = self.encode(dtype, values)
            if len(encoded) > room:
                place = self.append(encoded)
                field_bytes = self.offset(place)
            else:
                place = -1 - len(entries) - (12 if self.bigtiff else 8)
                field_bytes = encoded.ljust(room, b"\0")
            if code == 330:
                subifd_links = [place + i * room for i in range(count)]
            entries += self.pack("HHQ" if self.bigtiff else "HHI", code, dtype, count)
            entries += field_bytes
        head = self.pack("Q" if self.bigtiff else "H", len(tags))
        start = self.append(head + entries + self.offset(0))
        self.data[link : link + room] = self.offset(start)
        for child, place in zip(item.subifds, subifd_links[: len(item.subifds)], strict=True):
            self.add(child, place if place >= 0 else start + len(head) - place - 1)
        return start + len(head) + len(entries)

    def encode(self, dtype: int, values: Any) -> tuple[int, bytes]:
        if dtype == ASCII:
            values = values.encode() if isinstance(values, str) else values
            return len(values) + 1, values + b"\0"
        if dtype in (BYTE, UNDEFINED):
            return len(values), bytes(values)
        values = values if isinstance(values, tuple | list) else (values,)
        if dtype == RATIONAL:
            parts = [Fraction(value).limit_denominator(10**6) for value in values]
            pairs = [number for part in parts for number in (part.numerator, part.denominator)]
            return len(values), self.pack(f"{len(pairs)}I", *pairs)
        return len(values), self.pack(f"{len(values)}{FORMATS[dtype]}", *values)
