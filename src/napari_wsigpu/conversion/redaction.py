"""Redact encoded tiles: overwrite bytes that decoders don't need with zeros.

Comments, EXIF data and the like may name a patient. The length of a tile stays the same, so no
offset or length field changes, and a tile without such parts is returned unchanged.
"""

from __future__ import annotations

import re
import zlib
from typing import TYPE_CHECKING

from napari_wsigpu.codecs.jpeg import ADOBE, FRAMES, HUFFMAN, QUANTA, START_OF_SCAN
from napari_wsigpu.model.tags import COMPRESSION, DEFLATE, JPEG_2000, JPEG_XL, WEBP, ZSTD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    # Offset of some bytes, and their replacement.
    Edit = tuple[int, bytes]

# Within entropy-coded data, 0xFF is followed by 0 or a restart marker (ITU-T T.81, B.1.1).
JPEG_MARKER = re.compile(rb"\xff[\xc0-\xcf\xd8-\xfe]")
START_OF_IMAGE, END_OF_IMAGE, COMMENT, APPLICATIONS = 0xD8, 0xD9, 0xFE, range(0xE0, 0xF0)
# Application segments that declare the color space, and their length without a JFIF thumbnail.
COLOR_SEGMENTS = {0xE0: (b"JFIF\0", 14), ADOBE: (b"Adobe", 12)}

SMALLEST = {QUANTA: 64, HUFFMAN: 16}
AT_ONCE = 1 << 20
SKIPPED_FRAME, ZSTD_FRAME = 0x184D2A50, 0xFD2FB528
CODESTREAM = b"\xff\x4f"
TILE_PART, TILE_DATA, END_2000, COMMENT_2000 = 0xFF90, 0xFF93, 0xFFD9, 0xFF64
CONTAINERS = (b"\0\0\0\x0cjP  \r\n\x87\n", b"\0\0\0\x0cJXL \r\n\x87\n")
BOXES = {b"jP  ", b"ftyp", b"rreq", b"jp2h", b"jp2c", b"JXL ", b"jxll", b"jxli", b"jxlc", b"jxlp"}
HEADER_BOXES = {b"ihdr", b"bpcc", b"colr", b"pclr", b"cmap", b"cdef", b"res "}
WEBP_CHUNKS = {b"VP8 ", b"VP8L", b"VP8X", b"ALPH", b"ANIM", b"ANMF", b"ICCP"}


def redact(data: memoryview, compression: int) -> memoryview:
    """Return an encoded tile, or a JPEGTables value, without text.

    Parameters
    ----------
    data : memoryview
        The encoded bytes. They may be damaged; damage is not repaired.
    compression : int
        Value of the Compression tag.

    Returns
    -------
    memoryview
        Bytes of the same length; `data` itself if there is nothing to remove.
    """
    walk = WALKS.get(compression)
    if walk is None:
        return data
    edits = [(start, new) for start, new in walk(data) if data[start : start + len(new)] != new]
    if not edits:
        return data
    changed = bytearray(data)
    for start, new in edits:
        changed[start : start + len(new)] = new
    return memoryview(changed)


def _jpeg(data: memoryview) -> Iterator[Edit]:
    """Find comments, application segments, and bytes between segments and after the end.

    Tables that no scan uses are found too, except in JPEGTables, where tiles may use any of them.
    """
    offset, in_scan = 0, False
    tables = _Tables(data)
    while found := JPEG_MARKER.search(data, offset):
        marker, start = data[found.end() - 1], found.end()
        if not in_scan and bytes(data[offset : found.start()]).strip(b"\xff"):
            yield _blank(offset, found.start())
        in_scan = marker == START_OF_SCAN
        if marker == END_OF_IMAGE:
            yield _blank(start, len(data))
            yield from tables.unused if tables.scanned else ()
            return
        if marker == START_OF_IMAGE:
            offset = start
            continue
        end = min(len(data), start + max(2, int.from_bytes(data[start : start + 2], "big")))
        offset, start = end, min(start + 2, end)
        if marker == COMMENT:
            yield _blank(start, end)
        elif marker in (QUANTA, HUFFMAN):
            tables.define(marker, start, end)
        elif marker in FRAMES or marker == START_OF_SCAN:
            tables.use(marker, bytes(data[start:end]))
        elif marker in APPLICATIONS:
            name, length = COLOR_SEGMENTS.get(marker, (b"", 0))
            known = bytes(data[start : start + len(name)]) == name
            yield _blank(min(start + length * known, end), end)


class _Tables:
    """Tracks the tables that a JPEG defines and its scans use (ITU-T T.81, B.2.4)."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._quanta: dict[int, int] = {}
        self._held: dict[tuple[int, int], Edit] = {}
        self._replaced: list[Edit] = []
        self.scanned = False

    @property
    def unused(self) -> list[Edit]:
        """Edits that blank the values of tables that no scan has used."""
        return [*self._replaced, *self._held.values()]

    def define(self, marker: int, start: int, end: int) -> None:
        """Record the tables of a segment; an unused table that is redefined was never needed."""
        while end - start > SMALLEST[marker]:
            number = self._data[start]
            if marker == QUANTA:
                first, past = start + 1, start + 1 + 64 * (1 + (number > 15))
                key = marker, number & 15
            else:
                first = start + 17  # after the 16 code counts, whose sum is the number of values
                past, key = first + sum(self._data[start + 1 : first]), (marker, number)
            if key in self._held:
                self._replaced.append(self._held[key])
            self._held[key] = _blank(first, min(past, end))
            start = past

    def use(self, marker: int, content: bytes) -> None:
        """Record the tables that a frame header assigns, or that a scan uses."""
        if marker != START_OF_SCAN:
            self._quanta = dict(zip(content[6::3], content[8::3], strict=False))
            return
        self.scanned = True
        for component, numbers in zip(content[1:-3:2], content[2:-3:2], strict=False):
            self._held.pop((QUANTA, self._quanta.get(component, -1)), None)
            self._held.pop((HUFFMAN, numbers >> 4), None)
            self._held.pop((HUFFMAN, numbers & 15 | 16), None)


def _deflate(data: memoryview) -> Iterator[Edit]:
    """Find the bytes after a zlib stream."""
    reader, rest = zlib.decompressobj(), bytes(data)
    try:
        while rest and not reader.eof:
            reader.decompress(rest, AT_ONCE)
            rest = reader.unconsumed_tail
    except zlib.error:
        return
    if reader.eof:
        yield _blank(len(data) - len(reader.unused_data), len(data))


def _zstd(data: memoryview) -> Iterator[Edit]:
    """Find the contents of skippable frames and bytes after the last frame (RFC 8878, 3.1)."""
    offset, found = 0, False
    while offset + 8 <= len(data):
        magic = int.from_bytes(data[offset : offset + 4], "little")
        if magic & 0xFFFFFFF0 == SKIPPED_FRAME:
            size = int.from_bytes(data[offset + 4 : offset + 8], "little")
            yield _blank(offset + 8, min(len(data), offset + 8 + size))
            offset += 8 + size
        elif magic == ZSTD_FRAME:
            offset, found = _end_of_frame(data, offset), True
        else:
            break
    if found:
        yield _blank(min(offset, len(data)), len(data))


def _end_of_frame(data: memoryview, offset: int) -> int:
    """Return the end of a zstd frame, or of the data if the frame is truncated."""
    descriptor = data[offset + 4]
    single, checked = descriptor >> 5 & 1, descriptor >> 2 & 1
    content = (single, 2, 4, 8)[descriptor >> 6]
    offset += 5 + (1 - single) + (0, 1, 2, 4)[descriptor & 3] + content
    while offset + 3 <= len(data):
        block = int.from_bytes(data[offset : offset + 3], "little")
        repeated = block >> 1 & 3 == 1
        offset += 3 + (1 if repeated else block >> 3)
        if block & 1:
            return offset + 4 * checked
    return len(data)


def _jpeg2000(data: memoryview) -> Iterator[Edit]:
    if bytes(data[:2]) == CODESTREAM:
        yield from _codestream(data, 0, len(data))
    else:
        yield from _container(data)


def _codestream(data: memoryview, start: int, end: int) -> Iterator[Edit]:
    """Find COM segments in the main and tile-part headers (ITU-T T.800, A.9.2)."""
    offset, part_end = start + len(CODESTREAM), end
    while offset + 4 <= end:
        marker, length = _number(data, offset, 2), _number(data, offset + 2, 2)
        if marker == TILE_DATA:
            offset, part_end = max(part_end, offset + 2), end
            continue
        if marker == END_2000:
            yield _blank(offset + 2, end)
            return
        if marker >> 8 != 0xFF or length < 2:  # damage
            return
        if marker == TILE_PART:
            # Psot = 0: the last tile-part extends to the end (ITU-T T.800, A.4.2).
            part_end = offset + _number(data, offset + 6, 4) or end
        elif marker == COMMENT_2000:
            yield _blank(offset + 6, min(offset + 2 + length, end))
        offset += 2 + length


def _container(data: memoryview) -> Iterator[Edit]:
    """In a JP2 or JPEG XL file, find the contents of boxes that decoders do not need."""
    if bytes(data[:12]) in CONTAINERS:
        yield from _boxes(data, 0, len(data), BOXES)


def _boxes(data: memoryview, offset: int, end: int, needed: set[bytes]) -> Iterator[Edit]:
    while offset + 8 <= end:
        size, kind, head = _number(data, offset, 4), bytes(data[offset + 4 : offset + 8]), 8
        if size == 1:
            size, head = _number(data, offset + 8, 8), 16
        box_end = min(end, offset + size) if size else end
        if size and size < head:  # damage
            return
        if kind not in needed:
            yield offset + 4, b"free"
            yield _blank(offset + head, box_end)
        elif kind == b"jp2h":
            yield from _boxes(data, offset + head, box_end, HEADER_BOXES)
        elif kind == b"jp2c":
            yield from _codestream(data, offset + head, box_end)
        offset = box_end


def _webp(data: memoryview) -> Iterator[Edit]:
    """Find the contents of EXIF, XMP and unknown chunks."""
    offset = 12
    while bytes(data[:4]) == b"RIFF" and offset + 8 <= len(data):
        size = int.from_bytes(data[offset + 4 : offset + 8], "little")
        start, offset = offset + 8, min(len(data), offset + 8 + size + size % 2)
        if bytes(data[start - 8 : start - 4]) not in WEBP_CHUNKS:
            yield _blank(start, offset)


def _blank(start: int, end: int) -> Edit:
    return start, bytes(max(0, end - start))


def _number(data: memoryview, offset: int, size: int) -> int:
    return int.from_bytes(data[offset : offset + size], "big")


WALKS: dict[int, Callable[[memoryview], Iterator[Edit]]] = {
    COMPRESSION.JPEG: _jpeg,
    **dict.fromkeys(JPEG_2000, _jpeg2000),
    **dict.fromkeys(WEBP, _webp),
    **dict.fromkeys(DEFLATE, _deflate),
    **dict.fromkeys(ZSTD, _zstd),
    **dict.fromkeys(JPEG_XL, _container),
}
