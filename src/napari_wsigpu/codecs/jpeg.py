"""JPEG tiles on top of each other: one image, which an engine decodes at the cost of one.

To begin an image costs a JPEG engine as much as to decode a tile. Tiles that share their header
become one tall image without being decoded: their scans follow each other, and a restart marker
after each resets what a decoder remembers. Only chroma of half the height would be smoothed
across the edges of tiles, so that it has to be left at its own resolution.

Led astray by a damaged tile, an engine may show the tiles below it in wrong places and say
nothing. So each stack ends with a strip of bright and gray blocks: where these are not found,
the whole stack is in doubt. Two damaged tiles could make up for each other. So a stack is in
doubt, too, where a scan has a marker of its own, or where the first block of a tile has not the
brightness that its first code says.
"""

from __future__ import annotations

import re
import struct
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import imagecodecs
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

END_OF_IMAGE, START_OF_IMAGE = b"\xff\xd9", 0xD8
START_OF_SCAN, HUFFMAN, QUANTA, RESTART_INTERVAL, ADOBE = 0xDA, 0xC4, 0xDB, 0xDD, 0xEE
# Comments, and segments of applications but JFIF's and Adobe's, which tell colours.
WORDS = {0xFE, *range(0xE1, 0xEE), 0xEF}
FRAMES = {*range(0xC0, 0xD0)} - {HUFFMAN, 0xC8, 0xCC}
SEQUENTIAL = (0xC0, 0xC1)
RESTARTS = range(0xD0, 0xD8)
WITHOUT_SEGMENT = {0, 1, *RESTARTS}
# Fill bytes may precede a marker (B.1.1.2); within a scan 0xFF 0x00 is a byte of data.
MARKER, SCAN_MARKER = (
    re.compile(rb"\xff+([^\xff])", re.DOTALL),
    re.compile(rb"\xff+([^\0\xff])", re.DOTALL),
)
ENDS_EARLY, DAMAGED_SEGMENT = "its JPEG data end early", "a segment of its JPEG is damaged"
FIRST_SEGMENT, ALONE = 0xC0, {*range(0xD0, 0xDA), 0xFF}
BLOCK = 8
BITS = 8
NO_MARKS = (0,) * 7
LONGEST_HEADER = 1 << 16
MOST_ROWS, MOST_UNITS = 12288, 0xFFFF
LENGTHS, MOST_SYMBOLS = 16, 16
SAME, END_OF_BLOCK = 0, 0
LARGEST_STEP, LEAST_CONTRAST = 7, 8


class Header(NamedTuple):
    """What a JPEG's header says.

    Attributes
    ----------
    frame : int
        Marker of the frame, which tells the kind of JPEG.
    bits : int
        Of each sample.
    height, width : int
        Of the image.
    ids : bytes
        Of the components.
    sampling : tuple of (int, int)
        Samples of each component, across and down.
    tables : tuple of (int, int)
        Numbers of each component's Huffman tables, for first and for other values of a block.
    huffman : bytes
        The Huffman tables.
    quantum : int
        What the first value of a block of the first component is multiplied by; 0 if unknown.
    transform : int or None
        Adobe's colour transform.
    restarts : bool
        Whether there are restart markers already.
    """

    frame: int
    bits: int
    height: int
    width: int
    ids: bytes
    sampling: tuple[tuple[int, int], ...]
    tables: tuple[tuple[int, int], ...]
    huffman: bytes
    quantum: int
    transform: int | None
    restarts: bool


def end_of_image(data: Any, tables: bytes | None = None) -> int:
    """Return where a JPEG ends, behind its EOI, whatever follows.

    This decides, before a tile is decoded, what its structure reveals: for the CPU and for GPUs,
    and for any part of the tile. The native core has the same rule, `native/jpeg_markers.h`.

    Parameters
    ----------
    data : buffer
        The JPEG, and maybe more.
    tables : bytes, optional
        The tables that it shares with others.

    Raises
    ------
    ValueError
        If it lacks its end, a segment, a table or a restart interval, or if restart markers are out
        of order. libjpeg would show gray instead, and say nothing.
    """
    return _Markers(*_shared(tables)).end(data)


def is_lossless(data: Any) -> bool:
    """Whether a JPEG's frame is lossless: SOF3, or one of its kin (T.81, table B.1)."""
    head = bytes(data[:LONGEST_HEADER])
    return next((marker & 3 == 3 for marker, _, _ in segments(head) if marker in FRAMES), False)


class _Markers:
    """Reads the segments of a JPEG (ISO/IEC 10918-1, annex B), and the markers in its scans."""

    def __init__(self, huffman: frozenset[tuple[int, int]], quanta: frozenset[int]) -> None:
        self.huffman, self.quanta = set(huffman), set(quanta)
        self._frame, self._interval = 0, 0
        self._height, self._width = 0, 0
        self._components: dict[int, tuple[int, int, int]] = {}
        self._most = 1, 1

    def end(self, data: Any, *, only_tables: bool = False) -> int:
        if bytes(data[:2]) != b"\xff\xd8":
            raise ValueError("it is no JPEG")
        at, scanned = 2, False
        while (found := MARKER.search(data, at)) is not None:
            code, at = found[1][0], found.end()
            if code == END_OF_IMAGE[1]:
                if not scanned and not only_tables:
                    raise ValueError("its JPEG has no scan")
                return at
            if code in WITHOUT_SEGMENT:
                continue
            if code == START_OF_IMAGE:
                raise ValueError("its JPEG begins twice")
            length = bytes(data[at : at + 2])
            size = int.from_bytes(length, "big")
            if len(length) == 2 and size < 2:
                raise ValueError(DAMAGED_SEGMENT)
            if len(length) < 2 or at + size > len(data):
                break
            content = bytes(data[at + 2 : at + size])
            at += size
            if code == QUANTA:
                self.quanta.update(_first_quanta(content))
            elif code == HUFFMAN:
                self.huffman.update(_tables(content))
            elif code == RESTART_INTERVAL and len(content) > 1:
                self._interval = int.from_bytes(content[:2], "big")
            elif code in FRAMES:
                self._read_frame(code, content)
            elif code == START_OF_SCAN:
                at, scanned = self._behind_scan(data, at, self._check_scan(content)), True
        raise ValueError(ENDS_EARLY)

    def _read_frame(self, code: int, content: bytes) -> None:
        if self._frame:
            raise ValueError("its JPEG has several frames")
        if len(content) < 6 or not content[5] or len(content) != 6 + 3 * content[5]:
            raise ValueError(DAMAGED_SEGMENT)
        self._frame = code
        self._height, self._width = struct.unpack_from(">HH", content, 1)
        for number, factors, table in zip(content[6::3], content[7::3], content[8::3], strict=True):
            across, down = factors >> 4, factors & 15
            self._components.setdefault(number, (across, down, table & 15))
            self._most = max(self._most[0], across), max(self._most[1], down)

    def _check_scan(self, content: bytes) -> int:
        """Return how many restart intervals a scan has; 0 if they are not counted."""
        if not self._frame:
            raise ValueError("its JPEG has no frame")
        if len(content) < 6 or len(content) != 4 + 2 * content[0]:
            raise ValueError(DAMAGED_SEGMENT)
        lossless = self._frame & 3 == 3
        for number, tables in zip(content[1:-3:2], content[2:-3:2], strict=True):
            across, down, quanta = self._components.get(number, (0, 0, 0))
            if not across or not down:
                raise ValueError(DAMAGED_SEGMENT)
            # Without any, libjpeg takes those of K.3, as for frames of Motion JPEG.
            coded = not self.huffman or {(0, tables >> 4), (1, tables & 15)} <= self.huffman
            if (self._frame in SEQUENTIAL and not coded) or (
                not lossless and quanta not in self.quanta
            ):
                raise ValueError("tables of its JPEG are missing")
        if not self._interval or not self._height:
            return 0
        side, (most_across, most_down) = 1 if lossless else BLOCK, self._most
        wide, high = _parts(self._width, side * most_across), _parts(self._height, side * most_down)
        if content[0] == 1:  # a unit is one block of this component, A.2.2
            across, down, _ = self._components[content[1]]
            wide = _parts(_parts(self._width * across, most_across), side)
            high = _parts(_parts(self._height * down, most_down), side)
        return _parts(wide * high, self._interval)

    def _behind_scan(self, data: Any, at: int, intervals: int) -> int:
        """Return where the first marker behind a scan is that is no restart."""
        for restarts, found in enumerate(SCAN_MARKER.finditer(data, at)):
            code = found[1][0]
            if code not in RESTARTS:
                if restarts + 1 < intervals:
                    raise ValueError("restart intervals of its JPEG are missing")
                return found.start()
            if not self._interval or code != RESTARTS[restarts % 8]:
                raise ValueError("restart markers of its JPEG are out of order")
        raise ValueError(ENDS_EARLY)


def _parts(whole: int, part: int) -> int:
    return -(-whole // part)


@lru_cache(maxsize=256)
def _shared(tables: bytes | None) -> tuple[frozenset[tuple[int, int]], frozenset[int]]:
    """Return which Huffman and which quantisation tables tiles share."""
    found = _Markers(frozenset(), frozenset())
    with suppress(ValueError):  # what they lack or get wrong shows at the scan that needs it
        found.end(tables or b"", only_tables=True)
    return frozenset(found.huffman), frozenset(found.quanta)


def segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield marker, start and end of each segment, up to the one that starts the scan.

    Decoders differ in what they do at markers that begin no segment; here it ends.
    """
    offset = 2
    while offset + 4 <= len(data) and data[offset] == 0xFF:
        marker = data[offset + 1]
        if marker < FIRST_SEGMENT or marker in ALONE:
            return
        end = offset + 2 + int.from_bytes(data[offset + 2 : offset + 4], "big")
        if end > len(data):
            return
        yield marker, offset, end
        if marker == START_OF_SCAN:
            return
        offset = end


@lru_cache(maxsize=256)
def without_words(data: bytes) -> bytes:
    """Return tables, or a header, without comments and what programs add: no decoder needs these.

    Levels hold them, and travel to other processes.
    """
    cuts = [(start, end) for marker, start, end in segments(data) if marker in WORDS]
    for start, end in reversed(cuts):
        data = data[:start] + data[end:]
    return data


def header_length(data: bytes) -> int:
    """Return where the scan of a JPEG begins; 0 if it has none."""
    return next((end for marker, _, end in segments(data) if marker == START_OF_SCAN), 0)


@lru_cache(maxsize=256)
def read_header(data: bytes) -> Header | None:
    """Read a header with all its tables, which ends where the scan begins.

    Returns
    -------
    Header or None
        None if it is damaged, or not of one frame and one scan with the same components.
    """
    frame, frame_marker, scan, huffman, quanta = b"", 0, b"", b"", b""
    transform, restarts = None, False
    for marker, start, end in segments(data):
        content = data[start + 4 : end]
        if marker in FRAMES:
            if frame:
                return None
            frame, frame_marker = content, marker
        elif marker == HUFFMAN:
            huffman += content
        elif marker == QUANTA:
            quanta += content
        elif marker == RESTART_INTERVAL:
            restarts = any(content)
        elif marker == ADOBE and len(content) > 11:
            transform = content[11]
        elif marker == START_OF_SCAN:
            scan = content
    if len(frame) < 9 or len(frame) != 6 + 3 * frame[5]:
        return None
    if not scan or len(scan) != 4 + 2 * scan[0] or scan[1:-3:2] != frame[6::3]:
        return None
    return Header(
        frame=frame_marker,
        bits=frame[0],
        height=int.from_bytes(frame[1:3], "big"),
        width=int.from_bytes(frame[3:5], "big"),
        ids=frame[6::3],
        sampling=tuple((factors >> 4, factors & 15) for factors in frame[7::3]),
        tables=tuple((number >> 4, number & 15) for number in scan[2:-3:2]),
        huffman=huffman,
        quantum=_first_quanta(quanta).get(frame[8], 0),
        transform=transform,
        restarts=restarts,
    )


def header_of_tile(data: bytes, shape: tuple[int, int, int]) -> Header | None:
    """Read the header of a tile of 8 bits; None if it is not of (height, width, components)."""
    header = read_header(data)
    if header is None or header.bits != BITS:
        return None
    return header if (header.height, header.width, len(header.ids)) == shape else None


class Stacking:
    """How tiles that share one header are put on top of each other.

    Parameters
    ----------
    data : bytes
        The header.
    header : Header
        What it says.

    Attributes
    ----------
    most : int
        How many tiles a stack may have.
    strip : bytes
        Scan of the strip below the tiles.
    strip_rows : int
        Its height in pixels.
    marks : tuple of 7 int
        The first component of its blocks, which take turns; then what the brightness of a
        tile's first block can be read with: quantum, Huffman codes of each length, symbols
        (8 bytes each).
    """

    def __init__(self, data: bytes, header: Header) -> None:
        self._data, self._header = data, header
        self._begins: dict[int, bytes] = {}
        self.most, self.strip, self.marks = 1, b"", NO_MARKS
        across, down = header.sampling[0] if len(header.ids) > 1 else (1, 1)
        self.strip_rows = BLOCK * down
        units_across = -(-header.width // (BLOCK * across))
        self._units = units_across * (header.height // self.strip_rows)
        whole = header.height % self.strip_rows == 0 and self._units <= MOST_UNITS
        if whole and header.frame in SEQUENTIAL and not header.restarts:
            strip = _strip(header, units_across, across * down)
            shades = self._shades(strip)
            counts, symbols = _tables(header.huffman).get((0, header.tables[0][0]), (b"", b""))
            if shades is not None and len(symbols) <= MOST_SYMBOLS:
                self.strip, self.most = strip, max(1, MOST_ROWS // header.height)
                codes = struct.unpack("<4q", counts + symbols.ljust(MOST_SYMBOLS, b"\0"))
                self.marks = (*shades, header.quantum, *codes)

    def begin(self, count: int) -> bytes:
        """Return the header of a stack of this many tiles and a strip."""
        begin = self._begins.get(count)
        if begin is None:
            begin = self._of_height(count * self._header.height + self.strip_rows)
            self._begins[count] = begin
        return begin

    def _of_height(self, height: int) -> bytes:
        data = bytearray(self._data)
        for marker, start, _ in segments(self._data):
            if marker in FRAMES:
                data[start + 5 : start + 7] = height.to_bytes(2, "big")
            elif marker == START_OF_SCAN:
                data[start:start] = b"\xff\xdd\0\4" + self._units.to_bytes(2, "big")
        return bytes(data)

    def _shades(self, strip: bytes) -> tuple[int, int] | None:
        """Decode the strip, and return the shades of its blocks if they are as they should be."""
        picture = self._of_height(self.strip_rows) + strip + END_OF_IMAGE
        colors = "RGB" if len(self._header.ids) > 1 else "GRAYSCALE"
        samples = (3,) if len(self._header.ids) > 1 else ()
        shown = np.empty((self.strip_rows, self._header.width, *samples), np.uint8)
        try:
            imagecodecs.jpeg8_decode(picture, colorspace=colors, outcolorspace=colors, out=shown)
        except (imagecodecs.Jpeg8Error, ValueError):
            return None
        rows = np.atleast_3d(shown)[..., 0]
        first, second = int(rows[0, 0]), int(rows[0, min(BLOCK, self._header.width - 1)])
        expected = np.where(np.arange(self._header.width) // BLOCK % 2, second, first)
        clear = abs(first - second) >= LEAST_CONTRAST and bool((rows == expected).all())
        return (first, second) if clear else None


def _first_quanta(quanta: bytes) -> dict[int, int]:
    """Return the first value of each quantisation table, by number."""
    found = {}
    while len(quanta) > BLOCK * BLOCK:
        size = 1 + (quanta[0] >> 4 > 0)
        found[quanta[0] & 15] = int.from_bytes(quanta[1 : 1 + size], "big")
        quanta = quanta[1 + BLOCK * BLOCK * size :]
    return found


def _strip(header: Header, units: int, blocks: int) -> bytes:
    """Return the scan of a strip whose first component has bright and gray blocks in turn.

    It is empty if the tables have no codes for it.
    """
    codes = {key: _codes(*table) for key, table in _tables(header.huffman).items()}
    firsts = [codes.get((0, first), {}) for first, _ in header.tables]
    ends = [codes.get((1, other), {}).get(END_OF_BLOCK, "") for _, other in header.tables]
    sizes = [size for size in firsts[0] if 0 < size <= LARGEST_STEP]
    sames = [first.get(SAME, "") for first in firsts[1:]]
    if not sizes or not all(ends) or not all(sames):
        return b""
    size = max(sizes)
    steps = [firsts[0][size] + digit * size + ends[0] for digit in "10"]
    chroma = "".join(
        across * down * (same + end)
        for (across, down), same, end in zip(header.sampling[1:], sames, ends[1:], strict=True)
    )
    bits = "".join(
        "".join(steps[(unit * blocks + block) % 2] for block in range(blocks)) + chroma
        for unit in range(units)
    )
    bits += "1" * (-len(bits) % 8)
    return int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")


def _tables(huffman: bytes) -> dict[tuple[int, int], tuple[bytes, bytes]]:
    """Return Huffman tables as (class, number) -> codes of each length, symbols."""
    found = {}
    while len(huffman) > LENGTHS:
        counts = huffman[1 : 1 + LENGTHS]
        end = 1 + LENGTHS + sum(counts)
        found[huffman[0] >> 4, huffman[0] & 15] = counts, huffman[1 + LENGTHS : end]
        huffman = huffman[end:]
    return found


def _codes(counts: bytes, symbols: bytes) -> dict[int, str]:
    """Return a Huffman table as symbol -> bits."""
    code, found, rest = 0, {}, iter(symbols)
    for length, count in enumerate(counts, 1):
        for symbol in islice(rest, count):
            found[symbol] = f"{code:0{length}b}"
            code += 1
        code <<= 1
    return found
