"""ICC profiles that the tests write themselves."""

from __future__ import annotations

import struct
from itertools import accumulate
from typing import TYPE_CHECKING

import imagecodecs
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Colors = NDArray[np.float64]

GRID = 9
D50 = (0.9642, 1.0, 0.8249)


def stain(rgb: Colors) -> Colors:
    """What a scanner may see, shape (..., 3), as Lab: curved, and with hues that are mixed."""
    mixed = rgb @ np.array([[0.8, 0.15, 0.05], [0.1, 0.8, 0.1], [0.05, 0.05, 0.9]]).T
    red, green, blue = np.moveaxis(mixed**0.9, -1, 0)
    lightness = 100 * (0.3 * red + 0.6 * green + 0.1 * blue)
    return np.stack([lightness, 90 * (red - green), 70 * (green**1.2 - blue)], -1)


def swapped(rgb: Colors) -> Colors:
    """The same with red and blue exchanged."""
    return stain(rgb[..., ::-1])


def table_profile(*looks: Callable[[Colors], Colors], intent: int = 0) -> bytes:
    """A scanner's profile: a table of Lab for each intent, from perceptual on."""
    tags = {b"wtpt": b"XYZ \0\0\0\0" + struct.pack(">3i", *(round(v * 65536) for v in D50))}
    for number, look in enumerate(looks):
        tags[b"A2B%d" % number] = _table(look)
    places = list(accumulate(map(len, tags.values()), initial=132 + 12 * len(tags)))
    entries = b"".join(
        struct.pack(">4sII", name, place, len(data))
        for (name, data), place in zip(tags.items(), places, strict=False)
    )
    head = struct.pack(">I4sI4s4s4s", places[-1], b"test", 0x02400000, b"scnr", b"RGB ", b"Lab ")
    head = head.ljust(36, b"\0") + b"acsp"
    head = head.ljust(64, b"\0") + struct.pack(">I3i", intent, *(round(v * 65536) for v in D50))
    return head.ljust(128, b"\0") + struct.pack(">I", len(tags)) + entries + b"".join(tags.values())


def _table(look: Callable[[Colors], Colors]) -> bytes:
    steps = np.linspace(0, 1, GRID)
    lab = look(np.stack(np.meshgrid(steps, steps, steps, indexing="ij"), -1)).clip(
        (0, -128, -128), (100, 127, 127)
    )
    values = lab * (0xFF00 / 100, 256, 256) + (0, 0x8000, 0x8000)
    one = 1 << 16
    matrix = struct.pack(">9i", one, 0, 0, 0, one, 0, 0, 0, one)
    line = struct.pack(">6H", *(0, 0xFFFF) * 3)
    clut = values.round().astype(">u2").tobytes()
    head = b"mft2\0\0\0\0" + bytes([3, 3, GRID, 0])
    data = head + matrix + struct.pack(">2H", 2, 2) + line + clut + line
    return data + bytes(-len(data) % 4)


def changed(profile: bytes, place: int, data: bytes) -> bytes:
    """Overwrite bytes of a profile."""
    return profile[:place] + data + profile[place + len(data) :]


SRGB = imagecodecs.cms_profile("srgb")
ADOBE = imagecodecs.cms_profile("adobergb")
GAMMA = imagecodecs.cms_profile(
    "rgb",
    gamma=1.5,
    whitepoint=(0.3457, 0.3585),
    primaries=(0.73, 0.27, 0.16, 0.83, 0.04, 0.01),
)
PROFILES = {
    "sRGB": SRGB,
    "Adobe RGB": ADOBE,
    "gamma": GAMMA,
    "table": table_profile(stain),
    "tables": table_profile(stain, swapped, intent=1),
}
