"""Headers of JPEG 2000 code streams (T.800, annex A), as far as our kernels support them."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.gpu.jpeg2000.jpeg2000_tables import BYPASS, CAUSAL, FAST

if TYPE_CHECKING:
    from collections.abc import Iterator

    from napari_wsigpu.model.arrays import Integers

# SOC, CAP, SIZ, COD, COC, QCD, QCC, RGN, SOT and SOD.
START, EXTENSIONS, SIZE, CODING, CODING_OF_ONE = 0xFF4F, 0xFF50, 0xFF51, 0xFF52, 0xFF53
QUANTA, QUANTA_OF_ONE, REGION, TILE_PART, DATA = 0xFF5C, 0xFF5D, 0xFF5E, 0xFF90, 0xFF93
TILE_PART_LENGTH = 12  # of SOT
# COM, TLM, PLM, PLT and CRG: comments, lengths and registration, which may differ within a form.
SKIPPED = (0xFF64, 0xFF55, 0xFF57, 0xFF58, 0xFF63)
# POC, PPM and PPT.
REFUSED = {
    0xFF5F: "changes of progression",
    0xFF60: "packed packet headers",
    0xFF61: "packed packet headers",
}
MOST_COMPONENTS, MOST_BITS, MOST_PLANES, MOST_LEVELS = 4, 16, 30, 32
# packets.cu keeps layers in tag tree nodes, where 0x7FFF means that the value is not known yet.
MOST_LAYERS = 0x7FFE
# One thread reads all packet headers of a tile, which takes long for large images.
LONGEST_SIDE, MOST_PIXELS = 8192, 1 << 22
WHOLE_PRECINCT = 15
ONLY_FAST = struct.pack(">HHI", EXTENSIONS, 8, 1 << 17)
# Subsampling of the components of YCbCr 4:2:2 and 4:2:0.
SUBSAMPLED = ([(1, 1), (2, 1), (2, 1)], [(1, 1), (2, 2), (2, 2)])


class Component(NamedTuple):
    """Properties of a component (SIZ: T.800, A.5.1).

    Attributes
    ----------
    bits : int
        Bits of a sample.
    signed : bool
        Whether samples can be negative.
    across, down : int
        Subsampling: pixels for each sample.
    """

    bits: int
    signed: bool
    across: int
    down: int


class Coding(NamedTuple):
    """Coding style of a component (COD and COC: T.800, A.6.1 and A.6.2).

    Attributes
    ----------
    levels : int
        Decomposition levels of the wavelet.
    block : tuple of (int, int)
        Width and height of code blocks, as exponents of 2.
    style : int
        Bits of the code block style (table A.19).
    wavelet : int
        0 for 9/7, 1 for 5/3.
    precincts : tuple of (int, int)
        Width and height of the precincts of each resolution, as exponents of 2.
    """

    levels: int
    block: tuple[int, int]
    style: int
    wavelet: int
    precincts: tuple[tuple[int, int], ...]

    @property
    def reversible(self) -> bool:
        """Whether the wavelet is 5/3, which is computed in integers."""
        return self.wavelet == 1

    @property
    def fast(self) -> bool:
        """Whether code blocks are coded for high throughput (T.814)."""
        return bool(self.style & FAST)


class Quanta(NamedTuple):
    """Quantization of a component (QCD and QCC: T.800, A.6.4 and A.6.5).

    Attributes
    ----------
    style : int
        0 for none, 1 for steps derived from the step of LL, 2 for a step for each subband.
    guard : int
        Number of guard bits.
    steps : tuple of (int, int)
        Exponent and mantissa for each subband.
    """

    style: int
    guard: int
    steps: tuple[tuple[int, int], ...]


class Header(NamedTuple):
    """Main header and header of the first tile-part of a code stream that can be decoded here.

    Attributes
    ----------
    left, upper, right, lower : int
        Edges of the image on the reference grid.
    components : tuple of Component
        Properties of each component.
    style, progression, layers : int
        Packet style (table A.13), progression order (table A.16) and number of layers.
    transform : bool
        Whether the first three components are transformed together (T.800, annex G).
    coding, quanta : tuple
        Coding style and quantization of each component.
    shifts : tuple of int
        Up-shift of each component's region of interest (T.800, annex H).
    text : bytes
        All marker segments that the other attributes come from, one after another.
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

    @property
    def fast(self) -> bool:
        """Whether the code blocks of all components are coded for high throughput (T.814)."""
        return all(coding.fast for coding in self.coding)


def read_header(stream: bytes | memoryview) -> Header | str:
    """Return the contents of the headers, or the reason why the stream cannot be decoded here."""
    try:
        return _read(stream)
    except (struct.error, IndexError, KeyError):
        return "its main header is damaged"


def in_brief(head: bytes) -> bytes:
    """Return headers without the segments that differ from tile to tile, as a key for a cache.

    Parameters
    ----------
    head : bytes
        Start of a code stream. Segments that it does not contain entirely are dropped.
    """
    kept = head[:2]
    for marker, start, end in _spans(head):
        if marker == TILE_PART:
            kept += head[start : start + 4] + bytes(TILE_PART_LENGTH - 4)
        elif marker not in SKIPPED:
            kept += head[start:end]
    return kept


def decisive_bytes(head: bytes) -> Integers:
    """Return positions of bytes such that code streams that are equal there are so `in_brief`."""
    positions = [np.arange(2)]
    for marker, start, end in _spans(head):
        varies = marker == TILE_PART or marker in SKIPPED
        positions.append(np.arange(start, start + 4 if varies else end))
    return np.concatenate(positions)


def _spans(head: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield marker, start and end of each segment up to SOD that is entirely in `head`."""
    at = 2
    while len(head) - at >= 4:
        marker, length = struct.unpack_from(">HH", head, at)
        end = at + (
            2 if marker == DATA else TILE_PART_LENGTH if marker == TILE_PART else 2 + length
        )
        if end > len(head):
            return
        yield marker, at, end
        if marker == DATA:
            return
        at = end


def _segments(stream: bytes | memoryview) -> list[tuple[int, bytes]] | str:
    """Return the marker segments of the headers, up to the first SOD, or why they are refused."""
    if bytes(stream[:2]) != START.to_bytes(2, "big"):
        return "it is not a JPEG 2000 code stream"
    found: list[tuple[int, bytes]] = []
    at, known = 2, {EXTENSIONS, SIZE, CODING, CODING_OF_ONE, QUANTA, QUANTA_OF_ONE, REGION}
    while True:
        (marker,) = struct.unpack_from(">H", stream, at)
        if marker == DATA and SIZE not in known:
            return found
        if marker == TILE_PART:
            # COD and QCD in a tile-part header override the main header's COC and QCC, but not the
            # tile-part's own (A.6). This is not supported.
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
    by_marker = dict(segments)
    # Pcap (T.800, A.5.2) has a bit for each part of the standard; bit 17 is T.814.
    if by_marker.get(EXTENSIONS, ONLY_FAST)[4:8] != ONLY_FAST[4:]:
        return "it has extensions"
    sizes = by_marker[SIZE]
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
    for start in range(40, 40 + 3 * count, 3):
        depth, x, y = struct.unpack_from("3B", sizes, start)
        components.append(Component((depth & 127) + 1, depth > 127, x, y))
    if any(one.bits > MOST_BITS or not one.across or not one.down for one in components):
        return f"its samples have more than {MOST_BITS} bits"
    style, progression, layers, transform = struct.unpack_from(">BBHB", by_marker[CODING], 4)
    if style > 7 or transform > 1:
        return "its packets or colors are coded in an unsupported way"
    coding = [_coding(by_marker[CODING], 9, bool(style & 1))] * count
    quanta = [_quanta(by_marker[QUANTA], 4)] * count
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
    """Return why a header that could be read is not decoded here; None if it is."""
    first = header.coding[:3]
    if header.layers < 1 or header.progression > 4:
        return "its main header is damaged"
    if header.layers > MOST_LAYERS:
        return f"it has more than {MOST_LAYERS} layers"
    for coding, quanta, shift in zip(header.coding, header.quanta, header.shifts, strict=True):
        wide, high = coding.block
        if coding.levels > MOST_LEVELS or not (wide <= 10 and high <= 10 and wide + high <= 12):
            return "its code blocks or levels exceed the limits of the standard"
        if coding.style & ~(FAST | CAUSAL if coding.fast else 63) or coding.wavelet > 1:
            return "its code blocks or wavelets are coded in an unsupported way"
        if coding.fast and (shift or header.layers > 1 or not header.fast):
            return "its high-throughput code blocks have layers or a region of interest"
        if shift and coding.style & BYPASS:
            return "its region of interest has raw bits, on which decoders disagree"
        if len(coding.precincts) != coding.levels + 1:
            return "its main header is damaged"
        if any(0 in size for size in coding.precincts[1:]):
            return "its precincts are smaller than the standard allows"
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
        return "its components have different depths"
    spans = [(one.across, one.down) for one in header.components]
    if set(spans) != {(1, 1)} and (
        spans not in SUBSAMPLED or depths != {(8, False)} or header.left or header.upper
    ):
        return "its components have different sizes"
    same = {(coding.levels, coding.reversible) for coding in first}
    extents = {(one.across, one.down) for one in header.components[:3]}
    if header.transform and (len(first) < 3 or len(same) > 1 or len(extents) > 1):
        return "its main header contradicts itself"
    return None
