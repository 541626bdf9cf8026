"""Tiles as code streams of their own, for nvImageCodec: which it can take, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from napari_wsigpu.formats.compression import compression_name

if TYPE_CHECKING:
    from napari_wsigpu.codecs.decoder import EncodedTile
    from napari_wsigpu.formats.layout import LevelLayout

JPEG, APERIO_YCBCR = 7, 33003
JPEG2000 = (33003, 33004, 33005, 34712)
END_OF_IMAGE = b"\xff\xd9"
KNOWN_HEADERS = 4096
START_OF_SCAN = 0xDA
FRAMES = (0xC0, 0xC1, 0xC2)
RGB_IDS = b"RGB"


class Recipe(NamedTuple):
    """How nvImageCodec has to decode the tiles of a level.

    Attributes
    ----------
    kind : {"jpeg", "jpeg2000"}
        The decoder.
    sample_format, color_spec : str
        Names of what to ask for, so that stored samples come out as they are meant.
    convert : bool
        Whether the samples are YCbCr afterwards.
    engine_rgb : bool
        Whether a JPEG engine makes RGB of YCbCr, with a rounding of its own.
    """

    kind: str
    sample_format: str
    color_spec: str
    convert: bool = False
    engine_rgb: bool = False


JPEG_RECIPES = {
    "gray": Recipe("jpeg", "I_Y", "GRAY"),
    # Asked for YCbCr, nvImageCodec leaves the stored components alone: they are RGB.
    "stored": Recipe("jpeg", "I_YUV", "SYCC"),
    "ycbcr": Recipe("jpeg", "I_RGB", "SRGB", engine_rgb=True),
}


def recipe(level: LevelLayout) -> Recipe | str:
    """Return how nvImageCodec decodes tiles of a level, or why it can't."""
    encoding = level.encoding
    name = compression_name(encoding.compression)
    if encoding.compression != JPEG and encoding.compression not in JPEG2000:
        return f"{name} is decoded on the CPU only"
    if level.grid.planes > 1:
        return "its planes are stored separately"
    if level.channels not in (1, 3):
        return f"{name} of {level.channels} channels is decoded on the CPU only"
    if encoding.compression == JPEG:
        if encoding.dtype != "uint8":
            return f"JPEG of {encoding.dtype} is decoded on the CPU only"
        if encoding.jpeg_header is not None:
            return "its tiles are parts of one large JPEG"
        if encoding.jpeg_color not in JPEG_RECIPES:
            return f"JPEG of these colours ({encoding.jpeg_color}) is decoded on the CPU only"
        found = JPEG_RECIPES[encoding.jpeg_color]
        if (level.channels == 1) != (found.sample_format == "I_Y"):
            return "its JPEG colours contradict its channels"
        return found
    if encoding.dtype not in ("uint8", "uint16"):
        return f"JPEG 2000 of {encoding.dtype} is decoded on the CPU only"
    ycbcr = encoding.compression == APERIO_YCBCR and level.channels == 3
    if ycbcr and encoding.dtype != "uint8":
        return "YCbCr in JPEG 2000 of more than 8 bits is decoded on the CPU only"
    return Recipe("jpeg2000", "I_UNCHANGED", "UNCHANGED", convert=ycbcr)


class CodeStreams:
    """Makes code streams of a level's tiles.

    A stream's header is compared with the level before a decoder sees it: nvImageCodec would
    refuse a whole batch for one tile that is too large, and fill in a smaller one in part.

    Parameters
    ----------
    level : LevelLayout
        The level.
    how : Recipe
        Its recipe.
    """

    def __init__(self, level: LevelLayout, how: Recipe) -> None:
        grid = level.grid
        self._shape = (grid.tile_height, grid.tile_width, level.channels)
        self._bits = 8 * level.dtype.itemsize
        self._kind = how.kind
        self._colors = level.encoding.jpeg_color
        tables = level.encoding.jpeg_tables[0]
        self._tables = tables[: -len(END_OF_IMAGE)] if tables else None
        self._good: set[bytes] = set()
        self._lengths: set[int] = set()

    def data(self, tile: EncodedTile) -> Any | None:
        """Return a tile's stream as bytes or array of bytes; None if the CPU has to see it."""
        segment = tile.segments[0]
        if segment is None or len(segment) < 4:
            return None
        if self._kind == "jpeg" and not _ends(segment):
            return None
        if not self._known(segment):
            return None
        if self._tables is not None and self._kind == "jpeg":
            return b"".join((self._tables, segment[2:]))
        return np.frombuffer(segment, np.uint8)

    def _known(self, segment: memoryview) -> bool:
        """Whether the header is one that was found good before, or is good."""
        for length in self._lengths:
            if bytes(segment[:length]) in self._good:
                return True
        length = self._check_jpeg(segment) if self._kind == "jpeg" else self._check_2000(segment)
        if length and len(self._good) < KNOWN_HEADERS:
            self._good.add(bytes(segment[:length]))
            self._lengths.add(length)
        return length > 0

    def _check_jpeg(self, segment: memoryview) -> int:
        """Return where the frame header ends if it is as the level says, else 0."""
        place = 2
        while place + 10 <= len(segment) and segment[place] == 0xFF:
            marker = segment[place + 1]
            length = int.from_bytes(segment[place + 2 : place + 4], "big")
            if marker == START_OF_SCAN:
                return 0
            if marker == 0xEE and self._colors != "gray":
                return 0  # Adobe's colour transform, which nvImageCodec does not heed
            if marker in FRAMES:
                body = bytes(segment[place + 4 : place + 2 + length])
                found = (
                    int.from_bytes(body[1:3], "big"),
                    int.from_bytes(body[3:5], "big"),
                    body[5],
                )
                ids = body[6::3]
                good = body[0] == 8 and found == self._shape and len(body) == 6 + 3 * body[5]
                if self._colors == "ycbcr" and ids == RGB_IDS:
                    good = False
                if self._colors == "stored" and set(body[7::3]) != {0x11}:
                    good = False
                return place + 2 + length if good else 0
            place += 2 + length
        return 0

    def _check_2000(self, segment: memoryview) -> int:
        """Return where the size header ends if it is as the level says, else 0."""
        head = bytes(segment[:64])
        if not head.startswith(b"\xff\x4f\xff\x51") or len(head) < 42:
            return 0
        right, lower, left, upper = (
            int.from_bytes(head[place : place + 4], "big") for place in (8, 12, 16, 20)
        )
        components = int.from_bytes(head[40:42], "big")
        end = 42 + 3 * components
        depths = {head[place : place + 3] for place in range(42, end, 3)}
        if (lower - upper, right - left, components) != self._shape or len(head) < end:
            return 0
        return end if depths == {bytes((self._bits - 1, 1, 1))} else 0


def _ends(segment: memoryview) -> bool:
    return bytes(segment[-2:]) == END_OF_IMAGE or bytes(segment[-64:]).rstrip(b"\0").endswith(
        END_OF_IMAGE
    )
