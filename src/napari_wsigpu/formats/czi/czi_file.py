"""Read the structure of a Zeiss CZI file: its subblocks, metadata and attachments.

A CZI file is a sequence of segments, each with a header of 32 bytes: a name and two sizes. Zeiss
calls the images of a mosaic *subblocks*.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from napari_wsigpu.model.geometry import Integers

MAGIC = b"ZISRAWFILE"
SEGMENT = 32
LARGEST_DIRECTORY, LARGEST_METADATA = 1 << 30, 64 << 20
MOST_SUBBLOCKS, MOST_DIMENSIONS, MOST_ATTACHMENTS = 1 << 22, 40, 1024
LETTERS = "XYCZTSMHRIBV"
ENTRY = [
    ("schema", "S2"),
    ("pixel_type", "<i4"),
    ("position", "<i8"),
    ("part", "<i4"),
    ("compression", "<i4"),
    ("rest", "V6"),
    ("count", "<i4"),
]
DIMENSION = np.dtype(
    [("name", "S4"), ("start", "<i4"), ("size", "<i4"), ("at", "<f4"), ("stored", "<i4")]
)
ATTACHMENT = np.dtype(
    [
        ("schema", "S2"),
        ("rest", "V10"),
        ("position", "<i8"),
        ("part", "<i4"),
        ("guid", "V16"),
        ("kind", "S8"),
        ("name", "S80"),
    ]
)


@dataclass(frozen=True)
class Subblocks:
    """The directory of subblocks, as arrays of int64 of shape (subblocks,).

    Attributes
    ----------
    pixel_type, compression
        Codes of the format.
    position
        Offset of the segment in the file.
    starts : Mapping of str to ndarray
        Start along each dimension of `LETTERS`; 0 if it is not stated.
    width, height
        Size in pixels of level 0.
    stored_width, stored_height
        Size of the stored image.
    """

    pixel_type: Integers
    position: Integers
    compression: Integers
    starts: Mapping[str, Integers]
    width: Integers
    height: Integers
    stored_width: Integers
    stored_height: Integers

    def __len__(self) -> int:
        return len(self.position)

    def __getitem__(self, chosen: Integers | NDArray[np.bool_]) -> Subblocks:
        """Select subblocks by index or mask."""
        return Subblocks(
            self.pixel_type[chosen],
            self.position[chosen],
            self.compression[chosen],
            {letter: values[chosen] for letter, values in self.starts.items()},
            self.width[chosen],
            self.height[chosen],
            self.stored_width[chosen],
            self.stored_height[chosen],
        )


class Attachment(NamedTuple):
    """A file within the file; offset and size are in bytes."""

    name: str
    kind: str
    offset: int
    size: int


class CziFile:
    """Reads the structure of a CZI file, which may be attached to another one.

    Parameters
    ----------
    file : file object
        The file, open for reading. The caller owns and closes it.
    size : int
        The file's size in bytes.
    base : int
        Offset of the CZI file within `file`.

    Raises
    ------
    ValueError
        If it is damaged.
    """

    def __init__(self, file: IO[bytes], size: int, base: int = 0) -> None:
        self._file, self._size, self._base = file, size, base
        head = self._segment(0, MAGIC, 80)
        self.directory, self.metadata = (
            int.from_bytes(head[start : start + 8], "little", signed=True) for start in (52, 60)
        )
        self.attachments = int.from_bytes(head[72:80], "little", signed=True)

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes at an offset from the start of this CZI file.

        Raises
        ------
        ValueError
            If they extend beyond the end of the file.
        """
        if offset < 0 or length < 0 or self._base + offset + length > self._size:
            raise ValueError("it is truncated, or an offset lies beyond its end")
        self._file.seek(self._base + offset)
        data = self._file.read(length)
        if len(data) < length:
            raise ValueError("it is truncated")
        return data

    def subblocks(self) -> Subblocks:
        """Return the directory of subblocks."""
        if self.directory <= 0:
            raise ValueError("it has no image directory; writing may have been interrupted")
        head = self._segment(self.directory, b"ZISRAWDIRECTORY", 128)
        count = int.from_bytes(head[:4], "little", signed=True)
        used = int.from_bytes(self.read(self.directory + 24, 8), "little", signed=True)
        if not 0 < count <= MOST_SUBBLOCKS or not 0 < used <= LARGEST_DIRECTORY:
            raise ValueError(f"its directory claims {count} images")
        data = np.frombuffer(self.read(self.directory + SEGMENT + 128, used - 128), np.uint8)
        starts, dimensions = _entries(data.tobytes(), count)
        return _parsed(data, starts, dimensions)

    def payloads(self, positions: Integers) -> tuple[Integers, Integers]:
        """Return the byte range of each subblock's pixels: offsets in the whole file, and lengths.

        An incomplete subblock gets the length 0 and the offset of the file's end.
        """
        offsets, lengths = np.full_like(positions, self._size), np.zeros_like(positions)
        for index, position in enumerate(positions.tolist()):
            try:
                head = self._segment(position, b"ZISRAWSUBBLOCK", 48)
            except ValueError:
                continue
            metadata = int.from_bytes(head[:4], "little", signed=True)
            size = int.from_bytes(head[8:16], "little", signed=True)
            entries = int.from_bytes(head[44:48], "little", signed=True)
            if not 0 <= entries <= MOST_DIMENSIONS or metadata < 0:
                continue
            start = self._base + position + SEGMENT + max(256, 48 + 20 * entries) + metadata
            if 0 < size <= self._size - start:
                offsets[index], lengths[index] = start, size
        return offsets, lengths

    def xml(self) -> str:
        """Return the XML metadata; an empty string if there is none."""
        if self.metadata <= 0:
            return ""
        head = self._segment(self.metadata, b"ZISRAWMETADATA", 8)
        size = int.from_bytes(head[:4], "little", signed=True)
        if not 0 <= size <= LARGEST_METADATA:
            raise ValueError("its metadata is too long")
        return self.read(self.metadata + SEGMENT + 256, size).decode("utf-8", "replace")

    def attached(self) -> Iterator[Attachment]:
        """Yield the attached files."""
        if self.attachments <= 0:
            return
        head = self._segment(self.attachments, b"ZISRAWATTDIR", 4)
        count = int.from_bytes(head[:4], "little", signed=True)
        if not 0 <= count <= MOST_ATTACHMENTS:
            raise ValueError(f"it claims {count} attachments")
        data = self.read(self.attachments + SEGMENT + 256, count * ATTACHMENT.itemsize)
        for entry in np.frombuffer(data, ATTACHMENT):
            position = int(entry["position"])
            head = self._segment(position, b"ZISRAWATTACH", 4)
            size = int.from_bytes(head[:4], "little", signed=True)
            kind, name = (entry[key].decode("utf-8", "replace") for key in ("kind", "name"))
            yield Attachment(name, kind, self._base + position + SEGMENT + 256, max(size, 0))

    def _segment(self, offset: int, name: bytes, length: int) -> bytes:
        """Return the first bytes of a segment's content; its name must match."""
        data = self.read(offset, SEGMENT + length)
        if data[:16].rstrip(b"\0") != name:
            raise ValueError(f"the segment {name.decode()} is missing")
        return data[SEGMENT:]


def _entries(data: bytes, count: int) -> tuple[Integers, Integers]:
    """Return the start and the number of dimensions of each entry of a directory."""
    offsets, dimensions = [], []
    offset = 0
    for _ in range(count):
        number = int.from_bytes(data[offset + 28 : offset + 32], "little", signed=True)
        if data[offset : offset + 2] != b"DV" or not 0 < number <= MOST_DIMENSIONS:
            raise ValueError("its image directory is damaged")
        offsets.append(offset)
        dimensions.append(number)
        offset += 32 + 20 * number
    if offset > len(data):
        raise ValueError("its image directory is truncated")
    return np.array(offsets, np.int64), np.array(dimensions, np.int64)


def _parsed(data: NDArray[np.uint8], offsets: Integers, dimensions: Integers) -> Subblocks:
    """Parse the entries at these offsets, all with the same number of dimensions at once."""
    names = ("pixel_type", "position", "compression", "part")
    found = {name: np.zeros(len(offsets), np.int64) for name in names}
    starts = {letter: np.zeros(len(offsets), np.int64) for letter in LETTERS}
    sizes = {key: np.zeros(len(offsets), np.int64) for key in ("X", "Y", "stored X", "stored Y")}
    for count in np.unique(dimensions).tolist():
        kind = np.dtype([*ENTRY, ("dimensions", DIMENSION, (count,))])
        chosen = np.flatnonzero(dimensions == count)
        table = data[offsets[chosen, None] + np.arange(kind.itemsize)].view(kind)[:, 0]
        for name in names:
            found[name][chosen] = table[name]
        for slot in table["dimensions"].T:
            for letter in LETTERS:
                here = slot["name"] == letter.encode()
                starts[letter][chosen[here]] = slot["start"][here]
                if letter in "XY":
                    stored = np.where(slot["stored"] > 0, slot["stored"], slot["size"])
                    sizes[letter][chosen[here]] = slot["size"][here]
                    sizes[f"stored {letter}"][chosen[here]] = stored[here]
    subblocks = Subblocks(
        found["pixel_type"],
        found["position"],
        found["compression"],
        starts,
        sizes["X"],
        sizes["Y"],
        sizes["stored X"],
        sizes["stored Y"],
    )
    sound = (found["part"] == 0) & (np.minimum(sizes["stored X"], sizes["stored Y"]) > 0)
    return subblocks[sound & (np.minimum(sizes["X"], sizes["Y"]) > 0)]
