"""Read the directory of an Olympus .ets file, which lists tiles with their coordinates."""

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

HEAD, INNER, SIZE = 64, 188, 8  # bytes of the two headers, and of the image size that may follow
MOST_DIMENSIONS = 16
RAW, BLUE_FIRST = 0, 4
COMPRESSIONS = {
    RAW: COMPRESSION.NONE,
    2: COMPRESSION.JPEG,
    3: COMPRESSION.JPEG2000,
    8: COMPRESSION.PNG,
    9: BMP,
}
TYPES = {
    1: "int8", 2: "uint8", 3: "int16", 4: "uint16", 5: "int32", 6: "uint32", 7: "int64",
    8: "uint64", 9: "float32", 10: "float64",
}  # fmt: skip


class Ets(NamedTuple):
    """The directory of an .ets file, and the encoding of its tiles.

    Attributes
    ----------
    compression, dtype, samples
        Encoding of the tiles.
    blue_first : bool
        Whether uncompressed colors are stored in the order blue, green, red.
    tile_width, tile_height : int
        Size of each tile in pixels.
    coordinates : ndarray of int64, shape (tiles, dimensions)
        Column, row, and position along the other dimensions.
    levels : ndarray of int64, shape (tiles,)
        Pyramid level of each tile.
    offsets, byte_counts : ndarray of int64, shape (tiles,)
        Byte range of each tile; an incomplete tile has the offset of the file's end.
    lost : int
        Number of incomplete tiles.
    size : tuple of int or None
        (width, height) of the image in pixels, if the file states it.
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
    """Read the directory of a file.

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
            raise ValueError(f"'{path.name}' is damaged, or not an .ets file")
        dimensions, inner = struct.unpack_from("<IQ", head, 12)
        directory, count = struct.unpack_from("<QI", head, 32)
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
                ("after", "V4"),
            ]
        )
        end = directory + count * record.itemsize
        if len(header) < INNER or header[:4] != b"ETS\0" or end > size:
            raise ValueError(f"'{path.name}' is truncated or damaged")
        file.seek(directory)
        table = np.frombuffer(file.read(count * record.itemsize), record)
    kind, samples, color, form, _, width, height = struct.unpack_from("<7I", header, 8)
    if form not in COMPRESSIONS or kind not in TYPES:
        raise UnsupportedSlideError(
            f"'{path.name}' holds tiles of an unsupported kind (compression {form}, type {kind}); "
            "export the slide with Olympus' software."
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
        form == RAW and color == BLUE_FIRST and samples == 3,
        width,
        height,
        coordinates[:, :-1] if pyramid and dimensions > 2 else coordinates,
        levels,
        np.where(lost, size, offsets),
        np.where(lost, 1, lengths),
        int(np.count_nonzero(lost)),
        (across, down) if min(across, down) > 0 else None,
    )
