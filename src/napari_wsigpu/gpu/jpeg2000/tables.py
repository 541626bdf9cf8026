"""What the kernels of JPEG 2000 read: structures, and the tables of the standard."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from napari_wsigpu.gpu.device.tables import row_type

if TYPE_CHECKING:
    from numpy.typing import NDArray

# A code block of a tile. target: of its first coefficient in the tile's; pitch: coefficients from
# row to row; planes: bits of a coefficient at most; orientation: 0 of LL and LH, 1 HL, 2 HH; style:
# of code blocks; shift: of a region of interest; scale: half a quantisation step.
BLOCK = row_type(
    "i8 target, i4 pitch, i4 width, i4 height, i4 planes, i4 orientation, i4 style, i4 shift, "
    "i4 reversible, f4 scale, i4 used"
)

# The code blocks of a band that are in one precinct. first: the first of them; wide, high: how
# many; tree: the first node of their tag trees; nodes: how many there are.
BAND = row_type("i4 first, i4 wide, i4 high, i4 tree, i4 nodes")
# first, count: of its bands.
PRECINCT = row_type("i4 first, i4 count")
PACKET = row_type("i4 precinct, i4 layer")

# What packet headers say of a code block. first, last: of its records; planes: that are coded;
# length_bits: of the length of a part; room: passes that its last codeword segment may get.
BLOCK_STATE = row_type("i4 first, i4 last, u4 bytes, i4 passes, i4 planes, i4 length_bits, i4 room")
# A part of a codeword segment, in one packet. next: the code block's next one, or -1; starts:
# whether it is the segment's first.
RECORD = row_type("u8 offset, u4 length, i4 next, i4 passes, i4 starts")

# A component. plane: of its first coefficient in the tile's; left, upper: its first sample; across,
# down: pixels that one spans; middle: what is added; lowest, highest: of its samples.
COMPONENT = row_type(
    "i8 plane, i4 pitch, i4 width, i4 height, i4 left, i4 upper, i4 across, i4 down, "
    "i4 middle, i4 lowest, i4 highest, i4 reversible, i4 unused"
)

# See `transitions`, `significance` and `signs`.
TABLES = row_type("u4 transitions[94], u1 significance[1536], u1 signs[256]")

STRUCTURES = {
    "Block": BLOCK,
    "Band": BAND,
    "Precinct": PRECINCT,
    "Packet": PACKET,
    "BlockState": BLOCK_STATE,
    "Record": RECORD,
    "Component": COMPONENT,
    "Tables": TABLES,
}

# Of code blocks, as the standard numbers them; of packets.
BYPASS, RESET_CONTEXTS, TERMINATE_ALL, CAUSAL, SEGMENT_SYMBOLS = 1, 2, 4, 8, 32
PACKET_STARTS, HEADER_ENDS = 2, 4
# What is wrong with a tile.
FINE, OTHER_FORM, CUT, DAMAGED = range(4)

THREADS, THREADS_OF_BLOCKS = 128, 64
BUCKETS = 2048
LINE_SAMPLES = 8192

CONSTANTS = {
    name: globals()[name]
    for name in (
        *("BYPASS", "RESET_CONTEXTS", "TERMINATE_ALL", "CAUSAL", "SEGMENT_SYMBOLS"),
        *("PACKET_STARTS", "HEADER_ENDS", "FINE", "OTHER_FORM", "CUT", "DAMAGED"),
        *("THREADS", "THREADS_OF_BLOCKS", "BUCKETS", "LINE_SAMPLES"),
    )
}

# Table C.2 of ITU-T T.800: interval, next state after the more and the less probable symbol, and
# whether they change places.
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
    """Return the states of contexts, two for each line of the standard's table.

    The interval is the upper half; then 7 bits each for the states that follow the more and the
    less probable symbol, and the more probable one.
    """
    numbers = STATES.split()
    found = []
    for start in range(0, len(numbers), 4):
        interval, likely, unlikely, switch = numbers[start : start + 4]
        for symbol in (0, 1):
            after, other = 2 * int(likely) + symbol, 2 * int(unlikely) + (symbol ^ int(switch))
            found.append(int(interval, 16) << 16 | after << 8 | other << 1 | symbol)
    return np.array(found, np.uint32)


def _significance() -> NDArray[np.uint8]:
    """Return the context of each 3 by 3 samples for each orientation (table D.1).

    Of the significant ones, bits 0 to 2 are the left column from above, 3 to 5 the middle one.
    """
    bits = np.arange(512)[:, None] >> np.arange(9) & 1
    across, down = bits[:, 1] + bits[:, 7], bits[:, 3] + bits[:, 5]
    corners = bits[:, 0] + bits[:, 2] + bits[:, 6] + bits[:, 8]

    def by_sides(first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.select(
            [
                first == 2,
                (first == 1) & (second > 0),
                (first == 1) & (corners > 0),
                first == 1,
                second == 2,
                second == 1,
                corners > 1,
                corners == 1,
            ],
            [8, 7, 6, 5, 4, 3, 2, 1],
            0,
        )

    sides = across + down
    diagonal = np.select(
        [
            corners > 2,
            (corners == 2) & (sides > 0),
            corners == 2,
            (corners == 1) & (sides > 1),
            (corners == 1) & (sides == 1),
            corners == 1,
            sides > 1,
            sides == 1,
        ],
        [8, 7, 6, 5, 4, 3, 2, 1],
        0,
    )
    found = np.stack([by_sides(across, down), by_sides(down, across), diagonal])
    return found.astype(np.uint8).ravel()


def _signs() -> NDArray[np.uint8]:
    """Return the context of a sign, and in bit 3 whether it is turned (tables D.2 and D.3).

    Bits 0 to 3 of the index: which of the samples at the left, above, below and at the right are
    significant; bits 4 to 7: which are negative.
    """
    index = np.arange(256)
    values = (index[:, None] >> np.arange(4) & 1) * (
        1 - 2 * (index[:, None] >> np.arange(4, 8) & 1)
    )
    across = np.clip(values[:, 0] + values[:, 3], -1, 1)
    down = np.clip(values[:, 1] + values[:, 2], -1, 1)
    turned = (across < 0) | ((across == 0) & (down < 0))
    down = np.where(across < 0, -down, np.where(across == 0, np.abs(down), down))
    context = np.where(across == 0, down, down + 3)
    found: NDArray[np.uint8] = (context | turned << 3).astype(np.uint8)
    return found


@lru_cache(maxsize=1)
def tables() -> NDArray[np.void]:
    """Return the tables, for `TABLES` of the kernels."""
    found = np.zeros(1, TABLES)
    found["transitions"], found["significance"] = _transitions(), _significance()
    found["signs"] = _signs()
    return found
