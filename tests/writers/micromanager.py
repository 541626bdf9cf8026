"""Stacks in several files as Micro-Manager writes them: multipage TIFF, and NDTiff version 3."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

IFD = 162  # bytes: 13 entries


def write_stack(
    folder: Path, channels: NDArray[Any], summary: dict[str, Any] | None = None
) -> list[Path]:
    """Write (channels, height, width), each channel to a file of its own."""
    stated = {
        "MicroManagerVersion": "1.4",
        "Prefix": "img",
        "Frames": 1,
        "Slices": 1,
        "Positions": 1,
        "Channels": len(channels),
        "TimeFirst": True,
        "SlicesFirst": False,
    } | (summary or {})
    text = json.dumps(stated).encode()
    text += b" " * (len(text) % 2)
    paths = []
    for number, plane in enumerate(channels):
        begin = 40 + len(text)
        end = begin + IFD + plane.nbytes
        index = struct.pack("<7I", 3453623, 1, number, 0, 0, 0, begin)
        head = (54773648, end, 483765892, 0, 99384722, 0, 2355492, len(text))
        data = struct.pack("<2sHI8I", b"II", 42, begin, *head) + text
        data += _ifd(plane, begin + IFD, (len(text), 40)) + plane.tobytes() + index
        suffix = f"_{number}" if number else ""
        paths.append(folder / f"img_MMStack{suffix}.ome.tif")
        paths[-1].write_bytes(data)
    return paths


def write_ndtiff(
    folder: Path, channels: NDArray[Any], names: Sequence[str] = ("a.tif", "b.tif")
) -> list[Path]:
    """Write (channels, height, width) to files of these names in turn, and their index."""
    summary = json.dumps({"Prefix": "nd"}).encode()
    summary += b" " * (len(summary) % 2)
    index = b""
    files = dict.fromkeys(names, b"")
    for number, plane in enumerate(channels):
        name = names[number % len(names)]
        if not files[name]:
            begin = 28 + len(summary)
            head = (begin, 483729, 3, 3, 2355492, len(summary))
            files[name] = struct.pack("<2sH6I", b"II", 42, *head) + summary
            files[name] += _ifd(plane, begin + IFD, (len(summary), 28))
        axes = json.dumps({"channel": number}).encode()
        index += struct.pack("<I", len(axes)) + axes
        index += struct.pack("<I", len(name)) + name.encode()
        kind = {"uint8": 0, "uint16": 1}[plane.dtype.name]
        index += struct.pack("<IiiiiIii", len(files[name]), *plane.shape[::-1], kind, 0, 0, 0, 0)
        files[name] += plane.tobytes()
    (folder / "NDTiff.index").write_bytes(index)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return [folder / name for name in names]


def _ifd(plane: NDArray[Any], offset: int, metadata: tuple[int, int]) -> bytes:
    """Return the tags of a plane whose pixels begin at an offset; size and offset of metadata."""
    height, width = plane.shape
    entries = {
        254: (4, 1, 0), 256: (4, 1, width), 257: (4, 1, height),
        258: (3, 1, 8 * plane.dtype.itemsize), 259: (3, 1, 1), 262: (3, 1, 1), 273: (4, 1, offset),
        274: (3, 1, 1), 277: (3, 1, 1), 278: (4, 1, height), 279: (4, 1, plane.nbytes),
        284: (3, 1, 1), 51123: (2, *metadata),
    }  # fmt: skip
    packed = b"".join(struct.pack("<HHII", code, *entries[code]) for code in sorted(entries))
    return struct.pack("<H", len(entries)) + packed + struct.pack("<I", 0)
