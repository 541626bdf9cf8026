"""JPEG headers and markers, and the stacking of JPEG tiles into one tall image.

Starting an image takes a hardware JPEG engine as much time as decoding a tile. So tiles with the
same header are stacked without decoding them: their scans are concatenated, with a restart marker
after each one that resets the state of the decoder. If chroma has half the vertical resolution, it
must be decoded at that resolution, because upsampling would blend rows of adjacent tiles.

A damaged tile can make an engine misplace all tiles below it without any error. Therefore each
stack ends with a strip of alternating bright and gray blocks: if the strip is not decoded as
expected, the whole stack is suspect. Two damaged tiles might compensate for each other, so a
stack is also suspect if the scan of a tile contains markers, or if the first block of a tile does
not have the brightness that its first code states.

References are to ITU-T T.81 (ISO/IEC 10918-1).
"""

from __future__ import annotations

import re
import struct
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import imagecodecs
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    Data = bytes | memoryview

# Codes of markers (table B.1)
END_OF_IMAGE, START_OF_IMAGE = b"\xff\xd9", 0xD8
START_OF_SCAN, HUFFMAN, QUANTA, RESTART_INTERVAL, ADOBE = 0xDA, 0xC4, 0xDB, 0xDD, 0xEE
# Comments and application segments, except the JFIF and Adobe segments, which define colors.
METADATA = {0xFE, *range(0xE1, 0xEE), 0xEF}
FRAMES = {*range(0xC0, 0xD0)} - {HUFFMAN, 0xC8, 0xCC}
SEQUENTIAL = (0xC0, 0xC1)
RESTARTS = range(0xD0, 0xD8)
RESTART_MARKERS = frozenset(bytes((0xFF, code)) for code in RESTARTS)
WITHOUT_SEGMENT = {0, 1, *RESTARTS}
# Fill bytes may precede a marker (B.1.1.2). The patterns match the last of them only: one for all
# would start again at each byte of a long run. In a scan, 0xFF 0x00 is a byte of data.
MARKER = re.compile(rb"\xff([^\xff])", re.DOTALL)
SCAN_MARKER = re.compile(rb"\xff([^\0\xff])", re.DOTALL)
TRUNCATED = "its JPEG data is truncated"  # messages of native/jpeg_markers.h too
DAMAGED_SEGMENT = "its JPEG has a damaged segment"
FIRST_SEGMENT, WITHOUT_LENGTH = 0xC0, {*range(0xD0, 0xDA), 0xFF}
BLOCK = 8  # pixels along each side
BITS = 8
NO_MARKS = (0,) * 7
LONGEST_HEADER = 1 << 16
MAX_ROWS, MAX_UNITS = 12288, 0xFFFF
CODE_LENGTHS, MAX_SYMBOLS = 16, 16
# Symbols of Huffman codes: a DC difference of zero, and the end of a block's AC coefficients.
SAME, END_OF_BLOCK = 0, 0
# Limits on the difference of the strip's shades: the maximum in bits, the minimum in gray levels.
LARGEST_STEP, MIN_CONTRAST = 7, 8


class Header(NamedTuple):
    """The content of a JPEG's header.

    Attributes
    ----------
    frame : int
        Code of the SOFn marker, which identifies the kind of JPEG.
    bits : int
        Bits per sample.
    height, width : int
        Size of the image in pixels.
    ids : bytes
        Identifiers of the components.
    sampling : tuple of (int, int)
        Sampling factors of each component, horizontal and vertical.
    tables : tuple of (int, int)
        Numbers of each component's Huffman tables, for DC and AC coefficients.
    huffman : bytes
        The Huffman tables, as in DHT segments.
    quanta : tuple of (tuple of int)
        Quantization table of each component, in zigzag order; empty if unknown.
    transform : int or None
        Color transform from Adobe's segment.
    restarts : bool
        Whether the header defines a restart interval.
    """

    frame: int
    bits: int
    height: int
    width: int
    ids: bytes
    sampling: tuple[tuple[int, int], ...]
    tables: tuple[tuple[int, int], ...]
    huffman: bytes
    quanta: tuple[tuple[int, ...], ...]
    transform: int | None
    restarts: bool


def end_of_image(data: Data, tables: bytes | None = None) -> int:
    """Return the offset after a JPEG's EOI marker, after checking the structure of the JPEG.

    All decoders, on the CPU and on GPUs, use this check, so that they reject the same tiles even if
    they decode only a part of each. `native/jpeg_markers.h` implements it for the native core.

    Parameters
    ----------
    data : buffer
        The JPEG, possibly followed by other bytes.
    tables : bytes, optional
        Tables that the JPEG shares with others.

    Raises
    ------
    ValueError
        If the end, a segment, a table or a restart interval is missing, or restart markers are out
        of order. libjpeg would silently fill in gray pixels.
    """
    return _MarkerParser(*_shared_tables(tables)).end(data)


def is_lossless(data: Data) -> bool:
    """Whether a JPEG's frame is lossless: SOF3, SOF7, SOF11 or SOF15 (table B.1)."""
    head = bytes(data[:LONGEST_HEADER])
    return next((marker & 3 == 3 for marker, _, _ in segments(head) if marker in FRAMES), False)


class _MarkerParser:
    """Parser for the segments of a JPEG (annex B) and the markers in its scans.

    Parameters
    ----------
    huffman : frozenset of (int, int)
        Class and number of the Huffman tables that are defined elsewhere.
    quanta : frozenset of int
        Numbers of the quantization tables that are defined elsewhere.
    """

    def __init__(self, huffman: frozenset[tuple[int, int]], quanta: frozenset[int]) -> None:
        self.huffman, self.quanta = set(huffman), set(quanta)
        self._frame, self._interval = 0, 0
        self._height, self._width = 0, 0
        # Sampling factors and number of the quantization table, by the component's identifier
        self._components: dict[int, tuple[int, int, int]] = {}
        self._max_sampling = 1, 1

    def end(self, data: Data, *, only_tables: bool = False) -> int:
        """Return the offset after the EOI marker; see `end_of_image`."""
        if bytes(data[:2]) != b"\xff\xd8":
            raise ValueError("it is not a JPEG")
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
                raise ValueError("its JPEG has two start markers")
            length = bytes(data[at : at + 2])
            size = int.from_bytes(length, "big")
            if len(length) == 2 and size < 2:
                raise ValueError(DAMAGED_SEGMENT)
            if len(length) < 2 or at + size > len(data):
                break
            content = bytes(data[at + 2 : at + size])
            at += size
            if code == QUANTA:
                self.quanta.update(_quanta(content))
            elif code == HUFFMAN:
                self.huffman.update(huffman_tables(content))
            elif code == RESTART_INTERVAL and len(content) > 1:
                self._interval = int.from_bytes(content[:2], "big")
            elif code in FRAMES:
                self._read_frame(code, content)
            elif code == START_OF_SCAN:
                at, scanned = self._end_of_scan(data, at, self._check_scan(content)), True
        raise ValueError(TRUNCATED)

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
            most_across, most_down = self._max_sampling
            self._max_sampling = max(most_across, across), max(most_down, down)

    def _check_scan(self, content: bytes) -> int:
        """Return the number of restart intervals in a scan; 0 if that is unknown.

        Raises
        ------
        ValueError
            If the header of the scan is damaged, or a table that it uses is missing.
        """
        if not self._frame:
            raise ValueError("its JPEG has no frame")
        if len(content) < 6 or len(content) != 4 + 2 * content[0]:
            raise ValueError(DAMAGED_SEGMENT)
        lossless = self._frame & 3 == 3
        for number, tables in zip(content[1:-3:2], content[2:-3:2], strict=True):
            across, down, quanta = self._components.get(number, (0, 0, 0))
            if not across or not down:
                raise ValueError(DAMAGED_SEGMENT)
            # If no Huffman table is defined, as in Motion JPEG, libjpeg uses the tables of annex
            # K.3.
            coded = not self.huffman or {(0, tables >> 4), (1, tables & 15)} <= self.huffman
            if (self._frame in SEQUENTIAL and not coded) or (
                not lossless and quanta not in self.quanta
            ):
                raise ValueError("its JPEG lacks a table")
        if not self._interval or not self._height:
            return 0
        # An interval is a number of MCUs (minimum coded units).
        side, (most_across, most_down) = 1 if lossless else BLOCK, self._max_sampling
        wide = _ceil_div(self._width, side * most_across)
        high = _ceil_div(self._height, side * most_down)
        if content[0] == 1:  # in a scan of one component, an MCU is one block (A.2.2)
            across, down, _ = self._components[content[1]]
            wide = _ceil_div(_ceil_div(self._width * across, most_across), side)
            high = _ceil_div(_ceil_div(self._height * down, most_down), side)
        return _ceil_div(wide * high, self._interval)

    def _end_of_scan(self, data: Data, at: int, intervals: int) -> int:
        """Return the offset of the first marker in or after a scan that is not a restart."""
        if intervals <= 1:
            # Most scans end with the data, and contain no marker: counting is faster than
            # searching, which would take longer than decoding does without the GIL.
            scan = bytes(data[at:])
            if scan.endswith(END_OF_IMAGE) and scan.count(0xFF) == scan.count(b"\xff\0") + 1:
                return len(data) - len(END_OF_IMAGE)
        for restarts, found in enumerate(SCAN_MARKER.finditer(data, at)):
            code = found[1][0]
            if code not in RESTARTS:
                if restarts + 1 < intervals:
                    raise ValueError("its JPEG lacks restart intervals")
                return found.start()
            if not self._interval or code != RESTARTS[restarts % 8]:
                raise ValueError("the restart markers of its JPEG are out of order")
        raise ValueError(TRUNCATED)


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


@lru_cache(maxsize=256)
def _shared_tables(tables: bytes | None) -> tuple[frozenset[tuple[int, int]], frozenset[int]]:
    """Return the identifiers of the Huffman and quantization tables that tiles share."""
    found = _MarkerParser(frozenset(), frozenset())
    with suppress(ValueError):  # later, a scan that needs a missing table raises an error
        found.end(tables or b"", only_tables=True)
    return frozenset(found.huffman), frozenset(found.quanta)


def segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the marker, start and end of each segment, up to the header of the first scan.

    Iteration also ends at a marker without a segment: decoders disagree on how to read on.
    """
    offset = 2
    while offset + 4 <= len(data) and data[offset] == 0xFF:
        marker = data[offset + 1]
        if marker < FIRST_SEGMENT or marker in WITHOUT_LENGTH:
            return
        end = offset + 2 + int.from_bytes(data[offset + 2 : offset + 4], "big")
        if end > len(data):
            return
        yield marker, offset, end
        if marker == START_OF_SCAN:
            return
        offset = end


@lru_cache(maxsize=256)
def strip_metadata(data: bytes) -> bytes:
    """Return JPEG tables or a header without comments and application segments.

    Levels contain tables and headers and are sent to other processes, and no decoder needs these
    segments.
    """
    return _without(data, METADATA)


def without_restarts(data: bytes) -> bytes:
    """Return a header without its restart interval."""
    return _without(data, {RESTART_INTERVAL})


def _without(data: bytes, markers: Container[int]) -> bytes:
    """Return tables or a header without the segments of some markers."""
    cuts = [(start, end) for marker, start, end in segments(data) if marker in markers]
    for start, end in reversed(cuts):
        data = data[:start] + data[end:]
    return data


def header_length(data: bytes) -> int:
    """Return the offset at which the scan data of a JPEG starts; 0 if there is no scan."""
    return next((end for marker, _, end in segments(data) if marker == START_OF_SCAN), 0)


@lru_cache(maxsize=256)
def read_header(data: bytes) -> Header | None:
    """Parse a header, up to the start of the scan data, with all its tables.

    Returns
    -------
    Header or None
        None if the header is damaged, or its scan does not contain all components of its frame.
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
    known = _quanta(quanta)
    return Header(
        frame=frame_marker,
        bits=frame[0],
        height=int.from_bytes(frame[1:3], "big"),
        width=int.from_bytes(frame[3:5], "big"),
        ids=frame[6::3],
        sampling=tuple((factors >> 4, factors & 15) for factors in frame[7::3]),
        tables=tuple((number >> 4, number & 15) for number in scan[2:-3:2]),
        huffman=huffman,
        quanta=tuple(known.get(number, ()) for number in frame[8::3]),
        transform=transform,
        restarts=restarts,
    )


def header_of_tile(data: bytes, shape: tuple[int, int, int]) -> Header | None:
    """Parse the header of an 8-bit tile; None if its shape is not (height, width, components)."""
    header = read_header(data)
    if header is None or header.bits != BITS:
        return None
    return header if (header.height, header.width, len(header.ids)) == shape else None


class Stacking:
    """How to stack tiles that share a header.

    Parameters
    ----------
    data : bytes
        The header.
    header : Header
        The parsed header.

    Attributes
    ----------
    max_tiles : int
        Maximum number of tiles in a stack; 1 if they can't be stacked.
    strip : bytes
        Scan data of the strip below the tiles.
    strip_rows : int
        Height of the strip in pixels.
    marks : tuple of 7 int
        The two values between which the first component of the strip's blocks alternates. Then the
        data to decode the brightness of a tile's first block: the quantization step, the number of
        Huffman codes of each length (packed in 2 integers of 8 bytes), and the symbols (packed in
        the same way).
    """

    def __init__(self, data: bytes, header: Header) -> None:
        self._data, self._header = data, header
        self._headers: dict[int, bytes] = {}
        self.max_tiles, self.strip, self.marks = 1, b"", NO_MARKS
        across, down = header.sampling[0] if len(header.ids) > 1 else (1, 1)
        self.strip_rows = BLOCK * down
        units_across = -(-header.width // (BLOCK * across))
        self._units = units_across * (header.height // self.strip_rows)
        # The restart interval of a stack is one tile, so a tile must consist of whole MCUs.
        whole = header.height % self.strip_rows == 0 and self._units <= MAX_UNITS
        if whole and header.frame in SEQUENTIAL and not header.restarts:
            strip = _strip(header, units_across, across * down)
            shades = self._shades(strip)
            tables, quanta = huffman_tables(header.huffman), header.quanta[0]
            counts, symbols = tables.get((0, header.tables[0][0]), (b"", b""))
            if shades is not None and quanta and len(symbols) <= MAX_SYMBOLS:
                self.strip, self.max_tiles = strip, max(1, MAX_ROWS // header.height)
                codes = struct.unpack("<4q", counts + symbols.ljust(MAX_SYMBOLS, b"\0"))
                self.marks = (*shades, quanta[0], *codes)

    def header(self, count: int) -> bytes:
        """Return the header for a stack of `count` tiles and a strip."""
        header = self._headers.get(count)
        if header is None:
            header = self._header_of_height(count * self._header.height + self.strip_rows)
            self._headers[count] = header
        return header

    def _header_of_height(self, height: int) -> bytes:
        """Return the header with another height, and with a restart interval of one tile."""
        data = bytearray(self._data)
        for marker, start, _ in segments(self._data):
            if marker in FRAMES:
                data[start + 5 : start + 7] = height.to_bytes(2, "big")
            elif marker == START_OF_SCAN:
                data[start:start] = b"\xff\xdd\0\4" + self._units.to_bytes(2, "big")
        return bytes(data)

    def _shades(self, strip: bytes) -> tuple[int, int] | None:
        """Decode the strip; return its two shades, or None if they are not distinct."""
        picture = self._header_of_height(self.strip_rows) + strip + END_OF_IMAGE
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
        clear = abs(first - second) >= MIN_CONTRAST and bool((rows == expected).all())
        return (first, second) if clear else None


def _quanta(quanta: bytes) -> dict[int, tuple[int, ...]]:
    """Return quantization tables by their numbers (B.2.4.1); truncated ones are empty."""
    found: dict[int, tuple[int, ...]] = {}
    while len(quanta) > BLOCK * BLOCK:
        form = f">{BLOCK * BLOCK}{'H' if quanta[0] >> 4 else 'B'}"
        end = 1 + struct.calcsize(form)
        whole = len(quanta) >= end
        found[quanta[0] & 15] = struct.unpack(form, quanta[1:end]) if whole else ()
        quanta = quanta[end:]
    return found


def _strip(header: Header, units: int, blocks: int) -> bytes:
    """Return scan data for a strip whose first component alternates between bright and gray.

    Return empty bytes if the Huffman tables lack the necessary codes.
    """
    codes = {key: _codes(*table) for key, table in huffman_tables(header.huffman).items()}
    firsts = [codes.get((0, first), {}) for first, _ in header.tables]
    ends = [codes.get((1, other), {}).get(END_OF_BLOCK, "") for _, other in header.tables]
    sizes = [size for size in firsts[0] if 0 < size <= LARGEST_STEP]
    sames = [first.get(SAME, "") for first in firsts[1:]]
    if not sizes or not all(ends) or not all(sames):
        return b""
    size = max(sizes)
    # In `size` bits, all ones encode the largest difference, all zeros its negative (F.1.2).
    steps = [firsts[0][size] + digit * size + ends[0] for digit in "10"]
    chroma = "".join(
        across * down * (same + end)
        for (across, down), same, end in zip(header.sampling[1:], sames, ends[1:], strict=True)
    )
    bits = "".join(
        "".join(steps[(unit * blocks + block) % 2] for block in range(blocks)) + chroma
        for unit in range(units)
    )
    bits += "1" * (-len(bits) % 8)  # padding (F.1.2.3)
    return int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")


def huffman_tables(huffman: bytes) -> dict[tuple[int, int], tuple[bytes, bytes]]:
    """Return Huffman tables: (class, number) -> number of codes of each length, and symbols."""
    found = {}
    while len(huffman) > CODE_LENGTHS:
        counts = huffman[1 : 1 + CODE_LENGTHS]
        end = 1 + CODE_LENGTHS + sum(counts)
        found[huffman[0] >> 4, huffman[0] & 15] = counts, huffman[1 + CODE_LENGTHS : end]
        huffman = huffman[end:]
    return found


def _codes(counts: bytes, symbols: bytes) -> dict[int, str]:
    """Return a Huffman table as symbol -> string of bits (annex C)."""
    code, found, rest = 0, {}, iter(symbols)
    for length, count in enumerate(counts, 1):
        for symbol in islice(rest, count):
            found[symbol] = f"{code:0{length}b}"
            code += 1
        code <<= 1
    return found
