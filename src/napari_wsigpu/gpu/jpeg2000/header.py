"""The headers of a JPEG 2000 code stream: what the code streams of a batch have in common."""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

from napari_wsigpu.gpu.jpeg2000.tables import BYPASS

START, SIZE, CODING, CODING_OF_ONE = 0xFF4F, 0xFF51, 0xFF52, 0xFF53
QUANTA, QUANTA_OF_ONE, REGION, TILE_PART, DATA = 0xFF5C, 0xFF5D, 0xFF5E, 0xFF90, 0xFF93
TILE_PART_LENGTH = 12
# Comments, and tables of lengths: code streams of one form may differ in these.
SKIPPED = (0xFF64, 0xFF55, 0xFF57, 0xFF58, 0xFF63)
REFUSED = {
    0xFF50: "high throughput or other extensions",
    0xFF5F: "changes of progression",
    0xFF60: "packed packet headers",
    0xFF61: "packed packet headers",
}
MOST_COMPONENTS, MOST_BITS, MOST_PLANES, MOST_LEVELS = 4, 16, 30, 32
# packets.cu notes the layer of each code block in 16 bits, and one value for none.
MOST_LAYERS = 0x7FFE
# A line has to fit the shared memory of a block of threads. Packet headers are read one after the
# other, so that nvJPEG2000 is faster with large pictures.
LONGEST_SIDE, MOST_PIXELS = 8192, 1 << 22
WHOLE_PRECINCT = 15
# Pixels that a sample of YCbCr spans.
SUBSAMPLED = ([(1, 1), (2, 1), (2, 1)], [(1, 1), (2, 2), (2, 2)])


class Component(NamedTuple):
    """What a component's samples are.

    Attributes
    ----------
    bits : int
        Of a sample.
    signed : bool
        Whether they can be negative.
    across, down : int
        Pixels that a sample spans.
    """

    bits: int
    signed: bool
    across: int
    down: int


class Coding(NamedTuple):
    """How a component is coded.

    Attributes
    ----------
    levels : int
        Of the wavelet.
    block : tuple of (int, int)
        Width and height of code blocks, as powers of 2.
    style : int
        Of code blocks, as the standard numbers it.
    wavelet : int
        0 for 9/7, 1 for 5/3.
    precincts : tuple of (int, int)
        Width and height of the precincts of each resolution, as powers of 2.
    """

    levels: int
    block: tuple[int, int]
    style: int
    wavelet: int
    precincts: tuple[tuple[int, int], ...]

    @property
    def reversible(self) -> bool:
        """Whether its wavelet is 5/3."""
        return self.wavelet == 1


class Quanta(NamedTuple):
    """How a component is quantised.

    Attributes
    ----------
    style : int
        0 not at all, 1 derived from the lowest band, 2 each band by itself.
    guard : int
        Bits more than the steps say.
    steps : tuple of (int, int)
        Exponent and mantissa of each band.
    """

    style: int
    guard: int
    steps: tuple[tuple[int, int], ...]


class Header(NamedTuple):
    """A main header, and that of the first tile part, that can be decoded here.

    Attributes
    ----------
    left, upper, right, lower : int
        Edges of the picture.
    components : tuple of Component
        Its components.
    style, progression, layers : int
        Of packets.
    transform : bool
        Whether the first three components are transformed together.
    coding, quanta : tuple
        Of each component.
    shifts : tuple of int
        Of each component's region of interest.
    text : bytes
        All marker segments that tell this, one after another.
    """

    left: int
    upper: int
    right: int
    lower: int
    components: tuple[Component, ...]
    style: int
    progression: int
    layers: int
    transform: bool
    coding: tuple[Coding, ...]
    quanta: tuple[Quanta, ...]
    shifts: tuple[int, ...]
    text: bytes


def read_header(stream: bytes | memoryview) -> Header | str:
    """Return what a code stream's headers say, or why it can't be decoded here."""
    try:
        return _read(stream)
    except (struct.error, IndexError, KeyError):
        return "its main header is damaged"


def in_brief(head: bytes) -> bytes:
    """Return headers without what differs from tile to tile, for who has seen many.

    Parameters
    ----------
    head : bytes
        The begin of a code stream. Segments that lie beyond it are missing from what is returned.
    """
    first = head.find(TILE_PART.to_bytes(2, "big") + b"\x00\x0a")
    if first < 0:
        return head
    at, kept = first + TILE_PART_LENGTH, b""
    while len(head) - at >= 4:
        marker, length = struct.unpack_from(">HH", head, at)
        if marker == DATA:
            break
        if marker not in SKIPPED:
            kept += head[at : at + 2 + length]
        at += 2 + length
    return head[: first + 4] + bytes(TILE_PART_LENGTH - 4) + kept + DATA.to_bytes(2, "big")


def _segments(stream: bytes | memoryview) -> list[tuple[int, bytes]] | str:
    if bytes(stream[:2]) != START.to_bytes(2, "big"):
        return "it is no JPEG 2000 code stream"
    found: list[tuple[int, bytes]] = []
    at, known = 2, {SIZE, CODING, CODING_OF_ONE, QUANTA, QUANTA_OF_ONE, REGION}
    while True:
        (marker,) = struct.unpack_from(">H", stream, at)
        if marker == DATA and SIZE not in known:
            return found
        if marker == TILE_PART:
            # A tile's own default would be between what both headers say of one component.
            known = {CODING_OF_ONE, QUANTA_OF_ONE, REGION}
            at += TILE_PART_LENGTH
            continue
        if marker in REFUSED:
            return f"it has {REFUSED[marker]}"
        (length,) = struct.unpack_from(">H", stream, at + 2)
        if marker not in SKIPPED:
            if marker not in known:
                return f"its headers have the marker {marker:04X}"
            found.append((marker, bytes(stream[at : at + 2 + length])))
            if length < 3 or len(found[-1][1]) != 2 + length:
                return "its main header is damaged"
        at += 2 + length


def _read(stream: bytes | memoryview) -> Header | str:
    segments = _segments(stream)
    if isinstance(segments, str):
        return segments
    one = dict(segments)
    sizes = one[SIZE]
    right, lower, left, upper, *tile = struct.unpack_from(">8I", sizes, 6)
    wide, high, across, down = tile
    (count,) = struct.unpack_from(">H", sizes, 38)
    if not 1 <= count <= MOST_COMPONENTS:
        return f"it has {count} components"
    if not (across <= left < right <= across + wide and down <= upper < lower <= down + high):
        return "it has several tiles"
    sides = right - left, lower - upper
    if max(sides) > LONGEST_SIDE or math.prod(sides) > MOST_PIXELS or max(right, lower) >= 1 << 30:
        return "it is too large"
    components = []
    for place in range(40, 40 + 3 * count, 3):
        depth, x, y = struct.unpack_from("3B", sizes, place)
        components.append(Component((depth & 127) + 1, depth > 127, x, y))
    if any(one.bits > MOST_BITS or not one.across or not one.down for one in components):
        return f"its samples have more than {MOST_BITS} bits"
    style, progression, layers, transform = struct.unpack_from(">BBHB", one[CODING], 4)
    if style > 7 or transform > 1:
        return "its packets or colours are coded another way"
    coding = [_coding(one[CODING], 9, bool(style & 1))] * count
    quanta = [_quanta(one[QUANTA], 4)] * count
    shifts = [0] * count
    for marker, text in segments:
        if marker == CODING_OF_ONE:
            coding[text[4]] = _coding(text, 6, bool(text[5] & 1))
        elif marker == QUANTA_OF_ONE:
            quanta[text[4]] = _quanta(text, 5)
        elif marker == REGION:
            shifts[text[4]] = text[6]
    header = Header(
        *(left, upper, right, lower, tuple(components), style, progression, layers),
        *(bool(transform), tuple(coding), tuple(quanta), tuple(shifts)),
        b"".join(text for _, text in segments),
    )
    return _refusal(header) or header


def _coding(text: bytes, at: int, own_precincts: bool) -> Coding:
    levels, wide, high, style, wavelet = struct.unpack_from(">5B", text, at)
    precincts = ((WHOLE_PRECINCT, WHOLE_PRECINCT),) * (levels + 1)
    if own_precincts:
        sizes = text[at + 5 : at + 6 + levels]
        precincts = tuple((size & 15, size >> 4) for size in sizes)
    return Coding(levels, (wide + 2, high + 2), style, wavelet, precincts)


def _quanta(text: bytes, at: int) -> Quanta:
    style, guard = text[at] & 31, text[at] >> 5
    if style == 0:
        return Quanta(style, guard, tuple((step >> 3, 0) for step in text[at + 1 :]))
    steps = struct.unpack(f">{(len(text) - at - 1) // 2}H", text[at + 1 :])
    return Quanta(style, guard, tuple((step >> 11, step & 0x7FF) for step in steps))


def _refusal(header: Header) -> str | None:
    """Say why a header that could be read is not decoded here."""
    first = header.coding[:3]
    if header.layers < 1 or header.progression > 4:
        return "its main header is damaged"
    if header.layers > MOST_LAYERS:
        return f"it has more than {MOST_LAYERS} layers"
    for coding, quanta, shift in zip(header.coding, header.quanta, header.shifts, strict=True):
        wide, high = coding.block
        if coding.levels > MOST_LEVELS or not (wide <= 10 and high <= 10 and wide + high <= 12):
            return "its code blocks or levels are beyond the standard"
        if coding.style >= 64 or coding.wavelet > 1:
            return "its code blocks or wavelets are coded another way"
        if shift and coding.style & BYPASS:
            return "its region of interest has bits that are not coded, which decoders disagree on"
        if len(coding.precincts) != coding.levels + 1:
            return "its main header is damaged"
        if any(0 in size for size in coding.precincts[1:]):
            return "its precincts are beyond the standard"
        if coding.reversible != (quanta.style == 0) or quanta.style > 2:
            return "its main header contradicts itself"
        bands = 1 if quanta.style == 1 else 3 * coding.levels + 1
        if len(quanta.steps) < bands:
            return "its main header is damaged"
        most = max(exponent for exponent, _ in quanta.steps)
        if quanta.guard + most - 1 + shift > MOST_PLANES:
            return "its coefficients have too many bits"
    depths = {one[:2] for one in header.components}
    if len(depths) > 1:
        return "its components are of different depths"
    spans = [(one.across, one.down) for one in header.components]
    if set(spans) != {(1, 1)} and (
        spans not in SUBSAMPLED or depths != {(8, False)} or header.left or header.upper
    ):
        return "its components are of different sizes"
    same = {(coding.levels, coding.reversible) for coding in first}
    extents = {(one.across, one.down) for one in header.components[:3]}
    if header.transform and (len(first) < 3 or len(same) > 1 or len(extents) > 1):
        return "its main header contradicts itself"
    return None
