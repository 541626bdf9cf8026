"""Olympus .ets files: tiles, each with its coordinates, behind one another."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from napari_wsigpu.model.errors import UnsupportedSlideError
from napari_wsigpu.model.limits import limits
from napari_wsigpu.model.tags import BMP, COMPRESSION

if TYPE_CHECKING:
    from pathlib import Path

    from napari_wsigpu.model.geometry import Integers

HEAD, INNER, SIZE = 64, 188, 8  # bytes; the last two numbers may be missing
MOST_DIMENSIONS = 16
COMPRESSIONS = {
    0: COMPRESSION.NONE,
    2: COMPRESSION.JPEG,
    3: COMPRESSION.JPEG2000,
    8: COMPRESSION.PNG,
    9: BMP,
}
TYPES = {
    1: "int8", 2: "uint8", 3: "int16", 4: "uint16", 5: "int32", 6: "uint32", 7: "int64",
    8: "uint64", 9: "float32", 10: "float64",
}  # fmt: skip
BLUE_FIRST = 4


class Ets(NamedTuple):
    """What a file holds.

    Attributes
    ----------
    compression, dtype, samples
        How each tile is encoded.
    blue_first : bool
        Whether uncompressed colours are stored in the order blue, green, red.
    tile_width, tile_height : int
        Size of each.
    coordinates : ndarray of int64, shape (tiles, dimensions)
        Column, row, and position along the further dimensions.
    levels : ndarray of int64, shape (tiles,)
        Which level of the pyramid each is of.
    offsets, byte_counts : ndarray of int64, shape (tiles,)
        Where it lies; the end of the file where it is not there as a whole.
    lost : int
        How many are not there as a whole.
    size : tuple of int or None
        (width, height) of the picture, where the file says it.
    """

    compression: int
    dtype: str
    samples: int
    blue_first: bool
    tile_width: int
    tile_height: int
    coordinates: Integers
    levels: Integers
    offsets: Integers
    byte_counts: Integers
    lost: int
    size: tuple[int, int] | None


def read_ets(path: Path) -> Ets:
    """Read which tiles a file holds.

    Raises
    ------
    ValueError
        If it is damaged.
    UnsupportedSlideError
        If its tiles can't be decoded.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(HEAD)
        if len(head) < HEAD or head[:4] != b"SIS\0":
            raise ValueError(f"'{path.name}' is no such file, or damaged")
        dimensions, inner = struct.unpack_from("<IQ", head, 12)
        begin, count = struct.unpack_from("<QI", head, 32)
        if not 2 <= dimensions <= MOST_DIMENSIONS or not 0 < count <= limits.tiles:
            raise ValueError(f"'{path.name}' claims {count} tiles of {dimensions} dimensions")
        file.seek(min(inner, size))
        header = file.read(INNER + SIZE)
        record = np.dtype(
            [
                ("before", "V4"),
                ("coordinates", "<i4", (dimensions,)),
                ("offset", "<i8"),
                ("size", "<u4"),
                ("behind", "V4"),
            ]
        )
        if len(header) < INNER or header[:4] != b"ETS\0" or begin + count * record.itemsize > size:
            raise ValueError(f"'{path.name}' is cut off or damaged")
        file.seek(begin)
        table = np.frombuffer(file.read(count * record.itemsize), record)
    kind, samples, color, form, _, width, height = struct.unpack_from("<7I", header, 8)
    if form not in COMPRESSIONS or kind not in TYPES:
        raise UnsupportedSlideError(
            f"'{path.name}' holds tiles of a kind that is not supported (compression {form}, type "
            f"{kind}); export the slide by Olympus' software."
        )
    if not 0 < min(width, height) <= max(width, height) < 1 << 20 or samples not in (1, 3):
        raise ValueError(f"'{path.name}' claims tiles of {width} x {height} x {samples} samples")
    stated = int.from_bytes(header[184:188], "little") >= 2 and len(header) == INNER + SIZE
    across, down = struct.unpack_from("<2I", header, INNER) if stated else (0, 0)
    pyramid = struct.unpack_from("<I", header, 152)[0] != 0
    coordinates = table["coordinates"].astype(np.int64)
    levels = coordinates[:, -1] if pyramid and dimensions > 2 else np.zeros(count, np.int64)
    offsets, lengths = table["offset"].astype(np.int64), table["size"].astype(np.int64)
    lost = (offsets < 0) | (offsets > size - lengths) | (lengths == 0)
    return Ets(
        COMPRESSIONS[form],
        TYPES[kind],
        samples,
        color == BLUE_FIRST,
        width,
        height,
        coordinates[:, :-1] if pyramid and dimensions > 2 else coordinates,
        levels,
        np.where(lost, size, offsets),
        np.where(lost, 1, lengths),
        int(np.count_nonzero(lost)),
        (across, down) if min(across, down) > 0 else None,
    )
