"""Tiles as code streams of their own, for nvImageCodec: which it can take, and how."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from napari_wsigpu.codecs.cpu import APERIO_YCBCR, END_OF_IMAGE
from napari_wsigpu.formats.compression import compression_name

if TYPE_CHECKING:
    from napari_wsigpu.codecs.decoder import EncodedBatch
    from napari_wsigpu.codecs.library import LibraryStreams
    from napari_wsigpu.formats.layout import LevelLayout

JPEG = 7
JPEG2000 = (33003, 33004, 33005, 34712)
FORGOTTEN = (b"\xff\xdd", b"\xff\xee")
SHORTEST, MOST_PADDING = 4, 64
START_OF_SCAN, ADOBE = 0xDA, 0xEE
FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
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


@lru_cache(maxsize=256)
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
        tables = encoding.jpeg_tables[0] or b""
        if any(marker in tables for marker in FORGOTTEN):
            return "its JPEG tables hold what a decoder forgets before each tile"
        found = JPEG_RECIPES[encoding.jpeg_color]
        if (level.channels == 1) != (found.sample_format == "I_Y"):
            return "its JPEG colours contradict its channels"
        return found
    if encoding.dtype not in ("uint8", "uint16"):
        return f"JPEG 2000 of {encoding.dtype} is decoded on the CPU only"
    ycbcr = encoding.compression == APERIO_YCBCR and level.channels == 3
    if ycbcr and encoding.dtype != "uint8":
        return "YCbCr in JPEG 2000 of more than 8 bits is decoded on the CPU only"
    colors = ("I_Y", "GRAY") if level.channels == 1 else ("I_RGB", "SRGB")
    return Recipe("jpeg2000", *colors, convert=ycbcr)


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
        jpeg = how.kind == "jpeg" and tables is not None
        self._tables = tables[: tables.rfind(END_OF_IMAGE)] if jpeg and tables else None
        self._usual = b"?"

    def fill(self, batch: EncodedBatch, count: int, streams: LibraryStreams) -> list[int]:
        """Make code streams of the first tiles of a batch.

        Parameters
        ----------
        batch : EncodedBatch
            The tiles; the streams use its buffer.
        count : int
            How many may be taken.
        streams : LibraryStreams
            Where the streams are added.

        Returns
        -------
        list of int
            Indices of the tiles whose streams these are; the others are for the CPU.
        """
        buffer, base = batch.buffer, batch.address
        taken = []
        places = zip(
            batch.starts[0, :count].tolist(), batch.lengths[0, :count].tolist(), strict=True
        )
        for index, (start, length) in enumerate(places):
            end = start + length
            if not self._ends(buffer, start, end):
                continue
            if buffer[start : start + len(self._usual)] != self._usual and not self._check(
                bytes(buffer[start:end])
            ):
                continue
            if self._tables is None:
                added = streams.add(base + start, length)
            else:
                spliced = self._tables + buffer[start + 2 : end]
                added = streams.add(bytes(spliced), len(spliced))
            if added:
                taken.append(index)
        return taken

    def _ends(self, buffer: bytearray, start: int, end: int) -> bool:
        """Whether a stream is there to its end, but for zeros that pad it."""
        if end - start < SHORTEST:
            return False
        if self._kind != "jpeg" or buffer[end - 2 : end] == END_OF_IMAGE:
            return True
        return buffer[max(start, end - MOST_PADDING) : end].rstrip(b"\0").endswith(END_OF_IMAGE)

    def _check(self, data: bytes) -> bool:
        """Whether a header that is not the usual one is as the level says."""
        length = self._check_jpeg(data) if self._kind == "jpeg" else self._check_2000(data)
        if length:
            self._usual = data[:length]
        return length > 0

    def _check_jpeg(self, segment: bytes) -> int:
        """Return where the scan's header ends if all headers are as the level says, else 0."""
        place, found = 2, False
        while place + 4 <= len(segment) and segment[place] == 0xFF:
            marker = segment[place + 1]
            length = int.from_bytes(segment[place + 2 : place + 4], "big")
            if marker == START_OF_SCAN:
                return place + 2 + length if found else 0
            if (
                marker == ADOBE
                and self._colors == "ycbcr"
                and segment[place + 15 : place + 16] != b"\1"
            ):
                return 0  # Adobe's "no transform", which nvImageCodec does not heed
            if marker in FRAMES:
                if found or not self._frame_fits(segment[place + 4 : place + 2 + length]):
                    return 0
                found = True
            place += 2 + length
        return 0

    def _frame_fits(self, frame: bytes) -> bool:
        if len(frame) < 6 or len(frame) != 6 + 3 * frame[5] or frame[0] != 8:
            return False
        height, width = int.from_bytes(frame[1:3], "big"), int.from_bytes(frame[3:5], "big")
        if (height, width, frame[5]) != self._shape:
            return False
        if self._colors == "stored":
            return set(frame[7::3]) == {0x11}
        return self._colors != "ycbcr" or frame[6::3] != RGB_IDS

    def _check_2000(self, segment: bytes) -> int:
        """Return where the size header ends if it is as the level says, else 0."""
        head = segment[:64]
        if not head.startswith(b"\xff\x4f\xff\x51") or len(head) < 42:
            return 0
        right, lower, left, upper = (
            int.from_bytes(head[place : place + 4], "big") for place in (8, 12, 16, 20)
        )
        components = int.from_bytes(head[40:42], "big")
        if 0 in (int.from_bytes(head[place : place + 4], "big") for place in (24, 28)):
            return 0  # tiles without extent, which nvImageCodec divides by
        end = 42 + 3 * components
        depths = {head[place : place + 3] for place in range(42, end, 3)}
        if (lower - upper, right - left, components) != self._shape or len(head) < end:
            return 0
        return end if depths == {bytes((self._bits - 1, 1, 1))} else 0
