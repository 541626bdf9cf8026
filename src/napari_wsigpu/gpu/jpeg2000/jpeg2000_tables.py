"""Tables for the JPEG 2000 kernels: row types, constants, and the tables of ITU-T T.800."""

from __future__ import annotations

from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.native.tables import row_type

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from napari_wsigpu.model.arrays import Integers

# A code block. target: offset of its first coefficient within a tile; pitch: coefficients from one
# row to the next; width, height: its size in samples; planes: maximum number of bit planes (Mb plus
# the shift); orientation: 0 for LL and LH, 1 for HL, 2 for HH; style: bits of T.800, table A.19;
# shift: up-shift of the region of interest; scale: half a quantization step.
BLOCK = row_type(
    "i8 target, i4 pitch, i4 width, i4 height, i4 planes, i4 orientation, i4 style, i4 shift, "
    "i4 reversible, f4 scale, i4 unused"
)

# The code blocks of a subband in one precinct. first: index of the first one; wide, high: number of
# code blocks across and down; tree, nodes: first node, and number of nodes, of each tag tree;
# planes, style: those of its code blocks.
BAND = row_type("i4 first, i4 wide, i4 high, i4 tree, i4 nodes, i4 planes, i4 style")
# first, count: index of the first band of the packet's precinct, and number of bands.
PACKET = row_type("i4 first, i4 count, i4 layer")

# State of a code block after its packet headers have been read. first, last: its records; bytes,
# passes: totals of these; planes: coded bit planes; length_bits: Lblock (T.800, B.10.7.1), 0 until
# the first inclusion; room: coding passes that still fit the codeword segment.
BLOCK_STATE = row_type("i4 first, i4 last, u4 bytes, i4 passes, i4 planes, i4 length_bits, i4 room")
# A part of a codeword segment in one packet. offset, length: its bytes; next: the code block's next
# record, or -1; passes: coding passes that end in it; starts: whether it starts a segment.
RECORD = row_type("u8 offset, u4 length, i4 next, i4 passes, i4 starts")

# Code streams of a batch, with addresses in device memory. starts, lengths: position of each stream
# in `encoded`, u8; header: segments that its headers must have, see Form in packets.cu; tree: nodes
# in each of a tile's two sets of tag trees; record_count: records for each tile; status: result for
# each tile, i4.
STREAMS = row_type(
    "u8 encoded, u8 starts, u8 lengths, u8 header, u8 packets, u8 bands, u8 states, u8 records, "
    "u8 nodes, u8 status, i4 tiles, i4 header_length, i4 packet_count, i4 band_count, "
    "i4 block_count, i4 style, i4 layers, i4 tree, i4 record_count, i4 unused"
)

# A component. plane: offset of its first coefficient within a tile; left, upper: position of its
# first sample; across, down: subsampling (XRsiz, YRsiz); middle: DC level shift; lowest, highest:
# range of its samples; lifted: whether it has several resolutions.
COMPONENT = row_type(
    "i8 plane, i4 pitch, i4 width, i4 height, i4 left, i4 upper, i4 across, i4 down, "
    "i4 middle, i4 lowest, i4 highest, i4 reversible, i4 lifted"
)

# The inverse wavelet transform to one resolution (T.800, F.3) of `planes` components that are
# transformed alike. plane, half: offsets of the first one's coefficients within a tile, and of its
# half in memory for every second resolution; plane_size, half_plane: distance of components; pitch,
# half_pitch: elements from one row to the next; width, height, low_width, low_height: size of the
# resolution and of its low-pass band; left, upper: 1 if the first column or row is high-pass;
# finer: number of resolutions that are finer; coarsest: whether none is coarser.
LIFT = row_type(
    "i8 plane, i8 half, i8 plane_size, i8 half_plane, i4 planes, i4 pitch, i4 half_pitch, "
    "i4 width, i4 height, i4 low_width, i4 low_height, i4 left, i4 upper, i4 finer, i4 coarsest, "
    "i4 reversible"
)

# See `_transitions`, `_significance`, `_signs` and `_quads`.
TABLES = row_type("u4 transitions[188], u1 significance[1536], u1 signs[256], u2 quads[2048]")

STRUCTURES = {
    "Block": BLOCK,
    "Band": BAND,
    "Packet": PACKET,
    "BlockState": BLOCK_STATE,
    "Record": RECORD,
    "Streams": STREAMS,
    "Component": COMPONENT,
    "Lift": LIFT,
    "Tables": TABLES,
}

# Bits of the code block style (T.800, table A.19), and of the packet style (table A.13: SOP and EPH
# markers).
BYPASS, RESET_CONTEXTS, TERMINATE_ALL, CAUSAL, SEGMENT_SYMBOLS = 1, 2, 4, 8, 32
FAST = 64  # high throughput (T.814, A.4)
PACKET_STARTS, HEADER_ENDS = 2, 4
# Status of a tile: decoded, headers differ from the form's, bytes are missing, data is damaged.
FINE, OTHER_FORM, CUT, DAMAGED = range(4)

# Context of a run in the MQ decoder (T.800, table D.7).
RUN = 17
THREADS, THREADS_OF_BLOCKS, THREADS_OF_MAGNITUDES = 128, 64, 32
BUCKETS = 2048
# Samples that a block of threads transforms, and a thread in a line; samples on both sides that
# these depend on.
PATCH_WIDTH, PATCH_HEIGHT, SEGMENT, REACH = 64, 32, 8, 4
# Quads of 2 by 2 samples in a row of a code block. Words of bits for those that a block of threads
# decodes at once, 4 * 31 bits each, and for 4 bytes per thread more.
MOST_QUADS, RING = 512, 256

CONSTANTS = {
    name: globals()[name]
    for name in (
        *("BYPASS", "RESET_CONTEXTS", "TERMINATE_ALL", "CAUSAL", "SEGMENT_SYMBOLS", "FAST"),
        *("PACKET_STARTS", "HEADER_ENDS", "FINE", "OTHER_FORM", "CUT", "DAMAGED"),
        *("RUN", "THREADS", "THREADS_OF_BLOCKS", "THREADS_OF_MAGNITUDES", "BUCKETS"),
        *("PATCH_WIDTH", "PATCH_HEIGHT", "SEGMENT", "REACH"),
        *("MOST_QUADS", "RING"),
    )
}

# Table C.2 of T.800: Qe, NMPS, NLPS and SWITCH of each state. The last state is for the uniform
# context (T.800, table D.7).
STATES = """
5601 1 1 1  3401 2 6 0  1801 3 9 0  0AC1 4 12 0  0521 5 29 0  0221 38 33 0  5601 7 6 1
5401 8 14 0  4801 9 14 0  3801 10 14 0  3001 11 17 0  2401 12 18 0  1C01 13 20 0  1601 29 21 0
5601 15 14 1  5401 16 14 0  5101 17 15 0  4801 18 16 0  3801 19 17 0  3401 20 18 0  3001 21 19 0
2801 22 19 0  2401 23 20 0  2201 24 21 0  1C01 25 22 0  1801 26 23 0  1601 27 24 0  1401 28 25 0
1201 29 26 0  1101 30 27 0  0AC1 31 28 0  09C1 32 29 0  08A1 33 30 0  0521 34 31 0  0441 35 32 0
02A1 36 33 0  0221 37 34 0  0141 38 35 0  0111 39 36 0  0085 40 37 0  0049 41 38 0  0025 42 39 0
0015 43 40 0  0009 44 41 0  0005 45 42 0  0001 45 43 0  5601 46 46 0
"""


def _transitions() -> NDArray[np.uint32]:
    """Return the two states that follow each state of the MQ decoder.

    A state has Qe in its upper half, its row in this table from bit 3, and the more probable symbol
    in bit 0. There is a row for each state of `STATES` and more probable symbol (0, 1): the states
    that follow the more and the less probable symbol.
    """
    numbers = STATES.split()

    def state(number: str, symbol: int) -> int:
        index = int(number)
        return int(numbers[4 * index], 16) << 16 | (2 * index + symbol) << 3 | symbol

    found = [
        following
        for start in range(0, len(numbers), 4)
        for symbol in (0, 1)
        for following in (
            state(numbers[start + 1], symbol),
            state(numbers[start + 2], symbol ^ int(numbers[start + 3])),
        )
    ]
    return np.array(found, np.uint32)


def _significance() -> NDArray[np.uint8]:
    """Return the context of significance for each 3 by 3 neighborhood (T.800, table D.1).

    The index has a bit for each sample, set if it is significant: bits 0 to 2 for the left column
    from top to bottom, 3 to 5 for the middle one, 6 to 8 for the right one. There are 512 entries
    for each orientation. The index of only the sample itself stands for a run.
    """
    bits = np.arange(512)[:, None] >> np.arange(9) & 1
    across, down = bits[:, 1] + bits[:, 7], bits[:, 3] + bits[:, 5]
    corners = bits[:, 0] + bits[:, 2] + bits[:, 6] + bits[:, 8]
    # The table's rows: the first condition that holds gives the context, 0 if none does.
    contexts = range(8, 0, -1)

    # In LL and LH, horizontal neighbors (`first`) rank before vertical ones; in HL, the reverse.
    def by_sides(first: Integers, second: Integers) -> Integers:
        one = first == 1
        strong = [first == 2, one & (second > 0), one & (corners > 0), one]
        weak = [second == 2, second == 1, corners > 1, corners == 1]
        return np.select([*strong, *weak], contexts, 0)

    sides, single = across + down, corners == 1
    strong = [corners > 2, (corners == 2) & (sides > 0), corners == 2]
    weak = [single & (sides > 1), single & (sides == 1), single, sides > 1, sides == 1]
    diagonal = np.select([*strong, *weak], contexts, 0)
    found = np.stack([by_sides(across, down), by_sides(down, across), diagonal])
    found[:, 16] = RUN
    return found.astype(np.uint8).ravel()


def _signs() -> NDArray[np.uint8]:
    """Return the context of a sign in bits 0 to 2, and the XOR bit in bit 3 (tables D.2 and D.3).

    The index has two bits for each neighbor (left, upper, lower, right, from bit 0): whether it is
    significant, and whether it is negative.
    """
    index = np.arange(256)[:, None] >> np.arange(0, 8, 2)
    values = (index & 1) * (1 - (index & 2))
    across = np.clip(values[:, 0] + values[:, 3], -1, 1)
    down = np.clip(values[:, 1] + values[:, 2], -1, 1)
    turned = (across < 0) | ((across == 0) & (down < 0))
    down = np.where(across < 0, -down, np.where(across == 0, np.abs(down), down))
    context = np.where(across == 0, down, down + 3)
    found: NDArray[np.uint8] = (context | turned << 3).astype(np.uint8)
    return found


def _quads() -> NDArray[np.uint16]:
    """Return an entry for each context and next 7 bits, for the first and for other rows of quads.

    Bits 0 to 2 are the length of the code, bit 3 the offset bit, then 4 bits each for the
    significant samples, e_1 and e_k (T.814, 7.3.5).
    """
    found = np.zeros((2, 8, 128), np.uint16)
    folder = resources.files("napari_wsigpu.gpu.jpeg2000")
    for line in folder.joinpath("quads.txt").read_text("ascii").splitlines()[2:]:
        row, context, *codes = line.split()
        for code in codes:
            samples, offset, exponents, ones, high, low, length = (int(digit, 16) for digit in code)
            entry = exponents << 12 | ones << 8 | samples << 4 | offset << 3 | length
            found[int(row), int(context), 16 * high + low :: 1 << length] = entry
    return found.ravel()


@lru_cache(maxsize=1)
def tables() -> NDArray[np.void]:
    """Return the one row of type `TABLES` that the kernels read."""
    found = np.zeros(1, TABLES)
    found["transitions"], found["significance"] = _transitions(), _significance()
    found["signs"], found["quads"] = _signs(), _quads()
    return found
