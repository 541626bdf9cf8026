"""Writes CZI files byte by byte, for what no library writes: pyramids, and damage."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

KINDS = {("uint8", 1): 0, ("uint16", 1): 1, ("float32", 1): 2, ("uint8", 3): 3, ("uint16", 3): 4}
UNKNOWN = 99


class Block(NamedTuple):
    """A subblock: its pixels as they are stored, and where they lie at level 0."""

    pixels: NDArray[np.generic]
    x: int = 0
    y: int = 0
    scale: int = 1
    scene: int = 0
    m: int = 0
    c: int = 0
    z: int = 0
    t: int = 0
    compression: int = 0
    data: bytes | None = None


def write(path: Path, blocks: Sequence[Block], xml: str = "") -> None:
    """Write a file; colours are given red first, and stored blue first."""
    content = bytearray(_segment(b"ZISRAWFILE", bytes(512)))
    entries = []
    for block in blocks:
        pixels = block.pixels if block.pixels.ndim == 3 else block.pixels[..., None]
        data = block.data
        if data is None:
            data = np.ascontiguousarray(pixels[..., ::-1]).tobytes()
        entry = _entry(block, pixels, len(content))
        entries.append(entry)
        head = struct.pack("<iiq", 0, 0, len(data)) + entry
        content += _segment(b"ZISRAWSUBBLOCK", head.ljust(256, b"\0") + data)
    metadata = len(content)
    text = xml.encode()
    content += _segment(
        b"ZISRAWMETADATA", struct.pack("<ii", len(text), 0).ljust(256, b"\0") + text
    )
    directory = len(content)
    listed = struct.pack("<i", len(entries)).ljust(128, b"\0") + b"".join(entries)
    content += _segment(b"ZISRAWDIRECTORY", listed)
    head = struct.pack("<4i", 1, 0, 0, 0) + bytes(32)
    head += struct.pack("<iqqiq", 0, directory, metadata, 0, 0)
    content[32 : 32 + len(head)] = head
    path.write_bytes(content)


def _segment(name: bytes, content: bytes) -> bytes:
    padded = content + bytes(-len(content) % 32)
    return struct.pack("<16sqq", name, len(padded), len(content)) + padded


def _entry(block: Block, pixels: NDArray[np.generic], position: int) -> bytes:
    height, width, samples = pixels.shape
    kind = KINDS.get((pixels.dtype.name, samples), UNKNOWN)
    pyramid = 2 if block.scale > 1 else 0
    dimensions = [
        (b"X", block.x, width * block.scale, width),
        (b"Y", block.y, height * block.scale, height),
        (b"C", block.c, 1, 1),
        (b"Z", block.z, 1, 1),
        (b"T", block.t, 1, 1),
        (b"S", block.scene, 1, 1),
    ]
    if block.scale == 1:
        dimensions.append((b"M", block.m, 1, 1))
    head = struct.pack(
        "<2siqiiB5xi", b"DV", kind, position, 0, block.compression, pyramid, len(dimensions)
    )
    return head + b"".join(
        struct.pack("<4siifi", name, start, size, float(start), stored)
        for name, start, size, stored in dimensions
    )
