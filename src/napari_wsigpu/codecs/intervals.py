"""Restart intervals of one large JPEG, joined to smaller JPEGs."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from napari_wsigpu.codecs.jpeg import END_OF_IMAGE, FRAMES, segments

if TYPE_CHECKING:
    from collections.abc import Sequence

RESTARTS = frozenset(bytes((0xFF, 0xD0 + number)) for number in range(8))

TALLEST = 0xFFFF


def join_intervals(header: bytes, intervals: Sequence[memoryview]) -> bytes:
    """Make one JPEG of restart intervals that lie one below the other.

    Parameters
    ----------
    header : bytes
        Header of a JPEG that one interval alone would be.
    intervals : sequence of memoryview
        Each one's scan with the marker behind it.

    Raises
    ------
    ValueError
        If no marker ends an interval, or the header has no frame, or one too high.
    """
    parts: list[memoryview | bytes] = [_stretched(header, len(intervals))]
    for number, interval in enumerate(intervals):
        parts += [_scan(interval), bytes((0xFF, 0xD0 + number % 8))]
    parts[-1] = END_OF_IMAGE
    return b"".join(parts)


def _scan(interval: memoryview) -> memoryview | bytes:
    """Return an interval without the marker at its end."""
    if bytes(interval[-2:]) in RESTARTS:
        return interval[:-2]
    data = bytes(interval).rstrip(b"\0")
    if not data.endswith(END_OF_IMAGE):
        # libjpeg would fill what is missing with gray and say nothing.
        raise ValueError("its JPEG data end early")
    return data[:-2]


@lru_cache(maxsize=64)
def _stretched(header: bytes, times: int) -> bytes:
    """Return the header of a JPEG that is so many times as high."""
    for marker, start, _ in segments(header):
        if marker in FRAMES:
            offset = start + 5
            height = times * int.from_bytes(header[offset : offset + 2], "big")
            if height > TALLEST:
                raise ValueError(f"its JPEG header makes it {height} pixels high")
            return header[:offset] + height.to_bytes(2, "big") + header[offset + 2 :]
    raise ValueError("its JPEG header has no frame")
