"""Slides written as Hamamatsu's software does: one JPEG with restart markers a level."""

from __future__ import annotations

import io
import re
import struct
from typing import TYPE_CHECKING, Any

from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

ASCII, SHORT, LONG, RATIONAL, SLONG, FLOAT = 2, 3, 4, 5, 9, 11
FORMATS = {SHORT: "H", LONG: "I", RATIONAL: "II", SLONG: "i", FLOAT: "f"}


def jpeg(pixels: NDArray[Any], blocks: int = 0, subsampling: str = "4:4:4") -> bytes:
    """Encode with a restart marker after so many units of the decoder."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(
        file, "jpeg", quality=90, subsampling=subsampling, restart_marker_blocks=blocks
    )
    return file.getvalue()


def starts(data: bytes) -> list[int]:
    """Return where the restart intervals of a JPEG begin."""
    place = data.index(b"\xff\xda")
    found = [place + 2 + int.from_bytes(data[place + 2 : place + 4], "big")]
    markers = re.finditer(rb"\xff[\xd0-\xd7]", data[found[0] :])
    return found + [found[0] + marker.end() for marker in markers]


def level(
    pixels: NDArray[Any],
    blocks: int = 0,
    *,
    lens: float = 20.0,
    plane: int = 0,
    subsampling: str = "4:4:4",
    tags: dict[int, tuple[int, Any]] | None = None,
) -> tuple[bytes, dict[int, tuple[int, Any]]]:
    """Return the JPEG and the tags of a level; of the macro image with a lens of -1."""
    height, width = pixels.shape[:2]
    data = jpeg(pixels, blocks, subsampling)
    found: dict[int, tuple[int, Any]] = {
        256: (LONG, width),
        257: (LONG, height),
        258: (SHORT, (8, 8, 8)),
        259: (SHORT, 7),
        262: (SHORT, 6),
        271: (ASCII, "Hamamatsu"),
        272: (ASCII, "C12000-02"),
        277: (SHORT, 3),
        278: (LONG, height),
        279: (LONG, len(data)),
        282: (RATIONAL, (22727, 1)),
        283: (RATIONAL, (22222, 1)),
        296: (SHORT, 3),
        305: (ASCII, "NDP.scan 3"),
        306: (ASCII, "2020:01:02 03:04:05"),
        65420: (LONG, 1),
        65421: (FLOAT, lens),
        65422: (SLONG, -1234),
        65423: (SLONG, 5678),
        65424: (SLONG, plane),
        65427: (ASCII, "S-12 \xb5m"),
        65449: (ASCII, "Product=C12000\r\nNDP.S/N=000123\r\nempty=\r\nnoise\r\nlast=1=2 \r"),
    }
    if blocks:
        found[65426] = (LONG, tuple(starts(data)))
        found[65432] = (LONG, (0,) * len(starts(data)))
    return data, found | (tags or {})


def write(
    path: Path,
    pages: Sequence[tuple[bytes, dict[int, tuple[int, Any]]]],
    *,
    first: int = 12,
    short_texts_inside: bool = False,
) -> None:
    """Write a file; its first picture begins at `first`, which may lie beyond 4 GiB.

    Texts of up to four bytes lie outside the directory, or inside as in other TIFF files.
    """
    with path.open("wb") as file:
        file.write(b"II*\0" + bytes(8))
        file.seek(first)
        link = 4
        for data, tags in pages:
            start = file.tell()
            file.write(data + bytes(len(data) % 2))
            entries, high = b"", b""
            for code, (kind, values) in sorted((tags | {273: (LONG, start)}).items()):
                encoded, count = _encoded(kind, values)
                outside = kind == ASCII and not short_texts_inside
                if outside or len(encoded) > 4 + 4 * (code in (273, 279)):
                    place = file.tell()
                    file.write(encoded + bytes(len(encoded) % 2))
                    encoded = struct.pack("<Q", place)
                encoded = encoded.ljust(8, b"\0")
                entries += struct.pack("<HHI", code, kind, count) + encoded[:4]
                high += encoded[4:]
            place = file.tell()
            file.write(struct.pack("<H", len(high) // 4) + entries + bytes(8) + high)
            end = file.tell()
            file.seek(link)
            file.write(struct.pack("<Q", place))
            file.seek(end)
            link = place + 2 + len(entries)


def _encoded(kind: int, values: Any) -> tuple[bytes, int]:
    if kind == ASCII:
        data = values.encode() + b"\0"
        return data, len(data)
    values = values if isinstance(values, tuple) else (values,)
    if kind == LONG and max(values) >> 32:
        return struct.pack("<Q", *values), 1
    count = len(values) // len(FORMATS[kind])
    return struct.pack("<" + count * FORMATS[kind], *values), count
